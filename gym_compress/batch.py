"""Many observations at once: each chunk is decoded once, and every frame is copied straight to its place.

``CompressedBatch`` is what a vector environment's step gives, ``decompress_batch`` reads a list of
observations.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gym_compress.chunk import Chunk, Piece, read_pieces
from gym_compress.compressed_array import CompressedArray
from gym_compress.layout import Layout
from gym_compress.observation import CompressedObservation

__all__ = ["CompressedBatch", "decompress_batch"]


class CompressedBatch(CompressedArray):
    """The observations of several environments, as a vector environment gives them at a step.

    It is immutable and behaves as an array of shape ``(num_envs, *observation)`` where reading is meant.
    ``batch[i]`` and iteration give :class:`gym_compress.CompressedObservation`, slices and lists of indices a
    smaller batch; every other index is NumPy's, and gives an array. To put another observation in the place
    of one, as with ``final_obs``, make a list of it: ``observations = list(batch)``. Replay memory takes
    either.

    :func:`gym_compress.decompress_batch` of a list of batches gives an array of ``(time, env, ...)``.

    Example:
        >>> import gymnasium as gym
        >>> from gym_compress.wrappers.vector import CompressObservation
        >>> envs = CompressObservation(gym.make_vec("CartPole-v1", num_envs=3, vectorization_mode="sync"))
        >>> obs, info = envs.reset(seed=123)
        >>> obs.shape, len(obs), obs[1].shape
        ((3, 4), 3, (4,))
        >>> envs.close()
    """

    __slots__ = ("layouts", "sources")

    def __init__(self, sources: tuple[Chunk | tuple[Chunk, ...], ...], layouts: tuple[Layout, ...]) -> None:
        """Made by wrappers; not meant to be called.

        Args:
            sources: Of each observation the chunk that holds its frames, or several.
            layouts: Where in them they lie; all of one shape and dtype.
        """
        self.sources = sources
        self.layouts = _shared(layouts)

    @classmethod
    def of(cls, observations: Iterable[CompressedObservation]) -> CompressedBatch:
        """A batch of at least one observation, all of one shape and dtype."""
        pairs = [(observation.source, observation.layout) for observation in observations]
        sources, layouts = zip(*pairs, strict=True)
        return cls(sources, layouts)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the array, ``(num_envs, *observation)``."""
        return (len(self.layouts), *self.layouts[0].shape)

    @property
    def dtype(self) -> np.dtype[Any]:
        """The dtype of the array, in native byte order."""
        return self.layouts[0].dtype

    def __iter__(self) -> Iterator[CompressedObservation]:
        """The observation of each environment."""
        return map(CompressedObservation, self.sources, self.layouts)

    def __getitem__(self, key: Any) -> Any:
        """The observation of an environment, a batch of those of some, or what NumPy gives of the array."""
        if isinstance(key, (int, np.integer)) and not isinstance(key, bool):
            if not -len(self) <= key < len(self):
                raise IndexError(f"Environment {key} is out of range for a batch of {len(self)}")
            return CompressedObservation(self.sources[key], self.layouts[key])
        if isinstance(key, slice) or (isinstance(key, (list, np.ndarray)) and np.ndim(key) == 1):
            envs = np.arange(len(self))[key]
            if envs.size:
                return CompressedBatch.of([self[env] for env in envs])
        return np.asarray(self)[key]

    def wanted(self) -> Iterable[tuple[Chunk, Sequence[Piece]]]:
        """The chunks that hold the array's bytes, each with the pieces of it that go into one array."""
        wanted: dict[Chunk, list[Piece]] = {}
        self.add_to(wanted, 0)
        return wanted.items()

    def add_to(self, wanted: dict[Chunk, list[Piece]], at: int) -> None:
        """Adds what :meth:`wanted` gives, for bytes of an array from ``at`` on."""
        for source, layout in zip(self.sources, self.layouts, strict=True):
            for which, (to, to_end, start, end) in layout.pieces:
                chunk = source if isinstance(source, Chunk) else source[which]
                wanted.setdefault(chunk, []).append((0, at + to, at + to_end, start, end))
            at += layout.nbytes

    def same_bytes(self, other: CompressedBatch) -> bool:
        """Whether another batch refers to the very same bytes."""
        return len(self) == len(other) and all(map(CompressedObservation.same_bytes, self, other))

    def __reduce__(self) -> tuple[Any, ...]:
        return CompressedBatch.of, (list(self),)


