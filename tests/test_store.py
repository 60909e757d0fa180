import copy
import pickle

import numpy as np
import pytest
from gym_compress.replay.leaves import make_store
from gymnasium import spaces
from hypothesis import given
from hypothesis import strategies as st

import gym_compress.chunk
from gym_compress import CompressedFrameStack, CompressedObservation, CompressObservation
from gym_compress.replay.store import ObservationStore, read_pair, read_stores
from tests.envs import AnyEnv, MovingSquare, assert_same, play

ROWS, ENVS = 11, 2
KINDS = {
    "grey stack": ((4, 6, 5), {}, 1),
    "RGB stack": ((12, 4, 5), {}, 3),
    "images": ((3, 6, 6), {}, 0),
    "last axis": ((6, 5, 4), {"stack_size": 4, "stack_axis": -1}, 1),
    "middle axis": ((3, 8, 5), {"stack_size": 4, "stack_axis": 1}, 1),
    "wrong size": ((4, 6, 5), {"stack_size": 2}, 1),
    "no stack": ((7, 9), {"stack_size": 1}, 0),
    "frames of RGB": ((4, 5, 6, 3), {}, 1),
}


def moved_on(observation, by, axis, rng):
    """The observation that follows: its frames moved on, new ones at the end."""
    following = np.roll(observation, -by, axis)
    end = [slice(None)] * observation.ndim
    end[axis] = slice(observation.shape[axis] - by, None)
    following[tuple(end)] = rng.integers(0, 255, following[tuple(end)].shape)
    return following


@given(data=st.data(), kind=st.sampled_from(sorted(KINDS)), dtype=st.sampled_from(["u1", "f4", "i2"]))
def test_reads_as_the_array_that_it_stands_for(data, kind, dtype):
    """Rows in any order, episodes, repeated and foreign observations, copies and pickles between."""
    shape, kwargs, by = KINDS[kind]
    axis = kwargs.get("stack_axis", 0) % len(shape)
    space = spaces.Box(0, 255, shape, np.dtype(dtype).type)
    store = ObservationStore(ROWS, ENVS, space, frames_per_chunk=data.draw(st.integers(1, 4)), **kwargs)
    twin = store.twin()
    arrays = [np.zeros((ROWS, ENVS, *shape), dtype) for _ in range(2)]
    rng = np.random.default_rng(data.draw(st.integers(0, 9)))

    def fresh():
        return rng.integers(0, 255, (ENVS, *shape)).astype(dtype)

    current = fresh()
    for step in range(data.draw(st.integers(1, 60))):
        luck = rng.random(3)
        if luck[0] < 0.15:
            current = fresh()
        following = moved_on(current, by or shape[0], axis + 1, rng).astype(dtype)
        if luck[1] < 0.15:
            following = current.copy()
        elif luck[1] < 0.3:
            following = fresh()
        row = step % ROWS if luck[2] < 0.9 else int(rng.integers(ROWS))
        for kept, array, batch in ((store, arrays[0], current), (twin, arrays[1], following)):
            given_batch = batch.copy()
            kept[row] = given_batch
            given_batch[...] = 0
            array[row] = batch
        current = following
        if step % 17 == 11:
            store, twin = pickle.loads(pickle.dumps((store, twin)))
        if step % 19 == 7:
            store, twin = copy.deepcopy((store, twin))
    rows, envs = rng.integers(0, ROWS, 9), rng.integers(0, ENVS, 9)
    assert_same(store[rows, envs], arrays[0][rows, envs])
    assert_same(twin[rows, envs, :], arrays[1][rows, envs, :])
    assert_same(read_pair(store, twin, rows, envs), (arrays[0][rows, envs], arrays[1][rows, envs]))
    pairs = rows.reshape(3, 3), envs.reshape(3, 3)
    both = read_stores((store, *pairs), (twin, *pairs))
    assert_same(tuple(both), (arrays[0][pairs], arrays[1][pairs]))
    assert_same(store[3], arrays[0][3])
    assert_same(store[2:5, 1], arrays[0][2:5, 1])
    assert_same(store[:, 0:1], arrays[0][:, 0:1])


