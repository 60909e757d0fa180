"""Saving buffers to replay files, and loading them: the same for the neutral buffer and for SB3's."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator
from contextlib import nullcontext
from functools import partial
from typing import Any, ClassVar, Self

import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from gym_compress.chunk import MOST_SHIPPED
from gym_compress.codec import resolve_codec, resolve_frames_per_chunk
from gym_compress.errors import CorruptDataError
from gym_compress.replay.file import format as fmt
from gym_compress.replay.file.attached import ReplayFile
from gym_compress.replay.file.writer import Row, Writer, chunk_row, saving
from gym_compress.replay.settings import element_nbytes, space_from_json, space_to_json
from gym_compress.replay.store import Compression, ObservationStore
from gym_compress.replay.transitions import Transitions, action_dim
from gym_compress.slicing import Slicing
from gym_compress.spaces import is_image
from gym_compress.tree import map_space

__all__ = ["CheckpointMixin", "arguments_of"]

# Limits of FORMAT.md: bytes of all arrays with all rows filled; and streams.
_MOST_NBYTES = 2**34
_MOST_STREAMS = 2**14

_FLAGS = ("optimize_memory_usage", "handle_timeout_termination")


class CheckpointMixin:
    """What makes a buffer that can be saved to replay files: all that hold their transitions in a table.

    Attributes:
        table: The transitions.
        lock: Held while they change, or are saved.
    """

    table: Transitions
    observation_space: Any
    action_space: spaces.Space[Any]
    handle_timeout_termination: bool
    optimize_memory_usage: bool
    lock: Any = nullcontext()

    file_arguments: ClassVar[dict[str, type]] = {}  # attributes that are arguments of this class alone
    replaces_others: ClassVar[bool] = True  # whether another buffer's checkpoint may be saved over

    _file: ReplayFile | None = None  # the file in which the chunks are, if they are in one
    _checkpoint = (
        fmt.Checkpoint()
    )  # the checkpoint that the buffer and a file have in common, if they are not

    def use_table(self, table: Transitions) -> None:
        """Gives the buffer its table, and SB3's names for what is in it."""
        self.table = table
        self.buffer_size, self.n_envs = table.rows, table.n_envs
        self.observations, self.next_observations = table.observations, table.next_observations
        self.actions, self.rewards = table.actions, table.rewards
        self.dones, self.timeouts = table.dones, table.timeouts

    @property
    def pos(self) -> int:
        """The row that is written next."""
        return self.table.pos

    @pos.setter
    def pos(self, row: int) -> None:
        self.table.pos = row

    @property
    def full(self) -> bool:
        """Whether all rows are filled."""
        return self.table.full

    @full.setter
    def full(self, full: bool) -> None:
        self.table.full = full

    def size(self) -> int:
        """The number of rows that are filled; a row holds a transition of each environment."""
        return self.table.size()

    @property
    def nbytes(self) -> int:
        """Bytes that the transitions would take in SB3's arrays."""
        return self.table.nbytes

    @property
    def cbytes(self) -> int:
        """Bytes of the compressed chunks, the references to them, and the arrays."""
        with self.lock:
            return self.table.cbytes

    def save(self, path: str | os.PathLike[str] | None = None) -> None:
        """Saves to a replay file; if that holds the checkpoint before, only what changed since.

        A process that is killed meanwhile leaves the last whole checkpoint. What another buffer has saved to
        the file is replaced.

        Args:
            path: The file. It is made if it is not there. ``None`` for the one in which the chunks are
                already, of a buffer with ``path=`` or loaded lazily.

        Raises:
            FileExistsError: If there is a file already, and no replay file.
            OSError: If the system refuses, as when the disk is full. File and buffer are as they were; a file
                that was not there may be left, without a checkpoint.
            GymCompressError: If another buffer has written to the file that holds the chunks, or this is a
                process forked from the one that opened it.
            CorruptDataError: If the file is damaged.
            ValueError: If there is no path and no file, or something is too large for a file.
            TypeError: If a file cannot hold a space of this kind.
        """
        with self.lock:
            settings = self.checked_settings()
            file = self._file
            if path is None and file is None:
                raise ValueError("Expected a path, since this buffer is in memory and holds no file")
            for store, twin in self.table.stores:
                store.evict(twin)
                store.seal()
            ids: list[dict[int, int]] = []

            def publish(writer: Writer) -> None:
                for (store, _), own in zip(self.table.stores, ids, strict=True):
                    store.index.note_saved(own)
                self._checkpoint = writer.checkpoint

            if file is not None and (path is None or _same(path, file)):
                self._spill(file)
                saved = file.saving(publish)
            elif file is not None:  # a copy, and the buffer stays with its own file
                saved = saving(path or "", fmt.Checkpoint(), lambda writer: None)
            else:
                saved = saving(path or "", self._checkpoint, publish, replace=self.replaces_others)
            with saved as writer:
                ids += self._write(writer, settings)

    def checked_settings(self) -> dict[str, Any]:
        """The settings; an error if they could not be saved, or loaded again."""
        settings = self.file_settings()
        text = json.dumps(settings, allow_nan=False)
        if len(text) > fmt.MOST_SETTINGS // 2:
            raise ValueError(f"The spaces are too large for a replay file, {len(text)} characters of JSON")
        arguments_of(json.loads(text))
        return settings

    def _write(self, writer: Writer, settings: dict[str, Any]) -> list[dict[int, int]]:
        """Writes what the file lacks, and returns, by image and place, the ids of the chunks written."""
        known, stores = writer.known, self.table.stores
        ids: list[dict[int, int]] = [{} for _ in stores]

        def unsaved() -> Iterator[Row]:
            for stream in range(len(stores) * self.table.n_envs):
                number, env = divmod(stream, self.table.n_envs)
                for place, first, chunk in stores[number][0].index.unsaved(env, everything=known.id is None):
                    ids[number][place] = id_ = writer.new_id()
                    yield chunk_row(id_, stream, first, chunk)

        if known.id is not None:
            for store, _ in stores:
                writer.delete(store.index.evicted)
        writer.insert(unsaved())

        def kept() -> set[int]:
            return {id_ for own in ids for id_ in own.values()} | {
                id_ for store, _ in stores for id_ in store.index.ids()
            }

        writer.keep_only(kept, sum(len(store.index) for store, _ in stores))
        specs, blocks = {}, {}
        for name, values in self._saved_arrays().items():
            specs[name], blocks[name] = writer.put_array(values, known.blocks.get(name, []))
        writer.finish({**settings, "arrays": specs}, blocks)
        return ids

    def _saved_arrays(self) -> dict[str, NDArray[Any]]:
        """What is saved as arrays, as far as rows are filled."""
        references = {name: store.references for name, store in self._stores()}
        return {name: values[: self.size()] for name, values in {**references, **self.file_arrays()}.items()}

    def _stores(self) -> Iterator[tuple[str, ObservationStore]]:
        """The stores, by the names that a file has for their references."""
        for number, pair in zip(self.table.image_numbers, self.table.stores, strict=True):
            yield f"observations.{number}", pair[0]
            yield f"next_observations.{number}", pair[1]

    @classmethod
    def load(cls, path: str | os.PathLike[str], *, device: Any = "auto", lazy: bool = False) -> Self:
        """Loads a buffer from a replay file, whichever class saved it.

        Going on with it gives what going on without an interruption would have given.

        Args:
            path: The file.
            device: Where samples go, as at construction.
            lazy: Whether to leave the chunks in the file, and to read them as they are sampled. What others
                save meanwhile is not seen. Chunks to come go to the file as well, and :meth:`save` makes the
                next checkpoint of them. Close it in the end, or use ``with``.

        Raises:
            FileNotFoundError: If there is no file.
            CorruptDataError: If it is no replay file, or damaged; with ``lazy``, sampling finds what is
                damaged in chunks.
            ValueError: If this class cannot hold what another one saved.
            OSError: If the system refuses.
        """
        file = ReplayFile.open(path)
        try:
            settings, chunks = file.read_checkpoint()
            with fmt.as_corrupt(f"The settings of {file.path} are not valid"):
                arguments = arguments_of(settings)
            cls.check_loadable(settings, arguments["observation_space"], device)
            buffer = cls.from_settings(settings, {**arguments, "device": device})
            with fmt.as_corrupt(f"{file.path} is not valid"):
                buffer.pos, buffer.full = settings["pos"], settings["full"]
                buffer._read_chunks(file, chunks, lazy)
                blocks = buffer._read_arrays(file, settings["arrays"])
                buffer.restore(settings)
            checkpoint = file.checkpoint._replace(blocks=blocks)
        except BaseException:
            file.close()
            raise
        if lazy:
            file.attach(checkpoint)
            buffer._file = file
        else:
            buffer._checkpoint = checkpoint
            file.close()
        return buffer

    def _read_arrays(self, file: ReplayFile, specs: dict[str, Any]) -> dict[str, list[fmt.Block]]:
        """Reads all arrays, and returns their blocks."""
        rows, blocks = self.size(), {}
        for name, values in self.file_arrays().items():
            blocks[name] = file.read_array(specs[name], name, values[:rows])
        for name, store in self._stores():
            dtype = np.int64 if specs[name]["dtype"] == "<i8" else np.int32
            references = np.empty((rows, self.table.n_envs), dtype)
            blocks[name] = file.read_array(specs[name], name, references)
            store.restore(references)
        ids = [block.id for own in blocks.values() for block in own]
        if len(ids) > len(set(ids)):
            raise CorruptDataError("a block is in two places")
        return blocks

    def _read_chunks(self, file: ReplayFile, table: fmt.ChunkTable, lazy: bool) -> None:
        indexes, n_envs = [store.index for store, _ in self.table.stores], self.table.n_envs
        if len(table.ids) and table.streams.max() >= len(indexes) * n_envs:
            raise CorruptDataError(f"there are {len(indexes) * n_envs} streams, and chunks of others")
        chunks = list(file.stored_chunks(table) if lazy else file.read_chunks(table))
        order = np.lexsort((table.firsts, table.streams))
        ends = np.searchsorted(table.streams[order], np.arange(len(indexes) * n_envs + 1))
        for stream in range(len(indexes) * n_envs):
            own = order[ends[stream] : ends[stream + 1]]
            number, env = divmod(stream, n_envs)
            firsts, ids = table.firsts[own].tolist(), table.ids[own].tolist()
            indexes[number].restore(env, firsts, [chunks[i] for i in own], ids)

    def create_file(self, path: str | os.PathLike[str]) -> None:
        """Makes a file, in which the chunks are from now on."""
        self.checked_settings()  # what could not be saved is refused before the file is made
        self._file = ReplayFile.create(path)

    def make_room(self) -> None:
        """Moves chunks to the file, if they are in one, and writes what waits for it, if much does.

        It is to be called before anything changes.
        """
        if self._file is None:
            return
        self._file.check_open()
        self._spill(self._file)
        if self._file.is_crowded:
            for store, _ in self.table.stores:
                self._file.drop(store.index.evicted)
                store.index.evicted.clear()
            self._file.flush()

    def _spill(self, file: ReplayFile) -> None:
        for number, (store, _) in enumerate(self.table.stores):
            for env in range(self.table.n_envs):
                store.index.spill(env, partial(file.put, number * self.table.n_envs + env))

    def close(self) -> None:
        """Closes the file in which the chunks are, if they are in one. What was not saved is lost."""
        with self.lock:
            if self._file is not None:
                self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # Subclasses add to the methods below.

    def file_arrays(self) -> dict[str, NDArray[Any]]:
        """The arrays of a file with one row for each of the buffer, by name, but for references."""
        return self.table.arrays()

    def file_settings(self) -> dict[str, Any]:
        """What a file says of the buffer."""
        compression = self.table.compression
        return {
            "class": type(self).__name__,
            "observation_space": space_to_json(self.observation_space),
            "action_space": space_to_json(self.action_space),
            "buffer_size": self.table.rows,
            "n_envs": self.table.n_envs,
            "pos": self.table.pos,
            "full": self.table.full,
            **{name: bool(getattr(self, name)) for name in _FLAGS},
            **{name: kind(getattr(self, name)) for name, kind in self.file_arguments.items()},
            "compression": {
                name: value if value is None or isinstance(value, str) else int(value)
                for name, value in compression._replace(codec=str(compression.codec))._asdict().items()
            },
        }

    @classmethod
    def check_loadable(cls, settings: dict[str, Any], space: spaces.Space[Any], device: Any) -> None:
        """Raises an error if the class cannot hold what a file holds, or the device is none."""

    @classmethod
    def from_settings(cls, settings: dict[str, Any], arguments: dict[str, Any]) -> Self:
        """An empty buffer, from the settings of a file and the arguments that all classes have."""
        further = {name: settings[name] for name in cls.file_arguments if name in settings}
        for name, value in further.items():
            if type(value) is not cls.file_arguments[name]:
                raise CorruptDataError(f"{name} is {value!r}, expected {cls.file_arguments[name]}")
        return cls(**arguments, **further)

    def restore(self, settings: dict[str, Any]) -> None:
        """Restores what is no array and no chunk."""


