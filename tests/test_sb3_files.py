"""Replay files of the SB3 buffers, and the callback that writes them."""

import signal
import subprocess
import sys

import gymnasium as gym
import numpy as np
import pytest
import stable_baselines3 as sb3
from gymnasium import spaces
from stable_baselines3.common import buffers
from stable_baselines3.common.vec_env import DummyVecEnv, VecNormalize

import gym_compress.sb3 as ours
from gym_compress import CompressedReplayBuffer as Neutral
from gym_compress import CorruptDataError
from tests.envs import MovingSquare, assert_same
from tests.replays import forge
from tests.test_sb3 import (
    CASES,
    CONTINUOUS,
    DICT,
    DISCRETE,
    SPACES,
    STACKS,
    Goals,
    Transitions,
    assert_equal_batches,
    run,
)

load = ours.CompressedReplayBuffer.load


@pytest.mark.parametrize("lazy", [pytest.param(False, marks=pytest.mark.slow), True])
@pytest.mark.parametrize(("mine", "theirs", "space", "actions", "kwargs"), CASES)
def test_a_loaded_buffer_goes_on_as_sb3s_does(tmp_path, mine, theirs, space, actions, kwargs, lazy):
    space = DICT if space == "dict" else SPACES[space]
    arguments = (91, space, actions, "cpu", 3)
    one = getattr(ours, mine)(*arguments, frames_per_chunk=5, **kwargs)
    other = getattr(buffers, theirs)(*arguments, **kwargs)
    transitions = Transitions(space, actions, 3)
    run(one, other, transitions, 7)
    path = tmp_path / "a.replay"
    for steps in (0, 30, 60):
        run(one, other, transitions, steps)
        one.save(path)
        one.close()
        state = np.random.get_state()[1].copy()
        one = getattr(ours, mine).load(path, device="cpu", lazy=lazy)
        assert (np.random.get_state()[1] == state).all()
        assert one.device.type == "cpu"
        assert_equal_batches(one, other)
    one.close()


@pytest.mark.parametrize("lazy", [False, True])
def test_hindsight_goes_on_as_sb3s_does(tmp_path, lazy):
    env = DummyVecEnv([Goals] * 2)
    arguments = {
        "env": env,
        "device": "cpu",
        "n_envs": 2,
        "goal_selection_strategy": "final",
        "n_sampled_goal": 3,
    }
    one, other = (
        cls(60, env.observation_space, env.action_space, **arguments)
        for cls in (ours.CompressedHerReplayBuffer, sb3.HerReplayBuffer)
    )
    obs = env.reset()
    for steps in (20, 15, 30):
        for _ in range(steps):
            actions = np.zeros((2, 2), np.float32)
            following, rewards, dones, infos = env.step(actions)
            for buffer in (one, other):
                buffer.add(dict(obs), dict(following), actions, rewards, dones, infos)
            obs = following
        one.save(tmp_path / "her.replay")
        one.close()
        one = ours.CompressedHerReplayBuffer.load(tmp_path / "her.replay", device="cpu", lazy=lazy)
        one.set_env(env)
        assert_equal_batches(one, other)
    one.close()
    neutral = Neutral.load(tmp_path / "her.replay", device=None)
    assert neutral.size() == 30
    plain = ours.CompressedDictReplayBuffer.load(tmp_path / "her.replay", device="cpu")
    plain.save(tmp_path / "dict.replay")
    with pytest.raises(ValueError, match="episodes"):
        ours.CompressedHerReplayBuffer.load(tmp_path / "dict.replay")
    keeping = ours.CompressedHerReplayBuffer(
        60, env.observation_space, env.action_space, env, "cpu", 2, copy_info_dict=True
    )
    with pytest.raises(TypeError, match="infos"):
        keeping.save(tmp_path / "infos.replay")


def test_each_class_loads_what_another_saved(tmp_path):
    path = tmp_path / "a.replay"
    transitions = Transitions(STACKS, DISCRETE, 2)
    neutral = Neutral(40, STACKS, DISCRETE, None, 2)
    other = buffers.ReplayBuffer(40, STACKS, DISCRETE, "cpu", 2)
    steps = [transitions() for _ in range(33)]
    for step in steps:
        neutral.add(*step), other.add(*step)
    neutral.save(path)
    loaded = load(path, device="cpu")
    assert_equal_batches(loaded, other)
    n_step = ours.CompressedNStepReplayBuffer.load(path, device="cpu")
    assert (n_step.n_steps, n_step.gamma) == (3, 0.99)
    loaded.save(path)
    again = Neutral.load(path, device=None)
    rows = np.arange(40)
    assert_same(tuple(again.get(rows)), tuple(neutral.get(rows)))
    assert_same(again.table.ends[: again.size()], neutral.table.ends[: neutral.size()])
    for step in steps:
        neutral.add(*step), again.add(*step)
    assert_same(tuple(again.get(rows)), tuple(neutral.get(rows)))
    with pytest.raises(ValueError, match="cannot hold"):
        ours.CompressedDictReplayBuffer.load(path)
    with pytest.raises(RuntimeError, match="device"):
        load(path, device="no device")


