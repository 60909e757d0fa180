"""A ring of observations over chunks, which looks like the array that a replay buffer would keep."""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from gym_compress.codec import Codec
from gym_compress.recorder import Recorder
from gym_compress.replay.index import MOST_NUMBER, ChunkIndex
from gym_compress.replay.parcel import ImageParcel
from gym_compress.slicing import Slicing
from gym_compress.spaces import fit

__all__ = ["Compression", "FlatStore", "ObservationStore", "read_places", "read_references"]

_INT32 = 2**31 - 1

# Makes an array of a shape and dtype, as numpy.empty does.
Empty = Callable[..., NDArray[Any]]


class Compression(NamedTuple):
    """How the images of a buffer are compressed: the arguments that all buffers have for that.

    Attributes:
        stack_size: How many frames an observation stacks, or ``"auto"`` to find out.
        stack_axis: The axis along which they are stacked.
        codec: A :class:`gym_compress.Codec`, its string, or ``"auto"``.
        frames_per_chunk: Frames compressed together, or ``None`` to choose by their size.
    """

    stack_size: int | str = "auto"
    stack_axis: int = 0
    codec: str | Codec = "auto"
    frames_per_chunk: int | None = None


class ObservationStore:
    """Observations of several environments in a ring of rows, in the place of a NumPy array.

    ``store[row] = batch`` writes one row, ``store[rows, envs]`` gathers. What stands in chunks is decoded as
    it is read; what was never written reads as zeros, as in the array that it stands for.

    Slices that an observation shares with the one that its environment wrote before are kept once; that is
    found by comparison, so a wrong ``stack_size`` costs memory and never a wrong value.

    Args:
        rows: The number of rows.
        n_envs: The number of environments.
        space: The space of one observation.
        compression: How they are compressed.

    Attributes:
        slicing: How observations are cut into slices.
        index: The chunks, with a stream for each environment.
        recorders: What records the observations of each environment.
        references: ``(rows, n_envs)`` int32 or int64: the number of each observation's first slice in the
            stream, which the others follow, 0 where nothing was written.

    Raises:
        ValueError: If ``stack_size`` or ``stack_axis`` does not suit the space, or the codec is unknown.
    """

    def __init__(
        self,
        rows: int,
        n_envs: int,
        space: spaces.Box,
        compression: Compression,
    ) -> None:
        self.slicing = Slicing(space.shape, space.dtype, compression.stack_size, compression.stack_axis)
        self.index = ChunkIndex(self.slicing, n_envs)
        self.references: NDArray[np.signedinteger[Any]] = np.zeros((rows, n_envs), np.int32)
        self.recorders = [
            Recorder(
                self.slicing,
                codec=compression.codec,
                frames_per_chunk=compression.frames_per_chunk,
                begun=partial(self.index.append, env),
            )
            for env in range(n_envs)
        ]

    def twin(self) -> ObservationStore:
        """An empty store that shares this one's chunks: for the next observations."""
        twin = copy.copy(self)
        twin.references = np.zeros(self.references.shape, self.references.dtype)
        return twin

    @property
    def shape(self) -> tuple[int, ...]:
        """``(rows, n_envs, *observation)``."""
        return (*self.references.shape, *self.slicing.shape)

    @property
    def dtype(self) -> np.dtype[Any]:
        """The dtype of an observation."""
        return self.slicing.dtype

    @property
    def nbytes(self) -> int:
        """Bytes that the array would take."""
        return self.references.size * self.slicing.nbytes

    @property
    def cbytes(self) -> int:
        """Bytes of the chunks, which a twin shares, and of the references to them."""
        return self.index.cbytes + self.references.nbytes

    def __len__(self) -> int:
        return len(self.references)

    def __setitem__(self, row: int, batch: Any) -> None:
        """Writes a row: an array ``(n_envs, *observation)``.

        Raises:
            IndexError: If there is no such row.
            ValueError: As :func:`gym_compress.chunk.fit`. Nothing is written then.
        """
        rows, n_envs = self.references.shape
        row = operator.index(row)
        if not -rows <= row < rows:
            raise IndexError(f"Row {row} is out of range for {rows} rows")
        self.write(row % rows, fit(batch, (n_envs, *self.slicing.shape), self.dtype))

    def write(self, row: int, batch: NDArray[Any]) -> None:
        """Writes a row: an array ``(n_envs, *observation)`` of the dtype."""
        slices = self.slicing.cut(batch)
        references = [recorder.record(own) for recorder, own in zip(self.recorders, slices, strict=True)]
        self._refer(row, references, max(references))

    def _refer(self, key: Any, references: Any, largest: int) -> None:
        if largest > _INT32 and self.references.dtype == np.int32:
            self.references = self.references.astype(np.int64)
        self.references[key] = references

    def evict(self, twin: ObservationStore) -> None:
        """Lets those chunks go to which neither this store nor its twin refers any more."""
        oldest = [_oldest(store.references) for store in (self, twin)]
        for env, reference in enumerate(np.minimum(*oldest).tolist()):
            self.index.drop_before(env, reference)

    def take(self, twin: ObservationStore, rows: NDArray[Any], envs: NDArray[Any]) -> ImageParcel:
        """A parcel of observations and next observations.

        Args:
            twin: Holds the next observations.
            rows: ``(n,)``, their rows.
            envs: ``(n,)``, their environments.
        """
        streams = np.concatenate((envs, envs))
        references = np.concatenate((self.references[rows, envs], twin.references[rows, envs]))
        newest = np.zeros(len(self.recorders), np.int64)
        np.maximum.at(newest, streams, references)
        for env in np.flatnonzero(newest):
            recorder = self.recorders[env]
            if newest[env] + self.slicing.count > recorder.first_raw:
                # what comes next is written whole, and can be taken without these chunks
                recorder.restart(recorder.next_number)
        chunks, taken = self.index.take(streams, references)
        return ImageParcel.of(chunks, taken.reshape(2, -1), self.slicing)

    def adopt(
        self, twin: ObservationStore, rows: NDArray[Any], envs: NDArray[Any], parcel: ImageParcel
    ) -> None:
        """Takes a parcel over, which was checked, in the place of what stands there.

        Args:
            twin: Gets the next observations.
            rows: ``(n,)``, the rows to which they go.
            envs: ``(n,)``, their environments.
            parcel: The parcel of n transitions.
        """
        index = parcel.indexed()
        for env in np.unique(envs).tolist():
            places = np.flatnonzero(envs == env)
            references = parcel.references[:, places]
            chunks, taken = index.take(np.zeros(references.size, np.int64), references.ravel())
            recorder = self.recorders[env]
            recorder.restart(recorder.next_number)
            moved = self.index.adopt(env, chunks) - 1
            recorder.restart(self.index.span(env)[1])
            ours, theirs = np.where(taken, taken + moved, 0).reshape(2, -1)
            self._refer((rows[places], env), ours, ours.max())
            twin._refer((rows[places], env), theirs, theirs.max())

    def clear(self, *twins: ObservationStore) -> None:
        """Empties this store and its twins."""
        for store in (self, *twins):
            store.references.fill(0)
        for recorder in self.recorders:
            recorder.restart(recorder.next_number)
        self.index.clear()

    def seal(self) -> None:
        """Compresses what is raw so far."""
        for recorder in self.recorders:
            recorder.seal()

    def restore(self, references: NDArray[np.signedinteger[Any]]) -> None:
        """Takes references over to slices that are in the index, ``(rows, n_envs)`` of the first rows.

        Raises:
            CorruptDataError: If a slice is not there.
        """
        for env, recorder in enumerate(self.recorders):
            self.index.check(env, references[:, env])
            recorder.restart(self.index.span(env)[1])
        self._refer(slice(len(references)), references, references.max(initial=0))

    def flattened(self) -> FlatStore:
        """The store as one axis, environment by environment."""
        return FlatStore(self)

    def __getitem__(self, key: Any) -> NDArray[Any]:
        """Gathers ``store[rows, envs]``, indices that NumPy broadcasts against each other.

        A slice of everything (``:``, ``...``) may follow, as it may for the array. With ``store[row]`` alone,
        or ``store[row, :]``, all environments are meant.
        """
        key = key if isinstance(key, tuple) else (key,)
        whole = [part is Ellipsis or (isinstance(part, slice) and part == slice(None)) for part in key[2:]]
        if any(part is Ellipsis for part in key[:2]) or not all(whole):
            raise IndexError(f"A store is indexed by rows and environments, got {key}")
        rows, envs = (*key, slice(None))[:2]
        if isinstance(rows, slice) or isinstance(envs, slice):  # the places that NumPy finds in a grid of all
            index = np.arange(self.references.size).reshape(self.references.shape)[rows, envs]
            rows, envs = np.divmod(index, self.references.shape[1])
        rows, envs = np.broadcast_arrays(rows, envs)
        (gathered,) = read_places((self, rows, envs))
        return gathered

    def __getstate__(self) -> dict[str, Any]:
        self.seal()
        return self.__dict__


