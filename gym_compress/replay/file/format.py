"""The format of replay files, as FORMAT.md beside this file states it: tables, limits, checksums."""

from __future__ import annotations

import hashlib
import os
import sqlite3
import struct
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from gym_compress.codec import Codec
from gym_compress.errors import CorruptDataError

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
MOST_SETTINGS = 2**25
MOST_ID = 2**62
OVERHEAD = 1024  # of a blob beyond what it decodes to
SQLITE_LENGTH = 10**9

_BLOCK = 2**15  # what a block of an array aims at
BLOCK_CODEC = Codec("zstd", 1)

# What values of a wrong kind lead to.
_OF_VALUES = (
    LookupError,
    TypeError,
    ValueError,
    AttributeError,
    ArithmeticError,
    AssertionError,
    RecursionError,
    struct.error,
)

# SQLite's primary result codes that tell of the system and not of the file.
_OF_THE_SYSTEM = {
    sqlite3.SQLITE_PERM,
    sqlite3.SQLITE_BUSY,
    sqlite3.SQLITE_LOCKED,
    sqlite3.SQLITE_READONLY,
    sqlite3.SQLITE_IOERR,
    sqlite3.SQLITE_FULL,
    sqlite3.SQLITE_CANTOPEN,
    sqlite3.SQLITE_PROTOCOL,
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


# What tells a checkpoint of a file from all others: its digest and a random number.
CheckpointId = tuple[int, int]


class Block(NamedTuple):
    """A block of an array in a file: its blob, and a hash of what it was made from."""

    id: int
    checksum: int
    source: int


class Checkpoint(NamedTuple):
    """What is to be known of a checkpoint to go on with it; by default, that there is none.

    Attributes:
        id: What tells it from all others.
        total: The sum of the hashes of its chunks.
        next_id: The first id that it does not reach.
        blocks: The blocks of its arrays.
    """

    id: CheckpointId | None = None
    total: int = 0
    next_id: int = 1
    blocks: Mapping[str, list[Block]] = MappingProxyType({})

    def __reduce__(self) -> tuple[Any, ...]:
        return Checkpoint, ()  # a copy of a buffer is saved whole


def read_application(connection: sqlite3.Connection) -> int:
    """What kind of database this says that it is."""
    (application,) = connection.execute("PRAGMA application_id").fetchone()
    return int(application)


def check_schema(connection: sqlite3.Connection, path: Path) -> None:
    """Raises a CorruptDataError if a database has a later version, or other tables."""
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    if version > VERSION:
        raise CorruptDataError(
            f"{path} has version {version} of the format, newer than {VERSION}: update gym_compress"
        )
    found = connection.execute(
        "SELECT type, name, tbl_name, sql FROM sqlite_master ORDER BY rowid"
    ).fetchall()
    if version < 1 or found != [("table", name, name, sql) for name, sql in SCHEMA.items()]:
        raise CorruptDataError(f"{path} has other tables than a replay file has")


def read_checkpoint_id(connection: sqlite3.Connection) -> CheckpointId | None:
    """The mark of the checkpoint, or of what was written ahead of the first."""
    row = connection.execute("SELECT digest, owner FROM checkpoint WHERE id = 1").fetchone()
    return None if row is None else (row[0], row[1])


def connect(path: Path, mode: str) -> sqlite3.Connection:
    """Connects to a file, in a mode of SQLite's URIs; other processes are waited for."""
    uri = f"{path.as_uri()}?mode={mode}"
    return sqlite3.connect(uri, uri=True, timeout=_BUSY, isolation_level=None, check_same_thread=False)


@contextmanager
def translate_sqlite_errors(path: str | os.PathLike[str]) -> Iterator[None]:
    """SQLite's errors as OSError where the system is at fault, as CorruptDataError where the file is."""
    try:
        yield
    except sqlite3.Error as error:
        code = getattr(error, "sqlite_errorcode", 0) & 0xFF
        if code in _OF_THE_SYSTEM:
            raise OSError(f"{path}: {error}") from error
        if isinstance(error, sqlite3.ProgrammingError):
            raise  # a fault of this package's
        raise CorruptDataError(f"{path} is no replay file, or damaged: {error}") from error
    except UnicodeDecodeError as error:  # of a message of SQLite's, which quotes the file
        raise CorruptDataError(f"{path} is damaged: {error}") from error


@contextmanager
def as_corrupt(message: str) -> Iterator[None]:
    """What Python and Gymnasium raise over values of a wrong kind, as CorruptDataError."""
    try:
        yield
    except CorruptDataError as error:
        if isinstance(error.__cause__, sqlite3.Error) or message in str(error):
            raise
        raise CorruptDataError(f"{message}: {error}") from error
    except _OF_VALUES as error:
        raise CorruptDataError(f"{message}: {error!r}") from error


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