def test_looks_like_an_array():
    store = ObservationStore(5, 3, spaces.Box(0, 255, (4, 20, 10), np.uint8))
    array = np.zeros((5, 3, 4, 20, 10), np.uint8)
    assert (store.shape, store.dtype, store.nbytes, len(store)) == (array.shape, array.dtype, array.nbytes, 5)
    assert_same(store[np.array([0, 4]), np.array([1, 2])], array[[0, 4], [1, 2]])  # nothing was written yet
    assert store.cbytes == 4 * 5 * 3  # the references
    for key in ((0, 0, 0), (0, 1, slice(1, 2)), (slice(None), 0, 2), (..., 0), (0, 0, np.arange(2))):
        with pytest.raises(IndexError, match="rows and environments"):
            store[key]
    for row in (5, -6):
        with pytest.raises(IndexError, match="out of range"):
            store[row] = array[0]
    store[-1] = array[0] + 1
    assert_same(store[4], array[0] + 1)


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        (np.zeros((3, 4, 20, 10), np.uint8), "shape"),
        (np.zeros((2, 4, 20, 11), np.uint8), "shape"),
        (np.zeros((2, 4, 20, 10), np.float32), "float32.*uint8"),
        (np.full((2, 4, 20, 10), 300, np.int64), "int64.*uint8"),
        (7, "shape"),
        ([CompressedObservation.from_frames([np.zeros((20, 10), np.uint8)] * 4)], "2 observations.*got 1"),
        ([CompressedObservation.from_frames([np.zeros((20, 10), np.uint8)] * 3)] * 2, "shape"),
    ],
    ids=str,
)
def test_what_does_not_fit_changes_nothing(batch, message):
    store = ObservationStore(5, 2, spaces.Box(0, 255, (4, 20, 10), np.uint8))
    store[0] = np.ones((2, 4, 20, 10), np.uint8)
    before = store.cbytes
    with pytest.raises(ValueError, match=message):
        store[0] = batch
    assert store.cbytes == before
    assert (store[0] == 1).all()


@pytest.mark.parametrize(
    "kwargs",
    [
        {"stack_size": 3},
        {"stack_size": 0},
        {"stack_size": "four"},
        {"stack_axis": 3},
        {"stack_axis": -4},
        {"codec": "x"},
    ],
    ids=str,
)
def test_arguments_that_do_not_suit_are_refused(kwargs):
    with pytest.raises(ValueError, match=r"(stack_size|stack_axis|codec)"):
        ObservationStore(5, 2, spaces.Box(0, 255, (4, 20, 10), np.uint8), **kwargs)


def filled(steps, rows=400, **kwargs):
    """A store and twin after a run of stacks of 4, and how many bytes they compress to."""
    env = CompressedFrameStack(MovingSquare(episode=10**9), 4)
    seen = [np.asarray(obs)[None] for obs in play(env, steps)]
    store = ObservationStore(rows, 1, spaces.Box(0, 255, (4, 84, 84), np.uint8), **kwargs)
    twin = store.twin()
    for i in range(steps):
        store[i % rows], twin[i % rows] = seen[i], seen[i + 1]
    return store, twin, seen


def test_a_frame_is_kept_once():
    store, _, _ = filled(400, codec="none")
    raw = 84 * 84
    assert 400 * raw < store.cbytes < (400 + 3 * 12) * raw + 4 * 400


def test_chunks_that_nothing_refers_to_are_freed():
    store, twin, seen = filled(3000, rows=50, codec="none", frames_per_chunk=5)
    assert store.cbytes < (50 + 4 * 5) * 84 * 84
    rows = np.arange(50)
    assert_same(twin[rows, 0 * rows], np.concatenate(seen[2951:3001]))
    store.clear(), twin.clear()
    assert store.cbytes == twin.cbytes == 4 * 50


def test_a_pair_is_decoded_once_and_shares_memory(monkeypatch):
    store, twin, seen = filled(300)
    decoded = []
    decode = gym_compress.chunk.decode
    monkeypatch.setattr(
        gym_compress.chunk, "decode", lambda content, out: decoded.append(content) or decode(content, out)
    )
    rows = np.array([10, 11, 150, 10])
    obs, following = read_pair(store, twin, rows, 0 * rows)
    assert len(decoded) == len({id(content) for content in decoded}) <= 4
    assert np.shares_memory(obs, following)
    assert_same(
        (obs, following),
        (np.concatenate([seen[i] for i in rows]), np.concatenate([seen[i + 1] for i in rows])),
    )


def test_frames_that_stand_still_are_read_as_pairs_too():
    store = ObservationStore(20, 1, spaces.Box(0, 255, (4, 84, 84), np.uint8))
    twin = store.twin()
    still = np.full((1, 4, 84, 84), 7, np.uint8)
    for row in range(20):
        store[row], twin[row] = still, still
    obs, following = read_pair(store, twin, np.arange(20), np.zeros(20, int))
    assert np.shares_memory(obs, following)
    assert (obs == 7).all()
    assert (following == 7).all()


