"""Transitions that one buffer gives and another one takes over, compressed as they are."""

import copy
import pickle

import numpy as np
import pytest
from gymnasium import spaces
from hypothesis import given
from hypothesis import strategies as st

from gym_compress import (
    Codec,
    CompressedFrameStack,
    CompressedReplayBuffer,
    CompressedSamples,
    CorruptDataError,
)
from gym_compress.chunk import Chunk
from gym_compress.replay.parcel import ImageParcel
from tests.envs import MovingSquare, assert_same
from tests.replays import ACTIONS, MIXED, STACKS, assert_equal, everything, feed, made


def empty(like, **kwargs):
    """An empty buffer of the same kind."""
    arguments = {"frames_per_chunk": 5, **kwargs}
    rows, n_envs = arguments.pop("rows", like.buffer_size), arguments.pop("n_envs", like.n_envs)
    return CompressedReplayBuffer(rows * n_envs, like.observation_space, ACTIONS, None, n_envs, **arguments)


def chunks_of(buffer):
    """The chunks that a buffer holds, of all streams."""
    indexes = [store.index for store, _ in buffer.table.stores]
    return [
        chunk for index in indexes for env in range(index.streams) for _, _, chunk in index.unsaved(env, True)
    ]


@pytest.mark.parametrize("space", [STACKS, MIXED], ids=["box", "dict"])
@pytest.mark.parametrize("codec", ["auto", "none", "zstd:1"])
def test_what_is_taken_is_what_get_gives(space, codec):
    buffer = made(55, space=space, codec=codec)
    indices = np.random.default_rng(0).integers(80, size=33)
    samples = pickle.loads(pickle.dumps(buffer.take(indices)))
    assert len(samples) == 33
    assert_same(tuple(samples.decompress(None)), tuple(buffer.get(indices)))
    assert_same(tuple(samples.select([4, 2, 4]).decompress(None)), tuple(buffer.get(indices[[4, 2, 4]])))
    both = CompressedSamples.join([samples, buffer.take(indices[:5])])
    assert_same(tuple(both.decompress(None)), tuple(buffer.get(np.append(indices, indices[:5]))))


def test_samples_are_torch_tensors_where_torch_is():
    torch = pytest.importorskip("torch")
    samples = made(5).take([0, 3]).decompress()
    assert samples.observations["image"].dtype == torch.uint8
    assert samples.rewards.device == torch.device("cuda" if torch.cuda.is_available() else "cpu")


@given(
    steps=st.integers(1, 60),
    n_envs=st.integers(1, 3),
    rows=st.integers(1, 25),
    cuts=st.lists(st.integers(1, 12), min_size=1, max_size=8),
    space=st.sampled_from([STACKS, MIXED]),
    frames_per_chunk=st.integers(1, 6),
    follow=st.booleans(),
)
def test_taken_over_in_parts_is_what_was_added(steps, n_envs, rows, cuts, space, frames_per_chunk, follow):
    """A ring that adopts parts holds what a ring holds to which the same was added, ends of episodes too."""
    source = made(0, 70, n_envs, space, frames_per_chunk=frames_per_chunk)
    target, expected = empty(source, rows=rows), empty(source, rows=rows)
    step = 0
    for cut in (cuts * 60)[:60]:
        end = min(step + cut, steps)
        if end == step:
            break
        feed(source, range(step, end))
        feed(expected, range(step, end))
        target.adopt(source.take(np.arange(step * n_envs, end * n_envs)))
        if follow and end < steps:  # added in the middle, not adopted
            for each in (source, target, expected):
                feed(each, range(end, end + 1))
            end += 1
        step = end
    assert_equal(target, expected)
    for store, twin in target.table.stores:
        for env in range(n_envs):
            numbers = np.concatenate([each.references[: target.size(), env] for each in (store, twin)])
            store.index.check(env, numbers)


