import pickle

import numpy as np
import pytest

from gym_compress import Codec, CorruptDataError
from gym_compress.chunk import Chunk, read_pieces


def read(chunk, shape, dtype, index):
    out = np.empty(shape, dtype)
    if out.nbytes:
        place = index * out.nbytes
        pieces = [(0, 0, out.nbytes, place, place + out.nbytes)]
        read_pieces([(chunk, pieces)], [out.reshape(-1).view(np.uint8).data])
    return out


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
