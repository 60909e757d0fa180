"""MushroomRL's DQN trains on Pong; its replay memory holds compressed states in the place of LazyFrames.

    pip install -e ".[atari]" torch
    pip install tqdm scikit-learn pygame
    pip install --no-deps mushroom-rl==1.10.2
    python examples/mushroom_atari.py --steps 5000

MushroomRL 1.10.2 requires NumPy 1 on paper, and runs with NumPy 2: ``--no-deps`` passes its requirements
over, and the second line installs what its import needs beside NumPy, torch and OpenCV. A few thousand steps
show that the parts fit together; to play well takes millions.
"""

import pickle
import tracemalloc
from dataclasses import dataclass, fields
from typing import Any

import ale_py
import gymnasium as gym
import numpy as np
import torch
from mushroom_rl.algorithms.value.dqn import DQN
from mushroom_rl.approximators.parametric.torch_approximator import TorchApproximator
from mushroom_rl.core import Core, Environment, MDPInfo
from mushroom_rl.policy.td_policy import EpsGreedy
from mushroom_rl.utils.parameters import LinearParameter
from mushroom_rl.utils.replay_memory import ReplayMemory
from mushroom_rl.utils.spaces import Box, Discrete
from numpy.typing import NDArray
from torch import nn

from gym_compress import (
    CompressedAtariPreprocessing,
    CompressedFrameStack,
    CompressedObservation,
    decompress_batch,
)


@dataclass
class Args:
    """Settings of the run."""

    env_id: str = "ALE/Pong-v5"
    """the game"""
    steps: int = 5_000
    """of the agent, four frames of the game each; the first tenth only fills the memory"""
    memory: int = 1_000_000
    """how many transitions the replay memory holds at most"""
    batch: int = 32
    """how many transitions the network learns from at once"""
    train_every: int = 4
    """steps from one batch to the next"""
    target_every: int = 100
    """batches from one update of the target network to the next"""
    learning_rate: float = 1e-4
    """of Adam"""
    seed: int = 0
    """of the game, the network, the actions and the batches"""


class GymnasiumEnvironment(Environment):
    """A Gymnasium environment for MushroomRL, whose own class for Atari games needs the old ``gym``."""

    def __init__(self, env: gym.Env[CompressedObservation, Any]) -> None:
        states, actions = Box(0.0, 255.0, env.observation_space.shape), Discrete(int(env.action_space.n))
        super().__init__(MDPInfo(states, actions, gamma=0.99, horizon=np.inf))
        self.env = env

    def reset(self, state: None = None) -> CompressedObservation:
        """Starts an episode."""
        return self.env.reset()[0]

    def step(self, action: NDArray[Any]) -> tuple[CompressedObservation, float, bool, dict[str, Any]]:
        """The next state, the reward, whether that state is absorbing, and the info."""
        observation, reward, terminated, truncated, info = self.env.step(action[0])
        # MushroomRL has no word for truncation: it ends an episode in an absorbing state, after which no
        # reward is expected, or as soon as it is as long as the horizon, which is looked up after each step.
        self.info.horizon = 0 if truncated else np.inf
        return observation, float(reward), terminated, info


class CompressedReplayMemory(ReplayMemory):
    """MushroomRL's replay memory; only that it reads the compressed states of a batch in one go."""

    def get(self, n_samples: int) -> tuple[NDArray[Any], ...]:
        """States, actions, rewards, next states, absorbing and last flags of transitions drawn at random."""
        drawn = np.random.randint(self.size, size=n_samples)  # noqa: NPY002 (as the base class draws)
        # states and next states share frames: in one list, each chunk is decoded once
        states = decompress_batch([kept[i] for kept in (self._states, self._next_states) for i in drawn])
        others = (self._actions, self._rewards, self._absorbing, self._last)
        action, reward, absorbing, last = (np.array([kept[i] for i in drawn]) for kept in others)
        return states[:n_samples], action, reward, states[n_samples:], absorbing, last

    def report(self) -> str:
        """What the states take, measured on a copy of them, and what they would take otherwise."""
        states = self._states[: self.size] + self._next_states[: self.size]
        pickled = pickle.dumps(states)
        tracemalloc.start()
        _copy = pickle.loads(pickled)
        taken = tracemalloc.get_traced_memory()[0] / 1e6
        tracemalloc.stop()
        plain = len({id(state) for state in states}) * states[0].nbytes / 1e6  # most are in both lists
        lazy = plain / len(states[0])
        return (
            f"replay memory: {self.size:,} transitions, whose states take {taken:,.2f} MB\n"
            f"the same as LazyFrames: {lazy:,.1f} MB, {lazy / taken:,.0f} times as much\n"
            f"as plain arrays: {plain:,.1f} MB, {plain / taken:,.0f} times as much"
        )


