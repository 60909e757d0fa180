import copy
import gc
import multiprocessing
import pickle
import sys

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

import gym_compress.chunk
from gym_compress import (
    Codec,
    CompressedBox,
    CompressedFrameStack,
    CompressedObservation,
    CorruptDataError,
    decompress_batch,
)
from tests.envs import MovingSquare, assert_same, compressor, play

arrays = hnp.arrays(
    st.sampled_from(["?", "i1", "u1", ">i2", "u4", "i8", "f2", ">f4", "f8"]),
    hnp.array_shapes(max_dims=4, min_side=0),
)


def native(array):
    return array.astype(array.dtype.newbyteorder("="))


def from_array(array, **kwargs):
    """An observation equal to an array of at least one dimension."""
    return CompressedObservation.from_frames(list(array), **kwargs)


@pytest.fixture
def kept():
    """Observations of a run, the oldest of them in sealed chunks and the newest in open ones."""
    return play(CompressedFrameStack(MovingSquare(), 4), 100)


@given(arrays.filter(lambda array: array.shape[0] > 0))
def test_is_its_array(array):
    obs = from_array(array)
    want = native(array)
    got = np.asarray(obs)
    assert got.tobytes() == want.tobytes()
    for name in ("shape", "dtype", "ndim", "size", "nbytes"):
        assert getattr(obs, name) == getattr(want, name)
        assert getattr(got, name) == getattr(want, name)
    assert len(obs) == len(want)
    assert obs.dtype.isnative
    assert_same(tuple(obs), tuple(want))
    assert_same(pickle.loads(pickle.dumps(obs)), want)
    assert_same(obs.detach(), want)


@given(st.data())
def test_indexing_is_numpys(data):
    array = data.draw(hnp.arrays(np.int16, hnp.array_shapes(min_dims=2, max_dims=3)))
    index = data.draw(hnp.basic_indices(array.shape) | hnp.integer_array_indices(array.shape))
    assert_same(from_array(array)[index], array[index])


def test_without_dimensions():
    obs = compressor(spaces.Box(-1, 1, (), np.float32))(0.25)
    assert_same(obs, np.float32(0.25))
    assert obs.shape == ()
    assert float(np.asarray(obs)) == 0.25
    with pytest.raises(TypeError, match="len"):
        len(obs)
    with pytest.raises(TypeError):
        iter(obs)


def test_arrays_are_new_and_of_the_dtype_asked_for(kept):
    obs = kept[50]
    first = np.asarray(obs)
    first[...] = 1
    assert np.asarray(obs).max() == 255
    assert_same(np.asarray(obs, dtype=np.float32), np.array(obs).astype(np.float32))
    assert_same(np.array(obs, copy=True), np.asarray(obs))
    with pytest.raises(ValueError, match="without a copy"):
        np.asarray(obs, copy=False)


def test_equality_is_one_bool(kept):
    obs, array = kept[20], np.asarray(kept[20])
    assert (obs == array) is True
    assert (obs == array.tolist()) is True
    assert (obs == obs.detach()) is True
    assert (obs == kept[21]) is False
    assert (obs != kept[21]) is True
    assert (obs == array + 1) is False
    assert (obs == array[:2]) is False
    assert not any(obs == other for other in (3, None, "x", [[1], [2, 3]], object()))
    assert (array == obs).shape == array.shape  # NumPy's own, element by element
    assert (array == obs).all()
    with pytest.raises(TypeError, match="unhashable"):
        hash(obs)
    assert not any(obs == np.zeros(obs.shape, kind) for kind in ("V4", [("a", int)], "U3", object))
    import torch

    for tensor in (torch.as_tensor(array), torch.as_tensor(array) + 1):
        assert (obs == tensor) is (tensor == obs) is bool((tensor.numpy() == array).all())
    nan = CompressedObservation.from_frames([np.array([np.nan])])
    assert (nan == nan) is np.array_equal(nan, nan) is False


