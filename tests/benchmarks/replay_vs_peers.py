"""Replay memories against each other: resident bytes of a transition, times of ``add`` and ``sample``.

    python tests/benchmarks/replay_vs_peers.py [--games Pong Breakout ...] [--json FILE] [--plot FILE]
    [--train]

Needs Linux and the extra ``all``; for the peers, ``pip install "sb3-extra-buffers[lz4,zstd]==0.5.0"``. Five
games take a quarter of an hour or more, and up to 7 GB of memory; ``--train`` adds two minutes.

Random play of each game is recorded once and played again as often as needed, each time moved to the right by
one column more, so that no frame comes twice. Each memory is measured in a fresh process of its own for each
game: what it takes, then its samples against those of SB3's default memory, in pairs, over the same
transitions. That both hold the same values is checked.
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import json
import logging
import multiprocessing
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from importlib.metadata import distributions
from pathlib import Path
from statistics import geometric_mean, median
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from gymnasium.wrappers import FrameStackObservation
from numpy.typing import NDArray
from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from stable_baselines3 import DQN
from stable_baselines3.common.buffers import ReplayBuffer

from gym_compress.commands.compare import (
    Recording,
    _resident,
    check_machine,
    machine,
    make_env,
    record,
)
from gym_compress.errors import GymCompressError
from gym_compress.sb3 import CompressedReplayBuffer

GAMES = ["Pong", "Breakout", "Seaquest", "MsPacman", "Enduro"]
FRAMES = 4_000  # recorded of each game
STACK = 4
SPACE = spaces.Box(0, 255, (STACK, 84, 84), np.uint8)
ACTIONS = spaces.Discrete(18)
SETTINGS: dict[str, Any] = {"observation_space": SPACE, "action_space": ACTIONS, "device": "cpu"}

COMPRESSED, DENSE = 60_000, 10_000  # transitions over which memory is measured
PORTION = 2_500  # transitions from one point of the curve of memory to the next
SAMPLED = 50_000  # transitions that samples are drawn from
PAIRS, WARMUP = 120, 20  # samples of each size, from each of two memories
TRAINED = 2_000  # steps of DQN
TRAINING: dict[str, Any] = {"buffer_size": 5_000, "learning_starts": 500, "train_freq": 4, "batch_size": 32}

PEERS = "sb3_extra_buffers", "lz4", "zstd"
PACKAGES = "gym-compress", "blosc2", "stable_baselines3", "numpy", "torch", *PEERS
INSTALL = 'pip install "sb3-extra-buffers[lz4,zstd]==0.5.0"'
NOTES = """\
By game: resident bytes of a transition. smaller: than SB3's default, geometric mean over the games. add:
microseconds, while filling for the first time. sample: microseconds, median, and how many times SB3's default,
median of pairs. Times are geometric means over the games."""
ZSTD_NOTE = """\
Bytes from the package zstd 1.5.7 keep all the room that they were compressed into, as much as the raw data
took; so sb3-extra-buffers with zstd saves no memory, short as these bytes are."""


def extra_buffer(rows: int, method: str) -> ReplayBuffer:
    logging.getLogger("sb3_extra_buffers").setLevel(logging.ERROR)  # else it lists on stdout what it found
    from sb3_extra_buffers.compressed import CompressedReplayBuffer as ExtraBuffer

    buffer: ReplayBuffer = ExtraBuffer(rows, **SETTINGS, compression_method=method)
    return buffer


DEFAULT, ONE_ARRAY = "SB3 ReplayBuffer", "SB3 optimize_memory_usage"
SHARED, AUTO, ZSTD = "frames shared, codec none", "gym_compress auto", "gym_compress zstd:1"
SB3 = partial(ReplayBuffer, **SETTINGS)
OURS = partial(CompressedReplayBuffer, **SETTINGS)
MEMORIES: dict[str, Callable[[int], ReplayBuffer]] = {
    DEFAULT: SB3,
    ONE_ARRAY: partial(SB3, optimize_memory_usage=True, handle_timeout_termination=False),
    "sb3-extra-buffers lz4-block": partial(extra_buffer, method="lz4-block"),
    "sb3-extra-buffers lz4-frame": partial(extra_buffer, method="lz4-frame"),
    "sb3-extra-buffers zstd": partial(extra_buffer, method="zstd"),
    SHARED: partial(OURS, codec="none"),
    AUTO: partial(OURS, codec="auto"),
    "gym_compress lz4:5": partial(OURS, codec="lz4:5"),
    ZSTD: partial(OURS, codec="zstd:1"),
    "gym_compress zstd:5": partial(OURS, codec="zstd:5"),
}


@dataclass(frozen=True)
class Measured:
    """What one memory took for one game; ratios are to SB3's default."""

    size: float  # resident bytes of a transition
    add_us: float
    sample32_us: float
    sample32_ratio: float
    sample256_us: float
    sample256_ratio: float
    curve: list[tuple[int, int]]  # transitions kept, and bytes by which the process had grown


Rows = dict[str, dict[str, Measured]]  # by memory, then by game