@pytest.mark.parametrize("actions", [DISCRETE, CONTINUOUS])
@pytest.mark.parametrize("name", SPACES)
def test_flat_observations_are_loaded_by_the_neutral_class_and_back(tmp_path, name, actions):
    one = ours.CompressedReplayBuffer(30, SPACES[name], actions, "cpu", 2)
    other = buffers.ReplayBuffer(30, SPACES[name], actions, "cpu", 2)
    run(one, other, Transitions(SPACES[name], actions, 2), 20)
    one.save(tmp_path / "a.replay")
    neutral = Neutral.load(tmp_path / "a.replay", device=None)
    neutral.save(tmp_path / "b.replay")
    assert_equal_batches(load(tmp_path / "b.replay", device="cpu"), other)


def test_a_tuple_is_for_the_neutral_class_alone(tmp_path):
    Neutral(10, spaces.Tuple([STACKS]), DISCRETE, None).save(tmp_path / "a.replay")
    for cls in (ours.CompressedReplayBuffer, ours.CompressedDictReplayBuffer):
        with pytest.raises(ValueError, match="cannot hold"):
            cls.load(tmp_path / "a.replay")


def model(buffer=ours.CompressedReplayBuffer, **kwargs):
    env = gym.wrappers.FrameStackObservation(MovingSquare(episode=17), 4)
    return sb3.DQN(
        "CnnPolicy", env, seed=3, buffer_size=60, learning_starts=10, batch_size=4, device="cpu",
        replay_buffer_class=buffer, **kwargs,
    )  # fmt: skip


def test_the_callback_saves_model_and_buffer(tmp_path, capsys):
    callback = ours.CheckpointReplayCallback(25, str(tmp_path / "run"), "x", verbose=2)
    trained = model()
    trained.learn(110, callback=callback)
    assert sorted(p.name for p in (tmp_path / "run").iterdir()) == [
        "x.replay", "x_100_steps.zip", "x_25_steps.zip", "x_50_steps.zip", "x_75_steps.zip",
    ]  # fmt: skip
    assert callback.replay_path == tmp_path / "run" / "x.replay"
    loaded = load(callback.replay_path, device="cpu")
    buffer = trained.replay_buffer
    assert (loaded.pos, loaded.full) == (39, True)  # the callback comes before a step is stored
    for mine, theirs in (
        (loaded.observations, buffer.observations),
        (loaded.next_observations, buffer.next_observations),
    ):
        rows = np.arange(54, 60)
        assert_same(mine[rows, 0], theirs[rows, 0])
    assert capsys.readouterr().out.count("Saving") == 8


def test_the_callback_needs_one_of_these_buffers(tmp_path):
    with pytest.raises(TypeError, match="replay_buffer_class"):
        model(None).learn(5, callback=ours.CheckpointReplayCallback(25, str(tmp_path)))


@pytest.mark.slow
def test_going_on_from_a_file_trains_as_going_on_from_a_pickle(tmp_path):
    weights = []
    for kind in ("file", "pickle"):
        trained = model()
        trained.learn(80)
        if kind == "file":
            trained.replay_buffer.save(tmp_path / "a.replay")
            trained.replay_buffer = load(tmp_path / "a.replay", device=trained.device)
        else:
            trained.save_replay_buffer(tmp_path / "a.pkl")
            trained.load_replay_buffer(tmp_path / "a.pkl")
        trained.learn(30, reset_num_timesteps=False)
        weights.append(tuple(value.numpy() for value in trained.policy.state_dict().values()))
    assert_same(*weights)


