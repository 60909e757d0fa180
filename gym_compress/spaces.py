"""Spaces of compressed observations, and which leaves of a space are compressed."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable
from typing import Any, TypeGuard

import numpy as np
from gymnasium import spaces
from gymnasium.vector.utils import batch_differing_spaces
from numpy.typing import NDArray

from gym_compress.compressed_array import CompressedArray
from gym_compress.observation import CompressedObservation
from gym_compress.tree import map_space, replace_leaves

__all__ = ["CompressedBox", "compressed_space", "fit", "is_image", "map_compressed", "space_of"]

# A Box in a Dict or Tuple below this many bytes is left as it is.
_WORTH_NBYTES = 1024


class CompressedBox(spaces.Box):
    """A Box that contains compressed observations beside arrays; in all else a Box, and equal to one."""

    @classmethod
    def like(cls, box: spaces.Box) -> CompressedBox:
        """A CompressedBox with the bounds, dtype and random state of a Box."""
        space = cls(low=box.low, high=box.high, dtype=box.dtype.type, seed=copy.deepcopy(box.np_random))
        space.bounded_below, space.bounded_above = box.bounded_below, box.bounded_above
        return space

    def contains(self, x: Any) -> bool:
        """Whether an array or observation is in the space: its shape, its dtype and all its values."""
        return super().contains(np.asarray(x) if isinstance(x, CompressedArray) else x)

    def to_jsonable(self, sample_n: Iterable[Any]) -> list[Any]:
        """Observations as nested lists."""
        return super().to_jsonable([np.asarray(sample) for sample in sample_n])


batch_differing_spaces.register(CompressedBox, batch_differing_spaces.dispatch(spaces.Box))


def _worth_compressing(space: spaces.Space[Any]) -> TypeGuard[spaces.Box]:
    """Whether a leaf of a Dict or Tuple space is compressed: a Box of at least 1,024 bytes."""
    return isinstance(space, spaces.Box) and math.prod(space.shape) * space.dtype.itemsize >= _WORTH_NBYTES


def is_image(space: spaces.Space[Any]) -> TypeGuard[spaces.Box]:
    """Whether replay memory compresses a leaf of observations: a Box of two dimensions or more, worth it."""
    return _worth_compressing(space) and len(space.shape) >= 2


def map_compressed(make: Callable[[spaces.Box], Any], space: spaces.Space[Any]) -> Any:
    """A tree of an observation space: ``make(leaf)`` where wrappers compress a leaf, None elsewhere.

    Raises:
        TypeError: If the observation space is no Box, Dict or Tuple.
    """
    if not isinstance(space, (spaces.Box, spaces.Dict, spaces.Tuple)):
        raise TypeError(f"Expected an observation space that is a Box, Dict or Tuple, actual: {space}")

    def leaf(sub: spaces.Space[Any]) -> Any:
        if isinstance(sub, spaces.Box) and (sub is space or _worth_compressing(sub)):
            return make(sub)
        return None

    return map_space(leaf, space)


def space_of(arrays: Any, axes: int) -> spaces.Space[Any]:
    """The space of all that arrays of numbers can hold: a Box for an array, a Dict for a dict of them.

    The first ``axes`` axes of each array, such as that of rows, are not of the space.
    """
    if isinstance(arrays, dict):
        return spaces.Dict({key: space_of(sub, axes) for key, sub in arrays.items()})
    dtype = arrays.dtype
    if dtype.kind == "f":
        low, high = -np.inf, np.inf
    else:
        low, high = (0, 1) if dtype.kind == "b" else (np.iinfo(dtype).min, np.iinfo(dtype).max)
    return spaces.Box(low, high, arrays.shape[axes:], dtype.type)


def compressed_space(space: spaces.Space[Any], compressed: Any) -> spaces.Space[Any]:
    """A copy of a space in which each leaf is a CompressedBox that a tree has something for, not None."""

    def leaf(sub: spaces.Space[Any], each: Any) -> spaces.Space[Any]:
        return CompressedBox.like(sub) if each is not None and isinstance(sub, spaces.Box) else sub

    return replace_leaves(leaf, space, compressed)


def fit(frame: Any, shape: tuple[int, ...], dtype: np.dtype[Any]) -> NDArray[Any]:
    """A frame as an array of a shape and dtype, its values unchanged; floats may be rounded.

    The array is to be read only: where it can, it is the frame's own.

    Raises:
        ValueError: If the frame has another shape, a dtype that does not cast by NumPy's ``same_kind``, or
            values that the dtype does not hold.
    """
    raw = frame.raw() if isinstance(frame, CompressedObservation) else None
    array = np.asarray(frame) if raw is None else raw
    if array.shape != shape:
        raise ValueError(f"A frame of shape {array.shape} does not fit the space's shape {shape}")
    if array.dtype == dtype:
        return array
    if not np.can_cast(array.dtype, dtype, "same_kind"):
        raise ValueError(
            f"A frame of dtype {array.dtype} does not cast to the space's {dtype} by NumPy's 'same_kind'"
        )
    with np.errstate(over="ignore"):
        cast = array.astype(dtype)
    lost = np.isfinite(array) & ~np.isfinite(cast) if dtype.kind == "f" else cast != array
    if lost.any():
        value = array[lost].flat[0]
        raise ValueError(f"A frame with the value {value} does not fit the space's dtype {dtype}")
    return cast
