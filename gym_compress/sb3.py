"""Stable-Baselines3's buffers with compressed observations: thin, they hold stores where SB3 holds arrays.

Hand them to an algorithm as ``replay_buffer_class=`` or ``rollout_buffer_class=``. They draw from
``np.random`` in SB3's order, so every batch, and all that is trained on it, equals SB3's own.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from stable_baselines3.common import buffers
from stable_baselines3.common.type_aliases import DictReplayBufferSamples, ReplayBufferSamples
from stable_baselines3.common.vec_env import VecNormalize
from stable_baselines3.her import HerReplayBuffer

from gym_compress.codec import Codec
from gym_compress.replay.buffer import transition_arrays
from gym_compress.replay.store import ObservationStore, fit_batch, make_store, make_twin, read_pair
from gym_compress.tree import map_leaves

__all__ = [
    "CompressedDictReplayBuffer",
    "CompressedDictRolloutBuffer",
    "CompressedHerReplayBuffer",
    "CompressedNStepReplayBuffer",
    "CompressedReplayBuffer",
    "CompressedRolloutBuffer",
]


class CompressedReplayBuffer(buffers.ReplayBuffer):
    """SB3's ``ReplayBuffer``, hundreds of times smaller for images.

    All is as in :class:`stable_baselines3.common.buffers.ReplayBuffer`, with these differences:

    - ``next_observations`` are kept as they came, so ``optimize_memory_usage`` changes nothing that is stored
    and goes
      together with ``handle_timeout_termination``. With it, rows are drawn as SB3 draws them: never the one
      at ``pos``.
    - An observation of a wrong shape, or of a dtype that does not cast, is a ValueError, and the buffer is as
    it was.

    Args:
        buffer_size: How many transitions are kept, of all environments together.
        observation_space: The space of one observation.
        action_space: The space of one action.
        device: Where samples go.
        n_envs: The number of environments.
        optimize_memory_usage: See above.
        handle_timeout_termination: Whether ``"TimeLimit.truncated"`` in the infos makes a done no
            termination.
        stack_size: How many frames an observation stacks, or ``"auto"``; see
            :class:`gym_compress.replay.store.ObservationStore`.
        stack_axis: The axis along which they are stacked.
        codec: A :class:`gym_compress.Codec`, its string, or ``"auto"``.
        frames_per_chunk: Frames compressed together, or ``None`` to choose by their size.
        **kwargs: Arguments of a subclass of SB3's.

    Raises:
        ValueError: If ``buffer_size`` is below 1, or an argument does not suit the observation space.
    """

    def __init__(
        self,
        buffer_size: int,
        observation_space: spaces.Space[Any],
        action_space: spaces.Space[Any],
        device: torch.device | str = "auto",
        n_envs: int = 1,
        optimize_memory_usage: bool = False,
        handle_timeout_termination: bool = True,
        *,
        stack_size: int | str = "auto",
        stack_axis: int = 0,
        codec: str | Codec = "auto",
        frames_per_chunk: int | None = None,
        **kwargs: Any,
    ) -> None:
        rows = _rows(buffer_size, n_envs)
        super().__init__(
            n_envs,  # one row of arrays, which stores replace
            observation_space,
            action_space,
            device,
            n_envs=n_envs,
            handle_timeout_termination=handle_timeout_termination,
            **kwargs,
        )
        self.optimize_memory_usage = optimize_memory_usage
        compression = {"stack_size": stack_size, "stack_axis": stack_axis}
        _replace(self, rows, compression | {"codec": codec, "frames_per_chunk": frames_per_chunk})

    def add(self, obs: Any, next_obs: Any, action: Any, reward: Any, done: Any, infos: Any) -> None:
        """Stores a transition of each environment, as SB3's does."""
        row = self.pos
        obs = _fitted(self.observations, obs)
        next_obs = _fitted(self.next_observations, next_obs)
        rest = transition_arrays(self, action, reward, done, infos)
        self.observations[row] = obs
        self.next_observations[row] = next_obs
        _finish_row(self, rest)

    def _get_samples(self, batch_inds: Any, env: VecNormalize | None = None) -> ReplayBufferSamples:
        rows, envs = batch_inds, np.random.randint(0, high=self.n_envs, size=(len(batch_inds),))  # noqa: NPY002
        obs, next_obs = read_pair(self.observations, self.next_observations, rows, envs)
        actions, dones, rewards = _scalars(self, rows, envs, env)
        data = self._normalize_obs(obs, env), actions, self._normalize_obs(next_obs, env), dones, rewards
        return ReplayBufferSamples(*[_tensor(self, array) for array in data])