def test_copies_are_itself_and_nothing_can_be_set(kept):
    obs = kept[3]
    assert obs.copy() is obs
    assert copy.copy(obs) is obs
    assert copy.deepcopy([obs])[0] is obs
    with pytest.raises(TypeError):
        obs[0] = 1
    with pytest.raises(AttributeError):
        obs.shape = (1,)
    with pytest.raises(AttributeError):
        obs.extra = 1


def test_dlpack(kept):
    for obs in (
        kept[5],
        kept[-1],
        from_array(np.array([True, False])),
        from_array(np.arange(6.0).reshape(2, 3)),
    ):
        assert_same(np.from_dlpack(obs), np.asarray(obs))
        # NumPy before 2.2.5 makes everything read-only that it takes over
        assert np.from_dlpack(obs).flags.writeable == np.from_dlpack(np.zeros(1)).flags.writeable
    with pytest.raises(BufferError, match="without a copy"):
        kept[5].__dlpack__(copy=False)
    with pytest.raises(BufferError, match="CPU"):
        kept[5].__dlpack__(dl_device=(2, 0))


def one_read(monkeypatch, convert, obs):
    """Converts an observation, and counts how often anything was decoded or copied for it."""
    reads = []
    read_pieces = gym_compress.chunk.read_pieces
    with monkeypatch.context() as patch:
        patch.setattr(
            "gym_compress.compressed_array.read_pieces", lambda *args: reads.append(1) or read_pieces(*args)
        )
        converted = convert(obs)
    assert len(reads) == 1
    assert_same(np.asarray(converted), np.asarray(obs))


def test_torch_reads_it_whole(monkeypatch, kept):
    import torch

    for obs in (kept[5], kept[-1]):
        for convert in (torch.as_tensor, torch.asarray, torch.from_dlpack):
            one_read(monkeypatch, convert, obs)
        assert torch.as_tensor(obs, dtype=torch.float32).dtype == torch.float32


@pytest.mark.slow
def test_jax_reads_it_whole(monkeypatch, kept):
    import jax

    for obs in (kept[5], kept[-1]):
        one_read(monkeypatch, jax.numpy.asarray, obs)


def test_what_it_costs(kept):
    obs = kept[40]
    assert sys.getsizeof(obs) <= 80
    assert not hasattr(obs, "__dict__")
    assert obs.cbytes < obs.nbytes / 10
    assert kept[-1].cbytes == kept[-1].nbytes  # its chunk is open
    sealed = [kept[i].source for i in range(5, 60) if not isinstance(kept[i].source, tuple)]
    assert sealed[0] is sealed[1]
    one = next(obs for obs in kept[5:60] if not isinstance(obs.source, tuple))
    share = one.source.cbytes * 4 / 12
    assert share <= one.cbytes <= share + 1


