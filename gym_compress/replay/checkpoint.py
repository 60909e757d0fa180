"""Saving buffers to replay files, and loading them: the same for the neutral buffer and for SB3's."""

from __future__ import annotations

import json
import math
import os
from array import array
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from gym_compress.codec import resolve_codec, resolve_frames_per_chunk
from gym_compress.errors import CorruptDataError
from gym_compress.replay.file import ReplayFile
from gym_compress.replay.format import (
    MOST_CHUNK,
    MOST_SETTINGS,
    Block,
    Checkpoint,
    ChunkTable,
    Mark,
    refusing,
)
from gym_compress.replay.leaves import is_image
from gym_compress.replay.settings import element_nbytes, space_from_json, space_to_json
from gym_compress.replay.store import ObservationStore
from gym_compress.replay.stream import Stream
from gym_compress.replay.transitions import action_dim
from gym_compress.replay.writing import Writer, close_saved, open_to_save, writing
from gym_compress.slicing import Slicing
from gym_compress.tree import map_leaves, map_space

__all__ = ["COMPRESSION", "SavedBuffer", "arguments_of"]

# Limits of FORMAT.md: bytes of all arrays with all rows filled, and of references that are no single numbers;
# and streams.
_MOST_NBYTES = 2**34
_MOST_ODD = 2**30
_MOST_STREAMS = 2**14

_INT32, _INT64 = np.dtype(np.int32), np.dtype(np.int64)

_ARRAYS = ("actions", "rewards", "dones", "timeouts")
_FLAGS = ("optimize_memory_usage", "handle_timeout_termination")
COMPRESSION = ("stack_size", "stack_axis", "codec", "frames_per_chunk")


