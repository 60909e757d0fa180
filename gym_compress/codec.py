"""Frames to bytes and back: the only file that imports Blosc2."""

from __future__ import annotations

import operator
import struct
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import blosc2
import numpy as np
from numpy.typing import NDArray

from gym_compress.errors import CorruptDataError, GymCompressError

__all__ = ["Codec", "check_encoded", "decode", "resolve_codec", "resolve_frames_per_chunk"]

_LEVELS = range(1, 10)
_NAMES = ("lz4", "lz4hc", "zstd", "none")
_DEFAULT_LEVEL = 5
_EXPECTED = "'auto', 'lz4', 'lz4hc' or 'zstd', with a level from 1 to 9 as in 'zstd:1' or without, or 'none'"

# The rule of "auto", see Codec: from this size of a frame on ZSTD, and how large a chunk may become.
_SMALL, _SMALL_QUICK, _LARGE = ("lz4hc", 5), ("lz4hc", 2), ("zstd", 1)
_LARGE_FRAME = 32 * 1024
_AUTO_CHUNK = 384 * 1024
_AUTO_FRAMES = (4, 12)

# Blosc2's limits: of a buffer 2 GiB less what it adds, and of a block in it.
_MAX_CHUNK = 2**31 - 1024
_MAX_BLOCK = 536_866_816

# The header of a Blosc2 buffer: what is checked of it, since no public call of Blosc2's tells it. C-Blosc2
# documents it (README_CHUNK_FORMAT.rst) and keeps it, for it lies on disks. LZ4HC writes LZ4's format.
_HEADER = struct.Struct("<BxBBiii6s2x6sxB")
_STORED, _NOT_SPLIT = 0x02, 0x10
_FORMATS = {"lz4": 1, "lz4hc": 1, "zstd": 4}
_SHUFFLE, _NO_FILTER = b"\1\0\0\0\0\0", bytes(6)
_ZEROS = 0x10  # the last byte of a header says: all zeros, nothing follows


