"""Chunks: consecutive frames of one stream, raw while they are written, compressed together when full."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from gym_compress.codec import Codec, check_encoded, decode, resolve_codec, resolve_frames_per_chunk

__all__ = ["Chunk", "ChunkWriter", "Piece", "read_pieces"]

# Where bytes of a decoded chunk go: start and end in the output, start and end in the chunk.
Piece = tuple[int, int, int, int]


class Chunk:
    """Frames that are compressed together.

    ``content`` is a flat array of bytes while the chunk is open, and one Blosc2 buffer (``bytes``) when it is
    sealed. It changes once, in one assignment, so a reader that takes it into a local name needs no lock.

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
        """A sealed chunk that holds the elements of a C-contiguous array."""
        chunk = cls(array.reshape(-1).view(np.uint8), array.nbytes, codec)
        chunk.seal(array.nbytes, array.dtype.itemsize)
        return chunk

    @property
    def cbytes(self) -> int:
        """Bytes that the content takes: compressed if the chunk is sealed, raw if it is open."""
        return len(self.content)

    def seal(self, nbytes: int, itemsize: int) -> None:
        """Compresses the first ``nbytes`` of an open chunk, which are all that it will ever hold."""
        content = self.content
        assert not isinstance(content, bytes), "a chunk is sealed once"
        if nbytes and self.codec.name != "none":
            self.content = self.codec.encode(content[:nbytes], itemsize)
        elif nbytes < self.nbytes:
            self.content = content[:nbytes].copy()
        self.nbytes = nbytes
        self.sealed = True

    def __reduce__(self) -> tuple[Any, ...]:
        return _restore, (self.content, self.nbytes, self.codec)


def _restore(content: bytes | NDArray[np.uint8], nbytes: int, codec: Codec) -> Chunk:
    if isinstance(content, bytes):
        check_encoded(content, nbytes)
    return Chunk(content, nbytes, codec, sealed=True)


def read_pieces(wanted: Iterable[tuple[Chunk, list[Piece]]], out: memoryview) -> None:
    """Copies pieces of chunks to their places, decoding each chunk once.

    Args:
        wanted: Chunks, each with the pieces that are wanted of it.
        out: The bytes that are written, not empty.
    """
    scratch = np.empty(0, np.uint8).data
    for chunk, pieces in wanted:
        content = chunk.content
        if isinstance(content, bytes):
            nbytes = chunk.nbytes
            if len(pieces) == 1 and pieces[0][3] - pieces[0][2] == nbytes:
                decode(content, out[pieces[0][0] : pieces[0][1]])
                continue
            if len(scratch) < nbytes:
                scratch = np.empty(nbytes, np.uint8).data
            decode(content, scratch)
            raw = scratch
        else:
            raw = content.data
        for to, to_end, start, end in pieces:
            out[to:to_end] = raw[start:end]


class ChunkWriter:
    """Appends the frames of one stream and seals the chunks that they fill.

    The newest frames stay raw, at least ``keep`` of them, so that reading the newest observation decodes
    nothing.

    A copy of a writer (``copy.deepcopy`` of an environment, pickling) is a writer with the same settings that
    begins a chunk of its own; what was written stays where it is.

    Args:
        shape: The shape of a frame.
        dtype: The dtype of a frame; frames are kept in native byte order.
        codec: A :class:`Codec`, its string, or ``"auto"``.
        frames_per_chunk: Frames that a chunk holds, or ``None`` to choose by the size of a frame.
        keep: How many of the newest frames stay raw.

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
        self._chunk_nbytes = self.frames_per_chunk * self.frame_nbytes
        self._full: deque[Chunk] = deque()  # chunks that are full and still raw, oldest first
        self._begin()

    def _begin(self) -> None:
        self._frames: NDArray[Any] = np.empty((self.frames_per_chunk, *self.shape), self.dtype)
        self._chunk = Chunk(self._frames.reshape(-1).view(np.uint8), self._chunk_nbytes, self.codec)
        self._count = 0

    def append(self, frame: Any) -> tuple[Chunk, int]:
        """Copies one frame into the stream.

        Args:
            frame: An array of the writer's shape, or what NumPy makes one of.

        Returns:
            The chunk that holds the frame, and the frame's place in it, counted from 0.

        Raises:
            ValueError: If the frame has another shape, or a dtype that does not cast to the writer's by
                NumPy's ``same_kind``. Nothing is written then.
        """
        if type(frame) is not np.ndarray or frame.dtype is not self.dtype or frame.shape != self.shape:
            frame = self.fit(frame)
        if self._count == self.frames_per_chunk:
            self._turn()
        index = self._count
        self._frames[index] = frame
        self._count = index + 1
        return self._chunk, index

    def fit(self, frame: Any) -> NDArray[Any]:
        """The frame as an array that can be written; ValueError if it does not fit, as in :meth:`append`."""
        array = np.asarray(frame)
        if array.shape != self.shape:
            raise ValueError(f"A frame of shape {array.shape} does not fit the space's shape {self.shape}")
        if not np.can_cast(array.dtype, self.dtype, "same_kind"):
            raise ValueError(
                f"A frame of dtype {array.dtype} does not cast to the space's dtype {self.dtype} "
                "by NumPy's 'same_kind'"
            )
        return array

    def _turn(self) -> None:
        """Puts the full chunk among those that wait, and seals the oldest while enough frames stay raw."""
        full, chunk = self._full, self._chunk
        while full and len(full) * self.frames_per_chunk >= self.keep:
            full[0].seal(self._chunk_nbytes, self.dtype.itemsize)
            full.popleft()
        self._begin()
        full.append(chunk)

    def seal(self) -> None:
        """Seals all that was written; the next frame begins a chunk."""
        while self._full:
            self._full[0].seal(self._chunk_nbytes, self.dtype.itemsize)
            self._full.popleft()
        if self._count:
            self._chunk.seal(self._count * self.frame_nbytes, self.dtype.itemsize)
            self._begin()

    def __reduce__(self) -> tuple[Any, ...]:
        return _new_writer, (self.shape, self.dtype, self.codec, self.frames_per_chunk, self.keep)


def _new_writer(
    shape: tuple[int, ...], dtype: np.dtype[Any], codec: Codec, frames_per_chunk: int, keep: int
) -> ChunkWriter:
    return ChunkWriter(shape, dtype, codec=codec, frames_per_chunk=frames_per_chunk, keep=keep)
