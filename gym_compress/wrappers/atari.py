"""``CompressedAtariPreprocessing``: Gymnasium's preprocessing of Atari games, compressed."""

from __future__ import annotations

from typing import Any, SupportsFloat

import gymnasium as gym
from gymnasium.wrappers import AtariPreprocessing

from gym_compress.codec import Codec
from gym_compress.recorder import Recorder
from gym_compress.slicing import Slicing
from gym_compress.spaces import CompressedBox
from gym_compress.wrappers.compress import compress, json_arguments

__all__ = ["CompressedAtariPreprocessing"]


class CompressedAtariPreprocessing(AtariPreprocessing):
    """The preprocessing of Atari games by Machado et al. (2018), with compressed observations.

    All is as in :class:`gymnasium.wrappers.AtariPreprocessing`, which does the work, but an observation is a
    :class:`gym_compress.CompressedObservation`. For stacks, put :class:`gym_compress.CompressedFrameStack`
    over Gymnasium's ``AtariPreprocessing``.

    No vector version of the wrapper exists: ``ale_py.AtariVectorEnv`` preprocesses by itself.

    Example:
        >>> import ale_py
        >>> import gymnasium as gym
        >>> from gym_compress import CompressedAtariPreprocessing
        >>> gym.register_envs(ale_py)
        >>> env = CompressedAtariPreprocessing(gym.make("ALE/Pong-v5", frameskip=1))
        >>> obs, info = env.reset(seed=0)
        >>> obs.shape, obs.dtype
        ((84, 84), dtype('uint8'))

    Change logs:
     * v0.1.0 - Initially added
    """

    def __init__(
        self,
        env: gym.Env[Any, Any],
        noop_max: int = 30,
        frame_skip: int = 4,
        screen_size: int | tuple[int, int] = 84,
        terminal_on_life_loss: bool = False,
        grayscale_obs: bool = True,
        grayscale_newaxis: bool = False,
        scale_obs: bool = False,
        *,
        codec: str | Codec = "auto",
        frames_per_chunk: int | None = None,
    ) -> None:
        """Wraps an Atari environment that was made with ``frameskip=1``.

        Args:
            env: The environment.
            noop_max: The most no-ops at a reset; 0 for none.
            frame_skip: How many frames of the game make one step.
            screen_size: Width and height of an observation in pixels, or one number for both.
            terminal_on_life_loss: Whether losing a life terminates the episode.
            grayscale_obs: Whether an observation is grey, or RGB.
            grayscale_newaxis: Whether a grey observation has an axis of length 1 at its end.
            scale_obs: Whether an observation is float32 in [0, 1], or uint8. Floats need several times the
                memory.
            codec: A :class:`gym_compress.Codec`, its string such as ``"zstd:1"``, or ``"auto"``.
            frames_per_chunk: How many observations are compressed together, or ``None`` to choose by their
                size.

        Raises:
            gymnasium.error.DependencyNotInstalled: If opencv-python is not installed.
            TypeError: If an argument is of a wrong type.
            ValueError: If the environment skips frames itself, or an argument is out of its range.
        """
        gym.utils.RecordConstructorArgs.__init__(
            self,
            **json_arguments(
                noop_max=noop_max,
                frame_skip=frame_skip,
                screen_size=screen_size,
                terminal_on_life_loss=terminal_on_life_loss,
                grayscale_obs=grayscale_obs,
                grayscale_newaxis=grayscale_newaxis,
                scale_obs=scale_obs,
                codec=codec,
                frames_per_chunk=frames_per_chunk,
            ),
        )
        if isinstance(screen_size, list):  # a tuple that went through JSON
            screen_size = (screen_size[0], screen_size[1])
        super().__init__(
            env,
            noop_max,
            frame_skip,
            screen_size,
            terminal_on_life_loss,
            grayscale_obs,
            grayscale_newaxis,
            scale_obs,
        )
        space = self.observation_space
        assert isinstance(space, gym.spaces.Box)
        self._recorder = Recorder(
            Slicing(space.shape, space.dtype, 1), codec=codec, frames_per_chunk=frames_per_chunk
        )
        self.observation_space = CompressedBox.like(space)

    def step(self, action: Any) -> tuple[Any, SupportsFloat, bool, bool, dict[str, Any]]:
        """Takes ``frame_skip`` steps of the game; the observation is compressed."""
        observation, reward, terminated, truncated, info = super().step(action)
        return compress(self._recorder, observation), reward, terminated, truncated, info

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Resets the game; the observation is compressed."""
        observation, info = super().reset(seed=seed, options=options)
        return compress(self._recorder, observation), info

    def close(self) -> None:
        """Closes the environment and compresses the newest observations, which were raw so far."""
        try:
            self._recorder.seal()
        finally:
            super().close()
