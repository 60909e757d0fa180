"""Wrappers for :class:`gymnasium.vector.VectorEnv`: twins of the wrappers for single environments."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from functools import partial
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, VectorEnv, VectorWrapper
from gymnasium.vector.utils import batch_space, concatenate, create_empty_array
from numpy.typing import NDArray

from gym_compress.batch import CompressedBatch
from gym_compress.codec import Codec
from gym_compress.recorder import Recorder
from gym_compress.slicing import Slicing
from gym_compress.spaces import compressed_space, fit, map_compressed
from gym_compress.tree import map_leaves, map_space, replace_leaves
from gym_compress.wrappers.compress import json_arguments
from gym_compress.wrappers.frame_stack import ObservationStacker

__all__ = ["CompressObservation", "CompressedFrameStack"]

_Step = tuple[Any, Any, Any, Any, dict[str, Any]]


class _VectorWrapper(VectorWrapper, gym.utils.RecordConstructorArgs):
    """What both wrappers have in common: whose observation a row is, and where an episode ended."""

    # there also where construction fails: Gymnasium up to 1.2 closes what is deleted
    _recorders: Any = None
    _stacks: Sequence[ObservationStacker] = ()

    def __init__(self, env: VectorEnv[Any, Any, Any]) -> None:
        if not isinstance(env, VectorEnv):  # Gymnasium before 1.4 asserts it
            raise TypeError(f"Expected env to be a gymnasium.vector.VectorEnv, got {type(env)}")
        VectorWrapper.__init__(self, env)
        self._autoreset_mode = _autoreset_mode(env)
        self._leaves = map_space(lambda leaf: leaf, env.single_observation_space)
        self._all = list(range(env.num_envs))

    def _slots(self, observations: Any, infos: dict[str, Any]) -> Sequence[int]:
        """The number of each row's environment: all in their order, or those that the infos name."""
        if not isinstance(infos, dict):
            raise TypeError(
                f"Expected infos that are a dict, got {type(infos)}: put wrappers that change them over this"
            )
        lengths: set[int] = set()
        map_leaves(lambda _, leaf: lengths.add(len(leaf)), self._leaves, observations)
        # what an environment itself has in its infos under this name comes with a mask, "_env_id"
        named = np.asarray(infos["env_id"] if "env_id" in infos and "_env_id" not in infos else None)
        slots: list[int] = named.tolist() if named.ndim == 1 and named.dtype.kind in "iu" else self._all
        if lengths != {len(slots)} or (slots != self._all and len({*slots} & {*self._all}) < len(slots)):
            raise ValueError(
                f"Expected observations of {self.num_envs} environments, or of those that infos['env_id'] "
                f"names, got {sorted(lengths)} observations and env_id {infos.get('env_id')}"
            )
        return slots

    def _final(self, infos: dict[str, Any], ended: NDArray[np.bool_]) -> dict[int, Any]:
        """The last observations of the episodes that ended in a step, by row."""
        final, rows = infos["final_obs"], np.flatnonzero(ended).tolist()
        if isinstance(final, list) or (isinstance(final, np.ndarray) and final.dtype.hasobject):
            return {row: final[row] for row in rows if final[row] is not None}
        # of an array, as ALE's environment gives, the other rows have no meaning
        return {row: self._row(final, row) for row in rows}

    def _row(self, observations: Any, row: int) -> Any:
        return map_leaves(lambda _, leaf: leaf[row], self._leaves, observations)


def _autoreset_mode(env: VectorEnv[Any, Any, Any]) -> AutoresetMode | None:
    """When an environment resets what ended, None if it does not say.

    Raises:
        ValueError: If it is a mode that Gymnasium does not know.
    """
    mode = None
    # environments of one class share their metadata in Gymnasium, where the last one made has its mode
    for said in (env.metadata.get("autoreset_mode"), getattr(env.unwrapped, "autoreset_mode", None)):
        try:
            mode = mode if said is None else AutoresetMode(said)
        except ValueError:
            known = [str(mode) for mode in AutoresetMode]
            raise ValueError(f"Unknown autoreset mode {said!r}, expected one of {known}") from None
    return mode


def _with_final(infos: dict[str, Any], final: dict[int, Any], rows: int) -> dict[str, Any]:
    """The infos with other last observations: an array of objects, None where no episode ended."""
    observations = np.full(rows, None, dtype=object)
    for row, observation in final.items():
        observations[row] = observation
    return {**infos, "final_obs": observations}


