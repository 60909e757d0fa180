import itertools
import pickle
import subprocess
import sys
import threading

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces

from gym_compress import (
    CompressedFrameStack,
    CompressedObservation,
    CompressedReplayBuffer,
    CompressObservation,
)
from tests.envs import AnyEnv, MovingSquare, assert_same, play
from tests.test_checkpoint import interrupting

PIXELS = spaces.Box(0, 255, (4, 20, 18), np.uint8)
MIXED = spaces.Dict(
    image=spaces.Box(0, 255, (3, 20, 20), np.uint8),
    rest=spaces.Tuple([spaces.Box(-1, 1, (5,), np.float64), spaces.Discrete(4)]),
)
ACTIONS = spaces.Discrete(6)


def stacks(count, seed=0):
    frames = np.random.default_rng(seed).integers(0, 255, (count + 4, 20, 18), dtype=np.uint8)
    return np.lib.stride_tricks.sliding_window_view(frames, (4, 20, 18))[:, 0, 0]


def filled(steps, capacity=50, n_envs=1, episode=10, **kwargs):
    """A buffer in which the reward is the number of the step, and the stacks of each environment by number."""
    buffer = CompressedReplayBuffer(capacity, PIXELS, ACTIONS, None, n_envs, seed=0, **kwargs)
    source = np.stack([stacks(steps + 1, seed) for seed in range(n_envs)], axis=1)
    for i in range(steps):
        done = np.full(n_envs, i % episode == episode - 1)
        infos = [{"TimeLimit.truncated": bool(d) and i % 20 == 19} for d in done]
        buffer.add(source[i], source[i + 1], np.full(n_envs, i % 6), np.full(n_envs, i), done, infos)
    return buffer, source


@pytest.mark.parametrize("n_envs", [1, 3])
def test_samples_are_what_was_added(n_envs):
    buffer, source = filled(90, capacity=50 * n_envs, n_envs=n_envs)
    assert (buffer.size(), buffer.pos, buffer.full, buffer.buffer_size) == (50, 40, True, 50)
    seen = set()
    for _ in range(20):
        batch = buffer.sample(32)
        steps = batch.rewards[:, 0].astype(int)
        seen |= set(steps)
        first = source[steps]  # of all environments: which it was, the values tell
        which = (first == batch.observations[:, None]).all(axis=(2, 3, 4)).argmax(axis=1)
        assert_same(batch.observations, source[steps, which])
        assert_same(batch.next_observations, source[steps + 1, which])
        assert_same(batch.actions, (steps % 6)[:, None])
        assert_same(batch.dones, ((steps % 10 == 9) & (steps % 20 != 19)).astype(np.float32)[:, None])
    assert seen == set(range(40, 90))


def test_draws_by_its_own_generator_and_is_uniform():
    buffer, _ = filled(60)
    again, _ = filled(60)
    np.random.seed(0)
    state = np.random.get_state()[1].copy()
    for _ in range(5):
        assert_same(tuple(buffer.sample(16)), tuple(again.sample(16)))
    assert (np.random.get_state()[1] == state).all()
    counts = np.bincount(buffer.sample(20_000).rewards[:, 0].astype(int) - 10, minlength=50)
    assert counts.min() > 300  # 400 expected, 20 its deviation
    assert counts.max() < 500


def test_get_and_extend():
    buffer, source = filled(30, n_envs=2, capacity=100)
    batch = buffer.get([0, 1, 7, 59, 7])
    assert_same(
        batch.observations, np.stack([source[0, 0], source[0, 1], source[3, 1], source[29, 1], source[3, 1]])
    )
    assert_same(batch.rewards[:, 0], np.array([0, 0, 3, 29, 3], np.float32))
    for wrong in ([60], [-1], [[1]], [1.5]):
        with pytest.raises(IndexError, match="Expected"):
            buffer.get(wrong)
    other = CompressedReplayBuffer(100, PIXELS, ACTIONS, None, 2)
    rewards = np.tile(np.arange(30.0)[:, None], 2)
    dones = (rewards % 10 == 9).astype(bool)
    other.extend(source[:30], source[1:31], rewards.astype(int) % 6, rewards, dones, [[{}, {}]] * 30)
    assert_same(other.get(np.arange(60)).next_observations, buffer.get(np.arange(60)).next_observations)


