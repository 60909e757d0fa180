"""The one way in: what is new of an observation is appended to the chunks of its stream."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from numpy.typing import NDArray

from gym_compress.chunk import Chunk, ChunkWriter
from gym_compress.codec import Codec
from gym_compress.layout import Layout, layout_of
from gym_compress.slicing import Slicing

__all__ = ["Recorder"]


class Recorder:
    """Records the observations of one stream, such as those of an environment.

    The slices that an observation shares with the newest one, as stacks do, are not written again: a
    comparison tells, so a wrong ``stack_size`` costs memory and never a value. So the slices of the newest
    observation are always the last ones, one after another, and the number of the first one tells where they
    are.

    A copy (``copy.deepcopy``, pickling) records on, from the same number, and begins a chunk of its own.

    Args:
        slicing: What slices are.
        codec: What compresses the chunks.
        frames_per_chunk: Frames that a chunk holds.
        begun: Called with each chunk that begins, and the number of its first slice.
    """

    def __init__(
        self,
        slicing: Slicing,
        *,
        codec: Codec,
        frames_per_chunk: int,
        begun: Callable[[int, Chunk], None] | None = None,
    ) -> None:
        self.slicing = slicing
        self._settings = {"codec": codec, "frames_per_chunk": frames_per_chunk, "begun": begun}
        self._writer = ChunkWriter(
            slicing.slice_shape,
            slicing.dtype,
            codec=codec,
            frames_per_chunk=frames_per_chunk * slicing.slices_per_frame,
            keep=slicing.count,
            begun=begun,
        )
        self._shift = 1  # by how many slices observations moved on last
        self._layouts: dict[tuple[int, ...], Layout] = {}
        self._source: tuple[Chunk, ...] = ()  # of the newest observation, if it lies in several chunks

    def record(self, slices: NDArray[Any]) -> int:
        """Takes an observation in.

        Args:
            slices: Its slices, as :meth:`gym_compress.slicing.Slicing.cut` gives them.

        Returns:
            The number of its first slice, which the others follow. Numbers begin at 1.
        """
        shift = self.find_shift(slices)
        if shift:
            self._writer.append(slices[len(slices) - shift :])
        return self._writer.next_number - len(slices)

    def push(self, slice_: NDArray[Any]) -> None:
        """Takes in the newest observation without its first slice, and with one more, ``slice_shape``."""
        self._writer.append(slice_[None])

    def find_shift(self, slices: NDArray[Any]) -> int:
        """By how many slices an observation moved on from the newest one, bit for bit.

        Returns:
            0 if it is the same, and the number of its slices if nothing is shared.
        """
        count = len(slices)
        shift: int
        for shift in (0, self._shift, *range(1, count)):
            if shift < count and self._writer.ends_with(slices[: count - shift]):
                self._shift = shift or self._shift
                return shift
        return count

    def newest(self) -> tuple[Chunk | tuple[Chunk, ...], Layout]:
        """Where the newest observation lies: the chunk that holds it, or several, and its layout in them."""
        chunks, filled = self._writer.newest(self.slicing.count)
        layout = self._layouts.get(filled)
        if layout is None:
            layout = self._layouts[filled] = self._layout(filled)
        if len(chunks) == 1:
            self._source = ()
            return chunks[0], layout
        if chunks != self._source:
            self._source = chunks
        return self._source, layout

    def _layout(self, filled: tuple[int, ...]) -> Layout:
        nbytes, left = self.slicing.slice_nbytes, self.slicing.count
        segments: list[tuple[int, int, int]] = []
        for which in reversed(range(len(filled))):
            count = min(left, filled[which])
            segments.insert(0, (which, (filled[which] - count) * nbytes, count * nbytes))
            left -= count
        return layout_of(self.slicing.shape, self.slicing.dtype, segments)

    def seal(self) -> None:
        """Compresses what is raw so far."""
        self._writer.seal()

    @property
    def next_number(self) -> int:
        """The number that the next slice gets."""
        return self._writer.next_number

    @property
    def first_raw(self) -> int:
        """The number of the oldest slice that is not compressed yet; that of the next one if all are."""
        return self._writer.first_raw

    def restart(self, number: int) -> None:
        """Compresses what is raw, and goes on with another number; the next observation is written whole."""
        self._writer.restart(number)

    def __reduce__(self) -> tuple[Any, ...]:
        return _restored, (self.slicing, self._settings, self.next_number)


def _restored(slicing: Slicing, settings: dict[str, Any], number: int) -> Recorder:
    recorder = Recorder(slicing, **settings)
    recorder.restart(number)
    return recorder
