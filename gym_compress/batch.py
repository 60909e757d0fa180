"""Many observations at once: each chunk is decoded once, and every frame is copied straight to its place."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Set
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gym_compress.chunk import Chunk, Piece, read_pieces
from gym_compress.observation import CompressedObservation

__all__ = ["decompress_batch"]


def decompress_batch(observations: Iterable[Any], *, out: Any = None) -> Any:
    """Decompresses observations into one stacked array, as ``np.stack`` would give of the arrays.

    Each chunk is decoded once for the whole batch, so neighbouring observations, or ``obs`` and ``next_obs``
    in one list, cost less than strangers.

    Args:
        observations: A list, tuple or object array of observations of one space:
            :class:`CompressedObservation`, arrays, numbers, or dicts and tuples of these, nested as Dict and
            Tuple spaces nest them.
        out: Where to write: a C-contiguous array of exactly the result's shape and dtype, in native byte
            order
            (of a torch tensor, its ``.numpy()``); for dicts and tuples, a dict or tuple of such arrays.

    Returns:
        An array of shape ``(len(observations), *shape)``, or a dict or tuple of such arrays; ``out`` if
        given.

    Raises:
        ValueError: If the batch is empty, if observations differ in shape, dtype or keys (the message names
            the
            index), or if ``out`` does not fit. Nothing is written then.
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
    jobs: list[Callable[[], None]] = []
    result = _prepare(batch, out, "observation", jobs)
    for job in jobs:
        job()
    return result


def _prepare(batch: list[Any], out: Any, name: str, jobs: list[Callable[[], None]]) -> Any:
    """Checks a batch, leaf by leaf, appends to jobs what fills the result, and returns the result."""
    first = batch[0]
    if isinstance(first, CompressedObservation):
        return _prepare_compressed(batch, out, name, jobs)
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
    return _prepare_arrays(batch, out, name, jobs)


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
    if not isinstance(out, np.ndarray):
        raise TypeError(f"out is expected to be a NumPy array (of a tensor, its .numpy()), got {type(out)}")
    if out.shape != shape or out.dtype != dtype:
        raise ValueError(f"out is expected to have shape {shape} and dtype {dtype}, got {_told(out)}")
    if not (out.flags.c_contiguous and out.flags.writeable):
        raise ValueError("out is expected to be C-contiguous and writeable")
    return out


def _prepare_compressed(
    batch: list[Any], out: Any, name: str, jobs: list[Callable[[], None]]
) -> NDArray[Any]:
    first = batch[0]._layout
    nbytes = first.nbytes
    wanted: dict[Chunk, list[Piece]] = {}
    base = 0
    for i, observation in enumerate(batch):
        if type(observation) is not CompressedObservation:
            return _prepare_arrays(batch, out, name, jobs)
        layout = observation._layout
        if layout is not first and (layout.shape != first.shape or layout.dtype != first.dtype):
            raise ValueError(
                f"Expected {name} {i} to have shape {first.shape} and dtype {first.dtype} as {name} 0 has, "
                f"got {_told(observation)}"
            )
        source = observation._source
        for which, (to, to_end, start, end) in layout.pieces:
            chunk = source if isinstance(source, Chunk) else source[which]
            piece = (base + to, base + to_end, start, end)
            if chunk in wanted:
                wanted[chunk].append(piece)
            else:
                wanted[chunk] = [piece]
        base += nbytes
    result = _destination(out, (len(batch), *first.shape), first.dtype)
    if nbytes:
        jobs.append(lambda: read_pieces(wanted.items(), result.reshape(-1).view(np.uint8).data))
    return result


def _prepare_arrays(batch: list[Any], out: Any, name: str, jobs: list[Callable[[], None]]) -> NDArray[Any]:
    arrays = [np.asarray(observation) for observation in batch]
    first = arrays[0]
    for i, array in enumerate(arrays):
        if array.dtype.hasobject:
            raise TypeError(f"Expected {name} {i} to be an observation, actual type: {type(batch[i])}")
        if array.shape != first.shape or (array.dtype != first.dtype and array.dtype.kind != "U"):
            raise ValueError(
                f"Expected {name} {i} to have shape {first.shape} and dtype {first.dtype} as {name} 0 has, "
                f"got {_told(array)}"
            )
    result = _destination(out, (len(batch), *first.shape), np.result_type(*arrays))

    def stack() -> None:
        np.stack(arrays, out=result)

    jobs.append(stack)
    return result
