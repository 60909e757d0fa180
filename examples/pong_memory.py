"""A random agent plays Pong and keeps every observation; watch what that takes.

    python examples/pong_memory.py --steps 20000

Needs the extra ``atari``. Plain stacking of a million steps would take 28 GB.
"""

from dataclasses import dataclass, fields
from typing import Any

import ale_py
import gymnasium as gym
import numpy as np
from rich.console import Console
from rich.live import Live
from rich.table import Table

from gym_compress import CompressedAtariPreprocessing, CompressedFrameStack, decompress_batch


@dataclass
class Args:
    """Settings of the run."""

    env_id: str = "ALE/Pong-v5"
    """the game"""
    steps: int = 1_000_000
    """how many observations are kept"""
    seed: int = 0
    """of the game, the actions and the batch"""


def resident() -> float:
    """Resident memory of this process in MB."""
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("VmRSS")) / 1e3


def main(args: Args) -> None:
    """Plays, prints a row after each tenth of the steps, and reads a batch at the end."""
    gym.register_envs(ale_py)
    env = CompressedFrameStack(CompressedAtariPreprocessing(gym.make(args.env_id, frameskip=1)), stack_size=4)
    env.action_space.seed(args.seed)
    env.reset(seed=args.seed)
    for _ in range(100):  # what the process takes anyway is there before it is measured
        env.step(env.action_space.sample())
    obs, _ = env.reset()
    kept: list[Any] = [obs]
    before = resident()

    table = Table("observations", "this process grew by", "plain stacks take", "smaller")
    console = Console()
    with Live(table, console=console):  # shows each row as it comes
        for step in range(1, args.steps):
            obs, _, terminated, truncated, _ = env.step(env.action_space.sample())
            if terminated or truncated:
                obs, _ = env.reset()
            kept.append(obs)
            if (step + 1) % max(args.steps // 10, 1) == 0:
                grown, plain = max(resident() - before, 0.1), len(kept) * obs.nbytes / 1e6
                table.add_row(
                    f"{len(kept):,}", f"{grown:,.1f} MB", f"{plain:,.1f} MB", f"{plain / grown:,.0f}x"
                )
    env.close()

    rng = np.random.default_rng(args.seed)
    batch = decompress_batch([kept[i] for i in rng.integers(len(kept), size=32)])
    console.print(f"\na batch for the network: {batch.shape}, {batch.dtype}")


if __name__ == "__main__":
    import argparse

    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    for field in fields(Args):
        parser.add_argument(
            f"--{field.name.replace('_', '-')}", type=type(field.default), default=field.default
        )
    main(Args(**vars(parser.parse_args())))