def arguments_of(settings: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a constructor, from the settings of a file, sizes checked first.

    Raises:
        ValueError: If something is too large for a file, or does not fit together.
        LookupError, TypeError, AttributeError: If the settings are none.
    """
    rows, n_envs, pos = (_integer(settings[name]) for name in ("buffer_size", "n_envs", "pos"))
    if not 0 <= pos < rows or n_envs < 1 or not isinstance(settings["full"], bool):
        raise ValueError(f"{pos} is no position in {rows} rows of {n_envs} environments")
    observation_space, action_space = (
        space_from_json(settings[name]) for name in ("observation_space", "action_space")
    )
    action_dim(action_space)
    compression = {name: settings["compression"][name] for name in Compression._fields}
    resolve_codec(compression["codec"], 0)
    resolve_frames_per_chunk(compression["frames_per_chunk"], 0)
    streams, nbytes = (
        0,
        element_nbytes(settings["action_space"]) + 18,
    )  # rewards, dones, timeouts, ends, valid

    def leaf(space: spaces.Space[Any]) -> None:
        nonlocal streams, nbytes
        if is_image(space):
            Slicing(space.shape, space.dtype, compression["stack_size"], compression["stack_axis"])
            streams, nbytes = streams + 1, nbytes + 16
        else:
            assert space.shape is not None
            nbytes += 2 * math.prod(space.shape) * np.dtype(space.dtype).itemsize

    map_space(leaf, observation_space)
    if rows * n_envs * nbytes > _MOST_NBYTES or streams * n_envs > _MOST_STREAMS:
        raise ValueError(
            f"A replay file holds arrays of at most {_MOST_NBYTES} bytes and {_MOST_STREAMS} streams, "
            f"got {rows * n_envs * nbytes} and {streams * n_envs}"
        )
    frames = compression["frames_per_chunk"]
    most = MOST_SHIPPED // max(element_nbytes(settings["observation_space"]), 1)
    if frames is not None and _integer(frames) > most:
        raise ValueError(f"A replay file holds up to {most} of these frames a chunk, got {frames}")
    return {
        "buffer_size": rows * n_envs,
        "observation_space": observation_space,
        "action_space": action_space,
        "n_envs": n_envs,
        **{name: bool(settings[name]) for name in _FLAGS},
        **compression,
    }


def _integer(value: Any) -> int:
    if type(value) is not int:
        raise ValueError(f"{value!r} is no integer")
    return value


def _same(path: str | os.PathLike[str], file: ReplayFile) -> bool:
    try:
        return os.path.samefile(path, file.path)
    except OSError:  # one of them is not there
        return os.path.realpath(path) == os.path.realpath(file.path)
