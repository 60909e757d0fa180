"""Which chunks hold which slices: found for a whole batch of references at once."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from gym_compress.chunk import Chunk, Piece, read_pieces
from gym_compress.errors import CorruptDataError
from gym_compress.slicing import Slicing

__all__ = ["MOST_NUMBER", "ChunkIndex", "Plan"]

# A key is the number of a stream, and below it, in so many bits, that of a slice.
_BITS = 48
MOST_NUMBER = 2**_BITS - 2  # of a slice

_FEWEST_COLUMNS = 16


class Plan(NamedTuple):
    """Which slices of which chunks make observations up; arrays ``(pieces,)``, counted in slices.

    Attributes:
        observations: Which observation each piece is of, ascending.
        places: The place of its chunk in the index.
        tos: Where in the observation it begins.
        starts: Where in the chunk it begins.
        counts: How many slices it has.
    """

    observations: NDArray[np.int64]
    places: NDArray[np.int64]
    tos: NDArray[np.int64]
    starts: NDArray[np.int64]
    counts: NDArray[np.int64]


class ChunkIndex:
    """The chunks of several streams of slices. Slices are numbered from 1 on, in each stream for itself.

    A reference is the number of an observation's first slice, which the others follow, or 0 for nothing. The
    chunks of a stream follow each other without gaps; the oldest ones go.

    All lies in one array of keys, a row for each stream: the key of a chunk is that of its first slice, and
    behind the last chunk of a stream stands a key that is larger than all of its slices' and smaller than
    those of the next one. So the array is sorted as a whole, and one search finds the chunks of a batch.

    Args:
        slicing: What slices are.
        streams: How many streams there are.
    """

    def __init__(self, slicing: Slicing, streams: int) -> None:
        self.slicing = slicing
        self.streams = streams
        self.evicted: list[int] = []  # what a file knows those chunks by that are gone
        self._chunks: list[Any]
        self._ids: array[int]
        self._keys: NDArray[np.int64]
        self._begins: list[int]
        self._ends: list[int]
        self._allocate(_FEWEST_COLUMNS)

    def _allocate(self, columns: int, streams: Sequence[tuple[int, int]] = ()) -> None:
        """Makes room for so many chunks of each stream, and moves those in given places there."""
        chunks: list[Any] = [None] * (self.streams * columns)
        ids = array("q", bytes(8 * len(chunks)))  # what a file knows a chunk by, 0 if it does not
        keys = np.repeat(((np.arange(self.streams, dtype=np.int64) + 1) << _BITS) - 1, columns)
        begins = [stream * columns for stream in range(self.streams)]  # the place of the oldest chunk
        ends = list(begins)  # that behind the newest one
        for stream, (begin, end) in enumerate(streams):
            to = begins[stream]
            ends[stream] = to + end - begin
            chunks[to : ends[stream]] = self._chunks[begin:end]
            ids[to : ends[stream]] = self._ids[begin:end]
            keys[to : ends[stream]] = self._keys[begin:end]
        # at once, so that an interrupt finds all of it
        self._columns, self._chunks, self._ids, self._keys, self._begins, self._ends = (
            columns, chunks, ids, keys, begins, ends,
        )  # fmt: skip

    def clear(self) -> None:
        """Forgets all chunks, to which no reference may lead any more."""
        self.evicted += [id_ for id_ in self._ids if id_]
        self._allocate(_FEWEST_COLUMNS)

    def append(self, stream: int, first: int, chunk: Any, id_: int = 0) -> None:
        """Takes in the next chunk of a stream, which may be open.

        Args:
            stream: The number of the stream.
            first: The number of the first slice in it.
            chunk: The chunk, or what has ``content``, ``nbytes``, ``cbytes`` and ``codec`` as one.
            id_: What a file knows it by, 0 if none does.
        """
        key = (stream << _BITS) | first
        place = self._ends[stream]
        if place > self._begins[stream] and self._keys[place - 1] == key:
            place -= 1  # it began before, and an interrupt came before anything was written to it
        elif place == (stream + 1) * self._columns - 1:  # one key stays behind the last chunk
            self._make_room()
            place = self._ends[stream]
        self._chunks[place], self._ids[place] = chunk, id_
        self._keys[place] = key
        self._ends[stream] = place + 1

    def restore(self, stream: int, firsts: Sequence[int], chunks: Sequence[Any], ids: Sequence[int]) -> None:
        """Takes in the chunks of a stream that is empty, see :meth:`append`.

        Raises:
            CorruptDataError: If they have no whole slices, or do not follow each other.
        """
        nbytes = self.slicing.slice_nbytes
        expected = firsts[0] if len(firsts) else 1
        for first, chunk, id_ in zip(firsts, chunks, ids, strict=True):
            if first != expected or not 0 < first <= MOST_NUMBER - chunk.nbytes or chunk.nbytes % nbytes:
                raise CorruptDataError(
                    f"A chunk of {chunk.nbytes} bytes begins with slice {first}, expected {expected} and "
                    f"whole slices of {nbytes} bytes"
                )
            self.append(stream, first, chunk, id_)
            expected = first + chunk.nbytes // nbytes

    def _make_room(self) -> None:
        """Makes room for more chunks in each stream; those that are gone leave theirs."""
        places = list(self._places())
        most = max(end - begin for begin, end in places)
        self._allocate(max(most + most // 4 + 2, _FEWEST_COLUMNS), places)

    def _places(self) -> Iterator[tuple[int, int]]:
        """Of each stream the place of the oldest chunk and that behind the newest."""
        return zip(self._begins, self._ends, strict=True)

    def span(self, stream: int) -> tuple[int, int]:
        """The numbers of the oldest slice of a stream and of that behind the newest chunk's last one."""
        begin, end = self._begins[stream], self._ends[stream]
        if begin == end:
            return 1, 1
        oldest, newest = (int(self._keys[place]) & (2**_BITS - 1) for place in (begin, end - 1))
        return oldest, newest + self._chunks[end - 1].nbytes // self.slicing.slice_nbytes

    def check(self, stream: int, references: NDArray[Any]) -> None:
        """Checks that all slices are there to which references lead, which may be 0.

        Raises:
            CorruptDataError: If one is not.
        """
        oldest, end = self.span(stream)
        wrong = (references < oldest) | (references > end - self.slicing.count)
        if (wrong & (references != 0)).any():
            raise CorruptDataError("a reference leads to a slice that is not there")

    def locate(self, streams: NDArray[Any], references: NDArray[Any]) -> Plan:
        """Finds observations.

        Args:
            streams: ``(n,)``, the stream of each observation.
            references: ``(n,)``, the number of its first slice, or 0 for nothing.

        Returns:
            Which slices of which chunks they are.
        """
        keys = (streams.astype(np.int64) << _BITS) + references
        places = self._keys.searchsorted(keys, "right") - 1
        pieces = self._keys.searchsorted(keys + (self.slicing.count - 1), "right") - places
        pieces *= references > 0
        which = np.arange(len(keys)).repeat(pieces)
        places = places[which] + np.arange(len(which)) - (pieces.cumsum() - pieces)[which]
        keys = keys[which]
        begins = self._keys[places]
        firsts = np.maximum(keys, begins)
        ends = np.minimum(keys + self.slicing.count, self._keys[places + 1])
        return Plan(which, places, firsts - keys, firsts - begins, ends - firsts)

    def read(self, streams: NDArray[Any], references: NDArray[Any], *outs: NDArray[Any]) -> None:
        """Reads observations into arrays, decoding each chunk once.

        Args:
            streams: ``(n,)``, the stream of each observation.
            references: ``(n,)``, the number of its first slice; where it is 0, zeros are written.
            outs: Where they go, one after another: arrays ``(m, count, *slice_shape)`` for the same number of
                observations each, C-contiguous.

        Raises:
            CorruptDataError: If a chunk cannot be decoded.
        """
        if not references.all():
            for out, part in zip(outs, np.split(references, len(outs)), strict=True):
                out[part == 0] = 0
        plan = self.locate(streams, references)
        of_outs, rows = np.divmod(plan.observations, max(len(references) // len(outs), 1))
        nbytes = self.slicing.slice_nbytes
        tos, starts = (rows * self.slicing.count + plan.tos) * nbytes, plan.starts * nbytes
        lengths = plan.counts * nbytes
        columns = plan.places, of_outs, tos, tos + lengths, starts, starts + lengths
        chunks = self._chunks
        wanted: dict[Any, list[Piece]] = {}
        for place, which, to, to_end, start, end in zip(*[c.tolist() for c in columns], strict=True):
            chunk, piece = chunks[place], (which, to, to_end, start, end)
            if chunk in wanted:
                wanted[chunk].append(piece)
            else:
                wanted[chunk] = [piece]
        read_pieces(wanted.items(), [out.reshape(-1).view(np.uint8).data for out in outs])

    def take(self, streams: NDArray[Any], references: NDArray[Any]) -> tuple[list[Any], NDArray[np.int64]]:
        """The chunks that hold observations, and where they are in these alone.

        Args:
            streams: ``(n,)``, the stream of each observation.
            references: ``(n,)``, the number of its first slice, or 0.

        Returns:
            The chunks, and references to slices that are numbered from 1 on, through all of these.
        """
        places = np.unique(self.locate(streams, references).places)
        chunks = [self._chunks[place] for place in places.tolist()]
        slices = np.array([chunk.nbytes // self.slicing.slice_nbytes for chunk in chunks], np.int64)
        moved = (1 + np.cumsum(slices) - slices) - self._keys[places]
        keys = (streams.astype(np.int64) << _BITS) + references
        own = np.searchsorted(places, self._keys.searchsorted(keys, "right") - 1)
        return chunks, np.where(references, keys + np.append(moved, 0)[own], 0)

    def adopt(self, stream: int, chunks: Sequence[Chunk]) -> int:
        """Takes in sealed chunks of whole slices. Those that are the last ones here already are kept once.

        Returns:
            The number of the first slice in them.
        """
        begin, end = self._begins[stream], self._ends[stream]
        known = 0
        for count in range(min(len(chunks), end - begin), 0, -1):
            if all(map(_same_content, self._chunks[end - count : end], chunks[:count])):
                known = count
                break
        _, first = self.span(stream)
        number = first if not known else int(self._keys[end - known]) & (2**_BITS - 1)
        for chunk in chunks[known:]:
            self.append(stream, first, chunk)
            first += chunk.nbytes // self.slicing.slice_nbytes
        return number

    def drop_before(self, stream: int, reference: int) -> None:
        """Lets those chunks of a stream go that only hold slices before one, but never the newest chunk."""
        begin, end = self._begins[stream], self._ends[stream]
        if begin == end:
            return
        place = (
            begin + int(np.searchsorted(self._keys[begin:end], (stream << _BITS) + reference, "right")) - 1
        )
        for gone in range(begin, place):
            if self._ids[gone]:
                self.evicted.append(self._ids[gone])
            self._chunks[gone] = None
        self._begins[stream] = max(begin, place)

    @property
    def cbytes(self) -> int:
        """Bytes of the chunks."""
        return sum(chunk.cbytes for chunk in self._chunks if chunk is not None)

    def __len__(self) -> int:
        """The number of chunks."""
        return sum(end - begin for begin, end in self._places())

    # What follows is for replay files, in which chunks have numbers of another kind, their ids.

    def unsaved(self, stream: int, everything: bool) -> Iterator[tuple[int, int, Any]]:
        """Of each chunk that no file has its place here, the number of its first slice, and itself.

        Args:
            stream: The number of the stream.
            everything: Whether the chunks that a file has are wanted too.
        """
        for place in range(self._begins[stream], self._ends[stream]):
            if everything or not self._ids[place]:
                yield place, int(self._keys[place]) & (2**_BITS - 1), self._chunks[place]

    def ids(self) -> list[int]:
        """What a file knows the chunks by, 0 for those that it does not have."""
        return [id_ for begin, end in self._places() for id_ in self._ids[begin:end]]

    def note_saved(self, ids: Mapping[int, int]) -> None:
        """Notes what a file knows chunks by, by their places; what was evicted is not in it any more."""
        for place, id_ in ids.items():
            self._ids[place] = id_
        self.evicted.clear()

    def spill(self, stream: int, put: Callable[[int, Chunk], Any]) -> None:
        """Replaces the sealed chunks of a stream that are in memory.

        Args:
            stream: The number of the stream.
            put: Takes the number of a chunk's first slice and the chunk, and gives what stays in its place.
        """
        for place in range(self._ends[stream] - 1, self._begins[stream] - 1, -1):
            chunk = self._chunks[place]
            if not isinstance(chunk, Chunk):
                break  # the older ones went before
            if chunk.sealed:
                stored = put(int(self._keys[place]) & (2**_BITS - 1), chunk)
                self._chunks[place], self._ids[place] = stored, stored.id

    def __getstate__(self) -> dict[str, Any]:
        """All but what a file knows."""
        return {**self.__dict__, "_ids": array("q", bytes(8 * len(self._ids))), "evicted": []}


def _same_content(one: Any, other: Any) -> bool:
    ours, theirs = one.content, other.content
    if type(ours) is not type(theirs) or one.nbytes != other.nbytes:
        return False
    return bool(ours == theirs) if isinstance(ours, bytes) else np.array_equal(ours, theirs)
