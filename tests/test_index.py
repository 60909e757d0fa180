"""The index of chunks, against a plain list of all slices."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gym_compress import Codec, CorruptDataError
from gym_compress.chunk import Chunk
from gym_compress.replay.index import MOST_NUMBER, ChunkIndex
from gym_compress.slicing import Slicing
from tests.envs import assert_same

COUNT = 3
SLICING = Slicing((COUNT, 2, 4), np.dtype(np.int16), COUNT)


def chunk_of(slices):
    return Chunk.from_array(np.ascontiguousarray(slices), Codec("lz4"))


@st.composite
def indexes(draw):
    """An index of several streams, all slices of each by number, and the oldest that is still there."""
    streams = draw(st.integers(1, 4))
    index = ChunkIndex(SLICING, streams)
    rng = np.random.default_rng(draw(st.integers(0, 99)))
    kept = [rng.integers(-99, 99, (0, 1, 2, 4)).astype(np.int16) for _ in range(streams)]
    for _ in range(draw(st.integers(0, 60))):
        stream = draw(st.integers(0, streams - 1))
        slices = rng.integers(-99, 99, (draw(st.integers(1, 5)), 1, 2, 4)).astype(np.int16)
        index.append(stream, len(kept[stream]) + 1, chunk_of(slices))
        kept[stream] = np.concatenate([kept[stream], slices])
        if draw(st.integers(0, 9)) == 0:
            index.drop_before(stream, draw(st.integers(1, len(kept[stream]))))
    return index, kept


def references_of(data, index, kept, n):
    """Observations that are there, as streams and numbers; some of them are nothing."""
    streams, numbers = [], []
    for _ in range(n):
        stream = data.draw(st.integers(0, len(kept) - 1))
        oldest, end = index.span(stream)
        most = end - COUNT
        streams.append(stream)
        numbers.append(
            data.draw(st.integers(oldest, most)) if most >= oldest and data.draw(st.booleans()) else 0
        )
    return np.array(streams, np.int64), np.array(numbers, np.int64)


def expected(kept, streams, numbers):
    """The observations, by NumPy alone."""
    nothing = np.zeros((COUNT, 1, 2, 4), np.int16)
    found = [
        kept[stream][number - 1 : number - 1 + COUNT] if number else nothing
        for stream, number in zip(streams, numbers, strict=True)
    ]
    return np.array(found, np.int16).reshape(-1, COUNT, 1, 2, 4)


@given(data=st.data(), made=indexes(), n=st.integers(0, 12))
def test_reads_what_stands_there(data, made, n):
    index, kept = made
    streams, numbers = references_of(data, index, kept, 2 * n)
    outs = [np.full((n, COUNT, 1, 2, 4), 7, np.int16) for _ in range(2)]
    index.read(streams, numbers, *outs)
    assert_same(np.concatenate(outs), expected(kept, streams, numbers))
    (one,) = [np.full((2 * n, COUNT, 1, 2, 4), 7, np.int16)]
    index.read(streams, numbers, one)
    assert_same(one, expected(kept, streams, numbers))
    for stream in range(len(kept)):
        index.check(stream, numbers[streams == stream])


@given(data=st.data(), made=indexes(), n=st.integers(0, 12))
def test_takes_the_chunks_that_are_wanted_and_no_others(data, made, n):
    index, kept = made
    streams, numbers = references_of(data, index, kept, n)
    chunks, taken = index.take(streams, numbers)
    assert len({id(chunk) for chunk in chunks}) == len(chunks)
    alone = ChunkIndex(SLICING, 1)
    assert alone.adopt(0, chunks) == 1
    alone.check(0, taken)
    out = np.zeros((n, COUNT, 1, 2, 4), np.int16)
    alone.read(0 * streams, taken, out)
    assert_same(out, expected(kept, streams, numbers))
    wanted = {
        id(chunk)
        for stream, number in zip(streams.tolist(), numbers.tolist(), strict=True)
        if number
        for _, first, chunk in index.unsaved(stream, everything=True)
        if number - chunk.nbytes // 16 < first < number + COUNT
    }
    assert {id(chunk) for chunk in chunks} == wanted


def test_chunks_that_are_there_already_are_kept_once():
    rng = np.random.default_rng(0)
    parts = [chunk_of(rng.integers(0, 9, (4, 1, 2, 4)).astype(np.int16)) for _ in range(5)]
    again = [Chunk(part.content, part.nbytes, part.codec, sealed=True) for part in parts]
    index = ChunkIndex(SLICING, 2)
    assert index.adopt(1, parts[:3]) == 1
    assert index.adopt(1, again[1:4]) == 5
    assert (len(index), index.span(1)) == (4, (1, 17))
    assert index.adopt(1, again[:2]) == 17  # not the last ones
    assert index.adopt(0, again[:2]) == 1  # of another stream
    assert len(index) == 8


def test_raw_bytes_that_are_a_compressed_chunk_are_another_chunk():
    chunk = chunk_of(np.zeros((4, 1, 2, 4), np.int16))
    raw = Chunk(np.frombuffer(chunk.content, np.uint8), chunk.nbytes, Codec("none"), sealed=True)
    index = ChunkIndex(SLICING, 1)
    assert [index.adopt(0, [each]) for each in (chunk, raw, raw, chunk)] == [1, 5, 5, 9]


def test_a_chunk_that_began_before_takes_its_place_again():
    slices = np.arange(32, dtype=np.int16).reshape(4, 1, 2, 4)
    index = ChunkIndex(SLICING, 1)
    index.append(0, 1, chunk_of(slices))
    index.append(0, 5, chunk_of(slices))
    index.append(0, 5, chunk_of(slices + np.int16(1)))
    assert len(index) == 2
    out = np.zeros((1, COUNT, 1, 2, 4), np.int16)
    index.read(np.array([0]), np.array([5]), out)
    assert_same(out[0], slices[:3] + np.int16(1))


def test_chunks_come_and_go_in_little_room():
    chunk = chunk_of(np.zeros((4, 1, 2, 4), np.int16))
    index = ChunkIndex(SLICING, 3)
    for i in range(5000):
        index.append(i % 3, 1 + 4 * (i // 3), chunk, id_=i + 1)
        index.drop_before(i % 3, max(1, 4 * (i // 3) - 80))
    assert len(index) <= 3 * 23
    assert index.evicted == [*range(1, 5000 - 3 * 22 + 1)][: len(index.evicted)]
    assert len(index.evicted) + len(index) == 5000
    assert len([*index.ids()]) == len(index)
    index.drop_before(0, MOST_NUMBER)
    assert index.span(0)[1] - index.span(0)[0] == 4  # the newest chunk stays


@pytest.mark.parametrize(
    ("firsts", "sizes"),
    [([1, 4], [4, 4]), ([1, 6], [4, 4]), ([0], [4]), ([-3], [4]), ([MOST_NUMBER - 2], [4]), ([5, 1], [4, 4])],
)
def test_chunks_that_do_not_follow_each_other_are_refused(firsts, sizes):
    chunks = [chunk_of(np.zeros((size, 1, 2, 4), np.int16)) for size in sizes]
    with pytest.raises(CorruptDataError, match="begins with slice"):
        ChunkIndex(SLICING, 1).restore(0, firsts, chunks, [1] * len(chunks))
    odd = Chunk.from_array(np.zeros(7, np.uint8), Codec("lz4"))
    with pytest.raises(CorruptDataError, match="whole slices"):
        ChunkIndex(SLICING, 1).restore(0, [1], [odd], [1])


@pytest.mark.parametrize("number", [-1, 4, 15, 17, 2**31, 2**62])
def test_references_that_lead_nowhere_are_refused(number):
    index = ChunkIndex(SLICING, 2)
    chunks = [chunk_of(np.zeros((4, 1, 2, 4), np.int16)) for _ in range(3)]
    index.restore(1, [5, 9, 13], chunks, [1, 2, 3])
    index.check(1, np.array([0, 5, 12, 14]))
    with pytest.raises(CorruptDataError, match="not there"):
        index.check(1, np.array([5, number]))
    with pytest.raises(CorruptDataError, match="not there"):
        index.check(0, np.array([5]))