def transitions(recording: Recording, played: NDArray[np.uint8]) -> Iterator[tuple[Any, ...]]:
    """The arguments of ``add``, without an end; ``played`` is where the frames of a round are written."""
    stacks = np.moveaxis(np.lib.stride_tricks.sliding_window_view(played, STACK, axis=0), -1, 1)
    last = len(stacks) - 2
    for turn in itertools.count():
        played[...] = np.roll(recording.images[""], turn, axis=-1)
        for i in range(last + 1):
            done = np.array([recording.first[i + STACK] or i == last])
            action, reward = np.array([i % ACTIONS.n]), np.array([float(i)])
            yield stacks[i : i + 1], stacks[i + 1 : i + 2], action, reward, done, [{}]


def fill(buffer: ReplayBuffer, source: Iterator[tuple[Any, ...]], count: int) -> float:
    """Adds transitions, and returns how many seconds ``add`` took."""
    spent = 0.0
    for transition in itertools.islice(source, count):
        start = time.perf_counter()
        buffer.add(*transition)
        spent += time.perf_counter() - start
    return spent


def measure(name: str, folder: Path) -> Measured:
    """Measures one memory with one game; runs in a fresh process."""
    torch.set_num_threads(1)
    recording, make = Recording.load(folder), MEMORIES[name]
    played = recording.images[""].copy()
    fill(make(100), transitions(recording, played), 100)  # imports, and what is made once a process
    kept = DENSE if name in (DEFAULT, ONE_ARRAY) else COMPRESSED

    before = _resident()
    buffer, source = make(COMPRESSED), transitions(recording, played)
    spent, curve = 0.0, [(0, 0)]
    for count in range(PORTION, kept + 1, PORTION):
        spent += fill(buffer, source, PORTION)
        curve.append((count, _resident() - before))

    fill(buffer, source, max(SAMPLED - kept, 0))
    buffer.pos, buffer.full = SAMPLED, False  # samples are drawn from what the reference holds
    reference = buffer
    if name != DEFAULT:
        reference = MEMORIES[DEFAULT](SAMPLED)
        fill(reference, transitions(recording, played), SAMPLED)
    check_same(buffer, reference)
    samples = *sample(buffer, reference, 32), *sample(buffer, reference, 256)
    return Measured(curve[-1][1] / kept, spent / kept * 1e6, *samples, curve)


def check_same(buffer: ReplayBuffer, reference: ReplayBuffer) -> None:
    """Raises a ValueError if two memories differ; what follows the end of an episode does not count."""
    rows = np.random.default_rng(0).integers(SAMPLED - 1, size=512)
    ours, theirs = buffer._get_samples(rows), reference._get_samples(rows)
    goes_on = theirs.dones[:, 0] == 0
    for field in ("observations", "actions", "next_observations", "dones", "rewards"):
        kept = goes_on if field == "next_observations" else slice(None)
        if not torch.equal(getattr(ours, field)[kept], getattr(theirs, field)[kept]):
            raise ValueError(f"{field} differ from those of {DEFAULT}")


def sample(buffer: ReplayBuffer, reference: ReplayBuffer, size: int) -> tuple[float, float]:
    """Median microseconds of a sample, and the median of its ratio to one of the reference, in turn."""
    times, ratios = [], []
    for _ in range(WARMUP + PAIRS):
        start = time.perf_counter()
        reference.sample(size)
        middle = time.perf_counter()
        buffer.sample(size)
        end = time.perf_counter()
        times.append((end - middle) * 1e6)
        ratios.append((end - middle) / (middle - start))
    return median(times[WARMUP:]), median(ratios[WARMUP:])


def train(buffer_class: type[ReplayBuffer]) -> float:
    """Steps a second of DQN with a memory; runs in a fresh process."""
    torch.set_num_threads(1)
    env = FrameStackObservation(make_env("ALE/Pong-v5"), STACK)
    model = DQN("CnnPolicy", env, replay_buffer_class=buffer_class, seed=0, device="cpu", **TRAINING)
    start = time.perf_counter()
    model.learn(TRAINED)
    return TRAINED / (time.perf_counter() - start)


def in_fresh_process(function: Callable[..., Any], *args: Any) -> Any:
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as fresh:
        return fresh.submit(function, *args).result()


def record_game(game: str, folder: Path) -> None:
    with make_env(f"ALE/{game}-v5") as env:
        recording = record(env, FRAMES, 0, lambda: None)
    folder.mkdir()
    recording.save(folder)


def measure_all(names: list[str], games: list[str], progress: Progress) -> Rows:
    """Measures each memory with each game. One that fails has no row; a line on stderr says why."""
    rows: Rows = {name: {} for name in names}
    task = progress.add_task("", total=len(games) * len(names))
    with tempfile.TemporaryDirectory() as temporary:
        for game in games:
            progress.update(task, description=f"{game}: recording")
            folder = Path(temporary) / game
            record_game(game, folder)
            for name in list(rows):
                progress.update(task, description=f"{game}: {name}")
                try:
                    rows[name][game] = in_fresh_process(measure, name, folder)
                except Exception as error:
                    if name == DEFAULT:
                        raise
                    del rows[name]
                    progress.console.print(f"{name} fails with {game}: {type(error).__name__}: {error}")
                progress.advance(task)
    return rows


