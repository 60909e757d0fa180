"""The wrappers against Gymnasium's own, for every kind of space."""

import copy
import json
import pickle
import warnings

import ale_py
import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.utils.env_checker import check_env
from gymnasium.wrappers import AtariPreprocessing, FrameStackObservation
from hypothesis import given
from hypothesis import strategies as st

from gym_compress import (
    Codec,
    CompressedAtariPreprocessing,
    CompressedBox,
    CompressedFrameStack,
    CompressedObservation,
    CompressObservation,
    decompress_batch,
)
from tests.envs import PIXELS, AnyEnv, MovingSquare, assert_same, play

gym.register_envs(ale_py)

LARGE = spaces.Box(-5, 5, (30, 20), np.float32)
SPACES = {
    "pixels": PIXELS,
    "floats": LARGE,
    "doubles": spaces.Box(-np.inf, np.inf, (40, 4), np.float64),
    "halves": spaces.Box(-1, 1, (40, 20), np.float16),
    "booleans": spaces.Box(0, 1, (40, 30), bool),
    "int64": spaces.Box(-(2**40), 2**40, (12, 11), np.int64),
    "vector": spaces.Box(-1, 1, (3,), np.float32),
    "number": spaces.Box(-1, 1, (), np.float64),
    "positive": spaces.Box(3, 9, (12, 12), np.int16),
    "empty": spaces.Box(-1, 1, (0, 3), np.float32),
    "dict": spaces.Dict(image=PIXELS, vector=spaces.Box(-1, 1, (3,)), gear=spaces.Discrete(4, start=2)),
    "tuple": spaces.Tuple([LARGE, spaces.MultiBinary(4), spaces.MultiDiscrete([3, 4])]),
    "nested": spaces.Dict(z=spaces.Tuple([PIXELS, spaces.Dict(deep=LARGE)]), a=spaces.Tuple([PIXELS])),
    "odd leaves": spaces.Dict(
        image=PIXELS,
        words=spaces.Text(6),
        graph=spaces.Graph(spaces.Box(-1, 1, (2,)), spaces.Discrete(3)),
        some=spaces.Sequence(spaces.Box(-1, 1, (2,))),
    ),
}
each_space = pytest.mark.parametrize("space", SPACES.values(), ids=SPACES)


@pytest.fixture(autouse=True)
def _quiet():
    """Gymnasium's own words about observations that are no ndarrays, and about unbounded boxes."""
    with warnings.catch_warnings():
        warnings.filterwarnings(
            "ignore",
            ".*(was expecting a numpy array|Casting input|maximum value is infinity|minimum value is).*",
        )
        yield


def assert_equal_runs(ours, theirs, steps=40):
    assert_same(tuple(play(ours, steps)), tuple(play(theirs, steps)))


@each_space
def test_compress_equals_the_bare_environment(space):
    assert_equal_runs(CompressObservation(AnyEnv(space, reuse=True), frames_per_chunk=3), AnyEnv(space))


@each_space
@pytest.mark.parametrize("padding_type", ["reset", "zero", "custom"])
def test_stack_equals_gymnasiums(space, padding_type):
    if padding_type == "custom":
        padding_type = space.sample()
        while isinstance(padding_type, np.ndarray) and padding_type.ndim == 0 and padding_type not in space:
            padding_type = np.asarray(space.sample())
        padding_type = (
            np.asarray(padding_type, space.dtype) if isinstance(space, spaces.Box) else padding_type
        )
    ours = CompressedFrameStack(AnyEnv(space, reuse=True), 3, padding_type=padding_type, frames_per_chunk=4)
    assert_equal_runs(ours, FrameStackObservation(AnyEnv(space), 3, padding_type=padding_type))


@given(
    stack_size=st.integers(1, 7),
    frames_per_chunk=st.integers(1, 6),
    codec=st.sampled_from(["auto", "lz4:3", "zstd:1", "none"]),
    padding_type=st.sampled_from(["reset", "zero"]),
    resets=st.lists(st.integers(0, 9), max_size=8),
    compressed_already=st.booleans(),
)
def test_stack_equals_gymnasiums_in_any_order_of_calls(
    stack_size, frames_per_chunk, codec, padding_type, resets, compressed_already
):
    """Resets come at any step, also twice in a row, whether an episode has ended or not."""
    inner = AnyEnv(PIXELS, episodes=(1000,), reuse=True)
    compression = {"codec": codec, "frames_per_chunk": frames_per_chunk}
    if compressed_already:
        inner, compression = CompressObservation(inner, **compression), {}
    ours = CompressedFrameStack(inner, stack_size, padding_type=padding_type, **compression)
    theirs = FrameStackObservation(AnyEnv(PIXELS, episodes=(1000,)), stack_size, padding_type=padding_type)
    seen = [(ours.reset(seed=1)[0], theirs.reset(seed=1)[0])]
    for gap in resets:
        seen.extend((ours.step(0)[0], theirs.step(0)[0]) for _ in range(gap))
        seen.append((ours.reset()[0], theirs.reset()[0]))
    for mine, other in seen:  # all again, now that much has happened since
        assert_same(mine, other)
    ours.close()
    for mine, other in seen:
        assert_same(mine, other)