@lru_cache(maxsize=512)
def _shared(layouts: tuple[Layout, ...]) -> tuple[Layout, ...]:
    """The same tuple for the same layouts: as long as no episode ends, they come again, chunk by chunk."""
    return layouts


def decompress_batch(observations: Iterable[Any], *, out: Any = None) -> Any:
    """Decompresses observations into one stacked array, as ``np.stack`` would give of the arrays.

    Each chunk is decoded once for the whole batch, so neighbouring observations, or ``obs`` and ``next_obs``
    in one list, cost less than strangers.

    Args:
        observations: A list, tuple or object array of observations of one space:
            :class:`CompressedObservation`, :class:`CompressedBatch`, arrays, numbers, or dicts and tuples of
            these, nested as Dict and Tuple spaces nest them.
        out: Where to write: a C-contiguous array of exactly the result's shape and dtype, in native byte
            order (of a torch tensor, its ``.numpy()``); for dicts and tuples, a dict or tuple of such arrays.

    Returns:
        An array of shape ``(len(observations), *shape)``, or a dict or tuple of such arrays: ``out``, if that
        is given.

    Raises:
        ValueError: If the batch is empty, if observations differ in shape, dtype or keys (the message names
            the index), or if ``out`` does not fit. Nothing is written then.
        TypeError: If this is no batch, or holds something that is no observation.

    Example:
        >>> import gymnasium as gym
        >>> from gym_compress import CompressedFrameStack, decompress_batch
        >>> env = CompressedFrameStack(gym.make("CartPole-v1"), 4)
        >>> kept = [env.reset(seed=0)[0]] + [env.step(0)[0] for _ in range(7)]
        >>> decompress_batch(kept).shape
        (8, 4, 4)
    """
    no_list = (CompressedObservation, Mapping, Set, str, bytes)
    if isinstance(observations, no_list) or not isinstance(observations, Iterable):
        raise TypeError(f"Expected a list of observations, actual type: {type(observations)}")
    batch = list(observations)
    if not batch:
        raise ValueError("Expected at least one observation, got an empty batch")
    if isinstance(batch[0], str):
        raise TypeError("Expected observations, got strings: are they the keys of a Dict observation?")
    jobs: list[_Job] = []
    result = _prepare(batch, out, "observation", jobs)
    if out is not None:
        for i, (one, *_) in enumerate(jobs):
            if any(np.may_share_memory(one, other) for other, *_ in jobs[:i]):
                raise ValueError("out is expected to hold arrays that do not overlap")
    for array, wanted, rows in jobs:
        if wanted:
            read_pieces(wanted.items(), [array.reshape(-1).view(np.ndarray).view(np.uint8).data])
        for row, value in rows.items():
            array[row] = value
    return result


# What is left to do for a leaf: the array to fill, the pieces of chunks that go into it, and the rows of it
# that are arrays already.
_Job = tuple[NDArray[Any], dict[Chunk, list[Piece]], dict[int, NDArray[Any]]]


def _prepare(batch: list[Any], out: Any, name: str, jobs: list[_Job]) -> Any:
    """Checks a batch, leaf by leaf, appends to jobs what fills the result, and returns the result."""
    first = batch[0]
    if isinstance(first, Mapping):
        keys = first.keys()
        for i, observation in enumerate(batch):
            if not isinstance(observation, Mapping) or observation.keys() != keys:
                raise ValueError(
                    f"Expected {name} {i} to be a dict of {list(keys)}, got {_told(observation)}"
                )
        parts = _parts(out, keys, dict, name)
        result = {k: _prepare([o[k] for o in batch], parts[k], f"{name}[{k!r}]", jobs) for k in keys}
        return result if out is None else out
    if isinstance(first, tuple):
        for i, observation in enumerate(batch):
            if not isinstance(observation, tuple) or len(observation) != len(first):
                expected = f"a tuple of {len(first)}"
                raise ValueError(f"Expected {name} {i} to be {expected}, got {_told(observation)}")
        places = range(len(first))
        parts = _parts(out, places, tuple, name)
        results = tuple([_prepare([o[i] for o in batch], parts[i], f"{name}[{i}]", jobs) for i in places])
        return results if out is None else out
    return _prepare_leaf(batch, out, name, jobs)


