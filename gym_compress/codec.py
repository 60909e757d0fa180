"""Frames to bytes and back: the only file that imports Blosc2."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import blosc2
import numpy as np
from blosc2.blosc2_ext import cbuffer_sizes
from numpy.typing import NDArray

from gym_compress.errors import CorruptDataError, GymCompressError

__all__ = ["Codec", "check_encoded", "decode", "resolve_codec", "resolve_frames_per_chunk"]

_LEVELS = range(1, 10)
_NAMES = ("lz4", "lz4hc", "zstd", "none")
_DEFAULT_LEVEL = 5

# The rule of "auto", see Codec: from this size of a frame on ZSTD, and how large a chunk may become.
_LARGE_FRAME = 16 * 1024
_AUTO_CHUNK = 384 * 1024
_AUTO_FRAMES = (4, 12)

# Blosc2's limit for one buffer (2 GiB less its overhead) and for one block of it.
_MAX_CHUNK = 2**31 - 1 - 32
_MAX_BLOCK = 536_866_816

# In a Blosc2 buffer byte 2 holds flags: bit 1 says "stored", bits 5 to 7 name the format. LZ4HC writes LZ4's.
_HEADER = 32
_STORED = 0x02
_FORMATS = {"lz4": 1, "lz4hc": 1, "zstd": 4}


@dataclass(frozen=True)
class Codec:
    """How a chunk of frames is compressed: the name of a codec and its level.

    A codec is a small value: frozen, hashable, equal by value, and written as a string.
    Wherever the package asks for a ``codec``, it takes a ``Codec``, its string, or ``"auto"``.

    ``"auto"`` and ``frames_per_chunk=None`` choose by the size of one frame: ``lz4hc:5`` below 16 KiB and
    ``zstd:1`` from there on; as many frames a chunk as make 384 KiB, but at least 4 and at most 12. Small
    frames are worth a codec that decodes fast. In large ones LZ4 does not reach back to the frame before (it
    sees 64 KiB), and searches long to find little. The figures behind it, geometric means over random play of
    Pong, Breakout and Seaquest (``tests/benchmarks/codec_choice.py``; AMD EPYC, one thread): ratio to raw
    bytes, time to encode a frame, and time to read random stacks of 4 as a multiple of copying them from
    uncompressed memory.

    ========= ======= ================= ====================== ======================
    frame      bytes   frames a chunk    ``lz4hc:5``            ``zstd:1``
    ========= ======= ================= ====================== ======================
    64x64        4096  12                 48x,  11 us, 3.7       68x,   4 us, 7.8
    84x84        7056  12                 69x,  18 us, 3.5      103x,   5 us, 6.8
    84x84x3     21168  12                102x,  39 us, 5.6      172x,   9 us, 6.0
    210x160x3  100800  4                 144x, 212 us, 5.6      345x,  30 us, 3.5
    ========= ======= ================= ====================== ======================

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
            raise ValueError(f"Unknown codec {self.name!r}, expected one of {', '.join(map(repr, _NAMES))}")
        if self.name == "none":
            object.__setattr__(self, "clevel", 0)
            return
        try:
            level = operator.index(self.clevel)
        except TypeError:
            raise TypeError(
                f"The level of a codec is expected to be an integer, actual: {self.clevel!r}"
            ) from None
        if level not in _LEVELS:
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
            raise ValueError(
                f"Unknown codec {text!r}, expected {', '.join(map(repr, _NAMES))} or 'auto', "
                f"with a level from {_LEVELS[0]} to {_LEVELS[-1]} as in 'zstd:1' (none takes no level)"
            )
        return cls(name, int(level))

    def encode(self, data: NDArray[np.uint8], itemsize: int) -> bytes:
        """Compresses a flat array of bytes into one Blosc2 buffer of one block, with one thread.

        Elements wider than a byte go through Blosc2's shuffle filter, which brings their like bytes together.

        Args:
            data: The bytes, C-contiguous and not empty.
            itemsize: Bytes of one element of the array that they come from.

        Raises:
            GymCompressError: If a ``BLOSC_*`` environment variable made Blosc2 use another codec.
        """
        encoded: bytes = blosc2.blosc2_ext.compress2(
            data, blocksize=min(data.nbytes, _MAX_BLOCK), **_compression(self, itemsize)
        )
        if encoded[2] >> 5 != _FORMATS[self.name] and not encoded[2] & _STORED:
            raise GymCompressError(
                f"Blosc2 did not compress with {self}: unset the environment variable BLOSC_COMPRESSOR, "
                "which overrides every program's choice"
            )
        return encoded


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


# Decompresses a Blosc2 buffer into the front of a C-contiguous array that is at least as large. It keeps
# Blosc2's own context, where `decompress2` would make one for each call; a buffer of one block is decoded by
# the caller's thread alone, whatever the number of threads that Blosc2 is set to.
decode = blosc2.blosc2_ext.decompress


def check_encoded(encoded: bytes, nbytes: int) -> None:
    """Checks, before anything is decoded, that bytes are a whole buffer of LZ4 or ZSTD that holds ``nbytes``.

    Raises:
        CorruptDataError: If they are not.
    """
    if len(encoded) < _HEADER:
        raise CorruptDataError(f"A compressed chunk of {len(encoded)} bytes is shorter than its header")
    size, whole, _ = cbuffer_sizes(encoded)
    if whole != len(encoded) or size != nbytes:
        raise CorruptDataError(
            f"A compressed chunk says {size} bytes in {whole}, expected {nbytes} bytes in {len(encoded)}"
        )
    if encoded[2] >> 5 not in _FORMATS.values() and not encoded[2] & _STORED:
        raise CorruptDataError(f"A compressed chunk is of format {encoded[2] >> 5}, expected LZ4 or ZSTD")


def resolve_codec(codec: str | Codec, frame_nbytes: int) -> Codec:
    """The codec that an argument ``codec`` means for frames of ``frame_nbytes`` bytes."""
    if isinstance(codec, Codec):
        return codec
    if not isinstance(codec, str):
        raise TypeError(f"A codec is expected to be a string or a Codec, actual type: {type(codec)}")
    if codec == "auto":
        return Codec("zstd", 1) if frame_nbytes >= _LARGE_FRAME else Codec("lz4hc", 5)
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