def test_step_before_reset_is_as_gymnasiums():
    class Careless(MovingSquare):
        t = end = 0

    assert_same(
        CompressedFrameStack(Careless(), 3).step(0)[0], FrameStackObservation(Careless(), 3).step(0)[0]
    )


def test_stack_of_stacks_equals_gymnasiums():
    ours = CompressedFrameStack(CompressedFrameStack(AnyEnv(), 3, frames_per_chunk=2), 2, padding_type="zero")
    theirs = FrameStackObservation(FrameStackObservation(AnyEnv(), 3), 2, padding_type="zero")
    assert_equal_runs(ours, theirs)


def test_nothing_is_encoded_twice(monkeypatch):
    """What the inner wrappers compressed is read and recorded by the outer one; theirs is not kept, so not encoded."""
    encoded = []
    encode = Codec.encode
    monkeypatch.setattr(Codec, "encode", lambda self, *args: encoded.append(1) or encode(self, *args))
    inner = CompressObservation(MovingSquare(episode=10**9), frames_per_chunk=10)
    env = CompressObservation(CompressedFrameStack(inner, 4), frames_per_chunk=5)
    kept = play(env, 100)
    assert all(isinstance(obs, CompressedObservation) for obs in kept)
    # a chunk of the outer one each five observations, but for those that are raw
    assert len(encoded) == len(kept) // 5 - 1


@pytest.mark.parametrize("wrap", [CompressObservation, lambda env: CompressedFrameStack(env, 3)])
@pytest.mark.parametrize("space", [SPACES[name] for name in ("pixels", "dict", "nested", "odd leaves")])
def test_an_observation_never_changes(space, wrap):
    env = wrap(AnyEnv(space, reuse=True))
    kept = play(env, 30)
    before = pickle.dumps([_plain(obs) for obs in kept])
    twin = copy.deepcopy(env)
    play(twin, 40, seed=8)
    play(env, 40, seed=9)
    decompress_batch(
        [obs["image"] if isinstance(obs, dict) and "image" in obs else _leaf(obs) for obs in kept]
    )
    env.close()
    del env, twin
    assert pickle.dumps([_plain(obs) for obs in kept]) == before


def _leaf(obs):
    while isinstance(obs, (dict, tuple)):
        obs = next(iter(obs.values())) if isinstance(obs, dict) else obs[0]
    return obs


def _plain(obs):
    if isinstance(obs, dict):
        return {key: _plain(value) for key, value in obs.items()}
    if type(obs) is tuple:
        return tuple(_plain(value) for value in obs)
    return np.asarray(obs) if isinstance(obs, CompressedObservation) else obs


@pytest.mark.parametrize("twin", [copy.deepcopy, lambda env: pickle.loads(pickle.dumps(env))])
@pytest.mark.parametrize(
    "make",
    [
        lambda: CompressedFrameStack(AnyEnv(), 4, frames_per_chunk=3),
        lambda: CompressedFrameStack(CompressObservation(AnyEnv()), 4),
    ],
)
def test_a_copied_environment_goes_on_by_itself(make, twin):
    env, reference = make(), FrameStackObservation(AnyEnv(), 4)
    play(env, 11), play(reference, 11)
    other, other_reference = twin(env), twin(reference)
    for e, r in ((env, reference), (other, other_reference), (env, reference)):
        for _ in range(3):
            assert_same(e.step(0)[0], r.step(0)[0])
        assert_same(e.reset()[0], r.reset()[0])