def test_spaces_of_dicts_and_tuples():
    buffer = CompressedReplayBuffer(40, MIXED, spaces.Box(-1, 1, (2, 3)), None, seed=1)
    seen = play(AnyEnv(MIXED), 60)
    for i, (obs, following) in enumerate(zip(seen, seen[1:], strict=False)):
        batched = [
            gym.vector.utils.concatenate(MIXED, [o], gym.vector.utils.create_empty_array(MIXED, 1))
            for o in (obs, following)
        ]
        actions = np.full((1, 2, 3), i, np.float64)
        if i % 2:
            buffer.add(*batched, actions, np.array([i]), np.array([False]), [{}])
        else:
            buffer.add([obs], [following], actions, np.array([i]), np.array([False]), {})
    batch = buffer.sample(64)
    for kept, shift in ((batch.observations, 0), (batch.next_observations, 1)):
        for row, step in enumerate(batch.rewards[:, 0].astype(int) + shift):
            assert_same(kept["image"][row], seen[step]["image"])
            assert_same(kept["rest"][0][row], seen[step]["rest"][0])
            assert kept["rest"][1][row] == seen[step]["rest"][1]
    assert batch.actions.shape == (64, 6)
    assert batch.actions.dtype == np.float32


def test_takes_what_wrappers_give():
    env = CompressedFrameStack(CompressObservation(AnyEnv(MIXED)), 3, padding_type="zero")
    buffer = CompressedReplayBuffer(80, env.observation_space, ACTIONS, None, seed=1)
    seen = play(env, 60)
    for i, (obs, following) in enumerate(zip(seen, seen[1:], strict=False)):
        buffer.add([obs], [following], [0], [i], [False], [{}])
    batch = buffer.sample(64)
    for row, step in enumerate(batch.rewards[:, 0].astype(int)):
        assert_same(batch.observations["image"][row], np.asarray(seen[step]["image"]))
        assert_same(batch.next_observations["rest"][0][row], np.asarray(seen[step + 1]["rest"][0]))


def test_timeouts_from_vector_infos_or_not_at_all():
    obs = np.zeros((2, *PIXELS.shape), np.uint8)
    infos = {"TimeLimit.truncated": np.array([True, False])}
    for handled, dones in ((True, [[0], [1]]), (False, [[1], [1]])):
        buffer = CompressedReplayBuffer(10, PIXELS, ACTIONS, None, 2, handle_timeout_termination=handled)
        buffer.add(obs, obs, np.zeros(2), np.zeros(2), np.ones(2, bool), infos)
        assert_same(buffer.get([0, 1]).dones, np.array(dones, np.float32))