def test_chunks_at_the_border_are_kept_once():
    source = made(0, 100, 1, STACKS)
    target = empty(source)
    for start in range(0, 100, 10):
        feed(source, range(start, start + 10))
        target.adopt(source.take(np.arange(start, start + 10)))
    assert [c.content for c in chunks_of(target)] == [c.content for c in chunks_of(source)]


def test_chunks_at_the_border_are_kept_once_when_others_come_between():
    sources = [made(0, 100, 1, STACKS) for _ in range(2)]
    target = empty(sources[0], rows=200)
    for start in range(0, 100, 10):
        for number, source in enumerate(sources):
            feed(source, range(start + 1000 * number, start + 10 + 1000 * number))
            target.adopt(source.take(np.arange(start, start + 10)))
    contents = {id(c): c.content for c in chunks_of(target)}
    assert sorted(contents.values()) == sorted(c.content for s in sources for c in chunks_of(s))
    assert target.cbytes == sum(s.cbytes for s in sources)
    rows = np.concatenate([np.arange(start, start + 10) for start in range(0, 200, 20)])
    for number, source in enumerate(sources):
        assert_same(tuple(target.get(rows + 10 * number)), everything(source))


def test_nothing_is_decoded_or_encoded(monkeypatch):
    source = made(50, 100, 1, STACKS)
    source.take(np.arange(50))
    monkeypatch.setattr("gym_compress.chunk.decode", None)
    monkeypatch.setattr("gym_compress.codec.Codec.encode", None)
    target = empty(source)
    for start in range(0, 50, 10):
        target.adopt(source.take(np.arange(start, start + 10)))
    monkeypatch.undo()
    assert_same(everything(target), everything(source))


def test_compressed_observations_are_taken_as_they_are():
    env = CompressedFrameStack(MovingSquare(), 4, frames_per_chunk=5)
    plain = made(0, 60, 1, env.observation_space)
    target = empty(plain)
    obs, _ = env.reset(seed=1)
    for step in range(60):
        next_obs, _, terminated, truncated, info = env.step(step % 2)
        plain.add([obs], [next_obs], np.array([0]), np.array([step]), np.array([terminated]), [info])
        obs = env.reset()[0] if terminated or truncated else next_obs
        if step % 12 == 11:  # while the wrapper writes a chunk
            target.adopt(plain.take(np.arange(step - 11, step + 1)))
    assert_same(everything(target), everything(plain))


def test_a_buffer_goes_on_and_is_saved_after_it_took_over(tmp_path):
    source, target, expected = made(30, 100), made(10, 100), made(10, 100)
    target.adopt(source.take(np.arange(20, 60)))
    feed(expected, range(10, 30))
    for each in (target, expected):
        feed(each, range(30, 35))
    target.save(tmp_path / "one.replay")
    target.adopt(source.take(np.arange(60)))
    feed(expected, range(30))
    target.save(tmp_path / "one.replay")
    for other in (
        target,
        CompressedReplayBuffer.load(tmp_path / "one.replay", device=None),
        copy.deepcopy(target),
    ):
        assert_equal(other, expected)
    with CompressedReplayBuffer.load(tmp_path / "one.replay", device=None, lazy=True) as lazy:
        lazy.adopt(source.take(np.arange(40)))
        feed(expected, range(20))
        assert_equal(lazy, expected)
        assert_same(tuple(lazy.take(np.arange(100)).decompress(None)), tuple(expected.get(np.arange(100))))


def test_files_hold_what_was_taken_over(tmp_path):
    source = made(60, 100)
    buffer = empty(source, path=tmp_path / "rows.replay")
    for start in range(0, 120, 24):
        buffer.adopt(source.take(np.arange(start, start + 24)))
    buffer.save()
    assert_equal(buffer, source)
    buffer.close()
    assert_equal(CompressedReplayBuffer.load(tmp_path / "rows.replay", device=None), source)


def test_of_more_than_fits_the_last_are_stored():
    source = made(50, 100)
    target = empty(source, rows=7)
    target.adopt(source.take(np.arange(100)))
    assert_equal(target, made(50, 7))