def test_which_leaves_are_compressed():
    space = spaces.Dict(
        small=spaces.Box(0, 255, (1023,), np.uint8),
        worth=spaces.Box(0, 255, (1024,), np.uint8),
        inner=spaces.Tuple([spaces.Box(-1, 1, (256,), np.float32), spaces.MultiBinary(5000)]),
    )
    env = CompressObservation(AnyEnv(space))
    obs, _ = env.reset(seed=0)
    kinds = {True: CompressedBox, False: spaces.Box}
    for leaf, sub, compressed in [
        (obs["small"], env.observation_space["small"], False),
        (obs["worth"], env.observation_space["worth"], True),
        (obs["inner"][0], env.observation_space["inner"][0], True),
    ]:
        assert isinstance(leaf, CompressedObservation) is compressed
        assert type(sub) is kinds[compressed]
    assert type(obs["inner"][1]) is np.ndarray
    stacked = CompressedFrameStack(AnyEnv(space), 4).reset(seed=0)[0]
    assert isinstance(stacked["small"], np.ndarray)
    assert isinstance(stacked["worth"], CompressedObservation)
    assert isinstance(CompressObservation(gym.make("CartPole-v1")).reset()[0], CompressedObservation)


@each_space
@pytest.mark.parametrize("stacked", [False, True])
def test_spaces_are_gymnasiums_and_contain_the_observations(space, stacked):
    env = CompressedFrameStack(AnyEnv(space), 3) if stacked else CompressObservation(AnyEnv(space))
    bare = FrameStackObservation(AnyEnv(space), 3) if stacked else AnyEnv(space)
    assert env.observation_space == bare.observation_space
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for obs in play(env, 12):
            assert obs in env.observation_space
        assert type(env.observation_space.sample()) is type(bare.observation_space.sample())


@pytest.mark.parametrize("name", ["pixels", "floats", "dict", "tuple"])
@pytest.mark.parametrize("stacked", [False, True])
def test_gymnasiums_check_passes(name, stacked):
    env = AnyEnv(SPACES[name])
    env = CompressedFrameStack(env, 3) if stacked else CompressObservation(env)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*")
        check_env(env, skip_render_check=True)


@pytest.mark.parametrize("name", ["pixels", "floats", "dict", "nested"])
@pytest.mark.parametrize("vector", [gym.vector.SyncVectorEnv, gym.vector.AsyncVectorEnv])
@pytest.mark.filterwarnings("ignore:.*fork")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_vector_environments_give_dense_arrays(name, vector):
    ours = vector([lambda: CompressedFrameStack(AnyEnv(SPACES[name], reuse=True), 3)] * 2)
    theirs = vector([lambda: FrameStackObservation(AnyEnv(SPACES[name]), 3)] * 2)
    assert_same(ours.reset(seed=4)[0], theirs.reset(seed=4)[0])
    for _ in range(20):
        assert_same(ours.step(np.zeros(2, int))[0], theirs.step(np.zeros(2, int))[0])
    ours.close(), theirs.close()


@pytest.mark.parametrize(
    "wrap",
    [
        lambda env: CompressObservation(env, codec=Codec("zstd", 2), frames_per_chunk=3),
        lambda env: CompressedFrameStack(env, np.int64(3), padding_type="zero", codec="lz4"),
        lambda env: CompressedFrameStack(CompressObservation(env, frames_per_chunk=np.int32(5)), 2),
    ],
)
def test_spec_goes_through_json(wrap):
    env = wrap(gym.make("MovingSquare-v0", episode=7))
    text = env.spec.to_json()
    assert json.loads(text)
    again = gym.make(gym.envs.registration.EnvSpec.from_json(text))
    assert again.spec.to_json() == text
    assert_same(tuple(play(again, 30)), tuple(play(env, 30)))
    wrapper = again
    while type(wrapper) is not type(env):
        wrapper = wrapper.env
    ours, theirs = (play(each, 1)[0].chunks[0] for each in (wrapper, env))
    assert (ours.codec, ours.nbytes) == (theirs.codec, theirs.nbytes)


ATARI = [
    {},
    {"noop_max": 0, "frame_skip": 1, "screen_size": (40, 60)},
    {"grayscale_newaxis": True, "terminal_on_life_loss": True},
    {"grayscale_obs": False, "frame_skip": 3, "screen_size": 64},
    {"scale_obs": True, "noop_max": 5},
]


@pytest.mark.parametrize(
    "kwargs",
    [ATARI[0], *(pytest.param(kwargs, marks=pytest.mark.slow) for kwargs in ATARI[1:])],
    ids=str,
)
def test_atari_preprocessing_equals_gymnasiums(kwargs):
    def make():
        return gym.make("ALE/Breakout-v5", frameskip=1, max_num_frames_per_episode=250)

    ours, theirs = CompressedAtariPreprocessing(make(), **kwargs), AtariPreprocessing(make(), **kwargs)
    assert_equal_runs(ours, theirs, 90)
    assert ours.observation_space == theirs.observation_space
    assert isinstance(ours.observation_space, CompressedBox)
    stacked = CompressedFrameStack(ours, 4)
    assert_equal_runs(stacked, FrameStackObservation(theirs, 4), 60)
    again = gym.make(gym.envs.registration.EnvSpec.from_json(stacked.spec.to_json()))
    assert_equal_runs(again, stacked, 10)
    ours.close()


