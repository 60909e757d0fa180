"""Chunks: consecutive frames of one stream, raw while they are written, compressed together when full."""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from gym_compress.codec import Codec, check_encoded, decode, resolve_codec, resolve_frames_per_chunk
from gym_compress.errors import CorruptDataError

__all__ = ["Chunk", "ChunkWriter", "Piece", "fit", "read_pieces"]

# Where bytes of a decoded chunk go: start and end in the output, start and end in the chunk.
Piece = tuple[int, int, int, int]


class Chunk:
    """Frames that are compressed together.

    ``content`` is a flat array of bytes while the chunk is open, and one Blosc2 buffer (``bytes``) when it is
    sealed; codec ``"none"`` leaves the array. It changes once, in one assignment, so a reader that takes it
    into a local name needs no lock.

    Args:
        content: The frames' bytes one after another, or the buffer that holds them compressed.
        nbytes: The number of bytes of the frames, uncompressed.
        codec: What compresses, or has compressed, the frames.
        sealed: Whether no more frames come.
    """

    __slots__ = ("codec", "content", "nbytes", "sealed")

    def __init__(
        self, content: bytes | NDArray[np.uint8], nbytes: int, codec: Codec, sealed: bool = False
    ) -> None:
        self.content = content
        self.nbytes = nbytes
        self.codec = codec
        self.sealed = sealed

    @classmethod
    def from_array(cls, array: NDArray[Any], codec: Codec) -> Chunk:
        """A sealed chunk that holds the elements of a C-contiguous array.

        Raises:
            ValueError: If the array is too large for a chunk.
        """
        resolve_frames_per_chunk(1, array.nbytes)
        chunk = cls(array.reshape(-1).view(np.uint8), array.nbytes, codec)
        chunk.seal(array.nbytes, array.dtype.itemsize)
        return chunk

    @property
    def cbytes(self) -> int:
        """Bytes that the content takes: compressed if the chunk is sealed, raw if it is open."""
        return len(self.content)

    def seal(self, nbytes: int, itemsize: int) -> None:
        """Compresses the first ``nbytes`` of the chunk, which are all that it will ever hold.

        If it is interrupted, the chunk stays readable, and the same call completes it.
        """
        content = self.content
        if not isinstance(content, bytes):
            if nbytes and self.codec.name != "none":
                self.content = self.codec.encode(content[:nbytes], itemsize)
            elif nbytes < len(content):
                self.content = content[:nbytes].copy()
        self.nbytes = nbytes
        self.sealed = True

    def __reduce__(self) -> tuple[Any, ...]:
        if not self.sealed:
            raise TypeError("An open chunk cannot be pickled: seal it, or detach the observation")
        return _restore, (self.content, self.nbytes, self.codec, _checksum(self.content))


def _checksum(content: bytes | NDArray[np.uint8]) -> int:
    return zlib.crc32(content if isinstance(content, bytes) else content.data)


def _restore(content: bytes | NDArray[np.uint8], nbytes: int, codec: Codec, checksum: int) -> Chunk:
    """A chunk from a pickle; the checksum finds damage that Blosc2 would decode into something else."""
    if _checksum(content) != checksum:
        raise CorruptDataError(f"A compressed chunk of {len(content)} bytes does not have its checksum")
    if isinstance(content, bytes):
        check_encoded(content, nbytes)
    elif len(content) != nbytes:
        raise CorruptDataError(f"A chunk of {len(content)} bytes is expected to have {nbytes}")
    else:
        content = content.copy()  # a buffer outside the pickle belongs to the caller
    return Chunk(content, nbytes, codec, sealed=True)


def read_pieces(wanted: Iterable[tuple[Any, list[Piece]]], out: memoryview) -> None:
    """Copies pieces of chunks to their places, decoding each chunk once.

    Args:
        wanted: Chunks, or what has ``content`` and ``nbytes`` as they have, each with the pieces that are
            wanted of it.
        out: The bytes that are written, not empty.

    Raises:
        CorruptDataError: If a chunk cannot be decoded.
    """
    scratch = np.empty(0, np.uint8).data
    for chunk, pieces in wanted:
        content = chunk.content
        if isinstance(content, bytes):
            nbytes = chunk.nbytes
            to, to_end, start, end = pieces[0]
            whole = len(pieces) == 1 and end - start == nbytes
            if not whole and len(scratch) < nbytes:
                scratch = np.empty(nbytes, np.uint8).data
            try:
                decode(content, out[to:to_end] if whole else scratch)
            except RuntimeError as error:
                raise CorruptDataError(
                    f"A compressed chunk of {len(content)} bytes could not be decoded: {error}"
                ) from None
            if whole:
                continue
            raw = scratch
        else:
            raw = content.data
        for to, to_end, start, end in pieces:
            out[to:to_end] = raw[start:end]


