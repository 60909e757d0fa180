"""DQN on an Atari game in the form of CleanRL: one file, with a compressed or a dense replay memory.

    python examples/cleanrl_dqn_atari.py --total-timesteps 20000 --learning-starts 1000
    python examples/cleanrl_dqn_atari.py --no-compressed ...
    python examples/cleanrl_dqn_atari.py --prefetch ...       # batches are decoded while the network learns

Needs the extra ``atari`` and PyTorch; ``--no-compressed`` needs the extra ``sb3``, whose replay buffer it
uses, and ``--tensorboard`` needs tensorboard. Both memories hold the same transitions and draw from them
uniformly, each with a generator of its own.
"""

import argparse
import random
import time
from contextlib import nullcontext
from dataclasses import dataclass, fields

import ale_py
import gymnasium as gym
import numpy as np
import torch
import torch.nn.functional as F
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from gymnasium.wrappers import AtariPreprocessing, ClipReward, FrameStackObservation, RecordEpisodeStatistics
from torch import nn, optim

from gym_compress import CompressedReplayBuffer


@dataclass
class Args:
    """Settings of the run."""

    env_id: str = "ALE/Pong-v5"
    """the game"""
    seed: int = 1
    """of everything"""
    total_timesteps: int = 1_000_000
    """steps of all environments together"""
    num_envs: int = 1
    """environments that are stepped side by side"""
    buffer_size: int = 1_000_000
    """transitions in the replay memory"""
    compressed: bool = True
    """whether the replay memory is compressed"""
    prefetch: bool = False
    """whether batches of the compressed memory are decoded ahead in the background"""
    learning_rate: float = 1e-4
    """of Adam"""
    gamma: float = 0.99
    """the discount"""
    target_network_frequency: int = 1000
    """steps of each environment between copies of the network to the target network"""
    batch_size: int = 32
    """transitions in a batch"""
    start_e: float = 1.0
    """the chance of a random action at the start"""
    end_e: float = 0.01
    """the chance of a random action at the end"""
    exploration_fraction: float = 0.1
    """the part of all steps in which it goes from one to the other"""
    learning_starts: int = 80_000
    """steps before the first update"""
    train_frequency: int = 4
    """steps of each environment between updates"""
    tensorboard: bool = False
    """whether to write curves to the folder runs"""


def make_env(env_id: str) -> gym.Env:
    """An Atari game with the usual preprocessing."""
    env = gym.make(env_id, frameskip=1)
    env = AtariPreprocessing(env)
    env = RecordEpisodeStatistics(env)
    env = ClipReward(env, -1.0, 1.0)
    return FrameStackObservation(env, 4)