def test_a_list_costs_at_most_80_bytes_an_observation():
    env = CompressedFrameStack(MovingSquare(), 4)
    kept = play(env, 6000)
    env.close()
    found, todo = {}, list(kept)
    while todo:
        item = todo.pop()
        if id(item) not in found and not isinstance(item, type):
            found[id(item)] = item
            todo.extend(gc.get_referents(item))
    contents = [item for item in found.values() if isinstance(item, bytes)]
    allocated = sum(-(-sys.getsizeof(item) // 16) * 16 for item in found.values())  # in blocks of 16 bytes
    assert (allocated - sum(map(len, contents))) / len(kept) + 8 <= 80  # 8 in the list


def test_stacks_in_a_row_are_one_piece():
    env = CompressedFrameStack(MovingSquare(), 4)
    assert {len(obs.layout.pieces) for obs in play(env, 60)[4:]} == {1, 2}


def test_nothing_decoded_is_kept(kept):
    def reachable(obs):
        """Bytes of all that an observation leads to, classes and modules left out."""
        found, todo = {}, [obs]
        while todo:
            item = todo.pop()
            if id(item) not in found and not isinstance(item, type):
                found[id(item)] = item
                todo.extend(gc.get_referents(item))
        return sum(map(sys.getsizeof, found.values()))

    before = reachable(kept[30])
    assert before < 10_000
    np.asarray(kept[30]), kept[30][0], list(kept[30]), kept[30] == kept[31], decompress_batch(kept[25:35])
    assert reachable(kept[30]) == before


def test_detach_lets_the_neighbours_go(kept):
    obs = kept[-1].detach()
    assert_same(obs, np.asarray(kept[-1]))
    assert obs.source.sealed
    assert obs.source.nbytes == obs.nbytes
    assert obs.cbytes < obs.nbytes / 10


def test_from_frames_compresses_arrays_and_takes_observations_over(monkeypatch):
    frames = [np.full((3, 2), i, ">f4") for i in range(3)]
    obs = CompressedObservation.from_frames(iter(frames), codec=Codec("zstd", 2))
    assert_same(obs, native(np.stack(frames)))
    assert obs.source.codec == Codec("zstd", 2)

    single = [
        compressor(spaces.Box(0, 255, (6, 6), np.uint8))(np.full((6, 6), i, np.uint8)) for i in range(4)
    ]
    monkeypatch.setattr(Codec, "encode", lambda *args: pytest.fail("encoded again"))
    assert_same(CompressedObservation.from_frames(single), np.stack(single))
    mixed = CompressedObservation.from_frames([single[0], np.zeros((6, 6), np.uint8)], codec="none")
    assert_same(mixed, np.stack([single[0], np.zeros((6, 6), np.uint8)]))


@pytest.mark.parametrize(
    ("frames", "error", "message"),
    [
        ([], ValueError, "at least one frame"),
        ([np.zeros(2), np.zeros(2), np.zeros(3)], ValueError, r"Frame 2 has shape \(3,\)"),
        ([np.zeros(2), np.zeros(2, np.float32)], ValueError, "Frame 1 .*float32.*float64"),
        (["a", "b"], TypeError, "booleans, integers or floats"),
        ([None], TypeError, "booleans, integers or floats"),
        ([np.zeros(2, complex)], TypeError, "complex"),
        ([compressor(spaces.Box(0, 1, (2,), np.int8))([0, 1])] * 2, TypeError, "string or a Codec"),
    ],
)
def test_from_frames_refuses(frames, error, message):
    codec = 5 if "Codec" in message else "auto"
    with pytest.raises(error, match=message):
        CompressedObservation.from_frames(frames, codec=codec)


def test_what_exceeds_blosc2_is_refused(monkeypatch):
    frame = np.zeros(1000, np.uint8)
    obs = CompressedObservation.from_frames([CompressedObservation.from_frames([frame])] * 3)
    monkeypatch.setattr("gym_compress.codec._MAX_CHUNK", 2500)
    for make in (lambda: CompressedObservation.from_frames([frame] * 3), obs.detach):
        with pytest.raises(ValueError, match="3000 bytes does not fit a chunk"):
            make()


def test_stacks_of_anything_equal_numpys():
    stack = CompressedObservation.from_frames
    rng = np.random.default_rng(0)
    compress = [compressor(spaces.Box(0, 255, (3, 5), np.uint8), frames_per_chunk=n) for n in (1, 2, 5)]
    pool = [compress[i % 3](rng.integers(0, 255, (3, 5), np.uint8)) for i in range(60)]
    for _ in range(200):
        picked = [pool[i] for i in rng.integers(60, size=rng.integers(1, 7))]
        stacked = stack(picked)
        assert_same(stacked, np.stack(picked))
        twice = stack([stacked, stacked])
        assert_same(twice, np.stack([stacked, stacked]))
        assert_same(pickle.loads(pickle.dumps(twice)), np.asarray(twice))
    with pytest.raises(ValueError, match="Frame 1 has shape"):
        stack([pool[0], stacked])
    other = CompressedObservation.from_frames([np.zeros((3, 5), np.int8)])
    with pytest.raises(ValueError, match=r"Frame 1 has shape .* int8"):
        stack([stack([pool[0]]), other])


def test_pickles_share_chunks(kept):
    data = pickle.dumps(kept)
    again = pickle.loads(data)
    assert_same(decompress_batch(again), decompress_batch(kept))
    chunks = {id(chunk): chunk for obs in kept[:60] for chunk in obs.chunks}.values()
    sealed = sum(chunk.cbytes for chunk in chunks if chunk.sealed)
    assert len(pickle.dumps(kept[:60])) < sealed + 60 * 40 + 1000
    assert len({id(chunk) for obs in again[:60] for chunk in obs.chunks}) == len(chunks)
    one = pickle.dumps(kept[-1])
    assert len(one) < kept[-1].nbytes / 10  # its own frames, compressed
    assert_same(pickle.loads(one), np.asarray(kept[-1]))
    assert pickle.loads(pickle.dumps(again[3])) == kept[3]


def test_a_damaged_pickle_is_refused(kept):
    data = bytearray(pickle.dumps(kept[30]))
    content = kept[30].chunks[0].content
    at = data.index(content)
    data[at + 12] ^= 0xFF  # the buffer's own length
    with pytest.raises(CorruptDataError, match="checksum"):
        pickle.loads(data)


def _sums(observations):
    return [int(np.asarray(obs).sum()) for obs in observations]


@pytest.mark.parametrize("method", ["spawn", pytest.param("forkserver", marks=pytest.mark.slow)])
def test_goes_to_other_processes(kept, method):
    with multiprocessing.get_context(method).Pool(1) as pool:
        assert pool.apply(_sums, (kept,)) == _sums(kept)


@pytest.mark.filterwarnings("ignore:.*fork")  # JAX, PyTorch and Python warn of their own threads
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_works_in_a_forked_process(kept):
    decompress_batch(kept)
    ours, theirs = multiprocessing.Pipe()

    def child():
        env = CompressedFrameStack(MovingSquare(), 4)
        theirs.send((_sums(kept), _sums(play(env, 60))))

    process = multiprocessing.get_context("fork").Process(target=child)
    process.start()
    process.join()
    assert process.exitcode == 0
    assert ours.recv() == (_sums(kept), _sums(play(CompressedFrameStack(MovingSquare(), 4), 60)))


BOXES = [
    spaces.Box(0, 255, (3, 2), np.uint8),
    spaces.Box(10, 200, (3, 2), np.uint8),
    spaces.Box(-1, 1, (3, 2), np.float32),
    spaces.Box(np.array([0, -5]), np.array([1, 5]), dtype=np.int16),
    spaces.Box(-np.inf, np.inf, (4,), np.int64),
    spaces.Box(0, 1, (2,), bool),
    spaces.Box(-np.inf, np.inf, (), np.float64),
]


@pytest.mark.parametrize("box", BOXES, ids=str)
def test_compressed_box_contains_what_the_box_does(box):
    space = CompressedBox.like(box)
    assert isinstance(space, spaces.Box)
    assert space == box
    assert box == space
    assert (space.is_bounded(), space.is_bounded("below")) == (box.is_bounded(), box.is_bounded("below"))
    compress = compressor(box)
    for array in [np.asarray(box.sample()), np.zeros(box.shape, box.dtype), np.ones(box.shape, box.dtype)]:
        assert space.contains(compress(array)) is space.contains(array) is box.contains(array)
    if box.dtype.kind == "f":
        for value in (np.nan, 1.5, np.inf):
            array = np.full(box.shape, value, box.dtype)
            assert space.contains(compress(array)) == box.contains(array)
    if box.dtype.kind in "iu" and box.is_bounded():
        for value in {int(box.low.min()) - 1, int(box.high.max()) + 1} & set(range(-100, 256)):
            if np.can_cast(np.min_scalar_type(value), box.dtype):
                array = np.full(box.shape, value, box.dtype)
                assert space.contains(compress(array)) is box.contains(array) is False
    assert space.to_jsonable([compress(array)]) == box.to_jsonable([array])
    for other in (np.zeros((2, 2, 2), box.dtype), np.zeros(box.shape, np.complex64)):
        assert not space.contains(other)
    assert not space.contains(CompressedObservation.from_frames([np.zeros(box.shape, box.dtype)]))
    assert pickle.loads(pickle.dumps(space)) == space


def test_compressed_box_samples_as_the_box_does():
    box = spaces.Box(-1, 1, (3,), np.float32, seed=5)
    space = CompressedBox.like(box)
    assert_same(space.sample(), box.sample())
    assert isinstance(gym.vector.utils.batch_space(space, 3), spaces.Box)
