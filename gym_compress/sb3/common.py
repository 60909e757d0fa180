"""What the buffers for Stable-Baselines3 have in common."""

from __future__ import annotations

from typing import Any

import numpy as np
from gymnasium import spaces

from gym_compress.replay.leaves import make_store, make_twin
from gym_compress.replay.store import ObservationStore
from gym_compress.tree import map_leaves

__all__ = ["Sized", "with_stores"]


class Sized:
    """What all buffers have in common: how much they take."""

    observations: Any
    next_observations: Any

    @property
    def nbytes(self) -> int:
        """Bytes that SB3's arrays would take."""
        return sum(value.nbytes for value in self._values())

    @property
    def cbytes(self) -> int:
        """Bytes of the compressed chunks, the references to them, and the arrays."""
        return sum(getattr(value, "cbytes", value.nbytes) for value in self._values())

    def _values(self) -> list[Any]:
        values = list(vars(self).values())
        values += [leaf for value in values if isinstance(value, dict) for leaf in value.values()]
        return [value for value in values if isinstance(value, (ObservationStore, np.ndarray))]


def with_stores(buffer: Any, rows: int, compression: dict[str, Any]) -> None:
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