class QNetwork(nn.Module):
    """The network of Mnih et al. (2015)."""

    def __init__(self, actions: int) -> None:
        super().__init__()
        self.network = nn.Sequential(
            nn.Conv2d(4, 32, 8, stride=4),
            nn.ReLU(),
            nn.Conv2d(32, 64, 4, stride=2),
            nn.ReLU(),
            nn.Conv2d(64, 64, 3, stride=1),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(3136, 512),
            nn.ReLU(),
            nn.Linear(512, actions),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Values of the actions, ``(batch, actions)``, for observations ``(batch, 4, 84, 84)``."""
        return self.network(x / 255.0)


def linear_schedule(start: float, end: float, duration: float, t: int) -> float:
    """From start to end within a duration, and then the end."""
    return max(start + (end - start) * t / duration, end)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    for field in fields(Args):
        name = f"--{field.name.replace('_', '-')}"
        if isinstance(field.default, bool):
            parser.add_argument(name, action=argparse.BooleanOptionalAction, default=field.default)
        else:
            parser.add_argument(name, type=type(field.default), default=field.default)
    args = Args(**vars(parser.parse_args()))
    if args.prefetch and not args.compressed:
        parser.error("--prefetch needs the compressed memory")

    random.seed(args.seed)
    np.random.seed(args.seed)  # noqa: NPY002 (SB3's buffer draws from it)
    torch.manual_seed(args.seed)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    gym.register_envs(ale_py)
    writer = None
    if args.tensorboard:
        from torch.utils.tensorboard import SummaryWriter

        writer = SummaryWriter(f"runs/{args.env_id.replace('/', '-')}__dqn__{args.seed}__{int(time.time())}")

    # env setup: an episode's last observation comes in the infos, the next episode's first with the same step
    envs = SyncVectorEnv(
        [lambda: make_env(args.env_id)] * args.num_envs, autoreset_mode=AutoresetMode.SAME_STEP
    )
    envs.single_action_space.seed(args.seed)
    actions_count = int(envs.single_action_space.n)
    q_network = QNetwork(actions_count).to(device)
    optimizer = optim.Adam(q_network.parameters(), lr=args.learning_rate)
    target_network = QNetwork(actions_count).to(device)
    target_network.load_state_dict(q_network.state_dict())

    if args.compressed:
        rb = CompressedReplayBuffer(
            args.buffer_size,
            envs.single_observation_space,
            envs.single_action_space,
            device,
            args.num_envs,
            handle_timeout_termination=False,
            seed=args.seed,
        )
    else:
        from stable_baselines3.common.buffers import ReplayBuffer

        rb = ReplayBuffer(
            args.buffer_size,
            envs.single_observation_space,
            envs.single_action_space,
            device,
            args.num_envs,
            handle_timeout_termination=False,
        )

    start_time = learning_since = time.time()
    loss = torch.zeros(())
    obs, _ = envs.reset(seed=args.seed)
    with rb.prefetch(args.batch_size) if args.prefetch else nullcontext() as batches:
        for global_step in range(0, args.total_timesteps, args.num_envs):
            # act
            epsilon = linear_schedule(
                args.start_e, args.end_e, args.exploration_fraction * args.total_timesteps, global_step
            )
            if random.random() < epsilon:
                actions = np.array([envs.single_action_space.sample() for _ in range(args.num_envs)])
            else:
                actions = q_network(torch.as_tensor(obs, device=device)).argmax(dim=1).cpu().numpy()
            next_obs, rewards, terminations, truncations, infos = envs.step(actions)

            # what follows the last observation of an episode is not the first one of the next
            real_next_obs = next_obs
            if "final_obs" in infos:
                real_next_obs = next_obs.copy()
                for i in np.flatnonzero(terminations | truncations):
                    real_next_obs[i] = infos["final_obs"][i]
                    episode = infos["final_info"]["episode"]
                    length, total = episode["l"][i], episode["r"][i]
                    print(f"step {global_step}, episode of {length} steps, return {total:.0f}")
                    if writer:
                        writer.add_scalar("charts/episodic_return", total, global_step)
            rb.add(obs, real_next_obs, actions, rewards, terminations, infos)
            obs = next_obs

            # learn
            if global_step <= args.learning_starts:
                learning_since, learning_step = time.time(), global_step
            else:
                if global_step // args.num_envs % args.train_frequency == 0:
                    data = next(batches) if args.prefetch else rb.sample(args.batch_size)
                    with torch.no_grad():
                        target_max, _ = target_network(data.next_observations).max(dim=1)
                        td_target = data.rewards.flatten() + args.gamma * target_max * (
                            1 - data.dones.flatten()
                        )
                    old_val = q_network(data.observations).gather(1, data.actions).squeeze(1)
                    loss = F.mse_loss(td_target, old_val)
                    optimizer.zero_grad()
                    loss.backward()
                    optimizer.step()
                    if writer and global_step % 100 == 0:
                        writer.add_scalar("losses/td_loss", loss, global_step)
                        writer.add_scalar("charts/SPS", global_step / (time.time() - start_time), global_step)
                if global_step // args.num_envs % args.target_network_frequency == 0:
                    target_network.load_state_dict(q_network.state_dict())

    sps = (args.total_timesteps - learning_step) / (time.time() - learning_since)
    filled = rb.size() / rb.buffer_size
    plain = rb.nbytes if args.compressed else rb.observations.nbytes + rb.next_observations.nbytes
    taken = rb.cbytes if args.compressed else plain * filled
    print(f"{sps:.1f} steps a second while learning, loss {loss.item():.5f}")
    print(f"replay memory {taken / 1e6:,.1f} MB, in arrays {plain * filled / 1e6:,.1f} MB")
    envs.close()
    if writer:
        writer.close()
