"""Stable-Baselines3's rollout buffers with compressed observations."""

from __future__ import annotations

from typing import Any

from stable_baselines3.common import buffers

from gym_compress.codec import Codec
from gym_compress.replay.store import ObservationStore
from gym_compress.sb3.common import Sized, with_stores

__all__ = ["CompressedDictRolloutBuffer", "CompressedRolloutBuffer"]


class _CompressedRollout(Sized, buffers.RolloutBuffer):
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
        self._compression = {
            "stack_size": stack_size,
            "stack_axis": stack_axis,
            "codec": codec,
            "frames_per_chunk": frames_per_chunk,
        }
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
        with_stores(self, rows, self._compression)

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