KILLED = """
import os, runpy, signal, sys
from gym_compress.sb3 import CheckpointReplayCallback
on_step = CheckpointReplayCallback._on_step
def killed(self):
    if self.num_timesteps == 230:
        os.kill(os.getpid(), signal.SIGKILL)
    return on_step(self)
CheckpointReplayCallback._on_step = killed
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.mark.slow
def test_the_example_goes_on_after_a_kill(tmp_path):
    command = [
        sys.executable,
        "examples/resume_training.py",
        "--folder",
        str(tmp_path),
        "--steps",
        "500",
    ]
    command += ["--save-freq", "100", "--learning-starts", "400", "--buffer-size", "300"]
    first = subprocess.run([sys.executable, "-c", KILLED, *command[1:]], check=False)
    assert first.returncode == -signal.SIGKILL
    assert sorted(path.name for path in tmp_path.glob("*.zip")) == ["dqn_100_steps.zip", "dqn_200_steps.zip"]
    (tmp_path / "dqn_900_steps.zip.part").write_bytes(b"half a model")
    (tmp_path / "dqn_x_steps.zip").write_bytes(b"something else")
    second = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "going on from dqn_" in second.stdout
    assert "trained 500 steps; 300 transitions" in second.stdout
    assert (tmp_path / "dqn_500_steps.zip").exists()
    third = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "going on from dqn_500_steps.zip with 300 transitions" in third.stdout


@pytest.mark.slow
def test_a_model_has_its_name_when_it_is_whole(tmp_path, monkeypatch):
    """What is there while a model is being saved, and when that fails, is the last one."""
    callback = ours.CheckpointReplayCallback(20, str(tmp_path), "x")
    trained = model()
    save = trained.save
    seen = []

    def watching(path):
        save(path)
        seen.append(sorted(p.name for p in tmp_path.glob("*.zip")))
        if len(seen) == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(trained, "save", watching)
    with pytest.raises(KeyboardInterrupt):
        trained.learn(60, callback=callback)
    assert seen == [[], ["x_20_steps.zip"]]
    assert sorted(p.name for p in tmp_path.glob("*.zip")) == ["x_20_steps.zip"]
    assert load(callback.replay_path, device="cpu").size() == 39  # as new as the model, or newer


def test_statistics_of_vec_normalize_are_saved(tmp_path):
    env = VecNormalize(DummyVecEnv([lambda: gym.make("CartPole-v1")]))
    trained = sb3.DQN(
        "MlpPolicy",
        env,
        buffer_size=50,
        learning_starts=10,
        device="cpu",
        replay_buffer_class=ours.CompressedReplayBuffer,
    )
    trained.learn(25, callback=ours.CheckpointReplayCallback(20, str(tmp_path), save_vecnormalize=True))
    again = VecNormalize.load(str(tmp_path / "rl_model_vecnormalize_20_steps.pkl"), env.venv)
    assert again.obs_rms.count < env.obs_rms.count


def test_a_buffer_that_was_reset_is_saved_as_it_is(tmp_path):
    transitions = Transitions(STACKS, DISCRETE, 2)
    one = ours.CompressedReplayBuffer(60, STACKS, DISCRETE, "cpu", 2)
    other = buffers.ReplayBuffer(60, STACKS, DISCRETE, "cpu", 2)
    run(one, other, transitions, 25)
    one.save(tmp_path / "a.replay")
    one.reset(), other.reset()
    run(one, other, transitions, 5)
    one.save(tmp_path / "a.replay")
    assert_equal_batches(load(tmp_path / "a.replay", device="cpu"), other)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("goal_selection_strategy", 3),
        ("n_sampled_goal", "x"),
        ("current_ep_start", [-(10**12), 0]),
        ("current_ep_start", [0]),
    ],
)
def test_a_hindsight_file_of_somebody_with_bad_intent(tmp_path, key, value):
    env = DummyVecEnv([Goals] * 2)
    buffer = ours.CompressedHerReplayBuffer(60, env.observation_space, env.action_space, env, "cpu", 2)
    buffer.save(tmp_path / "a.replay")
    forge(tmp_path / "a.replay", lambda told, arrays, database: told.update({key: value}))
    with pytest.raises(CorruptDataError):
        ours.CompressedHerReplayBuffer.load(tmp_path / "a.replay")


@pytest.mark.parametrize(
    ("key", "value"), [("n_steps", 0), ("n_steps", 10**9), ("n_steps", "x"), ("gamma", "x"), ("gamma", [1])]
)
def test_an_n_step_file_of_somebody_with_bad_intent(tmp_path, key, value):
    ours.CompressedNStepReplayBuffer(60, STACKS, DISCRETE, "cpu").save(tmp_path / "a.replay")
    forge(tmp_path / "a.replay", lambda told, arrays, database: told.update({key: value}))
    with pytest.raises(CorruptDataError):
        ours.CompressedNStepReplayBuffer.load(tmp_path / "a.replay")


def test_flags_that_a_class_does_not_have_are_left_out(tmp_path):
    for space, cls in ((DICT, ours.CompressedDictReplayBuffer), (STACKS, ours.CompressedNStepReplayBuffer)):
        Neutral(30, space, DISCRETE, None, optimize_memory_usage=True).save(tmp_path / "a.replay")
        assert not cls.load(tmp_path / "a.replay").optimize_memory_usage
    Neutral(30, spaces.Dict(a=DICT), DISCRETE, None).save(tmp_path / "a.replay")
    with pytest.raises(ValueError, match="cannot hold"):
        ours.CompressedDictReplayBuffer.load(tmp_path / "a.replay")


def test_numbers_of_numpy_are_numbers(tmp_path):
    kwargs = {"stack_size": np.int64(4), "stack_axis": np.int64(0), "frames_per_chunk": np.int64(5)}
    buffer = ours.CompressedNStepReplayBuffer(30, STACKS, DISCRETE, "cpu", n_steps=np.int64(2), **kwargs)
    buffer.save(tmp_path / "a.replay")
    loaded = ours.CompressedNStepReplayBuffer.load(tmp_path / "a.replay", device="cpu")
    assert (loaded.n_steps, loaded.table.compression.frames_per_chunk) == (2, 5)
    Neutral(30, STACKS, DISCRETE, None, path=tmp_path / "b.replay", **kwargs).close()
