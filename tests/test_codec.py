import json
import os
import subprocess
import sys

import blosc2
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import gym_compress.codec
from gym_compress import Codec, CorruptDataError, GymCompressError
from gym_compress.codec import check_encoded, decode, resolve_codec, resolve_frames_per_chunk

REAL = ["lz4:1", "lz4:9", "lz4hc:5", "zstd:1", "zstd:9"]


def test_is_a_frozen_value():
    codec = Codec("zstd", 3)
    assert codec == Codec(name="zstd", clevel=3)
    assert codec != Codec("zstd", 4)
    assert len({codec, Codec("zstd", 3), Codec("lz4", 3)}) == 2
    with pytest.raises(AttributeError):
        codec.clevel = 4


@pytest.mark.parametrize(
    ("text", "codec", "printed"),
    [
        ("lz4hc:5", Codec(), "lz4hc:5"),
        ("zstd", Codec("zstd", 5), "zstd:5"),
        ("lz4:1", Codec("lz4", np.int64(1)), "lz4:1"),
        ("none", Codec("none"), "none"),
    ],
)
def test_strings(text, codec, printed):
    assert Codec.from_string(text) == codec
    assert str(codec) == printed == json.loads(json.dumps(str(codec)))
    assert Codec.from_string(printed) == codec


@pytest.mark.parametrize(
    "text",
    ["lzma", "", "zstd:", "zstd:0", "zstd:10", "zstd:-1", "zstd:1.5", "none:3", "ZSTD", "auto:1", "none:7"],
)
def test_unknown_codecs_name_what_is_allowed(text):
    with pytest.raises(ValueError, match=r"expected ('auto', 'lz4', 'lz4hc' or 'zstd'|1 to 9)"):
        Codec.from_string(text)


def test_none_has_no_levels():
    assert Codec("none") == Codec("none", 0)
    for level in (1, 77):
        with pytest.raises(ValueError, match="no levels"):
            Codec("none", level)


@pytest.mark.parametrize("level", [2.5, "3", None])
def test_levels_are_integers(level):
    with pytest.raises(TypeError, match="integer"):
        Codec("zstd", level)


def test_auto_chooses_by_the_size_of_a_frame():
    assert str(resolve_codec("auto", 84 * 84)) == str(resolve_codec("auto", 32 * 1024 - 1)) == "lz4hc:5"
    assert str(resolve_codec("auto", 32 * 1024)) == "zstd:1"
    assert str(resolve_codec("auto", 210 * 160 * 3)) == "zstd:1"
    assert resolve_codec(Codec("lz4", 2), 1) == Codec("lz4", 2)
    sizes = {0: 12, 1: 12, 84 * 84: 12, 128 * 128 * 3: 8, 210 * 160 * 3: 4, 10**8: 4}
    assert {nbytes: resolve_frames_per_chunk(None, nbytes) for nbytes in sizes} == sizes
    assert resolve_frames_per_chunk(1000, 10**9) == 2  # two of them are below 2 GiB
    with pytest.raises(ValueError, match="does not fit a chunk"):
        resolve_frames_per_chunk(1, 2**31)
    with pytest.raises(TypeError, match="string or a Codec"):
        resolve_codec(5, 10)
    with pytest.raises(TypeError, match="integer or None"):
        resolve_frames_per_chunk(1.5, 10)


@given(st.binary(min_size=1, max_size=3000), st.sampled_from(REAL), st.sampled_from([1, 2, 4, 8, 16]))
def test_encode_and_decode(data, name, itemsize):
    source = np.frombuffer(data, np.uint8)
    encoded = Codec.from_string(name).encode(source, itemsize)
    check_encoded(encoded, len(data))
    out = np.empty(len(data), np.uint8)
    decode(encoded, out)
    assert out.tobytes() == data
    assert blosc2.decompress2(encoded, nthreads=1) == data


@pytest.mark.parametrize("itemsize", [1, 4])
@pytest.mark.parametrize("name", REAL)
def test_a_chunk_is_one_block(name, itemsize):
    data = np.tile(np.arange(250, dtype=np.uint8), 4000)
    encoded = Codec.from_string(name).encode(data, itemsize)
    assert blosc2.get_cbuffer_sizes(encoded) == (data.nbytes, len(encoded), data.nbytes)
    assert encoded[3] == itemsize