def test_a_row_of_another_number_of_environments():
    source = made(20, 30, 2)
    target = empty(source, rows=60, n_envs=1)
    target.adopt(source.take(np.arange(40)))
    assert_same(everything(target), everything(source))
    assert target.table.ends[:39].all()  # environments took turns
    with pytest.raises(ValueError, match="rows of 2 transitions, got 3"):
        empty(source).adopt(source.take([0, 1, 2]))


def test_indices_that_lead_nowhere():
    buffer = made(5)
    for wrong in ([10], [-1], [0.5], [[0]]):
        with pytest.raises(IndexError):
            buffer.take(wrong)
    assert len(buffer.take([])) == 0
    before = everything(buffer)
    buffer.adopt(buffer.take([]))
    assert_same(everything(buffer), before)


@pytest.mark.parametrize(
    ("space", "actions", "kwargs"),
    [
        (MIXED, ACTIONS, {}),
        (spaces.Box(0, 255, (4, 20, 19), np.uint8), ACTIONS, {}),
        (spaces.Box(0, 255, (4, 20, 18), np.int16), ACTIONS, {}),
        (STACKS, spaces.Box(-1, 1, (1,)), {}),
        (STACKS, spaces.MultiDiscrete([2, 2]), {}),
        (STACKS, ACTIONS, {"stack_size": 2}),
        (STACKS, ACTIONS, {"stack_axis": 1}),
    ],
)
def test_transitions_of_another_kind_are_refused(space, actions, kwargs):
    source = made(10, 20, 1, STACKS)
    target = CompressedReplayBuffer(20, space, actions, None, **kwargs)
    with pytest.raises(
        ValueError,
        match=r"Expected transitions with (observations|stacks|actions) .*, got .*: both buffers need",
    ):
        target.adopt(source.take([1, 2]))
    assert target.size() == 0


def test_stacks_that_are_cut_alike_are_of_one_kind():
    source = made(20, 30, 1, STACKS)
    target = empty(source, stack_size=np.int64(4))
    target.adopt(source.take(np.arange(20)))
    assert_same(everything(target), everything(source))
    assert len(target.take([3])) == 1


@pytest.mark.parametrize("wrong", [None, made(3).sample(2)])
def test_only_samples_are_taken_over(wrong):
    with pytest.raises(TypeError, match="Expected CompressedSamples"):
        made(3).adopt(wrong)


@pytest.mark.parametrize("codec", ["lz4", "zstd:1", "none"])
@pytest.mark.parametrize("frames_per_chunk", [1, 3, 12])
def test_what_is_raw_still_is_compressed_when_it_is_taken(tmp_path, codec, frames_per_chunk):
    """The newest chunks, whichever of them."""
    for taken in ([15], [19], [2, 14], [*range(20)]):
        source = made(20, 40, 1, STACKS, codec=codec, frames_per_chunk=frames_per_chunk)
        expected = source.get(taken)
        samples = source.take(taken)
        assert {type(content) is bytes for content in samples.images[0].contents} == {codec != "none"}
        target = empty(source)
        target.adopt(samples)
        target.save(tmp_path / "a.replay")
        assert_same(
            everything(CompressedReplayBuffer.load(tmp_path / "a.replay", device=None)), tuple(expected)
        )
        assert_same(everything(feed(source, range(20, 21)))[4][:20], made(20, 40, 1, STACKS).rewards[:20])


def test_more_images_than_arrays():
    space = spaces.Dict({str(i): spaces.Box(0, 255, (2, 40, 40), np.uint8) for i in range(8)})
    buffer = CompressedReplayBuffer(9, space, ACTIONS, None)
    rng = np.random.default_rng(0)
    for i in range(5):
        one, two = ({k: rng.integers(0, 255, (1, 2, 40, 40), np.uint8) for k in space} for _ in range(2))
        buffer.add(one, two, [0], [i], [0], [{}])
    assert_same(tuple(buffer.take([3, 1]).decompress(None)), tuple(buffer.get([3, 1])))


