"""Saving buffers to replay files, and loading them: the same for the neutral buffer and for SB3's."""

from __future__ import annotations

import math
import os
from array import array
from functools import partial
from typing import Any, ClassVar, Self

import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from gym_compress.errors import CorruptDataError
from gym_compress.replay.file import ReplayFile
from gym_compress.replay.format import MOST_CHUNK, Block, ChunkTable, refusing
from gym_compress.replay.settings import element_nbytes, space_from_json, space_to_json
from gym_compress.replay.store import ObservationStore, is_image
from gym_compress.replay.stream import Stream
from gym_compress.tree import map_leaves, map_space

__all__ = ["COMPRESSION", "SavedBuffer"]

# Limits of FORMAT.md: bytes of all arrays with all rows filled, and streams.
_MOST_NBYTES = 2**36
_MOST_STREAMS = 2**14

_ARRAYS = ("actions", "rewards", "dones", "timeouts")
_FLAGS = ("optimize_memory_usage", "handle_timeout_termination")
COMPRESSION = ("stack_size", "stack_axis", "codec", "frames_per_chunk")


class _Known:
    """The checkpoint that a buffer and a file have in common; a copy of the buffer has none."""

    def __init__(
        self, mark: tuple[int, int] | None = None, blocks: dict[str, list[Block]] | None = None
    ) -> None:
        self.mark = mark
        self.blocks = blocks or {}

    def __reduce__(self) -> tuple[Any, ...]:
        return _Known, ()


class SavedBuffer:
    """What buffers have in common that are saved to replay files: all that have SB3's attributes."""

    observation_space: Any
    action_space: spaces.Space[Any]
    buffer_size: int
    n_envs: int
    pos: int
    full: bool

    _compression: dict[str, Any]  # the arguments that say how observations are compressed
    _further: ClassVar[tuple[str, ...]] = ()  # attributes that are arguments of this class alone
    _derived: ClassVar[tuple[str, ...]] = ()  # arrays that a file may lack
    _file: ReplayFile | None = None  # the file in which the chunks are, if they are in one
    _known = _Known()

    def save(self, path: str | os.PathLike[str] | None = None) -> None:
        """Saves to a replay file; if that holds the checkpoint before, only what changed since.

        A process that is killed meanwhile leaves the last whole checkpoint.

        Args:
            path: The file. It is made if it is not there. ``None`` for the one in which the chunks are
                already, of a buffer with ``path=`` or loaded lazily.

        Raises:
            FileExistsError: If there is a file already, and no replay file.
            OSError: If the system refuses, as when the disk is full. File and buffer are as they were.
            CorruptDataError: If the file is damaged.
            ValueError: If there is no path and no file, or something is too large for a file.
            TypeError: If a file cannot hold a space of this kind.
        """
        settings = self._settings()
        _arguments(settings)  # what could not be loaded is not saved
        if self._file is not None and (path is None or _same(path, self._file)):
            self._known = self._save(self._file, settings)
            return
        if path is None:
            raise ValueError("Expected a path: this buffer is in memory, and in no file yet")
        file = ReplayFile.open_to_save(path)
        try:
            known = self._save(file, settings)
        finally:
            file.close()
        if self._file is None:
            self._known = known

    def _save(self, file: ReplayFile, settings: dict[str, Any]) -> _Known:
        streams = self._streams()
        for stream in streams:
            stream.settle()
        own = file is self._file
        if own:
            self._drop_evicted(file)
        known, told = _Known(), {}
        saved: list[array[int]] = []
        with file.saving():
            # chunks that are in a file of their own are copied to others, whole
            incremental = own or (self._file is None and file.mark and file.mark == self._known.mark)
            if incremental:
                file.drop([] if own else [id_ for stream in streams for id_ in stream.evicted])
                file.evict()
            else:
                file.clear()
            for number, stream in enumerate(streams):
                saved.append(array("q", stream.ids))
                for index, first, chunk in stream.unsaved(everything=not incremental):
                    saved[-1][index] = file.put(number, first, chunk).id
            for name, values in self._all_arrays().items():
                before = self._known.blocks.get(name, []) if incremental else []
                told[name], known.blocks[name] = file.put_array(values, before)
            file.finish({**settings, "arrays": told})
        if own or self._file is None:
            for stream, ids in zip(streams, saved, strict=True):
                stream.saved(ids)
        known.mark = file.mark
        return known

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
            told, table = file.read_checkpoint()
            with refusing(f"The settings of {file.path} are not valid"):
                arguments = _arguments(told)
            cls._check(told, arguments["observation_space"], device)
            with refusing(f"{file.path} is not valid"):
                buffer = cls._made(told, {**arguments, "device": device})
                buffer.pos, buffer.full = told["pos"], bool(told["full"])
                buffer._known = _Known(file.mark, buffer._read_arrays(file, told["arrays"]))
                buffer._read_chunks(file, table, lazy)
                buffer._restore(told)
        except BaseException:
            file.close()
            raise
        if lazy:
            buffer._keep_in(file)
        else:
            file.close()
        return buffer

    def _read_arrays(self, file: ReplayFile, told: dict[str, Any]) -> dict[str, list[Block]]:
        """Reads all arrays, and returns their blocks."""
        rows, blocks = self._filled(), {}
        for name, values in self._row_arrays().items():
            if name in told or name not in self._derived:
                blocks[name] = file.read_array(told[name], values[:rows])
        for name, store in self._leaves(ObservationStore):
            parts = []
            for part, columns in ((name, self.n_envs), (f"{name}.odd", store.slices)):
                length, dtype = told[part]["shape"][0], told[part]["dtype"]
                if dtype not in ("<i4", "<i8") or not 0 <= length <= rows * self.n_envs:
                    raise CorruptDataError(f"{part} is {length} rows of {dtype}")
                parts.append(np.empty((length, columns), dtype))
                blocks[part] = file.read_array(told[part], parts[-1])
            store.restore(*parts)
        return blocks

    def _read_chunks(self, file: ReplayFile, table: ChunkTable, lazy: bool) -> None:
        streams = self._streams()
        if len(table.ids) and not (
            table.ids[0] > 0
            and 0 <= table.streams.min() <= table.streams.max() < len(streams)
            and 0 < table.nbytes.min() <= table.nbytes.max() <= MOST_CHUNK
        ):
            raise CorruptDataError("ids, streams or sizes of chunks are out of bounds")
        chunks = list(file.stored_chunks(table) if lazy else file.read_chunks(table))
        order = np.lexsort((table.firsts, table.streams))
        ends = np.searchsorted(table.streams[order], np.arange(len(streams) + 1))
        numbers = iter(range(len(streams)))
        for store, twin in self._pairs():
            for env, stream in enumerate(store.streams):
                number = next(numbers)
                own = order[ends[number] : ends[number + 1]]
                references = (kept.references(self._filled(), env) for kept in (store, twin))
                runs, odd = map(np.concatenate, zip(*references, strict=True))
                stream.restore([chunks[i] for i in own], table.ids[own], table.firsts[own], runs, odd)

    def _filled(self) -> int:
        """The number of rows that are filled."""
        return self.buffer_size if self.full else self.pos

    def _keep_in(self, file: ReplayFile) -> None:
        """From now on, chunks go to a file but for the newest."""
        self._file = file
        for number, stream in enumerate(self._streams()):
            stream.keep_on(partial(file.put, number))

    def _make_room(self) -> None:
        """Writes what waits for the file, if it is much. To be called before anything changes."""
        if self._file is not None and self._file.is_crowded():
            self._drop_evicted(self._file)
            self._file.flush()

    def _drop_evicted(self, file: ReplayFile) -> None:
        for stream in self._streams():
            file.drop(stream.evicted)
            stream.evicted.clear()

    def close(self) -> None:
        """Closes the file in which the chunks are, if they are in one. What was not saved is lost."""
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
            **{name: getattr(self, name) for name in self._further},
            "compression": {**self._compression, "codec": str(self._compression["codec"])},
        }

    @classmethod
    def _check(cls, told: dict[str, Any], space: spaces.Space[Any], device: Any) -> None:
        """Raises an error if the class cannot hold what a file holds, or the device is none."""

    @classmethod
    def _made(cls, told: dict[str, Any], arguments: dict[str, Any]) -> Self:
        """An empty buffer."""
        further = {name: told[name] for name in cls._further if name in told}
        return cls(**arguments, **further)

    def _restore(self, told: dict[str, Any]) -> None:
        """Restores what is no array and no chunk."""


