import importlib.util
import os
import re
import subprocess
import sys
import warnings
from pathlib import Path

import ale_py
import gymnasium as gym
import numpy as np
import pytest

from gym_compress import CompressedAtariPreprocessing, CompressedFrameStack, CompressedObservation
from tests.envs import assert_same

pytest.importorskip("mushroom_rl")

with warnings.catch_warnings():  # of pygame, which MushroomRL imports, with setuptools before 81
    warnings.filterwarnings("ignore", "pkg_resources is deprecated as an API")
    from mushroom_rl.core import Agent, Core
from mushroom_rl.policy.policy import Policy
from mushroom_rl.utils.replay_memory import ReplayMemory

EXAMPLE = Path(__file__).parents[1] / "examples" / "mushroom_atari.py"


@pytest.fixture(scope="module")
def example():
    spec = importlib.util.spec_from_file_location(EXAMPLE.stem, EXAMPLE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def mdp(example):
    """A game of short episodes: about two of three end with a life, the others after 40 steps."""
    gym.register_envs(ale_py)
    env = gym.make("ALE/Breakout-v5", frameskip=1)
    env = CompressedFrameStack(CompressedAtariPreprocessing(env, terminal_on_life_loss=True), 4)
    env = gym.wrappers.TimeLimit(env, 40)
    env.reset(seed=1)
    yield example.GymnasiumEnvironment(env)
    env.close()


class Recorder(Agent):
    """Acts at random, and adds what it sees to a compressed memory and, as arrays, to a plain one."""

    def __init__(self, info, memory, plain):
        super().__init__(info, Policy())
        self.memory, self.plain = memory, plain

    def draw_action(self, state):
        assert type(state) is CompressedObservation
        return np.array([np.random.randint(self.mdp_info.action_space.n)])

    def fit(self, dataset, **info):
        self.memory.add(dataset)
        self.plain.add([(np.array(s), a, r, np.array(n), *flags) for s, a, r, n, *flags in dataset])


def drawn(get, *args):
    np.random.seed(5)
    return get(*args)


@pytest.mark.parametrize("steps", [400, 900], ids=["partly full", "overwritten"])
def test_a_batch_is_that_of_the_base_class(example, mdp, steps):
    np.random.seed(2)
    memory, plain = example.CompressedReplayMemory(10, 500), ReplayMemory(10, 500)
    core = Core(Recorder(mdp.info, memory, plain), mdp)
    core.learn(n_steps=steps, n_steps_per_fit=4, quiet=True)
    assert memory.size == plain.size == min(steps, 500)
    for n in (1, 32, 400):
        batch = drawn(memory.get, n)
        assert batch[0].shape == batch[3].shape == (n, 4, 84, 84)
        assert_same(batch, drawn(ReplayMemory.get, memory, n))
        assert_same(batch, drawn(plain.get, n))
    *_, absorbing, last = batch  # of the largest batch: episodes end in both ways, and go on
    assert set(zip(absorbing, last, strict=True)) == {(False, False), (False, True), (True, True)}


def test_an_episode_ends_where_the_game_or_the_time_does(example, mdp):
    np.random.seed(3)
    memory = example.CompressedReplayMemory(10, 1000)
    core = Core(Recorder(mdp.info, memory, ReplayMemory(10, 1000)), mdp)
    core.learn(n_episodes=20, n_steps_per_fit=1, quiet=True)
    absorbing, last = np.array(memory._absorbing[: memory.size]), np.array(memory._last[: memory.size])
    lengths = np.diff(np.flatnonzero(last), prepend=-1)
    assert (len(lengths), max(lengths)) == (20, 40)
    assert absorbing[last][lengths < 40].all()
    assert not absorbing[last][lengths == 40].all()
    assert not absorbing[~last].any()
    for i in range(1, memory.size):  # until an episode ends, a next state is kept as the next state
        assert (memory._states[i] is memory._next_states[i - 1]) == (not last[i - 1])


def test_the_example_runs():
    run = subprocess.run(
        [sys.executable, str(EXAMPLE), "--steps", "120", "--batch", "8"],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},  # threads that wait for each other on a busy machine
    )
    assert re.search(r"^ +120 +[+-]0\.\d+ +0 +116$", run.stdout, re.M)
    assert "replay memory: 120 transitions" in run.stdout
    plain, times = re.search(r"as plain arrays: ([\d.]+) MB, (\d+) times", run.stdout).groups()
    assert float(plain) == pytest.approx(121 * 4 * 84 * 84 / 1e6, abs=0.05)
    assert int(times) > 50