def test_what_is_in_a_file_is_not_kept_in_memory_too(tmp_path):
    source = made(200, 200, 1, STACKS, codec="none")
    buffer = empty(source, path=tmp_path / "a.replay", codec="none")
    for start in range(0, 200, 20):
        buffer.adopt(source.take(np.arange(start, start + 20)))
    assert sum(type(chunk) is Chunk for chunk in chunks_of(buffer)) <= 8
    assert_same(everything(buffer), everything(source))


def damaged(parcel):
    """Parcels with one fault each."""
    yield parcel._replace(contents=parcel.contents[:-1])
    yield parcel._replace(contents=[parcel.contents[0][:-1], *parcel.contents[1:]])
    yield parcel._replace(contents=[np.zeros(3, np.uint8), *parcel.contents[1:]])
    yield parcel._replace(nbytes=parcel.nbytes + 1)
    yield parcel._replace(nbytes=parcel.nbytes * 0)
    yield parcel._replace(references=parcel.references + 100)
    yield parcel._replace(references=-parcel.references)
    yield parcel._replace(references=parcel.references[:, :-1])
    yield parcel._replace(codecs=[Codec("none")] * len(parcel.codecs))
    raw = [np.zeros(size, np.uint8) for size in parcel.nbytes.tolist()]
    yield parcel._replace(contents=raw)
    yield parcel._replace(
        contents=[part.astype(np.float32) for part in raw], codecs=[Codec("none")] * len(raw)
    )
    yield parcel._replace(references=parcel.references.astype(float))
    yield parcel._replace(references=parcel.references[0])
    yield parcel._replace(references=np.concatenate([parcel.references, parcel.references[:1]]))
    yield parcel._replace(nbytes=parcel.nbytes.astype(np.uint32))


def test_damaged_parcels_are_refused_and_leave_the_buffer_as_it_was():
    source = made(30, 40, 1, STACKS)
    samples, target = source.take(np.arange(30)), made(12, 20, 1, STACKS)
    before, fresh = pickle.dumps(everything(target)), chunks_of(target)
    faults = list(damaged(samples.images[0]))
    assert len(faults) == 15
    for images in ([], *[[fault] for fault in faults]):
        with pytest.raises(CorruptDataError):
            target.adopt(CompressedSamples(samples.leaves, samples.arrays, images))
        assert pickle.dumps(everything(target)) == before
        assert chunks_of(target) == fresh


def test_a_damaged_pickle_is_refused():
    samples = made(30, 40, 1, STACKS).take(np.arange(30))
    restore, (encoded, nbytes, checksum) = samples.__reduce__()
    for at in range(0, len(encoded), 7):
        damaged = bytearray(encoded)
        damaged[at] ^= 1
        with pytest.raises(CorruptDataError, match="checksum"):
            restore(bytes(damaged), nbytes, checksum)
    assert len(restore(encoded, nbytes, checksum)) == 30


def test_a_pickle_is_smaller_than_the_chunks():
    samples = made(90, 100, 2, STACKS).take(np.arange(180))
    chunks = sum(len(content) for content in samples.images[0].contents)
    assert len(pickle.dumps(samples)) < chunks / 2


def test_references_of_64_bits():
    source, target = made(10, 40, 1, STACKS), made(0, 40, 1, STACKS)
    (recorder,) = target.table.observations.recorders
    recorder.restart(2**31 - 20)
    feed(target, range(1))
    target.adopt(source.take(np.arange(1, 10)))
    feed(source, range(10, 20))
    target.adopt(source.take(np.arange(10, 20)))
    assert_equal(target, source)
    assert target.observations.references.dtype == np.int64


def test_joined_parcels_know_their_own_chunks():
    one, two = made(9, 40, 1, STACKS).take([8, 0]), made(30, 40, 1, STACKS).take([29, 3, 17])
    parcel = ImageParcel.join([one.images[0], two.images[0]])
    parcel.check()
    assert len(parcel.contents) == len(one.images[0].contents) + len(two.images[0].contents)
