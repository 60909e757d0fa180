"""The one way in: what is new of an observation is appended to the chunks of its stream."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable
from itertools import islice
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gym_compress.chunk import Chunk
from gym_compress.codec import Codec, resolve_codec, resolve_frames_per_chunk
from gym_compress.layout import Layout, layout_of
from gym_compress.slicing import Slicing

__all__ = ["Recorder"]


class _RawChunk:
    """A chunk whose slices are raw, and the memory that they are in.

    The chunk itself is made when somebody asks for it, and goes when nobody holds it.
    """

    __slots__ = ("_chunk", "_codec", "_content", "filled", "first", "memory", "room", "sealed", "slices")

    def __init__(self, first: int, room: int, slicing: Slicing, codec: Codec) -> None:
        self.first = first  # the number of its first slice
        self.filled = 0
        self.room = room
        self.sealed = False
        self.memory = bytearray(room * slicing.slice_nbytes)
        self.slices: NDArray[Any] = np.ndarray((room, *slicing.slice_shape), slicing.dtype, self.memory)
        self._content = self.slices.reshape(-1).view(np.uint8)
        self._codec = codec
        self._chunk: Callable[[], Chunk | None] = lambda: None  # a weak reference, once there is a chunk

    def chunk(self) -> Chunk:
        chunk = self._chunk()
        if chunk is None:
            chunk = Chunk(self._content, len(self._content), self._codec)
            self._chunk = weakref.ref(chunk)
        return chunk

    def seal(self) -> None:
        self.room = self.filled
        chunk = self._chunk()
        if chunk is not None and not chunk.sealed:
            chunk.seal(self.filled * self.slices[:1].nbytes, self.slices.itemsize)
        self.sealed = True


class Recorder:
    """Records the observations of one stream, such as those of an environment, in chunks that it seals.

    The slices that an observation shares with the newest one, as stacks do, are not written again: a
    comparison tells, so a wrong ``stack_size`` costs memory and never a value. So the slices of the newest
    observation are always the last ones, one after another, and the number of the first one, counted from 1,
    tells where they are.

    The newest slices stay raw, a whole chunk of them and at least an observation, so that the newest
    observation is read and compared without decoding. A chunk that nobody holds when it is to be sealed is
    not compressed.

    An exception may come between any two lines, by a signal too: slices count once they are written.

    A copy (``copy.deepcopy``, pickling) records on, from the same number, and begins a chunk of its own.

    Args:
        slicing: What slices are.
        codec: What compresses the chunks: a :class:`gym_compress.Codec`, its string, or ``"auto"``.
        frames_per_chunk: Frames that a chunk holds, or ``None`` to choose by their size.
        quick: Whether ``"auto"`` is to encode quickly, since several environments wait for it.
        begun: Called with each chunk that begins, and the number of its first slice.
    """

    def __init__(
        self,
        slicing: Slicing,
        *,
        codec: str | Codec = "auto",
        frames_per_chunk: int | None = None,
        quick: bool = False,
        begun: Callable[[int, Chunk], None] | None = None,
    ) -> None:
        self.slicing = slicing
        self._codec = resolve_codec(codec, slicing.frame_nbytes, quick=quick)
        frames = resolve_frames_per_chunk(frames_per_chunk, slicing.frame_nbytes)
        self._room = frames * slicing.slices_per_frame
        self._begun = begun
        self._raw: deque[_RawChunk] = deque()  # oldest first; the last one is being written
        self._restart = 1
        self._shift = 1  # by how many slices observations moved on last
        self._layouts: dict[tuple[int, ...], Layout] = {}
        self._source: tuple[Chunk, ...] = ()  # of the newest observation, if it lies in several chunks

    @property
    def next_number(self) -> int:
        """The number that the next slice gets."""
        if not self._raw:
            return self._restart
        newest = self._raw[-1]
        return newest.first + newest.filled

    @property
    def first_raw(self) -> int:
        """The number of the oldest slice that is in no sealed chunk yet; that of the next one if all are."""
        return next((raw.first for raw in self._raw if not raw.sealed), self.next_number)

    def record(self, slices: NDArray[Any]) -> int:
        """Takes an observation in.

        Args:
            slices: Its slices, as :meth:`gym_compress.slicing.Slicing.cut` gives them.

        Returns:
            The number of its first slice, which the others follow.
        """
        shift = self.find_shift(slices)
        if shift:
            self.append(slices[len(slices) - shift :])
        return self.next_number - len(slices)

    def find_shift(self, slices: NDArray[Any]) -> int:
        """By how many slices an observation moved on from the newest one, bit for bit.

        Returns:
            0 if it is the same, and the number of its slices if nothing is shared.
        """
        count = len(slices)
        shift: int
        for shift in (0, self._shift, *range(1, count)):
            if shift < count and self._ends_with(slices[: count - shift]):
                self._shift = shift or self._shift
                return shift
        return count

    def _ends_with(self, slices: NDArray[Any]) -> bool:
        """Whether slices, C-contiguous, are the newest ones, bit for bit, and still raw: a memcmp."""
        left = len(slices)
        for raw in reversed(self._raw):
            count = min(left, raw.filled)
            start = (raw.filled - count) * self.slicing.slice_nbytes
            if not raw.memory.startswith(slices[left - count : left].data, start):
                return False
            left -= count
            if not left:
                return True
        return False

    def append(self, slices: NDArray[Any]) -> None:
        """Takes in an observation of which all but the last slices are known: copies these, ``(n, ...)``."""
        done = 0
        while done < len(slices):
            raw = self._raw[-1] if self._raw else None
            if raw is None or raw.filled == raw.room:
                raw = self._begin()
            count = min(raw.room - raw.filled, len(slices) - done)
            raw.slices[raw.filled : raw.filled + count] = slices[done : done + count]
            raw.filled += count
            done += count

    def _begin(self) -> _RawChunk:
        """Begins a chunk, and seals the oldest raw ones that are not among the newest slices."""
        while self._raw and sum([raw.filled for raw in islice(self._raw, 1, None)]) >= self.slicing.count:
            self._raw[0].seal()
            self._raw.popleft()
        raw = _RawChunk(self.next_number, self._room, self.slicing, self._codec)
        if self._begun:
            self._begun(raw.first, raw.chunk())
        self._raw.append(raw)
        return raw

    def newest(self) -> tuple[Chunk | tuple[Chunk, ...], Layout]:
        """Where the newest observation lies: the chunk that holds it, or several, and its layout in them."""
        raw = self._raw[-1]
        if raw.filled >= self.slicing.count:
            self._source = ()
            return raw.chunk(), self._layout((raw.filled,))
        found: list[_RawChunk] = []
        for raw in reversed(self._raw):
            found.insert(0, raw)
            if sum([raw.filled for raw in found]) >= self.slicing.count:
                break
        source = tuple([raw.chunk() for raw in found])
        if source != self._source:
            self._source = source
        return self._source, self._layout(tuple([raw.filled for raw in found]))

    def _layout(self, filled: tuple[int, ...]) -> Layout:
        """The layout of the last slices in chunks of which so many are filled."""
        layout = self._layouts.get(filled)
        if layout is None:
            nbytes, left = self.slicing.slice_nbytes, self.slicing.count
            segments: list[tuple[int, int, int]] = []
            for which in reversed(range(len(filled))):
                count = min(left, filled[which])
                segments.insert(0, (which, (filled[which] - count) * nbytes, count * nbytes))
                left -= count
            layout = layout_of(self.slicing.shape, self.slicing.dtype, segments)
            self._layouts[filled] = layout
        return layout

    def seal(self) -> None:
        """Compresses all that is raw; the next slice begins a chunk."""
        for raw in self._raw:
            raw.seal()

    def restart(self, number: int) -> None:
        """Seals all, and goes on with another number; the next observation is written whole."""
        self.seal()
        self._restart = number
        self._raw.clear()

    def __getstate__(self) -> dict[str, Any]:
        own = {"_raw": deque(), "_restart": self.next_number, "_layouts": {}, "_source": ()}
        return {**self.__dict__, **own}
