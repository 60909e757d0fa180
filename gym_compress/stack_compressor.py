"""From the batches of a vector environment to compressed ones: a stream of slices for each environment."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from gym_compress.batch import CompressedBatch
from gym_compress.chunk import Chunk, ChunkWriter, fit
from gym_compress.codec import Codec, resolve_codec, resolve_frames_per_chunk
from gym_compress.observation import CompressedObservation, Layout, layout_of
from gym_compress.slicing import Newest, Slicing

__all__ = ["StackCompressor"]


class StackCompressor:
    """Compresses the observations of a vector environment, for one Box of the observation space.

    The slices that an observation shares with the one before, as stacks do, are not written again: a
    comparison tells, so a wrong ``stack_size`` costs memory and never a value.

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
        codec = resolve_codec(codec, slicing.frame_nbytes, quick=True)
        frames = resolve_frames_per_chunk(frames_per_chunk, slicing.frame_nbytes) * slicing.slices_per_frame
        self.shape, self.dtype = space.shape, slicing.dtype
        self._rows_shape = (slicing.count, *slicing.slice_shape)
        self._layouts: dict[Any, Layout] = {}  # by the places of an observation's slices
        self._streams = [_Stream(slicing, codec, frames) for _ in range(num_envs)]

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
        rows = np.ascontiguousarray(array).reshape(len(slots), *self._rows_shape)
        sources, layouts = [], []
        for slot, row in zip(slots, rows, strict=True):
            stream = self._streams[slot]
            stream.write(row)
            source, layout = self._place(stream)
            sources.append(source)
            layouts.append(layout)
        return CompressedBatch(tuple(sources), tuple(layouts))

    def one(self, observation: Any, slot: int) -> CompressedObservation:
        """Compresses the observation of one environment; as :meth:`__call__`."""
        compressed = isinstance(observation, CompressedObservation)
        (result,) = self(CompressedBatch._of([observation]) if compressed else [observation], [slot])
        return result

    def _place(self, stream: _Stream) -> tuple[Chunk | tuple[Chunk, ...], Layout]:
        """The chunks that hold the newest observation of an environment, and where they hold it."""
        places = stream.places
        count, nbytes = len(places), stream.writer.frame_nbytes
        chunk, index = places[-1]
        first = index + 1 - count
        if first >= 0:  # slices follow each other, so all lie in this chunk
            layout = self._layouts.get(first)
            if layout is None:
                segments = [(0, first * nbytes, count * nbytes)]
                layout = self._layouts[first] = layout_of(self.shape, self.dtype, segments)
            return chunk, layout
        indices = tuple([index for _, index in places])
        layout = self._layouts.get(indices)
        chunks = tuple(dict.fromkeys([chunk for chunk, _ in places]))
        if layout is None:
            segments = [(chunks.index(chunk), index * nbytes, nbytes) for chunk, index in places]
            layout = self._layouts[indices] = layout_of(self.shape, self.dtype, segments)
        if chunks != stream.chunks:
            stream.chunks = chunks
        return stream.chunks, layout

    def seal(self) -> None:
        """Compresses the slices that are raw so far."""
        for stream in self._streams:
            stream.writer.seal()


class _Stream:
    """The slices of one environment, and where those of its newest observation lie."""

    def __init__(self, slicing: Slicing, codec: Codec, frames_per_chunk: int) -> None:
        self.writer = ChunkWriter(
            slicing.slice_shape,
            slicing.dtype,
            codec=codec,
            frames_per_chunk=frames_per_chunk,
            keep=slicing.count,
        )
        self.places: deque[tuple[Chunk, int]] = deque(maxlen=slicing.count)
        self.chunks: tuple[Chunk, ...] = ()  # those of the last observation that had several
        self._newest = Newest(slicing) if slicing.count > 1 else None

    def write(self, row: NDArray[Any]) -> None:
        """Writes the slices of an observation that the one before does not have."""
        count = len(row)
        if self._newest is not None:
            count = self._newest.moved(row)
            if not count:
                return
            self._newest.push(row, count)
        for slice_ in row[len(row) - count :]:
            self.places.append(self.writer.append(slice_))
        if self._newest is not None:
            self._newest.known = True

    def __getstate__(self) -> dict[str, Any]:
        newest = copy.deepcopy(self._newest)
        if newest is not None:
            newest.known = False
        return {**self.__dict__, "places": deque(maxlen=self.places.maxlen), "chunks": (), "_newest": newest}
