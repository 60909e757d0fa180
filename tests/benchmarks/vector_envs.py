"""``AtariVectorEnv``, bare and compressed: memory of the observations that are kept, time of a step and of a minibatch.

    python tests/benchmarks/vector_envs.py [--games pong breakout ...] [--envs 8] [--steps 1500]

Needs Linux and the extra ``atari``; takes four minutes for three games. Memory is resident memory of a fresh process, in
which a list keeps what each step gives, and copies of what the bare environment gives. Time is that of 64 steps against the
bare environment's, which nobody copies then: median of 30 pairs, in turn, in one process.
"""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import numpy as np
from ale_py import AtariVectorEnv
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from gym_compress import decompress_batch
from gym_compress.commands.compare import _resident, check_machine, machine
from gym_compress.wrappers.vector import CompressObservation

BARE = "AtariVectorEnv"
KINDS: dict[str, dict[str, Any] | None] = {
    BARE: None,
    'frames shared, codec="none"': {"codec": "none"},
    "CompressObservation": {},
    'codec="lz4hc:5"': {"codec": "lz4hc:5"},
    'codec="zstd:1"': {"codec": "zstd:1"},
}


def make(game: str, num_envs: int, kind: str) -> Any:
    kwargs = KINDS[kind]
    env = AtariVectorEnv(game, num_envs=num_envs)
    env = env if kwargs is None else CompressObservation(env, **kwargs)
    env.reset(seed=0)
    return env


def actions(env: Any, steps: int) -> Any:
    return np.random.default_rng(0).integers(env.single_action_space.n, size=(steps, env.num_envs))


def memory(game: str, num_envs: int, steps: int, kind: str) -> tuple[float, float]:
    """Resident bytes of a kept observation, and milliseconds to gather a random minibatch of 256 of them."""
    env = make(game, num_envs, kind)
    kept: list[Any] = [None] * steps
    played = actions(env, steps + 50)
    for action in played[:50]:
        env.step(action)
    before = _resident()
    for i, action in enumerate(played[50:]):
        kept[i] = env.step(action)[0]
        if kind == BARE:
            kept[i] = kept[i].copy()
    grown = (_resident() - before) / steps / num_envs
    flat = [observation for batch in kept for observation in batch]
    out = np.empty((256, *env.single_observation_space.shape), np.uint8)
    rng = np.random.default_rng(1)
    gather: Callable[..., Any] = np.stack if kind == BARE else decompress_batch
    times = []
    for _ in range(30):
        drawn = [flat[i] for i in rng.integers(len(flat), size=256)]
        start = time.perf_counter()
        gather(drawn, out=out)
        times.append(time.perf_counter() - start)
    return grown, statistics.median(times) * 1e3


def speed(game: str, num_envs: int) -> dict[str, tuple[float, float]]:
    """Of each kind, microseconds of a step, and the time against the bare environment's."""
    envs = {kind: make(game, num_envs, kind) for kind in KINDS}
    played = actions(envs[BARE], 64)
    times: dict[str, list[float]] = {kind: [] for kind in KINDS}
    order = list(envs.items())
    for turn in range(31):
        for kind, env in order[turn % len(order) :] + order[: turn % len(order)]:
            start = time.perf_counter()
            for action in played:
                env.step(action)
            times[kind].append((time.perf_counter() - start) / len(played))
    pairs = {
        kind: [a / b for a, b in zip(each, times[BARE], strict=True)][1:] for kind, each in times.items()
    }
    return {kind: (statistics.median(times[kind]) * 1e6, statistics.median(pairs[kind])) for kind in KINDS}


def in_fresh_process(function: Callable[..., Any], *args: Any) -> Any:
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return pool.submit(function, *args).result()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--games", nargs="+", default=["pong", "breakout", "seaquest"])
    parser.add_argument("--envs", type=int, default=8)
    parser.add_argument("--steps", type=int, default=1500)
    args = parser.parse_args()
    check_machine()
    table = Table("game", "", "bytes", "smaller", "step", "of bare", "minibatch of 256", title=machine())
    with Progress() as progress:
        task = progress.add_task("measuring", total=len(args.games) * (len(KINDS) + 1))
        for game in args.games:
            speeds = in_fresh_process(speed, game, args.envs)
            progress.advance(task)
            plain = 0.0
            for kind in KINDS:
                nbytes, batch = in_fresh_process(memory, game, args.envs, args.steps, kind)
                plain = plain or nbytes
                step, ratio = speeds[kind]
                figures = (
                    f"{nbytes:,.0f}",
                    f"{plain / nbytes:.0f}x",
                    f"{step:,.0f} us",
                    f"{ratio:.2f}",
                    f"{batch:.1f} ms",
                )
                table.add_row(game, kind, *figures)
                progress.advance(task)
            table.add_section()
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