class CompressObservation(_VectorWrapper):
    """Compresses the observations of a vector environment.

    A step gives a :class:`gym_compress.CompressedBatch` of one :class:`gym_compress.CompressedObservation` an
    environment. The same leaves of Dict and Tuple observations are compressed as by
    :class:`gym_compress.CompressObservation`, and the others handed on as copies.

    Where the environment gives stacks, as ``ale_py.AtariVectorEnv`` does, the frames that an observation
    shares with the one before are kept once. If it gives fewer observations a step than it has environments,
    their ``infos["env_id"]`` tells whose they are.

    In ``infos["final_obs"]`` observations are compressed too. It is an array of objects, as Gymnasium's
    environments give, with None where no episode ended.

    Example:
        >>> import ale_py
        >>> from gym_compress import decompress_batch
        >>> from gym_compress.wrappers.vector import CompressObservation
        >>> envs = CompressObservation(ale_py.AtariVectorEnv("pong", num_envs=2))
        >>> obs, info = envs.reset(seed=123)
        >>> kept = [obs]
        >>> for _ in range(15):
        ...     obs, *_ = envs.step(envs.action_space.sample())
        ...     kept.append(obs)
        >>> obs.shape, obs[1].shape
        ((2, 4, 84, 84), (4, 84, 84))
        >>> decompress_batch(kept).shape
        (16, 2, 4, 84, 84)
        >>> envs.close()

    Change logs:
     * v0.1.0 - Initially added
    """

    def __init__(
        self,
        env: VectorEnv[Any, Any, Any],
        *,
        stack_size: int | str = "auto",
        codec: str | Codec = "auto",
        frames_per_chunk: int | None = None,
    ) -> None:
        """Wraps a vector environment.

        Args:
            env: The environment; the observation space of a single one is a Box, Dict or Tuple.
            stack_size: How many frames an observation stacks along its first axis, 1 for none, or ``"auto"``
                to look for them if that axis is short. A wrong number costs memory and never a value.
            codec: A :class:`gym_compress.Codec`, its string such as ``"zstd:1"``, or ``"auto"``, which is
                ``"lz4hc:2"`` for small frames here: all environments wait for it.
            frames_per_chunk: How many frames are compressed together, or ``None`` to choose by their size.

        Raises:
            TypeError: If the observation space is of another kind, or an argument of a wrong type.
            ValueError: If ``stack_size`` does not divide the first axis, the codec is unknown,
                ``frames_per_chunk`` is below 1, or the environment's autoreset mode is unknown.
        """
        gym.utils.RecordConstructorArgs.__init__(
            self, **json_arguments(stack_size=stack_size, codec=codec, frames_per_chunk=frames_per_chunk)
        )
        super().__init__(env)
        self._recorders = map_compressed(
            lambda box: [
                Recorder(
                    Slicing(box.shape, box.dtype, stack_size),
                    codec=codec,
                    frames_per_chunk=frames_per_chunk,
                    quick=True,
                )
                for _ in range(env.num_envs)
            ],
            env.single_observation_space,
        )
        self.single_observation_space = compressed_space(env.single_observation_space, self._recorders)
        self.observation_space = compressed_space(env.observation_space, self._recorders)

    def step(self, actions: Any) -> _Step:
        """Steps through the environments; observations are compressed.

        Raises:
            ValueError: If an observation does not fit its space.
        """
        observations, rewards, terminated, truncated, infos = self.env.step(actions)
        slots = self._slots(observations, infos)
        if "final_obs" in infos:
            final = {
                row: map_leaves(partial(_compress_one, slot=slots[row]), self._recorders, last)
                for row, last in self._final(infos, np.logical_or(terminated, truncated)).items()
            }
            infos = _with_final(infos, final, len(slots))
        return self._compress(observations, slots), rewards, terminated, truncated, infos

    def reset(self, *, seed: Any = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Resets the environments; observations are compressed."""
        observations, infos = self.env.reset(seed=seed, options=options)
        return self._compress(observations, self._slots(observations, infos)), infos

    def _compress(self, observations: Any, slots: Sequence[int]) -> Any:
        return map_leaves(partial(_compress_batch, slots=slots), self._recorders, observations)

    def close(self, **kwargs: Any) -> None:
        """Closes the environments and compresses the newest observations, which were raw so far."""
        try:
            map_leaves(_seal, self._recorders)
        finally:
            super().close(**kwargs)


def _compress_batch(recorders: list[Recorder] | None, batch: Any, *, slots: Sequence[int]) -> Any:
    """Records a leaf's observations, one of each of some environments."""
    if recorders is None:
        return copy.deepcopy(batch)
    slicing = recorders[0].slicing
    rows = slicing.cut(fit(batch, (len(slots), *slicing.shape), slicing.dtype))
    newest = []
    for slot, row in zip(slots, rows, strict=True):
        recorders[slot].record(row)
        newest.append(recorders[slot].newest())
    return CompressedBatch(*zip(*newest, strict=True))


def _compress_one(recorders: list[Recorder] | None, observation: Any, *, slot: int) -> Any:
    """Records a leaf's observation of one environment."""
    if recorders is None:
        return copy.deepcopy(observation)
    (compressed,) = _compress_batch(recorders, np.asarray(observation)[None], slots=[slot])
    return compressed


def _seal(recorders: list[Recorder] | None) -> None:
    for recorder in recorders or ():
        recorder.seal()


class CompressedFrameStack(_VectorWrapper):
    """Stacks the observations of the last ``stack_size`` steps in each environment, each frame kept once.

    Observations equal those of a vector environment in which each environment is wrapped in
    :class:`gymnasium.wrappers.FrameStackObservation`, whatever its autoreset mode: a stack never reaches over
    the end of an episode. A step gives a :class:`gym_compress.CompressedBatch`; leaves of Dict and Tuple
    observations that are not compressed, see :class:`gym_compress.CompressObservation`, are stacked into
    arrays.

    With ``AutoresetMode.SAME_STEP``, ``infos["final_obs"]`` holds stacks too. It is an array of objects, as
    Gymnasium's environments give, with None where no episode ended.

    Example:
        >>> import gymnasium as gym
        >>> from gym_compress.wrappers.vector import CompressedFrameStack
        >>> envs = gym.make_vec("CartPole-v1", num_envs=3, vectorization_mode="sync")
        >>> envs = CompressedFrameStack(envs, 4)
        >>> obs, info = envs.reset(seed=123)
        >>> obs.shape, obs[0].shape
        ((3, 4, 4), (4, 4))
        >>> envs.close()

    Change logs:
     * v0.1.0 - Initially added
    """

    def __init__(
        self,
        env: VectorEnv[Any, Any, Any],
        stack_size: int,
        *,
        padding_type: str | Any = "reset",
        codec: str | Codec = "auto",
        frames_per_chunk: int | None = None,
    ) -> None:
        """Wraps a vector environment.

        Args:
            env: The environment; the observation space of a single one is a Box, Dict or Tuple.
            stack_size: How many observations are stacked.
            padding_type: What fills a stack after a reset: ``"reset"`` for the first observation, ``"zero"``
                for a zero-like instance of the single observation space, or an observation.
            codec: A :class:`gym_compress.Codec`, its string such as ``"zstd:1"``, or ``"auto"``, which is
                ``"lz4hc:2"`` for small frames here: all environments wait for it.
            frames_per_chunk: How many frames are compressed together, or ``None`` to choose by their size.

        Raises:
            TypeError: If ``stack_size`` is no integer, or the observation space is of another kind.
            ValueError: If ``stack_size`` is below 1, ``padding_type`` is neither a known word nor an instance
                of the observation space, the codec is unknown, ``frames_per_chunk`` is below 1, or the
                environment does not tell its autoreset mode.
        """
        gym.utils.RecordConstructorArgs.__init__(
            self,
            **json_arguments(
                stack_size=stack_size,
                padding_type=padding_type,
                codec=codec,
                frames_per_chunk=frames_per_chunk,
            ),
        )
        super().__init__(env)
        if self._autoreset_mode is None:
            raise ValueError(
                f"{env} does not tell when it resets an environment whose episode ended: set its "
                "metadata['autoreset_mode'] to a gymnasium.vector.AutoresetMode"
            )
        compression = {"codec": codec, "frames_per_chunk": frames_per_chunk, "quick": True}
        self._stacks = [
            ObservationStacker(env.single_observation_space, stack_size, padding_type, **compression)
            for _ in range(env.num_envs)
        ]
        self.stack_size: int = self._stacks[0].stack_size
        self.padding_type: str = self._stacks[0].padding_type
        self._compressed = self._stacks[0].compressed
        # of each environment, whether its next observation begins an episode, and its newest stack
        self._begins = np.ones(env.num_envs, np.bool_)
        self._newest: list[Any] = [None] * env.num_envs
        self._stacked = map_space(
            lambda leaf: batch_space(leaf, self.stack_size), env.single_observation_space
        )

        def stacked(batch: spaces.Space[Any], leaf: spaces.Space[Any]) -> spaces.Space[Any]:
            if not isinstance(batch, spaces.Box):
                rows = len(batch) if isinstance(batch, spaces.Tuple) else (batch.shape or (env.num_envs,))[0]
                return batch_space(leaf, rows)
            low, high = (
                np.repeat(bound[:, None], self.stack_size, axis=1) for bound in (batch.low, batch.high)
            )
            return spaces.Box(low, high, dtype=batch.dtype.type, seed=copy.deepcopy(batch.np_random))

        self.single_observation_space = self._stacks[0].observation_space
        self.observation_space = compressed_space(
            replace_leaves(stacked, env.observation_space, self._stacked), self._compressed
        )

    def step(self, actions: Any) -> _Step:
        """Steps through the environments and appends their observations to the stacks.

        Raises:
            ValueError: If an observation does not fit its space.
        """
        observations, rewards, terminated, truncated, infos = self.env.step(actions)
        slots, ended = self._slots(observations, infos), np.logical_or(terminated, truncated)
        same_step = self._autoreset_mode == AutoresetMode.SAME_STEP
        next_step = self._autoreset_mode == AutoresetMode.NEXT_STEP
        began = self._begins[slots]
        if same_step or next_step:  # what fails below leaves no stack that reaches over an episode's end
            self._begins[slots] |= ended
        # all is accepted before anything is pushed, so an observation that does not fit changes no stack
        has_final = same_step and "final_obs" in infos
        final = self._final(infos, ended) if has_final else {}
        final = {row: self._stacks[slots[row]].accept(last) for row, last in final.items()}
        frames = [self._stacks[slot].accept(self._row(observations, row)) for row, slot in enumerate(slots)]
        if has_final:
            stacks = {row: self._push(slots[row], frame, began[row]) for row, frame in final.items()}
            infos = _with_final(infos, stacks, len(slots))
        begins = began | ended if same_step else began
        for slot, frame, begin in zip(slots, frames, begins.tolist(), strict=True):
            self._newest[slot] = self._push(slot, frame, begin)
        self._begins[slots] = ended & next_step
        return self._batch(slots), rewards, terminated, truncated, infos

    def reset(self, *, seed: Any = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Resets the environments; a stack is the padding and the first observation.

        With ``options["reset_mask"]``, the other environments keep their stacks.

        Raises:
            ValueError: If an observation does not fit its space.
        """
        # environments take the mask out of the options
        mask = np.array((options or {}).get("reset_mask", True), dtype=np.bool_)
        observations, infos = self.env.reset(seed=seed, options=options)
        slots = self._slots(observations, infos)
        resets = mask | np.array([newest is None for newest in self._newest])
        self._begins |= resets
        frames = {
            slot: self._stacks[slot].accept(self._row(observations, row))
            for row, slot in enumerate(slots)
            if resets[slot]
        }
        for slot, frame in frames.items():
            self._newest[slot] = self._push(slot, frame, begins=True)
            self._begins[slot] = False
        return self._batch(slots), infos

    def _push(self, slot: int, frame: Any, begins: bool) -> Any:
        stack = self._stacks[slot]
        return stack.restart(frame) if begins else stack.push(frame)

    def _batch(self, slots: Sequence[int]) -> Any:
        """The newest stacks of some environments."""

        def leaf(compressed: Any, space: spaces.Space[Any], *stacks: Any) -> Any:
            if compressed is not None:
                return CompressedBatch.of(stacks)
            out: Any = create_empty_array(space, len(stacks))
            return concatenate(space, stacks, out)

        return map_leaves(leaf, self._compressed, self._stacked, *[self._newest[slot] for slot in slots])

    def close(self, **kwargs: Any) -> None:
        """Closes the environments and compresses the newest frames, which were raw so far."""
        try:
            for stack in self._stacks:
                stack.seal()
        finally:
            super().close(**kwargs)
