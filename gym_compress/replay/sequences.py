"""Sequences of transitions that follow each other: where they end, and where runs of them begin."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from gym_compress.replay.store import ObservationStore
from gym_compress.tree import map_leaves

__all__ = ["draw_starts", "find_ends", "follow"]


def follow(buffer: Any, before: int, row: int, *, at_a_glance: bool = False) -> NDArray[np.bool_]:
    """Whether the observations of a row are the next observations of the row before.

    Args:
        buffer: The buffer.
        before: The row before.
        row: The row.
        at_a_glance: Whether only those are taken for the same that lie in the same chunks.

    Returns:
        ``(n_envs,)`` bool.
    """
    same = np.ones(buffer.n_envs, np.bool_)

    def leaf(store: Any, twin: Any) -> None:
        if isinstance(store, ObservationStore):
            same[:] &= (store.shares if at_a_glance else store.follows)(twin, before, row)
        else:
            same[:] &= [a.tobytes() == b.tobytes() for a, b in zip(store[row], twin[before], strict=True)]

    map_leaves(leaf, buffer.observations, buffer.next_observations)
    return same


def find_ends(buffer: Any) -> NDArray[np.bool_]:
    """Where sequences of observations end, found from the transitions of a buffer.

    Returns:
        ``(buffer_size, n_envs)`` bool.
    """
    ends: NDArray[np.bool_] = buffer.dones != 0
    rows = np.arange(buffer.size()) + (buffer.pos if buffer.full else 0)
    before, after = rows[:-1] % buffer.buffer_size, rows[1:] % buffer.buffer_size
    unsure = ~ends[before]
    broken = np.zeros_like(unsure)

    def leaf(store: Any, twin: Any) -> None:
        if isinstance(store, ObservationStore):
            broken[...] |= store.may_break(twin, before, after)
        elif store.size:
            ours, theirs = (
                kept.reshape(*broken.shape, -1).view(np.uint8) for kept in (store[after], twin[before])
            )
            broken[...] |= (ours != theirs).any(axis=2)

    map_leaves(leaf, buffer.observations, buffer.next_observations)
    for i in np.flatnonzero((unsure & broken).any(axis=1)):
        ends[before[i]] |= ~follow(buffer, before[i], after[i])
    return ends


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
