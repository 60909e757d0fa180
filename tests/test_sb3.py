"""The SB3 buffers against SB3's own: every batch alike, with the same random numbers."""

import pickle

import gymnasium as gym
import numpy as np
import pytest
import stable_baselines3 as sb3
import torch
from gymnasium import spaces
from stable_baselines3.common import buffers
from stable_baselines3.common.vec_env import DummyVecEnv, VecNormalize

import gym_compress.chunk
import gym_compress.sb3 as ours
from gym_compress.replay.store import ObservationStore
from tests.envs import MovingSquare, assert_same

STACKS = spaces.Box(0, 255, (4, 20, 18), np.uint8)
IMAGE = spaces.Box(0, 255, (3, 24, 24), np.uint8)
VECTOR = spaces.Box(-np.inf, np.inf, (5,), np.float32)
DICT = spaces.Dict(image=IMAGE, vector=VECTOR, number=spaces.Discrete(4))
SPACES = {"stacks": STACKS, "image": IMAGE, "vector": VECTOR}
SPACES |= {"number": spaces.Discrete(7), "bits": spaces.MultiBinary(6)}
DISCRETE = spaces.Discrete(6)
CONTINUOUS = spaces.Box(-1, 1, (2, 2), np.float64)


class Transitions:
    """Episodes of several environments, ended by a termination or a time limit, with repeats and strangers."""

    def __init__(self, space, actions, n_envs, seed=0):
        self.space, self.actions, self.n_envs = space, actions, n_envs
        self.rng = np.random.default_rng(seed)
        space.seed(seed), actions.seed(seed)
        self.obs = [self._draw() for _ in range(n_envs)]

    def _draw(self):
        return self.space.sample()

    def _following(self, obs):
        luck = self.rng.random()
        if luck < 0.1:
            return obs
        if self.space is STACKS and luck < 0.9:
            return np.concatenate([obs[1:], self._draw()[:1]])
        return self._draw()

    def _batch(self, observations):
        if isinstance(self.space, spaces.Dict):
            return {key: np.stack([obs[key] for obs in observations]) for key in self.space}
        return np.stack(observations)

    def __call__(self):
        following = [self._following(obs) for obs in self.obs]
        dones = self.rng.random(self.n_envs) < 0.1
        infos = [{"TimeLimit.truncated": bool(done and self.rng.random() < 0.5)} for done in dones]
        actions = np.stack([self.actions.sample() for _ in range(self.n_envs)])
        rewards = self.rng.normal(size=self.n_envs)
        step = self._batch(self.obs), self._batch(following), actions, rewards, dones, infos
        self.obs = [self._draw() if done else obs for obs, done in zip(following, dones, strict=True)]
        return step


def arrays(samples):
    return {
        name: {key: part.numpy() for key, part in value.items()} if isinstance(value, dict) else value.numpy()
        for name, value in samples._asdict().items()
        if value is not None
    }


def assert_equal_batches(one, other, batches=12, batch_size=13, **kwargs):
    for seed in range(batches):
        np.random.seed(seed)
        mine = arrays(one.sample(batch_size, **kwargs))
        state = np.random.get_state()[1].copy()
        np.random.seed(seed)
        assert_same(mine, arrays(other.sample(batch_size, **kwargs)))
        assert (np.random.get_state()[1] == state).all()


def run(one, other, transitions, steps):
    for _ in range(steps):
        step = transitions()
        for buffer in (one, other):
            buffer.add(*[dict(part) if isinstance(part, dict) else part for part in step])
    assert (one.size(), one.pos, one.full, one.buffer_size) == (
        other.size(),
        other.pos,
        other.full,
        other.buffer_size,
    )


