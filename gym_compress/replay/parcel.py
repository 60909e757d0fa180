"""Observations on their way from one store to another: references, and each chunk that they touch, once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from gym_compress.chunk import MOST_SHIPPED, Chunk
from gym_compress.codec import Codec, check_encoded
from gym_compress.errors import CorruptDataError
from gym_compress.replay.index import ChunkIndex
from gym_compress.slicing import Slicing

__all__ = ["ImageParcel"]

_MOST_SLICES = 2**31 - 1


class ImageParcel(NamedTuple):
    """What transitions observed of an image, with all chunks that hold it: it stands alone.

    Slices are numbered from 1 on, through all chunks in their order.

    Attributes:
        slicing: How observations are cut into slices.
        contents: What each chunk has as content.
        codecs: The codec of each.
        nbytes: ``(chunks,)`` int32: the bytes that each decodes to, which are whole slices.
        references: ``(2, n)`` int32: of observations and next observations the number of the first slice,
            which the others follow, or 0 if nothing was stored.
    """

    slicing: Slicing
    contents: list[bytes | NDArray[np.uint8]]
    codecs: list[Codec]
    nbytes: NDArray[np.int32]
    references: NDArray[np.int32]

    @classmethod
    def of(cls, chunks: Sequence[Any], references: NDArray[np.int64], slicing: Slicing) -> Self:
        """A parcel of sealed chunks.

        Raises:
            ValueError: If they hold too many slices for a parcel.
        """
        nbytes = np.array([chunk.nbytes for chunk in chunks], np.int64)
        _check_slices(nbytes, slicing.slice_nbytes)
        return cls(
            slicing,
            [chunk.content for chunk in chunks],
            [chunk.codec for chunk in chunks],
            nbytes.astype(np.int32),
            references.astype(np.int32),
        )

    def select(self, rows: Any) -> Self:
        """Some of the transitions, in another order; the chunks remain."""
        return self._replace(references=self.references[:, rows])

    def followed(self, n_envs: int) -> NDArray[np.bool_]:
        """Whether the observation ``n_envs`` places on is, in the same slices, the next observation."""
        after = self.references[0, n_envs:]
        followed: NDArray[np.bool_] = (after == self.references[1, : len(after)]) & (after > 0)
        return followed

    def chunks(self) -> list[Chunk]:
        """The chunks."""
        sizes = self.nbytes.tolist()
        return [
            Chunk(content, size, codec, sealed=True)
            for content, size, codec in zip(self.contents, sizes, self.codecs, strict=True)
        ]

    def indexed(self) -> ChunkIndex:
        """The chunks as one stream, to read what the references lead to."""
        index = ChunkIndex(self.slicing, 1)
        index.adopt(0, self.chunks())
        return index

    def check(self) -> None:
        """Checks all that adopting and decoding rely on.

        Raises:
            CorruptDataError: If something is not as it must be.
        """
        shapes = {"nbytes": 1, "references": 2}
        if any(getattr(self, name).dtype != np.int32 for name in shapes) or any(
            getattr(self, name).ndim != ndim for name, ndim in shapes.items()
        ):
            raise CorruptDataError(f"A parcel has arrays that are not int32 of {shapes} dimensions")
        sizes, slicing = self.nbytes.tolist(), self.slicing
        if not len(self.contents) == len(self.codecs) == len(sizes) or len(self.references) != 2:
            raise CorruptDataError("A parcel has chunks or references of which something is missing")
        for content, codec, nbytes in zip(self.contents, self.codecs, sizes, strict=True):
            if not 0 < nbytes <= MOST_SHIPPED or nbytes % slicing.slice_nbytes:
                raise CorruptDataError(
                    f"A parcel has a chunk of {nbytes} bytes, expected whole slices of "
                    f"{slicing.slice_nbytes} bytes and at most {MOST_SHIPPED}"
                )
            if isinstance(content, bytes) == (codec.name == "none"):
                raise CorruptDataError(f"A chunk of codec {codec} is a {type(content).__name__}")
            if isinstance(content, bytes):
                check_encoded(content, nbytes)
            elif content.dtype != np.uint8 or content.shape != (nbytes,):
                raise CorruptDataError(f"A chunk of shape {content.shape} is expected to have {nbytes} bytes")
        slices = sum(sizes) // slicing.slice_nbytes
        references = self.references
        if references.min(initial=0) < 0 or references.max(initial=0) > max(slices - slicing.count + 1, 0):
            raise CorruptDataError("A parcel has references that lead nowhere")

    @classmethod
    def join(cls, parcels: Sequence[Self]) -> Self:
        """The transitions of several parcels, all cut alike, one after another.

        Raises:
            ValueError: If they are too large for one parcel.
        """
        if len(parcels) == 1:
            return parcels[0]
        slicing = parcels[0].slicing
        nbytes = [parcel.nbytes.astype(np.int64) for parcel in parcels]
        _check_slices(np.concatenate(nbytes), slicing.slice_nbytes)
        slices = [int(each.sum()) // slicing.slice_nbytes for each in nbytes]
        moved = np.cumsum([0, *slices[:-1]]).tolist()
        references = [
            np.where(parcel.references, parcel.references + np.int32(by), 0)
            for parcel, by in zip(parcels, moved, strict=True)
        ]
        return cls(
            slicing,
            [content for parcel in parcels for content in parcel.contents],
            [codec for parcel in parcels for codec in parcel.codecs],
            np.concatenate([parcel.nbytes for parcel in parcels]),
            np.concatenate(references, axis=1).astype(np.int32),
        )


def _check_slices(nbytes: NDArray[np.int64], slice_nbytes: int) -> None:
    slices = int(nbytes.sum()) // slice_nbytes
    if slices > _MOST_SLICES:
        raise ValueError(f"Samples hold at most {_MOST_SLICES} slices, got {slices}: ask for fewer at once")
