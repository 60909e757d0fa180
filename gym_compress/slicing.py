"""How observations are taken apart into slices, which are kept once."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["Slicing"]

# Along an axis of at most this many entries, "auto" looks for frames that were stacked.
_MOST_SLICES = 16


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
        self, shape: tuple[int, ...], dtype: np.dtype[Any], stack_size: int | str, stack_axis: int = 0
    ) -> None:
        self._arguments = shape, dtype, stack_size, stack_axis
        self.shape = shape
        self.dtype = np.dtype(dtype.type)  # in native byte order
        self._stacked = shape or (1,)
        if not -len(self._stacked) <= stack_axis < len(self._stacked):
            raise ValueError(f"stack_axis {stack_axis} does not exist in observations of shape {shape}")
        axis = stack_axis % len(self._stacked)
        length = self._stacked[axis]
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
        others = self._stacked[: self.axis] + self._stacked[self.axis + 1 :]
        self.slice_shape = (self._stacked[self.axis] // self.count, *others)
        self.slice_nbytes = math.prod(self.slice_shape) * self.dtype.itemsize
        self.slices_per_frame = colours
        self.frame_nbytes = self.slice_nbytes * colours
        self.nbytes = self.slice_nbytes * self.count

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Slicing) and self._kind() == other._kind()

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return "Slicing({}, {}, stack_size={}, stack_axis={})".format(*self._kind())

    def _kind(self) -> tuple[Any, ...]:
        return self.shape, self.dtype, self.count, self.axis

    def cut(self, observations: NDArray[Any]) -> NDArray[Any]:
        """The slices of observations ``(n, *shape)``: ``(n, count, *slice_shape)``, C-contiguous.

        It is a view if they lie in that order.
        """
        if self.axis:
            observations = np.moveaxis(observations, self.axis + 1, 1)
        return np.ascontiguousarray(observations).reshape(len(observations), self.count, *self.slice_shape)

    def join(self, slices: NDArray[Any]) -> NDArray[Any]:
        """Observations ``(n, *shape)`` from slices as :meth:`cut` gives them; a view."""
        if not self.axis:
            return slices.reshape(len(slices), *self.shape)
        others = self._stacked[: self.axis] + self._stacked[self.axis + 1 :]
        stacked = slices.reshape(len(slices), self._stacked[self.axis], *others)
        return np.moveaxis(stacked, 1, self.axis + 1)

    def __reduce__(self) -> tuple[Any, ...]:
        return Slicing, self._arguments
