"""Chunks: consecutive frames of one stream, raw while they are written, compressed together when full."""

from __future__ import annotations

import math
import weakref
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gym_compress.codec import Codec, check_encoded, decode, resolve_frames_per_chunk
from gym_compress.errors import CorruptDataError

__all__ = ["MOST_SHIPPED", "Chunk", "ChunkWriter", "Piece", "fit", "read_pieces"]

# Bytes of the largest chunk that goes into a file, or to another process.
MOST_SHIPPED = 2**27

# Where bytes of a decoded chunk go: which output, start and end in it, start and end in the chunk.
Piece = tuple[int, int, int, int, int]


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

    __slots__ = ("__weakref__", "codec", "content", "nbytes", "sealed")

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


def read_pieces(wanted: Iterable[tuple[Any, list[Piece]]], outs: Sequence[memoryview]) -> None:
    """Copies pieces of chunks to their places, decoding each chunk once.

    Args:
        wanted: Chunks, or what has ``content`` and ``nbytes`` as they have, each with the pieces that are
            wanted of it.
        outs: The bytes that are written, of one or more arrays that are not empty.

    Raises:
        CorruptDataError: If a chunk cannot be decoded.
    """
    scratch = np.empty(0, np.uint8).data
    for chunk, pieces in wanted:
        content = chunk.content
        if isinstance(content, bytes):
            nbytes = chunk.nbytes
            which, to, to_end, start, end = pieces[0]
            whole = len(pieces) == 1 and end - start == nbytes
            if not whole and len(scratch) < nbytes:
                scratch = np.empty(nbytes, np.uint8).data
            decode(content, outs[which][to:to_end] if whole else scratch)
            if whole:
                continue
            raw = scratch
        else:
            raw = content.data
        for which, to, to_end, start, end in pieces:
            outs[which][to:to_end] = raw[start:end]


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


class _RawChunk:
    """A chunk whose frames are raw, and the memory that they are in.

    The chunk itself is made when somebody asks for it, and goes when nobody holds it.
    """

    __slots__ = ("_chunk", "_codec", "filled", "first", "frames", "memory", "room", "sealed")

    def __init__(
        self, first: int, room: int, shape: tuple[int, ...], dtype: np.dtype[Any], codec: Codec
    ) -> None:
        self.first = first  # the number of its first frame
        self.filled = 0
        self.room = room
        self.sealed = False
        self.memory = bytearray(room * math.prod(shape) * dtype.itemsize)
        self.frames: NDArray[Any] = np.ndarray((room, *shape), dtype, self.memory)
        self._codec = codec
        self._chunk: Callable[[], Chunk | None] = lambda: None  # a weak reference, once there is a chunk

    def chunk(self) -> Chunk:
        chunk = self._chunk()
        if chunk is None:
            content = self.frames.reshape(-1).view(np.uint8)
            chunk = Chunk(content, len(content), self._codec)
            self._chunk = weakref.ref(chunk)
        return chunk

    def seal(self) -> None:
        self.room = self.filled
        chunk = self._chunk()
        if chunk is not None and not chunk.sealed:
            chunk.seal(self.filled * self.frames[:1].nbytes, self.frames.itemsize)
        self.sealed = True


class ChunkWriter:
    """Appends the frames of one stream, numbered from 1, and seals the chunks that they fill.

    The newest frames stay raw, a whole chunk of them and at least ``keep``, so that the newest observation is
    read and compared without decoding. A chunk that nobody holds when it is to be sealed is not compressed.

    An exception may come between any two lines, by a signal too: frames count once they are written.

    Args:
        shape: The shape of a frame.
        dtype: The dtype of a frame, in native byte order.
        codec: What compresses the chunks.
        frames_per_chunk: Frames that a chunk holds.
        keep: How many of the newest frames stay raw at least.
        begun: Called with each chunk that begins, and the number of its first frame.
    """

    def __init__(
        self,
        shape: tuple[int, ...],
        dtype: np.dtype[Any],
        *,
        codec: Codec,
        frames_per_chunk: int,
        keep: int = 1,
        begun: Callable[[int, Chunk], None] | None = None,
    ) -> None:
        self.shape = shape
        self.dtype = dtype
        self.frame_nbytes = math.prod(shape) * dtype.itemsize
        self.codec = codec
        self.frames_per_chunk = frames_per_chunk
        self._keep = keep
        self._begun = begun
        self._raw: deque[_RawChunk] = deque()  # oldest first; the last one is being written
        self._restart = 1

    @property
    def next_number(self) -> int:
        """The number that the next frame gets."""
        if not self._raw:
            return self._restart
        newest = self._raw[-1]
        return newest.first + newest.filled

    @property
    def first_raw(self) -> int:
        """The number of the oldest frame that is in no sealed chunk yet; that of the next one if all are."""
        return next((raw.first for raw in self._raw if not raw.sealed), self.next_number)

    def append(self, frames: NDArray[Any]) -> None:
        """Copies frames into the stream: ``(n, *shape)``, of the writer's dtype."""
        done = 0
        while done < len(frames):
            raw = self._raw[-1] if self._raw else None
            if raw is None or raw.filled == raw.room:
                raw = self._begin()
            count = min(raw.room - raw.filled, len(frames) - done)
            raw.frames[raw.filled : raw.filled + count] = frames[done : done + count]
            raw.filled += count
            done += count

    def _begin(self) -> _RawChunk:
        """Begins a chunk, and seals the oldest raw ones that are not among the newest frames."""
        while self._raw and sum([raw.filled for raw in islice(self._raw, 1, None)]) >= self._keep:
            self._raw[0].seal()
            self._raw.popleft()
        raw = _RawChunk(self.next_number, self.frames_per_chunk, self.shape, self.dtype, self.codec)
        if self._begun:
            self._begun(raw.first, raw.chunk())
        self._raw.append(raw)
        return raw

    def newest(self, count: int) -> tuple[tuple[Chunk, ...], tuple[int, ...]]:
        """Where the newest frames lie, which were appended since the last restart.

        Args:
            count: How many frames, at most ``keep``.

        Returns:
            The chunks that hold them, the oldest first, and how many frames each of these has.
        """
        raw = self._raw[-1]
        if raw.filled >= count:
            return (raw.chunk(),), (raw.filled,)
        found = []
        for raw in reversed(self._raw):
            found.append(raw)
            count -= raw.filled
            if count <= 0:
                break
        return tuple([raw.chunk() for raw in found[::-1]]), tuple([raw.filled for raw in found[::-1]])

    def ends_with(self, frames: NDArray[Any]) -> bool:
        """Whether frames, C-contiguous, are the newest ones, bit for bit, and still raw: a memcmp."""
        left = len(frames)
        for raw in reversed(self._raw):
            count = min(left, raw.filled)
            if not raw.memory.startswith(
                frames[left - count : left].data, (raw.filled - count) * self.frame_nbytes
            ):
                return False
            left -= count
            if not left:
                return True
        return False

    def seal(self) -> None:
        """Compresses all that was written; the next frame begins a chunk."""
        for raw in self._raw:
            raw.seal()

    def restart(self, number: int) -> None:
        """Seals all, and goes on with another number: what was written is not compared with any more."""
        self.seal()
        self._restart = number
        self._raw.clear()