def test_blosc2s_settings_stay_as_they_are():
    def settings():
        return (
            blosc2.nthreads,
            blosc2.blosc2_ext.get_compressor(),
            dict(blosc2.cparams_dflts),
            blosc2.set_releasegil(False),
        )

    before = settings()
    data = np.zeros(10_000, np.uint8)
    decode(Codec("zstd", 1).encode(data, 1), data)
    assert settings() == before


def test_one_thread_whatever_blosc2_is_set_to():
    threads = blosc2.set_nthreads(2)
    try:
        compression = gym_compress.codec._compression(Codec(), 1)
        assert compression["nthreads"] == 1
    finally:
        blosc2.set_nthreads(threads)


def refused(encoded, nbytes):
    with pytest.raises(CorruptDataError, match="compressed chunk"):
        check_encoded(bytes(encoded), nbytes)


def test_damaged_buffers_are_refused():
    encoded = Codec().encode(np.arange(1000, dtype=np.uint8) // 7, 1)
    check_encoded(encoded, 1000)
    foreign = blosc2.compress2(bytes(range(100)) * 10, codec=blosc2.Codec.BLOSCLZ, clevel=5, nthreads=1)
    for damaged, nbytes in [
        (b"", 1000),
        (encoded[:31], 1000),
        (encoded[:-1], 1000),
        (encoded + b"x", 1000),
        (encoded, 999),
        (foreign, 1000),
    ]:
        refused(damaged, nbytes)
    assert issubclass(CorruptDataError, ValueError)
    assert issubclass(CorruptDataError, GymCompressError)


@given(st.data())
def test_a_damaged_buffer_decodes_or_is_refused_and_never_crashes(data):
    """Each byte of the header and of the lengths matters; what LZ4 and ZSTD read they check by themselves."""
    values = (
        np.random.default_rng(0).integers(0, 3, 3000).astype(data.draw(st.sampled_from(["u1", "f4", "f8"])))
    )
    source = values.view(np.uint8)
    encoded = bytearray(Codec.from_string(data.draw(st.sampled_from(REAL))).encode(source, values.itemsize))
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(encoded) - 1) | st.integers(0, 60))
        encoded[at] = data.draw(st.integers(0, 255))
    out = np.zeros(source.nbytes + 64, np.uint8)
    out[source.nbytes :] = 77
    try:
        check_encoded(bytes(encoded), source.nbytes)
        decode(bytes(encoded), out[: source.nbytes])
    except (CorruptDataError, RuntimeError):
        pass
    assert (out[source.nbytes :] == 77).all()


@pytest.mark.parametrize("offset", [33, 34, 35, 37, 39])
def test_lengths_that_lead_out_of_the_buffer_are_refused(offset):
    encoded = bytearray(Codec().encode(np.arange(1600, dtype=np.uint8) // 3, 1))
    encoded[offset] = 0x10
    refused(encoded, 1600)


OVERRIDES = [
    "COMPRESSOR=blosclz",
    "COMPRESSOR=junk",
    "TYPESIZE=3",
    "TYPESIZE=16",
    "BLOCKSIZE=100",
    "SHUFFLE=BITSHUFFLE",
    "DELTA=1",
]


@pytest.mark.parametrize("override", OVERRIDES)
def test_an_overriding_environment_variable_is_an_error(override):
    code = """
import numpy as np
from gym_compress import CompressedObservation, GymCompressError
for dtype in (np.uint8, np.float64):
    frame = (np.arange(7000) // 5 % 3).astype(dtype)
    try:
        same = np.array_equal(CompressedObservation.from_frames([frame])[0], frame)
        print("right" if same else "WRONG")
    except GymCompressError as error:
        print(error)
"""
    name, value = override.split("=")
    run = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, f"BLOSC_{name}": value},
        capture_output=True,
        text=True,
        check=True,
    )
    assert "WRONG" not in run.stdout
    assert "Unset the environment variables BLOSC_*" in run.stdout
