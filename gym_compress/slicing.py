"""How observations are taken apart into slices, which are kept once."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["Newest", "Slicing"]

# Along an axis of at most this many entries, "auto" looks for frames that were stacked.
_MOST_SLICES = 16

# Bytes into which the newest slices can move on before they are moved back.
_MOST_ROOM = 2**20


class Slicing:
    """How observations of one shape are taken apart into slices along an axis.

    A slice is what is compared with slices before it and written once. A stack of grey frames has a slice a
    frame, a stack of RGB frames along channels three; an observation that is no stack may be one slice.

    Args:
        shape: The shape of an observation.
        dtype: Its dtype.
        stack_size: How many frames an observation stacks, 1 for none, or ``"auto"`` to take each entry of the
            first axis for a slice if there are few.
        stack_axis: The axis along which frames are stacked.

    Raises:
        ValueError: If the axis does not exist, or its length is no multiple of ``stack_size``.
    """

    def __init__(
        self, shape: tuple[int, ...], dtype: np.dtype[Any], stack_size: int | str, stack_axis: int
    ) -> None:
        if not -len(shape) <= stack_axis < len(shape):
            raise ValueError(f"stack_axis {stack_axis} does not exist in observations of shape {shape}")
        axis = stack_axis % len(shape)
        length = shape[axis]
        self.shape = shape
        self.dtype = np.dtype(dtype.type)
        if stack_size == "auto":
            self.count = length if axis == 0 and len(shape) >= 3 and 0 < length <= _MOST_SLICES else 1
            colours = 3 if self.count % 3 == 0 else 1
        elif isinstance(stack_size, (int, np.integer)) and stack_size > 0:
            if length % stack_size:
                raise ValueError(
                    f"stack_size {stack_size} does not divide axis {axis} of observations of shape {shape}"
                )
            self.count, colours = int(stack_size), 1
        else:
            raise ValueError(
                f"stack_size is expected to be 'auto' or a positive integer, actual: {stack_size!r}"
            )
        # Observations are kept with the stacked axis first, cut into `count` slices.
        self.axis = axis if self.count > 1 else 0
        self.moved = (length, *shape[:axis], *shape[axis + 1 :]) if self.axis else shape
        self.slice_shape = (self.moved[0] // self.count, *self.moved[1:])
        self.slice_nbytes = int(np.prod(self.slice_shape, dtype=np.int64)) * self.dtype.itemsize
        self.slices_per_frame = colours
        self.frame_nbytes = self.slice_nbytes * colours
        self.nbytes = self.slice_nbytes * self.count

    def cut(self, observation: NDArray[Any]) -> NDArray[Any]:
        """The slices of an observation, ``(count, *slice_shape)``; a view if they lie in that order."""
        moved = np.moveaxis(observation, self.axis, 0) if self.axis else observation
        return np.ascontiguousarray(moved).reshape(self.count, *self.slice_shape)

    def join(self, moved: NDArray[Any]) -> NDArray[Any]:
        """Observations in their own shape, from ones with the stacked axis first; a view."""
        return np.moveaxis(moved, -len(self.shape), self.axis - len(self.shape)) if self.axis else moved


class Newest:
    """The slices of the newest observation of a stream, to find out what the next one shares with it.

    Whoever pushes sets ``known`` when all that belongs to the observation is done: it is False meanwhile, and
    stays so if an exception came, by a signal too; then nothing is shared.
    """

    def __init__(self, slicing: Slicing) -> None:
        self.known = False
        self._count: int = slicing.count
        self._nbytes = slicing.slice_nbytes
        self._shift = 1  # by how many slices observations moved on last
        # slices one after another, up to an end that moves on
        self._bytes, self._end = bytearray(slicing.nbytes + min(3 * slicing.nbytes, _MOST_ROOM)), 0

    def moved(self, slices: NDArray[Any], *, likely: int | None = None) -> int:
        """By how many slices an observation moved on from the newest one, bit for bit.

        Args:
            slices: The observation's slices, ``(count, *slice_shape)``, C-contiguous.
            likely: What to try first, in place of what was so last.

        Returns:
            0 if it is the same, and the number of its slices if nothing is shared.
        """
        if self.known:
            first = self._shift if likely is None else likely
            if self._shares(slices, first):
                return first
            shift: int
            for shift in (self._shift, *range(self._count)):
                if self._shares(slices, shift):
                    self._shift = shift or self._shift
                    return shift
        return self._count

    def _shares(self, slices: NDArray[Any], shift: int) -> bool:
        """Whether the newest observation's slices but for the first ones begin an observation: a memcmp."""
        kept = self._count - shift
        return kept > 0 and self._bytes.startswith(slices[:kept].data, self._end - kept * self._nbytes)

    def push(self, slices: NDArray[Any], count: int) -> None:
        """Takes the last slices of an observation, those by which it moved on."""
        self.known = False
        new = slices[len(slices) - count :]
        end = self._end + new.nbytes
        if end > len(self._bytes):  # the others move to the front
            end = self._count * self._nbytes
            others = end - new.nbytes
            self._bytes[:others] = self._bytes[self._end - others : self._end]
        self._bytes[end - new.nbytes : end] = new.data
        self._end = end
