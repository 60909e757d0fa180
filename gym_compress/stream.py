"""From frames to observations: the streams of an environment's observation space."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from gym_compress.batch import CompressedBatch
from gym_compress.chunk import Chunk, ChunkWriter, fit
from gym_compress.codec import Codec, resolve_codec, resolve_frames_per_chunk
from gym_compress.observation import CompressedBox, CompressedObservation, Layout, layout_of, stack
from gym_compress.slicing import Slicing
from gym_compress.tree import map_leaves, map_space, replace_leaves

__all__ = [
    "FrameCompressor",
    "FrameStacker",
    "StackCompressor",
    "compressed_space",
    "compressors_of",
    "seal_all",
    "worth_compressing",
]

# A Box in a Dict or Tuple below this many bytes is left as it is.
_WORTH_NBYTES = 1024


class FrameCompressor:
    """Compresses the frames of one stream, as they come, for one Box of an observation space.

    Args:
        space: The space of a frame.
        codec: A :class:`Codec`, its string, or ``"auto"``.
        frames_per_chunk: Frames that a chunk holds, or ``None`` to choose by the size of a frame.
        keep: How many of the newest frames stay raw at least.

    Raises:
        ValueError: If the codec is unknown, ``frames_per_chunk`` below 1, or a frame too large for a chunk.
        TypeError: If the codec or ``frames_per_chunk`` is of a wrong type.
    """

    def __init__(
        self,
        space: spaces.Box,
        *,
        codec: str | Codec = "auto",
        frames_per_chunk: int | None = None,
        keep: int = 1,
    ) -> None:
        self._writer = ChunkWriter(
            space.shape, space.dtype, codec=codec, frames_per_chunk=frames_per_chunk, keep=keep
        )
        self._layouts: list[Layout] = []  # of a frame at each place of a chunk, as far as frames came

    def __call__(self, frame: Any) -> CompressedObservation:
        """Appends a frame to the stream; one that is compressed already is taken over as it is.

        Raises:
            ValueError: If the frame does not fit the space.
        """
        writer = self._writer
        if (
            isinstance(frame, CompressedObservation)
            and frame.shape == writer.shape
            and frame.dtype == writer.dtype
        ):
            return frame
        chunk, index = writer.append(frame)
        if index == len(self._layouts):
            nbytes = writer.frame_nbytes
            self._layouts.append(layout_of(writer.shape, writer.dtype, ((0, index * nbytes, nbytes),)))
        return CompressedObservation(chunk, self._layouts[index])

    def alone(self, frame: Any) -> CompressedObservation:
        """Compresses a frame in a chunk of its own, outside the stream."""
        writer = self._writer
        return CompressedObservation._from_array(fit(frame, writer.shape, writer.dtype), writer.codec)

    def seal(self) -> None:
        """Compresses the frames that are raw so far."""
        self._writer.seal()


class FrameStacker:
    """The last ``stack_size`` observations of a stream as one.

    Args:
        take: Compresses a frame of the stream.
        stack_size: The number of observations in a stack.
        filler: What the stack is full of at first.
    """

    def __init__(self, take: FrameCompressor, stack_size: int, filler: CompressedObservation) -> None:
        self.take = take
        self._queue = deque([filler] * stack_size, maxlen=stack_size)
        self._chunks: tuple[Chunk, ...] = ()  # those of the last stack that had several

    def fill(self, filler: CompressedObservation) -> None:
        """Fills the whole stack with one observation."""
        self._queue.extend([filler] * len(self._queue))

    def push(self, observation: CompressedObservation) -> CompressedObservation:
        """Appends an observation, drops the oldest, and returns the stack, oldest first."""
        self._queue.append(observation)
        stacked = stack(self._queue, self._chunks)
        if isinstance(stacked._source, tuple):
            self._chunks = stacked._source
        return stacked

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_chunks": ()}  # open chunks stay here


def worth_compressing(space: spaces.Space[Any]) -> bool:
    """Whether a leaf of a Dict or Tuple space is compressed: a Box of at least 1,024 bytes."""
    if not isinstance(space, spaces.Box):
        return False
    nbytes = space.dtype.itemsize
    for length in space.shape:
        nbytes *= length
    return bool(nbytes >= _WORTH_NBYTES)


def compressors_of(space: spaces.Space[Any], make: Callable[[spaces.Box], Any]) -> Any:
    """A tree of an observation space: ``make(leaf)`` where a leaf is compressed, None elsewhere.

    Raises:
        TypeError: If the observation space is no Box, Dict or Tuple.
    """
    if not isinstance(space, (spaces.Box, spaces.Dict, spaces.Tuple)):
        raise TypeError(f"Expected an observation space that is a Box, Dict or Tuple, actual: {space}")

    def leaf(sub: spaces.Space[Any]) -> Any:
        if isinstance(sub, spaces.Box) and (sub is space or worth_compressing(sub)):
            return make(sub)
        return None

    return map_space(leaf, space)


def compressed_space(space: spaces.Space[Any], compressors: Any) -> spaces.Space[Any]:
    """A copy of a space in which each leaf that has a compressor is a CompressedBox."""

    def leaf(sub: spaces.Space[Any], compressor: Any) -> spaces.Space[Any]:
        return CompressedBox.like(sub) if compressor and isinstance(sub, spaces.Box) else sub

    return replace_leaves(leaf, space, compressors)


def seal_all(compressors: Any) -> None:
    """Compresses what the compressors of a tree hold raw."""
    map_leaves(lambda compressor: compressor and compressor.seal(), compressors)


class StackCompressor:
    """Compresses the observations of a vector environment, for one Box of the observation space.

    Each environment has a stream of slices. Those that an observation shares with the one before, as stacks
    do, are not written again: a comparison tells, so a wrong ``stack_size`` costs memory and never a value.

    Args:
        space: The space of one observation.
        num_envs: The number of environments.
        stack_size: How many frames an observation stacks along its first axis, or ``"auto"`` to find out; see
            :class:`gym_compress.slicing.Slicing`.
        codec: A :class:`Codec`, its string, or ``"auto"``.
        frames_per_chunk: Frames that a chunk holds, or ``None`` to choose by the size of a frame.

    Raises:
        ValueError: If ``stack_size`` does not suit the space, the codec is unknown, ``frames_per_chunk``
            below 1, or a frame too large for a chunk.
        TypeError: If the codec or ``frames_per_chunk`` is of a wrong type.
    """

    def __init__(
        self,
        space: spaces.Box,
        num_envs: int,
        *,
        stack_size: int | str = "auto",
        codec: str | Codec = "auto",
        frames_per_chunk: int | None = None,
    ) -> None:
        slicing = Slicing(space.shape or (1,), space.dtype, stack_size, 0)
        codec = resolve_codec(codec, slicing.frame_nbytes)
        frames = resolve_frames_per_chunk(frames_per_chunk, slicing.frame_nbytes) * slicing.slices_per_frame
        self.shape, self.dtype = space.shape, slicing.dtype
        self._count, self._slice_nbytes = slicing.count, slicing.slice_nbytes
        self._writers = [
            ChunkWriter(
                slicing.slice_shape, slicing.dtype, codec=codec, frames_per_chunk=frames, keep=slicing.count
            )
            for _ in range(num_envs)
        ]
        # of each environment, the newest observation, where its slices lie, and the chunks of the last one
        # that had several
        self._last = np.empty((num_envs, slicing.count, *slicing.slice_shape), slicing.dtype)
        self._places: list[list[tuple[Chunk, int]]] = [[] for _ in range(num_envs)]
        self._chunks: list[tuple[Chunk, ...]] = [() for _ in range(num_envs)]
        self._shift = 1  # by how many slices observations moved on last
        self._layouts: dict[tuple[int, ...], Layout] = {}  # by the places of an observation's slices

    def __call__(self, batch: Any, slots: Sequence[int]) -> CompressedBatch:
        """Compresses one observation of each of some environments.

        Args:
            batch: ``(len(slots), *shape)``, or a batch that is compressed already, which is taken over.
            slots: The numbers of the environments, each at most once, in any order.

        Raises:
            ValueError: If the batch does not fit.
        """
        if isinstance(batch, CompressedBatch) and batch.shape[1:] == self.shape and batch.dtype == self.dtype:
            return batch
        array = fit(batch, (len(slots), *self.shape), self.dtype)
        rows = np.ascontiguousarray(array).reshape(len(slots), *self._last.shape[1:])
        fresh = self._fresh(rows, slots)
        return CompressedBatch([self._put(*each) for each in zip(slots, rows, fresh, strict=True)])

    def _fresh(self, rows: NDArray[Any], slots: Sequence[int]) -> list[int]:
        """How many slices at the end of each observation its environment's last one does not have."""
        count, shift = self._count, self._shift
        if count == 1:
            return [1] * len(slots)
        words, last = _words(rows), _words(self._last)
        before = last if len(slots) == len(last) else last[slots]
        moved = (words[:, :-shift] == before[:, shift:]).all(axis=(1, 2)).tolist()
        return [
            shift if moved[i] and self._places[slot] else self._compare(words[i], slot, last)
            for i, slot in enumerate(slots)
        ]

    def _compare(self, words: NDArray[Any], slot: int, last: NDArray[Any]) -> int:
        if self._places[slot]:
            for shift in range(self._count):
                end, before = self._count - shift, last[slot, shift:]
                if (words[0] == before[0]).all() and (words[1:end] == before[1:]).all():
                    self._shift = shift or self._shift
                    return shift
        return self._count

    def _put(self, slot: int, row: NDArray[Any], fresh: int) -> CompressedObservation:
        """Writes the last slices of an observation, and returns a reference to all."""
        places = self._places[slot]
        if fresh:
            # an exception may come between any two lines, by a signal: then nothing is known of the newest
            self._places[slot] = []
            append = self._writers[slot].append
            places = places[fresh:] + [append(slice_) for slice_ in row[self._count - fresh :]]
            self._last[slot] = row
            self._places[slot] = places
        # slices of one environment follow each other, so where they begin again is another chunk
        indices = tuple([index for _, index in places])
        layout = self._layouts.get(indices)
        if layout is None:
            layout = self._layouts[indices] = self._layout(indices)
        chunk = places[0][0]
        if chunk is places[-1][0]:
            return CompressedObservation(chunk, layout)
        chunks = tuple(dict.fromkeys([chunk for chunk, _ in places]))
        if chunks != self._chunks[slot]:
            self._chunks[slot] = chunks
        return CompressedObservation(self._chunks[slot], layout)

    def _layout(self, indices: tuple[int, ...]) -> Layout:
        which, nbytes = 0, self._slice_nbytes
        segments: list[tuple[int, int, int]] = []
        for before, index in zip((-1, *indices), indices, strict=False):
            which += bool(segments and index != before + 1)
            segments.append((which, index * nbytes, nbytes))
        return layout_of(self.shape, self.dtype, segments)

    def seal(self) -> None:
        """Compresses the slices that are raw so far."""
        for writer in self._writers:
            writer.seal()


def _words(rows: NDArray[Any]) -> NDArray[Any]:
    """The bits of slices, ``(n, count, words of a slice)``, in words that are quick to compare."""
    flat = rows.reshape(*rows.shape[:2], -1).view(np.uint8)
    return flat if flat.shape[2] % 8 else flat.view(np.uint64)
