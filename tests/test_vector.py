"""The vector wrappers against Gymnasium's own wrappers in each environment."""

import copy
import json
import pickle
import warnings

import ale_py
import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv, VectorEnv, VectorWrapper
from gymnasium.vector.utils import batch_space
from gymnasium.wrappers import FrameStackObservation
from hypothesis import given
from hypothesis import strategies as st

from gym_compress import (
    CompressedBatch,
    CompressedBox,
    CompressedObservation,
    CompressedReplayBuffer,
    decompress_batch,
)
from gym_compress.recorder import Recorder
from gym_compress.wrappers.vector import CompressedFrameStack, CompressObservation
from tests.envs import PIXELS, AnyEnv, MovingSquare, assert_same
from tests.test_wrappers import each_space

each_mode = pytest.mark.parametrize("mode", list(AutoresetMode), ids=[mode.value for mode in AutoresetMode])
one_mode = pytest.mark.parametrize(
    "mode",
    [
        pytest.param(mode, id=mode.value, marks=[] if mode == AutoresetMode.SAME_STEP else pytest.mark.slow)
        for mode in AutoresetMode
    ],
)
DICT = spaces.Dict(
    image=spaces.Box(0, 255, (40, 30), np.uint8),
    vector=spaces.Box(-1, 1, (3,), np.float32),
    gear=spaces.Discrete(4, start=2),
)
LENGTHS = [(5, 3), (4,), (1, 7, 2)]


