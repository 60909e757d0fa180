"""From frames to observations: the streams of an environment's observation space."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from typing import Any

from gymnasium import spaces

from gym_compress.chunk import Chunk, ChunkWriter, fit
from gym_compress.codec import Codec
from gym_compress.observation import CompressedBox, CompressedObservation, Layout, layout_of, stack
from gym_compress.tree import map_leaves, map_space, replace_leaves

__all__ = [
    "FrameCompressor",
    "FrameStacker",
    "box_nbytes",
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


def box_nbytes(box: spaces.Box) -> int:
    """Bytes of an observation of a Box."""
    return math.prod(box.shape) * box.dtype.itemsize


def worth_compressing(space: spaces.Space[Any]) -> bool:
    """Whether a leaf of a Dict or Tuple space is compressed: a Box of at least 1,024 bytes."""
    return isinstance(space, spaces.Box) and box_nbytes(space) >= _WORTH_NBYTES


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
