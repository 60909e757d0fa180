"""A replay file that stays open, in which the chunks of a buffer are."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from gym_compress.chunk import Chunk
from gym_compress.errors import GymCompressError
from gym_compress.replay.file import format as fmt
from gym_compress.replay.file.reader import FileReader, StoredChunk
from gym_compress.replay.file.writer import Row, Writer, chunk_row, open_to_save, writing

__all__ = ["ReplayFile"]

_CROWD = 128  # chunks that wait to be written together
_WAL = 256  # pages that SQLite's log gathers, if nobody reads an older checkpoint: 4 MiB


class ReplayFile(FileReader):
    """A replay file that stays open, in which the chunks of a buffer are.

    Until it is first written to, it is read as it was opened. From then on it is held: chunks are written
    ahead of the checkpoint that they will be part of, with ids that the checkpoint before does not reach.
    What others read does not change by that. If somebody else writes to the file meanwhile, the next write is
    refused.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._place = _place(path)
        self._held = False
        self._next = 1  # the id that the next chunk gets
        self._total = 0  # the sum of the hashes of all rows of chunks
        self._waiting: dict[int, Row] = {}  # chunks to be written, by id
        self._dropped: list[int] = []  # ids of chunks to be deleted

    @classmethod
    def create(cls, path: str | os.PathLike[str]) -> ReplayFile:
        """Makes a file and holds it, or takes one that has no checkpoint.

        Raises:
            FileExistsError: If something else is there already.
            OSError: If the system refuses.
        """
        file = cls(Path(path).absolute())
        connection = open_to_save(path)
        try:
            with fmt.translate_sqlite_errors(path):
                if connection.execute("SELECT count(*) FROM settings").fetchone() != (0,):
                    raise FileExistsError(
                        f"{path} is there already: go on with it by load(path, lazy=True), or move it away"
                    )
                connection.execute("PRAGMA journal_mode = WAL")
                file.checkpoint = fmt.Checkpoint(fmt.read_checkpoint_id(connection))
                file._place = _place(file.path)
            file._hold()
        finally:
            connection.close()
        return file

    def attach(self, checkpoint: fmt.Checkpoint) -> None:
        """Says which checkpoint the buffer goes on from."""
        self.checkpoint = checkpoint
        self._next, self._total = checkpoint.next_id, checkpoint.total

    def put(self, stream: int, first: int, chunk: Chunk) -> StoredChunk:
        """Takes a chunk in, to be written by the next :meth:`flush`; see :func:`chunk_row`."""
        row = chunk_row(self._next, stream, first, chunk)
        self._waiting[self._next] = row
        self._next += 1
        return StoredChunk(self, *row[1][:2], chunk.nbytes, chunk.codec)

    def drop(self, ids: Iterable[int]) -> None:
        """Gives chunks up."""
        self._dropped += ids

    def content(self, chunk: StoredChunk) -> bytes | NDArray[np.uint8]:
        """See :meth:`FileReader.content`; chunks that wait to be written have one, too."""
        row = self._waiting.get(chunk.id)
        if row is None:
            return super().content(chunk)
        self.check_open()
        return row[0] if chunk.codec.name != "none" else np.frombuffer(row[0], np.uint8)

    @property
    def is_crowded(self) -> bool:
        """Whether many chunks wait to be written."""
        return len(self._waiting) >= _CROWD

    def flush(self) -> None:
        """Writes the chunks that wait, and deletes those given up that no checkpoint has.

        Raises:
            GymCompressError: If the file was written from elsewhere, or this is a forked process.
            OSError: If the system refuses. They wait on then.
        """
        self._hold()
        reached = self.checkpoint.next_id
        with self._writing(self._publish_flush) as writer:
            writer.insert(self._waiting.values())
            writer.delete([id_ for id_ in self._dropped if id_ >= reached])
            writer.set_checkpoint_id(writer.found_id[0] if writer.found_id else 0)

    def _publish_flush(self, writer: Writer) -> None:
        self.checkpoint = self.checkpoint._replace(id=writer.checkpoint_id)
        self._total, self._waiting = writer.total, {}
        self._dropped = [id_ for id_ in self._dropped if id_ < self.checkpoint.next_id]

    @contextmanager
    def saving(self, publish: Callable[[Writer], object]) -> Iterator[Writer]:
        """A transaction that makes the next checkpoint of the file; what waits is written before."""

        def publish_all(writer: Writer) -> None:
            self.attach(writer.checkpoint)
            self._dropped = []
            publish(writer)

        self.flush()
        self._pragma("synchronous = FULL")
        try:
            with self._writing(publish_all) as writer:
                writer.known = self.checkpoint
                writer.delete(self._dropped)
                yield writer
        finally:
            self._pragma("synchronous = NORMAL")
        with suppress(OSError):  # then the next one does
            self._pragma("wal_checkpoint(PASSIVE)")

    @contextmanager
    def _writing(self, publish: Callable[[Writer], object]) -> Iterator[Writer]:
        self._check_place()
        with writing(self.connected(), self.path, publish) as writer:
            if writer.found_id != self.checkpoint.id:
                raise GymCompressError(
                    f"{self.path} was written from elsewhere since this buffer wrote to it: save it to "
                    "another path, if it can still be read"
                )
            writer.total, writer.next_id = self._total, self._next
            yield writer

    def _check_place(self) -> None:
        """Raises an error if another file stands under the path than the one that was opened, or none."""
        if self._place and self._place != _place(self.path):
            raise FileNotFoundError(
                f"{self.path} was deleted or replaced since this buffer opened it: save it to another path"
            )

    def _pragma(self, pragma: str) -> None:
        with fmt.translate_sqlite_errors(self.path):
            self.connected().execute(f"PRAGMA {pragma}")

    def _hold(self) -> None:
        """Begins to hold the file, if it is not held yet; what was read can be read on if that fails."""
        self.check_open()
        if self.forked:
            raise GymCompressError(
                f"{self.path} can be written by the process that opened it, not by one forked from it"
            )
        if self._held:
            return

        def publish(writer: Writer) -> None:
            old, self.connection = self.connection, connection
            self.checkpoint = self.checkpoint._replace(id=writer.checkpoint_id)
            self._held = True
            if old is not None and old is not connection:
                old.close()

        self._check_place()
        connection = fmt.connect(self.path, "rw")
        try:
            with fmt.translate_sqlite_errors(self.path):
                for pragma in ("secure_delete = OFF", "synchronous = NORMAL", f"wal_autocheckpoint = {_WAL}"):
                    connection.execute(f"PRAGMA {pragma}")
                self.set_up(connection)
            with writing(connection, self.path, publish) as writer:
                if writer.found_id != self.checkpoint.id:
                    raise GymCompressError(
                        f"{self.path} was saved from elsewhere since this buffer was loaded from it: save it "
                        "to another path, or load it again"
                    )
                writer.resume(self.checkpoint)
                writer.set_checkpoint_id(writer.found_id[0] if writer.found_id else 0)
        finally:
            if self.connection is not connection:
                connection.close()


def _place(path: Path) -> tuple[int, int] | None:
    """What tells a file from another that gets its name."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_dev, status.st_ino
