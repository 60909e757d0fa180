"""``CompressObservation``: each observation of an environment, compressed."""

from __future__ import annotations

import copy
from typing import Any

import gymnasium as gym
import numpy as np

from gym_compress.codec import Codec
from gym_compress.observation import CompressedObservation
from gym_compress.recorder import Recorder
from gym_compress.slicing import Slicing
from gym_compress.spaces import compressed_space, fit, map_compressed
from gym_compress.tree import map_leaves

__all__ = ["CompressObservation", "compress", "json_arguments"]


def json_arguments(**arguments: Any) -> dict[str, Any]:
    """Arguments as ``env.spec``, which is written as JSON, records them: no codecs, no NumPy integers."""
    return {
        name: str(value)
        if isinstance(value, Codec)
        else int(value)
        if isinstance(value, np.integer)
        else value
        for name, value in arguments.items()
    }


def compress(recorder: Recorder | None, observation: Any) -> Any:
    """Records an observation that is no stack, if there is something to record it, or copies it.

    Raises:
        ValueError: If it does not fit the space.
    """
    if recorder is None:
        return copy.deepcopy(observation)
    slicing = recorder.slicing
    recorder.append(fit(observation, slicing.shape, slicing.dtype)[None])
    return CompressedObservation(*recorder.newest())


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

    Observations are compressed as they come. For stacks, put :class:`gym_compress.CompressedFrameStack` in
    the place of ``FrameStackObservation``, or over this wrapper: then each frame is kept once.

    A vector version of the wrapper exists: :class:`gym_compress.wrappers.vector.CompressObservation`.

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
            self, **json_arguments(codec=codec, frames_per_chunk=frames_per_chunk)
        )
        gym.ObservationWrapper.__init__(self, env)
        self._recorders = map_compressed(
            lambda box: Recorder(
                Slicing(box.shape, box.dtype, 1), codec=codec, frames_per_chunk=frames_per_chunk
            ),
            env.observation_space,
        )
        self.observation_space = compressed_space(env.observation_space, self._recorders)

    def observation(self, observation: Any) -> Any:
        """The observation with its leaves compressed.

        Raises:
            ValueError: If a leaf does not fit its space.
        """
        return map_leaves(compress, self._recorders, observation)

    def close(self) -> None:
        """Closes the environment and compresses the newest observations, which were raw so far."""
        try:
            map_leaves(lambda recorder: recorder and recorder.seal(), self._recorders)
        finally:
            super().close()
