"""Where runs of transitions begin that follow each other."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

__all__ = ["draw_starts"]


def draw_starts(
    rng: np.random.Generator,
    ends: NDArray[np.bool_],
    size: int,
    oldest: int,
    batch_size: int,
    length: int,
) -> NDArray[np.int64]:
    """Draws where runs begin, uniformly over all places where one can.

    Args:
        rng: The generator that draws.
        ends: ``(buffer_size, n_envs)``, whether the sequence of observations ends with a row.
        size: How many rows are filled.
        oldest: The oldest of them.
        batch_size: How many runs.
        length: Transitions in a run.

    Returns:
        ``(batch_size, 2)``: a row, counted from the oldest, and an environment.

    Raises:
        ValueError: If no episode is that long.
    """
    buffer_size, n_envs = ends.shape
    found = np.empty((0, 2), np.int64)
    if length <= size:
        # places are drawn and refused where an episode ends before the run does; that is quick if few do
        for _ in range(8):
            drawn = rng.integers((size - length + 1, n_envs), size=(2 * batch_size, 2))
            rows = (oldest + drawn[:, :1] + np.arange(length - 1)) % buffer_size
            whole = ~ends[rows, drawn[:, 1:]].any(axis=1)
            found = np.concatenate([found, drawn[whole]])
            if len(found) >= batch_size:
                return found[:batch_size]
    ends = np.roll(ends, -oldest, axis=0)[:size]
    ends[-1:] = True
    steps = np.arange(size)[:, None]
    end_of = np.minimum.accumulate(np.where(ends, steps, size)[::-1], axis=0)[::-1]
    runs = end_of - steps + 1
    starts = np.argwhere(runs >= length)
    if not len(starts):
        longest = runs.max(initial=0)
        raise ValueError(f"Expected sequences of {length} transitions, but the longest episode has {longest}")
    return starts[rng.integers(len(starts), size=batch_size)]