@pytest.mark.parametrize("frames_per_chunk", [1, 5, 12, 40])
@pytest.mark.parametrize("wrap", ["stack", "zero padding", "images"])
def test_compressed_observations_are_adopted_without_decoding(monkeypatch, wrap, frames_per_chunk):
    inner = CompressObservation(
        AnyEnv(spaces.Box(0, 255, (12, 10), np.uint8)), frames_per_chunk=frames_per_chunk
    )
    env = {
        "stack": lambda: CompressedFrameStack(inner, 4),
        "zero padding": lambda: CompressedFrameStack(inner, 4, padding_type="zero"),
        "images": lambda: inner,
    }[wrap]()
    store = ObservationStore(30, 1, env.observation_space, frames_per_chunk=7)
    twin = store.twin()
    seen = play(env, 70)
    with monkeypatch.context() as patch:
        patch.setattr(gym_compress.chunk, "decode", lambda *args: pytest.fail("decoded"))
        patch.setattr(CompressedObservation, "__array__", lambda *args: pytest.fail("read"))
        patch.setattr("gym_compress.codec.Codec.encode", lambda *args: pytest.fail("encoded"))
        for i in range(len(seen) - 1):
            store[i % 30], twin[i % 30] = [seen[i]], [seen[i + 1]]
    rows = np.arange(30)
    at = [max(i for i in range(len(seen) - 1) if i % 30 == row) for row in rows]
    want = np.stack([np.asarray(seen[i]) for i in at]), np.stack([np.asarray(seen[i + 1]) for i in at])
    assert_same(read_pair(store, twin, rows, 0 * rows), want)
    env.close()
    assert_same(read_pair(store, twin, rows, 0 * rows), want)
    again = pickle.loads(pickle.dumps((store, twin)))
    assert_same(read_pair(*again, rows, 0 * rows), want)


def test_compressed_and_dense_observations_mix():
    env = CompressedFrameStack(AnyEnv(spaces.Box(0, 255, (12, 10), np.uint8)), 4)
    seen = play(env, 40)
    store = ObservationStore(45, 2, env.observation_space)
    foreign = CompressedObservation.from_frames([np.asarray(seen[0])])  # its bytes lie otherwise
    for i, obs in enumerate(seen[:45]):
        store[i] = [obs, np.asarray(obs)] if i % 3 else [np.asarray(obs), obs]
    want = np.stack([np.asarray(obs) for obs in seen[:45]])
    for env_index in (0, 1):
        assert_same(store[np.arange(45), np.full(45, env_index)], want)
    store[0] = [foreign[0], seen[3]]
    assert_same(store[0], np.stack([np.asarray(seen[0]), np.asarray(seen[3])]))


def test_what_does_not_lie_in_slices_is_decoded_and_written_anew():
    inner = CompressObservation(AnyEnv(spaces.Box(0, 255, (12, 10), np.uint8)))
    env = CompressedFrameStack(
        CompressedFrameStack(inner, 3), 2
    )  # slices of three frames, which move on by one
    store = ObservationStore(45, 1, env.observation_space)
    seen = play(env, 40)[:45]
    for i, obs in enumerate(seen):
        store[i] = [obs]
    rows = np.arange(len(seen))
    assert_same(store[rows, 0 * rows], np.stack([np.asarray(obs) for obs in seen]))


def test_references_grow_when_four_bytes_do_not_do():
    store, _, seen = filled(10, rows=10)
    store.streams[0]._end = 2**31 - 3
    for i in range(10):
        store[i] = seen[i] + np.uint8(1)
    assert_same(store[np.arange(10), np.zeros(10, int)], np.concatenate(seen[:10]) + np.uint8(1))


def test_small_leaves_and_vectors_are_arrays():
    for space in (
        spaces.Box(-1, 1, (5000,), np.float32),
        spaces.Box(0, 255, (4, 4, 4), np.uint8),
        spaces.Discrete(5),
        spaces.MultiBinary(7),
    ):
        assert_same(make_store(3, 2, space), np.zeros((3, 2, *space.shape), space.dtype))
    assert isinstance(make_store(3, 2, spaces.Box(0, 255, (32, 32), np.uint8)), ObservationStore)
    with pytest.raises(TypeError, match="fixed shape"):
        make_store(3, 2, spaces.Text(4))


class Frames(AnyEnv):
    """Numbered frames."""

    def _draw(self):
        self.number = getattr(self, "number", -1) + 1
        return np.full(self.observation_space.shape, self.number % 251, self.observation_space.dtype)


