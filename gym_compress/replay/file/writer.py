"""Writing replay files: one transaction at a time, each of which happens whole or not at all."""

from __future__ import annotations

import json
import os
import secrets
import sqlite3
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gym_compress.chunk import MOST_SHIPPED
from gym_compress.errors import CorruptDataError, GymCompressError
from gym_compress.replay.file import format as fmt

__all__ = ["Row", "Writer", "chunk_row", "open_to_save", "roll_back", "saving", "writing"]

_BATCH = 128  # chunks that are inserted together

# A chunk to be inserted: its bytes, and its row of the table of chunks.
Row = tuple[bytes, tuple[int, int, int, int, int, str]]


def open_to_save(path: str | os.PathLike[str]) -> sqlite3.Connection:
    """Opens a file to be written, and makes it, without a checkpoint, if it is not there or empty.

    Raises:
        FileExistsError: If there is a file, but no replay file, or one that is damaged at its head.
        CorruptDataError: If it is a replay file of a later version, or with other tables.
        OSError: If the system refuses.
    """
    path = Path(path).absolute()
    if not path.parent.is_dir():
        raise FileNotFoundError(f"{path} cannot be written: there is no folder {path.parent}")
    if path.is_dir():
        raise IsADirectoryError(f"{path} is a folder, expected a replay file")
    if sys.byteorder != "little":
        raise GymCompressError("Replay files can be written on little-endian machines only")
    try:
        with fmt.translate_sqlite_errors(path):
            connection = fmt.connect(path, "rwc")
            try:
                _prepare(connection, path)
            except BaseException:
                connection.close()
                raise
    except CorruptDataError as error:
        if isinstance(error.__cause__, sqlite3.Error):
            raise FileExistsError(f"{path} is there already, and no whole replay file: {error}") from error
        raise
    return connection


def _prepare(connection: sqlite3.Connection, path: Path) -> None:
    """Makes the tables, or checks them."""
    for pragma in ("trusted_schema = OFF", "secure_delete = OFF", f"page_size = {fmt.PAGE}"):
        connection.execute(f"PRAGMA {pragma}")
    connection.execute("BEGIN IMMEDIATE")
    try:
        application = fmt.read_application(connection)
        (tables,) = connection.execute("SELECT count(*) FROM sqlite_master").fetchone()
        if not application and not tables:
            for statement in fmt.SCHEMA.values():
                connection.execute(statement)
            connection.execute(f"PRAGMA application_id = {fmt.APPLICATION_ID}")
            connection.execute(f"PRAGMA user_version = {fmt.VERSION}")
        elif application != fmt.APPLICATION_ID:
            raise FileExistsError(f"{path} is there already, and is not a replay file")
        fmt.check_schema(connection, path)
        connection.execute("COMMIT")
    except BaseException:
        roll_back(connection)
        raise
    connection.execute(fmt.SET_CACHE)
    if fmt.read_checkpoint_id(connection):
        connection.execute("PRAGMA journal_mode = WAL")
    # else nobody reads it yet, and the first checkpoint is quicker written without


def roll_back(connection: sqlite3.Connection) -> None:
    """Ends a transaction that is open, if there is one."""
    if connection.in_transaction:
        with suppress(sqlite3.OperationalError):  # some errors roll back by themselves
            connection.execute("ROLLBACK")


@contextmanager
def writing(
    connection: sqlite3.Connection, path: Path, publish: Callable[[Writer], object]
) -> Iterator[Writer]:
    """A transaction. If something is raised within, nothing was written.

    Args:
        connection: To the file.
        path: The file.
        publish: Called when all is written, so that memory says the same as the file; called again if that
            was interrupted.

    Raises:
        OSError: If the system refuses.
        CorruptDataError: If the file is damaged.
    """
    writer = Writer(connection)
    with fmt.translate_sqlite_errors(path):
        connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, fmt.SQLITE_LENGTH)
        try:
            connection.execute("BEGIN IMMEDIATE")
            writer.found_id = fmt.read_checkpoint_id(connection)
            yield writer
            connection.execute("COMMIT")
            publish(writer)
        except BaseException:
            roll_back(connection)
            with suppress(sqlite3.Error):
                if (
                    writer.checkpoint_id is not None
                    and fmt.read_checkpoint_id(connection) == writer.checkpoint_id
                ):
                    publish(writer)
            raise