def train_all(progress: Progress) -> dict[str, float]:
    """Steps a second of DQN with SB3's memory and with ours, the best of two runs each, in turn."""
    classes = {DEFAULT: ReplayBuffer, AUTO: CompressedReplayBuffer}
    speeds = dict.fromkeys(classes, 0.0)
    for name in progress.track([*classes] * 2, description="training DQN"):
        speeds[name] = max(speeds[name], in_fresh_process(train, classes[name]))
    return speeds


def summary(row: dict[str, Measured], default: dict[str, Measured]) -> dict[str, float]:
    """Geometric means over the games."""
    columns = "add_us", "sample32_us", "sample32_ratio", "sample256_us", "sample256_ratio"
    means = {column: geometric_mean(getattr(game, column) for game in row.values()) for column in columns}
    return {"smaller": geometric_mean(default[game].size / row[game].size for game in row), **means}


def make_table(rows: Rows, games: list[str]) -> Table:
    table = Table(title="Replay memories of 4x84x84 uint8", box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("memory", no_wrap=True)
    for heading in (*games, "smaller", "add", "sample(32)", "sample(256)"):
        table.add_column(heading, justify="right", no_wrap=True)
    for name, row in rows.items():
        mean = summary(row, rows[DEFAULT])
        table.add_row(
            name,
            *[f"{row[game].size:,.0f}" for game in games],
            f"{mean['smaller']:,.1f}x",
            f"{mean['add_us']:,.0f}",
            *[f"{mean[f'sample{n}_us']:,.0f} {mean[f'sample{n}_ratio']:6.2f}x" for n in (32, 256)],
        )
    return table


def draw(rows: Rows, game: str, path: Path) -> None:
    """Draws memory against steps for one game, and writes it as a PNG."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import EngFormatter, StrMethodFormatter

    figure = Figure(figsize=(9, 5), layout="constrained")
    axes = figure.subplots()
    axes.set(yscale="log", xlim=(0, COMPRESSED), title=f"{game}: memory of a replay buffer")
    axes.set(xlabel="transitions kept (dashed: extrapolated)", ylabel="resident memory grown by")
    colours = {DEFAULT: "#5f6b76", SHARED: "#c77f2a", AUTO: "#2a7f62", ZSTD: "#2a5f9f"}
    place = 0.0
    for name in sorted(colours.keys() & rows, key=lambda name: rows[name][game].size):
        steps, grown = zip(*rows[name][game].curve[1:], strict=True)
        later = np.arange(steps[-1], COMPRESSED + 1, PORTION)
        end = rows[name][game].size * COMPRESSED
        axes.plot(steps, grown, color=colours[name], linewidth=2)
        axes.plot(later, later * rows[name][game].size, color=colours[name], linestyle="dashed")
        place = max(end, 1.5 * place)  # labels keep clear of each other
        label = f" {name}, {EngFormatter('B', places=1)(end)}"
        axes.annotate(label, (COMPRESSED, place), color=colours[name], va="center", annotation_clip=False)
    axes.yaxis.set_major_formatter(EngFormatter("B"))
    axes.xaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, format="png", dpi=120)


def report(rows: Rows, speeds: dict[str, float]) -> dict[str, Any]:
    """The figures as JSON holds them."""
    games = {name: {game: asdict(measured) for game, measured in row.items()} for name, row in rows.items()}
    means = {name: summary(row, rows[DEFAULT]) for name, row in rows.items()}
    figures = {"games": games, "means": means, "train_steps_per_second": speeds}
    return {**figures, "machine": machine(), "versions": versions()}


def versions() -> dict[str, str]:
    return {package.name: package.version for package in distributions() if package.name in PACKAGES}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--games", nargs="+", default=GAMES, metavar="GAME", help="names of ALE games")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures as JSON")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw memory for the first game, as PNG")
    parser.add_argument("--train", action="store_true", help="also measure steps a second of DQN")
    args = parser.parse_args()
    missing = [name for name in PEERS if importlib.util.find_spec(name) is None]
    names = [name for name in MEMORIES if not (missing and name.startswith("sb3-extra-buffers"))]

    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    try:
        check_machine()
        with Progress(*columns, console=Console(stderr=True)) as progress:
            rows = measure_all(names, args.games, progress)
            speeds = train_all(progress) if args.train else {}
    except GymCompressError as error:
        sys.exit(str(error))

    console = Console(width=140, highlight=False, markup=False)
    console.print(make_table(rows, args.games), NOTES, sep="")
    if missing:
        console.print(f"sb3-extra-buffers is left out, for want of {', '.join(missing)}: {INSTALL}")
    else:
        console.print(ZSTD_NOTE)
    for name, speed in speeds.items():
        console.print(f"DQN on Pong, {name}: {speed:,.1f} steps a second")
    console.print(machine(), ", ".join(" ".join(item) for item in versions().items()), sep="\n")
    if args.json:
        args.json.write_text(json.dumps(report(rows, speeds), indent=2) + "\n")
    if args.plot:
        draw(rows, args.games[0], args.plot)


if __name__ == "__main__":
    main()
