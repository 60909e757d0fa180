"""A ring of observations over chunks, which looks like the array that a replay buffer would keep."""

from __future__ import annotations

import copy
import operator
from array import array
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from gym_compress.chunk import Chunk, ChunkWriter, Piece, fit, read_pieces
from gym_compress.codec import Codec, resolve_codec, resolve_frames_per_chunk
from gym_compress.observation import CompressedObservation
from gym_compress.stream import worth_compressing

__all__ = ["ObservationStore", "fit_batch", "make_store", "make_twin", "read_pair", "read_stores"]

# Along an axis of at most this many entries, "auto" looks for frames that were stacked.
_MOST_SLICES = 16
# In place of the number of a first slice: nothing is there; and what is there is no run of slices.
_EMPTY, _ODD = -1, -2
_INT32 = 2**31 - 1
_ALL = {repr(slice(None)), repr(Ellipsis)}


def fit_batch(batch: Any, n_envs: int, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Any:
    """A batch of one observation an environment as it can be written; see :func:`gym_compress.chunk.fit`.

    Returns:
        An array ``(n_envs, *shape)`` of the dtype; or a list, if the batch is one with compressed
        observations.

    Raises:
        ValueError: If there are more or fewer observations, or one does not fit.
    """
    if not isinstance(batch, (list, tuple)) or not any(isinstance(o, CompressedObservation) for o in batch):
        return fit(batch, (n_envs, *shape), dtype)
    if len(batch) != n_envs:
        raise ValueError(f"Expected {n_envs} observations, one an environment, got {len(batch)}")
    return [
        part if isinstance(part, CompressedObservation) and (part.shape, part.dtype) == (shape, dtype)
        else fit(part, shape, dtype)
        for part in batch
    ]  # fmt: skip


class Slicing:
    """How observations of one shape are taken apart into slices along an axis.

    A slice is what is compared with slices before it and written once. A stack of grey frames has a slice a
    frame, a stack of RGB frames along channels three; an observation that is no stack may be one slice.

    Args:
        shape: The shape of an observation.
        dtype: Its dtype.
        stack_size: How many frames an observation stacks, 1 for none, or ``"auto"`` to take each entry of the
            first axis for a slice if there are few.
        stack_axis: The axis along which frames are stacked.

    Raises:
        ValueError: If the axis does not exist, or its length is no multiple of ``stack_size``.
    """

    def __init__(
        self, shape: tuple[int, ...], dtype: np.dtype[Any], stack_size: int | str, stack_axis: int
    ) -> None:
        if not -len(shape) <= stack_axis < len(shape):
            raise ValueError(f"stack_axis {stack_axis} does not exist in observations of shape {shape}")
        axis = stack_axis % len(shape)
        length = shape[axis]
        self.shape = shape
        self.dtype = np.dtype(dtype.type)
        if stack_size == "auto":
            self.count = length if axis == 0 and len(shape) >= 3 and 0 < length <= _MOST_SLICES else 1
            colours = 3 if self.count % 3 == 0 else 1
        elif isinstance(stack_size, (int, np.integer)) and stack_size > 0:
            if length % stack_size:
                raise ValueError(
                    f"stack_size {stack_size} does not divide axis {axis} of observations of shape {shape}"
                )
            self.count, colours = int(stack_size), 1
        else:
            raise ValueError(
                f"stack_size is expected to be 'auto' or a positive integer, actual: {stack_size!r}"
            )
        # Observations are kept with the stacked axis first, cut into `count` slices.
        self.axis = axis if self.count > 1 else 0
        self.moved = (length, *shape[:axis], *shape[axis + 1 :]) if self.axis else shape
        self.slice_shape = (self.moved[0] // self.count, *self.moved[1:])
        self.slice_nbytes = int(np.prod(self.slice_shape, dtype=np.int64)) * self.dtype.itemsize
        self.slices_per_frame = colours
        self.frame_nbytes = self.slice_nbytes * colours
        self.nbytes = self.slice_nbytes * self.count

    def cut(self, observation: NDArray[Any]) -> NDArray[Any]:
        """The slices of an observation, ``(count, *slice_shape)``; a view if they lie in that order."""
        moved = np.moveaxis(observation, self.axis, 0) if self.axis else observation
        return np.ascontiguousarray(moved).reshape(self.count, *self.slice_shape)

    def join(self, moved: NDArray[Any]) -> NDArray[Any]:
        """Observations in their own shape, from ones with the stacked axis first; a view."""
        return np.moveaxis(moved, -len(self.shape), self.axis - len(self.shape)) if self.axis else moved


class Stream:
    """The slices of one environment, numbered as they come, in chunks that go when nothing refers to them.

    A chunk has a range of numbers, which its slices fill from the front.
    """

    def __init__(self, slicing: Slicing, codec: Codec, frames_per_chunk: int) -> None:
        self._slicing = slicing
        self._writer = ChunkWriter(
            slicing.slice_shape,
            slicing.dtype,
            codec=codec,
            frames_per_chunk=frames_per_chunk * slicing.slices_per_frame,
            keep=slicing.count,
        )
        self.clear()

    def clear(self) -> None:
        """Forgets all observations."""
        self._chunks: list[Chunk | None] = []
        self._firsts = array("q")  # where the range of each chunk begins
        self._users = array("q")  # how many references lead to each chunk
        self._adopted: dict[Chunk, _Adopted] = {}  # the chunks that wrappers write
        self._gone = 0  # how many chunks at the front of the lists are gone
        self._end = 0
        self._own: Chunk | None = None  # the chunk that is being written
        self._own_first = 0  # where its range begins
        self._last: NDArray[Any] | None = None  # the bits of the newest observation, if it came as an array
        self._numbers: list[int] = []  # their numbers
        self._shift = 1  # by how many slices observations moved on last

    @property
    def cbytes(self) -> int:
        """Bytes of the chunks."""
        return sum(chunk.cbytes for chunk in self._chunks if chunk is not None)

    def put(self, observation: Any, moves: bool) -> int | tuple[int, ...]:
        """Takes an observation in. Its chunks stay until the reference is released.

        What it shares with the newest observation is not written again: a comparison tells.

        Args:
            observation: An array, or a compressed observation.
            moves: Whether it is likely to have moved on from the newest one, or to be the same. Where all
                frames are alike both are true, and what comes regularly is read faster.

        Returns:
            A reference: the number of the first slice if the others follow it, which is nearly always so;
            else the numbers of all.
        """
        written, written_first = self._own, self._own_first
        numbers = self._adopt(observation) if isinstance(observation, CompressedObservation) else None
        if numbers is not None:
            self._last = None
            self.seal()  # a chunk that stays open would stay in front of those that come and go
        else:
            slices = self._slicing.cut(np.asarray(observation))
            words = _words(slices)
            numbers = self._shared(words, moves)
            if len(numbers) < len(slices):
                last, self._last = self._last, None  # what follows may fail
                numbers.extend([self._append(slice_) for slice_ in slices[len(numbers) :]])
                if last is None:
                    last = np.empty_like(words)
                last[...] = words
                self._numbers, self._last = numbers, last
        first = numbers[0]
        follow = numbers == list(range(first, first + len(numbers)))
        reference = first if follow else tuple(numbers)
        for index in self._touched(reference):
            self._users[index] += 1
        if written is not None and written is not self._own:
            self._let_go(self._index(written_first))
        return reference

    def _append(self, slice_: NDArray[Any]) -> int:
        chunk, index = self._writer.append(slice_)
        if chunk is not self._own:
            self._own, self._own_first = chunk, self._end
            self._register(chunk, self._writer.frames_per_chunk)
        return self._own_first + index

    def _shared(self, words: NDArray[Any], moves: bool) -> list[int]:
        """The numbers of the first slices, as far as they are the newest observation's last, bit for bit."""
        last, count = self._last, self._slicing.count
        if last is None:
            return []
        likely = (self._shift, 0) if moves else (0, self._shift)
        for shift in (*likely, *[shift for shift in range(1, count) if shift != self._shift]):
            if shift < count:
                apart = len(words) // count * shift
                if (words[: len(words) - apart] == last[apart:]).all():
                    self._shift = shift or self._shift
                    return self._numbers[shift:]
        return []

    def _adopt(self, observation: CompressedObservation) -> list[int] | None:
        """Takes the chunks of an observation over as they are; None if its bytes do not lie in slices."""
        nbytes = self._slicing.slice_nbytes
        if self._slicing.axis or not nbytes:
            return None
        segments = list(observation._segments())
        if any(start % nbytes or length % nbytes for _, start, length in segments):
            return None
        numbers: list[int] = []
        for chunk, start, length in segments:
            if chunk not in self._adopted:
                # the end of a chunk that makes no whole slice has a number too, which nothing refers to
                self._adopted[chunk] = _Adopted(self._end)
                self._register(chunk, -(-chunk.nbytes // nbytes))
            adopted = self._adopted[chunk]
            adopted.end = max(adopted.end, start + length)
            numbers.extend(range(adopted.first + start // nbytes, adopted.first + (start + length) // nbytes))
        return numbers

    def _register(self, chunk: Chunk, slices: int) -> None:
        self._chunks.append(chunk)
        self._firsts.append(self._end)
        self._users.append(0)
        self._end += slices

    def _index(self, number: int) -> int:
        """The place in the lists of the chunk that holds a slice."""
        return bisect_right(self._firsts, number) - 1

    def release(self, reference: int | tuple[int, ...]) -> None:
        """Takes a reference back."""
        for index in self._touched(reference):
            self._users[index] -= 1
            self._let_go(index)
        if self._gone > 256:
            del self._chunks[: self._gone], self._firsts[: self._gone], self._users[: self._gone]
            self._gone = 0

    def _touched(self, reference: int | tuple[int, ...]) -> Iterable[int]:
        if isinstance(reference, tuple):
            return {self._index(number) for number in reference}
        return range(self._index(reference), self._index(reference + self._slicing.count - 1) + 1)

    def _let_go(self, index: int) -> None:
        """Drops a chunk that nothing refers to and that is not being written."""
        chunk = self._chunks[index]
        if self._users[index] or chunk is None or chunk is self._own:
            return
        self._adopted.pop(chunk, None)
        self._chunks[index] = None
        while self._gone < len(self._chunks) and self._chunks[self._gone] is None:
            self._gone += 1

    def locate(self, first: int, count: int, to: int, wanted: dict[Chunk, list[Piece]]) -> None:
        """Notes which bytes of which chunks hold slices that follow each other.

        Args:
            first: The number of the first slice.
            count: How many slices.
            to: Where in the output their bytes begin.
            wanted: Gains the pieces, for :func:`gym_compress.chunk.read_pieces`.
        """
        nbytes = self._slicing.slice_nbytes
        index = bisect_right(self._firsts, first) - 1
        start = (first - self._firsts[index]) * nbytes
        left = count * nbytes
        while left:
            chunk = self._chunks[index]
            assert chunk is not None, "a chunk stays while something refers to it"
            end = start + left
            if end > chunk.nbytes:
                end = chunk.nbytes
            piece = (to, to + end - start, start, end)
            if chunk in wanted:
                wanted[chunk].append(piece)
            else:
                wanted[chunk] = [piece]
            to += end - start
            left -= end - start
            start = 0
            index += 1

    def __getstate__(self) -> dict[str, Any]:
        """All in sealed chunks: those that wrappers still write are copied as far as they are referred to."""
        self.seal()
        chunks = list(self._chunks)
        for chunk, adopted in self._adopted.items():
            if not chunk.sealed:
                raw = np.frombuffer(chunk.content[: adopted.end], self._slicing.dtype)
                chunks[self._index(adopted.first)] = Chunk.from_array(raw, chunk.codec)
        return {**self.__dict__, "_chunks": chunks, "_adopted": {}}

    def seal(self) -> None:
        """Compresses the slices that are raw so far."""
        self._writer.seal()
        own, self._own = self._own, None
        if own is None:
            return
        if own is self._chunks[-1]:
            # nothing follows it yet: its range ends with its slices, and the next one's goes on
            self._end = self._own_first + own.nbytes // max(self._slicing.slice_nbytes, 1)
        self._let_go(self._index(self._own_first))


class _Adopted:
    """A chunk that a wrapper writes: where its range begins, and how many of its bytes are referred to."""

    __slots__ = ("end", "first")

    def __init__(self, first: int) -> None:
        self.first = first
        self.end = 0


def _words(slices: NDArray[Any]) -> NDArray[Any]:
    """The bits of slices as a flat array that is quick to compare."""
    flat = slices.reshape(-1).view(np.uint8)
    return flat if slices[0].nbytes % 8 else flat.view(np.uint64)


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
        self._streams = [Stream(slicing, codec, frames_per_chunk) for _ in range(n_envs)]
        self._references = np.full((rows, n_envs), _EMPTY, np.int32)
        self._odd: dict[int, tuple[int, ...]] = {}  # references that are no single number
        self._is_twin = False

    def twin(self) -> ObservationStore:
        """An empty store that shares this one's chunks: for the next observations."""
        twin = copy.copy(self)
        twin._references = np.full_like(self._references, _EMPTY)
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
        chunks = 0 if self._is_twin else sum(stream.cbytes for stream in self._streams)
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
        pairs = zip(self._streams, batch, strict=True)
        new = [stream.put(observation, moves=self._is_twin) for stream, observation in pairs]
        for env, reference in enumerate(new):
            self._drop(row, env)
            if isinstance(reference, tuple):
                key = _ODD - (row * n_envs + env)
                self._odd[key], reference = reference, key
            if abs(reference) > _INT32 and self._references.dtype == np.int32:
                self._references = self._references.astype(np.int64)
            self._references[row, env] = reference

    def _drop(self, row: int, env: int) -> None:
        """Takes the reference back that stands in a place."""
        old = int(self._references[row, env])
        if old != _EMPTY:
            self._streams[env].release(old if old >= 0 else self._odd.pop(old))

    def clear(self) -> None:
        """Empties this store, and the streams that it shares with twins: clear these as well."""
        for stream in self._streams:
            stream.clear()
        self._references.fill(_EMPTY)
        self._odd.clear()

    def follows(self, twin: ObservationStore, before: int, row: int) -> NDArray[np.bool_]:
        """Whether what stands in a row is, bit for bit, what stands in an earlier row of a twin.

        Returns:
            ``(n_envs,)`` bool.
        """
        ours, theirs = self._references[row].tolist(), twin._references[before].tolist()
        pairs = zip(ours, theirs, strict=True)
        same = np.array([self._odd.get(a, a) == twin._odd.get(b, b) for a, b in pairs])
        for env in np.flatnonzero(~same):  # equal values may be kept twice
            kept = self[row, env : env + 1], twin[before, env : env + 1]
            same[env] = kept[0].tobytes() == kept[1].tobytes()
        return same

    def flattened(self) -> FlatStore:
        """The store as one axis, environment by environment."""
        return FlatStore(self)

    def __getitem__(self, key: Any) -> NDArray[Any]:
        """Gathers ``store[rows, envs]``, indices that NumPy broadcasts against each other.

        A slice of everything (``:``, ``...``) may follow, as it may for the array. With ``store[row]`` alone,
        or ``store[row, :]``, all environments are meant.
        """
        key = key if isinstance(key, tuple) else (key,)
        if any(part is Ellipsis for part in key[:2]) or not all(part in _ALL for part in map(repr, key[2:])):
            raise IndexError(f"A store is indexed by rows and environments, got {key}")
        rows, envs = (*key, slice(None))[:2]
        if isinstance(rows, slice) or isinstance(envs, slice):  # the places that NumPy finds in a grid of all
            index = np.arange(self._references.size).reshape(self._references.shape)[rows, envs]
            rows, envs = np.divmod(index, self._references.shape[1])
        (gathered,) = read_stores([self], *np.broadcast_arrays(rows, envs))
        return gathered


class FlatStore:
    """A store as one axis, environment by environment: what SB3's ``swap_and_flatten`` makes of an array."""

    def __init__(self, store: ObservationStore) -> None:
        self._store = store

    def __getitem__(self, indices: NDArray[np.integer[Any]]) -> NDArray[Any]:
        """Gathers ``[indices]``; an index is ``env * rows + row``."""
        envs, rows = np.divmod(np.asarray(indices), len(self._store))
        (gathered,) = read_stores([self._store], rows, envs)
        return gathered


def read_stores(
    stores: Sequence[ObservationStore], rows: NDArray[np.integer[Any]], envs: NDArray[np.integer[Any]]
) -> list[NDArray[Any]]:
    """Gathers the same places of stores that share their chunks, decoding each chunk once.

    Args:
        stores: A store and its twins.
        rows: Rows, an array of any shape.
        envs: Environments, of the same shape.

    Returns:
        For each store a new array ``(*rows.shape, *observation)``.
    """
    slicing, streams = stores[0]._slicing, stores[0]._streams
    out = np.empty((len(stores), *rows.shape, *slicing.moved), slicing.dtype)
    if not out.size:
        return list(slicing.join(out))
    flat = out.reshape(-1).view(np.uint8)
    wanted: dict[Chunk, list[Piece]] = {}
    environments = envs.ravel().tolist()
    to = 0
    for store in stores:
        for reference, env in zip(store._references[rows, envs].ravel().tolist(), environments, strict=True):
            if reference >= 0:
                streams[env].locate(reference, slicing.count, to, wanted)
            elif reference == _EMPTY:
                flat[to : to + slicing.nbytes] = 0
            else:
                for i, number in enumerate(store._odd[reference]):
                    streams[env].locate(number, 1, to + i * slicing.slice_nbytes, wanted)
            to += slicing.nbytes
    read_pieces(wanted.items(), flat.data)
    return list(slicing.join(out))


def read_pair(
    store: Any, twin: Any, rows: NDArray[np.integer[Any]], envs: NDArray[np.integer[Any]]
) -> tuple[NDArray[Any], NDArray[Any]]:
    """Gathers observations and next observations, decoding each chunk once.

    Where each next observation is the observation moved on by the same slices, as in most batches of stacks,
    both are views of one array, and what they share is written once: copy them before writing to them.

    Args:
        store: The observations: a store, or an array.
        twin: The next observations: its twin, or an array.
        rows: Rows, an array of any shape.
        envs: Environments, of the same shape.

    Returns:
        Two arrays ``(*rows.shape, *observation)``.
    """
    if not isinstance(store, ObservationStore):
        return store[rows, envs], twin[rows, envs]
    slicing, streams = store._slicing, store._streams
    ours, theirs = store._references[rows, envs].ravel(), twin._references[rows, envs].ravel()
    shift = int(theirs[0] - ours[0]) if ours.size else 0
    # if an observation moved on by more than itself, slices that nobody refers to lie between
    if not 0 < shift <= slicing.count or ours.min() < 0 or (theirs - ours != shift).any():
        observations, next_observations = read_stores([store, twin], rows, envs)
        return observations, next_observations
    count = slicing.count + shift
    moved = (slicing.slice_shape[0] * count, *slicing.moved[1:])
    out = np.empty((ours.size, *moved), slicing.dtype)
    wanted: dict[Chunk, list[Piece]] = {}
    nbytes = count * slicing.slice_nbytes
    for i, (reference, env) in enumerate(zip(ours.tolist(), envs.ravel().tolist(), strict=True)):
        streams[env].locate(reference, count, i * nbytes, wanted)
    read_pieces(wanted.items(), out.reshape(-1).view(np.uint8).data)
    apart = shift * slicing.slice_shape[0]
    views = out[:, : slicing.moved[0]], out[:, apart:]
    first, second = (slicing.join(view.reshape(*rows.shape, *slicing.moved)) for view in views)
    return first, second


def make_store(
    rows: int, n_envs: int, space: spaces.Space[Any], **kwargs: Any
) -> ObservationStore | NDArray[Any]:
    """What keeps a leaf of observations: a store if it is an image, else an array of zeros.

    Raises:
        TypeError: If observations of the space are no arrays of a fixed shape.
    """
    if isinstance(space, spaces.Box) and len(space.shape) >= 2 and worth_compressing(space):
        return ObservationStore(rows, n_envs, space, **kwargs)
    if space.shape is None or space.dtype is None:
        raise TypeError(f"Expected a space of arrays of a fixed shape, actual: {space}")
    return np.zeros((rows, n_envs, *space.shape), space.dtype)


def make_twin(store: Any) -> Any:
    """What keeps the next observations of a leaf beside its observations."""
    return store.twin() if isinstance(store, ObservationStore) else np.zeros_like(store)
