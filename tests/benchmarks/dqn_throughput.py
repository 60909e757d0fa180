"""Steps a second of DQN on an Atari game: compressed memory, with and without prefetching, against SB3's dense one.

    python tests/benchmarks/dqn_throughput.py [--pairs 8] [--steps 1500] [--env-id ALE/Pong-v5]

Needs the extras ``atari`` and ``sb3``, and PyTorch. Runs ``examples/cleanrl_dqn_atari.py``, the same script for
all, in a fresh process each time, and takes the steps a second from the first update on. The kinds take turns,
so that a change of the machine's speed meets all of them; it is far from steady, so look at the quartiles.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import subprocess
import sys
from pathlib import Path

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from gym_compress.commands.compare import machine

SCRIPT = Path(__file__).parents[2] / "examples" / "cleanrl_dqn_atari.py"
KINDS = {
    "SB3 `ReplayBuffer`, dense": ["--no-compressed"],
    "compressed": [],
    "compressed, prefetching": ["--prefetch"],
}


def run(env_id: str, steps: int, options: list[str]) -> tuple[float, float]:
    """Steps a second of a run, and megabytes of its memory."""
    arguments = f"--env-id {env_id} --total-timesteps {steps} --learning-starts 200 --buffer-size {steps}"
    out = subprocess.run(
        [sys.executable, str(SCRIPT), *arguments.split(), *options],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    speed, memory = re.search(r"([\d.]+) steps a second[\s\S]*replay memory ([\d.,]+) MB", out).groups()
    return float(speed), float(memory.replace(",", ""))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--env-id", default="ALE/Pong-v5")
    parser.add_argument("--pairs", type=int, default=8, help="runs of each kind")
    parser.add_argument("--steps", type=int, default=1500, help="steps of a run")
    parser.add_argument("--json", type=Path, help="where to write the figures")
    args = parser.parse_args()
    speeds: dict[str, list[float]] = {kind: [] for kind in KINDS}
    memory = {}
    with Progress() as progress:
        task = progress.add_task("training", total=args.pairs * len(KINDS))
        for turn in range(args.pairs):
            order = list(KINDS.items())
            for kind, options in order[turn % 3 :] + order[: turn % 3]:
                speed, memory[kind] = run(args.env_id, args.steps, options)
                speeds[kind].append(speed)
                progress.advance(task)
    dense = next(iter(speeds.values()))
    columns = "memory", "steps a second", "against dense", "quartiles", "MB"
    table = Table(*columns, title=f"DQN, {args.env_id}, {machine()}")
    for kind, each in speeds.items():
        low, ratio, high = statistics.quantiles(
            ours / theirs for ours, theirs in zip(each, dense, strict=True)
        )
        median = f"{statistics.median(each):.0f}"
        table.add_row(kind, median, f"{ratio:.2f}", f"{low:.2f} to {high:.2f}", f"{memory[kind]:,.1f}")
    Console(width=120).print(table)
    if args.json:
        args.json.write_text(json.dumps({"speeds": speeds, "memory": memory}, indent=1))


if __name__ == "__main__":
    main()