@dataclass(frozen=True)
class Codec:
    """How a chunk of frames is compressed: the name of a codec and its level.

    A codec is a small value: frozen, hashable, equal by value, and written as a string.
    Wherever the package asks for a ``codec``, it takes a ``Codec``, its string, or ``"auto"``.

    ``"auto"`` and ``frames_per_chunk=None`` choose by the size of one frame: ``lz4hc:5`` below 32 KiB and
    ``zstd:1`` from there on; as many frames a chunk as make 384 KiB, but at least 4 and at most 12. Small
    frames are worth a codec that decodes fast. In large ones LZ4 does not reach back to the frame before (it
    sees 64 KiB), and searches long to find little. Longer chunks are a little smaller and read more slowly.
    The figures behind it, geometric means over random play of Pong, Breakout and Seaquest
    (``tests/benchmarks/codec_choice.py``; AMD EPYC, one thread): ratio to raw bytes, time to encode a frame,
    and time to read random stacks of 4 as a multiple of copying them from uncompressed memory.

    ========= ======= ================= ====================== ======================
    frame      bytes   frames a chunk    ``lz4hc:5``            ``zstd:1``
    ========= ======= ================= ====================== ======================
    64x64        4096  12                 48x,  11 us, 3.7       68x,   4 us, 7.8
    84x84        7056  12                 69x,  18 us, 3.5      103x,   5 us, 6.8
    84x84x3     21168  12                102x,  39 us, 5.6      172x,   9 us, 6.0
    210x160x3  100800  4                 144x, 212 us, 5.6      345x,  30 us, 3.5
    ========= ======= ================= ====================== ======================

    In vector environments, ``"auto"`` is ``lz4hc:2`` below 32 KiB, which all of them wait for: 84x84 at 12
    frames a chunk gives 51x, 4 us, 4.2.

    Richer images narrow the difference in size and widen that in time: CarRacing at 96x96x3 gives 24x, 99 us,
    9.2 with ``lz4hc:5`` and 27x, 22 us, 16.6 with ``zstd:1``.

    Environment variables ``BLOSC_*``, which override every program's choices, change what Blosc2 does here as
    well.

    Args:
        name: ``"lz4"``, ``"lz4hc"``, ``"zstd"``, or ``"none"``, which keeps frames as they are and serves for
            comparison.
        clevel: Effort from 1 to 9, as Blosc2 counts. ``"none"`` has no levels; there it reads 0.

    Raises:
        ValueError: If the name is unknown or the level is outside the codec's range.
        TypeError: If the level is no integer.

    Example:
        >>> from gym_compress import Codec
        >>> Codec("zstd", 1)
        Codec(name='zstd', clevel=1)
        >>> str(Codec())
        'lz4hc:5'
        >>> Codec.from_string("zstd:1") == Codec("zstd", 1)
        True
    """

    name: str = "lz4hc"
    clevel: int = _DEFAULT_LEVEL

    def __post_init__(self) -> None:
        if self.name not in _NAMES:
            raise ValueError(f"Unknown codec {self.name!r}, expected {_EXPECTED}")
        try:
            level = operator.index(self.clevel)
        except TypeError:
            raise TypeError(
                f"The level of a codec is expected to be an integer, actual: {self.clevel!r}"
            ) from None
        if self.name == "none":
            if level not in (0, _DEFAULT_LEVEL):
                raise ValueError(f"Codec 'none' has no levels, got {level}")
            level = 0
        elif level not in _LEVELS:
            raise ValueError(
                f"Unknown level {level} of codec {self.name!r}, expected {_LEVELS[0]} to {_LEVELS[-1]}"
            )
        object.__setattr__(self, "clevel", level)

    def __str__(self) -> str:
        return self.name if self.name == "none" else f"{self.name}:{self.clevel}"

    @classmethod
    def from_string(cls, text: str) -> Codec:
        """Reads ``"name"`` or ``"name:level"``, the form in which a codec is printed.

        Raises:
            ValueError: If the name or the level is not one that :class:`Codec` takes.
        """
        name, colon, level = text.partition(":")
        if not colon:
            return cls(name)
        if name == "none" or not (level.isascii() and level.isdigit()):
            raise ValueError(f"Unknown codec {text!r}, expected {_EXPECTED}")
        return cls(name, int(level))

    def encode(self, data: NDArray[np.uint8], itemsize: int) -> bytes:
        """Compresses a flat array of bytes into one Blosc2 buffer of one block, with one thread.

        Elements wider than a byte go through Blosc2's shuffle filter, which brings their like bytes together.

        Args:
            data: The bytes, C-contiguous and not empty.
            itemsize: Bytes of one element of the array that they come from.

        Raises:
            ValueError: If the last element is not whole: some versions of Blosc2 write that wrongly.
            GymCompressError: If a ``BLOSC_*`` environment variable made Blosc2 do something else.
        """
        if data.nbytes % itemsize:
            raise ValueError(f"Expected whole elements of {itemsize} bytes, actual: {data.nbytes} bytes")
        block = min(data.nbytes, _MAX_BLOCK)
        try:
            encoded: bytes = blosc2.compress2(data, blocksize=block, **_compression(self, itemsize))
        except RuntimeError as error:
            raise GymCompressError(f"Blosc2 could not compress with {self}: {error}. {_OVERRIDES}") from None
        _, flags, typesize, _, blocksize, _, filters, _, _ = _HEADER.unpack_from(encoded)
        as_asked = (typesize, blocksize, filters) == (itemsize, block, _filters(itemsize))
        if not as_asked or (flags >> 5 != _FORMATS[self.name] and not flags & _STORED):
            raise GymCompressError(f"Blosc2 did not compress with {self} as it was told to. {_OVERRIDES}")
        return encoded


_OVERRIDES = "Unset the environment variables BLOSC_*, which override every program's choices"


def _filters(itemsize: int) -> bytes:
    return _SHUFFLE if itemsize > 1 else _NO_FILTER


@lru_cache(maxsize=64)
def _compression(codec: Codec, itemsize: int) -> dict[str, Any]:
    return {
        "codec": blosc2.Codec[codec.name.upper()],
        "clevel": codec.clevel,
        "typesize": itemsize,
        "filters": [blosc2.Filter.SHUFFLE if itemsize > 1 else blosc2.Filter.NOFILTER],
        "nthreads": 1,
        "use_dict": False,
        "splitmode": blosc2.SplitMode.AUTO_SPLIT,
    }


def decode(encoded: bytes, out: NDArray[np.uint8] | memoryview) -> None:
    """Decompresses a Blosc2 buffer into the front of ``out``, C-contiguous bytes that are at least as many.

    A buffer of one block, which is one below 512 MiB, is decoded by the calling thread alone. One from
    elsewhere must have passed :func:`check_encoded`: Blosc2 trusts what it says of itself.

    Raises:
        CorruptDataError: If it cannot be decoded, or needs more room, which Blosc2 sees before it writes.
    """
    try:
        blosc2.decompress(encoded, out)  # in a context that is kept; `decompress2` makes one for each call
    except (RuntimeError, ValueError) as error:
        raise CorruptDataError(
            f"A compressed chunk of {len(encoded)} bytes could not be decoded: {error}"
        ) from None


