"""PPO on an Atari game in the form of CleanRL: one file, rollouts of compressed or dense observations.

    python examples/cleanrl_ppo_atari.py --total-timesteps 20000
    python examples/cleanrl_ppo_atari.py --no-compressed ...

Needs the extra ``atari`` and PyTorch. ALE steps the games in threads of its own (``AtariVectorEnv``).
Compressed observations are decoded a minibatch at a time, into one tensor that is used again. Everything that
is computed is the same either way, so the losses are equal, digit by digit.
"""

import argparse
import random
import time
from dataclasses import dataclass, fields

import numpy as np
import torch
from ale_py import AtariVectorEnv
from torch import nn, optim
from torch.distributions.categorical import Categorical

from gym_compress import decompress_batch
from gym_compress.wrappers.vector import CompressObservation


@dataclass
class Args:
    """Settings of the run."""

    game: str = "pong"
    """the game, as ALE names its ROM"""
    seed: int = 1
    """of everything"""
    total_timesteps: int = 10_000_000
    """steps of all environments together"""
    num_envs: int = 8
    """environments that are stepped side by side"""
    num_steps: int = 128
    """steps of each environment in a rollout"""
    compressed: bool = True
    """whether the observations of a rollout are compressed"""
    learning_rate: float = 2.5e-4
    """of Adam, at the start; it goes down to zero"""
    gamma: float = 0.99
    """the discount"""
    gae_lambda: float = 0.95
    """the lambda of generalized advantage estimation"""
    num_minibatches: int = 4
    """minibatches that a rollout is cut into"""
    update_epochs: int = 4
    """how often each transition of a rollout is used"""
    clip_coef: float = 0.1
    """how far the policy may move from the one that acted"""
    ent_coef: float = 0.01
    """the weight of the entropy"""
    vf_coef: float = 0.5
    """the weight of the value loss"""
    max_grad_norm: float = 0.5
    """gradients are clipped to this norm"""


def layer_init(layer: nn.Module, std: float = 2**0.5) -> nn.Module:
    """Orthogonal weights and no bias."""
    nn.init.orthogonal_(layer.weight, std)
    nn.init.zeros_(layer.bias)
    return layer


