"""Stable-Baselines3's replay buffers with compressed observations."""

from __future__ import annotations

from typing import Any, Self

import numpy as np
import torch
from gymnasium import spaces
from stable_baselines3.common import buffers
from stable_baselines3.common.type_aliases import DictReplayBufferSamples, ReplayBufferSamples
from stable_baselines3.common.utils import get_device
from stable_baselines3.common.vec_env import VecNormalize
from stable_baselines3.her import HerReplayBuffer
from stable_baselines3.her.goal_selection_strategy import KEY_TO_GOAL_STRATEGY

from gym_compress.codec import Codec
from gym_compress.errors import CorruptDataError, positive
from gym_compress.replay.file.checkpoint import CheckpointMixin
from gym_compress.replay.samples import ReplaySamples, gather_samples, to_device
from gym_compress.replay.store import Compression, ObservationStore, read_places
from gym_compress.replay.transitions import Transition, Transitions

__all__ = [
    "CompressedDictReplayBuffer",
    "CompressedHerReplayBuffer",
    "CompressedNStepReplayBuffer",
    "CompressedReplayBase",
    "CompressedReplayBuffer",
]


class CompressedReplayBase(CheckpointMixin, buffers.ReplayBuffer):
    """What the replay buffers have in common: the table of transitions in the place of SB3's arrays."""

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
        positive(buffer_size, "buffer_size"), positive(n_envs, "n_envs")
        self.table = Transitions(
            max(buffer_size // n_envs, 1),
            n_envs,
            observation_space,
            action_space,
            Compression(stack_size, stack_axis, codec, frames_per_chunk),
        )
        super().__init__(
            n_envs,  # one row of arrays, in whose place those of the table come
            observation_space,
            action_space,
            device=device,
            n_envs=n_envs,
            handle_timeout_termination=handle_timeout_termination,
            **kwargs,
        )
        self.optimize_memory_usage = optimize_memory_usage
        self.use_table(self.table)

    def add(self, obs: Any, next_obs: Any, action: Any, reward: Any, done: Any, infos: Any) -> None:
        """Stores a transition of each environment: SB3's arguments, and the errors of the neutral buffer.

        See :meth:`gym_compress.CompressedReplayBuffer.add`.
        """
        transition = self._fitted(obs, next_obs, action, reward, done, infos)
        self.make_room()
        self.table.add(transition)

    def _fitted(self, *transition: Any) -> Transition:
        """A transition as it can be written; an error if it cannot."""
        return self.table.fit(*transition, timeouts=self.handle_timeout_termination)

    @classmethod
    def check_loadable(cls, settings: dict[str, Any], space: spaces.Space[Any], device: Any) -> None:
        """Raises an error if the class cannot hold what a file holds, or the device is none."""
        get_device(device)
        expects_dict = issubclass(cls, buffers.DictReplayBuffer)
        leaves = space.spaces.values() if isinstance(space, spaces.Dict) else [space]
        nested = any(isinstance(leaf, (spaces.Dict, spaces.Tuple)) for leaf in leaves)
        if (
            expects_dict != isinstance(space, spaces.Dict)
            or (expects_dict and nested)
            or (nested and len(leaves) == 1)
        ):
            raise ValueError(f"{cls.__name__} cannot hold what was saved, observations of {space}")

    @classmethod
    def from_settings(cls, settings: dict[str, Any], arguments: dict[str, Any]) -> Self:
        """An empty buffer, from the settings of a file and the arguments that all classes have."""
        if cls is not CompressedReplayBuffer:  # which alone has two ways to draw rows
            arguments = {**arguments, "optimize_memory_usage": False}
        return super().from_settings(settings, arguments)

    def reset(self) -> None:
        """Empties the buffer."""
        super().reset()
        self.table.clear()

    def sample(self, batch_size: int, env: VecNormalize | None = None) -> Any:
        """Draws a batch as SB3 does.

        Raises:
            ValueError: If the buffer is empty.
        """
        if not self.table.holds_any():
            raise ValueError("Expected a buffer that holds transitions, but nothing was added yet")
        return super().sample(batch_size, env)

    def _whole_rows(self, rows: Any) -> Any:
        """Rows as SB3 draws them; in the place of one that an interrupt left half written, another."""
        valid = self.table.valid
        while not valid[rows].all():
            half = np.flatnonzero(~valid[rows].all(axis=1))
            rows[half] = np.random.randint(0, self.size(), size=half.size)  # noqa: NPY002
        return rows

    def _fields(self, rows: Any, env: VecNormalize | None) -> ReplaySamples:
        """Draws environments as SB3 does, and gathers the fields of a batch in SB3's order, as tensors."""
        rows = self._whole_rows(rows)
        envs = np.random.randint(0, high=self.n_envs, size=(len(rows),))  # noqa: NPY002
        return gather_samples(self.table, rows, envs, env=env, device=self.device)


class CompressedReplayBuffer(CompressedReplayBase):
    """SB3's ``ReplayBuffer``, hundreds of times smaller for images.

    All is as in :class:`stable_baselines3.common.buffers.ReplayBuffer`, with these differences:

    - ``next_observations`` are kept as they came, so ``optimize_memory_usage`` changes nothing that is
      stored and goes together with ``handle_timeout_termination``. With it, rows are drawn as SB3 draws
      them: never the one at ``pos``.
    - An observation of a wrong shape, or of a dtype that does not cast, is a ValueError, and the buffer is
      as it was.
    - ``save(path)`` and ``load(path, device=, lazy=)`` write and read replay files, which each class here and
      :class:`gym_compress.CompressedReplayBuffer` can load. Rows are drawn from ``np.random``, whose state is
      not in the file.

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

    def _get_samples(self, batch_inds: Any, env: VecNormalize | None = None) -> ReplayBufferSamples:
        return ReplayBufferSamples(*self._fields(batch_inds, env))


class CompressedNStepReplayBuffer(CompressedReplayBase, buffers.NStepReplayBuffer):
    """SB3's ``NStepReplayBuffer`` with compressed observations.

    The arguments are those of :class:`CompressedReplayBuffer` but for ``optimize_memory_usage``, which SB3
    does not support here, and ``n_steps`` and ``gamma``. SB3 hands neither to a class that is named: an
    algorithm with ``n_steps=5`` needs ``replay_buffer_kwargs={"n_steps": 5, "gamma": 0.99}`` beside it. A
    replay file has both if this class saved it; loaded from another's, they are SB3's defaults, 3 and 0.99.
    """

    file_arguments = {"n_steps": int, "gamma": float}

    @classmethod
    def from_settings(cls, settings: dict[str, Any], arguments: dict[str, Any]) -> Self:
        """An empty buffer, from the settings of a file and the arguments that all classes have."""
        buffer = super().from_settings(settings, arguments)
        if not (0 < buffer.n_steps <= max(buffer.buffer_size, 3) and 0 <= buffer.gamma <= 1):
            raise CorruptDataError(f"n_steps is {buffer.n_steps}, and gamma {buffer.gamma}")
        return buffer

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.optimize_memory_usage:
            raise NotImplementedError(
                "CompressedNStepReplayBuffer doesn't support optimize_memory_usage=True"
            )

    def _get_samples(self, batch_inds: Any, env: VecNormalize | None = None) -> ReplayBufferSamples:
        rows = self._whole_rows(batch_inds)
        if not isinstance(self.observations, ObservationStore):
            return super()._get_samples(rows, env)
        # SB3 finds out which places it wants; what stands there is read at once, when it has found out
        stores = self.observations, self.next_observations
        self.observations, self.next_observations = map(_Asked, stores)
        try:
            samples: Any = super()._get_samples(rows, env)
        finally:
            self.observations, self.next_observations = stores
        read = read_places(samples.observations.places, samples.next_observations.places)
        obs, next_obs = to_device(tuple(self._normalize_obs(array, env) for array in read), self.device)
        replaced: ReplayBufferSamples = samples._replace(observations=obs, next_observations=next_obs)
        return replaced

    @staticmethod
    def _normalize_obs(obs: Any, env: VecNormalize | None = None) -> Any:
        return obs if isinstance(obs, _Asked) else buffers.ReplayBuffer._normalize_obs(obs, env)

    def to_torch(self, array: Any, copy: bool = True) -> Any:
        """A tensor with the values of an array, as SB3's."""
        return array if isinstance(array, _Asked) else super().to_torch(array, copy)


class CompressedDictReplayBuffer(CompressedReplayBase, buffers.DictReplayBuffer):
    """SB3's ``DictReplayBuffer``; the images among the observations are compressed.

    The arguments are those of :class:`CompressedReplayBuffer` but for ``optimize_memory_usage``, which SB3
    does not support here.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        assert not self.optimize_memory_usage, "DictReplayBuffer does not support optimize_memory_usage"

    def _get_samples(  # type: ignore[override]
        self, batch_inds: Any, env: VecNormalize | None = None
    ) -> DictReplayBufferSamples:
        return DictReplayBufferSamples(*self._fields(batch_inds, env))


class CompressedHerReplayBuffer(HerReplayBuffer, CompressedDictReplayBuffer):
    """SB3's ``HerReplayBuffer``; the images among the observations are compressed.

    The arguments are SB3's; how images are compressed is chosen by their size. After :meth:`load`, call
    ``set_env(env)``, and ``truncate_last_trajectory()`` if the environment begins a new episode, as SB3's
    ``load_replay_buffer`` does.
    """

    file_arguments = {"n_sampled_goal": int}

    def add(self, obs: Any, next_obs: Any, action: Any, reward: Any, done: Any, infos: Any) -> None:
        """Stores a transition of each environment; see :meth:`CompressedDictReplayBuffer.add`."""
        # SB3 forgets the row's old episode before it writes, so what is refused is refused here
        self._fitted(obs, next_obs, action, reward, done, infos)
        self.make_room()
        super().add(obs, next_obs, action, reward, done, infos)

    def file_settings(self) -> dict[str, Any]:
        """What a replay file says of the buffer."""
        if self.copy_info_dict:
            raise TypeError("A replay file cannot hold infos, which copy_info_dict=True keeps")
        strategy = self.goal_selection_strategy.name.lower()
        starts = self._current_ep_start.tolist()
        return {**super().file_settings(), "goal_selection_strategy": strategy, "current_ep_start": starts}

    def file_arrays(self) -> dict[str, Any]:
        """The arrays of a file with one row for each of the buffer, by name, but for references."""
        return {**super().file_arrays(), "ep_start": self.ep_start, "ep_length": self.ep_length}

    @classmethod
    def check_loadable(cls, settings: dict[str, Any], space: spaces.Space[Any], device: Any) -> None:
        """Raises an error if the class cannot hold what a file holds, or the device is none."""
        super().check_loadable(settings, space, device)
        if "current_ep_start" not in settings:
            raise ValueError(f"{cls.__name__} needs episodes, which the buffer that was saved had none of")

    @classmethod
    def from_settings(cls, settings: dict[str, Any], arguments: dict[str, Any]) -> Self:
        """An empty buffer, from the settings of a file and the arguments that all classes have."""
        strategy = settings.get("goal_selection_strategy")
        if strategy not in KEY_TO_GOAL_STRATEGY:
            raise CorruptDataError(f"{strategy!r} is no strategy to select goals")
        theirs = {name: value for name, value in arguments.items() if name not in Compression._fields}
        theirs |= {"env": None, "goal_selection_strategy": strategy}
        return super().from_settings(settings, theirs)

    def restore(self, settings: dict[str, Any]) -> None:
        """Restores where the episodes began that are under way."""
        rows, starts = self.buffer_size, np.array(settings["current_ep_start"])
        places = starts, self.ep_start
        if starts.shape != (self.n_envs,) or any(((place < 0) | (place >= rows)).any() for place in places):
            raise CorruptDataError("episodes begin where there is no row")
        if ((self.ep_length < 0) | (self.ep_length > rows)).any():
            raise CorruptDataError("episodes are longer than the buffer")
        self._current_ep_start[:] = starts


class _Asked:
    """In the place of a store, notes which places are asked for."""

    def __init__(self, store: ObservationStore) -> None:
        self._store = store
        self.places: Any = None

    def __getitem__(self, places: Any) -> _Asked:
        self.places = (self._store, *places)
        return self
