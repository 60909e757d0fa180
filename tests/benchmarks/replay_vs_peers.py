"""Replay memories against each other: resident bytes of a transition, and times of ``add`` and ``sample``.

    python tests/benchmarks/replay_vs_peers.py [--games Pong Breakout ...] [--json FILE] [--plot FILE]
    [--train]

Needs Linux and the extra ``all``. To have the peers measured as well:

    pip install "sb3-extra-buffers[lz4,zstd]==0.5.0"

Five games take a quarter of an hour and up to 8 GB of memory; ``--train`` adds two minutes.

Random play of each game is recorded once and played again as often as needed, each time moved to the right by
one column more, so that no frame comes twice. Each memory is measured in a fresh process of its own for each
game, first its resident memory, then its samples against those of SB3's default memory, in pairs, over the
same transitions. That both give the same values is checked.
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import json
import logging
import multiprocessing
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
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

from gym_compress import sb3
from gym_compress.compare import CompareError, Recording, _resident, check_machine, machine, make_env, record

GAMES = ["Pong", "Breakout", "Seaquest", "MsPacman", "Enduro"]
FRAMES = 4_000  # recorded of each game
STACK = 4
SPACE = spaces.Box(0, 255, (STACK, 84, 84), np.uint8)
ACTIONS = spaces.Discrete(18)

COMPRESSED, DENSE = 60_000, 10_000  # transitions over which memory is measured
PORTION = 2_500  # transitions from one point of the curve of memory to the next
SAMPLED = 50_000  # transitions that samples are drawn from
BATCHES = (32, 256)
PAIRS = 60  # samples of each size, of each of the two memories
TRAINED = 2_000  # steps of DQN

PEERS = "sb3_extra_buffers", "lz4", "zstd"
INSTALL = 'pip install "sb3-extra-buffers[lz4,zstd]==0.5.0"'
VERSIONS = "gym-compress", "stable-baselines3", "sb3-extra-buffers", "lz4", "zstd", "blosc2", "torch", "numpy"
NOTES = """\
bytes: resident memory of a transition, by game; smaller: than SB3's default, geometric mean over the games; add:
microseconds, while filling for the first time; sample: microseconds, median, and how many times that of SB3's default
it is, median of pairs. Times are geometric means over the games."""


def extra_buffer(rows: int, method: str) -> ReplayBuffer:
    """The compressed buffer of sb3-extra-buffers, with the method's own level."""
    logging.getLogger("sb3_extra_buffers").setLevel(logging.ERROR)  # it lists on stdout what is not installed
    from sb3_extra_buffers.compressed import CompressedReplayBuffer, find_buffer_dtypes

    dtypes = find_buffer_dtypes(SPACE.shape, SPACE.dtype, method)
    return CompressedReplayBuffer(
        rows, SPACE, ACTIONS, "cpu", dtypes=dtypes, compression_method=method, normalize_images=False
    )


def sb3_buffer(rows: int, **kwargs: Any) -> ReplayBuffer:
    return ReplayBuffer(rows, SPACE, ACTIONS, "cpu", **kwargs)


def our_buffer(rows: int, codec: str) -> ReplayBuffer:
    return sb3.CompressedReplayBuffer(rows, SPACE, ACTIONS, "cpu", codec=codec)


DEFAULT, SHARED = "SB3 ReplayBuffer", "gym_compress none (shared frames)"
ONE_ARRAY = "SB3 optimize_memory_usage"
MEMORIES: dict[str, Callable[[int], ReplayBuffer]] = {
    DEFAULT: sb3_buffer,
    ONE_ARRAY: partial(sb3_buffer, optimize_memory_usage=True, handle_timeout_termination=False),
    **{
        f"sb3-extra-buffers {method}": partial(extra_buffer, method=method)
        for method in ("lz4-block", "lz4-frame", "zstd")
    },
    SHARED: partial(our_buffer, codec="none"),
    **{
        f"gym_compress {codec}": partial(our_buffer, codec=codec)
        for codec in ("auto", "lz4:5", "zstd:1", "zstd:5")
    },
}


