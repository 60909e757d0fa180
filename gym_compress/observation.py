"""What an agent holds in place of an array: references to frames in chunks."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from typing import Any
from weakref import WeakValueDictionary

import numpy as np
from gymnasium import spaces
from gymnasium.vector.utils import batch_differing_spaces

from gym_compress.chunk import Chunk, Piece
from gym_compress.codec import Codec, resolve_codec
from gym_compress.compressed_array import CompressedArray
from gym_compress.errors import CorruptDataError

__all__ = ["CompressedBox", "CompressedObservation", "Layout", "layout_of", "stack"]

# A run of bytes that lie side by side: which of an observation's chunks, first byte in it, number of bytes.
Segment = tuple[int, int, int]


class Layout:
    """What observations have in common: shape, dtype, and where in their chunks their bytes lie.

    Observations of one stream need a few layouts only, so each is made once (:func:`layout_of`) and shared.

    Attributes:
        pieces: Which of the chunks, and the piece of it, for each run of bytes that lie side by side.
        nbytes: Bytes of the array.
    """

    __slots__ = ("__weakref__", "dtype", "nbytes", "pieces", "shape")

    def __init__(
        self, shape: tuple[int, ...], dtype: np.dtype[Any], pieces: tuple[tuple[int, Piece], ...]
    ) -> None:
        self.shape = shape
        self.dtype = dtype
        self.pieces = pieces
        self.nbytes = pieces[-1][1][1] if pieces else 0
        if self.nbytes != math.prod(shape) * dtype.itemsize:
            raise CorruptDataError(
                f"{self.nbytes} bytes do not make an array of shape {shape} and dtype {dtype}"
            )

    def __reduce__(self) -> tuple[Any, ...]:
        segments = tuple([(which, start, end - start) for which, (_, _, start, end) in self.pieces])
        return layout_of, (self.shape, self.dtype, segments)


_layouts: WeakValueDictionary[tuple[Any, ...], Layout] = WeakValueDictionary()


def layout_of(shape: tuple[int, ...], dtype: np.dtype[Any], segments: Sequence[Segment]) -> Layout:
    """The layout of bytes in segments of chunks, one after another; the same object for the same values."""
    pieces: list[tuple[int, Piece]] = []
    at = 0
    for which, start, nbytes in segments:
        if pieces and pieces[-1][0] == which and pieces[-1][1][3] == start:  # goes on where the last one ends
            _, (first, _, begin, _) = pieces.pop()
            pieces.append((which, (first, at + nbytes, begin, start + nbytes)))
        elif nbytes:
            pieces.append((which, (at, at + nbytes, start, start + nbytes)))
        at += nbytes
    key = (shape, dtype, tuple(pieces))
    layout = _layouts.get(key)
    if layout is None:
        layout = _layouts[key] = Layout(*key)
    return layout


@lru_cache(maxsize=512)
def _stacked_layout(layouts: tuple[Layout, ...], places: tuple[tuple[int, ...], ...]) -> Layout:
    """The layout of a stack, given each part's layout and the places of its chunks among the stack's."""
    segments = [
        (where[which], start, end - start)
        for layout, where in zip(layouts, places, strict=True)
        for which, (_, _, start, end) in layout.pieces
    ]
    first = layouts[0]
    return layout_of((len(layouts), *first.shape), first.dtype, segments)


class CompressedObservation(CompressedArray):
    """An observation whose frames are kept compressed, shared with its neighbours.

    It is immutable and behaves as an array where reading is meant (it has no arithmetic): NumPy, PyTorch and
    JAX turn it into an array of its ``shape`` and ``dtype`` (``np.asarray(obs)``, ``torch.as_tensor(obs)``,
    ``jax.numpy.asarray(obs)``), each time into a new one; nothing decoded is kept. To read many at once, use
    :func:`gym_compress.decompress_batch`, which decodes what they share once.

    Wrappers make observations; :meth:`from_frames` makes one by hand.

    ``obs == x`` is one bool: whether ``x`` is an array or observation of the same shape with equal elements.
    ``array == obs`` is NumPy's, and compares elements.

    Example:
        >>> import numpy as np
        >>> from gym_compress import CompressedObservation
        >>> obs = CompressedObservation.from_frames([np.full((84, 84), i, np.uint8) for i in range(4)])
        >>> obs.shape, obs.dtype, obs.nbytes
        ((4, 84, 84), dtype('uint8'), 28224)
        >>> obs.cbytes < obs.nbytes / 10
        True
        >>> obs[2, 0, :3]
        array([2, 2, 2], dtype=uint8)
    """

    __slots__ = ("_layout", "_source")

    def __init__(self, source: Chunk | tuple[Chunk, ...], layout: Layout) -> None:
        """Made by wrappers and class methods; not meant to be called.

        Args:
            source: The chunk that holds the frames, or several.
            layout: Where in them the frames lie.
        """
        self._source = source
        self._layout = layout

    @classmethod
    def from_frames(cls, frames: Iterable[Any], *, codec: str | Codec = "auto") -> CompressedObservation:
        """Makes a stack from its frames, in the place of ``LazyFrames(frames)``.

        Arrays are compressed together, into a chunk of the observation's own. Frames that are
        :class:`CompressedObservation` already are taken over as they are, without encoding.

        Args:
            frames: At least one array of any shape, all of one shape and dtype.
            codec: A :class:`Codec`, its string, or ``"auto"``.

        Returns:
            An observation of shape ``(len(frames), *frame.shape)``.

        Raises:
            ValueError: If there is no frame, or frames differ in shape or dtype; the message names the index.
            TypeError: If the frames' dtype is not of booleans, integers or floating-point numbers.
        """
        frames = list(frames)
        chosen = resolve_codec(codec, np.asarray(frames[0]).nbytes if frames else 0)
        if frames and all(isinstance(frame, CompressedObservation) for frame in frames):
            return stack(frames)
        arrays = [np.asarray(frame) for frame in frames]
        if not arrays:
            raise ValueError("from_frames expects at least one frame, got none")
        for i, array in enumerate(arrays):
            if array.shape != arrays[0].shape or not np.can_cast(array.dtype, arrays[0].dtype, "equiv"):
                raise ValueError(
                    f"Frame {i} has shape {array.shape} and dtype {array.dtype}, "
                    f"expected {arrays[0].shape} and {arrays[0].dtype} as frame 0 has"
                )
        return cls._from_array(np.stack(arrays), chosen)

    @classmethod
    def _from_array(cls, array: Any, codec: Codec) -> CompressedObservation:
        """An observation with the values of an array, in a chunk of its own."""
        array = np.asarray(array)
        if array.dtype.kind not in "biuf":
            raise TypeError(
                f"An observation is expected to be of booleans, integers or floats, got {array.dtype}"
            )
        array = np.ascontiguousarray(array, np.dtype(array.dtype.type)).reshape(array.shape)
        chunk = Chunk.from_array(array, codec)
        return cls(chunk, layout_of(array.shape, array.dtype, ((0, 0, array.nbytes),)))

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the array."""
        return self._layout.shape

    @property
    def dtype(self) -> np.dtype[Any]:
        """The dtype of the array, in native byte order."""
        return self._layout.dtype

    def _pieces(self) -> Iterator[tuple[Chunk, Piece]]:
        chunks = self._chunks()
        for which, piece in self._layout.pieces:
            yield chunks[which], piece

    def _same_bytes(self, other: CompressedObservation) -> bool:
        return self._source is other._source and self._layout is other._layout

    def _segments(self) -> Iterator[tuple[Chunk, int, int]]:
        """The runs of bytes that make the array up: their chunk, first byte in it, and number of bytes."""
        for chunk, (_, _, start, end) in self._pieces():
            yield chunk, start, end - start

    def _chunks(self) -> tuple[Chunk, ...]:
        source = self._source
        return (source,) if isinstance(source, Chunk) else source

    def __getitem__(self, key: Any) -> Any:
        """Decodes, and indexes the array as NumPy does."""
        return np.asarray(self)[key]

    def __iter__(self) -> Iterator[Any]:
        """Decodes once, and iterates over the first axis."""
        return iter(np.asarray(self))

    def detach(self) -> CompressedObservation:
        """An equal observation with a sealed chunk of its own, that keeps nothing else in memory.

        Keeping one observation keeps its whole chunks, and raw frames while they are open. That costs nothing
        where its neighbours are kept as well; an observation that is kept alone is better detached.
        """
        return self._from_array(self, self._chunks()[0].codec)

    def __reduce__(self) -> tuple[Any, ...]:
        if all(chunk.sealed for chunk in self._chunks()):
            return CompressedObservation, (self._source, self._layout)
        return self.detach().__reduce__()


