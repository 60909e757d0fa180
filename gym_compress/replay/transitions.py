"""The table that every buffer holds: stores for images, arrays for the rest, and which places are valid."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import count
from typing import Any, NamedTuple

import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from gym_compress.errors import CorruptDataError
from gym_compress.observation import CompressedObservation
from gym_compress.replay.parcel import ImageParcel
from gym_compress.replay.store import Compression, Empty, ObservationStore, read_places
from gym_compress.spaces import fit, is_image
from gym_compress.tree import iter_leaves, map_leaves, map_space

__all__ = ["Transition", "Transitions", "action_dim", "make_leaves"]

# How often chunks to which nothing refers any more are looked for: as often as a ring is gone through, and at
# most every so many rows.
_LOOKS, _FEWEST_ROWS = 128, 4


class Transition(NamedTuple):
    """A transition of each environment, as it is written to a row."""

    obs: Any
    next_obs: Any
    action: NDArray[Any]
    reward: NDArray[Any]
    done: NDArray[Any]
    timeout: NDArray[Any]


class Transitions:
    """Transitions of several environments in a ring of rows.

    Args:
        rows: The number of rows, each of which holds a transition of each environment.
        n_envs: The number of environments.
        observation_space: The space of one observation.
        action_space: The space of one action.
        compression: How images are compressed.

    Attributes:
        observations, next_observations: Trees of the observation space: an :class:`ObservationStore` for an
            image, an array ``(rows, n_envs, ...)`` for another leaf.
        leaves: The same tree with the number of each leaf, by which FORMAT.md names it.
        image_numbers: Which of these leaves are images.
        stores: Of each image the store of observations and that of next observations.
        actions: ``(rows, n_envs, numbers of an action)``.
        rewards, dones, timeouts: ``(rows, n_envs)`` float32; a timeout is 1 where a time limit ended an
            episode.
        ends: ``(rows, n_envs)`` bool, whether the sequence of observations ends with a row: an episode's end,
            or a reset without one.
        valid: ``(rows, n_envs)`` bool, whether a place holds a whole transition.
        pos: The row that is written next.
        full: Whether all rows were written.
    """

    def __init__(
        self,
        rows: int,
        n_envs: int,
        observation_space: spaces.Space[Any],
        action_space: spaces.Space[Any],
        compression: Compression,
    ) -> None:
        self.rows = rows
        self.n_envs = n_envs
        self.compression = compression
        self.observations = make_leaves(rows, n_envs, observation_space, compression)
        self.next_observations = map_leaves(_make_twin, self.observations)
        self.actions = np.zeros((rows, n_envs, action_dim(action_space)), _action_dtype(action_space))
        self.rewards = np.zeros((rows, n_envs), np.float32)
        self.dones = np.zeros((rows, n_envs), np.float32)
        self.timeouts = np.zeros((rows, n_envs), np.float32)
        self.ends = np.zeros((rows, n_envs), np.bool_)
        self.valid = np.zeros((rows, n_envs), np.bool_)
        self.pos = 0
        self.full = False
        numbers = count()
        self.leaves = map_leaves(lambda _: next(numbers), self.observations)
        leaves = iter_leaves(self.observations), iter_leaves(self.next_observations)
        self._pairs = [(ours, theirs) for (_, ours), (_, theirs) in zip(*leaves, strict=True)]
        images = [i for i, (ours, _) in enumerate(self._pairs) if isinstance(ours, ObservationStore)]
        self.image_numbers = images
        self.stores: list[tuple[ObservationStore, ObservationStore]] = [self._pairs[i] for i in images]

    def size(self) -> int:
        """The number of rows that are filled."""
        return self.rows if self.full else self.pos

    def holds_any(self) -> bool:
        """Whether there is a valid transition."""
        return bool(self.valid[self.pos - 1].any() or self.valid.any())  # mostly, the newest row is valid

    @property
    def oldest(self) -> int:
        """The row that was written first."""
        return self.pos if self.full else 0

    def arrays(self) -> dict[str, NDArray[Any]]:
        """The arrays with one row for each of the table, by the names of FORMAT.md."""
        leaves = {
            f"{name}.{i}": leaf
            for i, pair in enumerate(self._pairs)
            for name, leaf in zip(("observations", "next_observations"), pair, strict=True)
            if isinstance(leaf, np.ndarray)
        }
        names = "actions", "rewards", "dones", "timeouts", "ends", "valid"
        return {**leaves, **{name: getattr(self, name) for name in names}}

    @property
    def nbytes(self) -> int:
        """Bytes that the transitions would take in the arrays of SB3's buffer."""
        leaves = [leaf for pair in self._pairs for leaf in pair]
        return sum(each.nbytes for each in (*leaves, self.actions, self.rewards, self.dones, self.timeouts))

    @property
    def cbytes(self) -> int:
        """Bytes of the compressed chunks, the references to them, and the arrays."""
        images = sum(store.cbytes + twin.references.nbytes for store, twin in self.stores)
        return images + sum(array.nbytes for array in self.arrays().values())

    def fit(
        self, obs: Any, next_obs: Any, action: Any, reward: Any, done: Any, infos: Any, *, timeouts: bool
    ) -> Transition:
        """A transition of each environment as :meth:`add` takes it.

        The arguments and errors are those of :meth:`gym_compress.CompressedReplayBuffer.add`; ``timeouts``
        tells whether ``"TimeLimit.truncated"`` in the infos counts.
        """
        return Transition(
            map_leaves(self._fit_leaf, self.observations, self._by_leaf(obs)),
            map_leaves(self._fit_leaf, self.next_observations, self._by_leaf(next_obs)),
            _shaped(action, self.actions[0], "actions"),
            _shaped(reward, self.rewards[0], "rewards"),
            _shaped(done, self.dones[0], "dones"),
            _shaped(
                _timeouts(infos, self.n_envs) if timeouts else np.zeros(self.n_envs),
                self.timeouts[0],
                "infos",
            ),
        )

    def _fit_leaf(self, kept: Any, batch: Any) -> NDArray[Any]:
        return _fit_batch(batch, self.n_envs, kept.shape[2:], kept.dtype)

    def _by_leaf(self, batch: Any) -> Any:
        """A list of dicts or tuples as a dict or tuple of lists."""
        if isinstance(self.observations, (dict, tuple)) and isinstance(batch, list):
            if len(batch) != self.n_envs:
                raise ValueError(f"Expected {self.n_envs} observations, one an environment, got {len(batch)}")
            return map_leaves(lambda *leaves: list(leaves), *batch)
        return batch

    def add(self, transition: Transition) -> None:
        """Writes what :meth:`fit` gave to the next row.

        The row is not valid meanwhile, so an exception at any line, by a signal, leaves whole transitions.
        """
        row = self.pos
        self.valid[row] = False
        map_leaves(lambda kept, batch: _write(kept, row, batch), self.observations, transition.obs)
        map_leaves(lambda kept, batch: _write(kept, row, batch), self.next_observations, transition.next_obs)
        self.actions[row], self.rewards[row] = transition.action, transition.reward
        self.dones[row], self.timeouts[row] = transition.done, transition.timeout
        self._advance(row, row + 1, row, transition.done != 0)

    def _advance(self, first: int, end: int, written: Any, ends: NDArray[np.bool_]) -> None:
        """Makes places valid that were written in some rows, and moves on behind these."""
        before = (first - 1) % self.rows
        if self.size() and end - first < self.rows:
            ended = self.ends[before]
            for ours, theirs in self._pairs:
                for env in _changed(ours, theirs, first, before):
                    ended[env] = ended[env] or not _equal(ours, theirs, first, before, env)
        if end >= self.rows:
            self.full = True
        if self.full and end // self._step > first // self._step:
            for store, twin in self.stores:
                store.evict(twin)
        self.ends[written] = True  # of a row that is new and still counts as the oldest, nothing goes on
        self.valid[written] = True
        self.pos = end % self.rows
        self.ends[written] = ends

    @property
    def _step(self) -> int:
        return max(self.rows // _LOOKS, _FEWEST_ROWS)

    def take(
        self, rows: NDArray[Any], envs: NDArray[Any]
    ) -> tuple[dict[str, NDArray[Any]], list[ImageParcel]]:
        """The transitions in some places: what is kept in arrays, by name, and a parcel for each image."""
        arrays = {name: values[rows, envs] for name, values in self.arrays().items()}
        return arrays, [store.take(twin, rows, envs) for store, twin in self.stores]

    def adopt(
        self, arrays: Mapping[str, NDArray[Any]], images: Sequence[ImageParcel], followed: NDArray[np.bool_]
    ) -> None:
        """Writes transitions that :meth:`take` gave, which were checked, to the next rows.

        Args:
            arrays: What is kept in arrays: ``n`` whole rows, at most as many as the table has.
            images: A parcel for each image.
            followed: ``(n,)``, whether the next row's observation is known to be the next observation.
        """
        steps, envs = np.divmod(np.arange(len(followed)), self.n_envs)
        first, rows = self.pos, (self.pos + steps) % self.rows
        self.valid[rows, envs] = False
        for (store, twin), image in zip(self.stores, images, strict=True):
            store.adopt(twin, rows, envs, image)
        for name, values in self.arrays().items():
            if name not in ("ends", "valid"):
                values[rows, envs] = arrays[name]
        end = first + len(followed) // self.n_envs
        self._advance(first, end, (rows, envs), arrays["ends"] | ~followed)

    def skip(self, rows: int) -> None:
        """Moves on by some rows without writing them, as if transitions were written and overwritten."""
        self.pos = (self.pos + rows) % self.rows

    def gather(self, rows: NDArray[Any], envs: NDArray[Any], empty: Empty = np.empty) -> tuple[Any, Any]:
        """Observations and next observations in some places, decoding each chunk once.

        Args:
            rows: Their rows, an array of any shape.
            envs: Their environments, of the same shape.
            empty: Makes the arrays of images.

        Returns:
            Two trees of arrays ``(*rows.shape, *observation)``, C-contiguous, which nothing shares.
        """
        pairs = map_leaves(
            lambda ours, theirs: (
                tuple(read_places((ours, rows, envs), (theirs, rows, envs), empty=empty))
                if isinstance(ours, ObservationStore)
                else (ours[rows, envs], theirs[rows, envs])
            ),
            self.observations,
            self.next_observations,
        )
        obs, next_obs = (map_leaves(lambda _, pair, i=i: pair[i], self.observations, pairs) for i in (0, 1))
        return obs, next_obs

    def clear(self) -> None:
        """Forgets all transitions."""
        self.valid[:] = False
        self.pos, self.full = 0, False
        for store, twin in self.stores:
            store.clear(twin)


def make_leaves(rows: int, n_envs: int, space: spaces.Space[Any], compression: Compression) -> Any:
    """What keeps observations: a tree of the space, with a store for an image and an array of zeros else.

    Raises:
        TypeError: If a leaf's observations are no arrays of a fixed shape.
    """

    def leaf(sub: spaces.Space[Any]) -> ObservationStore | NDArray[Any]:
        if is_image(sub):
            return ObservationStore(rows, n_envs, sub, compression)
        if sub.shape is None or sub.dtype is None:
            raise TypeError(f"Expected a space of arrays of a fixed shape, actual: {sub}")
        shape = (1,) if isinstance(sub, spaces.Discrete) else sub.shape  # as SB3 has it
        return np.zeros((rows, n_envs, *shape), sub.dtype)

    return map_space(leaf, space)


def _make_twin(kept: Any) -> Any:
    """What keeps the next observations of a leaf beside its observations."""
    # np.zeros takes memory as it is written to, np.zeros_like at once
    return kept.twin() if isinstance(kept, ObservationStore) else np.zeros(kept.shape, kept.dtype)


def _changed(ours: Any, theirs: Any, row: int, before: int) -> list[int]:
    """In which environments observations of a row may not be the next observations of the row before."""
    if isinstance(ours, ObservationStore):
        ours, theirs = ours.references, theirs.references
        if ours[row].tolist() == theirs[before].tolist():
            return []
    return list(range(ours.shape[1]))


def _equal(ours: Any, theirs: Any, row: int, before: int, env: int) -> bool:
    """Whether an observation is, bit for bit, the next observation of the row before."""
    try:
        return bool(ours[row, env].tobytes() == theirs[before, env].tobytes())
    except (CorruptDataError, OSError):  # of a file: whoever samples it is told
        return False


def _write(kept: Any, row: int, batch: NDArray[Any]) -> None:
    if isinstance(kept, ObservationStore):
        kept.write(row, batch)
    else:
        kept[row] = batch


def _fit_batch(batch: Any, n_envs: int, shape: tuple[int, ...], dtype: np.dtype[Any]) -> NDArray[Any]:
    """A batch of one observation an environment as an array ``(n_envs, *shape)``; see ``fit``.

    A batch of numbers gains the axis that a leaf of numbers is kept with.

    Raises:
        ValueError: If there are more or fewer observations, or one does not fit.
    """
    if isinstance(batch, (list, tuple)) and CompressedObservation in map(type, batch):
        if len(batch) != n_envs:
            raise ValueError(f"Expected {n_envs} observations, one an environment, got {len(batch)}")
        arrays = [_fit_one(each, env, shape, dtype) for env, each in enumerate(batch)]
        return np.stack(arrays) if n_envs > 1 else arrays[0][None]
    array, expected = np.asarray(batch), (n_envs, *shape)
    if shape == (1,) and array.shape == (n_envs,):
        array = array[:, None]
    if array.shape != expected:
        raise ValueError(f"Expected observations of shape {expected}, one an environment, got {array.shape}")
    return fit(array, expected, dtype)


def _fit_one(observation: Any, env: int, shape: tuple[int, ...], dtype: np.dtype[Any]) -> NDArray[Any]:
    try:
        return fit(observation, shape, dtype)
    except ValueError as error:
        raise ValueError(f"Observation of environment {env}: {error}") from None


def _timeouts(infos: Any, n_envs: int) -> Any:
    """Whether a time limit ended the episode, of each environment."""
    if isinstance(infos, Mapping):
        return np.broadcast_to(np.asarray(infos.get("TimeLimit.truncated", False)), n_envs)
    if isinstance(infos, Sequence):
        return [info.get("TimeLimit.truncated", False) for info in infos]
    raise ValueError(f"Expected infos of {n_envs} environments, got {infos!r}")


def _shaped(values: Any, row: NDArray[Any], name: str) -> NDArray[Any]:
    """Values of all environments as an array like the row of a buffer that they will be written to."""
    array = np.asarray(values)
    if array.shape != row.shape:
        if array.size != row.size:
            raise ValueError(
                f"Expected {name} of {len(row)} environments, {row.shape}, got shape {array.shape}"
            )
        array = array.reshape(row.shape)
    if array.dtype == row.dtype:
        return array
    if array.dtype.kind not in "biuf":
        raise ValueError(f"Expected {name} that are numbers, got dtype {array.dtype}")
    if row.dtype.kind == "f":
        return array.astype(row.dtype)
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


def _action_dtype(space: spaces.Space[Any]) -> Any:
    """The dtype of stored actions: float32 for float64, as in SB3."""
    return np.float32 if space.dtype == np.float64 else space.dtype