@dataclass(frozen=True)
class Measured:
    """What one memory took for one game.

    Attributes:
        size: Resident bytes of a transition.
        add_us: Microseconds of a call of ``add``.
        sample_us: Microseconds of ``sample``, for each size of a batch.
        sample_ratio: The same as a multiple of SB3's default.
        curve: How many transitions were kept, and by how many bytes the process had grown.
    """

    size: float
    add_us: float
    sample_us: dict[int, float]
    sample_ratio: dict[int, float]
    curve: list[tuple[int, int]]


def transitions(recording: Recording, played: NDArray[np.uint8]) -> Iterator[tuple[Any, ...]]:
    """The arguments of ``add``, without an end; ``played`` is where the frames of a round are written."""
    frames, first = recording.images[""], recording.first
    stacks = np.moveaxis(np.lib.stride_tricks.sliding_window_view(played, STACK, axis=0), -1, 1)
    last = len(stacks) - 2
    for turn in itertools.count():
        played[...] = np.roll(frames, turn, axis=-1)
        for i in range(last + 1):
            done = np.array([first[i + STACK] or i == last])
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
    buffer.pos, buffer.full = SAMPLED, False  # samples come from what SB3's buffer holds as well
    reference = buffer
    if name != DEFAULT:
        reference = MEMORIES[DEFAULT](SAMPLED)
        fill(reference, transitions(recording, played), SAMPLED)
    check_same(buffer, reference)
    samples = {size: sample(buffer, reference, size) for size in BATCHES}
    return Measured(
        curve[-1][1] / kept,
        spent / kept * 1e6,
        {size: us for size, (us, _) in samples.items()},
        {size: ratio for size, (_, ratio) in samples.items()},
        curve,
    )


def check_same(buffer: ReplayBuffer, reference: ReplayBuffer) -> None:
    """Raises a ValueError where two memories differ; what follows the end of an episode does not count."""
    rows = np.random.default_rng(0).integers(SAMPLED - 1, size=512)
    ours, theirs = buffer._get_samples(rows), reference._get_samples(rows)
    goes_on = theirs.dones[:, 0] == 0
    for field in ours._fields:
        one, other = getattr(ours, field), getattr(theirs, field)
        if one is not None and field == "next_observations":
            one, other = one[goes_on], other[goes_on]
        if one is not None and not torch.equal(one, other):
            raise ValueError(f"{field} differ from those of {DEFAULT}")


def sample(buffer: ReplayBuffer, reference: ReplayBuffer, size: int) -> tuple[float, float]:
    """Median microseconds of a sample, and the median of its ratio to one of the reference, in turn."""
    times, ratios = [], []
    for _ in range(PAIRS):
        start = time.perf_counter()
        reference.sample(size)
        middle = time.perf_counter()
        buffer.sample(size)
        end = time.perf_counter()
        times.append((end - middle) * 1e6)
        ratios.append((end - middle) / (middle - start))
    return statistics.median(times), statistics.median(ratios)


def train(buffer_class: type[ReplayBuffer]) -> float:
    """Steps a second of DQN with a memory; runs in a fresh process."""
    torch.set_num_threads(1)
    env = FrameStackObservation(make_env("ALE/Pong-v5"), STACK)
    model = DQN(
        "CnnPolicy",
        env,
        buffer_size=5_000,
        learning_starts=500,
        train_freq=4,
        batch_size=32,
        replay_buffer_class=buffer_class,
        seed=0,
        device="cpu",
    )
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


def measure_all(names: list[str], games: list[str], progress: Progress) -> dict[str, dict[str, Measured]]:
    """Each memory with each game. A memory that fails has no row; a line says why."""
    rows: dict[str, dict[str, Measured]] = {name: {} for name in names}
    task = progress.add_task("", total=len(games) * len(names))
    with tempfile.TemporaryDirectory() as temporary:
        for game in games:
            progress.update(task, description=f"{game}: recording")
            record_game(game, folder := Path(temporary) / game)
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
    runs: dict[str, list[float]] = {DEFAULT: [], "gym_compress auto": []}
    task = progress.add_task("training DQN", total=4)
    for _ in range(2):
        for name, buffer_class in zip(runs, (ReplayBuffer, sb3.CompressedReplayBuffer), strict=True):
            runs[name].append(in_fresh_process(train, buffer_class))
            progress.advance(task)
    return {name: max(speeds) for name, speeds in runs.items()}


