"""MushroomRL's DQN learns Pong; its replay memory keeps compressed states in the place of LazyFrames.

    pip install -e ".[atari]" torch
    pip install --no-deps mushroom-rl==1.10.2
    pip install tqdm scikit-learn pygame
    python examples/mushroom_atari.py --steps 5000

MushroomRL 1.10.2 asks pip for NumPy 1, and runs with NumPy 2: ``--no-deps`` passes over what it asks for, and
the third line installs what its import needs beside NumPy, torch and OpenCV. A few thousand steps show that
all works together; to play well, DQN needs millions.
"""

import pickle
import tracemalloc
from dataclasses import dataclass
from typing import Any

import ale_py
import gymnasium as gym
import numpy as np
import torch
from mushroom_rl.algorithms.value.dqn import DQN
from mushroom_rl.approximators.parametric.torch_approximator import TorchApproximator
from mushroom_rl.core import Environment, MDPInfo
from mushroom_rl.policy.td_policy import EpsGreedy
from mushroom_rl.utils.parameters import LinearParameter
from mushroom_rl.utils.replay_memory import ReplayMemory
from mushroom_rl.utils.spaces import Box, Discrete
from numpy.typing import NDArray

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
    """of the agent, four frames of the game each; in the first tenth it only fills the memory"""
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
    gamma: float = 0.99
    """the discount factor"""
    seed: int = 0
    """of the game, the network, the actions and the batches"""


class GymnasiumEnvironment(Environment):
    """Today's Gymnasium as MushroomRL wants it (its own classes need ``gym`` of 2022); passes states on as they are.

    Args:
        env: An environment with Discrete actions, whose observations are :class:`CompressedObservation`.
        gamma: The discount factor.
    """

    def __init__(self, env: gym.Env[CompressedObservation, Any], gamma: float) -> None:
        assert isinstance(env.action_space, gym.spaces.Discrete)
        states = Box(0.0, 255.0, env.observation_space.shape)
        super().__init__(MDPInfo(states, Discrete(int(env.action_space.n)), gamma, horizon=np.inf))
        self.env = env
        self._seed: int | None = None

    def seed(self, seed: int) -> None:
        """Seeds the next reset; MushroomRL's own method calls ``env.seed``, which is gone."""
        self._seed = seed

    def reset(self, state: None = None) -> CompressedObservation:
        """Starts an episode."""
        observation, _ = self.env.reset(seed=self._seed)
        self._seed = None
        return observation

    def step(self, action: NDArray[Any]) -> tuple[CompressedObservation, float, bool, dict[str, Any]]:
        """The next state, the reward, whether the state is absorbing, and the info."""
        observation, reward, terminated, truncated, info = self.env.step(int(action[0]))
        # Core ends an episode at an absorbing state or at the horizon, for which it looks at each step. A
        # time limit is no absorbing state, or the agent would learn that nothing comes after it.
        self.info.horizon = 0 if truncated else np.inf
        return observation, float(reward), terminated, info


class CompressedReplayMemory(ReplayMemory):
    """A replay memory that decompresses a batch at once, and in all else is MushroomRL's."""

    def get(self, n_samples: int) -> tuple[NDArray[Any], ...]:
        """States, actions, rewards, next states, absorbing and last flags of transitions drawn at random."""
        drawn = np.random.randint(self.size, size=n_samples)  # noqa: NPY002 (as the base class draws)
        # states and next states share frames: in one list, each chunk is decoded once
        both = decompress_batch([kept[i] for kept in (self._states, self._next_states) for i in drawn])
        others = (self._actions, self._rewards, self._absorbing, self._last)
        action, reward, absorbing, last = (np.array([kept[i] for i in drawn]) for kept in others)
        return both[:n_samples], action, reward, both[n_samples:], absorbing, last


class Network(torch.nn.Module):
    """The value of each action, by the convolutions of Mnih et al. (2015)."""

    def __init__(self, input_shape: tuple[int, ...], output_shape: tuple[int], **_: Any) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(
            torch.nn.Conv2d(input_shape[0], 32, 8, stride=4),
            torch.nn.ReLU(),
            torch.nn.Conv2d(32, 64, 4, stride=2),
            torch.nn.ReLU(),
            torch.nn.Conv2d(64, 64, 3),
            torch.nn.ReLU(),
            torch.nn.Flatten(start_dim=-3),  # a state to act on comes without the axis of a batch
            torch.nn.LazyLinear(512),
            torch.nn.ReLU(),
            torch.nn.Linear(512, output_shape[0]),
        )
        self(torch.zeros(input_shape))  # tells the lazy layer its size

    def forward(self, state: torch.Tensor, action: torch.Tensor | None = None) -> torch.Tensor:
        """The values of all actions, or of the one taken in each state."""
        values = self.layers(state.float() / 255)
        return values if action is None else values.gather(1, action.long()).squeeze(1)


def bytes_of(states: Any) -> int:
    """Memory of observations with all that they refer to, Python objects included: that of a copy of them."""
    pickled = pickle.dumps(states)
    tracemalloc.start()
    _copy = pickle.loads(pickled)
    size, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return size


def main(args: Args) -> None:
    """Learns, prints a row after each tenth of the steps, and what the states in the memory take."""
    gym.register_envs(ale_py)
    np.random.seed(args.seed)  # noqa: NPY002 (MushroomRL draws from it)
    torch.manual_seed(args.seed)
    game = CompressedFrameStack(CompressedAtariPreprocessing(gym.make(args.env_id, frameskip=1)), 4)
    environment = GymnasiumEnvironment(game, args.gamma)
    environment.seed(args.seed)

    tenth = max(args.steps // 10, 1)
    memory = CompressedReplayMemory(initial_size=tenth, max_size=args.memory)
    actions = environment.info.action_space.n
    agent = DQN(
        environment.info,
        EpsGreedy(LinearParameter(1.0, threshold_value=0.1, n=max(args.steps // 2, 1))),
        TorchApproximator,
        approximator_params={
            "network": Network,
            "input_shape": environment.info.observation_space.shape,
            "output_shape": (actions,),
            "n_actions": actions,
            "optimizer": {"class": torch.optim.Adam, "params": {"lr": args.learning_rate}},
            "loss": torch.nn.functional.smooth_l1_loss,
        },
        batch_size=args.batch,
        target_update_frequency=args.target_every,
        replay_memory=memory,
        clip_reward=True,
    )
