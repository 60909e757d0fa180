"""The format of replay files, as FORMAT.md beside this file states it: tables, limits, checksums."""

from __future__ import annotations

import hashlib
import os
import sqlite3
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from gym_compress.codec import Codec
from gym_compress.errors import CorruptDataError

__all__ = [
    "APPLICATION_ID",
    "BLOCK_CODEC",
    "MOST_CHUNK",
    "MOST_SETTINGS",
    "OVERHEAD",
    "PAGE",
    "SCHEMA",
    "SET_CACHE",
    "SQLITE_LENGTH",
    "VERSION",
    "Block",
    "ChunkTable",
    "array_source",
    "block_rows",
    "checksum",
    "codec_of",
    "connect",
    "errors_of",
    "little",
    "refusing",
    "row_hash",
    "signed",
]

APPLICATION_ID = 0x47794D43  # "GyMC"
VERSION = 1
SCHEMA = {
    "blobs": "CREATE TABLE blobs (id INTEGER PRIMARY KEY, data BLOB NOT NULL)",
    "chunks": "CREATE TABLE chunks (id INTEGER PRIMARY KEY, checksum INTEGER NOT NULL, "
    "stream INTEGER NOT NULL, first INTEGER NOT NULL, nbytes INTEGER NOT NULL, codec TEXT NOT NULL)",
    "settings": "CREATE TABLE settings (id INTEGER PRIMARY KEY, checksum INTEGER NOT NULL, "
    "data BLOB NOT NULL)",
    "checkpoint": "CREATE TABLE checkpoint (id INTEGER PRIMARY KEY, digest INTEGER NOT NULL, "
    "owner INTEGER NOT NULL)",
}
PAGE = 16384  # a chunk of Atari frames is about 2 KB, and pages are filled by whole chunks
_CACHE = 1000  # KiB of pages that a connection keeps
_BUSY = 60.0  # seconds to wait for another process

# Limits of FORMAT.md, in bytes.
MOST_CHUNK = 2**27
MOST_SETTINGS = 2**24
OVERHEAD = 1024  # of a blob beyond what it decodes to
SQLITE_LENGTH = 10**9

_BLOCK = 2**15  # what a block of an array aims at
BLOCK_CODEC = Codec("zstd", 1)

# SQLite's primary result codes that tell of the system and not of the file.
_OF_THE_SYSTEM = {
    sqlite3.SQLITE_PERM,
    sqlite3.SQLITE_BUSY,
    sqlite3.SQLITE_LOCKED,
    sqlite3.SQLITE_READONLY,
    sqlite3.SQLITE_IOERR,
    sqlite3.SQLITE_FULL,
    sqlite3.SQLITE_CANTOPEN,
}

SET_CACHE = f"PRAGMA cache_size = -{_CACHE}"  # counts in pages of the size that is known when it is set

_pack_id = struct.Struct("<q").pack
_pack_row = struct.Struct("<qqqqq").pack


class ChunkTable(NamedTuple):
    """What a file says of the chunks of its checkpoint, in the order of their ids.

    The arrays are ``(n,)`` int64.
    """

    ids: NDArray[np.int64]
    checksums: NDArray[np.int64]
    streams: NDArray[np.int64]
    firsts: NDArray[np.int64]
    nbytes: NDArray[np.int64]
    codecs: list[Codec]


class Block(NamedTuple):
    """A block of an array in a file: its blob, and a hash of what it was made from."""

    id: int
    checksum: int
    source: int


def connect(path: Path, mode: str) -> sqlite3.Connection:
    """Connects to a file, in a mode of SQLite's URIs; other processes are waited for."""
    uri = f"{path.as_uri()}?mode={mode}"
    return sqlite3.connect(uri, uri=True, timeout=_BUSY, isolation_level=None, check_same_thread=False)


@contextmanager
def errors_of(path: str | os.PathLike[str]) -> Iterator[None]:
    """SQLite's errors as OSError where the system is at fault, as CorruptDataError where the file is."""
    try:
        yield
    except sqlite3.Error as error:
        if getattr(error, "sqlite_errorcode", 0) & 0xFF in _OF_THE_SYSTEM:
            raise OSError(f"{path}: {error}") from error
        raise CorruptDataError(f"{path} is no replay file, or damaged: {error}") from error


@contextmanager
def refusing(message: str) -> Iterator[None]:
    """What Python raises over values of a wrong kind, as CorruptDataError."""
    try:
        yield
    except CorruptDataError:
        raise
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RecursionError) as error:
        raise CorruptDataError(f"{message}: {error!r}") from error
    except struct.error as error:
        raise CorruptDataError(f"{message}: {error}") from error


def _hash(data: bytes) -> int:
    """BLAKE2b of 64 bits, as a signed integer."""
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little", signed=True)


def checksum(id_: int, data: bytes) -> int:
    """The checksum of the bytes under an id."""
    return _hash(_pack_id(id_) + data)


def row_hash(row: tuple[Any, ...]) -> int:
    """What a row of the table of chunks adds to the digest."""
    return _hash(_pack_row(*row[:5]) + row[5].encode())


def array_source(array: NDArray[Any], part: NDArray[np.uint8]) -> int:
    """A hash that tells, in this process, whether a part of an array changed."""
    return hash((array.dtype, array.shape[1:], part.tobytes()))


def signed(total: int) -> int:
    """An integer modulo 2**64, as SQLite keeps it."""
    return (total + 2**63) % 2**64 - 2**63


@lru_cache(maxsize=64)
def codec_of(text: str) -> Codec:
    """The codec that a row of the table of chunks names."""
    return Codec.from_string(text)


def little(dtype: np.dtype[Any]) -> str:
    """A dtype in NumPy's notation, little-endian."""
    return dtype.newbyteorder("<").str


def block_rows(row_nbytes: int) -> int:
    """How many rows of an array are in a block: what makes 32 KiB, but at least one."""
    return max(1, _BLOCK // max(row_nbytes, 1))