def _parts(out: Any, keys: Any, kind: type[Any], name: str) -> Any:
    if out is None:
        return dict.fromkeys(keys)
    if not isinstance(out, kind) or (out.keys() if kind is dict else range(len(out))) != keys:
        raise ValueError(f"Expected out for {name} to be a {kind.__name__} of {list(keys)}, got {_told(out)}")
    return out


def _told(value: Any) -> str:
    """A short description of a value for a message."""
    if isinstance(value, Mapping):
        return f"a dict of {list(value)}"
    if isinstance(value, tuple):
        return f"a tuple of {len(value)}"
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        return f"shape {value.shape} and dtype {value.dtype}"
    return f"{type(value)}"


def _destination(out: Any, shape: tuple[int, ...], dtype: np.dtype[Any]) -> NDArray[Any]:
    if out is None:
        return np.empty(shape, dtype)
    if not isinstance(out, np.ndarray) or isinstance(out, np.ma.MaskedArray):
        raise TypeError(f"out is expected to be a NumPy array (of a tensor, its .numpy()), got {type(out)}")
    if out.shape != shape or out.dtype != dtype:
        raise ValueError(f"out is expected to have shape {shape} and dtype {dtype}, got {_told(out)}")
    if not (out.flags.c_contiguous and out.flags.writeable):
        raise ValueError("out is expected to be C-contiguous and writeable")
    return out


def _prepare_leaf(batch: list[Any], out: Any, name: str, jobs: list[_Job]) -> NDArray[Any]:
    first = batch[0] if isinstance(batch[0], CompressedArray) else np.asarray(batch[0])
    shape, dtype, nbytes = first.shape, first.dtype.newbyteorder("="), first.nbytes
    wanted: dict[Chunk, list[Piece]] = {}
    arrays: dict[int, NDArray[Any]] = {}
    base, known = 0, None
    for i, observation in enumerate(batch):
        if type(observation) is CompressedObservation:
            layout = observation.layout
            if layout is not known:
                if layout.shape != shape or layout.dtype != dtype:
                    raise ValueError(_differs(name, i, shape, dtype, observation))
                known = layout
            source = observation.source
            for which, (to, to_end, start, end) in layout.pieces:
                chunk = source if isinstance(source, Chunk) else source[which]
                piece = (0, base + to, base + to_end, start, end)
                if chunk in wanted:
                    wanted[chunk].append(piece)
                else:
                    wanted[chunk] = [piece]
        elif type(observation) is CompressedBatch:
            if observation.shape != shape or observation.dtype != dtype:
                raise ValueError(_differs(name, i, shape, dtype, observation))
            observation.add_to(wanted, base)
        else:
            array = np.asarray(observation)
            if array.dtype.hasobject:
                raise TypeError(f"Expected {name} {i} to be an observation, actual type: {type(observation)}")
            text = array.dtype.kind == "U" == dtype.kind  # of any length
            if array.shape != shape or not (text or array.dtype.newbyteorder("=") == dtype):
                raise ValueError(_differs(name, i, shape, dtype, array))
            arrays[i] = array
        base += nbytes
    result = _destination(out, (len(batch), *shape), np.result_type(dtype, *arrays.values()))
    for i, array in arrays.items():
        if np.may_share_memory(array, result):
            arrays[i] = array.copy()
    jobs.append((result, wanted, arrays))
    return result


def _differs(name: str, i: int, shape: tuple[int, ...], dtype: np.dtype[Any], observation: Any) -> str:
    expected = f"shape {shape} and dtype {dtype} as {name} 0 has"
    return f"Expected {name} {i} to have {expected}, got {_told(observation)}"
