"""Where the time of an add, a sample and a step goes: a table of costs, in microseconds.

    python tests/benchmarks/costs.py [--games Pong Breakout Seaquest]

Needs Linux and the extra ``atari``. Plays recordings of random play back, so that neither the emulator nor a network is
timed, and takes the time of the functions that encode, decode, compare and copy while a replay memory of 4x84x84 stacks is
filled and sampled, a frame stack steps, and 8 environments' stacks are compressed. ``append`` copies frames into chunks,
``gather`` pieces of decoded chunks into a batch; the rest is Python, checks, and what is copied to be compared with. For a
sample, the limit is what it takes to write its bytes: into new memory, as samples are, and into memory that is used again.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import gymnasium as gym
import numpy as np
from rich.console import Console
from rich.progress import track
from rich.table import Table

import gym_compress.chunk
import gym_compress.replay.index
from gym_compress import Codec, CompressedFrameStack, CompressedReplayBuffer
from gym_compress.commands.compare import Replay, machine, make_env, record
from gym_compress.recorder import Recorder
from gym_compress.slicing import Slicing

SPACE = gym.spaces.Box(0, 255, (4, 84, 84), np.uint8)
FRAMES = 6000
PARTS = ["encode", "decode", "compare", "append", "gather"]
TIMED = {
    "encode": [(Codec, "encode")],
    "decode": [(gym_compress.chunk, "decode")],
    "compare": [(Recorder, "find_shift")],
    "append": [(Recorder, "append")],
    "gather": [(gym_compress.replay.index, "read_pieces")],
}


@contextmanager
def timed() -> Iterator[dict[str, float]]:
    """Seconds that are spent in each part, meanwhile."""
    spent: dict[str, float] = defaultdict(float)
    before = [(owner, name, getattr(owner, name)) for places in TIMED.values() for owner, name in places]

    def stopwatch(part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                spent[part] += time.perf_counter() - start

        return call

    for part, places in TIMED.items():
        for owner, name in places:
            setattr(owner, name, stopwatch(part, getattr(owner, name)))
    try:
        yield spent
    finally:
        for owner, name, function in before:
            setattr(owner, name, function)


def costs(function: Callable[[], object], repeats: int) -> dict[str, float]:
    """Microseconds of a call, in all and by part."""
    start = time.perf_counter()
    with timed() as spent:
        for _ in range(repeats):
            function()
        spent["total"] = time.perf_counter() - start
    spent["append"] -= spent["encode"]  # full chunks are encoded there
    spent["gather"] -= spent["decode"]
    return {part: seconds / repeats * 1e6 for part, seconds in spent.items()}


def median(function: Callable[[], object]) -> float:
    times = []
    for _ in range(200):
        start = time.perf_counter()
        function()
        times.append(time.perf_counter() - start)
    return statistics.median(times) * 1e6


def measure(game: str) -> dict[str, dict[str, float]]:
    with make_env(f"ALE/{game}-v5") as env:
        recording = record(env, FRAMES, 0, lambda: None)
    stacks = np.lib.stride_tricks.sliding_window_view(recording.images[""], (4, 84, 84))[:, 0, 0]
    stacks = np.ascontiguousarray(stacks)
    buffer = CompressedReplayBuffer(5000, SPACE, gym.spaces.Discrete(18), None, seed=0)
    zero, turn = np.zeros(1), iter(range(len(stacks) - 1))

    def add() -> None:
        i = next(turn)
        buffer.add(stacks[i : i + 1], stacks[i + 1 : i + 2], zero, zero, zero, [{}])

    found = {"add": costs(add, 5000)}
    for size in (32, 256):
        for _ in range(20):
            buffer.sample(size)
        found[f"sample({size})"] = costs(lambda size=size: buffer.sample(size), 300)
        source = np.ones((size, 5, 84, 84), np.uint8)  # frames of obs and next_obs, once each
        out = np.empty_like(source)
        found[f"sample({size})"]["new memory"] = median(source.copy)
        found[f"sample({size})"]["used again"] = median(lambda out=out, source=source: np.copyto(out, source))
    bare, wrapped = Replay(recording), CompressedFrameStack(Replay(recording), 4)
    bare.reset(), wrapped.reset()
    step = costs(lambda: wrapped.step(0), 3000)
    step["total"] -= costs(lambda: bare.step(0), 3000)["total"]
    found["CompressedFrameStack, step"] = step

    recorders = [Recorder(Slicing(SPACE.shape, SPACE.dtype, 4), quick=True) for _ in range(8)]
    starts, place = np.arange(8) * 600, iter(range(FRAMES))

    def record_all() -> None:
        slices = recorders[0].slicing.cut(stacks[starts + next(place)])
        for recorder, own in zip(recorders, slices, strict=True):
            recorder.record(own)
            recorder.newest()

    found["8 environments, step"] = costs(record_all, 600)
    found["8 environments, step"]["total"] -= costs(lambda: stacks[starts + 1], 200)["total"]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--games", nargs="+", default=["Pong", "Breakout", "Seaquest"])
    args = parser.parse_args()
    columns = ["total", *PARTS, "rest", "new memory", "used again"]
    table = Table("game", "us", *columns, title=machine())
    for game in track(args.games, "measuring"):
        for what, parts in measure(game).items():
            parts["rest"] = parts["total"] - sum(parts.get(part, 0) for part in PARTS)
            cells = [f"{parts[name]:,.1f}" if parts.get(name, 0) > 0.05 else "" for name in columns]
            table.add_row(game, what, *cells)
        table.add_section()
    Console(width=140).print(table)


if __name__ == "__main__":
    main()