@pytest.mark.parametrize("n_envs", [1, 2])
def test_sequences_lie_in_one_episode_and_environment(n_envs):
    buffer, source = filled(137, capacity=60 * n_envs, n_envs=n_envs, episode=9)
    seen = set()
    for _ in range(30):
        batch = buffer.sample_sequences(16, 4)
        steps = batch.rewards[..., 0].astype(int)
        assert steps.shape == (16, 4)
        assert (np.diff(steps, axis=1) == 1).all()
        assert (steps // 9 == steps[:, :1] // 9).all()
        assert steps.min() >= 77
        which = (source[steps] == batch.observations[:, :, None]).all(axis=(3, 4, 5)).argmax(axis=2)
        assert (which == which[:, :1]).all()
        assert_same(batch.observations, source[steps, which])
        assert_same(batch.next_observations, source[steps + 1, which])
        seen |= set(steps[:, 0])
    assert seen == {step for step in range(77, 134) if step // 9 == (step + 3) // 9}
    with pytest.raises(ValueError, match="sequences of 10 transitions, but the longest episode has 9"):
        buffer.sample_sequences(4, 10)
    for wrong in ((0, 3), (3, 0)):
        with pytest.raises(ValueError, match="at least 1"):
            buffer.sample_sequences(*wrong)


def test_rare_sequences_are_found_in_a_ring_that_is_full():
    buffer, source = filled(230, capacity=70, episode=30)
    batch = buffer.sample_sequences(300, 30)  # two of 41 places where a run could begin
    steps = batch.rewards[..., 0].astype(int)
    assert set(steps[:, 0]) == {180}
    assert (np.diff(steps, axis=1) == 1).all()
    assert_same(batch.observations, source[steps, 0])
    assert set(buffer.sample_sequences(300, 29).rewards[:, 0, 0].astype(int)) == {180, 181}


@pytest.mark.parametrize("space", [PIXELS, spaces.Box(0, 255, (3,), np.uint8)])
def test_a_reset_without_a_done_ends_a_sequence(space):
    rng = np.random.default_rng(0)
    observations = rng.integers(0, 255, (41, *space.shape), dtype=np.uint8)
    buffer = CompressedReplayBuffer(100, space, ACTIONS, None, seed=0)
    for i in range(40):
        following = observations[i + 1] if i % 8 != 7 else observations[0]  # the step before a silent reset
        buffer.add(observations[i][None], following[None], [0], [i], [False], [{}])
    steps = buffer.sample_sequences(200, 8).rewards[..., 0].astype(int)
    assert set(steps[:, 0]) == {0, 8, 16, 24, 32}
    buffer.sample_sequences(3, 8)
    buffer.add(observations[5][None], observations[6][None], [0], [40], [False], [{}])
    with pytest.raises(ValueError, match="longest episode has 8"):
        buffer.sample_sequences(3, 9)


def test_reset_empties_it():
    buffer, source = filled(60)
    buffer.reset()
    assert (buffer.size(), buffer.pos, buffer.full) == (0, 0, False)
    with pytest.raises(ValueError, match="nothing was added"):
        buffer.sample(1)
    buffer.add(source[3], source[4], [1], [3.0], [False], [{}])
    assert_same(buffer.sample(4).observations, np.repeat(source[3], 4, axis=0))
    with pytest.raises(ValueError, match="longest episode has 1"):
        buffer.sample_sequences(1, 2)


def test_a_pickled_buffer_goes_on_alike():
    buffer, source = filled(73)
    again = pickle.loads(pickle.dumps(buffer))
    for _ in range(3):
        assert_same(tuple(again.sample(20)), tuple(buffer.sample(20)))
        for i in range(40):
            for one in (buffer, again):
                one.add(source[i], source[i + 1], [0], [i], [i % 7 == 0], [{}])
        assert_same(tuple(again.sample_sequences(5, 3)), tuple(buffer.sample_sequences(5, 3)))


def test_bytes():
    env = CompressedFrameStack(MovingSquare(episode=50), 4)
    buffer = CompressedReplayBuffer(200, env.observation_space, ACTIONS, None)
    seen = play(env, 300)
    for obs, following in zip(seen, seen[1:], strict=False):
        buffer.add([obs], [following], [0], [0], [False], [{}])
    transition = 2 * 4 * 84 * 84 + 8 + 3 * 4
    assert buffer.nbytes == 200 * transition
    assert 200 * 20 < buffer.cbytes < buffer.nbytes / 20


def state(buffer):
    return pickle.dumps(
        (buffer.pos, buffer.full, buffer.rewards, buffer.dones, buffer.get(np.arange(buffer.size())))
    )


@pytest.mark.parametrize("steps", [20, 73])
def test_bad_input_changes_nothing(steps):
    buffer, source = filled(steps)
    before = state(buffer)
    good = (source[0], source[1], [1], [0.0], [False], [{}])
    for place, wrong, message in [
        (0, source[0][:, :3], "shape"),
        (1, source[0].astype(np.float32), "float32"),
        (0, np.full((1, 4, 20, 18), 300), "int64"),
        (1, np.concatenate([source[1]] * 2), "shape"),
        (2, [1, 2], "actions"),
        (2, ["x"], "actions"),
        (3, [1.0, 2.0], "rewards"),
        (3, [None], "rewards"),
        (4, [], "dones"),
        (4, ["no"], "dones"),
        (5, [{}, {}], "infos"),
        (5, [{"TimeLimit.truncated": None}], "infos"),
        (5, None, "infos"),
    ]:
        with pytest.raises(ValueError, match=message):
            buffer.add(*good[:place], wrong, *good[place + 1 :])
        assert state(buffer) == before
    with pytest.raises(ValueError, match="same length"):
        buffer.extend(source[:3], source[1:4], [[1]] * 3, [[0.0]] * 2, [[False]] * 3, [[{}]] * 3)
    assert state(buffer) == before
    for batch_size in (0, -3):
        with pytest.raises(ValueError, match="at least 1"):
            buffer.sample(batch_size)
    with pytest.raises(ValueError, match="1 observations, one an environment, got 0"):
        CompressedReplayBuffer(4, MIXED, ACTIONS, None).add([], [], [0], [0], [0], [{}])


def test_extend_takes_dicts_and_tuples():
    seen = play(AnyEnv(MIXED, episodes=(100,)), 12)
    column = [
        gym.vector.utils.concatenate(MIXED, [o], gym.vector.utils.create_empty_array(MIXED, 1)) for o in seen
    ]
    stacked = {
        "image": np.stack([o["image"] for o in column]),
        "rest": tuple(np.stack([o["rest"][i] for o in column]) for i in (0, 1)),
    }
    first = {"image": stacked["image"][:12], "rest": tuple(part[:12] for part in stacked["rest"])}
    following = {"image": stacked["image"][1:], "rest": tuple(part[1:] for part in stacked["rest"])}
    buffer, other = (CompressedReplayBuffer(20, MIXED, ACTIONS, None) for _ in range(2))
    zeros = np.zeros((12, 1))
    buffer.extend(first, following, zeros.astype(int), zeros, zeros, [[{}]] * 12)
    for obs, after in zip(column, column[1:], strict=False):
        other.add(obs, after, [0], [0], [0], [{}])
    assert_same(tuple(buffer.get(np.arange(12))), tuple(other.get(np.arange(12))))
    assert_same(buffer.sample_sequences(1, 12).observations["image"][0], stacked["image"][:12, 0])


@pytest.mark.parametrize("how", ["decoded", "detached", "NaN"])
def test_equal_values_follow_however_they_are_kept(how):
    if how == "NaN":
        space = spaces.Box(-np.inf, np.inf, (3,), np.float32)
        seen = [np.array([i, np.nan, -0.0], np.float32) for i in range(7)]
        pairs = [(a[None], b[None]) for a, b in zip(seen, seen[1:], strict=False)]
    else:
        env = CompressedFrameStack(MovingSquare(), 4)
        space, seen = env.observation_space, play(env, 6)
        change = (lambda obs: np.asarray(obs)) if how == "decoded" else (lambda obs: obs.detach())
        pairs = [([change(a)], [b]) for a, b in zip(seen, seen[1:], strict=False)]
    buffer = CompressedReplayBuffer(20, space, ACTIONS, None)
    for obs, following in pairs:
        buffer.add(obs, following, [0], [0], [False], [{}])
    assert buffer.sample_sequences(2, 6).rewards.shape == (2, 6, 1)


def test_sequences_see_what_was_added_since():
    buffer, source = filled(8, episode=100)
    for length in range(8, 30):
        buffer.sample_sequences(2, length)
        last = buffer.get([length - 1]).next_observations
        buffer.add(last, source[length % 8], [0], [length], [False], [{}])


def test_each_image_of_a_dict_must_follow():
    space = spaces.Dict(a=spaces.Box(0, 255, (32, 32), np.uint8), b=spaces.Box(0, 255, (32, 32), np.uint8))

    def obs(a, b):
        return {"a": np.full((1, 32, 32), a, np.uint8), "b": np.full((1, 32, 32), b, np.uint8)}

    for first in ((9, 1), (1, 9)):
        buffer = CompressedReplayBuffer(20, space, ACTIONS, None)
        buffer.add(obs(0, 0), obs(*first), [0], [0], [False], [{}])
        buffer.add(obs(1, 1), obs(2, 2), [0], [0], [False], [{}])
        with pytest.raises(ValueError, match="longest episode has 1"):
            buffer.sample_sequences(1, 2)


def test_fewer_transitions_than_environments_make_one_row():
    buffer = CompressedReplayBuffer(2, PIXELS, ACTIONS, None, n_envs=5)
    assert (buffer.buffer_size, buffer.rewards.shape) == (1, (1, 5))


def test_a_buffer_is_pickled_while_the_environment_runs():
    env = CompressedFrameStack(MovingSquare(episode=9), 4)
    buffer = CompressedReplayBuffer(30, env.observation_space, ACTIONS, None, seed=0)
    seen = play(env, 40)
    for obs, following in zip(seen, seen[1:], strict=False):
        buffer.add([obs], [following], [0], [0], [False], [{}])
    again = pickle.loads(pickle.dumps(buffer))
    assert_same(tuple(again.sample(50)), tuple(buffer.sample(50)))


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ((0, PIXELS, ACTIONS), ValueError),
        ((10, PIXELS, ACTIONS, None, 0), ValueError),
        ((2.5, PIXELS, ACTIONS), TypeError),
        ((10, spaces.Text(4), ACTIONS), TypeError),
        ((10, PIXELS, spaces.Text(4)), TypeError),
    ],
)
def test_wrong_arguments_are_refused(arguments, error):
    with pytest.raises(error):
        CompressedReplayBuffer(*arguments)