def _arguments(told: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a constructor, from the settings of a file, sizes checked first.

    Raises:
        ValueError: If something is too large for a file, or does not fit together.
        LookupError, TypeError, AttributeError: If the settings are none.
    """
    rows, n_envs, pos = (_integer(told[name]) for name in ("buffer_size", "n_envs", "pos"))
    if not 0 <= pos < rows or n_envs < 1 or not isinstance(told["full"], bool):
        raise ValueError(f"{pos} is no position in {rows} rows of {n_envs} environments")
    observation_space, action_space = (
        space_from_json(told[name]) for name in ("observation_space", "action_space")
    )
    streams, nbytes = 0, element_nbytes(told["action_space"]) + 17  # rewards, dones, timeouts, ends

    def leaf(space: spaces.Space[Any]) -> None:
        nonlocal streams, nbytes
        streams += is_image(space)
        assert space.shape is not None
        nbytes += 16 if is_image(space) else 2 * math.prod(space.shape) * np.dtype(space.dtype).itemsize

    map_space(leaf, observation_space)
    if rows * n_envs * nbytes > _MOST_NBYTES or streams * n_envs > _MOST_STREAMS:
        raise ValueError(
            f"A replay file holds arrays of at most {_MOST_NBYTES} bytes and {_MOST_STREAMS} streams, "
            f"got {rows * n_envs * nbytes} and {streams * n_envs}"
        )
    compression = {name: told["compression"][name] for name in COMPRESSION}
    frames = compression["frames_per_chunk"]
    most = MOST_CHUNK // max(element_nbytes(told["observation_space"]), 1)
    if frames is not None and _integer(frames) > most:
        raise ValueError(f"A replay file holds up to {most} of these frames a chunk, got {frames}")
    return {
        "buffer_size": rows * n_envs,
        "observation_space": observation_space,
        "action_space": action_space,
        "n_envs": n_envs,
        **{name: bool(told[name]) for name in _FLAGS},
        **compression,
    }


def _integer(value: Any) -> int:
    if type(value) is not int:
        raise ValueError(f"{value!r} is no integer")
    return value


def _same(path: str | os.PathLike[str], file: ReplayFile) -> bool:
    return os.path.exists(path) and os.path.samefile(path, file.path)
