"""Observations on their way from one store to another: references, and each chunk that they touch, once."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from typing import Any, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from gym_compress.chunk import Chunk, Piece
from gym_compress.codec import Codec, check_encoded
from gym_compress.errors import CorruptDataError
from gym_compress.replay.format import MOST_CHUNK
from gym_compress.replay.reading import StoredChunk
from gym_compress.slicing import Slicing

__all__ = ["ImageParcel", "NumberedChunks", "Numbering", "Wanted"]

# What is wanted of chunks, for gym_compress.chunk.read_pieces.
Wanted = dict[Chunk | StoredChunk, list[Piece]]

# What numbers of slices stay below, in a file and in a parcel.
_MOST_NUMBERS, _MOST_IN_PARCEL = 2**62, 2**31


class Numbering:
    """Which chunks hold which slices, by their numbers.

    Args:
        slicing: What slices are.
        firsts: ``(chunks,)``, the numbers of the chunks' first slices.
        nbytes: ``(chunks,)``, the bytes that they decode to.

    Raises:
        CorruptDataError: If ranges overlap, or are out of bounds.
    """

    def __init__(self, slicing: Slicing, firsts: NDArray[np.int64], nbytes: NDArray[np.int64]) -> None:
        self._slicing, self._firsts = slicing, firsts
        self._whole = nbytes // slicing.slice_nbytes
        ends = firsts + -(-nbytes // slicing.slice_nbytes)
        if len(firsts) and (firsts[0] < 1 or (firsts[1:] < ends[:-1]).any() or ends[-1] > _MOST_NUMBERS):
            raise CorruptDataError("ranges of chunks overlap, or are out of bounds")
        self.end = int(ends[-1]) if len(firsts) else 1
        self._gaps = np.zeros(len(firsts), np.int64)
        np.cumsum(firsts[1:] != firsts[:-1] + self._whole[:-1], out=self._gaps[1:])

    def _chunks_of(
        self, numbers: NDArray[np.int64], count: int
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The first and the last chunk of runs of slices, which must be there."""
        first, last = chunks_of(self._firsts, numbers, count)
        sound = len(self._firsts) and first.min(initial=0) >= 0 and numbers.max(initial=0) < _MOST_NUMBERS
        sound = sound and (numbers + count <= (self._firsts + self._whole)[last]).all()
        if numbers.size and not (sound and (self._gaps[first] == self._gaps[last]).all()):
            raise CorruptDataError("a reference leads to a slice that is not there")
        return first, last

    def users(self, runs: NDArray[np.int64], odd: NDArray[np.int64]) -> NDArray[np.int64]:
        """How many references lead to each chunk.

        Args:
            runs: ``(n,)``, references that are the number of a first slice which the others follow.
            odd: ``(m, slices of an observation)``, references that are not.

        Raises:
            CorruptDataError: If a reference leads to a slice that is not there.
        """
        chunks = len(self._firsts)
        users = np.zeros(chunks, np.int64)
        for part in np.array_split(runs, len(runs) // 2**16 + 1):  # for a large buffer, memory
            users += count_users(chunks, *self._chunks_of(part, self._slicing.count), odd[:0])
        return users + count_users(chunks, runs[:0], runs[:0], self._chunks_of(odd, 1)[0])


def chunks_of(
    firsts: NDArray[np.int64], numbers: NDArray[np.int64], count: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The first and the last chunk of runs of ``count`` slices, given the numbers of chunks' first slices."""
    first, last = (np.searchsorted(firsts, numbers + offset, "right") - 1 for offset in (0, count - 1))
    return first, last


def count_users(
    chunks: int, first: NDArray[np.int64], last: NDArray[np.int64], odd: NDArray[np.int64]
) -> NDArray[np.int64]:
    """How many references lead to each chunk.

    Args:
        chunks: How many there are.
        first: ``(n,)``, the first chunk of each reference to chunks that follow each other.
        last: ``(n,)``, the last one.
        odd: ``(m, slices)``, the chunks of other references.
    """
    users = np.bincount(first, minlength=chunks + 1) - np.bincount(last + 1, minlength=chunks + 1)
    users = users.cumsum()[:chunks]
    each = np.sort(odd, axis=1)  # a chunk counts once, however many slices lead there
    return users + np.bincount(each[np.diff(each, axis=1, prepend=-1) > 0], minlength=chunks)


class ImageParcel(NamedTuple):
    """What transitions observed of an image, with all chunks that hold it: it stands alone.

    Slices are numbered as in :class:`NumberedChunks`, anew in each parcel.

    Attributes:
        contents: What each chunk has as content.
        codecs: The codec of each.
        nbytes: ``(chunks,)`` int32: the bytes that each decodes to.
        firsts: ``(chunks,)`` int32: the number of its first slice.
        references: ``(2, n)`` int32: of observations and next observations the number of the first slice if
            the others follow it, 0 if nothing was stored, or -1 less the row of ``odd``.
        odd: ``(m, slices of an observation)`` int32: numbers of slices that do not follow each other.
    """

    contents: list[bytes | NDArray[np.uint8]]
    codecs: list[Codec]
    nbytes: NDArray[np.int32]
    firsts: NDArray[np.int32]
    references: NDArray[np.int32]
    odd: NDArray[np.int32]

    def select(self, rows: Any) -> Self:
        """Some of the transitions, in another order; the chunks remain."""
        return self._replace(references=self.references[:, rows])

    def followed(self, n_envs: int) -> NDArray[np.bool_]:
        """Whether the observation ``n_envs`` places on is, in the same slices, the next observation."""
        after = self.references[0, n_envs:]
        following = self.references[1, : len(after)]
        followed: NDArray[np.bool_] = (after == following) & (after > 0)
        for place in np.flatnonzero((after < 0) & (following < 0)).tolist():
            ours, theirs = (self.odd[-1 - int(reference[place])] for reference in (after, following))
            followed[place] = np.array_equal(ours, theirs)
        return followed

    def parted(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The references that are single numbers, and the others that are referred to."""
        references = self.references.ravel()
        runs, odd = references[references > 0], self.odd[-1 - references[references < 0]]
        return runs.astype(np.int64), odd.astype(np.int64)

    def chunks(self) -> list[Chunk]:
        """The chunks."""
        sizes = self.nbytes.tolist()
        return [
            Chunk(content, size, codec, sealed=True)
            for content, size, codec in zip(self.contents, sizes, self.codecs, strict=True)
        ]

    def check(self, slicing: Slicing) -> None:
        """Checks all that adopting and decoding rely on.

        Raises:
            CorruptDataError: If something is not as it must be.
        """
        shapes = {"nbytes": 1, "firsts": 1, "references": 2, "odd": 2}
        if any(getattr(self, name).dtype != np.int32 for name in shapes) or any(
            getattr(self, name).ndim != ndim for name, ndim in shapes.items()
        ):
            raise CorruptDataError(f"A parcel has arrays that are not int32 of {shapes} dimensions")
        sizes = self.nbytes.tolist()
        if not len(self.contents) == len(self.codecs) == len(sizes) == len(self.firsts):
            raise CorruptDataError("A parcel has chunks of which something is missing")
        if self.odd.shape[1] != slicing.count or len(self.references) != 2:
            raise CorruptDataError("A parcel has references of another shape")
        if self.references.min(initial=0) < -len(self.odd):
            raise CorruptDataError("A parcel has references that lead nowhere")
        for content, codec, nbytes in zip(self.contents, self.codecs, sizes, strict=True):
            if not 0 < nbytes <= MOST_CHUNK:
                raise CorruptDataError(f"A parcel has a chunk of {nbytes} bytes, at most {MOST_CHUNK}")
            if isinstance(content, bytes) == (codec.name == "none"):
                raise CorruptDataError(f"A chunk of codec {codec} is a {type(content).__name__}")
            if isinstance(content, bytes):
                check_encoded(content, nbytes)
            elif content.dtype != np.uint8 or content.shape != (nbytes,):
                raise CorruptDataError(f"A chunk of shape {content.shape} is expected to have {nbytes} bytes")
        Numbering(slicing, *(a.astype(np.int64) for a in (self.firsts, self.nbytes))).users(*self.parted())

    @classmethod
    def join(cls, parcels: Sequence[Self]) -> Self:
        """The transitions of several parcels, one after another.

        Raises:
            ValueError: If they are too large for one parcel.
        """
        if len(parcels) == 1:
            return parcels[0]
        contents: list[bytes | NDArray[np.uint8]] = []
        codecs: list[Codec] = []
        firsts, references, odd = [], [], []
        end, lines = 0, 0
        for parcel in parcels:
            contents += parcel.contents
            codecs += parcel.codecs
            numbers = parcel.references.astype(np.int64)
            odd_or_none = np.where(numbers, numbers - lines, 0)
            references.append(np.where(numbers > 0, numbers + end, odd_or_none))
            firsts.append(parcel.firsts + np.int64(end))
            odd.append(parcel.odd + np.int64(end))
            if len(parcel.firsts):  # of the last chunk, no more slices can be than bytes
                end = int(firsts[-1][-1]) + int(parcel.nbytes[-1])
            lines += len(parcel.odd)
            if end > _MOST_IN_PARCEL:
                raise ValueError(
                    f"Samples hold chunks of at most {_MOST_IN_PARCEL} bytes, got {end}: ask for fewer"
                )
        nbytes = np.concatenate([parcel.nbytes for parcel in parcels])
        return cls(
            contents,
            codecs,
            nbytes,
            np.concatenate(firsts).astype(np.int32),
            np.concatenate(references, axis=1).astype(np.int32),
            np.concatenate(odd).astype(np.int32),
        )


class NumberedChunks:
    """Chunks whose slices are numbered: each has a range of numbers, which its slices fill from the front.

    Args:
        slicing: What slices are.
        chunks: The chunks.
        firsts: The number at which the range of each begins, ascending, 1 or above.
    """

    def __init__(
        self, slicing: Slicing, chunks: Sequence[Chunk | StoredChunk | None], firsts: Sequence[int]
    ) -> None:
        self._slicing = slicing
        self._chunks = chunks
        self._firsts = firsts

    def locate(self, first: int, count: int, to: int, wanted: Wanted) -> None:
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

    def window(
        self, runs: NDArray[np.int64], odd: NDArray[np.int64]
    ) -> tuple[int, NDArray[np.int64], NDArray[np.int64]]:
        """Which chunks some references lead to.

        Args:
            runs: ``(n,)``, references that are the number of a first slice which the others follow.
            odd: ``(m, slices of an observation)``, references that are not.

        Returns:
            The place of the first chunk; and from there on, as far as they are referred to, the number of
            each chunk's first slice, and how many of the references lead to it.
        """
        count = self._slicing.count
        if not runs.size + odd.size:
            return 0, np.empty(0, np.int64), np.empty(0, np.int64)
        starts = np.concatenate((runs, odd.ravel()))
        ends = np.concatenate((runs + count, odd.ravel() + 1))
        place = bisect_right(self._firsts, int(starts.min())) - 1
        beyond = bisect_right(self._firsts, int(ends.max()) - 1)
        firsts = np.array(self._firsts[place:beyond], np.int64)
        first, last = chunks_of(firsts, runs, count)
        return place, firsts, count_users(len(firsts), first, last, chunks_of(firsts, odd, 1)[0])

    def take(self, references: NDArray[np.int64], odd: NDArray[np.int64]) -> ImageParcel:
        """A parcel of some references, with the chunks to which they lead.

        Args:
            references: As in :class:`ImageParcel`, with this object's numbers.
            odd: As there.
        """
        place, firsts, users = self.window(references[references > 0], odd)
        picked = np.flatnonzero(users)
        chunks = [self._sealed(place + index) for index in picked.tolist()]
        nbytes = np.array([chunk.nbytes for chunk in chunks], np.int64)
        # a range is as long as before where the next one is taken too, so that runs stay runs
        spans = -(-nbytes // max(self._slicing.slice_nbytes, 1))
        follow = np.flatnonzero(np.diff(picked) == 1)
        spans[follow] = np.diff(firsts[picked])[follow]
        begin = 1 + np.cumsum(spans) - spans
        if spans.sum() >= _MOST_IN_PARCEL:
            raise ValueError(
                f"Samples hold at most {_MOST_IN_PARCEL} slices, got {spans.sum()}: ask for fewer at once"
            )
        moved = np.zeros(len(firsts), np.int64)
        moved[picked] = begin - firsts[picked]

        def renumbered(numbers: NDArray[np.int64]) -> NDArray[np.int64]:
            return numbers + moved[np.searchsorted(firsts, numbers, "right") - 1] if len(firsts) else numbers

        return ImageParcel(
            [chunk.content for chunk in chunks],
            [chunk.codec for chunk in chunks],
            nbytes.astype(np.int32),
            begin.astype(np.int32),
            np.where(references > 0, renumbered(references), references).astype(np.int32),
            renumbered(odd).astype(np.int32),
        )

    def _sealed(self, index: int) -> Chunk | StoredChunk:
        """The chunk at a place, or what is referred to of it, as one that never changes."""
        chunk = self._chunks[index]
        assert chunk is not None, "a chunk stays while something refers to it"
        return chunk