def test_close_compresses_what_was_raw():
    for env in (
        CompressObservation(MovingSquare()),
        CompressedFrameStack(MovingSquare(), 4),
        CompressedAtariPreprocessing(gym.make("ALE/Pong-v5", frameskip=1)),
    ):
        kept = play(env, 5)
        want = [np.asarray(obs) for obs in kept]
        assert kept[-1].cbytes == kept[-1].nbytes
        env.close()
        env.close()
        assert kept[-1].cbytes < kept[-1].nbytes / 5
        assert_same(tuple(kept), tuple(want))


class Scripted(gym.Env):
    """Gives what it is told to, once each."""

    action_space = spaces.Discrete(2)

    def __init__(self, space, *observations):
        self.observation_space, self.observations = space, list(observations)

    def reset(self, *, seed=None, options=None):
        return self.observations.pop(0), {}

    def step(self, action):
        return self.observations.pop(0), 0.0, False, False, {}


@pytest.mark.parametrize("wrap", [CompressObservation, lambda env: CompressedFrameStack(env, 3)])
@pytest.mark.parametrize(
    "wrong",
    [
        np.zeros((84, 1), np.uint8),
        np.zeros((84, 84), np.float32),
        np.zeros((84, 84), np.int16),
        np.uint8(3),
        None,
    ],
    ids=["shape", "float", "int16", "scalar", "None"],
)
def test_a_wrong_frame_is_refused_and_the_next_right_one_taken(wrap, wrong):
    one, two = np.full((84, 84), 1, np.uint8), np.full((84, 84), 2, np.uint8)
    env = wrap(Scripted(MovingSquare.observation_space, one, wrong, two))
    env.reset()
    with pytest.raises(ValueError, match=r"frame .* does not"):
        env.step(0)
    got = np.asarray(env.step(0)[0])
    assert_same(got, np.stack([one, one, two]) if got.ndim == 3 else two)


def test_a_wrong_leaf_leaves_the_others_as_they_were():
    space = spaces.Dict(a=PIXELS, b=PIXELS, c=spaces.Box(-1, 1, (2,), np.float32), d=spaces.Discrete(3))

    def good(i):
        image = np.full((24, 20), i, np.uint8)
        return {"a": image, "b": image, "c": np.full(2, i / 9, np.float32), "d": np.int64(i)}

    for wrong in (
        {**good(1), "b": np.zeros(3)},
        {**good(1), "c": np.zeros(3, np.float32)},
        {**good(1), "d": 1.5},
        {"a": 1},
        [1],
    ):
        env = CompressedFrameStack(Scripted(space, good(0), wrong, good(2)), 2)
        env.reset()
        with pytest.raises(ValueError, match=r"(frame .* does not|Expected a dict)"):
            env.step(0)
        got = env.step(0)[0]
        for key in space:
            assert_same(got[key], np.stack([good(0)[key], good(2)[key]]))


def test_stacks_of_odd_leaves_are_the_callers_own():
    space = spaces.Dict(image=PIXELS, graph=spaces.Graph(spaces.Box(-1, 1, (2,)), None))
    env = CompressedFrameStack(AnyEnv(space), 3)
    first = env.reset(seed=1)[0]
    want = copy.deepcopy(first["graph"])
    for graph in first["graph"]:
        graph.nodes[...] = 9
    assert_same(env.step(0)[0]["graph"][1], want[2])


@pytest.mark.parametrize(("stack_size", "frames_per_chunk"), [(4, 12), (8, 2), (7, 7), (9, 1), (3, 5)])
def test_the_newest_stack_is_read_without_decoding(monkeypatch, stack_size, frames_per_chunk):
    env = CompressedFrameStack(MovingSquare(), stack_size, frames_per_chunk=frames_per_chunk)
    env.reset()
    monkeypatch.setattr("gym_compress.chunk.decode", lambda *args: pytest.fail("decoded"))
    for step in range(60):
        obs = env.step(0)[0]
        if step >= stack_size:  # older stacks hold the padding of the reset
            assert np.asarray(obs).any()


def test_a_pickled_environment_holds_no_raw_chunks():
    env = CompressedFrameStack(MovingSquare(), 4, frames_per_chunk=200)
    play(env, 450)
    assert len(pickle.dumps(env)) < len(pickle.dumps(env.observation_space)) + 20_000


