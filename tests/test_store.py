import copy
import pickle

import numpy as np
import pytest
from gymnasium import spaces
from hypothesis import given
from hypothesis import strategies as st

import gym_compress.chunk
from gym_compress import CompressedFrameStack
from gym_compress.replay.store import Compression, ObservationStore, read_places
from gym_compress.replay.transitions import make_leaves
from tests.envs import MovingSquare, assert_same, play

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
    store = ObservationStore(
        ROWS, ENVS, space, Compression(frames_per_chunk=data.draw(st.integers(1, 4)), **kwargs)
    )
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
        if step % 5 == 4:
            store.evict(twin)
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
    pairs = rows.reshape(3, 3), envs.reshape(3, 3)
    both = read_places((store, *pairs), (twin, *pairs))
    assert_same(tuple(both), (arrays[0][pairs], arrays[1][pairs]))
    for part in both:
        assert part.flags.c_contiguous
        assert part.flags.writeable
        assert part.base is None or part.base.base is None
    both[0][...] = 0  # changes nothing else
    assert_same(both[1], arrays[1][pairs])
    assert_same(store[3], arrays[0][3])
    assert_same(store[2:5, 1], arrays[0][2:5, 1])
    assert_same(store[:, 0:1], arrays[0][:, 0:1])


def test_looks_like_an_array():
    store = ObservationStore(5, 3, spaces.Box(0, 255, (4, 20, 10), np.uint8), Compression())
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
    ],
    ids=str,
)
def test_what_does_not_fit_changes_nothing(batch, message):
    store = ObservationStore(5, 2, spaces.Box(0, 255, (4, 20, 10), np.uint8), Compression())
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
        ObservationStore(5, 2, spaces.Box(0, 255, (4, 20, 10), np.uint8), Compression(**kwargs))


def filled(steps, rows=400, **kwargs):
    """A store and twin after a run of stacks of 4, and how many bytes they compress to."""
    env = CompressedFrameStack(MovingSquare(episode=10**9), 4)
    seen = [np.asarray(obs)[None] for obs in play(env, steps)]
    store = ObservationStore(rows, 1, spaces.Box(0, 255, (4, 84, 84), np.uint8), Compression(**kwargs))
    twin = store.twin()
    for i in range(steps):
        store[i % rows], twin[i % rows] = seen[i], seen[i + 1]
        if i % 4 == 3:
            store.evict(twin)
    return store, twin, seen


def test_a_frame_is_kept_once():
    store, _, _ = filled(400, codec="none")
    raw = 84 * 84
    assert 400 * raw < store.cbytes < (400 + 3 * 12) * raw + 4 * 400


def test_chunks_that_nothing_refers_to_are_freed():
    store, twin, seen = filled(3000, rows=50, codec="none", frames_per_chunk=5)
    assert store.cbytes < (50 + 4 * 5 + 4) * 84 * 84
    rows = np.arange(50)
    assert_same(twin[rows, 0 * rows], np.concatenate(seen[2951:3001]))
    store.clear(twin)
    assert store.cbytes == twin.cbytes == 4 * 50
    store[0] = seen[7]
    assert_same(store[0], seen[7])


def test_a_chunk_is_decoded_once_for_all(monkeypatch):
    store, twin, seen = filled(300)
    decoded = []
    decode = gym_compress.chunk.decode
    monkeypatch.setattr(
        gym_compress.chunk, "decode", lambda content, out: decoded.append(content) or decode(content, out)
    )
    rows = np.array([10, 11, 150, 10])
    both = read_places((store, rows, 0 * rows), (twin, rows, 0 * rows))
    assert len(decoded) == len({id(content) for content in decoded}) <= 4
    want = np.concatenate([seen[i] for i in rows]), np.concatenate([seen[i + 1] for i in rows])
    assert_same(tuple(both), want)


def test_frames_that_stand_still_take_no_more_than_one():
    store = ObservationStore(20, 1, spaces.Box(0, 255, (4, 84, 84), np.uint8), Compression(codec="none"))
    twin = store.twin()
    still = np.full((1, 4, 84, 84), 7, np.uint8)
    for row in range(20):
        store[row], twin[row] = still, still
    assert len(store.index) == 1
    assert set(store.references.ravel()) == set(twin.references.ravel()) == {1}
    assert (twin[:] == 7).all()


