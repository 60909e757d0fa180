"""A ring of observations over chunks, which looks like the array that a replay buffer would keep."""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable
from typing import Any

import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from gym_compress.chunk import read_pieces
from gym_compress.codec import Codec, resolve_codec, resolve_frames_per_chunk
from gym_compress.errors import CorruptDataError
from gym_compress.replay.parcel import ImageParcel, NumberedChunks, Wanted
from gym_compress.replay.stream import Stream
from gym_compress.replay.transitions import fit_batch
from gym_compress.slicing import Slicing

__all__ = [
    "ObservationStore",
    "read_pair",
    "read_stores",
]

# In place of the number of a first slice: nothing is there; or, below zero, something that is no run of
# slices.
_EMPTY, _ODD = 0, -1
_INT32 = 2**31 - 1


class ObservationStore:
    """Observations of several environments in a ring of rows, in the place of a NumPy array.

    ``store[row] = batch`` writes one row, ``store[rows, envs]`` gathers. What stands in chunks is decoded as
    it is read; what was never written reads as zeros, as in the array that it stands for.

    Slices that an observation shares with the one that its environment wrote before are kept once; that is
    found by comparison, so a wrong ``stack_size`` costs memory and never a wrong value. Observations that
    wrappers compressed already are taken over with their chunks.

    Args:
        rows: The number of rows.
        n_envs: The number of environments.
        space: The space of one observation.
        stack_size: Frames stacked in an observation, or ``"auto"`` to look for them along a short first axis.
        stack_axis: The axis along which they are stacked.
        codec: A :class:`gym_compress.Codec`, its string, or ``"auto"``.
        frames_per_chunk: Frames compressed together, or ``None`` to choose by their size.

    Raises:
        ValueError: If ``stack_size`` or ``stack_axis`` does not suit the space, or the codec is unknown.
    """

    def __init__(
        self,
        rows: int,
        n_envs: int,
        space: spaces.Box,
        *,
        stack_size: int | str = "auto",
        stack_axis: int = 0,
        codec: str | Codec = "auto",
        frames_per_chunk: int | None = None,
    ) -> None:
        slicing = Slicing(space.shape, space.dtype, stack_size, stack_axis)
        codec = resolve_codec(codec, slicing.frame_nbytes)
        frames_per_chunk = resolve_frames_per_chunk(frames_per_chunk, slicing.frame_nbytes)
        self._slicing = slicing
        self.streams: list[Any] = [Stream(slicing, codec, frames_per_chunk) for _ in range(n_envs)]
        self._references = np.zeros((rows, n_envs), np.int32)
        self._odd: dict[int, tuple[int, ...]] = {}  # references that are no single number
        self._is_twin = False

    @classmethod
    def of_parcel(cls, parcel: ImageParcel, slicing: Slicing) -> tuple[ObservationStore, ObservationStore]:
        """A store of one environment and its twin, to be read, that hold what a parcel holds."""
        stores = cls.__new__(cls), cls.__new__(cls)
        chunks = NumberedChunks(slicing, parcel.chunks(), parcel.firsts.tolist())
        odd = {_ODD - line: tuple(numbers) for line, numbers in enumerate(parcel.odd.tolist())}
        for store, references in zip(stores, parcel.references, strict=True):
            store._slicing, store.streams, store._odd = slicing, [chunks], odd
            store._references, store._is_twin = references[:, None], store is stores[1]
        return stores

    def twin(self) -> ObservationStore:
        """An empty store that shares this one's chunks: for the next observations."""
        twin = copy.copy(self)
        twin._references = np.zeros(self._references.shape, self._references.dtype)
        twin._odd = {}
        twin._is_twin = True
        return twin

    @property
    def shape(self) -> tuple[int, ...]:
        """``(rows, n_envs, *observation)``."""
        return (*self._references.shape, *self._slicing.shape)

    @property
    def dtype(self) -> np.dtype[Any]:
        """The dtype of an observation."""
        return self._slicing.dtype

    @property
    def nbytes(self) -> int:
        """Bytes that the array would take."""
        return self._references.size * self._slicing.nbytes

    @property
    def cbytes(self) -> int:
        """Bytes of the chunks and of the references to them; of a twin, the references alone."""
        chunks = 0 if self._is_twin else sum(stream.cbytes for stream in self.streams)
        return chunks + self._references.nbytes

    def __len__(self) -> int:
        return len(self._references)

    def __setitem__(self, row: int, batch: Any) -> None:
        """Writes a row: an array ``(n_envs, *observation)``, or a list of observations.

        Raises:
            IndexError: If there is no such row.
            ValueError: As :func:`fit_batch`. Nothing is written then.
        """
        rows, n_envs = self._references.shape
        row = operator.index(row)
        if not -rows <= row < rows:
            raise IndexError(f"Row {row} is out of range for {rows} rows")
        self.write(row % rows, fit_batch(batch, n_envs, self._slicing.shape, self.dtype))

    def write(self, row: int, batch: Any) -> None:
        """Writes a row that :func:`fit_batch` has checked."""
        n_envs = self._references.shape[1]
        pairs = zip(self.streams, batch, strict=True)
        new = [stream.put(observation, moves=self._is_twin) for stream, observation in pairs]
        for env, reference in enumerate(new):
            # an exception may come between any two lines, by a signal: what a row refers to is there
            old = int(self._references[row, env])
            released = self._odd[old] if old < 0 else old
            if isinstance(reference, tuple):
                key = _ODD - (row * n_envs + env)
                self._odd[key], reference = reference, key
            if abs(reference) > _INT32 and self._references.dtype == np.int32:
                self._references = self._references.astype(np.int64)
            self._references[row, env] = reference
            if old < 0 < reference:
                del self._odd[old]
            if old != _EMPTY:
                self.streams[env].release(released)

    def take(self, twin: ObservationStore, rows: NDArray[Any], envs: NDArray[Any]) -> ImageParcel:
        """A parcel of observations and next observations.

        Args:
            twin: Holds the next observations.
            rows: ``(n,)``, their rows.
            envs: ``(n,)``, their environments.
        """
        parcels, order = [], []
        for env in np.unique(envs):
            places = np.flatnonzero(envs == env)
            own = self._numbers(rows[places], env), twin._numbers(rows[places], env)
            lines = len(own[0][1])
            following = np.where(own[1][0] < 0, own[1][0] - lines, own[1][0])
            references, odd = np.stack((own[0][0], following)), np.concatenate((own[0][1], own[1][1]))
            parcels.append(self.streams[env].take(references, odd))
            order.append(places)
        if not parcels:
            parcels = [self.streams[0].take(np.empty((2, 0), np.int64), np.empty((0, self.slices), np.int64))]
            order = [rows]
        return ImageParcel.join(parcels).select(np.argsort(np.concatenate(order), kind="stable"))

    def _numbers(self, rows: NDArray[Any] | slice, env: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """References of an environment as an :class:`ImageParcel` has them."""
        references = self._references[rows, env].astype(np.int64)
        odd = self._lines(references)
        references[references < 0] = _ODD - np.arange(len(odd))
        return references, odd

    def _lines(self, references: NDArray[Any]) -> NDArray[np.int64]:
        """``(m, slices)``, the numbers behind those references that are below zero."""
        odd = [self._odd[reference] for reference in references[references < 0].tolist()]
        return np.array(odd, np.int64).reshape(len(odd), self.slices)

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
        several = np.unique(envs)
        if len(several) > 1:
            chunks = NumberedChunks(self._slicing, parcel.chunks(), parcel.firsts.tolist())
        for env in several:
            places = np.flatnonzero(envs == env)
            own = parcel
            if len(several) > 1:  # with those chunks alone that these touch
                references = parcel.references[:, places].astype(np.int64)
                own = chunks.take(*_without_unused(references, parcel.odd.astype(np.int64)))
            (ours, theirs), odd = self.streams[env].adopt(own)
            self._put(rows[places], env, ours, odd)
            twin._put(rows[places], env, theirs, odd)

    def _put(self, rows: NDArray[Any], env: int, numbers: NDArray[np.int64], odd: NDArray[np.int64]) -> None:
        """Writes references of an environment, which are counted already, and releases those that were there.

        Args:
            rows: ``(n,)``, the rows.
            env: The environment.
            numbers: ``(n,)``, the references as in :class:`ImageParcel`, in the numbers of the stream.
            odd: The odd ones.
        """
        before, lines = self._numbers(rows, env)
        keys = _ODD - (rows * self._references.shape[1] + env)
        irregular = numbers < 0
        for key, line in zip(keys[irregular].tolist(), odd[-1 - numbers[irregular]].tolist(), strict=True):
            self._odd[key] = tuple(line)
        references = np.where(irregular, keys, numbers)
        if self._references.dtype == np.int32 and np.abs(references).max(initial=0) > _INT32:
            self._references = self._references.astype(np.int64)
        self._references[rows, env] = references
        for key in keys[(before < 0) & ~irregular].tolist():
            del self._odd[key]
        self.streams[env].release_all(before[before > 0], lines)

    def clear(self) -> None:
        """Empties this store, and, if it is no twin, the streams that its twins share: clear these before."""
        self._references.fill(_EMPTY)
        self._odd.clear()
        if not self._is_twin:
            for stream in self.streams:
                stream.clear()

    def follows(self, twin: ObservationStore, before: int, row: int) -> NDArray[np.bool_]:
        """Whether what stands in a row is, bit for bit, what stands in an earlier row of a twin.

        Returns:
            ``(n_envs,)`` bool.
        """
        ours, theirs = self._references[row].tolist(), twin._references[before].tolist()
        if ours == theirs and min(ours) > 0:
            return np.ones(len(ours), np.bool_)
        pairs = zip(ours, theirs, strict=True)
        same = np.array([self._odd.get(a, a) == twin._odd.get(b, b) for a, b in pairs])
        for env in np.flatnonzero(~same):  # equal values may be kept twice
            try:
                kept = self[row, env : env + 1], twin[before, env : env + 1]
            except (CorruptDataError, OSError):  # of a file: whoever samples it is told
                continue
            same[env] = kept[0].tobytes() == kept[1].tobytes()
        return same

    def shares(self, twin: ObservationStore, before: int, row: int) -> NDArray[np.bool_]:
        """Where :meth:`follows` is true at a glance: both rows refer to the same bytes of the same chunks.

        Returns:
            ``(n_envs,)`` bool.
        """
        places: list[list[Wanted]] = []
        for store, at in ((self, row), (twin, before)):
            places.append([])
            for env in range(self._references.shape[1]):
                wanted: Wanted = {}
                store._locate(int(store._references[at, env]), env, 0, wanted)
                places[-1].append(wanted)
        return np.array([ours == theirs for ours, theirs in zip(*places, strict=True)])

    def may_break(
        self, twin: ObservationStore, before: NDArray[np.integer[Any]], rows: NDArray[np.integer[Any]]
    ) -> NDArray[np.bool_]:
        """Where :meth:`follows` may be false; it is quick to tell for many rows.

        Returns:
            ``(n, n_envs)`` bool.
        """
        references = self._references[rows]
        different: NDArray[np.bool_] = (references != twin._references[before]) | (references < 0)
        return different

    @property
    def slicing(self) -> Slicing:
        """How observations are cut into slices."""
        return self._slicing

    @property
    def slices(self) -> int:
        """The number of slices in an observation."""
        return self._slicing.count

    def state(self, rows: int) -> tuple[NDArray[np.signedinteger[Any]], NDArray[np.int64]]:
        """What says which slices the observations of the first rows are, for :meth:`restore`.

        Returns:
            References, ``(rows, n_envs)``: the number of the first slice if the others follow it, or a number
            below zero; and for each of these in turn the numbers of all slices, ``(n, slices)``.
        """
        references = self._references[:rows]
        return references, self._lines(references)

    def restore(self, references: NDArray[np.signedinteger[Any]], odd: NDArray[np.int64]) -> None:
        """Takes what :meth:`state` gave, into an empty store; :meth:`Stream.restore` checks it.

        Raises:
            CorruptDataError: If both do not belong together.
        """
        places = np.flatnonzero(references < 0)
        if len(places) != len(odd) or (references.ravel()[places] != _ODD - places).any():
            raise CorruptDataError("references below zero are not where they should be")
        if references.dtype != self._references.dtype:
            self._references = np.zeros(self._references.shape, references.dtype)
        self._references[: len(references)] = references
        self._odd = dict(zip((_ODD - places).tolist(), map(tuple, odd.tolist()), strict=True))

    def references(self, rows: int, env: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """References of an environment in the first rows: ``(n,)`` single numbers, ``(m, slices)`` others."""
        references, odd = self._numbers(slice(rows), env)
        return references[references > 0], odd

    def _locate(self, reference: int, env: int, to: int, wanted: Wanted) -> None:
        """Notes where the bytes are that a reference leads to; see :meth:`NumberedChunks.locate`."""
        if reference > 0:
            self.streams[env].locate(reference, self._slicing.count, to, wanted)
        elif reference != _EMPTY:
            for i, number in enumerate(self._odd[reference]):
                self.streams[env].locate(number, 1, to + i * self._slicing.slice_nbytes, wanted)

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
            index = np.arange(self._references.size).reshape(self._references.shape)[rows, envs]
            rows, envs = np.divmod(index, self._references.shape[1])
        rows, envs = np.broadcast_arrays(rows, envs)
        (gathered,) = read_stores((self, rows, envs))
        return gathered


class FlatStore:
    """A store as one axis, environment by environment: what SB3's ``swap_and_flatten`` makes of an array."""

    def __init__(self, store: ObservationStore) -> None:
        self._store = store

    def __getitem__(self, indices: NDArray[np.integer[Any]]) -> NDArray[Any]:
        """Gathers ``[indices]``; an index is ``env * rows + row``."""
        envs, rows = np.divmod(np.asarray(indices), len(self._store))
        (gathered,) = read_stores((self._store, rows, envs))
        return gathered


# Places of a store: the store, rows, and environments, two arrays of the same shape.
Places = tuple["ObservationStore", NDArray[Any], NDArray[Any]]


def read_stores(*places: Places, empty: Callable[..., NDArray[Any]] = np.empty) -> list[NDArray[Any]]:
    """Gathers places of stores that share their chunks, decoding each chunk once.

    Args:
        *places: A store, rows and environments; of a store and its twins, all of the same shape.
        empty: Makes the array, as NumPy's does.

    Returns:
        For each of them a new array ``(*rows.shape, *observation)``.
    """
    first, rows, _ = places[0]
    slicing, streams = first._slicing, first.streams
    out = empty((len(places), *rows.shape, *slicing.moved), slicing.dtype)
    if not out.size:
        return list(slicing.join(out))
    flat = out.reshape(-1).view(np.uint8)
    wanted: Wanted = {}
    to = 0
    for store, rows, envs in places:
        references = store._references[rows, envs].ravel().tolist()
        for reference, env in zip(references, envs.ravel().tolist(), strict=True):
            if reference > 0:
                streams[env].locate(reference, slicing.count, to, wanted)
            elif reference == _EMPTY:
                flat[to : to + slicing.nbytes] = 0
            else:
                store._locate(reference, env, to, wanted)
            to += slicing.nbytes
    read_pieces(wanted.items(), flat.data)
    return list(slicing.join(out))


def read_pair(
    store: Any,
    twin: Any,
    rows: NDArray[np.integer[Any]],
    envs: NDArray[np.integer[Any]],
    empty: Callable[..., NDArray[Any]] = np.empty,
) -> tuple[NDArray[Any], NDArray[Any]]:
    """Gathers observations and next observations, decoding each chunk once.

    Where each next observation is the observation moved on by the same slices, as in most batches of stacks,
    both are views of one array, and what they share is written once: copy them before writing to them.

    Args:
        store: The observations: a store, or an array.
        twin: The next observations: its twin, or an array.
        rows: Rows, an array of any shape.
        envs: Environments, of the same shape.
        empty: Makes the array of images, as NumPy's does.

    Returns:
        Two arrays ``(*rows.shape, *observation)``.
    """
    if not isinstance(store, ObservationStore):
        return store[rows, envs], twin[rows, envs]
    slicing, streams = store._slicing, store.streams
    ours, theirs = store._references[rows, envs].ravel(), twin._references[rows, envs].ravel()
    shift = int(theirs[0] - ours[0]) if ours.size else 0
    # if an observation moved on by more than itself, slices that nobody refers to lie between
    if not 0 < shift <= slicing.count or ours.min() <= 0 or (theirs - ours != shift).any():
        both = (store, rows, envs), (twin, rows, envs)
        observations, next_observations = read_stores(*both, empty=empty)
        return observations, next_observations
    count = slicing.count + shift
    moved = (slicing.slice_shape[0] * count, *slicing.moved[1:])
    out = empty((ours.size, *moved), slicing.dtype)
    wanted: Wanted = {}
    nbytes = count * slicing.slice_nbytes
    for i, (reference, env) in enumerate(zip(ours.tolist(), envs.ravel().tolist(), strict=True)):
        streams[env].locate(reference, count, i * nbytes, wanted)
    read_pieces(wanted.items(), out.reshape(-1).view(np.uint8).data)
    apart = shift * slicing.slice_shape[0]
    views = out[:, : slicing.moved[0]], out[:, apart:]
    first, second = (slicing.join(view.reshape(*rows.shape, *slicing.moved)) for view in views)
    return first, second


def _without_unused(
    references: NDArray[np.int64], odd: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """References as in :class:`ImageParcel`, and of the odd ones those alone that they mean."""
    irregular = references < 0
    used, inverse = np.unique(-1 - references[irregular], return_inverse=True)
    references[irregular] = -1 - inverse
    return references, odd[used]