CASES = [
    ("CompressedReplayBuffer", "ReplayBuffer", space, actions, kwargs)
    for space in SPACES
    for actions, kwargs in ((DISCRETE, {}), (CONTINUOUS, {"handle_timeout_termination": False}))
]
CASES += [
    ("CompressedNStepReplayBuffer", "NStepReplayBuffer", "stacks", DISCRETE, {"n_steps": 3, "gamma": 0.9}),
    ("CompressedNStepReplayBuffer", "NStepReplayBuffer", "vector", CONTINUOUS, {}),
    ("CompressedDictReplayBuffer", "DictReplayBuffer", "dict", CONTINUOUS, {}),
    (
        "CompressedDictReplayBuffer",
        "DictReplayBuffer",
        "dict",
        DISCRETE,
        {"handle_timeout_termination": False},
    ),
]


@pytest.mark.parametrize("n_envs", [pytest.param(1, marks=pytest.mark.slow), 3])
@pytest.mark.parametrize(("mine", "theirs", "space", "actions", "kwargs"), CASES)
def test_batches_equal_sb3s(mine, theirs, space, actions, kwargs, n_envs):
    space = DICT if space == "dict" else SPACES[space]
    arguments = (40 * n_envs + 1, space, actions, "cpu", n_envs)
    one = getattr(ours, mine)(*arguments, frames_per_chunk=5, **kwargs)
    other = getattr(buffers, theirs)(*arguments, **kwargs)
    assert isinstance(one, getattr(buffers, theirs))
    transitions = Transitions(space, actions, n_envs)
    for steps in (7, 33, 60):
        run(one, other, transitions, steps)
        assert_equal_batches(one, other)
    one = pickle.loads(pickle.dumps(one))
    assert_equal_batches(one, other)
    run(one, other, transitions, 25)
    assert_equal_batches(one, other)
    one.reset(), other.reset()
    run(one, other, transitions, 9)
    assert_equal_batches(one, other)


def test_optimize_memory_usage_draws_as_sb3_and_gives_the_right_next_observation():
    arguments = (30, STACKS, DISCRETE, "cpu", 1, True)
    one = ours.CompressedReplayBuffer(*arguments, True)  # both flags, which SB3 refuses
    other = buffers.ReplayBuffer(*arguments, False)
    transitions = Transitions(STACKS, DISCRETE, 1)
    added = []
    for steps in (11, 45):
        for _ in range(steps):
            step = transitions()
            added.append(step)
            one.add(*step), other.add(*step)
        for seed in range(10):
            np.random.seed(seed)
            mine = one.sample(20)
            np.random.seed(seed)
            theirs = other.sample(20)
            assert_same(mine.rewards.numpy(), theirs.rewards.numpy())
            assert_same(mine.observations.numpy(), theirs.observations.numpy())
            for row, reward in enumerate(mine.rewards[:, 0].tolist()):
                (step,) = [step for step in added if np.float32(step[3][0]) == np.float32(reward)]
                assert_same(mine.next_observations[row].numpy(), step[1][0])
                assert mine.dones[row, 0] == float(step[4][0] and not step[5][0]["TimeLimit.truncated"])
    with pytest.raises(NotImplementedError):
        ours.CompressedNStepReplayBuffer(*arguments)
    with pytest.raises(AssertionError):
        ours.CompressedDictReplayBuffer(30, DICT, DISCRETE, "cpu", 1, True)


@pytest.mark.parametrize("n_envs", [1, 3])
@pytest.mark.parametrize("space", ["stacks", "image", "vector", "dict"])
def test_rollouts_equal_sb3s(space, n_envs):
    name = "DictRolloutBuffer" if space == "dict" else "RolloutBuffer"
    space = DICT if space == "dict" else SPACES[space]
    arguments = {"gae_lambda": 0.9, "gamma": 0.97, "n_envs": n_envs, "device": "cpu"}
    one = getattr(ours, f"Compressed{name}")(20, space, DISCRETE, **arguments, stack_size="auto")
    other = getattr(buffers, name)(20, space, DISCRETE, **arguments)
    transitions = Transitions(space, DISCRETE, n_envs)
    for _ in range(2):
        one.reset(), other.reset()
        for _ in range(20):
            obs, _, action, reward, done, _ = transitions()
            value, log_prob = torch.randn(n_envs), torch.randn(n_envs)
            one.add(obs, action, reward, done, value, log_prob)
            other.add(obs, action, reward, done, value, log_prob)
        for buffer in (one, other):
            buffer.compute_returns_and_advantage(torch.zeros(n_envs), np.zeros(n_envs))
        for batch_size in (7, None):
            np.random.seed(4)
            mine = [arrays(batch) for batch in one.get(batch_size)]
            np.random.seed(4)
            assert_same(tuple(mine), tuple(arrays(batch) for batch in other.get(batch_size)))


