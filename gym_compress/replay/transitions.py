"""What is added to a buffer, as it can be stored: observations, and the arrays beside them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from gym_compress.batch import CompressedBatch
from gym_compress.chunk import fit
from gym_compress.observation import CompressedObservation

__all__ = ["action_dim", "action_dtype", "fit_batch", "transition_arrays"]


def fit_batch(batch: Any, n_envs: int, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Any:
    """A batch of one observation an environment as it can be written; see :func:`gym_compress.chunk.fit`.

    Returns:
        An array ``(n_envs, *shape)`` of the dtype; or a list, if observations are compressed.

    Raises:
        ValueError: If there are more or fewer observations, or one does not fit.
    """
    if isinstance(batch, CompressedBatch):
        batch = list(batch)
    if not isinstance(batch, (list, tuple)) or not any(isinstance(o, CompressedObservation) for o in batch):
        array, expected = np.asarray(batch), (n_envs, *shape)
        if array.shape != expected:
            raise ValueError(
                f"Expected observations of shape {expected}, one an environment, got {array.shape}"
            )
        return fit(array, expected, dtype)
    if len(batch) != n_envs:
        raise ValueError(f"Expected {n_envs} observations, one an environment, got {len(batch)}")
    return [_fit_one(part, env, shape, dtype) for env, part in enumerate(batch)]


def _fit_one(observation: Any, env: int, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Any:
    if isinstance(observation, CompressedObservation) and (observation.shape, observation.dtype) == (
        shape,
        dtype,
    ):
        return observation
    try:
        return fit(observation, shape, dtype)
    except ValueError as error:
        raise ValueError(f"Observation of environment {env}: {error}") from None


def transition_arrays(
    buffer: Any, action: Any, reward: Any, done: Any, infos: Any
) -> tuple[Any, Any, Any, Any]:
    """Actions, rewards, dones and timeouts of one row, as arrays of the shapes that a buffer keeps.

    Raises:
        ValueError: If one is of another number of environments.
    """
    n_envs = buffer.n_envs
    if not buffer.handle_timeout_termination:
        timeouts: Any = np.zeros(n_envs)
    elif isinstance(infos, Mapping):
        timeouts = np.broadcast_to(np.asarray(infos.get("TimeLimit.truncated", False)), n_envs)
    elif isinstance(infos, Sequence):
        timeouts = [info.get("TimeLimit.truncated", False) for info in infos]
    else:
        raise ValueError(f"Expected infos of {n_envs} environments, got {infos!r}")
    return (
        _shaped(action, buffer.actions[0], "actions"),
        _shaped(reward, buffer.rewards[0], "rewards"),
        _shaped(done, buffer.dones[0], "dones"),
        _shaped(timeouts, buffer.timeouts[0], "infos"),
    )


def _shaped(values: Any, row: NDArray[Any], name: str) -> NDArray[Any]:
    """Values of all environments as an array like the row of a buffer that they will be written to."""
    array = np.asarray(values)
    if array.size != row.size:
        raise ValueError(f"Expected {name} of {len(row)} environments, {row.shape}, got shape {array.shape}")
    if array.dtype.kind not in "biuf":
        raise ValueError(f"Expected {name} that are numbers, got dtype {array.dtype}")
    array = array.reshape(row.shape)
    if array.dtype == row.dtype or row.dtype.kind == "f":
        return array.astype(row.dtype, copy=False)
    with np.errstate(invalid="ignore"):
        cast = array.astype(row.dtype)
    if (cast != array).any():
        value = array[cast != array][0]
        raise ValueError(f"Expected {name} of dtype {row.dtype}, got the value {value} of {array.dtype}")
    return cast


def action_dim(space: spaces.Space[Any]) -> int:
    """How many numbers an action is."""
    if isinstance(space, spaces.Discrete):
        return 1
    if isinstance(space, (spaces.Box, spaces.MultiDiscrete, spaces.MultiBinary)):
        return int(np.prod(space.shape))
    raise TypeError(
        f"Expected an action space that is Box, Discrete, MultiDiscrete or MultiBinary, actual: {space}"
    )


def action_dtype(space: spaces.Space[Any]) -> Any:
    """The dtype of stored actions: float32 for float64, as in SB3."""
    return np.float32 if space.dtype == np.float64 else space.dtype