@pytest.fixture(autouse=True)
def _quiet():
    """Gymnasium's own words about unbounded boxes."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*(Casting input|maximum value is infinity|minimum value is).*")
        yield


def make(
    space=PIXELS,
    mode=AutoresetMode.NEXT_STEP,
    wrap=lambda env: env,
    vector=SyncVectorEnv,
    reuse=False,
    **kwargs,
):
    """A vector environment with episodes of different lengths."""
    envs = [lambda episodes=episodes: wrap(AnyEnv(space, episodes, reuse)) for episodes in LENGTHS]
    return vector(envs, autoreset_mode=mode, **kwargs)


def plain(observations):
    """A copy as arrays: environments may use theirs again."""
    if isinstance(observations, dict):
        return {key: plain(value) for key, value in observations.items()}
    if isinstance(observations, tuple):
        return tuple(map(plain, observations))
    return np.array(observations)


def assert_equal_runs(ours, theirs, steps=30):
    """Both give the same at each step, also when it is read in the end."""
    seen = []

    def check(mine, other):
        assert_same(mine, other)
        seen.append((mine, plain(other)))

    check(ours.reset(seed=4)[0], theirs.reset(seed=4)[0])
    for step in range(steps):
        actions = np.full(ours.num_envs, step % 3)
        mine, *ours_rest, ours_infos = ours.step(actions)
        other, *their_rest, their_infos = theirs.step(actions)
        check(mine, other)
        assert_same(tuple(ours_rest), tuple(their_rest))
        assert ours_infos.keys() == their_infos.keys()
        for last, expected in zip(
            ours_infos.get("final_obs", ()), their_infos.get("final_obs", ()), strict=True
        ):
            assert (last is None) == (expected is None)
            if last is not None:
                check(last, expected)
        ended = ours_rest[1] | ours_rest[2]
        if step == 17:
            check(ours.reset()[0], theirs.reset()[0])
        elif ended.any() and ours.env.unwrapped.autoreset_mode == AutoresetMode.DISABLED:
            options = [{"reset_mask": ended.copy()} for _ in range(2)]
            check(ours.reset(options=options[0])[0], theirs.reset(options=options[1])[0])
    ours.close()
    theirs.close()
    for mine, other in seen:
        assert_same(mine, other)


@one_mode
@each_space
def test_compress_equals_the_bare_environment(space, mode):
    assert_equal_runs(CompressObservation(make(space, mode), frames_per_chunk=3), make(space, mode))


@one_mode
@each_space
def test_stack_equals_gymnasiums_in_each_environment(space, mode):
    ours = CompressedFrameStack(make(space, mode), 3, frames_per_chunk=4)
    theirs = make(space, mode, lambda env: FrameStackObservation(env, 3))
    assert ours.single_observation_space == theirs.single_observation_space
    assert ours.observation_space == theirs.observation_space
    assert_equal_runs(ours, theirs)


@pytest.mark.parametrize("padding_type", ["reset", "zero", "custom"])
@each_mode
def test_padding_is_gymnasiums(mode, padding_type):
    if padding_type == "custom":
        padding_type = PIXELS.sample()
    ours = CompressedFrameStack(make(mode=mode), 5, padding_type=padding_type)
    assert_equal_runs(
        ours, make(mode=mode, wrap=lambda env: FrameStackObservation(env, 5, padding_type=padding_type))
    )


@each_mode
@pytest.mark.parametrize("space", [PIXELS, DICT], ids=["pixels", "dict"])
def test_arrays_that_are_used_again(space, mode):
    """By the vector environment, and by each environment; but Gymnasium itself overwrites final_obs then."""
    reuse = mode != AutoresetMode.SAME_STEP
    for wrap, their_wrap in (
        (lambda env: CompressedFrameStack(env, 3), lambda env: FrameStackObservation(env, 3)),
        (CompressObservation, lambda env: env),
    ):
        assert_equal_runs(wrap(make(space, mode, reuse=reuse, copy=False)), make(space, mode, their_wrap))


@each_mode
@pytest.mark.parametrize("shared_memory", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_stack_over_async(mode, shared_memory):
    ours = CompressedFrameStack(make(DICT, mode, vector=AsyncVectorEnv, shared_memory=shared_memory), 3)
    assert_equal_runs(ours, make(DICT, mode, lambda env: FrameStackObservation(env, 3)))


@each_mode
def test_stack_over_compressed_observations(mode):
    ours = CompressedFrameStack(CompressObservation(make(mode=mode), frames_per_chunk=2), 3)
    assert_equal_runs(ours, make(mode=mode, wrap=lambda env: FrameStackObservation(env, 3)))


@each_mode
def test_compressing_twice_changes_nothing(mode):
    assert_equal_runs(CompressObservation(CompressObservation(make(mode=mode))), make(mode=mode))


@pytest.mark.parametrize(
    "wrap", [CompressObservation, lambda env: CompressedFrameStack(env, 3)], ids=["compress", "stack"]
)
@pytest.mark.parametrize(
    "again", [copy.deepcopy, lambda env: pickle.loads(pickle.dumps(env))], ids=["copy", "pickle"]
)
def test_a_copy_goes_on_by_itself(wrap, again):
    stacked = lambda: FrameStackObservation(AnyEnv(), 3)  # noqa: E731
    first = wrap(SyncVectorEnv([stacked] * 2))
    first.env.envs = [stacked(), stacked()]
    first.reset(seed=0)
    for _ in range(4):
        first.step(np.zeros(2, int))
    if again is not copy.deepcopy:
        del first.env.env_fns  # lambdas
    second = again(first)
    for _ in range(9):
        mine, other = (env.step(np.zeros(2, int))[0] for env in (first, second))
        assert_same(mine, np.asarray(other))


@each_mode
def test_stacks_of_environments_share_their_frames(mode):
    """The environments stack; what a reset begins anew is kept, frame by frame, and no more."""
    wrap = lambda env: FrameStackObservation(env, 3)  # noqa: E731
    ours = CompressObservation(make(mode=mode, wrap=wrap), frames_per_chunk=2)
    assert_equal_runs(ours, make(mode=mode, wrap=wrap))


def test_shared_frames_are_written_once(monkeypatch):
    written = []
    append = Recorder.append
    monkeypatch.setattr(
        Recorder, "append", lambda self, frames: written.extend(frames) or append(self, frames)
    )
    envs = SyncVectorEnv([lambda: FrameStackObservation(MovingSquare(20), 4)] * 2, autoreset_mode="SameStep")
    envs = CompressObservation(envs)
    envs.reset(seed=0)
    for _ in range(50):
        envs.step(np.zeros(2, int))
    # a stack at the reset, a frame a step, and at each of two ends the first stack of the next episode
    assert len(written) == 2 * (4 + 50 + 2 * 4)


@given(
    count=st.sampled_from([1, 3, 4, 6]),
    stack_size=st.sampled_from(["auto", 1, "all"]),
    frames_per_chunk=st.integers(1, 5),
    moves=st.lists(st.integers(0, 7), min_size=1, max_size=40),
)
def test_whatever_is_shared_values_are_right(count, stack_size, frames_per_chunk, moves):
    """Observations move on by any number of slices, or stay, or come again: alike frames may lie anywhere."""
    frames = np.zeros((300, 3, 5), np.uint8)
    frames[:, 0, 0] = np.arange(300) // 2 % 5

    class Moving(gym.Env):
        observation_space = spaces.Box(0, 255, (count, 3, 5), np.uint8)
        action_space = spaces.Discrete(8)

        def reset(self, *, seed=None, options=None):
            self.at = 0
            return frames[:count], {}

        def step(self, action):
            self.at += int(action)
            return frames[self.at : self.at + count], 0.0, False, False, {}

    size = count if stack_size == "all" else stack_size
    ours = CompressObservation(
        SyncVectorEnv([Moving] * 2), stack_size=size, frames_per_chunk=frames_per_chunk
    )
    seen = [(ours.reset()[0], (0, 0))]
    at = np.zeros(2, int)
    for move in moves:
        at += move, (3 * move) % 8
        seen.append((ours.step(np.array([move, (3 * move) % 8]))[0], tuple(at)))
    for batch, places in seen:
        assert_same(batch, np.stack([frames[place : place + count] for place in places]))


def test_observation_spaces_equal_gymnasiums():
    ours = CompressObservation(make(DICT))
    theirs = make(DICT)
    assert ours.observation_space == theirs.observation_space
    assert ours.single_observation_space == theirs.single_observation_space
    obs, _ = ours.reset(seed=0)
    assert obs in ours.observation_space
    assert {key: leaf[1] for key, leaf in obs.items()} in ours.single_observation_space
    assert isinstance(ours.observation_space["image"], CompressedBox)
    assert not isinstance(ours.observation_space["vector"], CompressedBox)


def test_bounds_that_differ_between_environments():
    def env(high):
        return AnyEnv(spaces.Box(0, high, (24, 20), np.uint8))

    makers = [lambda high=high: env(high) for high in (3, 200)]
    stackers = [lambda high=high: FrameStackObservation(env(high), 2) for high in (3, 200)]
    ours = CompressedFrameStack(SyncVectorEnv(makers, observation_mode="different"), 2)
    theirs = SyncVectorEnv(stackers, observation_mode="different")
    assert ours.observation_space == theirs.observation_space
    assert_equal_runs(ours, theirs)


class Some(VectorEnv):
    """Gives observations of some environments at a step, in any order, and names them in the infos."""

    def __init__(self, mode, rows=2):
        self.envs = [AnyEnv(episodes=episodes) for episodes in LENGTHS]
        self.num_envs, self.rows = len(self.envs), rows
        self.metadata = {"autoreset_mode": mode}
        self.single_observation_space, self.single_action_space = PIXELS, spaces.Discrete(3)
        self.observation_space = batch_space(PIXELS, rows)
        self.action_space = batch_space(self.single_action_space, rows)
        self.rng = np.random.default_rng(0)
        self.ended = [True] * 3

    def _some(self, observe):
        slots = self.rng.permutation(3)[: self.rows]
        observations, ended, finals = [], [], np.full(self.rows, None, dtype=object)
        for row, slot in enumerate(slots):
            observation, end, finals[row] = observe(slot)
            observations.append(observation)
            ended.append(end)
        infos = {"env_id": slots.astype(np.int32)}
        if any(final is not None for final in finals):
            infos["final_obs"] = np.stack([np.zeros((24, 20), np.uint8) if f is None else f for f in finals])
        return np.stack(observations), np.array(ended), infos

    def reset(self, *, seed=None, options=None):
        self.ended = [True] * 3
        for slot, env in enumerate(self.envs):
            env.reset(seed=seed + slot)
        observations, _, infos = self._some(self._step)
        return observations, infos

    def _step(self, slot):
        env, mode = self.envs[slot], self.metadata["autoreset_mode"]
        if self.ended[slot]:
            self.ended[slot] = False
            return env.reset()[0], False, None
        observation, _, terminated, truncated, _ = env.step(0)
        end = terminated or truncated
        if end and mode == AutoresetMode.SAME_STEP:
            return env.reset()[0], True, observation
        self.ended[slot] = end
        return observation, end, None

    def step(self, actions):
        observations, ended, infos = self._some(self._step)
        return observations, np.zeros(self.rows), ended, np.zeros(self.rows, bool), infos


class Recorded(VectorWrapper):
    """Keeps copies of what its environment gives."""

    def reset(self, **kwargs):
        self.given = self.env.reset(**kwargs)
        return self.given

    def step(self, actions):
        self.given = self.env.step(actions)
        return self.given


@pytest.mark.parametrize(
    "mode", [AutoresetMode.NEXT_STEP, AutoresetMode.SAME_STEP], ids=lambda mode: mode.value
)
@pytest.mark.parametrize("rows", [1, 2, 3])
def test_rows_belong_to_the_environments_that_the_infos_name(mode, rows):
    record = Recorded(Some(mode, rows))
    ours = CompressedFrameStack(record, 3, frames_per_chunk=2)
    assert ours.observation_space.shape == (rows, 3, 24, 20)
    queues, begins = {}, dict.fromkeys(range(3), True)
    kept = []

    def expect(slot, frame):
        if begins[slot]:
            queues[slot] = [frame] * 3
        queues[slot] = [*queues[slot][1:], frame]
        begins[slot] = False
        return np.stack(queues[slot])

    obs, infos = ours.reset(seed=0)
    for _ in range(60):
        frames, slots = record.given[0], infos["env_id"]
        ended = np.zeros(rows, bool)
        if len(record.given) == 5:
            ended = record.given[2]
        for row, slot in enumerate(slots):
            if ended[row] and mode == AutoresetMode.SAME_STEP:
                kept.append((infos["final_obs"][row], expect(slot, record.given[4]["final_obs"][row])))
                begins[slot] = True
            kept.append((obs[row], expect(slot, frames[row])))
            if ended[row] and mode == AutoresetMode.NEXT_STEP:
                begins[slot] = True
        if "final_obs" in infos:
            assert [last is None for last in infos["final_obs"]] == (~ended).tolist()
        obs, *_, infos = ours.step(np.zeros(rows, int))
    assert len(kept) >= 60 * rows
    for mine, other in kept:
        assert_same(mine, other)


def test_env_id_of_an_environments_own_infos_has_another_meaning():
    class Named(AnyEnv):
        def step(self, action):
            *rest, infos = super().step(action)
            return *rest, {**infos, "env_id": 7}

    def make(wrap):
        return SyncVectorEnv(
            [lambda episodes=episodes: wrap(Named(PIXELS, episodes)) for episodes in LENGTHS]
        )

    ours, theirs = make(lambda env: env), make(lambda env: FrameStackObservation(env, 3))
    assert_equal_runs(CompressedFrameStack(ours, 3), theirs)


@pytest.mark.parametrize("ids", [None, [0, 0], [0, 3], [-1, 1], [0]])
def test_rows_that_are_not_named_are_refused(ids):
    class Unnamed(Some):
        def step(self, actions):
            *rest, infos = super().step(actions)
            infos = {} if ids is None else {"env_id": np.array(ids)}
            return *rest, infos

    ours = CompressObservation(Unnamed(AutoresetMode.NEXT_STEP))
    ours.reset(seed=0)
    with pytest.raises(ValueError, match=r"observations of 3 environments.*env_id.*got \[2\]"):
        ours.step(np.zeros(2, int))


@pytest.mark.parametrize(
    ("mode", "kwargs"),
    [
        pytest.param(
            mode,
            kwargs,
            marks=[] if (mode, *kwargs) in {("NextStep",), ("SameStep", "batch_size")} else pytest.mark.slow,
        )
        for mode in ("NextStep", "SameStep")
        for kwargs in ({}, {"grayscale": False}, {"stack_num": 1}, {"batch_size": 2})
    ],
    ids=str,
)
def test_ales_environment(mode, kwargs):
    record = Recorded(ale_py.AtariVectorEnv("breakout", 3, autoreset_mode=mode, episodic_life=True, **kwargs))
    ours = CompressObservation(record)
    kept = [(ours.reset(seed=3)[0], record.given[0].copy())]
    rng, ends = np.random.default_rng(0), 0
    for _ in range(120):
        obs, _, terminated, truncated, infos = ours.step(rng.integers(0, 4, len(kept[0][0])))
        kept.append((obs, record.given[0].copy()))
        assert ("final_obs" in infos) == ("final_obs" in record.given[4])
        for row in np.flatnonzero(terminated | truncated):
            ends += 1
            if mode == "SameStep":
                kept.append((infos["final_obs"][row], record.given[4]["final_obs"][row].copy()))
    ours.close()
    assert ends > 5
    for mine, other in kept:
        assert_same(mine, other)
    if len({len(mine) for mine, _ in kept}) == 1:
        assert_same(decompress_batch([mine for mine, _ in kept]), np.stack([other for _, other in kept]))


def test_ales_environment_is_made_by_its_name():
    gym.register_envs(ale_py)
    envs = CompressObservation(gym.make_vec("ALE/Pong-v5", num_envs=2))
    obs, _ = envs.reset(seed=0)
    assert (type(obs), obs.shape) == (CompressedBatch, (2, 4, 84, 84))
    envs.close()


@pytest.mark.slow
def test_environments_of_different_modes_are_told_apart():
    """ALE's environments share their metadata, in which the one made last has its mode."""
    same_step, next_step = (
        ale_py.AtariVectorEnv("pong", 2, max_num_frames_per_episode=20, autoreset_mode=mode)
        for mode in ("SameStep", "NextStep")
    )
    assert same_step.metadata["autoreset_mode"] == AutoresetMode.NEXT_STEP
    ours = CompressedFrameStack(same_step, 3)
    ours.reset(seed=0)
    last = next(
        infos["final_obs"][0]
        for *_, infos in iter(lambda: ours.step(np.zeros(2, int)), None)
        if "final_obs" in infos
    )
    assert last.shape == (3, 4, 84, 84)
    ours.close()
    next_step.close()