@pytest.mark.parametrize("name", ["CompressedReplayBuffer", "CompressedNStepReplayBuffer"])
def test_a_batch_decodes_each_chunk_once(monkeypatch, name):
    buffer = getattr(ours, name)(400, STACKS, DISCRETE, "cpu", frames_per_chunk=3)
    transitions = Transitions(STACKS, DISCRETE, 1)
    for _ in range(300):
        buffer.add(*transitions())
    decoded = []
    decode = gym_compress.chunk.decode
    monkeypatch.setattr(
        gym_compress.chunk, "decode", lambda content, out: decoded.append(id(content)) or decode(content, out)
    )
    buffer.sample(64)
    assert len(decoded) == len(set(decoded)) > 30


def test_dense_arrays_are_never_allocated():
    for buffer in (
        ours.CompressedReplayBuffer(10**6, spaces.Box(0, 255, (4, 84, 84), np.uint8), DISCRETE, "cpu"),
        ours.CompressedRolloutBuffer(10**5, spaces.Box(0, 255, (4, 84, 84), np.uint8), DISCRETE, "cpu"),
        ours.CompressedDictReplayBuffer(10**6, spaces.Dict(image=IMAGE), DISCRETE, "cpu"),
    ):
        stores = (
            buffer.observations.values() if isinstance(buffer.observations, dict) else [buffer.observations]
        )
        assert all(isinstance(store, ObservationStore) for store in stores)
        sizes = [value.nbytes for value in vars(buffer).values() if isinstance(value, np.ndarray)]
        assert max(sizes) <= 8 * buffer.buffer_size


def test_normalised_batches_equal_sb3s():
    env = VecNormalize(DummyVecEnv([lambda: gym.make("CartPole-v1")] * 2))
    one, other = (
        cls(100, env.observation_space, env.action_space, "cpu", 2)
        for cls in (ours.CompressedReplayBuffer, buffers.ReplayBuffer)
    )
    env.reset()
    for _ in range(60):
        obs = env.get_original_obs()
        actions = np.zeros(2, int)
        _, _, dones, infos = env.step(actions)
        for buffer in (one, other):
            buffer.add(obs, env.get_original_obs(), actions, env.get_original_reward(), dones, infos)
    assert_equal_batches(one, other, env=env)


@pytest.mark.parametrize(
    ("name", "space"), [("ReplayBuffer", STACKS), ("NStepReplayBuffer", STACKS), ("DictReplayBuffer", DICT)]
)
def test_normalised_images_equal_sb3s(name, space):
    class Normalizer:
        def normalize_obs(self, obs):
            if isinstance(obs, dict):
                return {key: self.normalize_obs(value) for key, value in obs.items()}
            return (obs / np.float32(3)).astype(np.float32)

        def normalize_reward(self, reward):
            return np.clip(reward, -0.5, 0.5)

    one, other = (
        getattr(module, prefix + name)(60, space, DISCRETE, "cpu", 2)
        for module, prefix in ((ours, "Compressed"), (buffers, ""))
    )
    run(one, other, Transitions(space, DISCRETE, 2), 50)
    assert_equal_batches(one, other, env=Normalizer())


