import copy
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
        read_pieces(
            [(chunk, [(0, out.nbytes, place, place + out.nbytes)])], out.reshape(-1).view(np.uint8).data
        )
    return out


@pytest.mark.parametrize("codec", ["lz4", "lz4hc", "zstd:1", "none"])
@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (1,), (5, 7), (2, 3, 4)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype_and_shape(dtype, shape, codec):
    writer = ChunkWriter(shape, dtype, codec=codec, frames_per_chunk=3)
    rng = np.random.default_rng(0)
    frames = (rng.standard_normal((11, *shape)) * 100).astype(dtype)
    written = [writer.append(frame) for frame in frames]
    for _ in range(2):
        for frame, (chunk, index) in zip(frames, written, strict=True):
            assert_same(read(chunk, shape, dtype, index), frame)
        writer.seal()
    assert all(chunk.sealed for chunk, _ in written)


@given(
    frames_per_chunk=st.integers(1, 5),
    keep=st.integers(1, 9),
    count=st.integers(1, 30),
)
def test_newest_frames_stay_raw_and_old_ones_do_not(frames_per_chunk, keep, count):
    writer = ChunkWriter((40,), np.uint8, frames_per_chunk=frames_per_chunk, keep=keep)
    written = [writer.append(np.full(40, i, np.uint8))[0] for i in range(count)]
    assert not any(chunk.sealed for chunk in written[-keep:])
    # raw are the chunk that is written, the full one before it, and as many as keep asks for
    chunks = list(dict.fromkeys(written))
    raw = 1 + max(1, -(-keep // frames_per_chunk))
    assert all(chunk.sealed and type(chunk.content) is bytes for chunk in chunks[:-raw])


def test_frames_are_copied_whatever_their_layout():
    writer = ChunkWriter((4, 6), np.int32)
    base = np.arange(48, dtype=np.int32).reshape(6, 8)
    views = [
        base.T[1:5],
        base[:4, :6][::-1],
        base[:4, 1:7],
        np.asfortranarray(base[:4, :6]),
        base[:4, :6].astype(">i4"),
    ]
    want = [np.array(view) for view in views]
    written = [writer.append(view) for view in views]
    base[...] = 0
    for view, (chunk, index), expected in zip(views, written, want, strict=True):
        view[...] = 0
        np.testing.assert_array_equal(read(chunk, (4, 6), np.int32, index), expected)


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
def test_a_frame_that_does_not_fit_changes_nothing(frame, message):
    writer = ChunkWriter((2, 2), np.uint8)
    writer.append(np.ones((2, 2), np.uint8))
    with pytest.raises(ValueError, match=message):
        writer.append(frame)
    assert writer.append(np.ones((2, 2), np.uint8))[1] == 1


@pytest.mark.parametrize("twin", [copy.deepcopy, lambda writer: pickle.loads(pickle.dumps(writer))])
def test_a_copied_writer_writes_elsewhere(twin):
    writer = ChunkWriter((50,), np.uint8, codec="zstd:2", frames_per_chunk=4, keep=2)
    chunk, index = writer.append(np.full(50, 1, np.uint8))
    other = twin(writer)
    assert (other.codec, other.frames_per_chunk, other.keep) == (Codec("zstd", 2), 4, 2)
    for value in (7, 8):
        other.append(np.full(50, value, np.uint8))
    second, place = writer.append(np.full(50, 2, np.uint8))
    assert read(chunk, (50,), np.uint8, index).tolist() == [1] * 50
    assert read(second, (50,), np.uint8, place).tolist() == [2] * 50


def test_a_failed_encoding_loses_nothing(monkeypatch):
    writer = ChunkWriter((50,), np.uint8, frames_per_chunk=2)
    written = [writer.append(np.full(50, i, np.uint8)) for i in range(4)]

    def fail(*args):
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(Codec, "encode", fail)
        with pytest.raises(MemoryError):
            writer.append(np.full(50, 4, np.uint8))
    written += [writer.append(np.full(50, i, np.uint8)) for i in range(4, 9)]
    writer.seal()
    assert all(type(chunk.content) is bytes for chunk, _ in written)
    for i, (chunk, index) in enumerate(written):
        assert read(chunk, (50,), np.uint8, index).tolist() == [i] * 50


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
    read_pieces([(chunk, [(0, 200, 1800, 2000), (400, 600, 0, 200)])], memoryview(out))
    assert decoded == [chunk.content]
    assert out == array[900:].tobytes() + bytes(200) + array[:100].tobytes()


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
    chunk, _ = ChunkWriter((50,), np.uint8).append(np.zeros(50, np.uint8))
    with pytest.raises(TypeError, match="open chunk"):
        pickle.dumps(chunk)


@pytest.mark.parametrize("codec", ["lz4hc", "none"])
def test_a_sealed_chunk_holds_its_frames_and_no_more(codec):
    writer = ChunkWriter((50,), np.uint8, codec=codec, frames_per_chunk=100)
    chunk, _ = writer.append(np.arange(50, dtype=np.uint8))
    assert chunk.cbytes == 5000
    writer.seal()
    assert chunk.nbytes == 50
    assert chunk.cbytes <= 50 + 32


@pytest.mark.parametrize("at", range(1, 400, 3))
def test_an_interruption_anywhere_loses_nothing(at):
    """As by a signal whose handler raises: between any two lines."""
    writer = ChunkWriter((50,), np.uint8, frames_per_chunk=2)
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
            written[i] = writer.append(np.full(50, i, np.uint8))
            if i % 5 == 4:
                writer.seal()
        except KeyboardInterrupt:
            pass
        finally:
            sys.settrace(before)
    writer.seal()
    for i, (chunk, index) in written.items():
        assert type(chunk.content) is bytes
        assert read(chunk, (50,), np.uint8, index).tolist() == [i] * 50


def test_readers_see_bytes_or_raw_frames_at_any_time():
    """The content of a chunk that is being sealed is readable between any two lines."""
    writer = ChunkWriter((50,), np.uint8, frames_per_chunk=4)
    chunk, index = writer.append(np.arange(50, dtype=np.uint8))

    def trace(frame, event, arg):
        if frame.f_code.co_name == "seal" and event == "line":
            sys.settrace(None)
            seen.append(read(chunk, (50,), np.uint8, index).tolist())
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