def summary(row: dict[str, Measured], default: dict[str, Measured]) -> dict[str, float]:
    """Geometric means over the games."""

    def mean(value: Callable[[str], float]) -> float:
        return statistics.geometric_mean(map(value, row))

    means = {
        "smaller": mean(lambda game: default[game].size / row[game].size),
        "add_us": mean(lambda game: row[game].add_us),
    }
    for size in BATCHES:
        means[f"sample{size}_us"] = mean(lambda game, size=size: row[game].sample_us[size])
        means[f"sample{size}_ratio"] = mean(lambda game, size=size: row[game].sample_ratio[size])
    return means


def make_table(rows: dict[str, dict[str, Measured]], games: list[str]) -> Table:
    table = Table(title="Replay memories, 4x84x84 uint8", box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("memory", no_wrap=True)
    for heading in (*games, "smaller", "add", *(f"sample({size})" for size in BATCHES)):
        table.add_column(heading, justify="right", no_wrap=True)
    for name, row in rows.items():
        means = summary(row, rows[DEFAULT])
        table.add_row(
            name,
            *[f"{row[game].size:,.0f}" for game in games],
            f"{means['smaller']:,.1f}x",
            f"{means['add_us']:,.0f}",
            *[f"{means[f'sample{n}_us']:,.0f} {means[f'sample{n}_ratio']:6.2f}x" for n in BATCHES],
        )
    return table


def draw(rows: dict[str, dict[str, Measured]], game: str, path: Path) -> None:
    """Draws memory against steps for one game, and writes it as a PNG."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import EngFormatter, StrMethodFormatter

    figure = Figure(figsize=(9, 5), layout="constrained")
    axes = figure.subplots()
    colours = {
        DEFAULT: "#9aa5b1",
        SHARED: "#c77f2a",
        "gym_compress auto": "#2a7f62",
        "gym_compress zstd:1": "#2a5f9f",
    }
    lowest = 0.0
    for name in sorted(set(colours) & set(rows), key=lambda name: rows[name][game].size):
        steps, grown = zip(*rows[name][game].curve[1:], strict=True)
        end = grown[-1] / steps[-1] * COMPRESSED
        axes.plot(steps, grown, color=colours[name], linewidth=2)
        axes.plot([steps[-1], COMPRESSED], [grown[-1], end], color=colours[name], linestyle="dashed")
        lowest = max(end, 1.6 * lowest)  # labels keep clear of each other
        label = f" {name}: {EngFormatter('B', places=1)(end)}"
        axes.annotate(label, (COMPRESSED, lowest), color=colours[name], va="center", annotation_clip=False)
    axes.set_yscale("log")
    axes.set_xlim(0, COMPRESSED)
    axes.yaxis.set_major_formatter(EngFormatter("B"))
    axes.xaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    axes.set_xlabel("transitions kept (dashed: extrapolated)")
    axes.set_ylabel("resident memory grown by")
    axes.set_title(f"{game}: memory of a replay buffer")
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=120)


def versions() -> dict[str, str]:
    found = {}
    for package in VERSIONS:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def report(rows: dict[str, dict[str, Measured]], speeds: dict[str, float]) -> dict[str, Any]:
    """The figures as JSON holds them."""
    return {
        "rows": {
            name: {
                "games": {game: asdict(measured) for game, measured in row.items()},
                **summary(row, rows[DEFAULT]),
            }
            for name, row in rows.items()
        },
        "train_steps_per_second": speeds,
        "machine": machine(),
        "versions": versions(),
    }


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
    except CompareError as error:
        sys.exit(str(error))

    console = Console(width=140, highlight=False)
    console.print(make_table(rows, args.games), NOTES)
    if missing:
        console.print(
            f"Left out is sb3-extra-buffers, for want of {', '.join(missing)}: {INSTALL}", markup=False
        )
    if speeds:
        console.print(
            "DQN, Pong:", ", ".join(f"{speed:,.0f} steps/s with {name}" for name, speed in speeds.items())
        )
    console.print(machine(), ", ".join(" ".join(item) for item in versions().items()), sep="\n")
    if args.json:
        args.json.write_text(json.dumps(report(rows, speeds), indent=2) + "\n")
    if args.plot:
        draw(rows, args.games[0], args.plot)


if __name__ == "__main__":
    main()
