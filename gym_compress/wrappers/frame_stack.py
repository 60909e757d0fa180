"""``CompressedFrameStack``: the last observations of an environment as one, sharing their frames."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable
from typing import Any, SupportsFloat

import gymnasium as gym
import numpy as np
from gymnasium import spaces
from gymnasium.vector.utils import batch_space, concatenate, create_empty_array
from gymnasium.wrappers.utils import create_zero_array

from gym_compress.chunk import fit
from gym_compress.codec import Codec
from gym_compress.observation import CompressedBox
from gym_compress.stream import FrameCompressor, FrameStacker, compressed_space, compressors_of, seal_all
from gym_compress.tree import map_leaves, map_space
from gym_compress.wrappers.compress import recorded

__all__ = ["CompressedFrameStack", "ObservationStacker", "warn_if_compressed"]


class _PlainStacker:
    """Stacks a leaf that is not compressed, as Gymnasium does; the counterpart of FrameStacker."""

    def __init__(self, space: spaces.Space[Any], stack_size: int, filler: Any) -> None:
        self._space = space
        self._queue = deque([filler] * stack_size, maxlen=stack_size)
        self._of_arrays = isinstance(create_empty_array(space, stack_size), np.ndarray)

    def take(self, observation: Any) -> Any:
        """A copy of an observation; ValueError if it cannot be stacked."""
        if self._of_arrays and self._space.shape is not None and self._space.dtype is not None:
            return np.array(fit(observation, self._space.shape, self._space.dtype))
        return copy.deepcopy(observation)

    def fill(self, filler: Any) -> None:
        self._queue.extend([filler] * len(self._queue))

    def push(self, observation: Any) -> Any:
        self._queue.append(observation)
        out: Any = create_empty_array(self._space, len(self._queue))
        stacked = concatenate(self._space, self._queue, out)
        return stacked if self._of_arrays else copy.deepcopy(stacked)


class ObservationStacker:
    """The last ``stack_size`` observations of an environment as one, for each leaf of its space.

    Args:
        space: The observation space.
        stack_size: How many observations are stacked.
        padding_type: ``"reset"``, ``"zero"`` or an observation, see :class:`CompressedFrameStack`.
        make: Makes what compresses a leaf of the space, which keeps as many frames raw as are stacked.

    Raises:
        TypeError: If ``stack_size`` is no integer, or the observation space is of another kind.
        ValueError: If another argument is out of its range.
    """

    def __init__(
        self,
        space: spaces.Space[Any],
        stack_size: int,
        padding_type: str | Any,
        make: Callable[[spaces.Box], FrameCompressor],
    ) -> None:
        if not np.issubdtype(type(stack_size), np.integer):
            raise TypeError(f"The stack_size is expected to be an integer, actual type: {type(stack_size)}")
        if not stack_size > 0:
            raise ValueError(f"The stack_size needs to be greater than zero, actual value: {stack_size}")
        if isinstance(padding_type, str) and padding_type in ("reset", "zero"):
            padding = create_zero_array(space)
        elif padding_type in space:
            padding, padding_type = padding_type, "_custom"
        else:
            instance = (
                "" if isinstance(padding_type, str) else f" not an instance of env observation ({space})"
            )
            raise ValueError(
                "Unexpected `padding_type`, expected 'reset', 'zero' or a custom observation space, "
                f"actual value: {padding_type!r}{instance}"
            )
        self.stack_size = int(stack_size)
        self.padding_type: str = padding_type
        self.compressors = compressors_of(space, make)
        self._padding = map_leaves(_pad, self.compressors, padding)
        self._stackers = map_leaves(
            self._stacker, self.compressors, map_space(lambda sub: sub, space), self._padding
        )
        self.observation_space = compressed_space(batch_space(space, n=self.stack_size), self.compressors)

    def _stacker(
        self, compressor: FrameCompressor | None, space: spaces.Space[Any], padding: Any
    ) -> FrameStacker | _PlainStacker:
        if compressor is None:
            return _PlainStacker(space, self.stack_size, padding)
        return FrameStacker(compressor, self.stack_size, padding)

    def take(self, observation: Any) -> Any:
        """An observation as it can be stacked: compressed, or a copy.

        Raises:
            ValueError: If it does not fit the space.
        """
        return map_leaves(_take, self._stackers, observation)

    def push(self, frame: Any) -> Any:
        """Appends what :meth:`take` gave, drops the oldest, and returns the stack."""
        return map_leaves(_push, self._stackers, frame)

    def restart(self, frame: Any) -> Any:
        """Fills the stack with the padding, and appends the first observation of an episode."""
        map_leaves(_fill, self._stackers, frame if self.padding_type == "reset" else self._padding)
        return self.push(frame)

    def seal(self) -> None:
        """Compresses the frames that are raw so far."""
        seal_all(self.compressors)


def warn_if_compressed(space: spaces.Space[Any], codec: str | Codec, frames_per_chunk: int | None) -> None:
    """Warns if arguments have no effect, since observations are compressed already."""
    if isinstance(space, CompressedBox) and (codec != "auto" or frames_per_chunk is not None):
        gym.logger.warn(
            "The observations are compressed already and taken over as they are: give codec and "
            "frames_per_chunk to the wrapper that compresses them"
        )


def _pad(compressor: FrameCompressor | None, observation: Any) -> Any:
    return copy.deepcopy(observation) if compressor is None else compressor.alone(observation)


def _take(stacker: FrameStacker | _PlainStacker, observation: Any) -> Any:
    return stacker.take(observation)


def _fill(stacker: FrameStacker | _PlainStacker, filler: Any) -> None:
    stacker.fill(filler)


def _push(stacker: FrameStacker | _PlainStacker, observation: Any) -> Any:
    return stacker.push(observation)


class CompressedFrameStack(gym.Wrapper[Any, Any, Any, Any], gym.utils.RecordConstructorArgs):
    """Stacks the observations of the last ``stack_size`` steps, each frame kept once and compressed.

    The observations equal those of :class:`gymnasium.wrappers.FrameStackObservation`, but are
    :class:`gym_compress.CompressedObservation`: references to frames, of which neighbours share all but one.
    The same leaves of an observation are compressed as by :class:`gym_compress.CompressObservation`; the
    others are stacked into arrays. Observations that are compressed already are taken over without encoding
    them again.

    A vector version of the wrapper exists: :class:`gym_compress.wrappers.vector.CompressedFrameStack`.

    Example:
        >>> import gymnasium as gym
        >>> import numpy as np
        >>> from gym_compress import CompressedFrameStack
        >>> env = CompressedFrameStack(gym.make("CartPole-v1"), 3, padding_type="zero")
        >>> obs, info = env.reset(seed=123)
        >>> obs.shape
        (3, 4)
        >>> np.asarray(obs)
        array([[ 0.        ,  0.        ,  0.        ,  0.        ],
               [ 0.        ,  0.        ,  0.        ,  0.        ],
               [ 0.01823519, -0.0446179 , -0.02796401, -0.03156282]],
              dtype=float32)

    Change logs:
     * v0.1.0 - Initially added
    """

    def __init__(
        self,
        env: gym.Env[Any, Any],
        stack_size: int,
        *,
        padding_type: str | Any = "reset",
        codec: str | Codec = "auto",
        frames_per_chunk: int | None = None,
    ) -> None:
        """Wraps an environment.

        Args:
            env: The environment; its observation space is a Box, Dict or Tuple.
            stack_size: How many observations are stacked.
            padding_type: What fills a stack after a reset: ``"reset"`` for the first observation, ``"zero"``
                for a zero-like instance of the observation space, or an observation.
            codec: A :class:`gym_compress.Codec`, its string such as ``"zstd:1"``, or ``"auto"``.
            frames_per_chunk: How many frames are compressed together, or ``None`` to choose by their size.

        Raises:
            TypeError: If ``stack_size`` is no integer, or the observation space is of another kind.
            ValueError: If ``stack_size`` is below 1, ``padding_type`` is neither a known word nor an instance
                of the observation space, the codec is unknown, or ``frames_per_chunk`` is below 1.
        """
        gym.utils.RecordConstructorArgs.__init__(
            self,
            **recorded(
                stack_size=stack_size,
                padding_type=padding_type,
                codec=codec,
                frames_per_chunk=frames_per_chunk,
            ),
        )
        gym.Wrapper.__init__(self, env)
        warn_if_compressed(env.observation_space, codec, frames_per_chunk)
        self._stack = ObservationStacker(
            env.observation_space,
            stack_size,
            padding_type,
            lambda box: FrameCompressor(box, codec=codec, frames_per_chunk=frames_per_chunk, keep=stack_size),
        )
        self.stack_size: int = self._stack.stack_size
        self.padding_type: str = self._stack.padding_type
        self.observation_space = self._stack.observation_space

    def step(self, action: Any) -> tuple[Any, SupportsFloat, bool, bool, dict[str, Any]]:
        """Steps through the environment and appends the observation to the stack.

        Raises:
            ValueError: If the observation does not fit the environment's observation space.
        """
        observation, reward, terminated, truncated, info = self.env.step(action)
        return self._stack.push(self._stack.take(observation)), reward, terminated, truncated, info

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Resets the environment; the stack is the padding and the first observation.

        Raises:
            ValueError: If the observation does not fit the environment's observation space.
        """
        observation, info = self.env.reset(seed=seed, options=options)
        return self._stack.restart(self._stack.take(observation)), info

    def close(self) -> None:
        """Closes the environment and compresses the newest frames, which were raw so far."""
        try:
            self._stack.seal()
        finally:
            super().close()