def fit(frame: Any, shape: tuple[int, ...], dtype: np.dtype[Any]) -> NDArray[Any]:
    """A frame as an array of a shape and dtype, its values unchanged; floats may be rounded.

    Raises:
        ValueError: If the frame has another shape, a dtype that does not cast by NumPy's ``same_kind``, or
            values that the dtype does not hold.
    """
    array = np.asarray(frame)
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


class ChunkWriter:
    """Appends the frames of one stream and seals the chunks that they fill.

    The newest frames stay raw, a whole chunk of them and at least ``keep``, so that reading the newest
    observation decodes nothing.

    A copy of a writer (``copy.deepcopy`` of an environment, pickling) is a writer with the same settings that
    begins a chunk of its own; what was written stays where it is.

    Args:
        shape: The shape of a frame.
        dtype: The dtype of a frame; frames are kept in native byte order.
        codec: A :class:`Codec`, its string, or ``"auto"``.
        frames_per_chunk: Frames that a chunk holds, or ``None`` to choose by the size of a frame.
        keep: How many of the newest frames stay raw at least.

    Raises:
        ValueError: If the codec is unknown, ``frames_per_chunk`` below 1, or a frame too large for a chunk.
        TypeError: If the codec or ``frames_per_chunk`` is of a wrong type.
    """

    def __init__(
        self,
        shape: tuple[int, ...],
        dtype: DTypeLike,
        *,
        codec: str | Codec = "auto",
        frames_per_chunk: int | None = None,
        keep: int = 1,
    ) -> None:
        self.shape = tuple(shape)
        self.dtype = np.dtype(np.dtype(dtype).type)  # in native byte order
        self.frame_nbytes = int(np.prod(self.shape, dtype=np.int64)) * self.dtype.itemsize
        self.codec = resolve_codec(codec, self.frame_nbytes)
        self.frames_per_chunk = resolve_frames_per_chunk(frames_per_chunk, self.frame_nbytes)
        self.keep = keep
        self._full: deque[tuple[Chunk, int]] = deque()  # chunks still raw and their bytes, oldest first
        self._open = self._begin()

    def _begin(self) -> list[Any]:
        """The frames of a new chunk as an array, the chunk over the same memory, and how many it holds."""
        frames: NDArray[Any] = np.empty((self.frames_per_chunk, *self.shape), self.dtype)
        return [frames, Chunk(frames.reshape(-1).view(np.uint8), frames.nbytes, self.codec), 0]

    def append(self, frame: Any) -> tuple[Chunk, int]:
        """Copies one frame into the stream.

        Args:
            frame: An array of the writer's shape, or what NumPy makes one of.

        Returns:
            The chunk that holds the frame, and the frame's place in it, counted from 0.

        Raises:
            ValueError: If the frame does not fit, see :func:`fit`. Nothing is written then.
        """
        if type(frame) is not np.ndarray or frame.dtype is not self.dtype or frame.shape != self.shape:
            frame = fit(frame, self.shape, self.dtype)
        if self._open[2] == self.frames_per_chunk:
            self._turn()
        frames, chunk, index = self._open
        frames[index] = frame
        self._open[2] = index + 1
        return chunk, index

    # An exception may come between any two lines below, by a signal too: what was written stays readable
    # then, and the next call goes on.

    def _turn(self) -> None:
        """Lets the chunk that is written wait, and seals the oldest while enough frames stay raw."""
        full, (_, chunk, count) = self._full, self._open
        while full and len(full) * self.frames_per_chunk >= self.keep:
            self._seal_oldest()
        begun = self._begin()
        full.append((chunk, count * self.frame_nbytes))
        self._open = begun

    def _seal_oldest(self) -> None:
        chunk, nbytes = self._full[0]
        chunk.seal(nbytes, self.dtype.itemsize)
        self._full.popleft()

    def seal(self) -> None:
        """Seals all that was written; the next frame begins a chunk."""
        if self._open[2]:
            self._turn()
        while self._full:
            self._seal_oldest()

    def __reduce__(self) -> tuple[Any, ...]:
        return _new_writer, (self.shape, self.dtype, self.codec, self.frames_per_chunk, self.keep)


def _new_writer(
    shape: tuple[int, ...], dtype: np.dtype[Any], codec: Codec, frames_per_chunk: int, keep: int
) -> ChunkWriter:
    return ChunkWriter(shape, dtype, codec=codec, frames_per_chunk=frames_per_chunk, keep=keep)