def stack(
    observations: Sequence[CompressedObservation], known: tuple[Chunk, ...] | None = None
) -> CompressedObservation:
    """Stacks observations along a new first axis by reference: nothing is decoded, nothing encoded.

    Args:
        observations: At least one, all of one shape and dtype.
        known: Chunks that another observation refers to; if they are this one's, both share the tuple.

    Raises:
        ValueError: If shapes or dtypes differ; the message names the index.
    """
    layouts = tuple([observation._layout for observation in observations])
    places: dict[Chunk, int] = {}
    where: list[tuple[int, ...]] = []
    for observation in observations:
        source = observation._source
        if isinstance(source, Chunk):
            where.append((places.setdefault(source, len(places)),))
        else:
            where.append(tuple([places.setdefault(chunk, len(places)) for chunk in source]))
    first = layouts[0]
    for i, layout in enumerate(layouts):
        if layout.shape != first.shape or layout.dtype != first.dtype:
            raise ValueError(
                f"Observation {i} has shape {layout.shape} and dtype {layout.dtype}, "
                f"expected {first.shape} and {first.dtype} as observation 0 has"
            )
    chunks = tuple(places)
    layout = _stacked_layout(layouts, tuple(where))
    if len(chunks) == 1:
        return CompressedObservation(chunks[0], layout)
    return CompressedObservation(known if known == chunks else chunks, layout)


class CompressedBox(spaces.Box):
    """A Box that contains compressed observations beside arrays; in all else a Box, and equal to one."""

    @classmethod
    def like(cls, box: spaces.Box) -> CompressedBox:
        """A CompressedBox with the bounds, dtype and random state of a Box."""
        space = cls(low=box.low, high=box.high, dtype=box.dtype.type, seed=copy.deepcopy(box.np_random))
        space.bounded_below, space.bounded_above = box.bounded_below, box.bounded_above
        return space

    def contains(self, x: Any) -> bool:
        """Whether an array or observation is in the space: its shape, its dtype and all its values."""
        return super().contains(np.asarray(x) if isinstance(x, CompressedArray) else x)

    def to_jsonable(self, sample_n: Iterable[Any]) -> list[Any]:
        """Observations as nested lists."""
        return super().to_jsonable([np.asarray(sample) for sample in sample_n])


batch_differing_spaces.register(CompressedBox, batch_differing_spaces.dispatch(spaces.Box))