@contextmanager
def saving(
    path: str | os.PathLike[str],
    known: fmt.Checkpoint,
    publish: Callable[[Writer], object],
    *,
    replace: bool = True,
) -> Iterator[Writer]:
    """A transaction that makes the next checkpoint of a file, which is made if it is not there.

    Args:
        path: The file.
        known: The checkpoint that memory knows: if it is the one that is there, the writer goes on with it,
            and else begins anew.
        publish: As for :func:`writing`.
        replace: Whether another checkpoint may be replaced.

    Raises:
        GymCompressError: If another checkpoint is there that may not be replaced.
        Exception: As :func:`open_to_save` and :func:`writing`.
    """
    connection = open_to_save(path)
    saved = False
    try:
        with writing(connection, Path(path), publish) as writer:
            if known.id and known.id == writer.found_id:
                writer.resume(known)
            elif writer.found_id and not replace:
                raise GymCompressError(
                    f"{path} was saved by another process since it was loaded or saved here: load it to go "
                    "on with what that saved"
                )
            else:
                writer.clear()
            yield writer
        saved = True
    finally:
        with fmt.translate_sqlite_errors(path):
            if saved:
                with suppress(sqlite3.OperationalError):  # then whoever comes next does
                    connection.execute("PRAGMA journal_mode = WAL")
                    connection.execute("PRAGMA wal_checkpoint(PASSIVE)")
            connection.close()


def chunk_row(id_: int, stream: int, first: int, chunk: Any) -> Row:
    """A chunk as it is inserted.

    Args:
        id_: The id that it gets.
        stream: The number of the stream that it belongs to.
        first: The number of its first slice.
        chunk: The chunk, which is sealed.

    Raises:
        ValueError: If it is too large for a file.
    """
    if chunk.nbytes > MOST_SHIPPED:
        raise ValueError(f"A chunk of {chunk.nbytes} bytes is too large for a file: {MOST_SHIPPED} at most")
    content = chunk.content
    data = content if isinstance(content, bytes) else content.tobytes()
    return data, (id_, fmt.checksum(id_, data), stream, first, chunk.nbytes, str(chunk.codec))


