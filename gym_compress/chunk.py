"""Chunks: consecutive frames of one stream, raw while they are written, compressed together when full."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gym_compress.codec import Codec, check_encoded, decode, resolve_frames_per_chunk
from gym_compress.errors import CorruptDataError

__all__ = ["MOST_SHIPPED", "Chunk", "Piece", "read_pieces"]

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


def read_pieces(wanted: Iterable[tuple[Any, Sequence[Piece]]], outs: Sequence[memoryview]) -> None:
    """Copies pieces of chunks to their places, decoding each chunk once.

    Args:
        wanted: Chunks, or what has ``content`` and ``nbytes`` as they have, each with the pieces that are
            wanted of it.
        outs: The bytes that are written, of one or more arrays that are not empty.

    Raises:
        CorruptDataError: If a chunk cannot be decoded.
    """
    scratch = memoryview(b"")
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
