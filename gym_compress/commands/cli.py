"""The command ``gym-compress``."""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

import gym_compress.commands.compare as compare
from gym_compress.codec import resolve_codec, resolve_frames_per_chunk
from gym_compress.commands.convert import from_arrays, from_pickle, to_npz
from gym_compress.commands.inspect import draw_frames, faults, summary
from gym_compress.errors import GymCompressError


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command.

    Args:
        argv: The arguments, or ``None`` for those of the process.

    Returns:
        The exit status: 0; 1 if ``verify`` found faults; or 2 if something asked for cannot be had, which one
        line on stderr says.
    """
    args = _parser().parse_args(argv)
    try:
        return int(args.run(args))
    except (GymCompressError, OSError) as error:
        _say(f"gym-compress: {error}", sys.stderr)
        return 2


def _say(text: str, stream: TextIO) -> None:
    """Prints a line, in which there may be a name that is no UTF-8."""
    print(text.encode(errors="replace").decode(), file=stream)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="gym-compress", description="Compressed observations for Gymnasium."
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    sub = commands.add_parser(
        "compare",
        help="measure what compression does for an environment",
        description="Records an environment under random play, plays the recording in a loop, and measures, "
        "in fresh processes, resident memory, step time and batch time of stacks, plain and compressed. "
        "Atari games are played under Gymnasium's AtariPreprocessing, others as they are made.",
    )
    sub.add_argument(
        "env_id", metavar="ENV_ID", help="as for gymnasium.make, such as ALE/Pong-v5 or CarRacing-v3"
    )
    sub.add_argument("--steps", type=int, default=4000, help="observations to record (default: %(default)s)")
    sub.add_argument(
        "--stack-size", type=int, default=4, help="frames in an observation (default: %(default)s)"
    )
    sub.add_argument(
        "--codec",
        nargs="+",
        default=compare.DEFAULT_CODECS,
        metavar="C",
        help="such as auto, lz4hc:5 or zstd",
    )
    sub.add_argument("--frames-per-chunk", type=int, metavar="K", help="frames compressed together")
    sub.add_argument(
        "--seed", type=int, default=0, help="of the environment and the actions (default: %(default)s)"
    )
    sub.add_argument("--json", type=Path, metavar="FILE", help="write the figures as JSON")
    sub.add_argument("--plot", type=Path, metavar="FILE", help="write a bar chart of memory as PNG")
    sub.set_defaults(run=_compare)

    sub = commands.add_parser(
        "inspect",
        help="say what a replay file holds",
        description="Says what a replay file holds, its sizes, and how many times smaller it is than arrays.",
    )
    sub.add_argument("file", type=Path, metavar="FILE", help="a replay file")
    sub.add_argument("--frames", type=Path, metavar="PNG", help="draw frames from the oldest to the newest")
    sub.set_defaults(run=_inspect)

    sub = commands.add_parser(
        "verify",
        help="read all of a replay file and say what is damaged",
        description="Reads all of a replay file: a line for each fault, and exit status 1 if there is one.",
    )
    sub.add_argument("file", type=Path, metavar="FILE", help="a replay file")
    sub.set_defaults(run=_verify)

    sub = commands.add_parser(
        "convert",
        help="make a replay file of arrays or of SB3's pickle, or arrays of a replay file",
        description="Makes a replay file of a .npy or .npz file or of a pickle (.pkl) that SB3's "
        "save_replay_buffer wrote, or an .npz file of a replay file. One array in a file is taken for frames "
        "that follow each other, with actions, rewards and dones of zero; one with several for what this "
        "command writes: observations, next_observations, actions, rewards, dones and timeouts, each "
        "(rows, environments, ...), the oldest first. Their spaces are then all values of their dtypes; "
        "integer actions have as many as the largest says. The memory is as large as what is in it. OUT must "
        "not be there.",
    )
    sub.add_argument("source", type=Path, metavar="IN", help="a file .npy, .npz, .pkl, or a replay file")
    sub.add_argument("out", type=Path, metavar="OUT", help="a replay file, or a file .npz")
    sub.add_argument(
        "--trust-pickle",
        action="store_true",
        help="read a pickle, which runs whatever code its maker put into it, with your rights: only for "
        "files that you made yourself or whose maker you trust",
    )
    sub.set_defaults(run=_convert)
    return parser


def _bars(transient: bool = False) -> Progress:
    """Progress bars on stderr, if that is a terminal."""
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    stderr = Console(stderr=True)
    return Progress(*columns, console=stderr, disable=not stderr.is_terminal, transient=transient)


@contextmanager
def _progress(description: str) -> Iterator[Callable[[int, int], None]]:
    """A progress bar on a terminal; gives what is to be called with how much is done, and of how much."""
    with _bars(transient=True) as progress:
        task = progress.add_task(description, total=None)
        yield lambda done, total: progress.update(task, completed=done, total=total)


def _inspect(args: argparse.Namespace) -> int:
    if args.frames and importlib.util.find_spec("matplotlib") is None:
        raise GymCompressError('--frames needs matplotlib: pip install "gym-compress[plot]"')
    table = Table(title=Text(str(args.file)), box=box.SIMPLE_HEAD, pad_edge=False, show_header=False)
    for heading, value in summary(args.file).items():
        table.add_row(heading, Text(value))
    console = Console()
    if not console.is_terminal:
        console.width = 160  # nothing is cut off in a file
    console.print(table)
    if args.frames:
        draw_frames(args.file, args.frames)
    return 0


def _verify(args: argparse.Namespace) -> int:
    found = 0
    with _progress(f"reading {args.file}") as advance:
        for fault in faults(args.file, advance):
            found += 1
            _say(fault, sys.stdout)
    if not found:
        _say(f"{args.file} is whole", sys.stdout)
    return int(found > 0)


def _convert(args: argparse.Namespace) -> int:
    if args.out.exists():
        raise GymCompressError(f"{args.out} is there already")
    kind = args.source.suffix.lower()
    if kind in (".npy", ".npz"):
        convert = from_arrays
    elif kind in (".pkl", ".pickle"):
        if not args.trust_pickle:
            raise GymCompressError(
                f"{args.source} is a pickle, which runs whatever code its maker put into it: --trust-pickle, "
                "if you trust its maker"
            )
        convert = from_pickle
    elif args.out.suffix.lower() == ".npz":
        convert = to_npz
    else:
        raise GymCompressError(
            "Expected IN to be .npy, .npz or .pkl, or, for a replay file IN, OUT to be .npz, "
            f"got {args.source} and {args.out}"
        )
    if convert is not to_npz and args.out.suffix.lower() in (".npy", ".npz", ".pkl", ".pickle"):
        raise GymCompressError(f"Expected a name for a replay file, such as memory.replay, got {args.out}")
    with _progress(f"converting {args.source}") as advance:
        convert(args.source, args.out, advance)
    return 0


def _compare(args: argparse.Namespace) -> int:
    try:
        for codec in args.codec:
            resolve_codec(codec, 0)
        resolve_frames_per_chunk(args.frames_per_chunk, 0)
    except ValueError as error:
        raise GymCompressError(str(error)) from None
    if args.steps < _FEWEST_STEPS:
        raise GymCompressError(
            f"--steps is at least {_FEWEST_STEPS}: a shorter recording would flatter, got {args.steps}"
        )
    if args.stack_size < 1:
        raise GymCompressError(f"--stack-size is at least 1, got {args.stack_size}")
    if args.plot and importlib.util.find_spec("matplotlib") is None:
        raise GymCompressError('--plot needs matplotlib: pip install "gym-compress[plot]"')
    for path in filter(None, (args.json, args.plot)):
        if path.is_dir() or not os.access(path.absolute().parent, os.W_OK):
            raise GymCompressError(f"{path} cannot be written: it is a folder, or its folder is not there")
    compare.check_machine()

    env = compare.make_env(args.env_id)
    with env, _bars() as progress:
        task = progress.add_task(f"recording {args.env_id}", total=args.steps)
        recording = compare.record(env, args.steps, args.seed, lambda: progress.advance(task))
        measured = progress.add_task("measuring", total=None)

        def advance(description: str) -> None:
            progress.update(measured, description=f"measuring {description}", advance=1)

        rows = compare.compare(recording, args.codec, args.stack_size, args.frames_per_chunk, advance)
        progress.update(measured, description="measured", total=len(rows), completed=len(rows))

    shapes = ", ".join(
        f"{args.stack_size} x {image.shape[1:]} {image.dtype}" for image in recording.images.values()
    )
    title = f"{args.env_id}: {shapes}, {args.steps:,} random steps"
    console = Console()
    if not console.is_terminal:
        console.width = 100  # nothing is cut off in a file
    console.print(_table(rows, title))
    console.print(f"{_COLUMNS}\n{compare.machine()}", highlight=False)
    if args.json:
        settings = {name: getattr(args, name) for name in ("stack_size", "frames_per_chunk", "seed")}
        figures = compare.report(args.env_id, recording, rows, **settings)
        args.json.write_text(json.dumps(figures, indent=2) + "\n")
    if args.plot:
        compare.plot(args.env_id, rows, str(args.plot))
    return 0


_FEWEST_STEPS = 100
_COLUMNS = """\
bytes: resident memory of a kept observation; step: what the wrapper adds; batch: 32 random
observations as one array; GB/1M: a list of a million transitions. SharedFrames: frames shared by
stacks, not compressed. A codec "auto" stands under the name of what it chose."""


def _table(rows: list[compare.Row], title: str) -> Table:
    table = Table(title=title, box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("method", no_wrap=True)
    for heading in ("bytes", "ratio", "step us", "batch us", "GB/1M"):
        table.add_column(heading, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(
            row.label,
            f"{row.bytes_per_observation:,.0f}",
            f"{row.ratio:,.1f}x",
            f"{row.step_us:,.1f}",
            f"{row.batch_us:,.0f}",
            f"{row.gb_per_million:,.2f}",
        )
    return table