def test_a_masked_reset_in_any_mode_keeps_the_other_stacks():
    for mode in AutoresetMode:
        ours, theirs = (
            CompressedFrameStack(make(mode=mode), 3),
            make(mode=mode, wrap=lambda e: FrameStackObservation(e, 3)),
        )
        for env in (ours, theirs):
            env.reset(seed=0)
        for step in range(12):
            assert_same(ours.step(np.zeros(3, int))[0], theirs.step(np.zeros(3, int))[0])
            mask = np.array([step % 2 == 0, True, step % 3 == 0])
            if mode == AutoresetMode.DISABLED:
                mask[:] = True, True, True
            options = [{"reset_mask": mask.copy(), "else": 1} for _ in range(2)]
            assert_same(ours.reset(options=options[0])[0], theirs.reset(options=options[1])[0])
            assert options[0] == options[1] == {"else": 1}


def test_the_infos_of_the_environment_are_left_alone():
    record = Recorded(make(mode=AutoresetMode.SAME_STEP))
    ours = CompressObservation(record)
    ours.reset(seed=0)
    for _ in range(6):
        *_, infos = ours.step(np.zeros(3, int))
        if "final_obs" in infos:
            given = record.given[4]
            assert all(isinstance(last, np.ndarray) for last in given["final_obs"] if last is not None)
            assert list(infos) == list(given)
            assert infos["_final_obs"] is given["_final_obs"]


