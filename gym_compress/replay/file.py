"""Replay files: reading and writing them under the rules of FORMAT.md, which stands beside this file."""

from __future__ import annotations

import json
import os
import secrets
import sqlite3
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gym_compress.chunk import Chunk
from gym_compress.errors import CorruptDataError, GymCompressError
from gym_compress.replay.format import (
    APPLICATION_ID,
    BLOCK_CODEC,
    MOST_CHUNK,
    MOST_SETTINGS,
    PAGE,
    SCHEMA,
    SET_CACHE,
    SQLITE_LENGTH,
    VERSION,
    Block,
    ChunkTable,
    array_source,
    block_rows,
    checksum,
    errors_of,
    little,
    row_hash,
    signed,
)
from gym_compress.replay.reading import FileReader, StoredChunk

__all__ = ["ReplayFile"]

_BATCH = 128  # chunks that wait to be written together
_WAL = 256  # pages of the write-ahead log that a file held open lets gather: 4 MiB


class ReplayFile(FileReader):
    """An open replay file, to be read or written.

    Chunks may be written before the checkpoint that they are to be part of: they get ids that the checkpoint
    before does not reach, and nobody sees them until new settings make them part of the next one.

    A file is opened for one checkpoint, or it is held: it stays open for chunks to come.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._held = False
        self._next = 1  # the id that the next blob gets
        self._added = 0  # sum of the hashes of the chunks that the checkpoint does not reach
        self._waiting: dict[int, tuple[bytes, tuple[Any, ...]]] = {}  # what is to be inserted, by id
        self._dropped: list[int] = []

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
        try:
            with file._opening(create=True):
                file._prepare()
        except CorruptDataError as error:
            if file.path.is_file() and isinstance(error.__cause__, sqlite3.DatabaseError):
                raise FileExistsError(
                    f"{path} is there already, and no whole replay file: {error}"
                ) from error
            raise
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
            with errors_of(path):
                file._execute("PRAGMA journal_mode = WAL")
            file.take_over()
        except BaseException:
            file.close()
            raise
        return file

    def _prepare(self) -> None:
        """Gets ready to write: makes the tables, or checks them."""
        for pragma in ("trusted_schema = OFF", "secure_delete = OFF", f"page_size = {PAGE}"):
            self._execute(f"PRAGMA {pragma}")
        self._execute("BEGIN IMMEDIATE")
        try:
            application = self._application()
            (tables,) = self._execute("SELECT count(*) FROM sqlite_schema").fetchone()
            if not application and not tables:
                for statement in SCHEMA.values():
                    self._execute(statement)
                self._execute(f"PRAGMA application_id = {APPLICATION_ID}")
                self._execute(f"PRAGMA user_version = {VERSION}")
            elif application != APPLICATION_ID:
                raise FileExistsError(f"{self.path} is there already, and is not a replay file")
            self._check_schema()
            self._execute("COMMIT")
        except BaseException:
            self._roll_back()
            raise
        self._execute(SET_CACHE)
        if self._mark_now():
            self._execute("PRAGMA journal_mode = WAL")
        # else nobody reads it yet, and the first checkpoint is quicker written without

    def read_checkpoint(self) -> tuple[dict[str, Any], ChunkTable]:
        """See :meth:`FileReader.read_checkpoint`."""
        told, table = super().read_checkpoint()
        self._next = self._reached
        return told, table

    def content(self, chunk: StoredChunk) -> bytes | NDArray[np.uint8]:
        """See :meth:`FileReader.content`; chunks that wait to be written have one, too."""
        if chunk.id in self._waiting:
            data = self._waiting[chunk.id][0]
            return data if chunk.codec.name != "none" else np.frombuffer(data, np.uint8)
        return super().content(chunk)

    def _set_mark(self, digest: int) -> None:
        self.mark = digest, secrets.randbits(62)
        self._execute("INSERT OR REPLACE INTO checkpoint VALUES (1, ?, ?)", self.mark)

    def take_over(self) -> None:
        """Stays open for chunks to come. What another process left beyond the checkpoint goes.

        Raises:
            GymCompressError: If the file was saved since it was opened.
            OSError: If the system refuses.
        """
        with errors_of(self.path):
            self._check_process()
            connection = self._connected()
            connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, SQLITE_LENGTH)
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
            for pragma in ("secure_delete = OFF", "synchronous = NORMAL", f"wal_autocheckpoint = {_WAL}"):
                self._execute(f"PRAGMA {pragma}")
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
                self._digest = signed((self.mark or (0,))[0] - (settings or (0,))[0])
            yield
        if self._held:
            self._pragma("synchronous = NORMAL")
        with suppress(sqlite3.OperationalError):  # then the next one does
            self._execute("PRAGMA journal_mode = WAL")
            self._execute("PRAGMA wal_checkpoint(PASSIVE)")

    def _pragma(self, pragma: str) -> None:
        with errors_of(self.path):
            self._execute(f"PRAGMA {pragma}")

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        self._check_process()
        before = self.mark, self._digest, self._added, self._reached, self._next, self._dropped
        self._dropped = [*self._dropped]
        try:
            with errors_of(self.path):
                self._connected().setlimit(sqlite3.SQLITE_LIMIT_LENGTH, SQLITE_LENGTH)
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
        row = id_, checksum(id_, data), stream, first, chunk.nbytes, codec
        self._waiting[id_] = data, row
        if not self._reads and not self._held and len(self._waiting) >= _BATCH:
            self._write_waiting()
            self._waiting.clear()
        return StoredChunk(self, id_, row[1], chunk.nbytes, chunk.codec)

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
        self._added += sum(row_hash(row) for row in rows)

    def _delete(self, ids: list[int]) -> None:
        for run in _runs(ids):
            for row in self._execute(
                "DELETE FROM chunks WHERE id BETWEEN ? AND ? RETURNING *", run
            ).fetchall():
                if row[0] < self._reached:
                    self._digest -= row_hash(row)
                else:
                    self._added -= row_hash(row)
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
        rows = block_rows(row_nbytes)
        flat = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        blocks: list[Block] = []
        gone = {block.id for block in before}
        for i, start in enumerate(range(0, flat.nbytes, rows * row_nbytes or 1)):
            part = flat[start : start + rows * row_nbytes]
            source = array_source(array, part)
            if i < len(before) and before[i].source == source:
                blocks.append(before[i])
                gone.remove(before[i].id)
                continue
            if part.nbytes > MOST_CHUNK:
                raise ValueError(
                    f"Rows of {part.nbytes} bytes are too large for a file: {MOST_CHUNK} at most"
                )
            data = BLOCK_CODEC.encode(part, array.dtype.itemsize)
            id_, self._next = self._next, self._next + 1
            self._execute("INSERT INTO blobs VALUES (?, ?)", [id_, data])
            blocks.append(Block(id_, checksum(id_, data), source))
        self._connected().executemany("DELETE FROM blobs WHERE id = ?", [(id_,) for id_ in gone])
        told = {
            "dtype": little(array.dtype),
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
        if len(data) > MOST_SETTINGS:
            raise ValueError(
                f"Settings of {len(data)} bytes are too large for a file: {MOST_SETTINGS} at most"
            )
        own = checksum(1, data)
        self._execute("INSERT OR REPLACE INTO settings VALUES (1, ?, ?)", [own, data])
        self._digest = signed(self._digest + self._added)
        self._added, self._reached = 0, self._next
        self._set_mark(signed(self._digest + own))


def _runs(ids: list[int]) -> Iterator[tuple[int, int]]:
    """Ids as runs that follow each other, each with its first and its last."""
    ids = sorted(ids)
    breaks = [i for i in range(1, len(ids)) if ids[i] != ids[i - 1] + 1]
    for start, end in zip([0, *breaks], [*breaks, len(ids)], strict=True):
        if start < end:
            yield ids[start], ids[end - 1]
