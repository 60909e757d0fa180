"""Where in their chunks the bytes of an observation lie."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any
from weakref import WeakValueDictionary

import numpy as np

from gym_compress.chunk import Piece
from gym_compress.errors import CorruptDataError

__all__ = ["Layout", "Segment", "layout_of"]

# A run of bytes that lie side by side: which of an observation's chunks, first byte in it, number of bytes.
Segment = tuple[int, int, int]

# Start and end of such a run in the observation, and in the chunk.
_Run = tuple[int, int, int, int]


class Layout:
    """What observations have in common: shape, dtype, and where in their chunks their bytes lie.

    Observations of one stream need a few layouts only, so each is made once (:func:`layout_of`) and shared.

    Attributes:
        pieces: For each run of bytes that lie side by side: which of the chunks, and where in the observation
            and in the chunk.
        of_chunks: The same for each chunk, as :func:`gym_compress.chunk.read_pieces` takes it.
        nbytes: Bytes of the array.
    """

    __slots__ = ("__weakref__", "dtype", "nbytes", "of_chunks", "pieces", "shape")

    def __init__(
        self, shape: tuple[int, ...], dtype: np.dtype[Any], pieces: tuple[tuple[int, _Run], ...]
    ) -> None:
        self.shape = shape
        self.dtype = dtype
        self.pieces = pieces
        of_chunks: dict[int, list[Piece]] = {}
        for which, run in pieces:
            of_chunks.setdefault(which, []).append((0, *run))
        self.of_chunks = tuple(of_chunks.items())
        self.nbytes = pieces[-1][1][1] if pieces else 0
        if self.nbytes != math.prod(shape) * dtype.itemsize:
            raise CorruptDataError(
                f"{self.nbytes} bytes do not make an array of shape {shape} and dtype {dtype}"
            )

    def __reduce__(self) -> tuple[Any, ...]:
        segments = tuple([(which, start, end - start) for which, (_, _, start, end) in self.pieces])
        return layout_of, (self.shape, self.dtype, segments)


_layouts: WeakValueDictionary[tuple[Any, ...], Layout] = WeakValueDictionary()


def layout_of(shape: tuple[int, ...], dtype: np.dtype[Any], segments: Sequence[Segment]) -> Layout:
    """The layout of bytes in segments of chunks, one after another; the same object for the same values."""
    pieces: list[tuple[int, _Run]] = []
    at = 0
    for which, start, nbytes in segments:
        if pieces and pieces[-1][0] == which and pieces[-1][1][3] == start:  # goes on where the last one ends
            _, (first, _, begin, _) = pieces.pop()
            pieces.append((which, (first, at + nbytes, begin, start + nbytes)))
        elif nbytes:
            pieces.append((which, (at, at + nbytes, start, start + nbytes)))
        at += nbytes
    key = (shape, dtype, tuple(pieces))
    layout = _layouts.get(key)
    if layout is None:
        layout = _layouts[key] = Layout(*key)
    return layout