class FlatStore:
    """A store as one axis, environment by environment: what SB3's ``swap_and_flatten`` makes of an array."""

    def __init__(self, store: ObservationStore) -> None:
        self._store = store

    def __getitem__(self, indices: NDArray[np.integer[Any]]) -> NDArray[Any]:
        """Gathers ``[indices]``; an index is ``env * rows + row``."""
        envs, rows = np.divmod(np.asarray(indices), len(self._store))
        (gathered,) = read_places((self._store, rows, envs))
        return gathered


# Places of a store: the store, rows, and environments, two arrays of the same shape.
Places = tuple[ObservationStore, NDArray[Any], NDArray[Any]]


def read_places(*places: Places, empty: Empty = np.empty) -> list[NDArray[Any]]:
    """Gathers places of stores that share their chunks, decoding each chunk once.

    Args:
        *places: A store, rows and environments; of a store and its twin, all of the same shape.
        empty: Makes the arrays.

    Returns:
        For each of them an array ``(*rows.shape, *observation)``, C-contiguous, which nothing shares.
    """
    store, rows, _ = places[0]
    streams = np.concatenate([envs.ravel() for _, _, envs in places])
    references = np.concatenate([each.references[rows, envs].ravel() for each, rows, envs in places])
    return [
        out.reshape(*rows.shape, *store.slicing.shape)
        for out in read_references(store.index, streams, references, len(places), empty)
    ]


