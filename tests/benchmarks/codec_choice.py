"""Codecs and chunk lengths against the size of a frame: the figures behind ``codec="auto"``.

    python tests/benchmarks/codec_choice.py [--envs ALE/Pong-v5 ...] [--sizes 84x84 84x84x3 ...] [--frames
    800]

Needs the extra ``atari``. Records environments under random play, resizes their images, and prints for each
size, as geometric means over the environments: the ratio of raw to compressed bytes, microseconds to encode a
frame, and the time to read 16 random stacks of 4 as a multiple of copying them from uncompressed memory.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
import time
from collections.abc import Callable

import cv2
import numpy as np
from rich.console import Console
from rich.progress import track
from rich.table import Table

from gym_compress import Codec, CompressedObservation, decompress_batch
from gym_compress.commands.compare import make_env, record
from gym_compress.errors import GymCompressError
from gym_compress.recorder import Recorder
from gym_compress.slicing import Slicing
from gym_compress.wrappers.compress import compress

CODECS = [
    Codec("lz4", 5),
    Codec("lz4hc", 2),
    Codec("lz4hc", 5),
    Codec("lz4hc", 9),
    Codec("zstd", 1),
    Codec("zstd", 3),
    Codec("zstd", 5),
]
SIZES = ["64x64", "84x84", "64x64x3", "84x84x3", "96x96x3", "128x128x3", "210x160x3"]
CHUNKS = [4, 8, 12, 16]


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
    slicing = Slicing(frames.shape[1:], frames.dtype, 1)
    recorder = Recorder(slicing, codec=codec, frames_per_chunk=frames_per_chunk)
    start = time.perf_counter()
    kept = [compress(recorder, frame) for frame in frames]
    recorder.seal()
    encode = (time.perf_counter() - start) / len(frames) * 1e6
    chunks = {id(obs.source): obs.source for obs in kept}.values()
    ratio = frames.nbytes / sum(chunk.cbytes for chunk in chunks)
    stacks: list[CompressedObservation] = [
        CompressedObservation.from_frames(kept[i : i + 4]) for i in range(len(kept) - 3)
    ]
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
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--envs", nargs="+", default=["ALE/Pong-v5", "ALE/Breakout-v5", "ALE/Seaquest-v5"])
    parser.add_argument("--sizes", nargs="+", default=SIZES)
    parser.add_argument("--frames", type=int, default=800)
    args = parser.parse_args()
    clips = []
    for env_id in args.envs:
        try:
            env = make_env(env_id, preprocess=False)
            images = record(env, args.frames, seed=0, advance=lambda: None).images
        except GymCompressError as error:
            sys.exit(str(error))
        clips.append(next(iter(images.values())))
        env.close()
    table = Table("frame", "bytes", "codec", *[f"{n} a chunk" for n in CHUNKS], title=", ".join(args.envs))
    for size in track(args.sizes, "measuring"):
        sized = [resized(frames, size) for frames in clips]
        for codec in CODECS:
            cells = []
            for frames_per_chunk in CHUNKS:
                ratios, encodes, reads = zip(
                    *[measure(clip, codec, frames_per_chunk) for clip in sized], strict=True
                )
                mean = statistics.geometric_mean
                cells.append(f"{mean(ratios):5.1f}x {mean(encodes):4.0f} us {mean(reads):4.1f}")
            table.add_row(size, str(sized[0][0].nbytes), str(codec), *cells)
        table.add_section()
    Console(width=130).print(table)


if __name__ == "__main__":
    main()
