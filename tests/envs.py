"""Environments for tests: any observation space, output buffers that are used again or not."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces

from gym_compress import CompressedObservation
from gym_compress.recorder import Recorder
from gym_compress.slicing import Slicing
from gym_compress.wrappers.compress import compress

PIXELS = spaces.Box(0, 255, (24, 20), np.uint8)


def compressor(
    space: spaces.Box, frames_per_chunk: int | None = None
) -> Callable[[Any], CompressedObservation]:
    """What compresses the frames of a stream, one after another."""
    recorder = Recorder(Slicing(space.shape, space.dtype, 1), frames_per_chunk=frames_per_chunk)
    return lambda frame: compress(recorder, frame)


class AnyEnv(gym.Env[Any, Any]):
    """Observations drawn from any space, in episodes of given lengths.

    Args:
        space: The observation space.
        episodes: Lengths of the episodes in steps, in a cycle; they end by termination and truncation in
            turn.
        reuse: Whether each observation is written into the arrays of the one before.
    """

    metadata = {"render_modes": []}

    def __init__(
        self, space: spaces.Space[Any] = PIXELS, episodes: tuple[int, ...] = (5, 3), reuse: bool = False
    ) -> None:
        self.observation_space = copy.deepcopy(space)
        self.action_space = spaces.Discrete(3)
        self.episodes, self.reuse = episodes, reuse
        self.episode = -1
        self._last: Any = None

    def _draw(self) -> Any:
        drawn = self.observation_space.sample()
        if self.reuse and self._last is not None:
            drawn = _write(self._last, drawn)
        self._last = drawn
        return drawn if self.reuse else copy.deepcopy(drawn)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        if seed is not None:
            self.observation_space.seed(seed)
            self.episode = -1
        self.episode += 1
        self.left = self.episodes[self.episode % len(self.episodes)]
        return self._draw(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.left -= 1
        done = self.left == 0
        return self._draw(), 0.0, done and self.episode % 2 == 0, done and self.episode % 2 == 1, {}


def _write(old: Any, new: Any) -> Any:
    if isinstance(old, dict):
        return {key: _write(old[key], new[key]) for key in old}
    if type(old) is tuple and len(old) == len(new):
        return tuple(_write(a, b) for a, b in zip(old, new, strict=True))
    if isinstance(old, np.ndarray) and old.shape == new.shape:
        old[...] = new
        return old
    return new


class MovingSquare(gym.Env[Any, Any]):
    """A white square that moves over a black image: frames that compress."""

    observation_space = spaces.Box(0, 255, (84, 84), np.uint8)
    action_space = spaces.Discrete(4)

    def __init__(self, episode: int = 70) -> None:
        self.episode = episode

    def _draw(self) -> np.ndarray:
        image = np.zeros((84, 84), np.uint8)
        image[self.t % 70 : self.t % 70 + 10, (3 * self.t) % 70 : (3 * self.t) % 70 + 10] = 255
        return image

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.t = int(self.np_random.integers(1000)) if seed is not None else 0
        self.end = self.t + self.episode
        return self._draw(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.t += 1
        return self._draw(), 1.0, False, self.t >= self.end, {}


class Broken(gym.Env[Any, Any]):
    """Cannot be made."""

    def __init__(self) -> None:
        raise RuntimeError("no camera")


class Growing(MovingSquare):
    """Its images are of another shape each time."""

    def _draw(self) -> np.ndarray:
        return np.zeros((84 + self.t, 84), np.uint8)


gym.register("MovingSquare-v0", entry_point="tests.envs:MovingSquare")
gym.register("Broken-v0", entry_point="tests.envs:Broken")
gym.register("Growing-v0", entry_point="tests.envs:Growing", disable_env_checker=True)


def play(env: gym.Env[Any, Any], steps: int, seed: int = 3) -> list[Any]:
    """Observations of a fixed run, resets included."""
    observation, _ = env.reset(seed=seed)
    seen = [observation]
    for step in range(steps):
        observation, _, terminated, truncated, _ = env.step(step % 3)
        seen.append(observation)
        if terminated or truncated:
            seen.append(env.reset()[0])
    return seen


def assert_same(actual: Any, expected: Any) -> None:
    """Both have the same structure, shapes and dtypes, and the same bits."""
    if isinstance(expected, dict):
        assert actual.keys() == expected.keys()
        for key in expected:
            assert_same(actual[key], expected[key])
    elif isinstance(expected, tuple):
        assert len(actual) == len(expected)
        for a, e in zip(actual, expected, strict=True):
            assert_same(a, e)
    else:
        a, e = np.asarray(actual), np.asarray(expected)
        assert (a.shape, a.dtype) == (e.shape, e.dtype)
        if e.dtype.kind in "f":
            assert np.array_equal(np.signbit(a), np.signbit(e))
        np.testing.assert_array_equal(a, e, strict=True)
