"""``CompressObservation``: each observation of an environment, compressed."""

from __future__ import annotations

import copy
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces

from gym_compress.codec import Codec
from gym_compress.observation import CompressedBox, FrameCompressor
from gym_compress.tree import map_leaves, map_space, replace_leaves

__all__ = [
    "WORTH_NBYTES",
    "CompressObservation",
    "box_nbytes",
    "compress_leaf",
    "compressed_space",
    "leaf_compressors",
    "recorded",
    "seal_all",
]

# A leaf of a Dict or Tuple below this many bytes is left as it is.
WORTH_NBYTES = 1024


def leaf_compressors(
    env: gym.Env[Any, Any], codec: str | Codec, frames_per_chunk: int | None, keep: int = 1
) -> Any:
    """A tree of an observation space: a FrameCompressor where a leaf is compressed, None elsewhere.

    Raises:
        TypeError: If the observation space is no Box, Dict or Tuple.
    """
    space = env.observation_space
    if not isinstance(space, (spaces.Box, spaces.Dict, spaces.Tuple)):
        raise TypeError(f"Expected an observation space that is a Box, Dict or Tuple, actual: {space}")

    def leaf(sub: spaces.Space[Any]) -> FrameCompressor | None:
        if isinstance(sub, spaces.Box) and (sub is space or box_nbytes(sub) >= WORTH_NBYTES):
            return FrameCompressor(sub, codec=codec, frames_per_chunk=frames_per_chunk, keep=keep)
        return None

    return map_space(leaf, space)


def box_nbytes(box: spaces.Box) -> int:
    """Bytes of an array of a Box."""
    return int(np.prod(box.shape, dtype=np.int64)) * box.dtype.itemsize


def compressed_space(space: spaces.Space[Any], compressors: Any) -> spaces.Space[Any]:
    """A copy of a space in which each leaf that has a compressor is a CompressedBox."""

    def leaf(sub: spaces.Space[Any], compressor: FrameCompressor | None) -> spaces.Space[Any]:
        return CompressedBox.like(sub) if compressor and isinstance(sub, spaces.Box) else sub

    return replace_leaves(leaf, space, compressors)


def compress_leaf(compressor: FrameCompressor | None, observation: Any) -> Any:
    """Compresses a leaf of an observation, or copies it if it has no compressor."""
    return copy.deepcopy(observation) if compressor is None else compressor(observation)


def seal_all(compressors: Any) -> None:
    """Compresses what the compressors of a tree hold raw."""
    map_leaves(lambda compressor: compressor and compressor.seal(), compressors)


def recorded(**arguments: Any) -> dict[str, Any]:
    """Arguments as ``env.spec``, which is written as JSON, records them: no codecs, no NumPy integers."""
    return {
        name: str(value)
        if isinstance(value, Codec)
        else int(value)
        if isinstance(value, np.integer)
        else value
        for name, value in arguments.items()
    }


class CompressObservation(gym.ObservationWrapper[Any, Any, Any], gym.utils.RecordConstructorArgs):
    """Compresses the observations of an environment.

    An observation becomes a :class:`gym_compress.CompressedObservation`, which NumPy, PyTorch and JAX read as
    an array; a list of them takes a fraction of the memory of arrays, and
    :func:`gym_compress.decompress_batch` turns it into one array quickly. Neighbouring observations are
    compressed together.

    A Box is always compressed. In Dict and Tuple spaces, nested or not, each Box worth it is, which is one of
    at least 1,024 bytes; smaller ones and other spaces are handed on as copies. At that size a batch of 32
    images takes about twice the time of one from arrays (``pytest tests/benchmarks -k leaf``); a smaller leaf
    would be read no quicker and have less to save.

    No vector version of the wrapper exists.

    Example:
        >>> import gymnasium as gym
        >>> import numpy as np
        >>> from gym_compress import CompressObservation
        >>> env = CompressObservation(gym.make("CartPole-v1"))
        >>> obs, info = env.reset(seed=123)
        >>> obs.shape, obs.dtype
        ((4,), dtype('float32'))
        >>> np.asarray(obs)
        array([ 0.01823519, -0.0446179 , -0.02796401, -0.03156282], dtype=float32)

    Change logs:
     * v0.1.0 - Initially added
    """

    def __init__(
        self, env: gym.Env[Any, Any], *, codec: str | Codec = "auto", frames_per_chunk: int | None = None
    ) -> None:
        """Wraps an environment.

        Args:
            env: The environment; its observation space is a Box, Dict or Tuple.
            codec: A :class:`gym_compress.Codec`, its string such as ``"zstd:1"``, or ``"auto"``.
            frames_per_chunk: How many observations are compressed together, or ``None`` to choose by their
                size.

        Raises:
            TypeError: If the observation space is of another kind, or an argument of a wrong type.
            ValueError: If the codec is unknown or ``frames_per_chunk`` is below 1.
        """
        gym.utils.RecordConstructorArgs.__init__(
            self, **recorded(codec=codec, frames_per_chunk=frames_per_chunk)
        )
        gym.ObservationWrapper.__init__(self, env)
        self._compressors = leaf_compressors(env, codec, frames_per_chunk)
        self.observation_space = compressed_space(env.observation_space, self._compressors)

    def observation(self, observation: Any) -> Any:
        """The observation with its leaves compressed.

        Raises:
            ValueError: If a leaf does not fit its space.
        """
        return map_leaves(compress_leaf, self._compressors, observation)

    def close(self) -> None:
        """Closes the environment and compresses the newest observations, which were raw so far."""
        seal_all(self._compressors)
        super().close()