class Writer:
    """What is done to a file within a transaction.

    Attributes:
        found_id: What tells the checkpoint that was there from others.
        checkpoint_id: The same of what the file gets.
        total: The sum of the hashes of all rows of chunks.
        next_id: The id that the next blob gets.
        known: The checkpoint that is gone on with, if one is.
        checkpoint: The checkpoint that was written, once it is.
    """

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection
        self.found_id: fmt.CheckpointId | None = None
        self.checkpoint_id: fmt.CheckpointId | None = None
        self.total = 0
        self.next_id = 1
        self.known = fmt.Checkpoint()
        self.checkpoint = fmt.Checkpoint()

    def resume(self, checkpoint: fmt.Checkpoint) -> None:
        """Goes on with the checkpoint that is there. What was written ahead of the next one is deleted."""
        self.next_id = checkpoint.next_id
        for table in ("blobs", "chunks"):
            self._connection.execute(f"DELETE FROM {table} WHERE id >= ?", [checkpoint.next_id])
        self.known, self.total = checkpoint, checkpoint.total

    def clear(self) -> None:
        """Deletes all."""
        (last,) = self._connection.execute("SELECT max(id) FROM blobs").fetchone()
        self.next_id = (last or 0) % fmt.MOST_ID + 1
        for table in ("blobs", "chunks", "settings"):
            self._connection.execute(f"DELETE FROM {table}")
        self.total = 0

    def new_id(self) -> int:
        """The id that the next blob gets."""
        self.next_id += 1
        return self.next_id - 1

    def insert(self, rows: Iterable[Row]) -> None:
        """Inserts chunks, a batch of them at a time."""
        rows = iter(rows)
        while batch := list(islice(rows, _BATCH)):
            blobs = [(row[0], data) for data, row in batch]
            self._connection.executemany("INSERT INTO blobs VALUES (?, ?)", blobs)
            chunks = [row for _, row in batch]
            self._connection.executemany("INSERT INTO chunks VALUES (?, ?, ?, ?, ?, ?)", chunks)
            self.total += sum(map(fmt.row_hash, chunks))

    def delete(self, ids: Iterable[int]) -> None:
        """Deletes chunks."""
        for run in _runs(sorted(ids)):
            rows = self._connection.execute("SELECT * FROM chunks WHERE id BETWEEN ? AND ?", run)
            self.total -= sum(map(fmt.row_hash, rows))
            for table in ("chunks", "blobs"):
                self._connection.execute(f"DELETE FROM {table} WHERE id BETWEEN ? AND ?", run)

    def keep_only(self, ids: Callable[[], set[int]], count: int) -> None:
        """Deletes chunks that nobody knows any more, which an interrupted process may leave.

        Args:
            ids: Gives the ids of those that are known.
            count: How many these are.
        """
        if self._connection.execute("SELECT count(*) FROM chunks").fetchone() != (count,):
            known = ids()
            rows = self._connection.execute("SELECT id FROM chunks").fetchall()
            self.delete([id_ for (id_,) in rows if id_ not in known])

    def put_array(
        self, array: NDArray[Any], before: list[fmt.Block]
    ) -> tuple[dict[str, Any], list[fmt.Block]]:
        """Writes the blocks of an array that changed.

        Args:
            array: The array.
            before: Its blocks in the checkpoint before.

        Returns:
            What the settings say of it, and its blocks.

        Raises:
            ValueError: If a row is too large for a file.
        """
        row_nbytes = array.nbytes // max(len(array), 1)
        rows = fmt.block_rows(row_nbytes)
        flat = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        blocks: list[fmt.Block] = []
        gone = {block.id for block in before}
        for i, start in enumerate(range(0, flat.nbytes, rows * row_nbytes or 1)):
            part = flat[start : start + rows * row_nbytes]
            source = fmt.array_source(array, part)
            if i < len(before) and before[i].source == source:
                blocks.append(before[i])
                gone.remove(before[i].id)
                continue
            if part.nbytes > MOST_SHIPPED:
                raise ValueError(
                    f"Rows of {part.nbytes} bytes are too large for a file: {MOST_SHIPPED} at most"
                )
            data = fmt.BLOCK_CODEC.encode(part, array.dtype.itemsize)
            id_ = self.new_id()
            self._connection.execute("INSERT INTO blobs VALUES (?, ?)", [id_, data])
            blocks.append(fmt.Block(id_, fmt.checksum(id_, data), source))
        self._connection.executemany("DELETE FROM blobs WHERE id = ?", [(id_,) for id_ in gone])
        spec = {
            "dtype": fmt.little(array.dtype),
            "shape": array.shape,
            "rows": rows,
            "blocks": [block[:2] for block in blocks],
        }
        return spec, blocks

    def set_checkpoint_id(self, digest: int) -> None:
        """Marks the file as written, so that nobody who had it open goes on with it unknowingly."""
        self.checkpoint_id = digest, secrets.randbits(62)
        self._connection.execute("INSERT OR REPLACE INTO checkpoint VALUES (1, ?, ?)", self.checkpoint_id)

    def finish(self, settings: dict[str, Any], blocks: dict[str, list[fmt.Block]]) -> None:
        """Makes all that is there the next checkpoint.

        Raises:
            ValueError: If the settings are too large for a file.
        """
        data = json.dumps(
            {**settings, "next_id": self.next_id}, separators=(",", ":"), allow_nan=False
        ).encode()
        if len(data) > fmt.MOST_SETTINGS:
            raise ValueError(
                f"Settings of {len(data)} bytes are too large for a file: {fmt.MOST_SETTINGS} at most"
            )
        own = fmt.checksum(1, data)
        self._connection.execute("INSERT OR REPLACE INTO settings VALUES (1, ?, ?)", [own, data])
        self._connection.execute(f"PRAGMA user_version = {fmt.VERSION}")  # of a file that an earlier one made
        self.set_checkpoint_id(fmt.signed(self.total + own))
        self.checkpoint = fmt.Checkpoint(self.checkpoint_id, self.total, self.next_id, blocks)


def _runs(ids: list[int]) -> Iterator[tuple[int, int]]:
    """Ascending ids as runs that follow each other, each with its first and its last."""
    breaks = [i for i in range(1, len(ids)) if ids[i] != ids[i - 1] + 1]
    for start, end in zip([0, *breaks], [*breaks, len(ids)], strict=True):
        if start < end:
            yield ids[start], ids[end - 1]
