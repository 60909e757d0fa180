import copy
import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gym_compress import Codec, CompressedObservation
from gym_compress.recorder import Recorder
from gym_compress.slicing import Slicing
from tests.envs import assert_same


class Log(dict):
    """The chunks that a recorder begins, by the number of the first slice."""

    def begun(self, first, chunk):
        self[first] = chunk


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


def test_pushed_slices_make_stacks():
    frames = np.random.default_rng(0).integers(0, 255, (30, 5, 4), dtype=np.uint8)
    recorder = made((3, 5, 4), 3)
    recorder.record(recorder.slicing.cut(frames[None, :3])[0])
    for i in range(3, 30):
        recorder.push(frames[i])
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
    log = Log()
    frames = np.random.default_rng(0).integers(0, 255, (20, 5, 4), dtype=np.uint8)
    recorder = made((2, 5, 4), 2, frames_per_chunk=4, begun=log.begun)
    for i in range(12):
        recorder.record(recorder.slicing.cut(frames[None, i : i + 2])[0])
    recorder.seal()
    recorder.record(recorder.slicing.cut(frames[None, 12:14])[0])
    assert [*log] == [1, 5, 9, 13, 14]
    assert [chunk.nbytes // 20 for chunk in log.values()] == [4, 4, 4, 1, 4]
