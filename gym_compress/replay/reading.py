"""Reading replay files."""

from __future__ import annotations

import json
import math
import os
import sqlite3
import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from gym_compress.chunk import Chunk
from gym_compress.codec import Codec, check_encoded, decode
from gym_compress.errors import CorruptDataError, GymCompressError
from gym_compress.replay.format import (
    APPLICATION_ID,
    BLOCK_CODEC,
    MOST_SETTINGS,
    OVERHEAD,
    SCHEMA,
    SET_CACHE,
    SQLITE_LENGTH,
    VERSION,
    Block,
    ChunkTable,
    array_source,
    block_rows,
    checksum,
    codec_of,
    connect,
    errors_of,
    little,
    refusing,
    row_hash,
    signed,
)

__all__ = ["FileReader", "StoredChunk"]


class StoredChunk:
    """A sealed chunk whose content stays in a file and is read anew each time."""

    __slots__ = ("_file", "checksum", "codec", "id", "nbytes")

    sealed = True

    def __init__(self, file: FileReader, id_: int, checksum: int, nbytes: int, codec: Codec) -> None:
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


class FileReader:
    """An open replay file, to be read: one checkpoint until it is closed, whatever others save.

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
        self._forked = False
        self._digest = 0  # sum of the hashes of the checkpoint's chunks
        self._reached = 1  # the first id beyond the checkpoint
        _files.add(self)

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> Self:
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

    @contextmanager
    def _opening(self, create: bool = False) -> Iterator[None]:
        if self.path.is_dir():
            raise IsADirectoryError(f"{self.path} is a folder, expected a replay file")
        try:
            with errors_of(self.path):
                self._connection = connect(self.path, "rwc" if create else "rw")
                try:
                    yield
                except sqlite3.OperationalError as error:
                    if create or not self._may_be_immutable(error):
                        raise
                    # where nothing can be written SQLite cannot lock either, and nobody else writes
                    self._connection.close()
                    self._connection = connect(self.path, "ro&immutable=1")
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
            with errors_of(self.path):
                connection.close()

    def _connected(self) -> sqlite3.Connection:
        if self._closed:
            raise ValueError(f"{self.path} is closed")
        if self._connection is None:
            self._connect_again()
        assert self._connection is not None
        return self._connection

    def _connect_again(self) -> None:
        """Connects in a forked child, to the same checkpoint."""
        mark, self._connection = self.mark, connect(self.path, "rw")
        try:
            self._begin_to_read()
            if self.mark != mark:
                raise GymCompressError(f"{self.path} was saved since this process was forked: load it again")
        except BaseException:
            self._connection.close()
            self._connection, self.mark = None, mark
            raise

    def _execute(self, statement: str, values: Iterable[Any] = ()) -> sqlite3.Cursor:
        return self._connected().execute(statement, tuple(values))

    def _application(self) -> int:
        (application,) = self._execute("PRAGMA application_id").fetchone()
        return int(application)

    def _check_schema(self) -> None:
        (version,) = self._execute("PRAGMA user_version").fetchone()
        if version != VERSION:
            raise CorruptDataError(f"{self.path} has version {version} of the format, expected {VERSION}")
        found = self._execute("SELECT type, name, tbl_name, sql FROM sqlite_schema ORDER BY rowid").fetchall()
        if found != [("table", name, name, sql) for name, sql in SCHEMA.items()]:
            raise CorruptDataError(f"{self.path} has other tables than a replay file")

    def _mark_now(self) -> tuple[int, int] | None:
        row = self._execute("SELECT digest, owner FROM checkpoint WHERE id = 1").fetchone()
        return None if row is None else (row[0], row[1])

    def _begin_to_read(self) -> None:
        """From now on, what is read is of one checkpoint."""
        self._reads = True
        self._connected().setlimit(sqlite3.SQLITE_LIMIT_LENGTH, MOST_SETTINGS)
        for pragma in ("cell_size_check = ON", "trusted_schema = OFF"):
            self._execute(f"PRAGMA {pragma}")
        if self._application() != APPLICATION_ID:
            raise CorruptDataError(f"{self.path} is not a replay file")
        with suppress(sqlite3.OperationalError):  # a file that cannot be written is read as it is
            self._execute(
                "PRAGMA journal_mode = WAL"
            )  # with it, readers and writer do not wait for each other
        self._execute(SET_CACHE)
        self._execute("BEGIN")
        self._check_schema()
        self.mark = self._mark_now()

    def read_checkpoint(self) -> tuple[dict[str, Any], ChunkTable]:
        """The settings, and what there is to know of the chunks.

        Raises:
            CorruptDataError: If there is no checkpoint, or it is damaged.
        """
        with errors_of(self.path):
            row = self._execute("SELECT checksum, data FROM settings WHERE id = 1").fetchone()
            if row is None or self.mark is None:
                raise CorruptDataError(f"{self.path} holds no checkpoint: its first save was not completed")
            expected, data = row
            if not isinstance(data, bytes) or checksum(1, data) != expected:
                raise CorruptDataError(f"The settings of {self.path} do not have their checksum")
            with refusing(f"The settings of {self.path} are not valid"):
                settings = json.loads(data)
                self._reached = int(settings["next_id"])
            table = self._chunk_table()
            if signed(self._digest + expected) != self.mark[0]:
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
                    total += row_hash(row)
                    codecs.append(codec_of(row[5]))
                    yield row[:5]

            table = np.fromiter(numbers(), np.dtype((np.int64, 5)))
            self._digest = signed(total)
            ids, checksums, streams, firsts, nbytes = np.ascontiguousarray(table.T)
            return ChunkTable(ids, checksums, streams, firsts, nbytes, codecs)

    def structure_faults(self) -> list[str]:
        """What SQLite finds wrong with the structure of the file, a line for each fault.

        Raises:
            CorruptDataError: If it cannot even look.
        """
        with errors_of(self.path):
            found = self._execute("PRAGMA integrity_check").fetchall()
        return [f"{self.path}: {line}" for (text,) in found for line in text.splitlines() if line != "ok"]

    def blob(self, id_: int, expected: int, most: int = SQLITE_LENGTH) -> bytes:
        """The bytes under an id.

        Args:
            id_: The id.
            expected: Their checksum.
            most: How many bytes there are at most.

        Raises:
            CorruptDataError: If they are not there, too many, or have another checksum.
        """
        with errors_of(self.path):
            self._connected().setlimit(sqlite3.SQLITE_LIMIT_LENGTH, most)
            row = self._execute("SELECT data FROM blobs WHERE id = ?", [id_]).fetchone()
        return self._checked(id_, expected, row and row[0])

    def _checked(self, id_: int, expected: int, data: Any) -> bytes:
        if not isinstance(data, bytes):
            raise CorruptDataError(f"Blob {id_} of {self.path} is missing")
        if checksum(id_, data) != expected:
            raise CorruptDataError(f"Blob {id_} of {self.path} does not have its checksum")
        return data

    def content(self, chunk: StoredChunk) -> bytes | NDArray[np.uint8]:
        """The content of a chunk, checked.

        Raises:
            CorruptDataError: If it is damaged.
        """
        data = self.blob(chunk.id, chunk.checksum, chunk.nbytes + OVERHEAD)
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
        for id_, expected, size, codec in zip(*columns, strict=True):
            yield StoredChunk(self, id_, expected, size, codec)

    def read_chunks(self, table: ChunkTable) -> Iterator[Chunk]:
        """The chunks of a table, read.

        Raises:
            CorruptDataError: If one is damaged.
        """
        with errors_of(self.path):
            most = int(table.nbytes.max(initial=0)) + OVERHEAD
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
        if told["dtype"] != little(out.dtype) or shape[:1] != out.shape[:1] or math.prod(shape) != out.size:
            raise CorruptDataError(
                f"An array of {self.path} is {told['dtype']} {shape}, "
                f"expected {little(out.dtype)} {out.shape}"
            )
        row_nbytes = out.nbytes // max(len(out), 1)
        if rows != block_rows(row_nbytes) or len(told["blocks"]) != -(-len(out) // rows if out.nbytes else 0):
            raise CorruptDataError(f"An array of {self.path} has other blocks than its shape asks for")
        flat = out.reshape(-1).view(np.uint8)
        blocks = []
        for i, (id_, expected) in enumerate(told["blocks"]):
            part = flat[i * rows * row_nbytes : (i + 1) * rows * row_nbytes]
            data = self.blob(id_, expected, part.nbytes + OVERHEAD)
            self._unpacked(id_, data, part.nbytes, BLOCK_CODEC)
            try:
                decode(data, part)
            except RuntimeError as error:
                raise CorruptDataError(f"Blob {id_} of {self.path} cannot be decoded: {error}") from None
            blocks.append(Block(id_, expected, array_source(out, part)))
        return blocks


# Files that are open, and connections that a forked child inherited: it must neither use nor close them.
_files: weakref.WeakSet[FileReader] = weakref.WeakSet()
_abandoned: list[sqlite3.Connection | None] = []


def _after_fork() -> None:
    for file in _files:
        _abandoned.append(file._connection)
        file._connection, file._forked = None, True


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
