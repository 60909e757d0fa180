import pickle

import numpy as np
import pytest

from gym_compress import Codec, CorruptDataError
from gym_compress.chunk import Chunk, fit, read_pieces


def read(chunk, shape, dtype, index):
    out = np.empty(shape, dtype)
    if out.nbytes:
        place = index * out.nbytes
        pieces = [(0, 0, out.nbytes, place, place + out.nbytes)]
        read_pieces([(chunk, pieces)], [out.reshape(-1).view(np.uint8).data])
    return out


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
