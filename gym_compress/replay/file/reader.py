"""Reading replay files."""

from __future__ import annotations

import json
import os
import sqlite3
import weakref
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from gym_compress.chunk import MOST_SHIPPED, Chunk
from gym_compress.codec import Codec, check_encoded, decode
from gym_compress.errors import CorruptDataError, GymCompressError
from gym_compress.replay.file import format as fmt

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
        checkpoint: The checkpoint, as far as it is known yet.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.checkpoint = fmt.Checkpoint()
        self.connection: sqlite3.Connection | None = None
        self._closed = False
        self.forked = False  # whether this process was forked from the one that opened the file
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
        if file.path.is_dir():
            raise IsADirectoryError(f"{path} is a folder, expected a replay file")
        with fmt.translate_sqlite_errors(file.path):
            try:
                file._begin("rw")
            except sqlite3.OperationalError as error:
                if not file._may_be_immutable(error):
                    raise
                # where nothing can be written SQLite cannot lock either, and nobody else writes
                file._begin("ro&immutable=1")
        return file

    def _begin(self, mode: str) -> None:
        """Connects; from now on, what is read is of one checkpoint."""
        connection = fmt.connect(self.path, mode)
        try:
            self.set_up(connection)
            if fmt.read_application(connection) != fmt.APPLICATION_ID:
                raise CorruptDataError(f"{self.path} is not a replay file")
            with suppress(sqlite3.OperationalError):  # a file that cannot be written is read as it is
                # readers and a writer do not wait for each other then
                connection.execute("PRAGMA journal_mode = WAL")
            connection.execute(fmt.SET_CACHE)
            connection.execute("BEGIN")
            fmt.check_schema(connection, self.path)
            id_ = fmt.read_checkpoint_id(connection)
            before = self.checkpoint.id
            if self.forked and (id_ and id_[0]) != (before and before[0]):
                raise GymCompressError(
                    f"{self.path} was saved since it was opened, and this forked process cannot see what "
                    "it was before: load it in this process"
                )
        except BaseException:
            connection.close()
            raise
        self.connection, self.checkpoint = connection, self.checkpoint._replace(id=id_)

    @staticmethod
    def set_up(connection: sqlite3.Connection) -> None:
        """Guards against what a file may do to its reader, before anything is read."""
        connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, fmt.MOST_SETTINGS)
        for pragma in ("cell_size_check = ON", "trusted_schema = OFF"):
            connection.execute(f"PRAGMA {pragma}")

    def _may_be_immutable(self, error: sqlite3.OperationalError) -> bool:
        path = self.path.resolve()
        code = getattr(error, "sqlite_errorcode", 0) & 0xFF
        refused = code in (sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_READONLY)
        return refused and not os.access(path.parent, os.W_OK) and not Path(f"{path}-wal").exists()

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
        connection, self.connection = self.connection, None
        if connection is not None:
            with fmt.translate_sqlite_errors(self.path):
                connection.close()

    def check_open(self) -> None:
        """Raises a ValueError if the file is closed."""
        if self._closed:
            raise ValueError(f"{self.path} is closed")

    def connected(self) -> sqlite3.Connection:
        """The connection; a new one in a forked process."""
        self.check_open()
        if self.connection is None:  # in a forked process
            with fmt.translate_sqlite_errors(self.path):
                self._begin("rw")
        assert self.connection is not None
        return self.connection

    def read_checkpoint(self) -> tuple[dict[str, Any], fmt.ChunkTable]:
        """The settings, and what there is to know of the chunks.

        Raises:
            CorruptDataError: If there is no checkpoint, or it is damaged.
        """
        with fmt.translate_sqlite_errors(self.path):
            connection, id_ = self.connected(), self.checkpoint.id
            row = connection.execute("SELECT checksum, data FROM settings WHERE id = 1").fetchone()
            if row is None or id_ is None:
                raise CorruptDataError(
                    f"{self.path} holds no checkpoint, since its first save was not completed: nothing is in "
                    "it, and it can be deleted or saved over"
                )
            expected, data = row
            if not isinstance(data, bytes) or fmt.checksum(1, data) != expected:
                raise CorruptDataError(f"The settings of {self.path} do not have their checksum")
            with fmt.as_corrupt(f"The settings of {self.path} are not valid"):
                settings = json.loads(data)
                next_id = settings["next_id"]
                if type(next_id) is not int or not 0 < next_id <= fmt.MOST_ID:
                    raise CorruptDataError(f"next_id is {next_id!r}")
                table, total = self._chunk_table(next_id)
            if fmt.signed(total + expected) != id_[0]:
                raise CorruptDataError(
                    f"{self.path} has parts of different checkpoints, or lost some: its digest differs"
                )
            self.checkpoint = fmt.Checkpoint(id_, total, next_id)
            return settings, table

    def _chunk_table(self, next_id: int) -> tuple[fmt.ChunkTable, int]:
        """The table of chunks, and the sum of the hashes of its rows."""
        select = "SELECT * FROM chunks WHERE id < ? ORDER BY id"
        codecs: list[Codec] = []
        total = 0

        def numbers(rows: sqlite3.Cursor) -> Iterator[tuple[int, ...]]:
            nonlocal total
            for row in rows:
                total += fmt.row_hash(row)
                codecs.append(fmt.codec_of(row[5]))
                yield row[:5]

        # as long as a cursor is open, a connection closes in name only: an error would keep it
        with closing(self.connected().execute(select, [next_id])) as rows:
            found = np.fromiter(numbers(rows), np.dtype((np.int64, 5)))
        ids, checksums, streams, firsts, nbytes = found.T.copy()
        if len(ids) and not (
            ids[0] > 0 and streams.min() >= 0 and 0 < nbytes.min() <= nbytes.max() <= MOST_SHIPPED
        ):
            raise CorruptDataError(f"Ids, streams or sizes of the chunks of {self.path} are out of bounds")
        return fmt.ChunkTable(ids, checksums, streams, firsts, nbytes, codecs), total

    def structure_faults(self) -> list[str]:
        """What SQLite finds wrong with the structure of the file, a line for each fault.

        Raises:
            CorruptDataError: If it cannot even look.
        """
        with fmt.translate_sqlite_errors(self.path):
            found = self.connected().execute("PRAGMA integrity_check").fetchall()
        return [f"{self.path}: {line}" for (text,) in found for line in text.splitlines() if line != "ok"]

    def blob(self, id_: int, expected: int, most: int = fmt.SQLITE_LENGTH) -> bytes:
        """The bytes under an id.

        Args:
            id_: The id.
            expected: Their checksum.
            most: How many bytes there are at most.

        Raises:
            CorruptDataError: If they are not there, too many, or have another checksum.
        """
        with fmt.translate_sqlite_errors(self.path):
            connection = self.connected()
            connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, most)
            row = connection.execute("SELECT data FROM blobs WHERE id = ?", [id_]).fetchone()
        return self._checked(id_, expected, row and row[0])

    def _checked(self, id_: int, expected: int, data: Any) -> bytes:
        if not isinstance(data, bytes):
            raise CorruptDataError(f"Blob {id_} of {self.path} is missing")
        if fmt.checksum(id_, data) != expected:
            raise CorruptDataError(f"Blob {id_} of {self.path} does not have its checksum")
        return data

    def content(self, chunk: StoredChunk) -> bytes | NDArray[np.uint8]:
        """The content of a chunk, checked.

        Raises:
            CorruptDataError: If it is damaged.
        """
        data = self.blob(chunk.id, chunk.checksum, chunk.nbytes + fmt.OVERHEAD)
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

    def stored_chunks(self, table: fmt.ChunkTable) -> Iterator[StoredChunk]:
        """The chunks of a table, left where they are."""
        ids, checksums, _, _, nbytes, codecs = table
        columns = ids.tolist(), checksums.tolist(), nbytes.tolist(), codecs
        for id_, expected, size, codec in zip(*columns, strict=True):
            yield StoredChunk(self, id_, expected, size, codec)

    def read_chunks(self, table: fmt.ChunkTable) -> Iterator[Chunk]:
        """The chunks of a table, read.

        Raises:
            CorruptDataError: If one is damaged.
        """
        with fmt.translate_sqlite_errors(self.path):
            most = int(table.nbytes.max(initial=0)) + fmt.OVERHEAD
            connection = self.connected()
            connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, most)
            select = "SELECT data FROM chunks LEFT JOIN blobs USING (id) WHERE id < ? ORDER BY id"
            with closing(connection.execute(select, [self.checkpoint.next_id])) as rows:
                for chunk, (data,) in zip(self.stored_chunks(table), rows, strict=True):
                    data = self._checked(chunk.id, chunk.checksum, data)
                    content = self._unpacked(chunk.id, data, chunk.nbytes, chunk.codec)
                    yield Chunk(content, chunk.nbytes, chunk.codec, sealed=True)

    def read_array(self, spec: dict[str, Any], name: str, out: NDArray[Any]) -> list[fmt.Block]:
        """Reads an array.

        Args:
            spec: What the settings say of it.
            name: Its name.
            out: Where it goes, C-contiguous. The file may leave out axes of length 1 behind the second.

        Returns:
            Its blocks.

        Raises:
            CorruptDataError: If it has another shape or dtype, cannot be in its blocks, or one is damaged.
        """
        dtype, shape = spec["dtype"], tuple(spec["shape"])
        if dtype != fmt.little(out.dtype) or _squeezed(shape) != _squeezed(out.shape):
            raise CorruptDataError(f"{name} is {dtype} {shape}, expected {fmt.little(out.dtype)} {out.shape}")
        row_nbytes = out[:1].nbytes
        rows = fmt.block_rows(row_nbytes)
        count = -(-len(out) // rows) if row_nbytes else 0
        if (
            len(spec["blocks"]) != count
            or (count and spec["rows"] != rows)
            or rows * row_nbytes > MOST_SHIPPED
        ):
            raise CorruptDataError(f"{name} has other blocks than its shape asks for")
        flat = out.reshape(-1).view(np.uint8)
        blocks = []
        for i, (id_, expected) in enumerate(spec["blocks"]):
            if not 0 < id_ < self.checkpoint.next_id:
                raise CorruptDataError(f"Blob {id_} is beyond the checkpoint")
            part = flat[i * rows * row_nbytes : (i + 1) * rows * row_nbytes]
            data = self.blob(id_, expected, part.nbytes + fmt.OVERHEAD)
            self._unpacked(id_, data, part.nbytes, fmt.BLOCK_CODEC)
            try:
                decode(data, part)
            except CorruptDataError as error:
                raise CorruptDataError(f"Blob {id_} of {self.path} cannot be decoded: {error}") from None
            blocks.append(fmt.Block(id_, expected, fmt.array_source(out, part)))
        return blocks


def _squeezed(shape: tuple[int, ...]) -> tuple[int, ...]:
    return shape[:2] + tuple([length for length in shape[2:] if length != 1])


# Files that are open, and connections that a forked child inherited: it must neither use nor close them.
_files: weakref.WeakSet[FileReader] = weakref.WeakSet()
_abandoned: list[sqlite3.Connection | None] = []


def _after_fork() -> None:
    for file in _files:
        _abandoned.append(file.connection)
        file.connection, file.forked = None, True


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