def test_devices():
    import torch

    for device in ("auto", "cpu", torch.device("cpu")):
        buffer = CompressedReplayBuffer(10, PIXELS, ACTIONS, device)
        buffer.add(
            np.ones((1, *PIXELS.shape), np.uint8), np.ones((1, *PIXELS.shape), np.uint8), [0], [0], [0], [{}]
        )
        batch = buffer.sample(3)
        assert all(isinstance(part, torch.Tensor) for part in batch)
        assert (batch.observations.dtype, batch.observations.shape) == (torch.uint8, (3, *PIXELS.shape))
        assert batch.rewards.shape == batch.dones.shape == batch.actions.shape == (3, 1)


def test_auto_gives_numpy_without_torch():
    code = """
import sys
sys.modules["torch"] = None
import numpy as np
from gymnasium import spaces
from gym_compress import CompressedReplayBuffer
buffer = CompressedReplayBuffer(10, spaces.Box(0, 1, (3,)), spaces.Discrete(2))
buffer.add(np.zeros((1, 3)), np.zeros((1, 3)), [0], [0], [0], {})
print(type(buffer.sample(2).observations))
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "numpy.ndarray" in run.stdout


def test_normalises_with_what_env_it_is_given():
    class Normalizer:
        def normalize_obs(self, obs):
            return obs / np.float32(255)

        def normalize_reward(self, reward):
            return np.clip(reward, -1.0, 1.0)

    buffer, source = filled(20)
    batch = buffer.sample(30, env=Normalizer())
    assert batch.rewards.max() == 1
    assert batch.rewards.dtype == np.float32
    plain = buffer.get(np.arange(20)).observations / np.float32(255)
    assert all((row == plain).all(axis=(1, 2, 3)).any() for row in batch.observations)
    assert_same(plain, source[:20, 0] / np.float32(255))


def test_one_thread_adds_while_others_sample():
    buffer = CompressedReplayBuffer(64, PIXELS, ACTIONS, None, seed=0, frames_per_chunk=3)
    stop, wrong = threading.Event(), []

    def frame(i):
        return np.full((20, 18), i % 251, np.uint8)

    def stack(i):
        return np.stack([frame(k) for k in range(i, i + 4)])[None]

    buffer.add(stack(0), stack(1), [0], [0], [False], [{}])

    reads = []

    def read():
        while not stop.is_set():
            batch = buffer.sample(8)
            reads.append(1)
            for obs, following, reward in zip(
                batch.observations, batch.next_observations, batch.rewards, strict=True
            ):
                i = int(reward[0])
                if not (
                    np.array_equal(obs[None], stack(i)) and np.array_equal(following[None], stack(i + 1))
                ):
                    wrong.append(i)

    readers = [threading.Thread(target=read) for _ in range(2)]
    for reader in readers:
        reader.start()
    for i in itertools.count(1):
        buffer.add(stack(i), stack(i + 1), [0], [i], [False], [{}])
        if wrong or (i > 250 and len(reads) > 100) or not all(reader.is_alive() for reader in readers):
            break
    stop.set()
    for reader in readers:
        reader.join()
    assert not wrong
    assert len(reads) > 100


def test_an_interrupted_add_leaves_whole_transitions():
    """Ctrl+C at any line of an add to a full buffer: what is sampled was added, and at most one place is lost."""
    buffer, source = filled(60, capacity=5)
    interrupted = 0
    for lines in range(1, 260):
        i = 60 + lines
        before = sys.gettrace()
        sys.settrace(interrupting(lines))
        try:
            buffer.add(source[i % 50], source[i % 50 + 1], [i % 6], [float(i)], [False], [{}])
        except KeyboardInterrupt:
            interrupted += 1
        finally:
            sys.settrace(before)
        (valid,) = buffer.table.valid[:, 0].nonzero()
        assert len(valid) >= 4
        for batch in (buffer.get(valid), buffer.sample(20), buffer.sample_sequences(9, 2)):
            steps = batch.rewards[..., 0].astype(int)
            places = np.where(steps < 60, steps, steps % 50)
            assert_same(batch.observations, source[places, 0])
            assert_same(batch.next_observations, source[places + 1, 0])
            assert_same(batch.actions[..., 0], steps % 6)
        assert (np.diff(steps, axis=1) == 1).all()
        for half in set(range(5)) - set(valid.tolist()):
            with pytest.raises(IndexError, match="there is none"):
                buffer.get([half])
    assert interrupted > 100


@pytest.mark.parametrize("action", [0.5, np.nan, 3e30, -0.1])
def test_an_action_that_its_dtype_does_not_hold_is_refused(action):
    buffer, source = filled(3)
    with pytest.raises(ValueError, match="Expected actions of dtype int64, got the value"):
        buffer.add(source[0], source[1], [action], [0.0], [False], [{}])
    assert buffer.size() == 3


def test_the_environment_of_an_observation_that_does_not_fit_is_named():
    buffer, source = filled(3, n_envs=2)
    good = CompressedObservation.from_frames(source[0, 0])
    with pytest.raises(ValueError, match=r"Observation of environment 1: .* shape \(\)"):
        buffer.add([good, None], [good, good], [0, 0], [0, 0], [0, 0], [{}, {}])