def read_references(
    index: ChunkIndex,
    streams: NDArray[Any],
    references: NDArray[Any],
    arrays: int,
    empty: Empty = np.empty,
) -> list[NDArray[Any]]:
    """Reads observations into new arrays, which share nothing; see :meth:`ChunkIndex.read`.

    Returns:
        As many arrays as are asked for, ``(n / arrays, *observation)``, C-contiguous.
    """
    slicing, n = index.slicing, len(references) // arrays
    make = np.empty if slicing.axis else empty
    cut = [make((n, slicing.count, *slicing.slice_shape), slicing.dtype) for _ in range(arrays)]
    index.read(streams, references, *cut)
    joined = [slicing.join(each) for each in cut]
    if not slicing.axis:
        return joined
    outs = [empty((n, *slicing.shape), slicing.dtype) for _ in range(arrays)]
    for out, each in zip(outs, joined, strict=True):
        out[...] = each
    return outs


def _oldest(references: NDArray[np.signedinteger[Any]]) -> NDArray[np.int64]:
    """Of each environment the smallest reference that leads somewhere, or a number beyond all."""
    beyond = np.iinfo(references.dtype).max
    oldest: NDArray[np.int64] = references.min(axis=0, where=references > 0, initial=beyond).astype(np.int64)
    return np.where(oldest == beyond, np.int64(MOST_NUMBER), oldest)