# Bad input

WRAPPERS = [CompressObservation, lambda env, **kwargs: CompressedFrameStack(env, 3, **kwargs)]
each_wrapper = pytest.mark.parametrize("wrap", WRAPPERS, ids=["compress", "stack"])


@each_wrapper
@pytest.mark.parametrize("space", [spaces.Discrete(3), spaces.MultiBinary(40), spaces.Text(4)], ids=str)
def test_other_spaces_are_refused_and_the_environment_closes(wrap, space):
    envs = AsyncVectorEnv([lambda: AnyEnv(space)] * 2)
    with pytest.raises(TypeError, match="Expected an observation space that is a Box, Dict or Tuple"):
        wrap(envs)
    envs.close()
    assert envs.closed
    assert not any(process.is_alive() for process in envs.processes)


@pytest.mark.parametrize(
    ("kwargs", "error", "message"),
    [
        ({"stack_size": 0}, ValueError, "greater than zero, actual value: 0"),
        ({"stack_size": -2}, ValueError, "greater than zero, actual value: -2"),
        ({"stack_size": 2.0}, TypeError, "integer, actual type: <class 'float'>"),
        ({"stack_size": 2, "padding_type": "ones"}, ValueError, "actual value: 'ones'"),
        ({"stack_size": 2, "codec": "gzip"}, ValueError, "Unknown codec 'gzip'"),
        ({"stack_size": 2, "frames_per_chunk": 0}, ValueError, "at least 1, actual value: 0"),
    ],
    ids=str,
)
def test_wrong_arguments_of_a_stack(kwargs, error, message):
    envs = make()
    with pytest.raises(error, match=message):
        CompressedFrameStack(envs, **kwargs)
    envs.close()


