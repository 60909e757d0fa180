"""The actor that a shard is, and how it is asked."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import ray
from numpy.typing import NDArray
from ray.exceptions import RayTaskError

from gym_compress.errors import CorruptDataError, GymCompressError
from gym_compress.replay.buffer import CompressedReplayBuffer
from gym_compress.replay.file.checkpoint import arguments_of
from gym_compress.replay.file.format import read_checkpoint_id
from gym_compress.replay.file.reader import FileReader
from gym_compress.replay.file.writer import open_to_save
from gym_compress.replay.samples import CompressedSamples

__all__ = ["Shard", "answer", "check_ray"]

_MOST_WRITERS = 2**16  # whose numbers a shard remembers


class ShardBuffer(CompressedReplayBuffer):
    """The transitions of a shard, and up to which parcel of each writer they are.

    Attributes:
        replay: Which replay memory they are a part of.
        received: The number of the last parcel of each writer, by the writer's identity.
    """

    replay = ""
    replaces_others = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.received: dict[str, int] = {}

    def file_settings(self) -> dict[str, Any]:
        """What a replay file says of the buffer."""
        return {**super().file_settings(), "replay": self.replay, "received": self.received}

    def restore(self, settings: dict[str, Any]) -> None:
        """Restores what is no array and no chunk."""
        super().restore(settings)
        self.replay, self.received = settings["replay"], settings["received"]
        if not all(type(number) is int for number in self.received.values()):
            raise CorruptDataError("what came from writers has no numbers")


class Shard:
    """An actor that keeps a part of the transitions.

    Args:
        manifest: What it is a shard of. If that was loaded, the shard's file must be there.
        number: Which shard it is.
        folder: Where its file is, or None. If one is there already, the actor was restarted, and loads it.
    """

    def __init__(self, manifest: dict[str, Any], number: int, folder: Path | None) -> None:
        self._path = None if folder is None else folder / f"shard-{number}.replay"
        self._error: Exception | None = None
        try:
            self._buffer = _part(manifest, number, self._path)
        except Exception as error:  # an actor that fails to begin cannot say why: each call does
            self._error = error

    def _ready(self) -> ShardBuffer:
        if self._error is not None:
            raise self._error
        return self._buffer

    def receive(self, writer: str, number: int, oldest: int, samples: CompressedSamples) -> int:
        """Takes a parcel, unless it came before, or one before it is missing.

        Args:
            writer: The identity of its writer.
            number: Its number.
            oldest: The number of the oldest parcel that the writer still has: those before were acknowledged,
                though they may be lost here since.
            samples: The transitions.

        Returns:
            The number of the last parcel that is here.
        """
        buffer = self._ready()
        last = buffer.received.get(writer, 0)
        if number <= last or number > max(last + 1, oldest):
            return last
        buffer.adopt(samples)
        buffer.received.pop(writer, None)  # to the end, so that those come first who were silent longest
        buffer.received[writer] = number
        if len(buffer.received) > _MOST_WRITERS:
            del buffer.received[next(iter(buffer.received))]
        return number

    def take(self, rows: NDArray[np.int32]) -> tuple[int, CompressedSamples | None]:
        """How many transitions there are, and those in some rows; None if one of these is not filled."""
        buffer = self._ready()
        size = buffer.size()
        return size, buffer.take(rows) if len(rows) and rows.max() < size else None

    def cbytes(self) -> tuple[int, int]:
        """How many transitions there are, and the bytes that they take."""
        buffer = self._ready()
        return buffer.size(), buffer.cbytes

    def save(self) -> None:
        """Makes the next checkpoint of the file."""
        self._ready().save(self._path)


def _part(manifest: dict[str, Any], number: int, path: Path | None) -> ShardBuffer:
    """The buffer of a shard, from its file if there is a checkpoint."""
    replay, *origins = (f"{name}-{number}" for name in (manifest["replay"], *manifest["origins"]))
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
    if path is None or not (origins or _has_checkpoint(path)):
        count = manifest["num_shards"]
        size = (manifest["buffer_size"] + count - 1 - number) // count
        arguments = arguments_of({**manifest["settings"], "buffer_size": size})
        buffer = ShardBuffer(**arguments, device=None)
    else:
        with closing(FileReader.open(path)) as file:
            owner = file.read_checkpoint()[0].get("replay")
        if owner not in (replay, *origins):
            if origins:
                raise CorruptDataError(f"{path} is of another replay memory")
            raise FileExistsError(f"{path} holds a checkpoint of another replay memory: move it away")
        buffer = ShardBuffer.load(path, device=None)
    buffer.replay = replay
    return buffer


def _has_checkpoint(path: Path) -> bool:
    """Whether a file is there, and a first save was completed; an error if it is something else."""
    if not path.exists():
        return False
    try:
        with closing(open_to_save(path)) as connection:
            return read_checkpoint_id(connection) is not None
    except FileExistsError as error:  # which a damaged replay file causes, too
        raise error.__cause__ or error from None


def answer(reference: Any, timeout: float | None = None) -> Any:
    """What an actor answered, or the error that its code raised.

    Raises:
        RayError: If there is no answer.
    """
    try:
        return ray.get(reference, timeout=timeout)
    except RayTaskError as error:
        if isinstance(error.cause, Exception):
            raise error.cause from error
        raise


def check_ray() -> None:
    """Raises a GymCompressError if Ray was shut down: the next call would start another one."""
    if not ray.is_initialized():
        raise GymCompressError("Ray was shut down, and the shards with it")