def test_references_grow_when_four_bytes_do_not_do():
    store, twin, seen = filled(10, rows=10)
    store.restore(np.zeros((0, 1), np.int32))  # as if loaded
    for begin in (2**31 - 3, 2**40):
        (recorder,) = store.recorders
        store.clear(twin)
        recorder.restart(begin)
        for i in range(10):
            store[i], twin[i] = seen[i] + np.uint8(1), seen[i + 1]
        assert store.references.dtype == np.int64
        assert_same(store[np.arange(10), np.zeros(10, int)], np.concatenate(seen[:10]) + np.uint8(1))
        assert_same(twin[np.arange(10), np.zeros(10, int)], np.concatenate(seen[1:11]))


def test_small_leaves_and_vectors_are_arrays():
    for space in (
        spaces.Box(-1, 1, (5000,), np.float32),
        spaces.Box(0, 255, (4, 4, 4), np.uint8),
        spaces.Discrete(5),
        spaces.MultiBinary(7),
    ):
        shape = space.shape or (1,)  # as SB3 has it
        assert_same(make_leaves(3, 2, space, Compression()), np.zeros((3, 2, *shape), space.dtype))
    image = spaces.Box(0, 255, (32, 32), np.uint8)
    assert isinstance(make_leaves(3, 2, image, Compression()), ObservationStore)
    with pytest.raises(TypeError, match="fixed shape"):
        make_leaves(3, 2, spaces.Text(4), Compression())


def test_rows_go_on_after_a_copy():
    store, twin, seen = filled(100)
    store, twin = pickle.loads(pickle.dumps((store, twin)))
    for i in range(100, 130):
        store[i], twin[i] = seen[i % 100], seen[i % 100 + 1]
    rows = np.arange(130)
    both = read_places((store, rows, 0 * rows), (twin, rows, 0 * rows))
    want = [np.concatenate([seen[i % 100 + by] for i in rows]) for by in (0, 1)]
    assert_same(tuple(both), tuple(want))


@pytest.mark.parametrize("frames_per_chunk", [1, 3])
def test_the_newest_row_is_read_without_decoding(monkeypatch, frames_per_chunk):
    frames = np.random.default_rng(0).integers(0, 255, (60, 20, 18), dtype=np.uint8)
    store = ObservationStore(
        20, 1, spaces.Box(0, 255, (4, 20, 18), np.uint8), Compression(frames_per_chunk=frames_per_chunk)
    )
    monkeypatch.setattr(gym_compress.chunk, "decode", lambda *args: pytest.fail("decoded"))
    for i in range(50):
        store[i % 20] = frames[None, i : i + 4]
        assert_same(store[i % 20], frames[None, i : i + 4])


@pytest.mark.parametrize("n_envs", [1, 3])
def test_rows_in_any_order_keep_what_they_refer_to_and_little_more(n_envs):
    rng = np.random.default_rng(0)
    store = ObservationStore(8, n_envs, spaces.Box(0, 255, (32, 32), np.uint8), Compression(codec="none"))
    twin = store.twin()
    images = {}
    for i in range(600):
        row = int(rng.integers(8))
        images[row] = rng.integers(0, 255, (2, n_envs, 32, 32), dtype=np.uint8)
        store[row], twin[row] = images[row]
        store.evict(twin)
        if i > 200:  # what the oldest row refers to and all that came since, at most
            assert len(store.index) <= n_envs * 2 * 80 // 12 + n_envs
    for row, (obs, following) in images.items():
        assert_same((store[row], twin[row]), (obs, following))


def test_one_row_is_written_before_the_old_one_goes():
    store = ObservationStore(1, 1, spaces.Box(0, 255, (4, 20, 18), np.uint8), Compression(frames_per_chunk=1))
    frames = np.random.default_rng(0).integers(0, 255, (60, 20, 18), dtype=np.uint8)
    twin = store.twin()
    for i in range(50):
        store[0] = frames[None, i : i + 4]
        store.evict(twin)
        assert_same(store[0], frames[None, i : i + 4])
    assert len(store.index) <= 8


@pytest.mark.parametrize("by", [1, 2, 3, 4])
def test_stacks_that_move_by_any_number_keep_each_frame_once(by):
    frames = np.random.default_rng(0).integers(0, 255, (600, 16, 16), dtype=np.uint8)
    store = ObservationStore(100, 1, spaces.Box(0, 255, (4, 16, 16), np.uint8), Compression(codec="none"))
    for i in range(100):
        store[i] = frames[None, by * i : by * i + 4]
    assert store.cbytes <= (100 * by + 4 + 24) * 256 + 400