def kept_and_expected(stacked, frames_per_chunk, wrapper_frames_per_chunk, rows=30, steps=120, **kwargs):
    """Adopted stacks, every store read back after each step against what the wrapper said."""
    env = CompressedFrameStack(
        Frames(spaces.Box(0, 255, (12, 10), np.uint8), episodes=(17, 8)),
        stacked,
        frames_per_chunk=wrapper_frames_per_chunk,
    )
    store = ObservationStore(rows, 1, env.observation_space, frames_per_chunk=frames_per_chunk, **kwargs)
    twin = store.twin()
    obs, _ = env.reset(seed=0)
    expected = {}
    for i in range(steps):
        following, _, terminated, truncated, _ = env.step(0)
        store[i % rows], twin[i % rows] = [obs], [following]
        expected[i % rows] = np.asarray(obs), np.asarray(following)
        obs = env.reset()[0] if terminated or truncated else following
        at = np.array(list(expected))
        pair = read_pair(store, twin, at, 0 * at)
        assert_same(pair, tuple(np.stack(part) for part in zip(*expected.values(), strict=True)))
    return env, store, twin, expected


@pytest.mark.parametrize("stack_size", [1, 4, 5])
@pytest.mark.parametrize("slices", ["auto", 1])
@pytest.mark.parametrize("wrapper_frames_per_chunk", [1, 2, 7, 8, 12])
def test_adopted_stacks_of_any_chunks_read_as_they_were(stack_size, slices, wrapper_frames_per_chunk):
    env, store, twin, expected = kept_and_expected(stack_size, 3, wrapper_frames_per_chunk, stack_size=slices)
    at = np.array(list(expected))
    want = tuple(np.stack(part) for part in zip(*expected.values(), strict=True))
    copies = [
        pickle.loads(pickle.dumps((store, twin))),
        copy.deepcopy((store, twin)),
    ]  # while the wrapper writes
    for pair in (*copies, (store, twin)):
        assert_same(read_pair(*pair, at, 0 * at), want)
    env.close()
    for pair in (*copies, (store, twin)):
        assert_same(read_pair(*pair, at, 0 * at), want)


def test_a_copy_while_the_wrapper_writes_holds_what_is_referred_to_and_no_more():
    env = CompressObservation(Frames(spaces.Box(0, 255, (40, 40), np.uint8)), frames_per_chunk=1000)
    store = ObservationStore(4, 1, env.observation_space)
    store[0] = [env.reset()[0]]
    assert store.cbytes > 1000 * 1600  # the wrapper's raw chunk
    assert len(pickle.dumps(store)) < 10_000


def test_a_copy_holds_all_that_is_referred_to_whatever_came_last():
    env = CompressObservation(Frames(spaces.Box(0, 255, (40, 40), np.uint8)), frames_per_chunk=50)
    seen = play(env, 4)
    store = ObservationStore(4, 1, env.observation_space)
    for row, i in enumerate((1, 4, 0)):
        store[row] = [seen[i]]
    again = pickle.loads(pickle.dumps(store))
    assert [int(again[row].max()) for row in range(3)] == [1, 4, 0]


def test_what_was_let_go_is_written_anew():
    env = CompressObservation(Frames(spaces.Box(0, 255, (32, 32), np.uint8)))
    store = ObservationStore(2, 1, env.observation_space)
    image = np.full((1, 32, 32), 77, np.uint8)
    store[0] = image
    store[0] = [env.reset()[0]]
    store[1] = image
    assert (store[1] == 77).all()
    assert (store[0] == 0).all()


def test_rows_before_and_after_a_copy_are_read_as_pairs():
    store, twin, seen = filled(100)
    store, twin = pickle.loads(pickle.dumps((store, twin)))
    for i in range(100, 130):
        store[i], twin[i] = seen[i % 100], seen[i % 100 + 1]
    rows = np.arange(90, 130)[np.arange(40) != 10]  # where the run begins again, nothing is shared
    assert np.shares_memory(*read_pair(store, twin, rows, 0 * rows))
    store[130], twin[130] = seen[30], seen[31]
    pickle.dumps(store)
    store[131], twin[131] = seen[31], seen[32]
    rows = np.array([129, 130, 131])
    pair = read_pair(store, twin, rows, 0 * rows)
    assert np.shares_memory(*pair)
    assert_same(pair[0], np.concatenate([seen[29], seen[30], seen[31]]))


