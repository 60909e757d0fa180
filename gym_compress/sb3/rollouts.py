"""Stable-Baselines3's rollout buffers with compressed observations."""

from __future__ import annotations

from typing import Any

import numpy as np
from stable_baselines3.common import buffers

from gym_compress.codec import Codec
from gym_compress.replay.store import Compression, ObservationStore
from gym_compress.replay.transitions import make_leaves

__all__ = ["CompressedDictRolloutBuffer", "CompressedRolloutBuffer"]


class _CompressedRollout(buffers.RolloutBuffer):
    """What the rollout buffers have in common: stores in the place of arrays, made anew for each rollout."""

    def __init__(
        self,
        *args: Any,
        stack_size: int | str = "auto",
        stack_axis: int = 0,
        codec: str | Codec = "auto",
        frames_per_chunk: int | None = None,
        **kwargs: Any,
    ) -> None:
        self._compression = Compression(stack_size, stack_axis, codec, frames_per_chunk)
        super().__init__(*args, **kwargs)

    def reset(self) -> None:
        """Empties the buffer."""
        rows = self.buffer_size
        if rows < 1 or self.n_envs < 1:
            raise ValueError(f"buffer_size and n_envs are at least 1, got {rows} and {self.n_envs}")
        try:
            self.buffer_size = 1
            super().reset()
        finally:
            self.buffer_size = rows
        for name, value in list(vars(self).items()):
            if isinstance(value, np.ndarray):
                setattr(self, name, np.zeros((rows, *value.shape[1:]), value.dtype))
        self.observations = make_leaves(rows, self.n_envs, self.observation_space, self._compression)

    @property
    def nbytes(self) -> int:
        """Bytes that SB3's arrays would take."""
        return sum(each.nbytes for each in self._kept())

    @property
    def cbytes(self) -> int:
        """Bytes of the compressed chunks, the references to them, and the arrays."""
        return sum(
            each.cbytes if isinstance(each, ObservationStore) else each.nbytes for each in self._kept()
        )

    def _kept(self) -> list[Any]:
        kept = [value for value in vars(self).values() if isinstance(value, np.ndarray)]
        if isinstance(self.observations, dict):
            return [*kept, *self.observations.values()]
        return kept if isinstance(self.observations, np.ndarray) else [*kept, self.observations]

    @staticmethod
    def swap_and_flatten(arr: Any) -> Any:
        """``[steps, envs, ...]`` as ``[envs * steps, ...]``; of a store, a view that gathers."""
        if isinstance(arr, ObservationStore):
            return arr.flattened()
        return buffers.BaseBuffer.swap_and_flatten(arr)


class CompressedRolloutBuffer(_CompressedRollout):
    """SB3's ``RolloutBuffer`` with compressed observations.

    The arguments are SB3's, and ``stack_size``, ``stack_axis``, ``codec`` and ``frames_per_chunk`` as in
    :class:`CompressedReplayBuffer`.
    """


class CompressedDictRolloutBuffer(_CompressedRollout, buffers.DictRolloutBuffer):
    """SB3's ``DictRolloutBuffer``; the images among the observations are compressed.

    The arguments are those of :class:`CompressedRolloutBuffer`.
    """