class Network(nn.Module):
    """The values of actions, by the network of Mnih et al. (2015)."""

    def __init__(self, input_shape: tuple[int, ...], output_shape: tuple[int], **_: Any) -> None:
        super().__init__()
        convolutions = [nn.Conv2d(input_shape[0], 32, 8, 4), nn.Conv2d(32, 64, 4, 2), nn.Conv2d(64, 64, 3)]
        layers = [layer for convolution in convolutions for layer in (convolution, nn.ReLU())]
        layers += [nn.Flatten(-3), nn.LazyLinear(512), nn.ReLU(), nn.Linear(512, *output_shape)]
        self.layers = nn.Sequential(*layers)
        self(torch.zeros(input_shape))  # the lazy layer learns its size

    def forward(self, state: torch.Tensor, action: torch.Tensor | None = None) -> torch.Tensor:
        """The values of all actions in one state or many, or that of the action taken in each."""
        values = self.layers(state.float() / 255)
        return values if action is None else values.gather(1, action).squeeze(1)


def main(args: Args) -> None:
    """Trains, prints a line after each tenth of the steps, and at the end what the replay memory takes."""
    gym.register_envs(ale_py)
    np.random.seed(args.seed)  # noqa: NPY002 (MushroomRL draws from it)
    torch.manual_seed(args.seed)
    env = CompressedFrameStack(CompressedAtariPreprocessing(gym.make(args.env_id, frameskip=1)), stack_size=4)
    env.reset(seed=args.seed)
    mdp = GymnasiumEnvironment(env)
    tenth, actions = max(args.steps // 10, 1), mdp.info.action_space.n
    memory = CompressedReplayMemory(initial_size=tenth, max_size=args.memory)
    network = {
        "network": Network,
        "input_shape": mdp.info.observation_space.shape,
        "output_shape": (actions,),
        "n_actions": actions,
        "optimizer": {"class": torch.optim.Adam, "params": {"lr": args.learning_rate}},
        "loss": nn.functional.smooth_l1_loss,
    }
    policy = EpsGreedy(LinearParameter(1.0, threshold_value=0.1, n=5 * tenth))
    options = {"batch_size": args.batch, "target_update_frequency": args.target_every, "clip_reward": True}
    agent = DQN(mdp.info, policy, TorchApproximator, network, replay_memory=memory, **options)

    rewards: list[float] = []
    lasts: list[bool] = []

    def after_step(samples: list[Any]) -> None:
        _, _, reward, _, _, last = samples[0]
        rewards.append(reward)
        lasts.append(last)
        if len(rewards) % tenth == 0:
            mean = np.mean(rewards[-tenth:])
            print(f"{len(rewards):>9,} {mean:>+12.4f} {sum(lasts):>14,} {memory.size:>22,}", flush=True)

    print("    steps  mean reward  episodes ended  transitions in memory")
    core = Core(agent, mdp, callback_step=after_step)
    core.learn(n_steps=args.steps, n_steps_per_fit=args.train_every, quiet=True)
    env.close()
    print(memory.report())


if __name__ == "__main__":
    import argparse

    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    for field in fields(Args):
        parser.add_argument(
            f"--{field.name.replace('_', '-')}", type=type(field.default), default=field.default
        )
    main(Args(**vars(parser.parse_args())))
