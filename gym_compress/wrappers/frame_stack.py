"""``CompressedFrameStack``: the last observations of an environment as one, sharing their frames."""

from __future__ import annotations

import copy
from collections import deque
from typing import Any, SupportsFloat

import gymnasium as gym
import numpy as np
from gymnasium import spaces
from gymnasium.vector.utils import batch_space, concatenate, create_empty_array
from gymnasium.wrappers.utils import create_zero_array
from numpy.typing import NDArray

from gym_compress.codec import Codec
from gym_compress.observation import CompressedObservation
from gym_compress.recorder import Recorder
from gym_compress.slicing import Slicing
from gym_compress.spaces import compressed_space, fit, map_compressed
from gym_compress.tree import map_leaves, map_space
from gym_compress.wrappers.compress import json_arguments

__all__ = ["CompressedFrameStack", "ObservationStacker"]


class _PlainStacker:
    """Stacks a leaf that is not compressed, as Gymnasium does."""

    def __init__(self, space: spaces.Space[Any], stack_size: int) -> None:
        self._space = space
        self._queue: deque[Any] = deque(maxlen=stack_size)
        self._of_arrays = isinstance(create_empty_array(space, stack_size), np.ndarray)

    def accept(self, observation: Any) -> Any:
        if self._of_arrays and self._space.shape is not None and self._space.dtype is not None:
            return np.array(fit(observation, self._space.shape, self._space.dtype))
        return copy.deepcopy(observation)

    def restart(self, filler: Any, observation: Any) -> Any:
        self._queue.extend([filler] * (self._queue.maxlen or 0))
        return self.push(observation)

    def push(self, observation: Any) -> Any:
        self._queue.append(observation)
        out: Any = create_empty_array(self._space, len(self._queue))
        stacked = concatenate(self._space, self._queue, out)
        return stacked if self._of_arrays else copy.deepcopy(stacked)

    def seal(self) -> None:
        pass


class _FrameStacker:
    """Stacks a leaf by recording it: a stack is what was recorded last."""

    def __init__(self, space: spaces.Box, stack_size: int, **compression: Any) -> None:
        self._shape, self._dtype = space.shape, np.dtype(space.dtype.type)
        slicing = Slicing((stack_size, *space.shape), self._dtype, stack_size)
        self._recorder = Recorder(slicing, **compression)

    def accept(self, observation: Any) -> NDArray[Any]:
        return fit(observation, self._shape, self._dtype)

    def restart(self, filler: NDArray[Any], observation: NDArray[Any]) -> CompressedObservation:
        slicing = self._recorder.slicing
        stack: NDArray[Any] = np.empty((1, *slicing.shape), slicing.dtype)
        stack[0, :-1], stack[0, -1] = filler, observation
        self._recorder.record(slicing.cut(stack)[0])
        return self._stacked()

    def push(self, observation: NDArray[Any]) -> CompressedObservation:
        self._recorder.append(observation[None])
        return self._stacked()

    def _stacked(self) -> CompressedObservation:
        return CompressedObservation(*self._recorder.newest())

    def seal(self) -> None:
        self._recorder.seal()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "newest": self._stacked().detach()}  # which the recorder's copy lacks

    def __setstate__(self, state: dict[str, Any]) -> None:
        newest = np.asarray(state.pop("newest"))
        self.__dict__.update(state)
        self._recorder.record(self._recorder.slicing.cut(newest[None])[0])


class ObservationStacker:
    """The last ``stack_size`` observations of an environment as one, for each leaf of its space.

    Args:
        space: The observation space.
        stack_size: How many observations are stacked.
        padding_type: ``"reset"``, ``"zero"`` or an observation, see :class:`CompressedFrameStack`.
        compression: How leaves are compressed, see :class:`gym_compress.recorder.Recorder`.

    Raises:
        TypeError: If ``stack_size`` is no integer, or the observation space is of another kind.
        ValueError: If another argument is out of its range.
    """

    def __init__(
        self,
        space: spaces.Space[Any],
        stack_size: int,
        padding_type: str | Any,
        **compression: Any,
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
        # a tree of the space: what stacks a leaf if it is compressed, else None
        self.compressed = map_compressed(
            lambda box: _FrameStacker(box, self.stack_size, **compression), space
        )
        self._stackers = map_leaves(
            lambda stacker, leaf: stacker or _PlainStacker(leaf, self.stack_size),
            self.compressed,
            map_space(lambda leaf: leaf, space),
        )
        self._padding = self.accept(copy.deepcopy(padding))
        self.restart(self._padding)
        self.observation_space = compressed_space(batch_space(space, n=self.stack_size), self.compressed)

    def accept(self, observation: Any) -> Any:
        """An observation as it can be stacked at once; nothing changes yet.

        Raises:
            ValueError: If it does not fit the space.
        """
        return map_leaves(lambda stacker, leaf: stacker.accept(leaf), self._stackers, observation)

    def push(self, frame: Any) -> Any:
        """Appends what :meth:`accept` gave, drops the oldest, and returns the stack."""
        return map_leaves(lambda stacker, leaf: stacker.push(leaf), self._stackers, frame)

    def restart(self, frame: Any) -> Any:
        """Fills the stack with the padding, and appends the first observation of an episode."""
        filler = frame if self.padding_type == "reset" else self._padding
        return map_leaves(lambda stacker, *leaves: stacker.restart(*leaves), self._stackers, filler, frame)

    def seal(self) -> None:
        """Compresses the frames that are raw so far."""
        map_leaves(lambda stacker: stacker.seal(), self._stackers)


class CompressedFrameStack(gym.Wrapper[Any, Any, Any, Any], gym.utils.RecordConstructorArgs):
    """Stacks the observations of the last ``stack_size`` steps, each frame kept once and compressed.

    The observations equal those of :class:`gymnasium.wrappers.FrameStackObservation`, but are
    :class:`gym_compress.CompressedObservation`: references to frames, of which neighbours share all but one.
    The same leaves of an observation are compressed as by :class:`gym_compress.CompressObservation`; the
    others are stacked into arrays.

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
            **json_arguments(
                stack_size=stack_size,
                padding_type=padding_type,
                codec=codec,
                frames_per_chunk=frames_per_chunk,
            ),
        )
        gym.Wrapper.__init__(self, env)
        self._stack = ObservationStacker(
            env.observation_space, stack_size, padding_type, codec=codec, frames_per_chunk=frames_per_chunk
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
        return self._stack.push(self._stack.accept(observation)), reward, terminated, truncated, info

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Resets the environment; the stack is the padding and the first observation.

        Raises:
            ValueError: If the observation does not fit the environment's observation space.
        """
        observation, info = self.env.reset(seed=seed, options=options)
        return self._stack.restart(self._stack.accept(observation)), info

    def close(self) -> None:
        """Closes the environment and compresses the newest frames, which were raw so far."""
        try:
            self._stack.seal()
        finally:
            super().close()