@pytest.mark.parametrize("frames_per_chunk", [1, 3])
def test_the_newest_row_is_read_without_decoding(monkeypatch, frames_per_chunk):
    frames = np.random.default_rng(0).integers(0, 255, (60, 20, 18), dtype=np.uint8)
    store = ObservationStore(
        20, 1, spaces.Box(0, 255, (4, 20, 18), np.uint8), frames_per_chunk=frames_per_chunk
    )
    monkeypatch.setattr(gym_compress.chunk, "decode", lambda *args: pytest.fail("decoded"))
    for i in range(50):
        store[i % 20] = frames[None, i : i + 4]
        assert_same(store[i % 20], frames[None, i : i + 4])


def test_saving_changes_nothing_that_is_read():
    frames = Frames(spaces.Box(0, 255, (32, 32), np.uint8))
    env = CompressObservation(frames, frames_per_chunk=8)
    adopted = [env.reset()[0]] + [env.step(0)[0] for _ in range(3)]
    env.close()
    store = ObservationStore(10, 1, env.observation_space, frames_per_chunk=4)
    twin = store.twin()

    def image(i):
        return np.full((1, 32, 32), 100 + i, np.uint8)

    store[0], twin[0] = image(0), image(1)
    store[1], twin[1] = image(1), [adopted[0]]
    store[2], twin[2] = [adopted[3]], image(9)
    for _ in range(2):
        for row, (obs, following) in enumerate([(100, 101), (101, 0), (3, 109)]):
            pair = read_pair(store, twin, np.array([row]), np.array([0]))
            assert [int(part.max()) for part in pair] == [obs, following]
        pickle.dumps((store, twin))


def test_nothing_leaks_however_dense_and_adopted_rows_mix():
    rng = np.random.default_rng(0)
    store = ObservationStore(4, 1, spaces.Box(0, 255, (4, 32, 32), np.uint8), stack_size=2, codec="none")
    twin = store.twin()
    for i in range(400):
        env = CompressObservation(
            Frames(spaces.Box(0, 255, (32, 32), np.uint8)), frames_per_chunk=2, codec="none"
        )
        frames = [env.reset()[0], env.step(0)[0]]
        env.close()
        stranger = CompressedObservation.from_frames(
            rng.integers(0, 255, (1, 32, 32), np.uint8), codec="none"
        )
        half = CompressedObservation.from_frames([*frames, stranger[0], frames[0]])
        whole = CompressedObservation.from_frames([*frames, *frames])
        dense = rng.integers(0, 255, (1, 4, 32, 32), dtype=np.uint8)
        for batch in ([half], [whole], dense):
            store[i % 4], twin[(i + 1) % 4] = batch, batch
        if i % 10 == 0:
            store, twin = pickle.loads(pickle.dumps((store, twin)))
        assert store.cbytes < 8 * 4 * 1024 + 40 * 1024
        assert len(store._odd) + len(twin._odd) <= 8
    for row in range(4):
        store[row], twin[row] = dense, dense
    assert not store._odd
    assert not twin._odd
    (stream,) = store.streams
    assert len(stream._chunks) < 700
    assert len(stream._adopted) <= 16


def test_chunks_that_come_and_go_leave_no_list_behind():
    env = CompressObservation(Frames(spaces.Box(0, 255, (32, 32), np.uint8)), frames_per_chunk=1)
    store = ObservationStore(4, 1, env.observation_space)
    store[0] = np.zeros((1, 32, 32), np.uint8)
    store[1] = [env.reset()[0]]
    for i in range(2000):
        store[1 + i % 3] = [env.step(0)[0]]
    store[0] = [env.step(0)[0]]
    for i in range(600):
        store[i % 4] = [env.step(0)[0]]
    assert len(store.streams[0]._chunks) < 600


def test_one_row_is_written_before_the_old_one_goes():
    store = ObservationStore(1, 1, spaces.Box(0, 255, (4, 20, 18), np.uint8), frames_per_chunk=1)
    frames = np.random.default_rng(0).integers(0, 255, (60, 20, 18), dtype=np.uint8)
    for i in range(50):
        store[0] = frames[None, i : i + 4]
        assert_same(store[0], frames[None, i : i + 4])


@pytest.mark.parametrize("by", [1, 2, 3, 4])
def test_stacks_that_move_by_any_number_keep_each_frame_once(by):
    frames = np.random.default_rng(0).integers(0, 255, (600, 16, 16), dtype=np.uint8)
    store = ObservationStore(100, 1, spaces.Box(0, 255, (4, 16, 16), np.uint8), codec="none")
    for i in range(100):
        store[i] = frames[None, by * i : by * i + 4]
    assert store.cbytes <= (100 * by + 4 + 24) * 256 + 400