@pytest.mark.parametrize(
    ("kwargs", "error", "message"),
    [
        ({"stack_size": 0}, ValueError, "'auto' or a positive integer, actual: 0"),
        ({"stack_size": 5}, ValueError, "stack_size 5 does not divide axis 0"),
        ({"stack_size": "four"}, ValueError, "actual: 'four'"),
        ({"codec": 3}, TypeError, "a string or a Codec"),
        ({"frames_per_chunk": 1.5}, TypeError, "integer or None"),
    ],
    ids=str,
)
def test_wrong_arguments_of_compress(kwargs, error, message):
    with pytest.raises(error, match=message):
        CompressObservation(make(), **kwargs)


@each_wrapper
def test_an_unknown_autoreset_mode_is_refused(wrap):
    envs = make()
    envs.autoreset_mode = "sometimes"
    with pytest.raises(ValueError, match="Unknown autoreset mode 'sometimes', expected one of"):
        wrap(envs)
    envs = Some("never")
    with pytest.raises(ValueError, match="Unknown autoreset mode 'never'"):
        wrap(envs)


def test_a_stack_needs_to_know_the_autoreset_mode():
    envs = Some(None)
    with pytest.raises(ValueError, match=r"set its metadata\['autoreset_mode'\]"):
        CompressedFrameStack(envs, 3)
    assert CompressObservation(envs).reset(seed=0)[0].shape == (2, 24, 20)


@each_wrapper
@pytest.mark.parametrize("env", [AnyEnv(), None, "CartPole-v1"], ids=["single", "none", "name"])
def test_what_is_no_vector_environment_is_refused(wrap, env):
    with pytest.raises(TypeError, match="VectorEnv"):
        wrap(env)


@each_wrapper
def test_infos_that_are_no_dict_are_refused(wrap):
    ours = wrap(gym.wrappers.vector.DictInfoToList(make()))
    with pytest.raises(
        TypeError, match="infos that are a dict, got <class 'list'>: put wrappers that change them"
    ):
        ours.reset(seed=0)


@pytest.mark.parametrize("ids", [[0.0, 1.0], [[0, 1]], "01", None], ids=str)
def test_env_id_that_is_no_list_of_integers_has_no_meaning(ids):
    class Odd(Some):
        def step(self, actions):
            return *super().step(actions)[:4], {"env_id": ids}

    ours = CompressObservation(Odd(AutoresetMode.NEXT_STEP))
    ours.reset(seed=0)
    with pytest.raises(ValueError, match="observations of 3 environments"):
        ours.step(np.zeros(2, int))