def check_encoded(encoded: bytes, nbytes: int) -> None:
    """Checks, before anything is decoded, that bytes are a buffer as :meth:`Codec.encode` writes it.

    Blosc2 trusts what a buffer says of itself, so all of it is checked: sizes, format, filters, and that each
    compressed stream lies inside. What the streams hold is left to LZ4 and ZSTD, which check it.

    Args:
        encoded: The bytes.
        nbytes: How many bytes they must decode to.

    Raises:
        CorruptDataError: If they are no such buffer.
    """
    if len(encoded) < _HEADER.size:
        raise CorruptDataError(f"A compressed chunk of {len(encoded)} bytes is shorter than its header")
    version, flags, typesize, size, blocksize, whole, filters, metas, special = _HEADER.unpack_from(encoded)
    if whole != len(encoded) or size != nbytes:
        raise CorruptDataError(
            f"A compressed chunk says {size} bytes in {whole}, expected {nbytes} bytes in {len(encoded)}"
        )
    known = flags >> 5 in _FORMATS.values() or (flags & _STORED and not flags >> 5)
    if version != 5 or flags & 0x0D != 0x05 or not known:
        raise CorruptDataError(
            f"A compressed chunk is not of LZ4 or ZSTD (version {version}, flags {flags:#x})"
        )
    if filters != _filters(typesize) or any(metas) or special not in (0, _ZEROS):
        raise CorruptDataError("A compressed chunk has filters or contents that are not written here")
    if not typesize or nbytes % typesize or not 0 < blocksize == min(nbytes, _MAX_BLOCK):
        raise CorruptDataError(
            f"A compressed chunk has blocks of {blocksize} bytes with elements of {typesize}, expected one "
            f"of {nbytes} with whole elements"
        )
    if flags & _STORED:
        sound = len(encoded) == _HEADER.size + nbytes and not special
    elif special:
        sound = len(encoded) == _HEADER.size
    else:
        sound = _streams_fit(encoded, nbytes, blocksize, 1 if flags & _NOT_SPLIT else typesize)
    if not sound:
        raise CorruptDataError("A compressed chunk does not hold what its header says")


def _streams_fit(encoded: bytes, nbytes: int, blocksize: int, streams: int) -> bool:
    """Whether the streams of each block follow each other and end with the buffer."""
    blocks = -(-nbytes // blocksize)
    at = end = _HEADER.size + 4 * blocks
    if end > len(encoded):
        return False
    starts = struct.unpack_from(f"<{blocks}i", encoded, _HEADER.size)
    for block, start in enumerate(starts):
        if start < end:
            return False
        at = start
        last = nbytes % blocksize if block == blocks - 1 else 0  # a shorter last block is never split
        for _ in range(1 if last else streams):
            if at + 4 > len(encoded):
                return False
            (length,) = struct.unpack_from("<i", encoded, at)
            # below zero: a run of one byte, told in one token; zero: a run of zeros
            at += 4 + (1 if length < 0 else length)
            if length < -255 or at > len(encoded):
                return False
    return blocks > 1 or at == len(encoded)


def resolve_codec(codec: str | Codec, frame_nbytes: int, *, quick: bool = False) -> Codec:
    """The codec that an argument ``codec`` means for frames of ``frame_nbytes`` bytes.

    Args:
        codec: A :class:`Codec`, its string, or ``"auto"``.
        frame_nbytes: Bytes of a frame.
        quick: Whether ``"auto"`` is to encode quickly rather than to the smallest size, since several
            environments wait meanwhile.

    Raises:
        ValueError: If the codec is unknown.
        TypeError: If it is of a wrong type.
    """
    if isinstance(codec, Codec):
        return codec
    if not isinstance(codec, str):
        raise TypeError(f"A codec is expected to be a string or a Codec, actual type: {type(codec)}")
    if codec == "auto":
        small = _SMALL_QUICK if quick else _SMALL
        return Codec(*(_LARGE if frame_nbytes >= _LARGE_FRAME else small))
    return Codec.from_string(codec)


def resolve_frames_per_chunk(frames_per_chunk: int | None, frame_nbytes: int) -> int:
    """How many frames of ``frame_nbytes`` bytes a chunk holds; never more than Blosc2 takes in one buffer.

    Raises:
        ValueError: If ``frames_per_chunk`` is below 1, or one frame alone is too large for a buffer.
        TypeError: If ``frames_per_chunk`` is no integer.
    """
    if frames_per_chunk is None:
        fewest, most = _AUTO_FRAMES
        frames_per_chunk = max(fewest, min(most, _AUTO_CHUNK // max(frame_nbytes, 1)))
    try:
        frames = operator.index(frames_per_chunk)
    except TypeError:
        raise TypeError(
            f"frames_per_chunk is expected to be an integer or None, actual: {frames_per_chunk!r}"
        ) from None
    if frames < 1:
        raise ValueError(f"frames_per_chunk is expected to be at least 1, actual value: {frames}")
    if frame_nbytes > _MAX_CHUNK:
        raise ValueError(
            f"A frame of {frame_nbytes} bytes does not fit a chunk, expected at most {_MAX_CHUNK}"
        )
    return min(frames, _MAX_CHUNK // max(frame_nbytes, 1))
