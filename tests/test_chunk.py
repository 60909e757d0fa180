import pickle
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import gym_compress.chunk as chunk_module
from gym_compress import Codec, CorruptDataError
from gym_compress.chunk import Chunk, ChunkWriter, fit, read_pieces
from tests.envs import assert_same

DTYPES = ["?", "i1", "u1", "i2", "u2", "i4", "u4", "i8", "u8", "f2", "f4", "f8", "g"]


def read(chunk, shape, dtype, index):
    out = np.empty(shape, dtype)
    if out.nbytes:
        place = index * out.nbytes
        pieces = [(0, 0, out.nbytes, place, place + out.nbytes)]
        read_pieces([(chunk, pieces)], [out.reshape(-1).view(np.uint8).data])
    return out


class Chunks(dict):
    """Holds the chunks that a writer begins, by the number of the first frame, and finds frames in them."""

    def begun(self, first, chunk):
        self[first] = chunk

    def frame(self, number, shape, dtype):
        first = max(first for first in self if first <= number)
        return read(self[first], shape, dtype, number - first)


def made(shape, dtype=np.uint8, **kwargs):
    """A writer, and its chunks."""
    chunks = Chunks()
    arguments = {"codec": Codec(), "frames_per_chunk": 12, "begun": chunks.begun, **kwargs}
    return ChunkWriter(shape, np.dtype(dtype), **arguments), chunks


@pytest.mark.parametrize("codec", ["lz4", "lz4hc", "zstd:1", "none"])
@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (1,), (5, 7), (2, 3, 4)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype_and_shape(dtype, shape, codec):
    writer, chunks = made(shape, dtype, codec=Codec.from_string(codec), frames_per_chunk=3)
    rng = np.random.default_rng(0)
    frames = (rng.standard_normal((11, *shape)) * 100).astype(dtype)
    writer.append(frames[:4]), writer.append(frames[4:5]), writer.append(frames[5:])
    assert writer.next_number == 12
    for _ in range(2):
        for number, frame in enumerate(frames, 1):
            assert_same(chunks.frame(number, shape, dtype), frame)
        writer.seal()
    assert all(chunk.sealed for chunk in chunks.values())