@each_wrapper
def test_final_obs_as_a_list_is_one_an_environment(wrap):
    """Also of a Tuple space with as many parts as there are environments."""
    space = spaces.Tuple([spaces.Box(0, 255, (40, 30), np.uint8)] * 3)

    class Listed(Recorded):
        def step(self, actions):
            *rest, infos = super().step(actions)
            if "final_obs" in infos:
                infos = {**infos, "final_obs": list(infos["final_obs"])}
            return *rest, infos

    ours = wrap(Listed(make(space, AutoresetMode.SAME_STEP)))
    stack = isinstance(ours, CompressedFrameStack)
    theirs = make(space, AutoresetMode.SAME_STEP, lambda env: FrameStackObservation(env, 3) if stack else env)
    assert_equal_runs(ours, theirs)


@each_wrapper
def test_wrong_actions_raise_gymnasiums_error(wrap):
    ours, theirs = wrap(make()), make()
    errors = []
    for env in (theirs, ours):
        env.reset(seed=0)
        try:
            env.step(np.zeros(2, int))
        except Exception as error:
            errors.append((type(error), str(error)))
        else:
            errors.append(None)  # Gymnasium before 1.2.1 steps fewer environments
    assert errors[0] == errors[1]


@each_wrapper
def test_an_observation_that_does_not_fit_changes_nothing(wrap):
    class Wrong(Recorded):
        wrong = False

        def step(self, actions):
            observations, *rest = super().step(actions)
            if self.wrong:
                observations = observations.astype(np.uint16)
                observations[1, 0, 0] = 300
            return observations, *rest

    env = Wrong(SyncVectorEnv([lambda: AnyEnv(episodes=(50,))] * 3))
    ours = wrap(env)
    before = ours.reset(seed=0)[0]
    env.wrong = True
    with pytest.raises(ValueError, match="value 300 does not fit"):
        ours.step(np.zeros(3, int))
    env.wrong = False
    after = ours.step(np.zeros(3, int))[0]
    if before.ndim == 4:
        frame = env.given[0]
        assert_same(after, np.concatenate([np.asarray(before)[:, 1:], frame[:, None]], axis=1))
    else:
        assert_same(after, env.given[0])


