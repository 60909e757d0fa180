"""Codecs and chunk lengths against the size of a frame: the figures behind ``codec="auto"``.

    python tests/benchmarks/codec_choice.py [--games Pong Breakout Seaquest] [--frames 1200]

Needs the extra ``atari``. For each size of frame it prints, over random play of the games, the geometric mean of the
ratio to raw frames, microseconds to encode a frame, and the time to read one random stack of 4 as a multiple of
copying it from uncompressed memory.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import time
from collections.abc import Callable

import ale_py
import cv2
import gymnasium as gym
import numpy as np
from rich.console import Console
from rich.progress import track
from rich.table import Table

from gym_compress import Codec, CompressedObservation, decompress_batch
from gym_compress.observation import FrameCompressor, stack

CODECS = [Codec("lz4", 5), Codec("lz4hc", 5), Codec("lz4hc", 9), Codec("zstd", 1), Codec("zstd", 3), Codec("zstd", 5)]
SIZES = ["64x64", "84x84", "64x64x3", "84x84x3", "96x96x3", "128x128x3", "210x160x3"]
CHUNKS = [4, 8, 12, 16]


def record(game: str, count: int) -> np.ndarray:
    """Frames of random play, one in four, as the emulator draws them: (count, 210, 160, 3) uint8."""
    env = gym.make(f"ALE/{game}-v5", frameskip=4)
    rng = np.random.default_rng(0)
    frames = [env.reset(seed=0)[0]]
    while len(frames) < count:
        obs, _, terminated, truncated, _ = env.step(rng.integers(env.action_space.n))
        frames.append(obs)
        if terminated or truncated:
            env.reset()
    env.close()
    return np.stack(frames)


def resized(frames: np.ndarray, size: str) -> np.ndarray:
    height, width, *colours = map(int, size.split("x"))
    if not colours:
        frames = np.stack([cv2.cvtColor(frame, cv2.COLOR_RGB2GRAY) for frame in frames])
    return np.stack([cv2.resize(frame, (width, height), interpolation=cv2.INTER_AREA) for frame in frames])


def microseconds(function: Callable[[], object], repeats: int) -> float:
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        function()
        times.append(time.perf_counter() - start)
    return statistics.median(times) * 1e6


def measure(frames: np.ndarray, codec: Codec, frames_per_chunk: int) -> tuple[float, float, float]:
    space = gym.spaces.Box(0, 255, frames.shape[1:], np.uint8)
    compress = FrameCompressor(space, codec=codec, frames_per_chunk=frames_per_chunk)
    start = time.perf_counter()
    kept = [compress(frame) for frame in frames]
    compress.seal()
    encode = (time.perf_counter() - start) / len(frames) * 1e6
    chunks = {id(obs._source): obs._source for obs in kept}.values()
    ratio = frames.nbytes / sum(chunk.cbytes for chunk in chunks)
    stacks: list[CompressedObservation] = [stack(kept[i : i + 4]) for i in range(len(kept) - 3)]
    rng = np.random.default_rng(0)
    picks = [[int(i) for i in rng.integers(len(stacks), size=16)] for _ in range(40)]
    out = np.empty((16, *stacks[0].shape), np.uint8)

    def copy(batch: list[int]) -> None:
        for row, i in zip(out, batch, strict=True):
            row[...] = frames[i : i + 4]

    turn = itertools.cycle(picks)
    ours = microseconds(lambda: decompress_batch([stacks[i] for i in next(turn)], out=out), 60)
    plain = microseconds(lambda: copy(next(turn)), 60)
    return ratio, encode, ours / plain


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--games", nargs="+", default=["Pong", "Breakout", "Seaquest"])
    parser.add_argument("--frames", type=int, default=1200)
    args = parser.parse_args()
    gym.register_envs(ale_py)
    played = [record(game, args.frames) for game in args.games]
    table = Table("frame", "bytes", "codec", *[f"{n} a chunk" for n in CHUNKS], title=", ".join(args.games))
    for size in track(SIZES, "measuring"):
        clips = [resized(frames, size) for frames in played]
        for codec in CODECS:
            cells = []
            for frames_per_chunk in CHUNKS:
                ratios, encodes, reads = zip(*[measure(c, codec, frames_per_chunk) for c in clips], strict=True)
                mean = statistics.geometric_mean
                cells.append(f"{mean(ratios):4.0f}x {mean(encodes):4.0f} us {mean(reads):4.1f}")
            table.add_row(size, str(clips[0][0].nbytes), str(codec), *cells)
        table.add_section()
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
