"""Replay files: SQLite databases under the rules of FORMAT.md, which stands beside this file."""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import sqlite3
import struct
import sys
import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote

import numpy as np
from numpy.typing import NDArray

from gym_compress.chunk import Chunk
from gym_compress.codec import Codec, check_encoded, decode
from gym_compress.errors import CorruptDataError, GymCompressError

__all__ = ["MOST_CHUNK", "Block", "ChunkTable", "ReplayFile", "StoredChunk", "refusing"]

_APPLICATION_ID = 0x47794D43  # "GyMC"
_VERSION = 1
_SCHEMA = {
    "blobs": "CREATE TABLE blobs (id INTEGER PRIMARY KEY, data BLOB NOT NULL)",
    "chunks": "CREATE TABLE chunks (id INTEGER PRIMARY KEY, checksum INTEGER NOT NULL, "
    "stream INTEGER NOT NULL, first INTEGER NOT NULL, nbytes INTEGER NOT NULL, codec TEXT NOT NULL)",
    "settings": "CREATE TABLE settings (id INTEGER PRIMARY KEY, checksum INTEGER NOT NULL, "
    "data BLOB NOT NULL)",
    "checkpoint": "CREATE TABLE checkpoint (id INTEGER PRIMARY KEY, digest INTEGER NOT NULL, "
    "owner INTEGER NOT NULL)",
}
_PAGE = 16384  # a chunk of Atari frames is about 2 KB, and pages are filled by whole chunks
_CACHE = 1000  # KiB of pages that a connection keeps
_BUSY = 60.0  # seconds to wait for another process
_BATCH = 128  # chunks that wait to be written together

# Limits of FORMAT.md, in bytes.
MOST_CHUNK = 2**27
_MOST_SETTINGS = 2**24
_OVERHEAD = 1024  # of a blob beyond what it decodes to
_SQLITE_LENGTH = 10**9

_BLOCK = 2**15  # what a block of an array aims at
_BLOCK_CODEC = Codec("zstd", 1)

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

_SET_CACHE = f"PRAGMA cache_size = -{_CACHE}"  # counts in pages of the size that is known when it is set
_COUNT_TABLES = "SELECT count(*) FROM sqlite_schema"

_pack_id = struct.Struct("<q").pack
_pack_row = struct.Struct("<qqqqq").pack


class StoredChunk:
    """A sealed chunk whose content stays in a file and is read anew each time."""

    __slots__ = ("_file", "checksum", "codec", "id", "nbytes")

    sealed = True

    def __init__(self, file: ReplayFile, id_: int, checksum: int, nbytes: int, codec: Codec) -> None:
        self._file = file
        self.id = id_
        self.checksum = checksum
        self.nbytes = nbytes
        self.codec = codec

    @property
    def content(self) -> bytes | NDArray[np.uint8]:
        """What :class:`gym_compress.chunk.Chunk` has there.

        Raises:
            CorruptDataError: If it is damaged.
        """
        return self._file.content(self)

    @property
    def cbytes(self) -> int:
        """Bytes of memory that the content takes."""
        return 0


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