class SavedBuffer:
    """What buffers have in common that are saved to replay files: all that have SB3's attributes."""

    observation_space: Any
    action_space: spaces.Space[Any]
    buffer_size: int
    n_envs: int
    pos: int
    full: bool

    _compression: dict[str, Any]  # the arguments that say how observations are compressed
    _extra_arguments: ClassVar[dict[str, type]] = {}  # attributes that are arguments of this class alone
    _optional_arrays: ClassVar[tuple[str, ...]] = ()  # arrays that a file may lack
    _lock: Any = nullcontext()
    _file: ReplayFile | None = None  # the file in which the chunks are, if they are in one
    _checkpoint = Checkpoint()  # the checkpoint that the buffer and a file have in common, if they are not

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
        with self._lock:
            settings = self._checked_settings()
            file = self._file
            if file is not None and (path is None or _same(path, file)):
                self._settle()
                self._drop_evicted(file)
                known = file.checkpoint
                try:
                    with file.saving(lambda writer: self._publish(ids)) as writer:
                        ids = self._write(writer, settings, known)
                finally:
                    file.end_transaction()
                return
            if path is None:
                raise ValueError("Expected a path, since this buffer is in memory and holds no file")
            self._settle()

            def publish(writer: Writer) -> None:
                if file is None:  # else this is a copy, and the buffer stays with its own file
                    self._publish(ids)
                    self._checkpoint = writer.checkpoint

            saved = False
            connection = open_to_save(path)
            try:
                with writing(connection, Path(path), publish) as writer:
                    known = self._checkpoint if file is None else Checkpoint()
                    if known.mark and known.mark == writer.found:
                        writer.go_on(known)
                        writer.delete(id_ for stream in self._streams() for id_ in stream.evicted)
                    else:
                        self._check_replaced(writer.found)
                        writer.clear()
                        known = Checkpoint()
                    ids = self._write(writer, settings, known)
                saved = True
            finally:
                close_saved(connection, path, saved)

    def _checked_settings(self) -> dict[str, Any]:
        """The settings; an error if they could not be saved, or loaded again."""
        settings = self._settings()
        text = json.dumps(settings, allow_nan=False)
        if len(text) > MOST_SETTINGS // 2:
            raise ValueError(f"The spaces are too large for a replay file, {len(text)} characters of JSON")
        arguments_of(json.loads(text))
        return settings

    def _settle(self) -> None:
        for stream in self._streams():
            stream.settle()

    def _write(self, writer: Writer, settings: dict[str, Any], known: Checkpoint) -> list[array[int]]:
        """Writes what a known checkpoint lacks, and returns the ids of all chunks, by stream."""
        ids: list[array[int]] = []
        blocks: dict[str, list[Block]] = {}
        specs = {}
        for number, stream in enumerate(self._streams()):
            own = array("q", stream.ids)
            for index, first, chunk in stream.unsaved(everything=known.mark is None):
                own[index] = writer.put(number, first, chunk)
            ids.append(own)
        count = sum(len(own) - own.count(0) for own in ids)
        writer.keep_only(lambda: {id_ for own in ids for id_ in own}, count)
        for name, values in self._all_arrays().items():
            specs[name], blocks[name] = writer.put_array(values, known.blocks.get(name, []))
        writer.finish({**settings, "arrays": specs}, blocks)
        return ids

    def _publish(self, ids: list[array[int]]) -> None:
        """Notes what a file knows the chunks by."""
        for stream, own in zip(self._streams(), ids, strict=True):
            stream.saved(own)

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
            settings, table = file.read_checkpoint()
            with refusing(f"The settings of {file.path} are not valid"):
                arguments = arguments_of(settings)
            cls._check(settings, arguments["observation_space"], device)
            buffer = cls._from_settings(settings, {**arguments, "device": device})
            with refusing(f"{file.path} is not valid"):
                buffer.pos, buffer.full = settings["pos"], settings["full"]
                blocks = buffer._read_arrays(file, settings["arrays"])
                buffer._read_chunks(file, table, lazy)
                buffer._restore(settings)
            checkpoint = file.checkpoint._replace(blocks=blocks)
        except BaseException:
            file.close()
            raise
        if lazy:
            file.attach(checkpoint)
            buffer._keep_in(file)
        else:
            buffer._checkpoint = checkpoint
            file.close()
        return buffer

    def _read_arrays(self, file: ReplayFile, specs: dict[str, Any]) -> dict[str, list[Block]]:
        """Reads all arrays, and returns their blocks."""
        rows, blocks = self._filled(), {}
        for name, values in self._row_arrays().items():
            if name in specs or name not in self._optional_arrays:
                file.check_array(specs[name], name, (rows, *values.shape[1:]), [values.dtype])
                blocks[name] = file.read_array(specs[name], values[:rows])
        for name, store in self._leaves(ObservationStore):
            shape = rows, self.n_envs
            references = np.empty(shape, file.check_array(specs[name], name, shape, [_INT32, _INT64]))
            blocks[name] = file.read_array(specs[name], references)
            name, shape = f"{name}.odd", (int((references < 0).sum()), store.slices)
            if math.prod(shape) * 8 > _MOST_ODD:
                raise CorruptDataError(f"{name} is of {shape}, more than {_MOST_ODD} bytes")
            file.check_array(specs[name], name, shape, [_INT64])
            odd = np.empty(shape, _INT64)
            blocks[name] = file.read_array(specs[name], odd)
            store.restore(references, odd)
        ids = [block.id for own in blocks.values() for block in own]
        if len(ids) > len(set(ids)):
            raise CorruptDataError("a block is in two places")
        return blocks

    def _read_chunks(self, file: ReplayFile, table: ChunkTable, lazy: bool) -> None:
        streams = self._streams()
        if len(table.ids) and table.streams.max() >= len(streams):
            raise CorruptDataError(f"there are {len(streams)} streams, and chunks of others")
        chunks = list(file.stored_chunks(table) if lazy else file.read_chunks(table))
        order = np.lexsort((table.firsts, table.streams))
        ends = np.searchsorted(table.streams[order], np.arange(len(streams) + 1))
        kept = [(pair, env) for pair in self._pairs() for env in range(self.n_envs)]
        for number, (pair, env) in enumerate(kept):
            own = order[ends[number] : ends[number + 1]]
            references = (store.references(self._filled(), env) for store in pair)
            runs, odd = map(np.concatenate, zip(*references, strict=True))
            owned = [chunks[i] for i in own]
            streams[number].restore(owned, table.ids[own], table.firsts[own], runs, odd)

    def _filled(self) -> int:
        """The number of rows that are filled."""
        return self.buffer_size if self.full else self.pos

    def _keep_in(self, file: ReplayFile) -> None:
        """From now on, chunks go to a file but for the newest."""
        self._file = file
        for number, stream in enumerate(self._streams()):
            stream.keep_on(partial(file.put, number))

    def _make_room(self) -> None:
        """Writes what waits for the file, if much does. To be called before anything changes."""
        if self._file is None:
            return
        self._file.check_open()
        if self._file.is_crowded:
            self._drop_evicted(self._file)
            self._file.flush()

    def _drop_evicted(self, file: ReplayFile) -> None:
        for stream in self._streams():
            file.drop(stream.evicted)
            stream.evicted.clear()

    def close(self) -> None:
        """Closes the file in which the chunks are, if they are in one. What was not saved is lost."""
        with self._lock:
            if self._file is not None:
                self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _leaves(self, kind: type[Any]) -> list[tuple[str, Any]]:
        """The leaves of observations and next observations that are stores or arrays, with names."""
        found: list[tuple[str, Any]] = []
        for name in ("observations", "next_observations"):
            leaves: list[Any] = []
            map_leaves(leaves.append, getattr(self, name))
            found += [(f"{name}.{i}", leaf) for i, leaf in enumerate(leaves) if isinstance(leaf, kind)]
        return found

    def _pairs(self) -> list[tuple[ObservationStore, ObservationStore]]:
        """The stores of observations, each with that of next observations."""
        stores = [store for _, store in self._leaves(ObservationStore)]
        return list(zip(stores[: len(stores) // 2], stores[len(stores) // 2 :], strict=True))

    def _streams(self) -> list[Stream]:
        return [stream for store, _ in self._pairs() for stream in store.streams]

    def _all_arrays(self) -> dict[str, NDArray[Any]]:
        """What is saved as arrays, as far as rows are filled."""
        rows = self._filled()
        arrays = {name: values[:rows] for name, values in self._row_arrays().items()}
        for name, store in self._leaves(ObservationStore):
            arrays[name], arrays[f"{name}.odd"] = store.state(rows)
            if arrays[f"{name}.odd"].nbytes > _MOST_ODD:
                raise ValueError(
                    f"{name} has too many observations in parts for a file, {_MOST_ODD} bytes at most"
                )
        return arrays

    # Subclasses add to the methods below.

    def _row_arrays(self) -> dict[str, NDArray[Any]]:
        """The arrays with one row for each of the buffer, with names."""
        return {**dict(self._leaves(np.ndarray)), **{name: getattr(self, name) for name in _ARRAYS}}

    def _settings(self) -> dict[str, Any]:
        """What a file says of the buffer."""
        return {
            "class": type(self).__name__,
            "observation_space": space_to_json(self.observation_space),
            "action_space": space_to_json(self.action_space),
            **{name: int(getattr(self, name)) for name in ("buffer_size", "n_envs", "pos")},
            **{name: bool(getattr(self, name)) for name in ("full", *_FLAGS)},
            **{name: kind(getattr(self, name)) for name, kind in self._extra_arguments.items()},
            "compression": {
                name: value if value is None or isinstance(value, str) else int(value)
                for name, value in {**self._compression, "codec": str(self._compression["codec"])}.items()
            },
        }

    @classmethod
    def _check(cls, settings: dict[str, Any], space: spaces.Space[Any], device: Any) -> None:
        """Raises an error if the class cannot hold what a file holds, or the device is none."""

    @classmethod
    def _from_settings(cls, settings: dict[str, Any], arguments: dict[str, Any]) -> Self:
        """An empty buffer, from the settings of a file and the arguments that all classes have."""
        further = {name: settings[name] for name in cls._extra_arguments if name in settings}
        for name, value in further.items():
            if type(value) is not cls._extra_arguments[name]:
                raise CorruptDataError(f"{name} is {value!r}, expected {cls._extra_arguments[name]}")
        return cls(**arguments, **further)

    def _check_replaced(self, mark: Mark | None) -> None:
        """Raises an error if a checkpoint, which is not this buffer's, is not to be replaced."""

    def _restore(self, settings: dict[str, Any]) -> None:
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
    compression = {name: settings["compression"][name] for name in COMPRESSION}
    resolve_codec(compression["codec"], 0)
    resolve_frames_per_chunk(compression["frames_per_chunk"], 0)
    streams, nbytes = 0, element_nbytes(settings["action_space"]) + 17  # rewards, dones, timeouts, ends

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
    most = MOST_CHUNK // max(element_nbytes(settings["observation_space"]), 1)
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
