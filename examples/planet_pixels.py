"""The experience replay of a model-based agent: single steps go in, sequences of 3x64x64 pixels come out.

    python examples/planet_pixels.py --episodes 20 --updates 200

Needs the extra ``atari`` and PyTorch. As in PlaNet (Hafner et al., 2019), a recurrent model learns to tell
rewards from sequences ``(length, batch)``; here it is a small one, since the memory is what this shows.
"""

import argparse
from dataclasses import dataclass, fields

import ale_py
import gymnasium as gym
import numpy as np
import torch
from gymnasium.wrappers import AtariPreprocessing, TimeLimit, TransformObservation
from rich.console import Console
from rich.table import Table
from torch import nn

from gym_compress import CompressedReplayBuffer


@dataclass
class Args:
    """Settings of the run."""

    env_id: str = "ALE/Breakout-v5"
    """the game"""
    episodes: int = 50
    """episodes of random play that are collected"""
    max_steps: int = 1000
    """steps after which an episode is cut off"""
    updates: int = 500
    """updates of the model"""
    batch_size: int = 16
    """sequences in a batch"""
    length: int = 20
    """steps in a sequence"""
    buffer_size: int = 100_000
    """steps in the memory"""
    seed: int = 0
    """of everything"""


class ExperienceReplay:
    """Memory of single steps, sampled in sequences with time in front."""

    def __init__(self, env: gym.Env, size: int, seed: int) -> None:
        # a single image is no stack; `stack_size=1` saves looking for one
        self.buffer = CompressedReplayBuffer(
            size, env.observation_space, env.action_space, "cpu", stack_size=1, seed=seed
        )

    def append(self, obs: np.ndarray, action: int, reward: float, next_obs: np.ndarray, done: bool) -> None:
        """Adds one step."""
        self.buffer.add(
            obs[None], next_obs[None], np.array([action]), np.array([reward]), np.array([done]), [{}]
        )

    def sample(self, batch_size: int, length: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Observations ``(length, batch, 3, 64, 64)`` uint8, actions and rewards ``(length, batch, 1)``."""
        samples = self.buffer.sample_sequences(batch_size, length)
        return tuple(
            part.transpose(0, 1) for part in (samples.observations, samples.actions, samples.rewards)
        )


class RewardModel(nn.Module):
    """Encodes pixels, remembers what it saw and did, and tells the reward of each step."""

    def __init__(self, actions: int) -> None:
        super().__init__()
        self.actions = actions
        self.encoder = nn.Sequential(
            nn.Conv2d(3, 16, 4, stride=2),
            nn.ReLU(),
            nn.Conv2d(16, 32, 4, stride=2),
            nn.ReLU(),
            nn.Conv2d(32, 32, 4, stride=2),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(32 * 6 * 6, 64),
        )
        self.memory = nn.GRU(64 + actions, 64)
        self.reward = nn.Linear(64, 1)

    def forward(self, pixels: torch.Tensor, actions: torch.Tensor) -> torch.Tensor:
        """Rewards ``(length, batch, 1)``."""
        encoded = self.encoder(pixels.flatten(0, 1) / 255 - 0.5).unflatten(0, pixels.shape[:2])
        chosen = nn.functional.one_hot(actions.squeeze(2), self.actions)
        remembered, _ = self.memory(torch.cat([encoded, chosen], dim=2))
        return self.reward(remembered)


def make_env(args: Args) -> gym.Env:
    """An Atari game in 64x64 pixels, colours first."""
    gym.register_envs(ale_py)
    env = AtariPreprocessing(gym.make(args.env_id, frameskip=1), screen_size=64, grayscale_obs=False)
    env = TimeLimit(env, args.max_steps)
    space = gym.spaces.Box(0, 255, (3, 64, 64), np.uint8)
    return TransformObservation(env, lambda obs: np.moveaxis(obs, 2, 0), space)


def main(args: Args) -> None:
    """Collects episodes, trains the model, and says what the memory takes."""
    torch.manual_seed(args.seed)
    env = make_env(args)
    env.action_space.seed(args.seed)
    replay = ExperienceReplay(env, args.buffer_size, args.seed)
    for episode in range(args.episodes):
        obs, _ = env.reset(seed=args.seed + episode)
        done = False
        while not done:
            action = env.action_space.sample()
            next_obs, reward, terminated, truncated, _ = env.step(action)
            done = terminated or truncated
            replay.append(obs, action, float(reward), next_obs, done)
            obs = next_obs
    env.close()

    model = RewardModel(int(env.action_space.n))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    losses = []
    for _ in range(args.updates):
        pixels, actions, rewards = replay.sample(args.batch_size, args.length)
        loss = nn.functional.mse_loss(model(pixels, actions), rewards)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())

    buffer = replay.buffer
    pixels = buffer.observations.nbytes * buffer.size() / buffer.buffer_size  # each image once
    table = Table("steps", "images take", "in an array", "first loss", "last loss")
    row = f"{buffer.size():,}", f"{buffer.observations.cbytes / 1e6:.2f} MB", f"{pixels / 1e6:,.1f} MB"
    table.add_row(*row, f"{losses[0]:.4f}", f"{np.mean(losses[-20:]):.4f}")
    Console().print(table)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    for field in fields(Args):
        parser.add_argument(
            f"--{field.name.replace('_', '-')}", type=type(field.default), default=field.default
        )
    main(Args(**vars(parser.parse_args())))