@given(
    frames_per_chunk=st.integers(1, 5),
    keep=st.integers(1, 9),
    count=st.integers(1, 30),
)
def test_newest_frames_stay_raw_and_old_ones_do_not(frames_per_chunk, keep, count):
    writer, chunks = made((40,), frames_per_chunk=frames_per_chunk, keep=keep)
    frames = np.arange(count * 40).reshape(count, 40).astype(np.uint8)
    for frame in frames:
        writer.append(frame[None])
    # raw are the chunk that is written, the full one before it, and as many as keep asks for
    raw = 1 + max(1, -(-keep // frames_per_chunk))
    sealed = [type(chunk.content) is bytes for chunk in chunks.values()]
    assert not any(sealed[-1 - (min(keep, count) - 1) // frames_per_chunk :])
    assert all(sealed[:-raw])
    assert writer.first_raw == [*chunks][-raw:][0]
    most = min(keep, count)
    assert writer.ends_with(frames[count - most :])
    assert not writer.ends_with(frames[count - most :] + np.uint8(1))


@given(
    frames_per_chunk=st.integers(1, 5),
    sizes=st.lists(st.integers(1, 7), min_size=1, max_size=12),
    seals=st.sets(st.integers(0, 11)),
)
def test_where_the_newest_frames_lie(frames_per_chunk, sizes, seals):
    writer, _ = made((3,), frames_per_chunk=frames_per_chunk, keep=4, begun=None)
    frames = np.arange(3 * sum(sizes), dtype=np.uint8).reshape(-1, 3)
    end = 0
    for i, size in enumerate(sizes):
        writer.append(frames[end : end + size])
        end += size
        newest = min(4, end)
        chunks, filled = writer.newest(newest)
        held = [read(chunk, (n, 3), np.uint8, 0) for chunk, n in zip(chunks, filled, strict=True)]
        assert_same(np.concatenate(held)[-newest:], frames[end - newest : end])
        assert sum(filled[1:]) < newest <= sum(filled)
        if i in seals:
            writer.seal()
    assert writer.next_number == end + 1


def test_a_chunk_that_nobody_holds_is_not_compressed(monkeypatch):
    encoded = []
    encode = Codec.encode
    monkeypatch.setattr(
        Codec, "encode", lambda self, data, itemsize: encoded.append(1) or encode(self, data, itemsize)
    )
    writer, _ = made((50,), frames_per_chunk=4, begun=None)
    kept = []
    for number in range(1, 101):
        writer.append(np.full((1, 50), number, np.uint8))
        if number == 42:
            kept += writer.newest(1)[0]
    assert encoded == [1]
    assert read(kept[0], (50,), np.uint8, 1).tolist() == [42] * 50


def test_frames_are_copied_whatever_their_layout():
    writer, chunks = made((4, 6), np.int32)
    base = np.arange(48, dtype=np.int32).reshape(6, 8)
    views = [base.T[1:5], base[:4, :6][::-1], base[:4, 1:7], np.asfortranarray(base[:4, :6])]
    want = [np.array(view) for view in views]
    for view in views:
        writer.append(view[None])
    base[...] = 0
    for number, expected in enumerate(want, 1):
        assert_same(chunks.frame(number, (4, 6), np.int32), expected)


def test_a_restarted_writer_goes_on_with_another_number_and_compares_with_nothing():
    writer, chunks = made((50,), frames_per_chunk=4)
    frames = np.arange(500, dtype=np.uint8).reshape(10, 50)
    writer.append(frames[:5])
    writer.restart(100)
    assert (writer.next_number, writer.first_raw) == (100, 100)
    assert not writer.ends_with(frames[4:5])
    assert all(chunk.sealed for chunk in chunks.values())
    writer.append(frames[5:7])
    assert [*chunks] == [1, 5, 100]
    assert_same(chunks.frame(101, (50,), np.uint8), frames[6])
    assert_same(chunks.frame(5, (50,), np.uint8), frames[4])


def test_values_are_cast_where_they_stay_what_they_are():
    for values, source, kept in [
        ([0.1, 1 / 3], "f8", "f4"),  # rounded
        ([np.inf, np.nan], "f8", "f4"),
        ([1, 200], ">i8", "i2"),
        ([0, 255], "u2", "u1"),
        ([True, False], "?", "u1"),
        ([3, 4], "u1", "f4"),
    ]:
        frame = np.array(values, source)
        np.testing.assert_array_equal(fit(frame, (2,), np.dtype(kept)), frame.astype(kept), strict=True)


@pytest.mark.parametrize(
    ("values", "given", "kept"),
    [
        ([300], "u2", "u1"),
        ([-1000], "i8", "i1"),
        ([1e300], "f8", "f4"),
        ([1e6], "f4", "f2"),
        ([200], "u1", "i1"),
    ],
)
def test_values_that_would_change_are_refused(values, given, kept):
    with pytest.raises(ValueError, match=r"A frame (with the value|of dtype)"):
        fit(np.array(values, given), (1,), np.dtype(kept))


@pytest.mark.parametrize(
    ("frame", "message"),
    [
        (np.zeros((2, 1), np.uint8), r"shape \(2, 1\).*shape \(2, 2\)"),
        (np.zeros((), np.uint8), r"shape \(\).*shape \(2, 2\)"),
        (np.zeros((2, 2), np.float32), "float32.*uint8"),
        (np.zeros((2, 2), np.int8), "int8.*uint8"),
        (np.zeros((2, 2), object), "object.*uint8"),
        (np.full((2, 2), 300, np.uint16), "value 300 .*uint8"),
        ("no frame", "shape"),
    ],
)
def test_a_frame_that_does_not_fit_is_refused(frame, message):
    with pytest.raises(ValueError, match=message):
        fit(frame, (2, 2), np.dtype(np.uint8))


def test_a_failed_encoding_loses_nothing(monkeypatch):
    writer, chunks = made((50,), frames_per_chunk=2)
    frames = np.arange(450, dtype=np.uint8).reshape(9, 50)
    writer.append(frames[:4])

    def fail(*args):
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(Codec, "encode", fail)
        with pytest.raises(MemoryError):
            writer.append(frames[4:5])
    writer.append(frames[4:])
    writer.seal()
    assert all(type(chunk.content) is bytes for chunk in chunks.values())
    for number, frame in enumerate(frames, 1):
        assert_same(chunks.frame(number, (50,), np.uint8), frame)


def test_reading_copies_pieces_and_decodes_once(monkeypatch):
    array = np.arange(1000, dtype=np.uint16)
    chunk = Chunk.from_array(array, Codec())
    assert chunk.sealed
    assert chunk.cbytes == len(chunk.content) < chunk.nbytes == 2000
    decoded = []
    import gym_compress.chunk as module

    decode = module.decode
    monkeypatch.setattr(
        module, "decode", lambda content, out: decoded.append(content) or decode(content, out)
    )
    out = bytearray(600)
    other = bytearray(2000)
    pieces = [(0, 0, 200, 1800, 2000), (1, 0, 2000, 0, 2000), (0, 400, 600, 0, 200)]
    read_pieces([(chunk, pieces)], [memoryview(out), memoryview(other)])
    assert decoded == [chunk.content]
    assert out == array[900:].tobytes() + bytes(200) + array[:100].tobytes()
    assert other == array.tobytes()
    read_pieces([(chunk, [(0, 0, 2000, 0, 2000)])], [memoryview(other)])
    assert other == array.tobytes()


@pytest.mark.parametrize("codec", ["lz4hc", "zstd", "none"])
def test_a_damaged_pickle_is_refused(codec):
    chunk = Chunk.from_array(np.arange(1000), Codec(codec))
    data = pickle.dumps(chunk)
    content = bytes(chunk.content)
    at = data.index(content)
    for place in (0, 30, 40, len(content) // 2, len(content) - 1):
        damaged = bytearray(data)
        damaged[at + place] ^= 1
        with pytest.raises(CorruptDataError, match="checksum"):
            pickle.loads(damaged)
    restored = pickle.loads(data)
    assert bytes(restored.content) == content
    assert restored.sealed


def test_a_chunk_that_cannot_be_decoded_is_an_error_of_its_own():
    chunk = Chunk.from_array(np.arange(1000), Codec())
    chunk.content = chunk.content[:40] + b"\xff" * (len(chunk.content) - 40)
    with pytest.raises(CorruptDataError, match="could not be decoded"):
        read(chunk, (500,), np.int64, 0), read(chunk, (250,), np.int64, 1)


def test_open_chunks_are_not_pickled():
    writer, chunks = made((50,))
    writer.append(np.zeros((1, 50), np.uint8))
    (chunk,) = chunks.values()
    with pytest.raises(TypeError, match="open chunk"):
        pickle.dumps(chunk)


@pytest.mark.parametrize("codec", ["lz4hc", "none"])
def test_a_sealed_chunk_holds_its_frames_and_no_more(codec):
    writer, chunks = made((50,), codec=Codec(codec), frames_per_chunk=100)
    writer.append(np.arange(50, dtype=np.uint8)[None])
    (chunk,) = chunks.values()
    assert chunk.cbytes == 5000
    writer.seal()
    assert chunk.nbytes == 50
    assert chunk.cbytes <= 50 + 32


@pytest.mark.parametrize("at", range(1, 500, 3))
def test_an_interruption_anywhere_loses_nothing(at):
    """As by a signal whose handler raises: between any two lines."""
    writer, chunks = made((50,), frames_per_chunk=2)
    written = {}
    left = at

    def trace(frame, event, arg):
        nonlocal left
        if frame.f_code.co_filename != chunk_module.__file__:
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
            writer.append(np.full((1, 50), i, np.uint8))
            written[i] = writer.next_number - 1
            if i % 5 == 4:
                writer.seal()
        except KeyboardInterrupt:
            pass
        finally:
            sys.settrace(before)
    writer.seal()
    assert len(written) >= 8
    for i, number in written.items():
        assert chunks.frame(number, (50,), np.uint8).tolist() == [i] * 50


def test_readers_see_bytes_or_raw_frames_at_any_time():
    """The content of a chunk that is being sealed is readable between any two lines."""
    writer, chunks = made((50,), frames_per_chunk=4)
    writer.append(np.arange(50, dtype=np.uint8)[None])

    def trace(frame, event, arg):
        if frame.f_code.co_name == "seal" and event == "line":
            sys.settrace(None)
            seen.append(chunks.frame(1, (50,), np.uint8).tolist())
            sys.settrace(trace)
        return trace

    before, seen = sys.gettrace(), []
    sys.settrace(trace)
    try:
        writer.seal()
    finally:
        sys.settrace(before)
    assert len(seen) > 5
    assert all(values == list(range(50)) for values in seen)