class Closing(MovingSquare):
    closed = False

    def close(self):
        self.closed = True


@pytest.mark.parametrize("wrap", [CompressObservation, lambda env: CompressedFrameStack(env, 3)])
def test_the_environment_is_closed_even_if_compressing_fails(monkeypatch, wrap):
    env = wrap(Closing())
    kept = play(env, 5)
    want = [np.array(obs) for obs in kept]

    def fail(*args):
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(Codec, "encode", fail)
        with pytest.raises(MemoryError):
            env.close()
    assert env.unwrapped.closed
    assert_same(tuple(kept), tuple(want))
    env.close()
    assert kept[-1].cbytes < kept[-1].nbytes / 5
    assert_same(tuple(kept), tuple(want))


def test_differing_spaces_go_into_one_vector_environment():
    def make(high):
        return lambda: CompressObservation(AnyEnv(spaces.Box(0, high, (24, 20), np.uint8)))

    env = gym.vector.SyncVectorEnv([make(100), make(200)], observation_mode="different")
    assert_same(env.observation_space.high.max(axis=(1, 2)), np.array([100, 200], np.uint8))
    assert env.reset(seed=0)[0].shape == (2, 24, 20)


def test_long_chunks_cost_nothing_before_they_are_filled():
    env = CompressObservation(AnyEnv(spaces.Box(-1, 1, (3,), np.float32)), frames_per_chunk=10**7)
    assert len(play(env, 20)) > 20


@pytest.mark.parametrize(
    ("kwargs", "error"),
    [
        ({"stack_size": 0}, ValueError),
        ({"stack_size": -1}, ValueError),
        ({"stack_size": 2.5}, TypeError),
        ({"stack_size": "4"}, TypeError),
        ({"stack_size": 4, "padding_type": "same"}, ValueError),
        ({"stack_size": 4, "padding_type": np.zeros((3, 3), np.uint8)}, ValueError),
    ],
)
def test_arguments_are_refused_in_gymnasiums_words(kwargs, error):
    with pytest.raises(error) as theirs:
        FrameStackObservation(AnyEnv(), **kwargs)
    with pytest.raises(error) as ours:
        CompressedFrameStack(AnyEnv(), **kwargs)
    assert str(ours.value) == str(theirs.value)


@pytest.mark.parametrize(
    ("kwargs", "error", "message"),
    [
        ({"codec": "lzma"}, ValueError, "'lz4', 'lz4hc' or 'zstd'"),
        ({"codec": "zstd:77"}, ValueError, "1 to 9"),
        ({"codec": 5}, TypeError, "string or a Codec"),
        ({"frames_per_chunk": 0}, ValueError, "at least 1"),
        ({"frames_per_chunk": 1.5}, TypeError, "integer or None"),
    ],
)
@pytest.mark.parametrize(
    "wrap",
    [
        lambda **kwargs: CompressObservation(MovingSquare(), **kwargs),
        lambda **kwargs: CompressedFrameStack(MovingSquare(), 4, **kwargs),
        lambda **kwargs: CompressedAtariPreprocessing(gym.make("ALE/Pong-v5", frameskip=1), **kwargs),
    ],
)
def test_arguments_for_compression_are_refused(wrap, kwargs, error, message):
    with pytest.raises(error, match=message):
        wrap(**kwargs)


@pytest.mark.parametrize("wrap", [CompressObservation, lambda env: CompressedFrameStack(env, 3)])
def test_other_spaces_are_refused(wrap):
    with pytest.raises(TypeError, match=r"Box, Dict or Tuple, actual: Discrete\(5\)"):
        wrap(AnyEnv(spaces.Discrete(5)))


@pytest.mark.slow
def test_stable_baselines3_takes_the_environment_as_it_is():
    import stable_baselines3 as sb3
    import torch

    torch.set_num_threads(1)

    def trained(stack):
        env = stack(MovingSquare(episode=13), 4)
        dqn = sb3.DQN(
            "CnnPolicy", env, seed=1, buffer_size=100, learning_starts=30, batch_size=8, device="cpu"
        )
        dqn.learn(50)
        ppo = sb3.PPO("CnnPolicy", env, seed=1, n_steps=32, batch_size=16, n_epochs=1, device="cpu")
        ppo.learn(32)
        obs, _ = env.reset(seed=5)
        actions = [int(model.predict(obs, deterministic=True)[0]) for model in (dqn, ppo)]
        weights = [value.numpy() for model in (dqn, ppo) for value in model.policy.state_dict().values()]
        return (actions, *weights)

    assert_same(trained(CompressedFrameStack), trained(FrameStackObservation))
