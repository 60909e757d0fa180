"""What an agent holds in place of an array: references to frames in chunks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gym_compress.chunk import Chunk, Piece
from gym_compress.codec import Codec, resolve_codec
from gym_compress.compressed_array import CompressedArray
from gym_compress.layout import Layout, layout_of

__all__ = ["CompressedObservation"]


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

    __slots__ = ("layout", "source")

    def __init__(self, source: Chunk | tuple[Chunk, ...], layout: Layout) -> None:
        """Made by wrappers and class methods; not meant to be called.

        Args:
            source: The chunk that holds the frames, or several.
            layout: Where in them the frames lie.
        """
        self.source = source
        self.layout = layout

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
            return _stack(frames)
        arrays = [np.asarray(frame) for frame in frames]
        if not arrays:
            raise ValueError("from_frames expects at least one frame, got none")
        for i, array in enumerate(arrays):
            if array.shape != arrays[0].shape or not np.can_cast(array.dtype, arrays[0].dtype, "equiv"):
                raise ValueError(
                    f"Frame {i} has shape {array.shape} and dtype {array.dtype}, "
                    f"expected {arrays[0].shape} and {arrays[0].dtype} as frame 0 has"
                )
        return cls.from_array(np.stack(arrays), chosen)

    @classmethod
    def from_array(cls, array: Any, codec: Codec) -> CompressedObservation:
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
        return self.layout.shape

    @property
    def dtype(self) -> np.dtype[Any]:
        """The dtype of the array, in native byte order."""
        return self.layout.dtype

    def wanted(self) -> Iterable[tuple[Chunk, Sequence[Piece]]]:
        """The chunks that hold the array's bytes, each with the pieces of it that go into one array."""
        chunks = self.chunks
        return [(chunks[which], pieces) for which, pieces in self.layout.of_chunks]

    def raw(self) -> NDArray[Any] | None:
        """The array where it lies, to be read only, if it is raw and in one piece; it never changes."""
        if len(self.layout.pieces) == 1:
            ((which, (_, _, start, end)),) = self.layout.pieces
            content = self.chunks[which].content
            if not isinstance(content, bytes):
                return content[start:end].view(self.layout.dtype).reshape(self.layout.shape)
        return None

    def same_bytes(self, other: CompressedObservation) -> bool:
        """Whether another observation refers to the very same bytes."""
        return self.source is other.source and self.layout is other.layout

    @property
    def chunks(self) -> tuple[Chunk, ...]:
        """The chunks that hold the frames."""
        source = self.source
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
        return self.from_array(self, self.chunks[0].codec)

    def __reduce__(self) -> tuple[Any, ...]:
        if all(chunk.sealed for chunk in self.chunks):
            return CompressedObservation, (self.source, self.layout)
        return self.detach().__reduce__()


def _stack(observations: Sequence[CompressedObservation]) -> CompressedObservation:
    """Stacks observations along a new first axis by reference: nothing is decoded, nothing encoded."""
    first = observations[0]
    places: dict[Chunk, int] = {}
    segments = []
    for i, observation in enumerate(observations):
        if observation.shape != first.shape or observation.dtype != first.dtype:
            raise ValueError(
                f"Frame {i} has shape {observation.shape} and dtype {observation.dtype}, "
                f"expected {first.shape} and {first.dtype} as frame 0 has"
            )
        for which, (_, _, start, end) in observation.layout.pieces:
            chunk = observation.chunks[which]
            segments.append((places.setdefault(chunk, len(places)), start, end - start))
    layout = layout_of((len(observations), *first.shape), first.dtype, segments)
    return CompressedObservation(tuple(places) if len(places) > 1 else first.chunks[0], layout)
