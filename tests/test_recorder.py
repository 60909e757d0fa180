import copy
import pickle
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import gym_compress.recorder as recorder_module
from gym_compress import Codec, CompressedObservation
from gym_compress.recorder import Recorder
from gym_compress.slicing import Slicing
from tests.envs import assert_same
from tests.test_chunk import read

DTYPES = ["?", "i1", "u1", "i2", "u2", "i4", "u4", "i8", "u8", "f2", "f4", "f8", "g"]


class Chunks(dict):
    """Holds the chunks that a recorder begins, by the number of the first slice, and finds slices in them."""

    def begun(self, first, chunk):
        self[first] = chunk

    def frame(self, number, shape, dtype):
        first = max(first for first in self if first <= number)
        return read(self[first], shape, dtype, number - first)


def stream(shape, dtype=np.uint8, count=1, **kwargs):
    """A recorder of stacks of ``count`` slices, and its chunks."""
    chunks = Chunks()
    arguments = {"codec": Codec(), "frames_per_chunk": 12, "begun": chunks.begun, **kwargs}
    return Recorder(Slicing((count, *shape), np.dtype(dtype), count), **arguments), chunks


def cut(recorder, frames):
    return np.ascontiguousarray(frames).reshape(len(frames), *recorder.slicing.slice_shape)


def append(recorder, frames):
    recorder.append(cut(recorder, frames))


def made(shape, count, *, frames_per_chunk=3, begun=None, axis=0):
    slicing = Slicing(shape, np.dtype(np.uint8), count, axis)
    return Recorder(slicing, codec=Codec(), frames_per_chunk=frames_per_chunk, begun=begun)


def newest(recorder):
    return np.asarray(CompressedObservation(*recorder.newest()))


@given(
    moves=st.lists(st.integers(0, 6), min_size=1, max_size=40),
    frames_per_chunk=st.integers(1, 5),
    seals=st.sets(st.integers(0, 39)),
)
def test_an_observation_is_written_as_far_as_it_is_new(moves, frames_per_chunk, seals):
    """A window of four moves on over different frames: each is written once, unless the window jumps."""
    frames = np.random.default_rng(0).integers(0, 255, (300, 2, 3), dtype=np.uint8)
    recorder = made((4, 2, 3), 4, frames_per_chunk=frames_per_chunk)
    at = 0
    written = 0
    for i, by in enumerate(moves):
        at += by
        written += 4 if i == 0 else min(by, 4)
        stack = frames[at : at + 4]
        number = recorder.record(recorder.slicing.cut(stack[None])[0])
        assert (number, recorder.next_number) == (written - 3, written + 1)
        assert_same(newest(recorder), stack)
        if i in seals:
            recorder.seal()


def test_what_was_recorded_stays_in_its_observations():
    frames = np.random.default_rng(0).integers(0, 255, (60, 5, 4), dtype=np.uint8)
    recorder = made((4, 5, 4), 4)
    kept = []
    for i in range(50):
        recorder.record(recorder.slicing.cut(frames[None, i : i + 4])[0])
        kept.append(CompressedObservation(*recorder.newest()))
    for i, obs in enumerate(kept):
        assert_same(np.asarray(obs), frames[i : i + 4])
    assert len({id(obs.source) for obs in kept if type(obs.source) is tuple}) <= 50 // 3 + 1  # shared


def test_appended_slices_make_stacks():
    frames = np.random.default_rng(0).integers(0, 255, (30, 5, 4), dtype=np.uint8)
    recorder = made((3, 5, 4), 3)
    recorder.record(recorder.slicing.cut(frames[None, :3])[0])
    for i in range(3, 30):
        recorder.append(frames[i][None])
        assert_same(newest(recorder), frames[i - 2 : i + 1])
    assert recorder.next_number == 31


def test_a_stack_with_equal_frames_is_found():
    still = np.full((1, 4, 5, 4), 7, np.uint8)
    recorder = made((4, 5, 4), 4)
    slices = recorder.slicing.cut(still)[0]
    assert recorder.record(slices) == 1
    assert recorder.find_shift(slices) == 0
    assert recorder.find_shift(slices + np.uint8(1)) == 4


def test_compared_bit_for_bit():
    recorder = Recorder(Slicing((2,), np.dtype("f4"), 2), codec=Codec(), frames_per_chunk=4)
    recorder.record(np.array([[0.0], [np.nan]], "f4"))
    assert recorder.find_shift(np.array([[0.0], [np.nan]], "f4")) == 0
    assert recorder.find_shift(np.array([[-0.0], [np.nan]], "f4")) == 2


