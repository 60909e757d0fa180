"""``CompressedReplayBuffer``: replay memory for any training loop, with NumPy alone or with PyTorch."""

from __future__ import annotations

import copy
import os
from collections import deque
from typing import Any

import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from gym_compress.codec import Codec
from gym_compress.errors import positive
from gym_compress.replay.file.checkpoint import CheckpointMixin
from gym_compress.replay.locks import fork_safe_lock
from gym_compress.replay.prefetch import Outputs, Prefetch
from gym_compress.replay.samplers import Sequences, Uniform
from gym_compress.replay.samples import CompressedSamples, ReplaySamples, gather_samples, torch_device
from gym_compress.replay.settings import generator_from_json, generator_to_json
from gym_compress.replay.store import Compression
from gym_compress.replay.transitions import Transitions
from gym_compress.tree import map_leaves

__all__ = ["CompressedReplayBuffer"]


class CompressedReplayBuffer(CheckpointMixin):
    """Replay memory with compressed observations, in the place of SB3's and CleanRL's ``ReplayBuffer``.

    Call it as you call theirs. Frames that observations share are kept once, neighbouring frames are
    compressed against each other, and ``next_obs`` is right after a termination and a truncation alike.
    Compressed observations are read as arrays, without decoding while they are new.

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
        table = Transitions(
            max(buffer_size // n_envs, 1),
            n_envs,
            observation_space,
            action_space,
            Compression(stack_size, stack_axis, codec, frames_per_chunk),
        )
        self.use_table(table)
        self.observation_space = observation_space
        self.action_space = action_space
        self.optimize_memory_usage = optimize_memory_usage
        self.handle_timeout_termination = handle_timeout_termination
        self.device = torch_device(device)
        self._rng = np.random.default_rng(seed)
        self._uniform = Uniform(table)
        self._set_up_threads()
        if path is not None:
            self.create_file(path)

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
        timeouts = self.handle_timeout_termination
        transition = self.table.fit(obs, next_obs, action, reward, done, infos, timeouts=timeouts)
        with self.lock:
            self.make_room()
            self.table.add(transition)

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

    def reset(self) -> None:
        """Empties the buffer."""
        with self.lock:
            self.table.clear()

    def sample(self, batch_size: int, env: Any = None) -> ReplaySamples:
        """Draws transitions uniformly, with replacement.

        Args:
            batch_size: How many.
            env: An SB3 ``VecNormalize`` to normalise observations and rewards with, or ``None``.

        Raises:
            ValueError: If the buffer is empty, or ``batch_size`` is below 1.
        """
        positive(batch_size, "batch_size")
        with self.lock:
            places = self._uniform.draw(self._rng, batch_size)
            return gather_samples(self.table, *places, env=env, device=self.device)

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
            with self.lock:
                before = self._rng.bit_generator.state
                places = self._uniform.draw(self._rng, batch_size)
                batch = gather_samples(self.table, *places, device=self.device, empty=outputs.empty)
                draw = before, self._rng.bit_generator.state
                ahead.append(draw)
                return batch, draw

        def give_back() -> None:
            with self.lock:
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
        with self.lock:
            return gather_samples(self.table, *self._places(indices), device=self.device)

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
        if not (valid := self.table.valid[rows, envs]).all():
            raise IndexError(
                f"Expected indices of transitions, got {indices[~valid][0]}, where there is none"
            )
        return rows, envs

    def take(self, indices: Any) -> CompressedSamples:
        """The transitions with given indices, compressed as they are: what another buffer can :meth:`adopt`.

        Observations that were not compressed yet are compressed. Neighbours share chunks: a thousand in a row
        take far less than a thousand from anywhere.

        Args:
            indices: ``(n,)`` integers as for :meth:`get`, in any order.

        Raises:
            IndexError: If an index leads to no transition.
            CorruptDataError: If chunks are kept in a file, and it is damaged.
        """
        with self.lock:
            return self._take(*self._places(indices))

    def _take(self, rows: NDArray[Any], envs: NDArray[Any]) -> CompressedSamples:
        return CompressedSamples(self.table.leaves, *self.table.take(rows, envs))

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
        samples.check(self._take(none, none))
        rows = len(samples) // self.n_envs
        beyond = max(rows - self.buffer_size, 0)
        samples = samples.select(slice(beyond * self.n_envs, None))
        if not rows:
            return
        with self.lock:
            self.make_room()
            self.table.skip(beyond)
            self.table.adopt(samples.arrays, samples.images, samples.followed(self.n_envs))

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
        with self.lock:
            places = Sequences(self.table, length).draw(self._rng, batch_size)
            return gather_samples(self.table, *places, device=self.device)

    def file_settings(self) -> dict[str, Any]:
        """What a replay file says of the buffer."""
        return {**super().file_settings(), "generator": generator_to_json(self._generator())}

    def _generator(self) -> np.random.Generator:
        """The generator as it is if nothing was drawn ahead."""
        generator = copy.deepcopy(self._rng)
        draws = [draw for ahead in self._ahead for draw in list(ahead)]
        generator.bit_generator.state = _undrawn(self._rng, draws)
        return generator

    @classmethod
    def check_loadable(cls, settings: dict[str, Any], space: spaces.Space[Any], device: Any) -> None:
        """Raises an error if the device is none."""
        torch_device(device)

    def restore(self, settings: dict[str, Any]) -> None:
        """Restores the generator; SB3's buffers have none of their own."""
        if settings.get("generator") is not None:
            self._rng = generator_from_json(settings["generator"])

    def __getstate__(self) -> dict[str, Any]:
        state = {name: value for name, value in self.__dict__.items() if name not in ("lock", "_ahead")}
        with self.lock:
            return {**state, "_rng": self._generator()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._set_up_threads()

    def _set_up_threads(self) -> None:
        self.lock = fork_safe_lock()
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
