"""Streams: the slices of observations, and the chunks that hold those of an environment."""

from __future__ import annotations

import hashlib
from array import array
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gym_compress.chunk import Chunk, ChunkWriter, read_pieces
from gym_compress.codec import Codec
from gym_compress.observation import CompressedObservation
from gym_compress.replay.format import MOST_CHUNK
from gym_compress.replay.parcel import ImageParcel, NumberedChunks, Numbering
from gym_compress.replay.reading import StoredChunk
from gym_compress.slicing import Newest, Slicing

__all__ = ["Stream"]

# How many of the newest chunks of a stream stay in memory when the others go to a file: a wrapper's chunk is
# wanted again as long as stacks overlap it.
_STAY = 8

# Among how many of the newest chunks a parcel's are looked for, since the same may come again.
_MOST_LATEST = 1024


class Stream(NumberedChunks):
    """The slices of one environment, numbered as they come, in chunks that go when nothing refers to them.

    Numbers begin at 1. A chunk has a range of them, which its slices fill from the front.

    An exception may come between any two lines, by a signal: references stay right then, and at worst a chunk
    stays that nobody needs.
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
        self.evicted: list[int] = []  # what a file knows those by that are gone
        self._shelf: Callable[[int, Chunk], StoredChunk] | None = None
        self._waiting: list[int] = []  # the first numbers of chunks that are not on the shelf yet
        self.ids = array("q")  # what a file knows each chunk by, 0 if it does not
        self._chunks: list[Chunk | StoredChunk | None]
        self._firsts: array[int]  # where the range of each chunk begins
        self._users: array[int]  # how many references lead to each chunk
        self._adopted: dict[Chunk | StoredChunk, _Adopted]  # the chunks that wrappers write
        self._gone: int  # how many chunks at the front of the lists are gone
        self._end: int
        self._own: Chunk | None  # the chunk that is being written, which the newest row refers to
        self._own_first: int  # where its range begins
        self._newest: Newest  # the slices of the newest observation, if it came as an array
        self._numbers: list[int]  # their numbers
        self._latest: dict[_Key, Chunk]  # chunks that came in parcels lately, by their content
        self.clear()

    def clear(self) -> None:
        """Forgets all observations, to which no reference may lead any more."""
        self.evicted.extend([id_ for id_ in self.ids if id_])
        fresh: dict[str, Any] = {"_chunks": [], "_adopted": {}, "_waiting": [], "_numbers": []}
        fresh |= {name: array("q") for name in ("ids", "_firsts", "_users")}
        fresh["_latest"] = {}
        fresh |= {"_gone": 0, "_end": 1, "_own": None, "_own_first": 0, "_newest": Newest(self._slicing)}
        self.__dict__.update(fresh)  # at once

    @property
    def cbytes(self) -> int:
        """Bytes of the chunks."""
        return sum(chunk.cbytes for chunk in set(self._chunks) if chunk is not None)

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
        numbers = self._adopt(observation) if isinstance(observation, CompressedObservation) else None
        if numbers is not None:
            self._newest.known = False
            self.seal()  # a chunk that stays open would stay in front of those that come and go
        else:
            slices = self._slicing.cut(np.asarray(observation))
            shift = self._newest.moved(slices, likely=None if moves else 0)
            numbers = self._numbers[shift:]
            if shift:
                self._newest.push(slices, shift)
                numbers += [self._append(slice_) for slice_ in slices[len(slices) - shift :]]
                self._numbers = numbers
                self._newest.known = True
        first = numbers[0]
        follow = numbers == list(range(first, first + len(numbers)))
        reference = first if follow else tuple(numbers)
        for index in self._touched(reference):
            self._users[index] += 1
        return reference

    def _append(self, slice_: NDArray[Any]) -> int:
        chunk, index = self._writer.append(slice_)
        if chunk is not self._own:
            first = self._register(chunk, self._writer.frames_per_chunk)
            self._own, self._own_first = chunk, first
        return self._own_first + index

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
                self._adopted[chunk] = _Adopted(self._register(chunk, -(-chunk.nbytes // nbytes)))
            adopted = self._adopted[chunk]
            adopted.end = max(adopted.end, start + length)
            numbers.extend(range(adopted.first + start // nbytes, adopted.first + (start + length) // nbytes))
        return numbers

    def _register(self, chunk: Chunk, slices: int) -> int:
        """Gives a chunk a range of numbers, and returns the first."""
        if self._shelf:
            self._shelve(_STAY - 1)
        first, place = self._end, len(self._chunks)
        try:
            self._chunks.append(chunk)
            self.ids.append(0)
            self._firsts.append(first)
            self._users.append(0)
            if self._shelf:
                self._waiting.append(first)
            self._end = first + slices
        except BaseException:  # by a signal
            del self._chunks[place:], self.ids[place:], self._firsts[place:], self._users[place:]
            self._waiting = [other for other in self._waiting if other != first]
            raise
        return first

    def _index(self, number: int) -> int:
        """The place in the lists of the chunk that holds a slice."""
        return bisect_right(self._firsts, number) - 1

    def release(self, reference: int | tuple[int, ...]) -> None:
        """Takes a reference back."""
        for index in self._touched(reference):
            self._users[index] -= 1
            self._let_go(index)
        self._forget_gone()

    def _forget_gone(self) -> None:
        if self._gone > 256:
            gone, self._gone = self._gone, 0
            del self._chunks[:gone], self.ids[:gone], self._firsts[:gone], self._users[:gone]

    def release_all(self, runs: NDArray[np.int64], odd: NDArray[np.int64]) -> None:
        """Takes references back, as :meth:`window` has them."""
        for index in self._count(runs, odd, -1):
            self._let_go(index)
        self._forget_gone()

    def adopt(self, parcel: ImageParcel) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Takes the chunks of a parcel over, which was checked. They stay until its references are released.

        A chunk that came before, as those at the end of a parcel come again with the next one, is kept once;
        a comparison tells.

        Returns:
            The parcel's references and the odd ones, in the numbers of this stream.
        """
        self.seal()
        self._newest.known = False
        chunks = [self._latest.setdefault(_key_of(chunk), chunk) for chunk in parcel.chunks()]
        for key in list(self._latest)[:-_MOST_LATEST]:
            del self._latest[key]

        firsts = parcel.firsts.tolist()
        slices_of_last = -(-sum(chunk.nbytes for chunk in chunks[-1:]) // self._slicing.slice_nbytes)
        ends = firsts[1:] + [first + slices_of_last for first in firsts[-1:]]
        here = self._last_of(chunks, firsts, ends)
        shift = (self._firsts[-here] if here else self._end) - firsts[0] if firsts else 0
        for chunk, first, end in zip(chunks[here:], firsts[here:], ends[here:], strict=True):
            self._register(chunk, end - first)
        numbers = parcel.references.astype(np.int64)
        numbers[numbers > 0] += shift
        runs, odd = parcel.parted()
        self._count(runs + shift, odd + shift, 1)
        for index in range(len(self._chunks) - len(chunks), len(self._chunks)):
            self._let_go(index)  # those that nothing refers to
        return numbers, parcel.odd + np.int64(shift)

    def _last_of(self, chunks: list[Chunk], firsts: list[int], ends: list[int]) -> int:
        """How many of the chunks at the front of a parcel are the last ones here, with the same distances."""
        for count in range(min(len(chunks), len(self._chunks)), 0, -1):
            if self._chunks[-count:] == chunks[:count]:
                shift = self._firsts[-count] - firsts[0]
                own = [*self._firsts[-count:], self._end]
                if own == [number + shift for number in [*firsts[:count], ends[count - 1]]]:
                    return count
        return 0

    def _count(self, runs: NDArray[np.int64], odd: NDArray[np.int64], sign: int) -> list[int]:
        """Counts references in, or out; returns the places of the chunks that they lead to."""
        place, _, users = self.window(runs, odd)
        touched = np.flatnonzero(users)
        for index in touched.tolist():
            self._users[place + index] += sign * int(users[index])
        return (place + touched).tolist()

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
        self._forget_latest(chunk)
        id_, self.ids[index] = self.ids[index], 0
        if id_:
            self.evicted.append(id_)
        if self._firsts[index] in self._waiting:
            self._waiting.remove(self._firsts[index])
        self._chunks[index] = None
        while self._gone < len(self._chunks) and self._chunks[self._gone] is None:
            self._gone += 1

    def _forget_latest(self, chunk: Chunk | StoredChunk) -> None:
        if isinstance(chunk, Chunk) and self._latest:
            self._latest.pop(_key_of(chunk), None)

    def seal(self) -> None:
        """Compresses the slices that are raw so far."""
        self._writer.seal()
        own, self._own = self._own, None
        if own is not None and own is self._chunks[-1]:
            # nothing follows it yet: its range ends with its slices, and the next one's goes on
            self._end = self._own_first + own.nbytes // max(self._slicing.slice_nbytes, 1)

    # What follows is for replay files, in which chunks have numbers of another kind, their ids.

    def keep_on(self, shelf: Callable[[int, Chunk], StoredChunk]) -> None:
        """From now on, chunks go to a shelf but for the newest few.

        Args:
            shelf: Takes the first number of a chunk and the chunk, and gives what stays here in its place.
        """
        self._shelf = shelf
        self._waiting = [
            first
            for first, chunk, id_ in zip(self._firsts, self._chunks, self.ids, strict=True)
            if chunk and not id_
        ]

    def _shelve(self, stay: int) -> None:
        """Puts chunks on the shelf but for the newest, and for those that a wrapper still writes."""
        assert self._shelf
        for first in self._waiting[: max(len(self._waiting) - stay, 0)]:
            index = self._index(first)
            chunk = self._chunks[index]
            if isinstance(chunk, Chunk) and chunk.sealed and chunk.nbytes <= MOST_CHUNK:
                stored = self._shelf(first, chunk)
                if self.ids[index]:
                    self.evicted.append(self.ids[index])
                self._chunks[index], self.ids[index] = stored, stored.id
                self._adopted.pop(chunk, None)
                self._forget_latest(chunk)
                self._waiting.remove(first)

    def settle(self) -> None:
        """Gets ready to be saved: seals what is raw, and puts on the shelf what can be there.

        A chunk that a wrapper still writes, and which a file has as far as it was referred to, is to be saved
        anew if it is referred to further.
        """
        self.seal()
        if self._shelf:
            self._shelve(0)
        for adopted in self._adopted.values():
            index = self._index(adopted.first)
            if adopted.saved < adopted.end and self.ids[index]:
                self.evicted.append(self.ids[index])
                self.ids[index] = 0

    def unsaved(self, everything: bool) -> Iterator[tuple[int, int, Chunk | StoredChunk]]:
        """What is to be saved, once settled.

        Args:
            everything: Whether the chunks that a file has are wanted too.

        Yields:
            Of each chunk its place here, the number of its first slice, and itself.
        """
        for index, chunk in enumerate(self._chunks):
            if chunk is not None and self._users[index] and (everything or not self.ids[index]):
                yield index, self._firsts[index], self._whole(chunk)

    def _whole(self, chunk: Chunk | StoredChunk) -> Chunk | StoredChunk:
        """A chunk as :meth:`_part` gives it, to be saved."""
        part, adopted = self._part(chunk), self._adopted.get(chunk)
        if adopted:
            adopted.saving = part.nbytes
        return part

    def _part(self, chunk: Chunk | StoredChunk) -> Chunk | StoredChunk:
        """A chunk, or what is referred to of one that a wrapper still writes, as a chunk."""
        adopted = self._adopted.get(chunk)
        if chunk.sealed or adopted is None:
            return chunk
        # another thread may seal it meanwhile, so it is read as by any reader
        raw = np.empty(adopted.end // self._slicing.dtype.itemsize, self._slicing.dtype)
        read_pieces([(chunk, [(0, adopted.end, 0, adopted.end)])], raw.view(np.uint8).data)
        return Chunk.from_array(raw, chunk.codec)

    def _sealed(self, index: int) -> Chunk | StoredChunk:
        chunk = super()._sealed(index)
        if not chunk.sealed and chunk not in self._adopted:  # of this stream: there may be several
            self.seal()
        return self._part(chunk)

    def saved(self, ids: array[int]) -> None:
        """Notes what a file knows each chunk by."""
        self.ids = ids
        self.evicted.clear()
        for adopted in self._adopted.values():
            adopted.saved = adopted.saving

    def restore(
        self,
        chunks: list[Chunk | StoredChunk],
        ids: NDArray[np.int64],
        firsts: NDArray[np.int64],
        runs: NDArray[np.int64],
        odd: NDArray[np.int64],
    ) -> None:
        """Takes the chunks of a file, into an empty stream, but for those to which no reference leads.

        Args:
            chunks: The chunks, in the order of their numbers.
            ids: ``(len(chunks),)``, their ids.
            firsts: ``(len(chunks),)``, the numbers of their first slices.
            runs: ``(n,)``, the references that are single numbers, in any order.
            odd: ``(m, slices of an observation)``, the references that are not.

        Raises:
            CorruptDataError: If ranges overlap, or a reference leads to a slice that is not there.
        """
        nbytes = np.array([chunk.nbytes for chunk in chunks], np.int64)
        numbering = Numbering(self._slicing, firsts, nbytes)
        users = numbering.users(runs, odd)
        used = users > 0  # others an interrupted process may have left
        self.evicted = ids[~used].tolist()
        self._chunks = [chunk for chunk, keep in zip(chunks, used.tolist(), strict=True) if keep]
        self.ids, self._firsts, self._users = (array("q", a[used].tobytes()) for a in (ids, firsts, users))
        self._end = numbering.end

    def __getstate__(self) -> dict[str, Any]:
        """All in sealed chunks, which no file knows."""
        if self._shelf:
            raise TypeError("Observations that are kept in a file cannot be pickled: load the file instead")
        self.seal()
        chunks = [chunk and self._whole(chunk) for chunk in self._chunks]
        ids = array("q", bytes(8 * len(chunks)))
        return {
            **self.__dict__,
            "_chunks": chunks,
            "ids": ids,
            "evicted": [],
            "_waiting": [],
            "_adopted": {},
            "_latest": {},
        }


_Key = tuple[bool, int, bytes]


def _key_of(chunk: Chunk) -> _Key:
    """What tells the content of a chunk from others: itself, or a digest if it is raw, and so long."""
    content = chunk.content
    if isinstance(content, bytes):
        return True, chunk.nbytes, content
    return False, chunk.nbytes, hashlib.blake2b(content.data).digest()


class _Adopted:
    """A chunk that a wrapper writes: where its range begins, and how many of its bytes are referred to.

    And how many a file has, or will have when it is saved.
    """

    __slots__ = ("end", "first", "saved", "saving")

    def __init__(self, first: int) -> None:
        self.first = first
        self.end = 0
        self.saved = 0
        self.saving = 0