class ReplayFile:
    """An open replay file.

    Who only reads sees the checkpoint that was opened until it is closed, whatever others save. Who writes
    commits blobs and chunks with ids that the checkpoint does not reach, so that nobody sees them, until new
    settings make them part of the next checkpoint.

    Attributes:
        path: Where it is.
        mark: What tells this checkpoint from all others: its digest and a random number; None if there is
            none.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.mark: tuple[int, int] | None = None
        self._connection: sqlite3.Connection | None = None
        self._closed = False
        self._reads = False  # whether a checkpoint is open to be read
        self._held = False  # whether it stays open to be written, see take_over
        self._forked = False
        self._digest = 0  # sum of the hashes of the checkpoint's chunks
        self._added = 0  # and of those that came since
        self._reached = 1  # the first id beyond the checkpoint
        self._next = 1
        self._waiting: dict[int, tuple[bytes, tuple[Any, ...]]] = {}  # what is to be inserted, by id
        self._dropped: list[int] = []
        _files.add(self)

    # Opening and closing.

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> ReplayFile:
        """Opens the checkpoint of a file, to read it.

        Raises:
            FileNotFoundError: If there is no file.
            CorruptDataError: If it is no replay file, damaged, or holds no checkpoint.
            OSError: If the system refuses.
        """
        file = cls(Path(path).absolute())
        if not file.path.exists():
            raise FileNotFoundError(f"There is no file {path}")
        with file._opening():
            file._begin_to_read()
        return file

    @classmethod
    def open_to_save(cls, path: str | os.PathLike[str]) -> ReplayFile:
        """Opens a file for the next checkpoint, or makes it if it is not there or empty.

        Raises:
            FileExistsError: If there is a file, but no replay file.
            CorruptDataError: If it is damaged.
            OSError: If the system refuses.
        """
        file = cls(Path(path).absolute())
        if not file.path.parent.is_dir():
            raise FileNotFoundError(f"{path} cannot be written: there is no folder {file.path.parent}")
        if sys.byteorder != "little":
            raise GymCompressError("Replay files can be written on little-endian machines only")
        with file._opening(create=True):
            file._prepare()
        return file

    @classmethod
    def create(cls, path: str | os.PathLike[str]) -> ReplayFile:
        """Makes a file, which stays open for chunks to come.

        Raises:
            FileExistsError: If something is there already.
            OSError: If the system refuses.
        """
        if os.path.lexists(path):
            raise FileExistsError(
                f"{path} is there already: go on with it by load(path, lazy=True), or move it away"
            )
        file = cls.open_to_save(path)
        try:
            with _errors_of(path):
                file._execute("PRAGMA journal_mode = WAL")
            file.take_over()
        except BaseException:
            file.close()
            raise
        return file

    @contextmanager
    def _opening(self, create: bool = False) -> Iterator[None]:
        if self.path.is_dir():
            raise IsADirectoryError(f"{self.path} is a folder, expected a replay file")
        try:
            with _errors_of(self.path):
                self._connection = _connect(self.path, "rwc" if create else "rw")
                try:
                    yield
                except sqlite3.OperationalError as error:
                    if create or not self._may_be_immutable(error):
                        raise
                    # where nothing can be written SQLite cannot lock either, and nobody else writes
                    self._connection.close()
                    self._connection = _connect(self.path, "ro&immutable=1")
                    self._begin_to_read()
        except BaseException:
            self.close()
            raise

    def _may_be_immutable(self, error: sqlite3.OperationalError) -> bool:
        wal = Path(f"{self.path}-wal")
        refused = error.sqlite_errorcode & 0xFF in (sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_READONLY)
        return refused and not os.access(self.path.parent, os.W_OK) and not wal.exists()

    def __reduce__(self) -> tuple[Any, ...]:
        raise TypeError(
            f"A buffer whose chunks are in {self.path} cannot be copied or pickled: load the file"
        )

    def __del__(self) -> None:
        with suppress(Exception):
            self.close()

    def close(self) -> None:
        """Closes the file; what was not saved is lost."""
        self._closed = True
        connection, self._connection = self._connection, None
        if connection is not None:
            with _errors_of(self.path):
                connection.close()

    def _connected(self) -> sqlite3.Connection:
        if self._closed:
            raise ValueError(f"{self.path} is closed")
        if self._connection is None:  # in a forked child
            self._connection = _connect(self.path, "rw")
            self._execute("BEGIN")
            if self._mark_now() != self.mark:
                raise GymCompressError(f"{self.path} was saved since this process was forked: load it again")
        return self._connection

    def _execute(self, statement: str, values: Iterable[Any] = ()) -> sqlite3.Cursor:
        return self._connected().execute(statement, tuple(values))

    # Reading.

    def _begin_to_read(self) -> None:
        """From now on, what is read is of one checkpoint."""
        self._reads = True
        self._connected().setlimit(sqlite3.SQLITE_LIMIT_LENGTH, _MOST_SETTINGS)
        for pragma in ("cell_size_check = ON", "trusted_schema = OFF"):
            self._execute(f"PRAGMA {pragma}")
        if self._application() != _APPLICATION_ID:
            raise CorruptDataError(f"{self.path} is not a replay file")
        with suppress(sqlite3.OperationalError):  # a file that cannot be written is read as it is
            self._execute(
                "PRAGMA journal_mode = WAL"
            )  # with it, readers and writer do not wait for each other
        self._execute(_SET_CACHE)
        self._execute("BEGIN")
        self._check_schema()
        self.mark = self._mark_now()

    def read_checkpoint(self) -> tuple[dict[str, Any], ChunkTable]:
        """The settings, and what there is to know of the chunks.

        Raises:
            CorruptDataError: If there is no checkpoint, or it is damaged.
        """
        with _errors_of(self.path):
            row = self._execute("SELECT checksum, data FROM settings WHERE id = 1").fetchone()
            if row is None or self.mark is None:
                raise CorruptDataError(f"{self.path} holds no checkpoint: its first save was not completed")
            checksum, data = row
            if not isinstance(data, bytes) or _checksum(1, data) != checksum:
                raise CorruptDataError(f"The settings of {self.path} do not have their checksum")
            with refusing(f"The settings of {self.path} are not valid"):
                settings = json.loads(data)
                self._reached = self._next = int(settings["next_id"])
            table = self._chunk_table()
            if _signed(self._digest + checksum) != self.mark[0]:
                raise CorruptDataError(
                    f"{self.path} has parts of different checkpoints, or lost some: its digest differs"
                )
            return settings, table

    def _chunk_table(self) -> ChunkTable:
        with refusing(f"The chunks of {self.path} are not valid"):
            rows = self._execute(
                "SELECT id, checksum, stream, first, nbytes, codec FROM chunks WHERE id < ? ORDER BY id",
                [self._reached],
            )
            codecs: list[Codec] = []
            total = 0

            def numbers() -> Iterator[tuple[int, ...]]:
                nonlocal total
                for row in rows:
                    total += _row_hash(row)
                    codecs.append(_codec_of(row[5]))
                    yield row[:5]

            table = np.fromiter(numbers(), np.dtype((np.int64, 5)))
            self._digest = _signed(total)
            ids, checksums, streams, firsts, nbytes = np.ascontiguousarray(table.T)
            return ChunkTable(ids, checksums, streams, firsts, nbytes, codecs)

    def blob(self, id_: int, checksum: int, most: int) -> bytes:
        """The bytes under an id.

        Args:
            id_: The id.
            checksum: Their checksum.
            most: How many bytes there are at most.

        Raises:
            CorruptDataError: If they are not there, too many, or have another checksum.
        """
        with _errors_of(self.path):
            self._connected().setlimit(sqlite3.SQLITE_LIMIT_LENGTH, most)
            row = self._execute("SELECT data FROM blobs WHERE id = ?", [id_]).fetchone()
        return self._checked(id_, checksum, row and row[0])

    def _checked(self, id_: int, checksum: int, data: Any) -> bytes:
        if not isinstance(data, bytes):
            raise CorruptDataError(f"Blob {id_} of {self.path} is missing")
        if _checksum(id_, data) != checksum:
            raise CorruptDataError(f"Blob {id_} of {self.path} does not have its checksum")
        return data

    def content(self, chunk: StoredChunk) -> bytes | NDArray[np.uint8]:
        """The content of a chunk, checked.

        Raises:
            CorruptDataError: If it is damaged.
        """
        if chunk.id in self._waiting:
            data = self._waiting[chunk.id][0]
        else:
            data = self.blob(chunk.id, chunk.checksum, chunk.nbytes + _OVERHEAD)
        return self._unpacked(chunk.id, data, chunk.nbytes, chunk.codec)

    def _unpacked(self, id_: int, data: bytes, nbytes: int, codec: Codec) -> bytes | NDArray[np.uint8]:
        try:
            if codec.name != "none":
                check_encoded(data, nbytes)
                return data
            if len(data) == nbytes:
                return np.frombuffer(data, np.uint8)
        except CorruptDataError as error:
            raise CorruptDataError(f"Blob {id_} of {self.path}: {error}") from None
        raise CorruptDataError(f"Blob {id_} of {self.path} has {len(data)} bytes, expected {nbytes}")

    def stored_chunks(self, table: ChunkTable) -> Iterator[StoredChunk]:
        """The chunks of a table, left where they are."""
        ids, checksums, _, _, nbytes, codecs = table
        columns = ids.tolist(), checksums.tolist(), nbytes.tolist(), codecs
        for id_, checksum, size, codec in zip(*columns, strict=True):
            yield StoredChunk(self, id_, checksum, size, codec)

    def read_chunks(self, table: ChunkTable) -> Iterator[Chunk]:
        """The chunks of a table, read.

        Raises:
            CorruptDataError: If one is damaged.
        """
        with _errors_of(self.path):
            most = int(table.nbytes.max(initial=0)) + _OVERHEAD
            self._connected().setlimit(sqlite3.SQLITE_LIMIT_LENGTH, most)
            rows = self._execute(
                "SELECT data FROM chunks LEFT JOIN blobs USING (id) WHERE id < ? ORDER BY id", [self._reached]
            )
            for chunk, (data,) in zip(self.stored_chunks(table), rows, strict=True):
                data = self._checked(chunk.id, chunk.checksum, data)
                content = self._unpacked(chunk.id, data, chunk.nbytes, chunk.codec)
                yield Chunk(content, chunk.nbytes, chunk.codec, sealed=True)

    def read_array(self, told: dict[str, Any], out: NDArray[Any]) -> list[Block]:
        """Reads an array.

        Args:
            told: What the settings say of it.
            out: Where it goes, C-contiguous; of its shape, or of as many elements a row.

        Returns:
            Its blocks, for :meth:`put_array`.

        Raises:
            CorruptDataError: If it is damaged, or does not fit.
        """
        rows, shape = told["rows"], tuple(told["shape"])
        if told["dtype"] != _little(out.dtype) or shape[:1] != out.shape[:1] or _count(shape) != out.size:
            raise CorruptDataError(
                f"An array of {self.path} is {told['dtype']} {shape}, "
                f"expected {_little(out.dtype)} {out.shape}"
            )
        row_nbytes = out.nbytes // max(len(out), 1)
        if rows != _block_rows(row_nbytes) or len(told["blocks"]) != -(
            -len(out) // rows if out.nbytes else 0
        ):
            raise CorruptDataError(f"An array of {self.path} has other blocks than its shape asks for")
        flat = out.reshape(-1).view(np.uint8)
        blocks = []
        for i, (id_, checksum) in enumerate(told["blocks"]):
            part = flat[i * rows * row_nbytes : (i + 1) * rows * row_nbytes]
            data = self.blob(id_, checksum, part.nbytes + _OVERHEAD)
            self._unpacked(id_, data, part.nbytes, _BLOCK_CODEC)
            try:
                decode(data, part)
            except RuntimeError as error:
                raise CorruptDataError(f"Blob {id_} of {self.path} cannot be decoded: {error}") from None
            blocks.append(Block(id_, checksum, _source(out, part)))
        return blocks

    # Writing.

    def _prepare(self) -> None:
        """Gets ready to write: makes the tables, or checks them."""
        for pragma in ("trusted_schema = OFF", "secure_delete = OFF", f"page_size = {_PAGE}"):
            self._execute(f"PRAGMA {pragma}")
        self._execute("BEGIN IMMEDIATE")
        try:
            application, (tables,) = self._application(), self._execute(_COUNT_TABLES).fetchone()
            if not application and not tables:
                for statement in _SCHEMA.values():
                    self._execute(statement)
                self._execute(f"PRAGMA application_id = {_APPLICATION_ID}")
                self._execute(f"PRAGMA user_version = {_VERSION}")
            elif application != _APPLICATION_ID:
                raise FileExistsError(f"{self.path} is there already, and is not a replay file")
            self._check_schema()
            self._execute("COMMIT")
        except BaseException:
            self._roll_back()
            raise
        self._execute(_SET_CACHE)
        if self._mark_now():
            self._execute("PRAGMA journal_mode = WAL")
        # else nobody reads it yet, and the first checkpoint is quicker written without

    def _application(self) -> int:
        (application,) = self._execute("PRAGMA application_id").fetchone()
        return int(application)

    def _check_schema(self) -> None:
        (version,) = self._execute("PRAGMA user_version").fetchone()
        if version != _VERSION:
            raise CorruptDataError(f"{self.path} has version {version} of the format, expected {_VERSION}")
        found = self._execute("SELECT type, name, tbl_name, sql FROM sqlite_schema ORDER BY rowid").fetchall()
        if found != [("table", name, name, sql) for name, sql in _SCHEMA.items()]:
            raise CorruptDataError(f"{self.path} has other tables than a replay file")

    def _mark_now(self) -> tuple[int, int] | None:
        row = self._execute("SELECT digest, owner FROM checkpoint WHERE id = 1").fetchone()
        return None if row is None else (row[0], row[1])

    def _set_mark(self, digest: int) -> None:
        self.mark = digest, secrets.randbits(62)
        self._execute("INSERT OR REPLACE INTO checkpoint VALUES (1, ?, ?)", self.mark)

    def take_over(self) -> None:
        """Stays open for chunks to come. What another process left beyond the checkpoint goes.

        Raises:
            GymCompressError: If the file was saved since it was opened.
            OSError: If the system refuses.
        """
        with _errors_of(self.path):
            self._check_process()
            connection = self._connected()
            connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, _SQLITE_LENGTH)
            mark = self.mark
            try:
                if not connection.in_transaction:
                    self._execute("BEGIN IMMEDIATE")
                self._set_mark(mark[0] if mark else 0)
                for table in ("blobs", "chunks"):
                    self._execute(f"DELETE FROM {table} WHERE id >= ?", [self._reached])
                self._execute("COMMIT")
            except BaseException as error:
                self.mark = mark
                if getattr(error, "sqlite_errorcode", None) == sqlite3.SQLITE_BUSY_SNAPSHOT:
                    raise GymCompressError(
                        f"{self.path} was saved by another process since it was opened here: load it again"
                    ) from None
                self._roll_back()
                raise
            self._execute("PRAGMA secure_delete = OFF")
            self._execute("PRAGMA synchronous = NORMAL")
            self._held = True

    @contextmanager
    def saving(self) -> Iterator[None]:
        """A transaction that makes a checkpoint, if all goes well, and changes nothing otherwise.

        Before the first of it, what :meth:`put` was given by a file that stays open is written by itself.
        """
        if self._reads and not self._held:
            self.take_over()
        if self._held:
            self.flush()
            self._pragma("synchronous = FULL")
        with self._transaction():
            if not self._held:
                self.mark = self._mark_now()
                (last,) = self._execute("SELECT max(id) FROM blobs").fetchone()
                self._reached = self._next = (last or 0) + 1
                settings = self._execute("SELECT checksum FROM settings WHERE id = 1").fetchone()
                self._digest = _signed((self.mark or (0,))[0] - (settings or (0,))[0])
            yield
        if self._held:
            self._pragma("synchronous = NORMAL")
        with suppress(sqlite3.OperationalError):  # then the next one does
            self._execute("PRAGMA journal_mode = WAL")
            self._execute("PRAGMA wal_checkpoint(PASSIVE)")

    def _pragma(self, pragma: str) -> None:
        with _errors_of(self.path):
            self._execute(f"PRAGMA {pragma}")

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        self._check_process()
        before = self.mark, self._digest, self._added, self._reached, self._next, self._dropped
        self._dropped = [*self._dropped]
        try:
            with _errors_of(self.path):
                self._connected().setlimit(sqlite3.SQLITE_LIMIT_LENGTH, _SQLITE_LENGTH)
                self._execute("BEGIN IMMEDIATE")
                if self._held and self._mark_now() != self.mark:
                    raise GymCompressError(
                        f"Another process has saved to {self.path}, which this one has open: what is not "
                        "in memory is lost"
                    )
                yield
                self._execute("COMMIT")
        except BaseException:
            self.mark, self._digest, self._added, self._reached, self._next, self._dropped = before
            self._roll_back()
            raise

    def _roll_back(self) -> None:
        if self._connection is not None and self._connection.in_transaction:
            with suppress(sqlite3.OperationalError):  # some errors roll back by themselves
                self._connection.execute("ROLLBACK")

    def _check_process(self) -> None:
        if self._forked:
            raise GymCompressError(
                f"{self.path} is written by the process that opened it, not by one forked off"
            )

    def put(self, stream: int, first: int, chunk: Chunk | StoredChunk) -> StoredChunk:
        """Takes a sealed chunk in, which :meth:`flush` or a checkpoint writes.

        Args:
            stream: The number of the stream that it belongs to.
            first: The number of its first slice.
            chunk: The chunk.

        Raises:
            ValueError: If it is too large.
        """
        if chunk.nbytes > MOST_CHUNK:
            raise ValueError(f"A chunk of {chunk.nbytes} bytes is too large for a file: {MOST_CHUNK} at most")
        content, codec = chunk.content, str(chunk.codec)
        data = content if isinstance(content, bytes) else content.tobytes()
        id_, self._next = self._next, self._next + 1
        checksum = _checksum(id_, data)
        self._waiting[id_] = data, (id_, checksum, stream, first, chunk.nbytes, codec)
        if not self._held and len(self._waiting) >= _BATCH:
            self._write_waiting()
            self._waiting.clear()
        return StoredChunk(self, id_, checksum, chunk.nbytes, chunk.codec)

    def drop(self, ids: Iterable[int]) -> None:
        """Forgets chunks: those of the checkpoint with the next one, others with the next :meth:`flush`."""
        for id_ in ids:
            if not self._waiting.pop(id_, None):
                self._dropped.append(id_)

    def is_crowded(self) -> bool:
        """Whether many chunks wait to be written."""
        return len(self._waiting) >= _BATCH

    def flush(self) -> None:
        """Writes the chunks that wait, and deletes those that came and went since the checkpoint.

        Raises:
            OSError: If the system refuses; they wait on then.
            GymCompressError: If another process has written to the file.
        """
        if not self._held:
            self.take_over()
        with self._transaction():
            self._write_waiting()
            gone = [id_ for id_ in self._dropped if id_ >= self._reached]
            self._delete(gone)
            self._dropped = [id_ for id_ in self._dropped if id_ < self._reached]
        self._waiting.clear()

    def _write_waiting(self) -> None:
        waiting = self._waiting.values()
        connection = self._connected()
        connection.executemany("INSERT INTO blobs VALUES (?, ?)", ((row[0], data) for data, row in waiting))
        rows = [row for _, row in waiting]
        connection.executemany("INSERT INTO chunks VALUES (?, ?, ?, ?, ?, ?)", rows)
        self._added += sum(_row_hash(row) for row in rows)

    def _delete(self, ids: list[int]) -> None:
        for run in _runs(ids):
            for row in self._execute(
                "DELETE FROM chunks WHERE id BETWEEN ? AND ? RETURNING *", run
            ).fetchall():
                if row[0] < self._reached:
                    self._digest -= _row_hash(row)
                else:
                    self._added -= _row_hash(row)
            self._execute("DELETE FROM blobs WHERE id BETWEEN ? AND ?", run)

    def clear(self) -> None:
        """Deletes all, within a transaction."""
        for table in ("blobs", "chunks", "settings"):
            self._execute(f"DELETE FROM {table}")
        self._digest = 0

    def evict(self) -> None:
        """Deletes what was dropped, within a transaction."""
        self._delete(self._dropped)
        self._dropped = []

    def put_array(self, array: NDArray[Any], before: list[Block]) -> tuple[dict[str, Any], list[Block]]:
        """Writes the blocks of an array that changed, within a transaction.

        Args:
            array: The array.
            before: Its blocks in the checkpoint before.

        Returns:
            What the settings say of it, and its blocks.
        """
        row_nbytes = array.nbytes // max(len(array), 1)
        rows = _block_rows(row_nbytes)
        flat = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        blocks: list[Block] = []
        gone = {block.id for block in before}
        for i, start in enumerate(range(0, flat.nbytes, rows * row_nbytes or 1)):
            part = flat[start : start + rows * row_nbytes]
            source = _source(array, part)
            if i < len(before) and before[i].source == source:
                blocks.append(before[i])
                gone.remove(before[i].id)
                continue
            if part.nbytes > MOST_CHUNK:
                raise ValueError(
                    f"Rows of {part.nbytes} bytes are too large for a file: {MOST_CHUNK} at most"
                )
            data = _BLOCK_CODEC.encode(part, array.dtype.itemsize)
            id_, self._next = self._next, self._next + 1
            self._execute("INSERT INTO blobs VALUES (?, ?)", [id_, data])
            blocks.append(Block(id_, _checksum(id_, data), source))
        self._connected().executemany("DELETE FROM blobs WHERE id = ?", [(id_,) for id_ in gone])
        told = {
            "dtype": _little(array.dtype),
            "shape": array.shape,
            "rows": rows,
            "blocks": [block[:2] for block in blocks],
        }
        return told, blocks

    def finish(self, settings: dict[str, Any]) -> None:
        """Ends a checkpoint with its settings, within a transaction.

        Raises:
            ValueError: If they are too large.
        """
        self._write_waiting()
        self._waiting.clear()
        settings = {**settings, "next_id": self._next}
        data = json.dumps(settings, separators=(",", ":"), allow_nan=False).encode()
        if len(data) > _MOST_SETTINGS:
            raise ValueError(
                f"Settings of {len(data)} bytes are too large for a file: {_MOST_SETTINGS} at most"
            )
        checksum = _checksum(1, data)
        self._execute("INSERT OR REPLACE INTO settings VALUES (1, ?, ?)", [checksum, data])
        self._digest = _signed(self._digest + self._added)
        self._added, self._reached = 0, self._next
        self._set_mark(_signed(self._digest + checksum))


def _connect(path: Path, mode: str) -> sqlite3.Connection:
    uri = f"file:{quote(os.fsencode(path))}?mode={mode}"
    return sqlite3.connect(uri, uri=True, timeout=_BUSY, isolation_level=None, check_same_thread=False)


@contextmanager
def _errors_of(path: str | os.PathLike[str]) -> Iterator[None]:
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


def _runs(ids: list[int]) -> Iterator[tuple[int, int]]:
    """Ids as runs that follow each other, each with its first and its last."""
    ids = sorted(ids)
    breaks = [i for i in range(1, len(ids)) if ids[i] != ids[i - 1] + 1]
    for start, end in zip([0, *breaks], [*breaks, len(ids)], strict=True):
        if start < end:
            yield ids[start], ids[end - 1]


def _hash(data: bytes) -> int:
    """BLAKE2b of 64 bits, as a signed integer."""
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little", signed=True)


def _checksum(id_: int, data: bytes) -> int:
    return _hash(_pack_id(id_) + data)


def _row_hash(row: tuple[Any, ...]) -> int:
    return _hash(_pack_row(*row[:5]) + row[5].encode())


def _source(array: NDArray[Any], part: NDArray[np.uint8]) -> int:
    """A hash that tells, in this process, whether a part of an array changed."""
    return hash((array.dtype, array.shape[1:], part.tobytes()))


def _signed(total: int) -> int:
    """An integer modulo 2**64, as SQLite keeps it."""
    return (total + 2**63) % 2**64 - 2**63


@lru_cache(maxsize=64)
def _codec_of(text: str) -> Codec:
    return Codec.from_string(text)


def _little(dtype: np.dtype[Any]) -> str:
    return dtype.newbyteorder("<").str


def _count(shape: tuple[int, ...]) -> int:
    count = 1
    for length in shape:
        count *= length
    return count


def _block_rows(row_nbytes: int) -> int:
    """How many rows of an array are in a block: what makes 32 KiB, but at least one."""
    return max(1, _BLOCK // max(row_nbytes, 1))


# Files that are open, and connections that a forked child inherited: it must neither use nor close them.
_files: weakref.WeakSet[ReplayFile] = weakref.WeakSet()
_abandoned: list[sqlite3.Connection | None] = []


def _after_fork() -> None:
    for file in _files:
        _abandoned.append(file._connection)
        file._connection, file._forked = None, True


os.register_at_fork(after_in_child=_after_fork)