def test_bad_input_changes_nothing():
    buffer = ours.CompressedReplayBuffer(20, STACKS, DISCRETE, "cpu", 2)
    transitions = Transitions(STACKS, DISCRETE, 2)
    for _ in range(5):
        buffer.add(*transitions())
    good = transitions()

    def state():
        rows, envs = np.indices((5, 2))
        kept = [
            buffer.observations[rows, envs],
            buffer.next_observations[rows, envs],
            buffer.rewards,
            buffer.dones,
        ]
        return pickle.dumps((buffer.pos, kept, buffer.actions))

    before = state()
    for place, wrong in [
        (0, good[0][:1]),
        (1, good[1][:, :3]),
        (1, good[1].astype(np.float32)),
        (2, good[2][:1]),
        (3, np.zeros(3)),
        (4, np.zeros(1)),
        (5, [{}]),
    ]:
        with pytest.raises(ValueError, match=r"(shape|dtype|Expected)"):
            buffer.add(*good[:place], wrong, *good[place + 1 :])
        assert state() == before
    for arguments in ((0, STACKS, DISCRETE), (10, STACKS, DISCRETE, "cpu", 0)):
        with pytest.raises(ValueError, match="at least 1"):
            ours.CompressedReplayBuffer(*arguments)


class Goals(gym.Env):
    """A camera, and a goal to be reached."""

    observation_space = spaces.Dict(
        camera=IMAGE, achieved_goal=spaces.Box(-1, 1, (2,)), desired_goal=spaces.Box(-1, 1, (2,))
    )
    action_space = spaces.Box(-1, 1, (2,))

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.left = 6
        return self.observation_space.sample(), {}

    def step(self, action):
        self.left -= 1
        return self.observation_space.sample(), -1.0, False, self.left == 0, {}

    def compute_reward(self, achieved_goal, desired_goal, info):
        return -np.linalg.norm(achieved_goal - desired_goal, axis=-1)


def test_hindsight_batches_equal_sb3s():
    env = DummyVecEnv([Goals] * 2)
    arguments = {"env": env, "device": "cpu", "n_envs": 2, "goal_selection_strategy": "future"}
    one, other = (
        cls(60, env.observation_space, env.action_space, **arguments)
        for cls in (ours.CompressedHerReplayBuffer, sb3.HerReplayBuffer)
    )
    assert isinstance(one.observations["camera"], ObservationStore)
    obs = env.reset()
    for _ in range(50):
        actions = np.zeros((2, 2), np.float32)
        following, rewards, dones, infos = env.step(actions)
        for buffer in (one, other):
            buffer.add(dict(obs), dict(following), actions, rewards, dones, infos)
        obs = following
    assert_equal_batches(one, other)


def test_empty_buffers_and_wrong_shapes_are_refused():
    for cls, space in (
        (ours.CompressedReplayBuffer, STACKS),
        (ours.CompressedNStepReplayBuffer, STACKS),
        (ours.CompressedDictReplayBuffer, DICT),
    ):
        with pytest.raises(ValueError, match="nothing was added"):
            cls(10, space, DISCRETE, "cpu").sample(3)
    buffer = ours.CompressedReplayBuffer(10, VECTOR, CONTINUOUS, "cpu", 3)
    zeros = np.zeros(3)
    for obs in (np.zeros((5, 3), np.float32), np.zeros((1, 15), np.float32)):
        with pytest.raises(ValueError, match="shape"):
            buffer.add(obs, obs, np.zeros((3, 2, 2)), zeros, zeros, [{}] * 3)
    for rows, n_envs in ((0, 1), (4, 0)):
        with pytest.raises(ValueError, match="at least 1"):
            ours.CompressedRolloutBuffer(rows, STACKS, DISCRETE, "cpu", n_envs=n_envs)


def test_fewer_transitions_than_environments_make_one_row():
    one, other = (
        cls(2, STACKS, DISCRETE, "cpu", 5) for cls in (ours.CompressedReplayBuffer, buffers.ReplayBuffer)
    )
    run(one, other, Transitions(STACKS, DISCRETE, 5), 3)
    assert_equal_batches(one, other)


