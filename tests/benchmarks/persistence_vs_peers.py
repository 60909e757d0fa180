"""Ways to save a replay memory against each other: time, memory at its height, and bytes on the disk.

    python tests/benchmarks/persistence_vs_peers.py [--game Seaquest] [--transitions 20000] [--folder FOLDER]
    [--json FILE]

Needs Linux and the extra ``all``; takes two minutes and up to 4 GB of memory.

Random play of a game is recorded once and played again as often as needed, each time moved to the right by one
column more, so that no frame comes twice; as stacks of 4x84x84 grey frames, and as single frames of 3x64x64.
Each way is measured in a fresh process: the memory is filled, saved until all is on the disk (fsync), and
loaded again in another fresh process, which reads all. Memory is by how much the process grew at its height.
NumPy, torch and pickle get single frames, once each and without actions and rewards, which is the least that
they could save.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import pickle
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from gymnasium import spaces
from gymnasium.wrappers import AtariPreprocessing
from numpy.typing import NDArray
from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from stable_baselines3.common.buffers import ReplayBuffer
from stable_baselines3.common.save_util import load_from_pkl, save_to_pkl

from gym_compress.commands.compare import _resident, check_machine, machine
from gym_compress.errors import GymCompressError
from gym_compress.sb3 import CompressedReplayBuffer

RECORDED = 4_000
EPISODE = 1_000
ACTIONS = spaces.Discrete(18)
KINDS = {"4x84x84 grey stacks": (4, 84, False), "3x64x64 pixels": (1, 64, True)}
OURS, LATER, LAZY = "gym_compress", "gym_compress, 5 % new", "gym_compress, lazy=True"
NOTES = """\
save: until all is on the disk. load: all of it, in a fresh process; with lazy=True, opened and sampled 20 times.
grown: how much larger the process was at its height than before, in MB. 5 % new: a later save to the same file, after a
twentieth of the memory is new. Files of single frames have neither actions nor rewards."""


@dataclass(frozen=True)
class Measured:
    """What one way took."""

    save_s: float
    save_grown: int  # bytes
    size: int  # bytes
    load_s: float
    load_grown: int  # bytes


def record(game: str, kind: str, path: Path) -> None:
    """Records frames of random play, ``(RECORDED, *frame)``."""
    import ale_py

    _, size, colours = KINDS[kind]
    gym.register_envs(ale_py)
    env = AtariPreprocessing(
        gym.make(f"ALE/{game}-v5", frameskip=1), screen_size=size, grayscale_obs=not colours
    )
    env.action_space.seed(0)
    frames = []
    obs, _ = env.reset(seed=0)
    while len(frames) < RECORDED:
        frames.append(np.moveaxis(obs, -1, 0) if colours else obs)
        obs, _, terminated, truncated, _ = env.step(env.action_space.sample())
        if terminated or truncated:
            obs, _ = env.reset()
    np.save(path, np.stack(frames))


class Source:
    """The frames of transitions, without an end."""

    def __init__(self, path: Path, stack: int) -> None:
        self.recorded, self.stack = np.load(path), stack
        self.turn, self.moved = 0, self.recorded

    def frame(self, i: int) -> NDArray[np.uint8]:
        turn, at = divmod(i, RECORDED)
        if turn != self.turn:
            self.turn, self.moved = turn, np.roll(self.recorded, turn, axis=-1)
        frame: NDArray[np.uint8] = self.moved[at]
        return frame

    def observation(self, i: int) -> NDArray[np.uint8]:
        if self.stack == 1:
            return self.frame(i)
        return np.stack([self.frame(k) for k in range(i, i + self.stack)])

    def fill(self, buffer: ReplayBuffer, start: int, count: int) -> None:
        obs = self.observation(start)
        for i in range(start, start + count):
            following = self.observation(i + 1)
            done = np.array([i % EPISODE == EPISODE - 1])
            buffer.add(obs[None], following[None], np.array([i % 18]), np.array([float(i)]), done, [{}])
            obs = following


def grown(function: Callable[[], Any]) -> tuple[float, int, Any]:
    """Seconds of a call, by how many bytes the process grew at its height, and the result."""
    before = _resident()
    Path("/proc/self/clear_refs").write_text("5")
    start = time.perf_counter()
    result = function()
    seconds = time.perf_counter() - start
    status = Path("/proc/self/status").read_text()
    (height,) = [int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmHWM")]
    return seconds, max(height - before, 0), result


def sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)


def save_array(name: str, frames: NDArray[np.uint8], path: Path) -> None:
    if name == "np.savez_compressed":
        with path.open("wb") as file:
            np.savez_compressed(file, frames=frames)
    elif name == "torch.save":
        torch.save(torch.from_numpy(frames), path)
    elif name == "pickle":
        with path.open("wb") as file:
            pickle.dump(frames, file, protocol=5)
    else:
        kept = np.lib.format.open_memmap(path, "w+", frames.dtype, frames.shape)
        kept[...] = frames
        kept.flush()
    sync(path)


def load_array(name: str, path: Path) -> Any:
    if name == "np.savez_compressed":
        return np.load(path)["frames"]
    if name == "torch.save":
        return torch.load(path)
    if name == "pickle":
        with path.open("rb") as file:
            return pickle.load(file)
    return int(np.load(path, mmap_mode="r").sum())  # reads all


ARRAYS = ["np.savez_compressed", "torch.save", "pickle", "np.memmap"]
WAYS = [OURS, LATER, *ARRAYS, "SB3 save_replay_buffer"]


def save(name: str, kind: str, recorded: Path, count: int, path: Path) -> tuple[float, int]:
    """Fills a memory and saves it; runs in a fresh process."""
    source = Source(recorded, KINDS[kind][0])
    if name in ARRAYS:
        frames = np.stack([source.frame(i) for i in range(count)])
        small = path.with_suffix(".small")
        save_array(name, frames[:10], small)  # what is imported on first use
        return grown(lambda: save_array(name, frames, path))[:2]
    space = spaces.Box(0, 255, source.observation(0).shape, np.uint8)
    kwargs: dict[str, Any] = {"stack_size": KINDS[kind][0]} if name in (OURS, LATER) else {}
    cls = CompressedReplayBuffer if kwargs else ReplayBuffer
    save_all = CompressedReplayBuffer.save if kwargs else save_with_sb3
    small_buffer = cls(100, space, ACTIONS, "cpu", **kwargs)
    source.fill(small_buffer, 0, 50)
    save_all(small_buffer, path.with_suffix(".small"))
    buffer = cls(count, space, ACTIONS, "cpu", **kwargs)
    source.fill(buffer, 0, count)
    if name == LATER:
        save_all(buffer, path)
        source.fill(buffer, count, count // 20)
    return grown(lambda: save_all(buffer, path))[:2]


def save_with_sb3(buffer: ReplayBuffer, path: Path) -> None:
    save_to_pkl(path, buffer)
    sync(path)


def load(name: str, path: Path) -> tuple[float, int]:
    """Loads what was saved; runs in a fresh process."""

    def function(where: Path) -> Any:
        if name in ARRAYS:
            return load_array(name, where)
        if name == LAZY:
            buffer = CompressedReplayBuffer.load(where, device="cpu", lazy=True)
            for _ in range(20):
                buffer.sample(32)
            return buffer
        return (
            CompressedReplayBuffer.load(where, device="cpu")
            if name in (OURS, LATER)
            else load_from_pkl(where)
        )

    function(path.with_suffix(".small"))
    return grown(lambda: function(path))[:2]


def in_fresh_process(function: Callable[..., Any], *args: Any) -> Any:
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as fresh:
        return fresh.submit(function, *args).result()


def measure(kind: str, game: str, count: int, folder: Path, progress: Progress) -> dict[str, Measured]:
    rows = {}
    task = progress.add_task(f"{kind}: recording", total=len(WAYS) + 1)
    recorded = folder / "recorded.npy"
    record(game, kind, recorded)
    for name in WAYS:
        progress.update(task, description=f"{kind}: {name}")
        path = folder / f"{WAYS.index(name)}.saved"
        saved = in_fresh_process(save, name, kind, recorded, count, path)
        size = path.stat().st_size
        rows[name] = Measured(*saved, size, *in_fresh_process(load, name, path))
        if name == OURS:
            rows[LAZY] = Measured(*saved, size, *in_fresh_process(load, LAZY, path))
        path.unlink()
        progress.advance(task)
    progress.advance(task)
    return rows


def make_table(kind: str, count: int, rows: dict[str, Measured]) -> Table:
    table = Table(title=f"{count:,} transitions of {kind}", box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("way", no_wrap=True)
    for heading in ("save", "grown", "bytes a transition", "load", "grown"):
        table.add_column(heading, justify="right", no_wrap=True)
    for name, row in rows.items():
        saved = (f"{row.save_s:.3f} s", f"{row.save_grown / 1e6:,.1f} MB") if name != LAZY else ("", "")
        size = f"{row.size / count:,.0f}" if name != LAZY else ""
        table.add_row(name, *saved, size, f"{row.load_s:.3f} s", f"{row.load_grown / 1e6:,.1f} MB")
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--game", default="Seaquest", help="name of an ALE game")
    parser.add_argument("--transitions", type=int, default=20_000, metavar="N", help="how many are saved")
    parser.add_argument("--folder", type=Path, metavar="FOLDER", help="where files go meanwhile")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures as JSON")
    args = parser.parse_args()
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    try:
        check_machine()
    except GymCompressError as error:
        sys.exit(str(error))
    with (
        tempfile.TemporaryDirectory(dir=args.folder) as folder,
        Progress(*columns, console=Console(stderr=True)) as progress,
    ):
        tables = {kind: measure(kind, args.game, args.transitions, Path(folder), progress) for kind in KINDS}
    console = Console(width=120, highlight=False, markup=False)
    for kind, rows in tables.items():
        console.print(make_table(f"{args.game}, {kind}", args.transitions, rows))
    console.print(NOTES, machine(), sep="\n")
    if args.json:
        figures = {kind: {name: asdict(row) for name, row in rows.items()} for kind, rows in tables.items()}
        report = {"game": args.game, "transitions": args.transitions, "ways": figures, "machine": machine()}
        args.json.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