@pytest.mark.parametrize("fails", ["unfit", "interrupt"])
@pytest.mark.parametrize(
    "mode", [AutoresetMode.NEXT_STEP, AutoresetMode.SAME_STEP], ids=lambda mode: mode.value
)
def test_no_stack_reaches_over_an_end_in_a_step_that_failed(mode, fails, monkeypatch):
    class Counting(gym.Env):
        observation_space = spaces.Box(0, 255, (1,), np.uint8)
        action_space = spaces.Discrete(2)
        count = 0

        def _observe(self):
            Counting.count += 1
            return np.array([Counting.count], np.uint8)

        length = 4

        def reset(self, *, seed=None, options=None):
            self.left = self.length
            return self._observe(), {}

        def step(self, action):
            self.left -= 1
            return self._observe(), 0.0, self.left == 0, False, {}

    class Unfit(Recorded):
        wrong = False

        def step(self, actions):
            observations, *rest = super().step(actions)
            return (observations + np.uint64(999) if self.wrong else observations), *rest

    env = Unfit(SyncVectorEnv([Counting], autoreset_mode=mode))
    ours = CompressedFrameStack(env, 3)
    ours.reset()
    for _ in range(3):
        ours.step(np.zeros(1, int))
    with monkeypatch.context() as patch:  # the step in which the episode ends
        if fails == "unfit":
            env.wrong = True
        else:
            patch.setattr(ours, "_push", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises((ValueError, KeyboardInterrupt)):
            ours.step(np.zeros(1, int))
        env.wrong = False
    newest = Counting.count + 1
    if mode == AutoresetMode.SAME_STEP:  # the next step ends the new episode, of which no frame was seen yet
        env.env.envs[0].left = 1
        *_, infos = ours.step(np.zeros(1, int))
        assert np.asarray(infos["final_obs"][0]).ravel().tolist() == [newest] * 3
        newest += 2
    assert np.asarray(ours.step(np.zeros(1, int))[0]).ravel().tolist()[-1] == newest
    assert min(np.asarray(ours._newest[0]).ravel()) >= newest - 1


@pytest.mark.parametrize("at", range(3))
def test_what_is_interrupted_is_written_anew(monkeypatch, at):
    """An interrupt at any append of a step leaves no wrong value behind."""
    ours, theirs = (make(wrap=lambda env: FrameStackObservation(env, 3)) for _ in range(2))
    ours = CompressObservation(ours)
    for env in (ours, theirs):
        env.reset(seed=0)
    append, calls = Recorder.append, []

    def interrupted(self, frame):
        calls.append(frame)
        if len(calls) == at + 1:
            raise KeyboardInterrupt
        return append(self, frame)

    for step in range(10):
        if step == 5:
            theirs.step(np.zeros(3, int))
            monkeypatch.setattr(Recorder, "append", interrupted)
            with pytest.raises(KeyboardInterrupt):
                ours.step(np.zeros(3, int))
        else:
            assert_same(ours.step(np.zeros(3, int))[0], theirs.step(np.zeros(3, int))[0])


def test_arguments_are_recorded_as_json():
    ours = CompressedFrameStack(CompressObservation(make(), codec="zstd:2"), np.int64(2), padding_type="zero")
    assert json.loads(json.dumps(ours._saved_kwargs))["stack_size"] == 2
    assert json.loads(json.dumps(ours.env._saved_kwargs)) == {
        "stack_size": "auto",
        "codec": "zstd:2",
        "frames_per_chunk": None,
    }


# Batches


@pytest.fixture(scope="module")
def kept():
    """Batches of stacks, and what they are as arrays."""
    envs = CompressedFrameStack(SyncVectorEnv([lambda: MovingSquare(9)] * 3), 4, frames_per_chunk=5)
    batches = [envs.reset(seed=0)[0]] + [envs.step(np.zeros(3, int))[0] for _ in range(40)]
    theirs = SyncVectorEnv([lambda: FrameStackObservation(MovingSquare(9), 4)] * 3)
    return batches, [theirs.reset(seed=0)[0]] + [theirs.step(np.zeros(3, int))[0] for _ in range(40)]


def test_a_batch_is_read_as_an_array(kept):
    for batch, array in zip(*kept, strict=True):
        assert isinstance(batch, CompressedBatch)
        assert (batch.shape, batch.dtype, len(batch), batch.ndim) == ((3, 4, 84, 84), np.uint8, 3, 4)
        assert (batch.size, batch.nbytes) == (array.size, array.nbytes)
        assert 0 < batch.cbytes <= batch.nbytes
        assert_same(batch, array)
        assert_same(np.from_dlpack(batch), array)
        assert_same(torch.as_tensor(batch).numpy(), array)
        assert_same(batch.reshape(3, -1), array.reshape(3, -1))
        assert_same(np.asarray(batch, np.float32), array.astype(np.float32))


def test_a_batch_gives_the_observations_of_environments(kept):
    for batch, array in zip(*kept, strict=True):
        assert all(isinstance(observation, CompressedObservation) for observation in batch)
        for observation, expected in zip(batch, array, strict=True):
            assert_same(observation, expected)
        for index in (0, 2, -1, np.int64(1)):
            assert isinstance(batch[index], CompressedObservation)
            assert_same(batch[index], array[index])
        for key in (
            slice(1, 3),
            slice(None, None, -2),
            [2, 0],
            np.array([True, False, True]),
            np.array([1, 1]),
        ):
            assert isinstance(batch[key], CompressedBatch)
            assert_same(batch[key], array[key])
        for key in (
            (1, 2),
            (1,),
            (np.int64(0), slice(2), 3),
            (..., 0),
            (slice(2), 1),
            None,
            True,
            slice(3, 3),
            [],
        ):
            assert isinstance(batch[key], np.ndarray)
            assert_same(batch[key], array[key])
        for index in (3, -4):
            with pytest.raises(IndexError, match=f"Environment {index} is out of range for a batch of 3"):
                batch[index]


def test_a_batch_never_changes(kept):
    batch = kept[0][7]
    with pytest.raises(TypeError, match="never changes: put observations into a list"):
        batch[0] = batch[1]
    assert copy.copy(batch) is copy.deepcopy(batch) is batch.copy() is batch
    with pytest.raises(ValueError, match="without a copy"):
        np.asarray(batch, copy=False)
    with pytest.raises(TypeError, match="unhashable"):
        hash(batch)


def test_equality_of_batches_is_one_bool(kept):
    (first, second), (array, _) = (each[20:22] for each in kept)
    assert (first == CompressedBatch.of(list(first)), first == array, first == second) == (True, True, False)
    assert (first == first[0], first == None, first != array) == (False, False, False)  # noqa: E711
    floats = CompressObservation(SyncVectorEnv([lambda: AnyEnv(spaces.Box(-1, 1, (30,)))]))
    assert (obs := floats.reset(seed=0)[0]) == obs


def test_pickles_hold_each_chunk_once(kept):
    batches, arrays = kept
    for mine, other in zip(pickle.loads(pickle.dumps(batches)), arrays, strict=True):
        assert type(mine) is CompressedBatch
        assert_same(mine, other)
    assert len(pickle.dumps(batches[:25])) < len(pickle.dumps(arrays[:25])) / 30


def test_a_list_of_batches_is_time_by_environment(kept):
    batches, arrays = kept
    assert_same(decompress_batch(batches), np.stack(arrays))
    assert_same(decompress_batch(batches[3]), arrays[3])
    assert_same(decompress_batch([batch[2] for batch in batches]), np.stack(arrays)[:, 2])
    assert_same(
        decompress_batch([batches[30], arrays[2], batches[1]]), np.stack([arrays[30], arrays[2], arrays[1]])
    )
    out = np.empty((2, 3, 4, 84, 84), np.uint8)
    assert decompress_batch(batches[8:10], out=out) is out
    assert_same(out, np.stack(arrays[8:10]))
    for wrong in (batches[1][0], arrays[1][:2], CompressedBatch.of(list(batches[1])[:2])):
        with pytest.raises(ValueError, match=r"Expected observation 1 to have shape \(3, 4, 84, 84\)"):
            decompress_batch([batches[0], wrong])


def test_dicts_of_batches_are_time_by_environment():
    ours, theirs = CompressObservation(make(DICT)), make(DICT)
    mine = [ours.reset(seed=0)[0]] + [ours.step(np.zeros(3, int))[0] for _ in range(20)]
    other = [theirs.reset(seed=0)[0]] + [theirs.step(np.zeros(3, int))[0] for _ in range(20)]
    assert_same(decompress_batch(mine), {key: np.stack([obs[key] for obs in other]) for key in other[0]})


def test_replay_memory_takes_batches():
    envs = SyncVectorEnv([lambda: FrameStackObservation(MovingSquare(9), 4)] * 3, autoreset_mode="SameStep")
    ours = CompressObservation(envs)
    rb = CompressedReplayBuffer(300, ours.single_observation_space, ours.single_action_space, None, 3, seed=0)
    dense = []
    obs, _ = ours.reset(seed=0)
    for _ in range(60):
        next_obs, reward, terminated, truncated, infos = ours.step(np.zeros(3, int))
        real = list(next_obs)
        for i in np.flatnonzero(terminated | truncated):
            real[i] = infos["final_obs"][i]
        dense.append((np.array(obs), np.stack([np.asarray(each) for each in real])))
        rb.add(obs, real, np.zeros(3), reward, terminated, infos)
        obs = next_obs
    batch = rb.get(np.arange(180))
    assert_same(batch.observations, np.concatenate([pair[0] for pair in dense]))
    assert_same(batch.next_observations, np.concatenate([pair[1] for pair in dense]))


def test_replay_memory_takes_dicts_of_batches():
    """With the last observation of an episode in the place of the first one of the next."""
    ours, theirs = (make(DICT, AutoresetMode.SAME_STEP) for _ in range(2))
    ours = CompressObservation(ours)
    rb = CompressedReplayBuffer(300, ours.single_observation_space, ours.single_action_space, None, 3, seed=0)
    obs, _ = ours.reset(seed=0)
    dense, _ = theirs.reset(seed=0)
    rows = []
    for _ in range(20):
        next_obs, reward, terminated, truncated, infos = ours.step(np.zeros(3, int))
        dense_next, *_, dense_infos = theirs.step(np.zeros(3, int))
        real = {key: list(batch) for key, batch in next_obs.items()}
        want = {key: batch.copy() for key, batch in dense_next.items()}
        for i in np.flatnonzero(terminated | truncated):
            for key in real:
                real[key][i] = infos["final_obs"][i][key]
                want[key][i] = dense_infos["final_obs"][i][key]
        rb.add(obs, real, np.zeros(3), reward, terminated, infos)
        rows.append((dense, want))
        obs, dense = next_obs, dense_next
    batch = rb.get(np.arange(60))
    for key, space in DICT.items():
        shape = (60, *(space.shape or (1,)))  # numbers have an axis, as in SB3
        assert_same(batch.observations[key], np.concatenate([row[0][key] for row in rows]).reshape(shape))
        assert_same(
            batch.next_observations[key], np.concatenate([row[1][key] for row in rows]).reshape(shape)
        )


def test_replay_memory_takes_batches_of_numbers():
    class Number(AnyEnv):
        def __init__(self):
            super().__init__(spaces.Box(-1, 1, (), np.float32))

    ours = CompressObservation(SyncVectorEnv([Number] * 2, autoreset_mode="SameStep"))
    rb = CompressedReplayBuffer(20, ours.single_observation_space, ours.single_action_space, None, 2)
    obs, _ = ours.reset(seed=0)
    rb.add(obs, list(obs), [0, 0], [0, 0], [0, 0], [{}, {}])
    assert_same(rb.get([0, 1]).observations, np.asarray(obs))
    assert_equal_runs(
        CompressObservation(CompressObservation(SyncVectorEnv([Number] * 2, autoreset_mode="SameStep"))),
        SyncVectorEnv([Number] * 2, autoreset_mode="SameStep"),
    )
