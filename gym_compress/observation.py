"""What an agent holds in place of an array: references to frames in chunks."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
from gymnasium import spaces
from numpy.typing import DTypeLike, NDArray

from gym_compress.chunk import Chunk, ChunkWriter, Piece, read_pieces
from gym_compress.codec import Codec, resolve_codec

__all__ = ["CompressedBox", "CompressedObservation", "FrameCompressor", "FrameStacker", "Layout", "stack"]

# A run of bytes that lie side by side: which of an observation's chunks, first byte in it, number of bytes.
Segment = tuple[int, int, int]


class Layout:
    """What observations have in common: shape, dtype, and where in their chunks their bytes lie.

    Observations of one stream need a few layouts only, so each is made once (:func:`layout_of`) and shared.
    """

    __slots__ = ("dtype", "nbytes", "pieces", "segments", "shape")

    def __init__(self, shape: tuple[int, ...], dtype: np.dtype[Any], segments: tuple[Segment, ...]) -> None:
        self.shape = shape
        self.dtype = dtype
        self.segments = segments
        pieces: list[tuple[int, Piece]] = []
        at = 0
        for which, start, nbytes in segments:
            pieces.append((which, (at, at + nbytes, start, start + nbytes)))
            at += nbytes
        self.pieces = tuple(pieces)
        self.nbytes = at

    def __reduce__(self) -> tuple[Any, ...]:
        return layout_of, (self.shape, self.dtype, self.segments)


@lru_cache(maxsize=4096)
def layout_of(shape: tuple[int, ...], dtype: np.dtype[Any], segments: tuple[Segment, ...]) -> Layout:
    """The layout with these values; the same object for the same values."""
    return Layout(shape, dtype, segments)


@lru_cache(maxsize=4096)
def _stacked_layout(layouts: tuple[Layout, ...], places: tuple[tuple[int, ...], ...]) -> Layout:
    """The layout of a stack, given each part's layout and the places of its chunks among the stack's."""
    segments: list[Segment] = []
    for layout, where in zip(layouts, places, strict=True):
        for which, start, nbytes in layout.segments:
            if segments:
                last, last_start, last_nbytes = segments[-1]
                if last == where[which] and last_start + last_nbytes == start:
                    segments[-1] = (last, last_start, last_nbytes + nbytes)
                    continue
            segments.append((where[which], start, nbytes))
    first = layouts[0]
    return layout_of((len(layouts), *first.shape), first.dtype, tuple(segments))


class CompressedObservation:
    """An observation whose frames are kept compressed, shared with its neighbours.

    It is immutable and behaves as an array where reading is meant: NumPy, PyTorch and JAX turn it into an
    array of its ``shape`` and ``dtype`` (``np.asarray(obs)``, ``torch.as_tensor(obs)``,
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
        if frames and all(isinstance(frame, CompressedObservation) for frame in frames):
            return stack(frames)
        arrays = [np.asarray(frame) for frame in frames]
        if not arrays:
            raise ValueError("from_frames expects at least one frame, got none")
        for i, array in enumerate(arrays):
            if array.shape != arrays[0].shape or array.dtype != arrays[0].dtype:
                raise ValueError(
                    f"Frame {i} has shape {array.shape} and dtype {array.dtype}, "
                    f"expected {arrays[0].shape} and {arrays[0].dtype} as frame 0 has"
                )
        return cls._from_array(np.stack(arrays), resolve_codec(codec, arrays[0].nbytes))

    @classmethod
    def _from_array(cls, array: Any, codec: Codec) -> CompressedObservation:
        """An observation with the values of an array, in a chunk of its own."""
        array = np.asarray(array)
        if array.dtype.kind not in "biuf":
            raise TypeError(
                f"An observation is expected to be of booleans, integers or floats, got {array.dtype}"
            )
        array = np.ascontiguousarray(array, np.dtype(array.dtype.type)).reshape(array.shape)
        segments = ((0, 0, array.nbytes),) if array.nbytes else ()
        return cls(Chunk.from_array(array, codec), layout_of(array.shape, array.dtype, segments))

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the array."""
        return self._layout.shape

    @property
    def dtype(self) -> np.dtype[Any]:
        """The dtype of the array, in native byte order."""
        return self._layout.dtype

    @property
    def ndim(self) -> int:
        """The number of dimensions of the array."""
        return len(self._layout.shape)

    @property
    def size(self) -> int:
        """The number of elements of the array."""
        return self._layout.nbytes // self._layout.dtype.itemsize

    @property
    def nbytes(self) -> int:
        """Bytes of the array."""
        return self._layout.nbytes

    @property
    def cbytes(self) -> int:
        """Bytes of this observation's frames in their chunks, rounded up: raw bytes while a chunk is open.

        A frame counts in each observation that it is part of; sums over a stream therefore exceed what is
        resident.
        """
        chunks = self._chunks()
        share = 0.0
        for which, _, nbytes in self._layout.segments:
            chunk = chunks[which]
            share += nbytes * (chunk.cbytes / chunk.nbytes if chunk.sealed else 1.0)
        return int(np.ceil(share))

    def _chunks(self) -> tuple[Chunk, ...]:
        source = self._source
        return (source,) if type(source) is Chunk else source  # type: ignore[return-value]

    def __len__(self) -> int:
        shape = self._layout.shape
        if not shape:
            raise TypeError("len() of an observation without dimensions")
        return shape[0]

    def __array__(self, dtype: DTypeLike | None = None, copy: bool | None = None) -> NDArray[Any]:
        """Decodes into a new array.

        Raises:
            ValueError: If ``copy`` is False, since an array cannot be had without writing one.
        """
        if copy is False:
            raise ValueError("A compressed observation cannot be turned into an array without a copy")
        layout = self._layout
        out: NDArray[Any] = np.empty(layout.shape, layout.dtype)
        if layout.nbytes:
            chunks = self._chunks()
            wanted: dict[Chunk, list[Piece]] = {}
            for which, piece in layout.pieces:
                wanted.setdefault(chunks[which], []).append(piece)
            read_pieces(wanted.items(), out.reshape(-1).view(np.uint8).data)
        return out if dtype is None else out.astype(dtype, copy=False)

    def __dlpack__(
        self, *, stream: Any = None, max_version: Any = None, dl_device: Any = None, copy: bool | None = None
    ) -> Any:
        """Decodes into a new array in the CPU's memory and hands it over by DLPack.

        Raises:
            BufferError: If ``copy`` is False, or another device than the CPU is asked for.
        """
        if copy is False:
            raise BufferError("A compressed observation cannot be handed over without a copy")
        if dl_device is not None and tuple(dl_device) != self.__dlpack_device__():
            raise BufferError(
                f"A compressed observation is decoded into the CPU's memory, not device {dl_device}"
            )
        return np.asarray(self).__dlpack__(stream=stream)

    def __dlpack_device__(self) -> tuple[int, int]:
        return 1, 0  # kDLCPU

    def __getitem__(self, key: Any) -> Any:
        """Decodes, and indexes the array as NumPy does."""
        return np.asarray(self)[key]

    def __iter__(self) -> Iterator[Any]:
        """Decodes once, and iterates over the first axis."""
        return iter(np.asarray(self))

    def reshape(self, *shape: Any) -> NDArray[Any]:
        """Decodes into a new array of another shape, as ``np.reshape`` does.

        Stable-Baselines3 calls it on what ``model.predict`` is given and on the last observation of an
        episode.
        """
        return np.asarray(self).reshape(*shape)

    def __eq__(self, other: object) -> bool:
        if isinstance(other, CompressedObservation):
            if other.shape != self.shape:
                return False
            if self._source is other._source and self._layout is other._layout and self.dtype.kind != "f":
                return True
        elif not isinstance(other, (np.ndarray, np.generic, list, tuple)):
            return NotImplemented
        try:
            array = np.asarray(other)
        except ValueError:  # a ragged list
            return False
        return array.shape == self.shape and np.array_equal(np.asarray(self), array)

    __hash__ = None  # type: ignore[assignment]

    def copy(self) -> CompressedObservation:
        """The observation itself, since it never changes; ``np.array(obs)`` gives an array to write to."""
        return self

    def __copy__(self) -> CompressedObservation:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> CompressedObservation:
        return self

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

    def __repr__(self) -> str:
        kept = f"nbytes={self.nbytes}, cbytes={self.cbytes}"
        return f"CompressedObservation(shape={self.shape}, dtype={self.dtype}, {kept})"


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
        if type(source) is Chunk:
            where.append((places.setdefault(source, len(places)),))
        else:
            where.append(tuple([places.setdefault(chunk, len(places)) for chunk in source]))  # type: ignore[union-attr]
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


class FrameCompressor:
    """Compresses the frames of one stream, as they come, for one Box of an observation space.

    Args:
        space: The space of a frame.
        codec: A :class:`Codec`, its string, or ``"auto"``.
        frames_per_chunk: Frames that a chunk holds, or ``None`` to choose by the size of a frame.
        keep: How many of the newest frames stay raw.
    """

    def __init__(
        self,
        space: spaces.Box,
        *,
        codec: str | Codec = "auto",
        frames_per_chunk: int | None = None,
        keep: int = 1,
    ) -> None:
        self._writer = writer = ChunkWriter(
            space.shape, space.dtype, codec=codec, frames_per_chunk=frames_per_chunk, keep=keep
        )
        nbytes = writer.frame_nbytes
        self._layouts = [
            layout_of(writer.shape, writer.dtype, ((0, i * nbytes, nbytes),) if nbytes else ())
            for i in range(writer.frames_per_chunk)
        ]

    def __call__(self, frame: Any) -> CompressedObservation:
        """Appends a frame to the stream; one that is compressed already is taken over as it is.

        Raises:
            ValueError: If the frame does not fit the space.
        """
        if isinstance(frame, CompressedObservation):
            writer = self._writer
            if frame.shape == writer.shape and frame.dtype == writer.dtype:
                return frame
        chunk, index = self._writer.append(frame)
        return CompressedObservation(chunk, self._layouts[index])

    def alone(self, frame: Any) -> CompressedObservation:
        """Compresses a frame in a chunk of its own, outside the stream."""
        writer = self._writer
        return CompressedObservation._from_array(writer.fit(frame).astype(writer.dtype), writer.codec)

    def seal(self) -> None:
        """Compresses the frames that are raw so far."""
        self._writer.seal()


class FrameStacker:
    """The last ``stack_size`` observations of a stream as one.

    Args:
        compress: Compresses the frames of the stream.
        stack_size: The number of observations in a stack.
        filler: What the stack is full of at first.
    """

    def __init__(self, compress: FrameCompressor, stack_size: int, filler: CompressedObservation) -> None:
        self.take = compress
        self._queue = deque([filler] * stack_size, maxlen=stack_size)
        self._chunks: tuple[Chunk, ...] = ()

    def fill(self, filler: CompressedObservation) -> None:
        """Fills the whole stack with one observation."""
        self._queue.extend([filler] * len(self._queue))

    def push(self, observation: CompressedObservation) -> CompressedObservation:
        """Appends an observation, drops the oldest, and returns the stack, oldest first."""
        self._queue.append(observation)
        stacked = stack(self._queue, self._chunks)
        if type(stacked._source) is tuple:
            self._chunks = stacked._source
        return stacked


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
        return super().contains(np.asarray(x) if isinstance(x, CompressedObservation) else x)
