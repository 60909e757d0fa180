"""Replay memory on Ray: bytes on the wire and time, compressed and as arrays, beside a memory in this process.

    python tests/benchmarks/sharded.py [--games Pong Breakout Seaquest] [--shards 2]

Needs the extras ``atari`` and ``ray``. Starts Ray on this machine. Plays recordings of random play, 4x84x84 stacks, into
shards, and draws batches from them. *arrays* is what people write without this package: an actor with NumPy arrays of
frames, one frame for each transition, which stacks them for a batch, and to which writers send frames, 192 at once.
Medians of pairs in one process.
"""

from __future__ import annotations

import argparse
import pickle
import statistics
import time
from typing import Any

import gymnasium as gym
import numpy as np
import ray
from rich.console import Console
from rich.progress import track
from rich.table import Table

from gym_compress import CompressedReplayBuffer
from gym_compress.commands.compare import machine, make_env, record
from gym_compress.ray import ShardedReplay

SPACE = gym.spaces.Box(0, 255, (4, 84, 84), np.uint8)
ACTIONS = gym.spaces.Discrete(6)
STEPS = 6000
PARCEL = 192
REPEATS = 40


class Arrays:
    """A shard as people write it: frames in one array."""

    def __init__(self, size: int) -> None:
        self.frames = np.zeros((size, 84, 84), np.uint8)
        self.rewards = np.zeros(size, np.float32)
        self.count = 0

    def receive(self, frames: np.ndarray, rewards: np.ndarray) -> int:
        """Takes frames."""
        self.frames[self.count : self.count + len(frames)] = frames
        self.rewards[self.count : self.count + len(frames)] = rewards
        self.count += len(frames)
        return self.count

    def sample(self, rows: np.ndarray) -> Any:
        """Observations, next observations and rewards."""
        steps = rows[:, None] + np.arange(4)
        return self.frames[steps], self.frames[steps + 1], self.rewards[rows]


def median(function: Any) -> float:
    """Seconds of a call."""
    times = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        function()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def game_row(game: str, num_shards: int) -> list[str]:
    """What a game gives."""
    with make_env(f"ALE/{game}-v5") as env:
        frames = record(env, STEPS + 5, 0, lambda: None).images[""]
    stacks = np.lib.stride_tricks.sliding_window_view(frames, (4, 84, 84))[:, 0, 0]
    rng = np.random.default_rng(0)
    local = CompressedReplayBuffer(STEPS, SPACE, ACTIONS, None, seed=0)
    replay = ShardedReplay(STEPS, SPACE, ACTIONS, num_shards=num_shards, seed=0)
    dense = [ray.remote(Arrays).options(num_cpus=0).remote(STEPS) for _ in range(num_shards)]
    writers = [replay.writer(f"writer-{i}") for i in range(num_shards)]
    adding: dict[str, list[float]] = {"local": [], "sharded": [], "arrays": []}
    sent = []

    def step(add: Any, i: int) -> None:
        add(stacks[i][None], stacks[i + 1][None], np.array([i % 6]), np.array([i]), np.array([False]), [{}])

    for begin in range(0, STEPS - PARCEL, PARCEL):
        writer = writers[begin // PARCEL % num_shards]
        steps = range(begin, begin + PARCEL)
        start = time.perf_counter()
        for i in steps:
            step(local.add, i)
        adding["local"].append(time.perf_counter() - start)
        start = time.perf_counter()
        for i in steps:
            step(writer.add, i)
        adding["sharded"].append(time.perf_counter() - start)
        sent.append(len(pickle.dumps(local.take(np.arange(begin, begin + PARCEL)))) / PARCEL)
        start = time.perf_counter()
        shard = dense[begin // PARCEL % num_shards]
        ray.get(shard.receive.remote(frames[begin : begin + PARCEL], np.arange(PARCEL, dtype=np.float32)))
        adding["arrays"].append(time.perf_counter() - start)
    for writer in writers:
        writer.flush()

    wire = [len(pickle.dumps(replay.sample_compressed(32))) for _ in range(REPEATS)]
    held = min(ray.get([shard.receive.remote(frames[:0], np.zeros(0, np.float32)) for shard in dense])) - 5

    def from_arrays(size: int) -> Any:
        asked = [shard.sample.remote(rng.integers(held, size=size // num_shards)) for shard in dense]
        parts = ray.get(asked)
        return [np.concatenate(each) for each in zip(*parts, strict=True)]

    times: dict[str, float] = {"arrays": median(lambda: from_arrays(256))}
    with replay.batches(256) as batches:
        for _ in range(20):
            next(batches)
        times["batches"] = median(lambda: [next(batches) for _ in range(8)]) / 8
    times["local"] = median(lambda: local.sample(256))
    times["sample"] = median(lambda: replay.sample(256))
    replay.close()
    for shard in dense:
        ray.kill(shard)
    per_add = {name: statistics.median(values) / PARCEL * 1e6 for name, values in adding.items()}
    bare = 32 * 2 * 4 * 84 * 84
    return [
        game,
        f"{np.median(wire) / 1000:.1f} kB, 1/{bare / np.median(wire):.0f}",
        f"{np.median(sent):.0f} B, 1/{84 * 84 / np.median(sent):.0f}",
        f"{per_add['local']:.0f} / {per_add['sharded']:.0f} / {per_add['arrays']:.0f}",
        " / ".join(f"{times[name] * 1e3:.1f}" for name in ("local", "batches", "sample", "arrays")),
    ]


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--games", nargs="+", default=["Pong", "Breakout", "Seaquest"])
    parser.add_argument("--shards", type=int, default=2)
    args = parser.parse_args()
    ray.init(
        num_cpus=2,
        include_dashboard=False,
        object_store_memory=500 * 2**20,
        log_to_driver=False,
        _node_ip_address="127.0.0.1",
    )
    table = Table(title=f"{args.shards} shards; {machine()}")
    table.add_column("game")
    table.add_column("sample(32) on the wire")
    table.add_column("a transition from a writer")
    table.add_column("add, us: local / ReplayWriter / arrays")
    table.add_column("256 transitions, ms: local / batches / sample / arrays")
    for game in track(args.games):
        table.add_row(*game_row(game, args.shards))
    Console(width=160).print(table)
    ray.shutdown()


if __name__ == "__main__":
    main()
