"""The command ``gym-compress``."""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from gym_compress.codec import resolve_codec, resolve_frames_per_chunk
from gym_compress.compare import (
    DEFAULT_CODECS,
    CompareError,
    Row,
    check_machine,
    compare,
    image_places,
    machine,
    make_env,
    plot,
    record,
    report,
)

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command.

    Args:
        argv: The arguments, or ``None`` for those of the process.

    Returns:
        The exit status: 0, or 2 if something asked for cannot be had, which one line on stderr says.
    """
    args = _parser().parse_args(argv)
    try:
        return int(args.run(args))
    except (CompareError, OSError) as error:
        print(f"gym-compress: {error}", file=sys.stderr)  # noqa: T201
        return 2


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
        "--codec", nargs="+", default=list(DEFAULT_CODECS), metavar="C", help="such as auto, lz4hc:5 or zstd"
    )
    sub.add_argument("--frames-per-chunk", type=int, metavar="K", help="frames compressed together")
    sub.add_argument(
        "--seed", type=int, default=0, help="of the environment and the actions (default: %(default)s)"
    )
    sub.add_argument("--json", type=Path, metavar="FILE", help="write the figures as JSON")
    sub.add_argument("--plot", type=Path, metavar="FILE", help="write a bar chart of memory as PNG")
    sub.set_defaults(run=_compare)
    return parser


def _compare(args: argparse.Namespace) -> int:
    try:
        for codec in args.codec:
            resolve_codec(codec, 0)
        resolve_frames_per_chunk(args.frames_per_chunk, 0)
    except ValueError as error:
        raise CompareError(str(error)) from None
    if args.steps < _FEWEST_STEPS:
        raise CompareError(
            f"--steps is at least {_FEWEST_STEPS}: a shorter recording would flatter, got {args.steps}"
        )
    if args.stack_size < 1:
        raise CompareError(f"--stack-size is at least 1, got {args.stack_size}")
    if args.plot and importlib.util.find_spec("matplotlib") is None:
        raise CompareError('--plot needs matplotlib: pip install "gym-compress[plot]"')
    for path in filter(None, (args.json, args.plot)):
        if path.is_dir() or not os.access(path.absolute().parent, os.W_OK):
            raise CompareError(f"{path} cannot be written: it is a folder, or its folder is not there")
    check_machine()

    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    env = make_env(args.env_id)
    image_places(env.observation_space)
    stderr = Console(stderr=True)
    with env, Progress(*columns, console=stderr, disable=not stderr.is_terminal) as progress:
        task = progress.add_task(f"recording {args.env_id}", total=args.steps)
        recording = record(env, args.steps, args.seed, lambda: progress.advance(task))
        measured = progress.add_task("measuring", total=None)

        def advance(description: str) -> None:
            progress.update(measured, description=f"measuring {description}", advance=1)

        rows = compare(recording, args.codec, args.stack_size, args.frames_per_chunk, advance)
        progress.update(measured, description="measured", total=len(rows), completed=len(rows))

    shapes = ", ".join(
        f"{args.stack_size} x {image.shape[1:]} {image.dtype}" for image in recording.images.values()
    )
    title = f"{args.env_id}: {shapes}, {args.steps:,} random steps"
    console = Console()
    if not console.is_terminal:
        console.width = 100  # nothing is cut off in a file
    console.print(_table(rows, title))
    console.print(f"{_COLUMNS}\n{machine()}", highlight=False)
    if args.json:
        settings = {name: getattr(args, name) for name in ("stack_size", "frames_per_chunk", "seed")}
        args.json.write_text(json.dumps(report(args.env_id, recording, rows, **settings), indent=2) + "\n")
    if args.plot:
        plot(args.env_id, rows, str(args.plot))
    return 0


_FEWEST_STEPS = 100
_COLUMNS = """\
bytes: resident memory of a kept observation; step: what the wrapper adds; batch: 32 random
observations as one array; GB/1M: a list of a million transitions. SharedFrames: frames shared by
stacks, not compressed. A codec "auto" stands under the name of what it chose."""


def _table(rows: list[Row], title: str) -> Table:
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