class CompressedNStepReplayBuffer(CompressedReplayBuffer, buffers.NStepReplayBuffer):
    """SB3's ``NStepReplayBuffer`` with compressed observations; also takes ``n_steps`` and ``gamma``."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.optimize_memory_usage:
            raise NotImplementedError(
                "CompressedNStepReplayBuffer doesn't support optimize_memory_usage=True"
            )

    _get_samples = buffers.NStepReplayBuffer._get_samples


class CompressedDictReplayBuffer(buffers.DictReplayBuffer):
    """SB3's ``DictReplayBuffer``; the images among the observations are compressed.

    The arguments are those of :class:`CompressedReplayBuffer`.
    """

    def __init__(
        self,
        buffer_size: int,
        observation_space: spaces.Dict,
        action_space: spaces.Space[Any],
        device: torch.device | str = "auto",
        n_envs: int = 1,
        optimize_memory_usage: bool = False,
        handle_timeout_termination: bool = True,
        *,
        stack_size: int | str = "auto",
        stack_axis: int = 0,
        codec: str | Codec = "auto",
        frames_per_chunk: int | None = None,
    ) -> None:
        rows = _rows(buffer_size, n_envs)
        super().__init__(
            n_envs,
            observation_space,
            action_space,
            device,
            n_envs,
            optimize_memory_usage,
            handle_timeout_termination,
        )
        compression = {"stack_size": stack_size, "stack_axis": stack_axis}
        _replace(self, rows, compression | {"codec": codec, "frames_per_chunk": frames_per_chunk})

    def add(self, obs: Any, next_obs: Any, action: Any, reward: Any, done: Any, infos: Any) -> None:
        """Stores a transition of each environment, as SB3's does."""
        row = self.pos
        obs = {key: _fitted(store, obs[key]) for key, store in self.observations.items()}
        next_obs = {key: _fitted(store, next_obs[key]) for key, store in self.next_observations.items()}
        rest = transition_arrays(self, action, reward, done, infos)
        for key in obs:
            self.observations[key][row] = obs[key]
            self.next_observations[key][row] = next_obs[key]
        _finish_row(self, rest)

    def _get_samples(  # type: ignore[override]
        self, batch_inds: Any, env: VecNormalize | None = None
    ) -> DictReplayBufferSamples:
        rows, envs = batch_inds, np.random.randint(0, high=self.n_envs, size=(len(batch_inds),))  # noqa: NPY002
        pairs = {
            key: read_pair(store, self.next_observations[key], rows, envs)
            for key, store in self.observations.items()
        }
        obs, next_obs = ({key: pair[i] for key, pair in pairs.items()} for i in (0, 1))
        actions, dones, rewards = (_tensor(self, array) for array in _scalars(self, rows, envs, env))
        return DictReplayBufferSamples(
            observations=self._tensors(self._normalize_obs(obs, env)),
            actions=actions,
            next_observations=self._tensors(self._normalize_obs(next_obs, env)),
            dones=dones,
            rewards=rewards,
        )

    def _tensors(self, arrays: Any) -> dict[str, torch.Tensor]:
        return {key: _tensor(self, array) for key, array in arrays.items()}


class CompressedHerReplayBuffer(HerReplayBuffer, CompressedDictReplayBuffer):
    """SB3's ``HerReplayBuffer``; the images among the observations are compressed.

    The arguments are SB3's; how images are compressed is chosen by their size.
    """


