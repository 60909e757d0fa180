"""Which transitions a batch has: samplers, whose ``draw(rng, batch_size)`` gives rows and environments."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from gym_compress.replay.transitions import Transitions

__all__ = ["Sequences", "Uniform"]

Places = tuple[NDArray[np.int64], NDArray[np.int64]]


class Uniform:
    """Draws valid transitions uniformly, with replacement.

    Args:
        table: The transitions.
    """

    def __init__(self, table: Transitions) -> None:
        self._table = table

    def draw(self, rng: np.random.Generator, batch_size: int) -> Places:
        """Draws rows and environments, ``(batch_size,)`` each.

        Raises:
            ValueError: If there are no transitions.
        """
        table, size = self._table, self._table.size()
        if not table.holds_any():
            raise ValueError("Expected a buffer that holds transitions, but nothing was added yet")
        rows = rng.integers(size, size=batch_size)
        envs = rng.integers(table.n_envs, size=batch_size)
        while not (valid := table.valid[rows, envs]).all():
            wrong = np.flatnonzero(~valid)
            rows[wrong] = rng.integers(size, size=len(wrong))
            envs[wrong] = rng.integers(table.n_envs, size=len(wrong))
        return rows, envs


class Sequences:
    """Draws runs of transitions that follow each other, uniformly over all places where one can begin.

    Args:
        table: The transitions.
        length: Transitions in a run.
    """

    def __init__(self, table: Transitions, length: int) -> None:
        self._table = table
        self._length = length

    def draw(self, rng: np.random.Generator, batch_size: int) -> Places:
        """Draws rows and environments, ``(batch_size, length)`` each.

        Raises:
            ValueError: If no episode is that long.
        """
        table = self._table
        starts = self._draw_starts(rng, batch_size)
        rows = (table.oldest + starts[:, :1] + np.arange(self._length)) % table.rows
        return rows, np.broadcast_to(starts[:, 1:], rows.shape)

    def _draw_starts(self, rng: np.random.Generator, batch_size: int) -> NDArray[np.int64]:
        """Draws where runs begin: ``(batch_size, 2)``, a row, counted from the oldest, and an environment."""
        table, size, length = self._table, self._table.size(), self._length
        found = np.empty((0, 2), np.int64)
        if length <= size:
            # places are drawn and refused where an episode ends before the run does; that is quick if few do
            for _ in range(8):
                drawn = rng.integers((size - length + 1, table.n_envs), size=(2 * batch_size, 2))
                rows = (table.oldest + drawn[:, :1] + np.arange(length)) % table.rows
                whole = ~table.ends[rows[:, :-1], drawn[:, 1:]].any(axis=1)
                whole &= table.valid[rows, drawn[:, 1:]].all(axis=1)
                found = np.concatenate([found, drawn[whole]])
                if len(found) >= batch_size:
                    return found[:batch_size]
        runs = self._runs()
        starts = np.argwhere(runs >= length)
        if not len(starts):
            longest = runs.max(initial=0)
            raise ValueError(
                f"Expected sequences of {length} transitions, but the longest episode has {longest}"
            )
        return starts[rng.integers(len(starts), size=batch_size)]

    def _runs(self) -> NDArray[np.int64]:
        """How long the run from each place on is, ``(size, n_envs)``, the oldest row first."""
        table = self._table
        size = table.size()
        ends, valid = (np.roll(each, -table.oldest, axis=0)[:size] for each in (table.ends, table.valid))
        broken = ~valid
        broken[:-1] |= broken[1:]  # ends with or before the row
        ends = ends | broken
        ends[-1:] = True
        steps: NDArray[Any] = np.arange(size)[:, None]
        end_of = np.minimum.accumulate(np.where(ends, steps, size)[::-1], axis=0)[::-1]
        return np.where(valid, end_of - steps + 1, 0)
