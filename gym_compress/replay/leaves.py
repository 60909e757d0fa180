"""The leaves of observations in a buffer: stores of what is an image, arrays of the rest."""

from __future__ import annotations

from typing import Any, TypeGuard

import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from gym_compress.replay.store import ObservationStore
from gym_compress.stream import worth_compressing

__all__ = ["is_image", "make_store", "make_twin", "write_row"]


def is_image(space: spaces.Space[Any]) -> TypeGuard[spaces.Box]:
    """Whether a leaf of observations is kept in a store."""
    return isinstance(space, spaces.Box) and len(space.shape) >= 2 and worth_compressing(space)


def make_store(
    rows: int, n_envs: int, space: spaces.Space[Any], **kwargs: Any
) -> ObservationStore | NDArray[Any]:
    """What keeps a leaf of observations: a store if it is an image, else an array of zeros.

    Raises:
        TypeError: If observations of the space are no arrays of a fixed shape.
    """
    if is_image(space):
        return ObservationStore(rows, n_envs, space, **kwargs)
    if space.shape is None or space.dtype is None:
        raise TypeError(f"Expected a space of arrays of a fixed shape, actual: {space}")
    return np.zeros((rows, n_envs, *space.shape), space.dtype)


def write_row(store: Any, row: int, batch: Any) -> None:
    """Writes a batch that :func:`fit_batch` has checked to a row of a store or array."""
    if isinstance(store, ObservationStore):
        store.write(row, batch)
    else:
        store[row] = [np.asarray(each) for each in batch] if isinstance(batch, list) else batch


def make_twin(store: Any) -> Any:
    """What keeps the next observations of a leaf beside its observations."""
    # np.zeros takes memory as it is written to, np.zeros_like at once
    return store.twin() if isinstance(store, ObservationStore) else np.zeros(store.shape, store.dtype)
