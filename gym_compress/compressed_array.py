"""What compressed observations, one or a batch of them, have in common: they are read as arrays."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, Self

import numpy as np
from numpy.typing import DTypeLike, NDArray

from gym_compress.chunk import Chunk, Piece, read_pieces

__all__ = ["CompressedArray"]


class CompressedArray:
    """An immutable array that is decoded each time it is read; it has no arithmetic.

    A subclass says where its bytes lie, and gives ``__getitem__`` and ``__iter__``.
    """

    __slots__ = ()

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the array."""
        raise NotImplementedError

    @property
    def dtype(self) -> np.dtype[Any]:
        """The dtype of the array, in native byte order."""
        raise NotImplementedError

    def wanted(self) -> Iterable[tuple[Chunk, Sequence[Piece]]]:
        """The chunks that hold the array's bytes, each with the pieces of it that go into one array."""
        raise NotImplementedError

    def same_bytes(self, other: Any) -> bool:
        """Whether another object of the same class refers to the very same bytes."""
        raise NotImplementedError

    @property
    def ndim(self) -> int:
        """The number of dimensions of the array."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """The number of elements of the array."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of the array."""
        return self.size * self.dtype.itemsize

    @property
    def cbytes(self) -> int:
        """Bytes of its frames in their chunks, rounded up: raw bytes while a chunk is open.

        A frame counts in each observation that it is part of; sums over a stream therefore exceed what is
        resident.
        """
        share = 0.0
        for chunk, pieces in self.wanted():
            nbytes = sum(end - start for _, _, _, start, end in pieces)
            share += nbytes * (chunk.cbytes / chunk.nbytes if chunk.sealed else 1.0)
        return math.ceil(share)

    def __setitem__(self, key: Any, value: Any) -> None:
        raise TypeError(
            f"A {type(self).__name__} never changes: put observations into a list of it, list(...), or "
            "values into an array, np.array(...)"
        )

    def __len__(self) -> int:
        shape = self.shape
        if not shape:
            raise TypeError("len() of an observation without dimensions")
        return shape[0]

    def __array__(self, dtype: DTypeLike | None = None, copy: bool | None = None) -> NDArray[Any]:
        """Decodes into a new array.

        Raises:
            ValueError: If ``copy`` is False, since an array cannot be had without writing one.
        """
        if copy is False:
            raise ValueError("Compressed observations cannot be turned into an array without a copy")
        out: NDArray[Any] = np.empty(self.shape, self.dtype)
        if out.size:
            read_pieces(self.wanted(), [out.reshape(-1).view(np.uint8).data])
        return out if dtype is None else out.astype(dtype, copy=False)

    def __dlpack__(
        self, *, stream: Any = None, max_version: Any = None, dl_device: Any = None, copy: bool | None = None
    ) -> Any:
        """Decodes into a new array in the CPU's memory and hands it over by DLPack.

        Raises:
            BufferError: If ``copy`` is False, or another device than the CPU is asked for.
        """
        if copy is False:
            raise BufferError("Compressed observations cannot be handed over without a copy")
        if dl_device is not None and tuple(dl_device) != self.__dlpack_device__():
            raise BufferError(
                f"Compressed observations are decoded into the CPU's memory, not device {dl_device}"
            )
        array = np.asarray(self)
        try:
            return array.__dlpack__(stream=stream, max_version=max_version)
        except TypeError:  # NumPy 2.0 knows no versions
            return array.__dlpack__(stream=stream)

    def __dlpack_device__(self) -> tuple[int, int]:
        return 1, 0  # kDLCPU

    def reshape(self, *shape: Any) -> NDArray[Any]:
        """Decodes into a new array of another shape, as ``np.reshape`` does.

        Stable-Baselines3 calls it on what ``model.predict`` is given and on the last observation of an
        episode.
        """
        return np.asarray(self).reshape(*shape)

    def __eq__(self, other: object) -> bool:
        if isinstance(other, type(self)):
            if self.same_bytes(other) and self.dtype.kind != "f":  # a NaN is equal to nothing
                return True
        elif not isinstance(other, (list, tuple)) and not hasattr(other, "__array__"):
            return NotImplemented
        try:
            array = np.asarray(other)
        except ValueError:  # a ragged list
            return False
        comparable = array.shape == self.shape and array.dtype.kind in "biufc"
        return comparable and np.array_equal(np.asarray(self), array)

    __hash__ = None  # type: ignore[assignment]

    def copy(self) -> Self:
        """The object itself, since it never changes; ``np.array(obs)`` gives an array to write to."""
        return self

    def __copy__(self) -> Self:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self

    def __repr__(self) -> str:
        kept = f"nbytes={self.nbytes}, cbytes={self.cbytes}"
        return f"{type(self).__name__}(shape={self.shape}, dtype={self.dtype}, {kept})"
