"""``CompressedReplayBuffer``: replay memory for any training loop, with NumPy alone or with PyTorch."""

from __future__ import annotations

import copy
import os
from collections import deque
from functools import cached_property
from typing import Any

import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from gym_compress.codec import Codec
from gym_compress.errors import positive
from gym_compress.replay.checkpoint import SavedBuffer
from gym_compress.replay.file import ReplayFile
from gym_compress.replay.leaves import make_store, make_twin, write_row
from gym_compress.replay.locks import fork_safe_lock, to_the_end
from gym_compress.replay.prefetch import Outputs, Prefetch
from gym_compress.replay.samples import (
    CompressedSamples,
    ReplaySamples,
    gather,
    layout_of_samples,
    torch_device,
)
from gym_compress.replay.sequences import draw_starts, find_ends, follow
from gym_compress.replay.settings import generator_from_json, generator_to_json
from gym_compress.replay.store import ObservationStore
from gym_compress.replay.transitions import action_dim, action_dtype, fit_batch, transition_arrays
from gym_compress.tree import map_leaves, map_space

__all__ = ["CompressedReplayBuffer"]


class CompressedReplayBuffer(SavedBuffer):
    """Replay memory with compressed observations, in the place of SB3's and CleanRL's ``ReplayBuffer``.

    Call it as you call theirs. Frames that observations share are kept once, neighbouring frames are
    compressed against each other, and ``next_obs`` is right after a termination and a truncation alike.
    Observations that :class:`gym_compress.CompressedFrameStack` compressed are taken over as they are.

    One thread may add while others sample.

    Args:
        buffer_size: How many transitions are kept, of all environments together.
        observation_space: The space of one observation: Box, Discrete, MultiDiscrete, MultiBinary, Dict or
            Tuple.
        action_space: The space of one action.
        device: Where samples go: a torch device or its name, ``"auto"`` for CUDA if there is, the CPU if
            there is only torch, and NumPy arrays if there is no torch, or ``None`` for NumPy arrays.
        n_envs: How many environments each call of :meth:`add` serves.
        optimize_memory_usage: Taken for the signature's sake; nothing is stored differently.
        handle_timeout_termination: Whether ``"TimeLimit.truncated"`` in the infos makes a done no
            termination.
        stack_size: How many frames an observation stacks, or ``"auto"`` to find out; see
            :class:`ObservationStore`.
        stack_axis: The axis along which they are stacked.
        codec: A :class:`gym_compress.Codec`, its string, or ``"auto"``.
        frames_per_chunk: Frames compressed together, or ``None`` to choose by their size.
        seed: Seeds the generator that draws samples.
        path: A replay file to be made, in which compressed chunks are from the start; memory holds the rest,
            about 65 bytes a transition. For frames that exceed memory. :meth:`save` makes a checkpoint;
            :meth:`close` it in the end, or use ``with``.

    Raises:
        ValueError: If ``buffer_size`` or ``n_envs`` is below 1, or an argument does not suit the observation
            space.
        TypeError: If a space is of another kind.
        FileExistsError: If there is a file at ``path`` already, other than a replay file without a
            checkpoint.
        OSError: If the system refuses to make the file.
    """

    _optional_arrays = ("ends",)
    _ahead: list[deque[_Draw]]  # what prefetching drew and nobody has taken

    def __init__(
        self,
        buffer_size: int,
        observation_space: spaces.Space[Any],
        action_space: spaces.Space[Any],
        device: Any = "auto",
        n_envs: int = 1,
        optimize_memory_usage: bool = False,
        handle_timeout_termination: bool = True,
        *,
        stack_size: int | str = "auto",
        stack_axis: int = 0,
        codec: str | Codec = "auto",
        frames_per_chunk: int | None = None,
        seed: int | None = None,
        path: str | os.PathLike[str] | None = None,
    ) -> None:
        positive(buffer_size, "buffer_size"), positive(n_envs, "n_envs")
        self.buffer_size = max(buffer_size // n_envs, 1)
        self.observation_space = observation_space
        self.action_space = action_space
        self.n_envs = n_envs
        self.optimize_memory_usage = optimize_memory_usage
        self.handle_timeout_termination = handle_timeout_termination
        self.device = torch_device(device)
        self.pos = 0
        self.full = False

        rows = (self.buffer_size, n_envs)
        self._compression = {
            "stack_size": stack_size,
            "stack_axis": stack_axis,
            "codec": codec,
            "frames_per_chunk": frames_per_chunk,
        }
        self.observations = map_space(
            lambda leaf: make_store(*rows, leaf, **self._compression), observation_space
        )
        self.next_observations = map_leaves(make_twin, self.observations)
        self.actions = np.zeros((*rows, action_dim(action_space)), action_dtype(action_space))
        self.rewards = np.zeros(rows, np.float32)
        self.dones = np.zeros(rows, np.float32)
        self.timeouts = np.zeros(rows, np.float32)
        # Whether the sequence of observations ends with a row: an episode's end, or a reset without one.
        self._ends = np.zeros(rows, np.bool_)
        self._rng = np.random.default_rng(seed)
        self._set_up_threads()
        if path is not None:
            self._checked_settings()  # what could not be saved is refused before the file is made
            self._keep_in(ReplayFile.create(path))

    def add(self, obs: Any, next_obs: Any, action: Any, reward: Any, done: Any, infos: Any) -> None:
        """Stores a transition of each environment.

        Args:
            obs: ``(n_envs, *observation)``, a list of ``n_envs`` observations, or a dict or tuple of these.
            next_obs: As ``obs``: what the step gave, before any reset.
            action: ``(n_envs, *action)``.
            reward: ``(n_envs,)``.
            done: ``(n_envs,)``, whether the episode ended; of Gymnasium's vector environments the
                terminations, since their infos do not say which ends were a time limit's.
            infos: A list of ``n_envs`` dicts, or one dict of arrays as Gymnasium's vector environments give.

        Raises:
            ValueError: If something has another shape or number, or an observation's dtype does not cast to
                the space's by NumPy's ``same_kind``. The buffer is as it was then.
            OSError: If chunks are kept in a file, and the system refuses to write them. The buffer is as it
                was then, too.
        """
        row = self.pos
        obs = map_leaves(self._fitted, self.observations, self._by_leaf(obs))
        next_obs = map_leaves(self._fitted, self.next_observations, self._by_leaf(next_obs))
        rest = transition_arrays(self, action, reward, done, infos)

        with self._lock:
            self._make_room()
            # in a full buffer, a row would be old in part otherwise, and be sampled so
            to_the_end(lambda: self._write_transition(row, obs, next_obs, rest))

    def _write_transition(self, row: int, obs: Any, next_obs: Any, rest: tuple[Any, ...]) -> None:
        map_leaves(lambda store, batch: write_row(store, row, batch), self.observations, obs)
        map_leaves(lambda store, batch: write_row(store, row, batch), self.next_observations, next_obs)
        self.actions[row], self.rewards[row], self.dones[row], self.timeouts[row] = rest
        self._ends[row] = self.dones[row] != 0
        before = (row - 1) % self.buffer_size
        if self.size() and before != row and not self._ends[before].all():
            self._ends[before] |= ~follow(self, before, row)
        self.pos = (row + 1) % self.buffer_size
        self.full |= self.pos == 0

    def _fitted(self, store: Any, batch: Any) -> Any:
        return fit_batch(batch, self.n_envs, store.shape[2:], store.dtype)

    def _by_leaf(self, batch: Any) -> Any:
        """A list of dicts or tuples as a dict or tuple of lists."""
        if isinstance(self.observation_space, (spaces.Dict, spaces.Tuple)) and isinstance(batch, list):
            if len(batch) != self.n_envs:
                raise ValueError(f"Expected {self.n_envs} observations, one an environment, got {len(batch)}")
            return map_leaves(lambda *leaves: list(leaves), *batch)
        return batch

    def extend(self, obs: Any, next_obs: Any, action: Any, reward: Any, done: Any, infos: Any) -> None:
        """Stores several transitions of each environment: :meth:`add`'s arguments with an axis in front.

        Raises:
            ValueError: If they differ in length; nothing is stored then. Else as :meth:`add`.
        """
        lengths = {len(part) for part in (action, reward, done, infos)}
        for tree in (obs, next_obs):
            map_leaves(lambda _, leaf: lengths.add(len(leaf)), self.observations, tree)
        if len(lengths) != 1:
            raise ValueError(f"Expected arguments of the same length, got lengths {sorted(lengths)}")
        for i in range(lengths.pop()):
            one = map_leaves(lambda _, leaf, i=i: leaf[i], self.observations, obs)
            following = map_leaves(lambda _, leaf, i=i: leaf[i], self.observations, next_obs)
            self.add(one, following, action[i], reward[i], done[i], infos[i])

    def size(self) -> int:
        """The number of rows that are filled; a row holds a transition of each environment."""
        return self.buffer_size if self.full else self.pos

    def reset(self) -> None:
        """Empties the buffer."""

        def clear(store: Any) -> None:
            store.clear() if isinstance(store, ObservationStore) else store.fill(0)

        with self._lock:
            self.pos, self.full = 0, False
            map_leaves(clear, self.next_observations)
            map_leaves(clear, self.observations)

    @property
    def nbytes(self) -> int:
        """Bytes that the transitions would take in arrays."""
        return sum(value.nbytes for value in self._values())

    @property
    def cbytes(self) -> int:
        """Bytes of the compressed chunks, the references to them, and the arrays."""
        with self._lock:
            return sum(getattr(value, "cbytes", value.nbytes) for value in self._values())

    def _values(self) -> list[Any]:
        values: list[Any] = [self.actions, self.rewards, self.dones, self.timeouts]
        for tree in (self.observations, self.next_observations):
            map_leaves(values.append, tree)
        return values

    def sample(self, batch_size: int, env: Any = None) -> ReplaySamples:
        """Draws transitions uniformly, with replacement.

        Args:
            batch_size: How many.
            env: An SB3 ``VecNormalize`` to normalise observations and rewards with, or ``None``.

        Raises:
            ValueError: If the buffer is empty, or ``batch_size`` is below 1.
        """
        positive(batch_size, "batch_size")
        with self._lock:
            return self._draw(batch_size, env)

    def _draw(self, batch_size: int, env: Any = None, empty: Any = np.empty) -> ReplaySamples:
        size = self.size()
        if not size:
            raise ValueError("Expected a buffer that holds transitions, but nothing was added yet")
        rows = self._rng.integers(size, size=batch_size)
        envs = self._rng.integers(self.n_envs, size=batch_size)
        return gather(self, rows, envs, env, empty)

    def prefetch(self, batch_size: int, depth: int = 2) -> Prefetch[ReplaySamples]:
        """Draws batches ahead in a background thread, so that they are decoded while the network learns.

        The batches are those that :meth:`sample` would draw, in its order, each of what the buffer held when
        it was drawn, up to ``depth`` batches before it is taken. When that is, the thread decides: if
        transitions are added meanwhile, the same seed does not give the same batches again. :meth:`add` waits
        while a batch is decoded.

        The memory of a batch is used again when nobody refers to it any more, nor to a part of it.

        Batches that nobody took count as not drawn: when the block is left, the next call draws them again,
        as a buffer does that was saved in the block and loaded; unless something else was drawn after them.

        Args:
            batch_size: How many transitions a batch has.
            depth: How many batches are decoded ahead.

        Returns:
            A context manager that gives an endless iterator of :class:`ReplaySamples`. The first ``next``
            begins; it raises what is raised in the thread, as the ValueError of an empty buffer. Leaving the
            block ends the thread.

        Raises:
            ValueError: If ``batch_size`` or ``depth`` is below 1.

        Example:
            >>> import gymnasium as gym
            >>> import numpy as np
            >>> from gym_compress import CompressedReplayBuffer
            >>> space = gym.spaces.Box(0, 255, (4, 84, 84), np.uint8)
            >>> rb = CompressedReplayBuffer(1000, space, gym.spaces.Discrete(6), device=None)
            >>> obs = np.zeros((1, 4, 84, 84), np.uint8)
            >>> rb.add(obs, obs, np.array([0]), np.array([1.0]), np.array([False]), [{}])
            >>> with rb.prefetch(batch_size=32) as batches:
            ...     for update in range(3):
            ...         batch = next(batches)
            >>> batch.observations.shape
            (32, 4, 84, 84)
        """
        positive(batch_size, "batch_size"), positive(depth, "depth")

        def make() -> tuple[ReplaySamples, _Draw]:
            with self._lock:
                before = self._rng.bit_generator.state
                batch = self._draw(batch_size, empty=outputs.empty)
                draw = before, self._rng.bit_generator.state
                ahead.append(draw)
                return batch, draw

        def give_back() -> None:
            with self._lock:
                self._rng.bit_generator.state = _undrawn(self._rng, list(ahead))
                ahead.clear()
                self._ahead = [other for other in self._ahead if other is not ahead]
            outputs.clear()

        outputs = Outputs()
        ahead: deque[_Draw] = deque()
        self._ahead = [*self._ahead, ahead]
        return Prefetch(make, depth, taken=ahead.remove, when_left=give_back)

    def get(self, indices: Any) -> ReplaySamples:
        """The transitions with given indices, for those who draw by themselves.

        Args:
            indices: ``(batch_size,)`` integers; an index is ``row * n_envs + env``.

        Raises:
            IndexError: If an index leads to no transition.
        """
        with self._lock:
            return gather(self, *self._places(indices))

    def _places(self, indices: Any) -> tuple[NDArray[Any], NDArray[Any]]:
        """The rows and environments of transitions."""
        indices = np.asarray(indices) if np.size(indices) else np.empty(0, np.int64)
        if indices.ndim != 1 or indices.dtype.kind not in "iu":
            raise IndexError(
                f"Expected a list of integers, got shape {indices.shape} and dtype {indices.dtype}"
            )
        filled = self.size() * self.n_envs
        if indices.size and not (indices.min() >= 0 and indices.max() < filled):
            raise IndexError(
                f"Expected indices from 0 to {filled - 1}, got {indices.min()} to {indices.max()}"
            )
        rows, envs = np.divmod(indices, self.n_envs)
        return rows, envs

    def take(self, indices: Any) -> CompressedSamples:
        """The transitions with given indices, compressed as they are: what another buffer can :meth:`adopt`.

        Observations that were not compressed yet are compressed. Of a chunk that a wrapper still writes, what
        is referred to is compressed for each call. Neighbours share chunks: a thousand in a row take far less
        than a thousand from anywhere.

        Args:
            indices: ``(n,)`` integers as for :meth:`get`, in any order.

        Raises:
            IndexError: If an index leads to no transition.
            CorruptDataError: If chunks are kept in a file, and it is damaged.
        """
        with self._lock:
            return self._take(*self._places(indices))

    def _take(self, rows: NDArray[Any], envs: NDArray[Any]) -> CompressedSamples:
        arrays = {name: values[rows, envs] for name, values in self._row_arrays().items()}
        images = [store.take(twin, rows, envs) for store, twin in self._pairs()]
        return CompressedSamples(self._layout, arrays, images)

    @cached_property
    def _layout(self) -> str:
        slicings = [store.slicing for store, _ in self._pairs()]
        return layout_of_samples(self.observation_space, slicings)

    def adopt(self, samples: CompressedSamples) -> None:
        """Stores transitions that another buffer gave, with their chunks: nothing is decoded or encoded.

        Chunks that come again with later transitions are kept once. Of more transitions than the buffer
        holds, the last ones are stored.

        Args:
            samples: Transitions of as many environments as the buffer has: the first ``n_envs`` make a row,
                and so on.

        Raises:
            ValueError: If observations or actions have another shape or dtype, or observations are stacked
                otherwise, or they are no whole rows. The buffer is as it was then.
            TypeError: If they are something else.
            CorruptDataError: If they are damaged. The buffer is as it was then, too.
            OSError: If chunks are kept in a file, and the system refuses to write them.
        """
        if not isinstance(samples, CompressedSamples):
            raise TypeError(f"Expected CompressedSamples, as take gives them, actual type: {type(samples)}")
        if len(samples) % self.n_envs:
            raise ValueError(f"Expected rows of {self.n_envs} transitions, got {len(samples)} transitions")
        none = np.empty(0, np.int64)
        samples._check(self._take(none, none))
        beyond = max(len(samples) // self.n_envs - self.buffer_size, 0)
        samples = samples.select(slice(beyond * self.n_envs, None))
        if not len(samples):
            return
        with self._lock:
            self._make_room()
            pos = (self.pos + beyond) % self.buffer_size
            to_the_end(lambda: self._write_samples(pos, samples))

    def _write_samples(self, pos: int, samples: CompressedSamples) -> None:
        count, envs = np.divmod(np.arange(len(samples)), self.n_envs)
        rows = (pos + count) % self.buffer_size
        for (store, twin), image in zip(self._pairs(), samples._images, strict=True):
            store.adopt(twin, rows, envs, image)
        for name, values in self._row_arrays().items():
            values[rows, envs] = samples._arrays[name]
        self._ends[rows, envs] |= ~samples._followed(self.n_envs)
        before = (pos - 1) % self.buffer_size
        if self.size() and before not in rows and not self._ends[before].all():
            self._ends[before] |= ~follow(self, before, pos, at_a_glance=True)
        self.full |= pos + len(samples) // self.n_envs >= self.buffer_size
        self.pos = int(rows[-1] + 1) % self.buffer_size

    def sample_sequences(self, batch_size: int, length: int) -> ReplaySamples:
        """Draws runs of transitions that follow each other, uniformly over all places where one can begin.

        A run lies in one environment and one episode. An episode ends with a done, and where an observation
        is not the ``next_obs`` before it.

        Args:
            batch_size: How many runs.
            length: Transitions in a run.

        Returns:
            Samples with ``(batch_size, length, ...)`` in place of ``(batch_size, ...)``.

        Raises:
            ValueError: If no episode in the buffer is that long, or an argument is below 1.
        """
        positive(batch_size, "batch_size"), positive(length, "length")
        with self._lock:
            oldest = self.pos if self.full else 0
            starts = draw_starts(self._rng, self._ends, self.size(), oldest, batch_size, length)
            rows = (oldest + starts[:, :1] + np.arange(length)) % self.buffer_size
            return gather(self, rows, np.broadcast_to(starts[:, 1:], rows.shape))

    def _settings(self) -> dict[str, Any]:
        return {**super()._settings(), "generator": generator_to_json(self._generator())}

    def _generator(self) -> np.random.Generator:
        """The generator as it is if nothing was drawn ahead."""
        generator = copy.deepcopy(self._rng)
        draws = [draw for ahead in self._ahead for draw in list(ahead)]
        generator.bit_generator.state = _undrawn(self._rng, draws)
        return generator

    def _row_arrays(self) -> dict[str, NDArray[Any]]:
        return {**super()._row_arrays(), "ends": self._ends}

    @classmethod
    def _check(cls, settings: dict[str, Any], space: spaces.Space[Any], device: Any) -> None:
        torch_device(device)

    def _restore(self, settings: dict[str, Any]) -> None:
        if settings.get("generator") is not None:  # SB3's buffers have none of their own
            self._rng = generator_from_json(settings["generator"])
        if "ends" not in settings["arrays"]:
            self._ends = find_ends(self)

    def __getstate__(self) -> dict[str, Any]:
        state = {name: value for name, value in self.__dict__.items() if name not in ("_lock", "_ahead")}
        with self._lock:
            return {**state, "_rng": self._generator()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._set_up_threads()

    def _set_up_threads(self) -> None:
        self._lock = fork_safe_lock()
        self._ahead = []


# The states of a generator before and after a batch was drawn.
_Draw = tuple[Any, Any]


def _undrawn(generator: np.random.Generator, draws: list[_Draw]) -> Any:
    """The state of a generator before some draws, as far as nothing else was drawn after them."""
    state = generator.bit_generator.state
    draws = [(before, after) for before, after in draws if before != after]  # of one row, nothing is drawn
    while (earlier := next((before for before, after in draws if after == state), None)) is not None:
        state = earlier
    return state
