"""From the batches of a vector environment to compressed ones: a stream of slices for each environment."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from gym_compress.batch import CompressedBatch
from gym_compress.chunk import Chunk, ChunkWriter, fit
from gym_compress.codec import Codec, resolve_codec, resolve_frames_per_chunk
from gym_compress.observation import Layout, layout_of
from gym_compress.slicing import Slicing

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
        layouts: dict[Any, Layout] = {}
        self._stacks = [
            _Stack(self.shape, slicing, codec, frames_per_chunk=frames, layouts=layouts)
            for _ in range(num_envs)
        ]
        self._shift = 1  # by how many slices observations moved on last

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
            stack = self._stacks[slot]
            stack.push(row, self._moved(stack, row))
            source, layout = stack.place()
            sources.append(source)
            layouts.append(layout)
        return CompressedBatch(tuple(sources), tuple(layouts))

    def _moved(self, stack: _Stack, row: NDArray[Any]) -> int:
        """By how many slices an observation moved on from the one before; by all if nothing is shared."""
        count = len(row)
        if not stack.known:
            return count
        if stack.ends_with(row, count - self._shift):
            return self._shift
        for shift in range(count):
            if stack.ends_with(row, count - shift):
                self._shift = shift or self._shift
                return shift
        return count

    def seal(self) -> None:
        """Compresses the slices that are raw so far."""
        for stack in self._stacks:
            stack.writer.seal()


class _Stack:
    """The newest observation of one environment: its bytes, to compare with, and where its slices lie."""

    def __init__(
        self,
        shape: tuple[int, ...],
        slicing: Slicing,
        codec: Codec,
        *,
        frames_per_chunk: int,
        layouts: dict[Any, Layout],
    ) -> None:
        self.writer = ChunkWriter(
            slicing.slice_shape,
            slicing.dtype,
            codec=codec,
            frames_per_chunk=frames_per_chunk,
            keep=slicing.count,
        )
        self.known = False  # whether there is one; not while it is written, which may be interrupted
        self._shape, self._slicing = shape, slicing
        self._nbytes = slicing.slice_nbytes
        # the newest slices one after another, up to an end that moves on
        self._bytes = bytearray(4 * slicing.nbytes if slicing.count > 1 else 0)
        self._view, self._end = memoryview(self._bytes), 0
        self._places: deque[tuple[Chunk, int]] = deque(maxlen=slicing.count)
        self._chunks: tuple[Chunk, ...] = ()  # those of the last observation that had several
        self._layouts = layouts  # by the places of an observation's slices

    def ends_with(self, row: NDArray[Any], count: int) -> bool:
        """Whether the last slices here are the first ones of an observation, bit for bit."""
        return self._bytes.startswith(row[:count].data, self._end - count * self._nbytes)

    def push(self, row: NDArray[Any], count: int) -> None:
        """Appends the last slices of an observation."""
        if not count:
            return
        self.known = False
        new = row[len(row) - count :]
        for slice_ in new:
            self._places.append(self.writer.append(slice_))
        if self._bytes:
            end = self._end + new.nbytes
            if end > len(self._bytes):  # the others move to the front
                end = len(row) * self._nbytes
                others = end - new.nbytes
                self._view[:others] = self._view[self._end - others : self._end]
            self._view[end - new.nbytes : end] = new.reshape(-1).view(np.uint8).data
            self._end = end
            self.known = True

    def place(self) -> tuple[Chunk | tuple[Chunk, ...], Layout]:
        """The chunks that hold the newest observation, and where they hold it."""
        count, nbytes = self._slicing.count, self._nbytes
        chunk, index = self._places[-1]
        first = index + 1 - count
        if first >= 0:  # slices follow each other, so all lie in this chunk
            layout = self._layouts.get(first)
            if layout is None:
                segments = [(0, first * nbytes, count * nbytes)]
                layout = self._layouts[first] = layout_of(self._shape, self._slicing.dtype, segments)
            return chunk, layout
        indices = tuple([index for _, index in self._places])
        layout = self._layouts.get(indices)
        chunks = tuple(dict.fromkeys([chunk for chunk, _ in self._places]))
        if layout is None:
            segments = [(chunks.index(chunk), index * nbytes, nbytes) for chunk, index in self._places]
            layout = self._layouts[indices] = layout_of(self._shape, self._slicing.dtype, segments)
        if chunks != self._chunks:
            self._chunks = chunks
        return self._chunks, layout