class Agent(nn.Module):
    """The network of Mnih et al. (2015), with an actor and a critic on top."""

    def __init__(self, actions: int) -> None:
        super().__init__()
        self.network = nn.Sequential(
            layer_init(nn.Conv2d(4, 32, 8, stride=4)),
            nn.ReLU(),
            layer_init(nn.Conv2d(32, 64, 4, stride=2)),
            nn.ReLU(),
            layer_init(nn.Conv2d(64, 64, 3, stride=1)),
            nn.ReLU(),
            nn.Flatten(),
            layer_init(nn.Linear(3136, 512)),
            nn.ReLU(),
        )
        self.actor = layer_init(nn.Linear(512, actions), std=0.01)
        self.critic = layer_init(nn.Linear(512, 1), std=1)

    def forward(self, x: torch.Tensor) -> tuple[Categorical, torch.Tensor]:
        """The policy and the values, ``(batch,)``, of observations ``(batch, 4, 84, 84)``."""
        hidden = self.network(x / 255.0)
        return Categorical(logits=self.actor(hidden)), self.critic(hidden).flatten()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    for field in fields(Args):
        name = f"--{field.name.replace('_', '-')}"
        if isinstance(field.default, bool):
            parser.add_argument(name, action=argparse.BooleanOptionalAction, default=field.default)
        else:
            parser.add_argument(name, type=type(field.default), default=field.default)
    args = Args(**vars(parser.parse_args()))
    batch_size = args.num_envs * args.num_steps
    minibatch_size = batch_size // args.num_minibatches
    num_iterations = max(args.total_timesteps // batch_size, 1)

    random.seed(args.seed)
    torch.manual_seed(args.seed)
    rng = np.random.default_rng(args.seed)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")

    # env setup: stacks of 4 frames; the next episode's first observation comes with the same step
    envs = AtariVectorEnv(args.game, num_envs=args.num_envs, autoreset_mode="SameStep")
    if args.compressed:
        envs = CompressObservation(envs)
    agent = Agent(int(envs.single_action_space.n)).to(device)
    optimizer = optim.Adam(agent.parameters(), lr=args.learning_rate, eps=1e-5)

    # storage of a rollout: observations are kept as they come, or in a dense array, and one minibatch of them
    shape = envs.single_observation_space.shape
    kept: list = [None] * args.num_steps
    dense = None if args.compressed else np.zeros((args.num_steps, args.num_envs, *shape), np.uint8)
    minibatch = torch.zeros((minibatch_size, *shape), dtype=torch.uint8)
    actions = torch.zeros((args.num_steps, args.num_envs), dtype=torch.int64, device=device)
    logprobs, rewards, dones, values = torch.zeros((4, args.num_steps, args.num_envs), device=device)

    start_time = time.time()
    obs, _ = envs.reset(seed=args.seed)
    done = torch.zeros(args.num_envs, device=device)
    returns_so_far = np.zeros(args.num_envs)
    for iteration in range(num_iterations):
        optimizer.param_groups[0]["lr"] = (1 - iteration / num_iterations) * args.learning_rate

        # act
        for step in range(args.num_steps):
            if args.compressed:
                kept[step] = obs
            else:
                dense[step] = obs
            dones[step] = done
            with torch.no_grad():
                policy, values[step] = agent(torch.as_tensor(np.asarray(obs), device=device))
                actions[step] = policy.sample()
                logprobs[step] = policy.log_prob(actions[step])
            obs, reward, terminations, truncations, _ = envs.step(actions[step].cpu().numpy())
            rewards[step] = torch.as_tensor(reward, device=device)
            done = torch.as_tensor(terminations | truncations, device=device).float()
            returns_so_far += reward
            for i in np.flatnonzero(terminations | truncations):
                print(f"episode of environment {i}, return of clipped rewards {returns_so_far[i]:.0f}")
                returns_so_far[i] = 0

        # advantages (Schulman et al., 2016)
        with torch.no_grad():
            _, next_value = agent(torch.as_tensor(np.asarray(obs), device=device))
            advantages = torch.zeros_like(rewards)
            last = torch.zeros(args.num_envs, device=device)
            following = [*values[1:], next_value]
            ended = [*dones[1:], done]
            for t in reversed(range(args.num_steps)):
                delta = rewards[t] + args.gamma * following[t] * (1 - ended[t]) - values[t]
                last = delta + args.gamma * args.gae_lambda * (1 - ended[t]) * last
                advantages[t] = last
            returns = advantages + values

        # learn
        if args.compressed:
            observations = [observation for batch in kept for observation in batch]
        else:
            observations = dense.reshape(batch_size, *shape)
        b_actions, b_logprobs, b_advantages = actions.flatten(), logprobs.flatten(), advantages.flatten()
        b_returns, b_values = returns.flatten(), values.flatten()
        for _ in range(args.update_epochs):
            indices = rng.permutation(batch_size)
            for start in range(0, batch_size - minibatch_size + 1, minibatch_size):
                drawn = indices[start : start + minibatch_size]
                if args.compressed:
                    decompress_batch([observations[i] for i in drawn], out=minibatch.numpy())
                else:
                    np.take(observations, drawn, axis=0, out=minibatch.numpy())
                mb = torch.as_tensor(drawn, device=device)
                policy, new_values = agent(minibatch.to(device))
                ratio = (policy.log_prob(b_actions[mb]) - b_logprobs[mb]).exp()
                adv = b_advantages[mb]
                adv = (adv - adv.mean()) / (adv.std() + 1e-8)
                clipped = ratio.clamp(1 - args.clip_coef, 1 + args.clip_coef)
                pg_loss = -torch.min(adv * ratio, adv * clipped).mean()
                v_clipped = b_values[mb] + (new_values - b_values[mb]).clamp(-args.clip_coef, args.clip_coef)
                v_loss = (
                    0.5
                    * torch.max((new_values - b_returns[mb]) ** 2, (v_clipped - b_returns[mb]) ** 2).mean()
                )
                loss = pg_loss - args.ent_coef * policy.entropy().mean() + args.vf_coef * v_loss
                optimizer.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(agent.parameters(), args.max_grad_norm)
                optimizer.step()

        global_step = (iteration + 1) * batch_size
        sps = global_step / (time.time() - start_time)
        losses = f"policy loss {pg_loss.item():.8f}, value loss {v_loss.item():.8f}"
        print(f"step {global_step}, {losses}, {sps:.0f} steps a second")

    plain = batch_size * int(np.prod(shape))
    if args.compressed:
        taken = sum(observation.cbytes for observation in observations) / shape[0]  # neighbours share frames
        print(f"observations of a rollout take about {taken / 1e6:.1f} MB, in an array {plain / 1e6:.1f} MB")
    else:
        print(f"observations of a rollout take {plain / 1e6:.1f} MB")
    envs.close()