class _CompressedRollout:
    """What the rollout buffers have in common: stores in the place of arrays, made anew for each rollout."""

    buffer_size: int

    def __init__(
        self,
        *args: Any,
        stack_size: int | str = "auto",
        stack_axis: int = 0,
        codec: str | Codec = "auto",
        frames_per_chunk: int | None = None,
        **kwargs: Any,
    ) -> None:
        self._compression = {
            "stack_size": stack_size,
            "stack_axis": stack_axis,
            "codec": codec,
            "frames_per_chunk": frames_per_chunk,
        }
        super().__init__(*args, **kwargs)

    def reset(self) -> None:
        """Empties the buffer."""
        rows, self.buffer_size = self.buffer_size, 1
        super().reset()  # type: ignore[misc]
        _replace(self, rows, self._compression)

    @staticmethod
    def swap_and_flatten(arr: Any) -> Any:
        """``[steps, envs, ...]`` as ``[envs * steps, ...]``; of a store, a view that gathers."""
        if isinstance(arr, ObservationStore):
            return arr.flattened()
        return buffers.BaseBuffer.swap_and_flatten(arr)


class CompressedRolloutBuffer(_CompressedRollout, buffers.RolloutBuffer):
    """SB3's ``RolloutBuffer`` with compressed observations.

    The arguments are SB3's, and ``stack_size``, ``stack_axis``, ``codec`` and ``frames_per_chunk`` as in
    :class:`CompressedReplayBuffer`.
    """


class CompressedDictRolloutBuffer(_CompressedRollout, buffers.DictRolloutBuffer):
    """SB3's ``DictRolloutBuffer``; the images among the observations are compressed.

    The arguments are those of :class:`CompressedRolloutBuffer`.
    """


def _rows(buffer_size: int, n_envs: int) -> int:
    if buffer_size < 1 or n_envs < 1:
        raise ValueError(f"buffer_size and n_envs are at least 1, got {buffer_size} and {n_envs}")
    return max(buffer_size // n_envs, 1)


def _replace(buffer: Any, rows: int, compression: dict[str, Any]) -> None:
    """Gives a buffer of one row, as SB3 made it, all its rows, and stores where images are kept."""
    space, shape = buffer.observation_space, buffer.obs_shape
    buffer.buffer_size = rows
    for name, value in list(vars(buffer).items()):
        if isinstance(value, np.ndarray) and "observations" not in name:
            setattr(buffer, name, np.zeros((rows, *value.shape[1:]), value.dtype))

    def store(leaf: spaces.Space[Any], leaf_shape: tuple[int, ...]) -> Any:
        kept = make_store(rows, buffer.n_envs, leaf, **compression)
        if isinstance(kept, ObservationStore):
            return kept
        return np.zeros((rows, buffer.n_envs, *leaf_shape), leaf.dtype)

    if isinstance(space, spaces.Dict):
        buffer.observations = {key: store(leaf, shape[key]) for key, leaf in space.spaces.items()}
    else:
        buffer.observations = store(space, shape)
    if hasattr(buffer, "next_observations"):
        buffer.next_observations = map_leaves(make_twin, buffer.observations)


def _fitted(store: Any, batch: Any) -> Any:
    """A batch as it can be written; a batch of numbers gains the axis that SB3 gives them."""
    if isinstance(store, np.ndarray) and np.size(batch) == math.prod(store.shape[1:]):
        batch = np.asarray(batch).reshape(store.shape[1:])
    return fit_batch(batch, store.shape[1], store.shape[2:], store.dtype)


def _finish_row(buffer: Any, rest: tuple[Any, Any, Any, Any]) -> None:
    row = buffer.pos
    buffer.actions[row], buffer.rewards[row], buffer.dones[row], buffer.timeouts[row] = rest
    buffer.pos = (row + 1) % buffer.buffer_size
    buffer.full |= buffer.pos == 0


def _scalars(buffer: Any, rows: Any, envs: Any, env: VecNormalize | None) -> tuple[Any, Any, Any]:
    """Actions, dones that are no timeouts, and rewards, each with an axis for the batch and one more."""
    index = rows * buffer.n_envs + envs
    dones = buffer.dones.take(index) * (1 - buffer.timeouts.take(index))
    rewards = buffer._normalize_reward(buffer.rewards.take(index)[:, None], env)
    actions = buffer.actions.reshape(-1, buffer.actions.shape[2]).take(index, axis=0)
    return actions, dones[:, None], rewards


def _tensor(buffer: Any, array: Any) -> torch.Tensor:
    """A tensor over the memory of an array, which nobody else holds; a copy of it on another device."""
    return torch.from_numpy(array).to(buffer.device)