@pytest.mark.parametrize("twin", [copy.deepcopy, lambda recorder: pickle.loads(pickle.dumps(recorder))])
def test_a_copy_goes_on_with_the_same_number_in_chunks_of_its_own(twin):
    frames = np.random.default_rng(0).integers(0, 255, (9, 5, 4), dtype=np.uint8)
    recorder = made((4, 5, 4), 4, begun=None)
    recorder.record(recorder.slicing.cut(frames[None, :4])[0])
    other = twin(recorder)
    assert other.record(other.slicing.cut(frames[None, 1:5])[0]) == 5  # all of it is written anew
    assert_same(newest(other), frames[1:5])
    assert recorder.record(recorder.slicing.cut(frames[None, 1:5])[0]) == 2
    assert_same(newest(recorder), frames[1:5])


def test_chunks_begin_where_the_last_one_is_full_and_hold_their_slices():
    log = Chunks()
    frames = np.random.default_rng(0).integers(0, 255, (20, 5, 4), dtype=np.uint8)
    recorder = made((2, 5, 4), 2, frames_per_chunk=4, begun=log.begun)
    for i in range(12):
        recorder.record(recorder.slicing.cut(frames[None, i : i + 2])[0])
    recorder.seal()
    recorder.record(recorder.slicing.cut(frames[None, 12:14])[0])
    assert [*log] == [1, 5, 9, 13, 14]
    assert [chunk.nbytes // 20 for chunk in log.values()] == [4, 4, 4, 1, 4]


@pytest.mark.parametrize("codec", ["lz4", "lz4hc", "zstd:1", "none"])
@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (1,), (5, 7), (2, 3, 4)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype_and_shape(dtype, shape, codec):
    recorder, chunks = stream(shape, dtype, codec=Codec.from_string(codec), frames_per_chunk=3)
    rng = np.random.default_rng(0)
    frames = (rng.standard_normal((11, *shape)) * 100).astype(dtype)
    append(recorder, frames[:4]), append(recorder, frames[4:5]), append(recorder, frames[5:])
    assert recorder.next_number == 12
    for _ in range(2):
        for number, frame in enumerate(frames, 1):
            assert_same(chunks.frame(number, shape, dtype), frame)
        recorder.seal()
    assert all(chunk.sealed for chunk in chunks.values())


@given(
    frames_per_chunk=st.integers(1, 5),
    keep=st.integers(1, 9),
    count=st.integers(1, 30),
)
def test_newest_frames_stay_raw_and_old_ones_do_not(frames_per_chunk, keep, count):
    recorder, chunks = stream((40,), frames_per_chunk=frames_per_chunk, count=keep)
    frames = np.arange(count * 40).reshape(count, 40).astype(np.uint8)
    for frame in frames:
        append(recorder, frame[None])
    # raw are the chunk that is written, the full one before it, and as many as keep asks for
    raw = 1 + max(1, -(-keep // frames_per_chunk))
    sealed = [type(chunk.content) is bytes for chunk in chunks.values()]
    assert not any(sealed[-1 - (min(keep, count) - 1) // frames_per_chunk :])
    assert all(sealed[:-raw])
    assert recorder.first_raw == [*chunks][-raw:][0]
    most = min(keep, count)
    assert recorder.find_shift(cut(recorder, frames[count - most :])) == 0
    assert recorder.find_shift(cut(recorder, frames[count - most :] + np.uint8(1))) > 0


@given(
    frames_per_chunk=st.integers(1, 5),
    sizes=st.lists(st.integers(1, 7), min_size=1, max_size=12),
    seals=st.sets(st.integers(0, 11)),
)
def test_where_the_newest_frames_lie(frames_per_chunk, sizes, seals):
    recorder, _ = stream((3,), frames_per_chunk=frames_per_chunk, count=4, begun=None)
    frames = np.arange(3 * sum(sizes), dtype=np.uint8).reshape(-1, 3)
    end = 0
    for i, size in enumerate(sizes):
        append(recorder, frames[end : end + size])
        end += size
        if end >= 4:
            observation = CompressedObservation(*recorder.newest())
            assert_same(np.asarray(observation), frames[end - 4 : end])
            assert len(observation.chunks) == len({which for which, _ in observation.layout.pieces})
        if i in seals:
            recorder.seal()
    assert recorder.next_number == end + 1


def test_a_chunk_that_nobody_holds_is_not_compressed(monkeypatch):
    encoded = []
    encode = Codec.encode
    monkeypatch.setattr(
        Codec, "encode", lambda self, data, itemsize: encoded.append(1) or encode(self, data, itemsize)
    )
    recorder, _ = stream((50,), frames_per_chunk=4, begun=None)
    kept = []
    for number in range(1, 101):
        append(recorder, np.full((1, 50), number, np.uint8))
        if number == 42:
            kept.append(recorder.newest()[0])
    assert encoded == [1]
    assert read(kept[0], (50,), np.uint8, 1).tolist() == [42] * 50


def test_frames_are_copied_whatever_their_layout():
    recorder, chunks = stream((4, 6), np.int32)
    base = np.arange(48, dtype=np.int32).reshape(6, 8)
    views = [base.T[1:5], base[:4, :6][::-1], base[:4, 1:7], np.asfortranarray(base[:4, :6])]
    want = [np.array(view) for view in views]
    for view in views:
        recorder.append(view[None])
    base[...] = 0
    for number, expected in enumerate(want, 1):
        assert_same(chunks.frame(number, (4, 6), np.int32), expected)


def test_a_restarted_recorder_goes_on_with_another_number_and_compares_with_nothing():
    recorder, chunks = stream((50,), frames_per_chunk=4)
    frames = np.arange(500, dtype=np.uint8).reshape(10, 50)
    append(recorder, frames[:5])
    recorder.restart(100)
    assert (recorder.next_number, recorder.first_raw) == (100, 100)
    assert recorder.find_shift(cut(recorder, frames[4:5])) > 0
    assert all(chunk.sealed for chunk in chunks.values())
    append(recorder, frames[5:7])
    assert [*chunks] == [1, 5, 100]
    assert_same(chunks.frame(101, (50,), np.uint8), frames[6])
    assert_same(chunks.frame(5, (50,), np.uint8), frames[4])


def test_a_failed_encoding_loses_nothing(monkeypatch):
    recorder, chunks = stream((50,), frames_per_chunk=2)
    frames = np.arange(450, dtype=np.uint8).reshape(9, 50)
    append(recorder, frames[:4])

    def fail(*args):
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(Codec, "encode", fail)
        with pytest.raises(MemoryError):
            append(recorder, frames[4:5])
    append(recorder, frames[4:])
    recorder.seal()
    assert all(type(chunk.content) is bytes for chunk in chunks.values())
    for number, frame in enumerate(frames, 1):
        assert_same(chunks.frame(number, (50,), np.uint8), frame)


def test_open_chunks_are_not_pickled():
    recorder, chunks = stream((50,))
    append(recorder, np.zeros((1, 50), np.uint8))
    (chunk,) = chunks.values()
    with pytest.raises(TypeError, match="open chunk"):
        pickle.dumps(chunk)


@pytest.mark.parametrize("codec", ["lz4hc", "none"])
def test_a_sealed_chunk_holds_its_frames_and_no_more(codec):
    recorder, chunks = stream((50,), codec=Codec(codec), frames_per_chunk=100)
    append(recorder, np.arange(50, dtype=np.uint8)[None])
    (chunk,) = chunks.values()
    assert chunk.cbytes == 5000
    recorder.seal()
    assert chunk.nbytes == 50
    assert chunk.cbytes <= 50 + 32


@pytest.mark.parametrize("at", range(1, 500, 3))
def test_an_interruption_anywhere_loses_nothing(at):
    """As by a signal whose handler raises: between any two lines."""
    recorder, chunks = stream((50,), frames_per_chunk=2)
    written = {}
    left = at

    def trace(frame, event, arg):
        nonlocal left
        if frame.f_code.co_filename != recorder_module.__file__:
            return None
        if event == "line":
            left -= 1
            if not left:
                raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    for i in range(9):
        sys.settrace(trace if left > 0 else before)
        try:
            append(recorder, np.full((1, 50), i, np.uint8))
            written[i] = recorder.next_number - 1
            if i % 5 == 4:
                recorder.seal()
        except KeyboardInterrupt:
            pass
        finally:
            sys.settrace(before)
    recorder.seal()
    assert len(written) >= 8
    for i, number in written.items():
        assert chunks.frame(number, (50,), np.uint8).tolist() == [i] * 50


def test_readers_see_bytes_or_raw_frames_at_any_time():
    """The content of a chunk that is being sealed is readable between any two lines."""
    recorder, chunks = stream((50,), frames_per_chunk=4)
    append(recorder, np.arange(50, dtype=np.uint8)[None])

    def trace(frame, event, arg):
        if frame.f_code.co_name == "seal" and event == "line":
            sys.settrace(None)
            seen.append(chunks.frame(1, (50,), np.uint8).tolist())
            sys.settrace(trace)
        return trace

    before, seen = sys.gettrace(), []
    sys.settrace(trace)
    try:
        recorder.seal()
    finally:
        sys.settrace(before)
    assert len(seen) > 5
    assert all(values == list(range(50)) for values in seen)