def test_a_refused_hindsight_transition_changes_nothing():
    env = DummyVecEnv([Goals])
    buffer = ours.CompressedHerReplayBuffer(4, env.observation_space, env.action_space, env, "cpu")
    obs = env.reset()
    for i in range(4):
        buffer.add(dict(obs), dict(obs), np.zeros((1, 2)), np.zeros(1), np.array([i % 2 == 1]), [{}])
    before = buffer.ep_length.copy()
    with pytest.raises(ValueError, match="shape"):
        buffer.add(
            {**obs, "camera": obs["camera"][:, :2]}, dict(obs), np.zeros((1, 2)), np.zeros(1), [False], [{}]
        )
    assert_same(buffer.ep_length, before)


def test_bytes():
    buffer = ours.CompressedDictReplayBuffer(50, DICT, DISCRETE, "cpu", 2, codec="none")
    plain = buffers.DictReplayBuffer(50, DICT, DISCRETE, "cpu", 2)
    fields = [*plain.observations.values(), *plain.next_observations.values()]
    fields += [plain.actions, plain.rewards, plain.dones, plain.timeouts]
    assert buffer.nbytes == sum(field.nbytes for field in fields)
    empty = buffer.cbytes
    images = 2 * plain.observations["image"].nbytes
    # references in the place of images, and which places are valid and where sequences end
    assert empty == buffer.nbytes - images + 2 * 4 * 50 + 2 * 50
    transitions = Transitions(DICT, DISCRETE, 2)
    for _ in range(10):
        buffer.add(*transitions())
    assert empty + 2 * 10 * 3 * 24 * 24 < buffer.cbytes


def test_settings_reach_the_chunks():
    for cls in (ours.CompressedReplayBuffer, ours.CompressedRolloutBuffer):
        buffer = cls(20, STACKS, DISCRETE, "cpu", codec="zstd:3", frames_per_chunk=7)
        buffer.observations[0] = np.zeros((1, *STACKS.shape), np.uint8)
        ((_, _, chunk),) = buffer.observations.index.unsaved(0, everything=True)
        assert (str(chunk.codec), chunk.nbytes) == ("zstd:3", 7 * np.prod(STACKS.shape[1:]))


@pytest.fixture
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def trained(cls, tmp_path, **kwargs):
    env = gym.wrappers.FrameStackObservation(MovingSquare(episode=17), 4)
    model = sb3.DQN(
        "CnnPolicy", env, seed=3, buffer_size=40, learning_starts=20, batch_size=8, device="cpu",
        replay_buffer_class=cls, replay_buffer_kwargs=kwargs,
    )  # fmt: skip
    model.learn(45)
    model.save_replay_buffer(tmp_path / "replay.pkl")
    model.load_replay_buffer(tmp_path / "replay.pkl")
    model.learn(20, reset_num_timesteps=False)
    return [value.numpy() for value in model.policy.state_dict().values()]


def test_training_gives_the_same_weights(tmp_path, one_thread):
    mine = trained(ours.CompressedReplayBuffer, tmp_path, frames_per_chunk=5)
    assert_same(tuple(mine), tuple(trained(buffers.ReplayBuffer, tmp_path)))


def test_ppo_gives_the_same_weights(one_thread):
    def weights(**kwargs):
        env = DummyVecEnv([lambda: gym.wrappers.FrameStackObservation(MovingSquare(episode=9), 4)] * 2)
        model = sb3.PPO(
            "CnnPolicy", env, seed=3, n_steps=16, batch_size=8, n_epochs=1, device="cpu", **kwargs
        )
        model.learn(64)
        return tuple(value.numpy() for value in model.policy.state_dict().values())

    assert_same(weights(rollout_buffer_class=ours.CompressedRolloutBuffer), weights())
