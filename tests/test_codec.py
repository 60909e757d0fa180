import base64
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


ITEMSIZES = [1, 2, 4, 8, 16]


@st.composite
def elements(draw, most=3000):
    """Bytes of whole elements, and the size of one: noise, runs, repetitions or zeros."""
    itemsize = draw(st.sampled_from(ITEMSIZES))
    count = draw(st.integers(1, most // itemsize))
    unit = draw(st.binary(min_size=1, max_size=200))
    if draw(st.booleans()):  # each byte of the unit as a run
        unit = bytes(byte for byte in unit for _ in range(count * itemsize // len(unit) + 1))
    data = unit * (count * itemsize // len(unit) + 1)
    return np.frombuffer(data, np.uint8, count * itemsize), itemsize


@given(elements(), st.sampled_from(REAL))
def test_encode_and_decode(given_, name):
    source, itemsize = given_
    encoded = Codec.from_string(name).encode(source, itemsize)
    check_encoded(encoded, source.nbytes)
    out = np.full(source.nbytes + 9, 77, np.uint8)
    decode(encoded, out[: source.nbytes])
    assert (out[: source.nbytes] == source).all()
    assert (out[source.nbytes :] == 77).all()
    decode(encoded, memoryview(out))  # more room than it takes
    assert (out[: source.nbytes] == source).all()
    assert (out[source.nbytes :] == 77).all()
    assert blosc2.decompress2(encoded, nthreads=1) == source.tobytes()


@given(elements(), st.sampled_from(REAL), st.integers(1, 40))
def test_more_than_one_block(given_, name, elements_of_a_block):
    """As from 512 MiB on: the last block may be shorter, but holds whole elements too."""
    source, itemsize = given_
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gym_compress.codec, "_MAX_BLOCK", 16 * elements_of_a_block)
        encoded = Codec.from_string(name).encode(source, itemsize)
        check_encoded(encoded, source.nbytes)
    out = np.empty_like(source)
    decode(encoded, out)
    assert (out == source).all()


@given(st.sampled_from(REAL), st.sampled_from(ITEMSIZES[1:]), st.integers(1, 3000))
def test_elements_are_whole(name, itemsize, nbytes):
    """Blosc2 4.10 writes others so that they decode to something else, without an error."""
    if nbytes % itemsize == 0:
        nbytes += 1
    data = np.arange(nbytes, dtype=np.uint16).view(np.uint8)[:nbytes]
    with pytest.raises(ValueError, match=f"whole elements of {itemsize} bytes, actual: {nbytes}"):
        Codec.from_string(name).encode(data, itemsize)


# Arrays, and the buffers that Blosc2 4.10.1 wrote of them: these are read whatever is installed.
OLD = [
    pytest.param(
        np.arange(96, dtype=np.uint8) // 5,
        "1pzeyU;qFBU;qFBcmMzZ00000000620000000000Bme*aPyhe`5C8!H5CH)I5CQ=J5CZ`K5Cj1L5Cs7M5C#DN5C;JO"
        "5C{PP5D5VQ5DEbR5DNhS5DWnT5DftU5DozV5Dx(W5D)<Xun`dv5fKs+5)u*<",
        id="bytes",
    ),
    pytest.param(
        np.arange(400, dtype=np.int32) % 90,
        "1py@lKn4H+Kn4H+ng9R*0RR91000310000000000Bme*aW&i*H|4RS?0s{mE1_uZU3JVMk4i69!5)%{^78e*98XFuP"
        "9v>hfA|oUvCMPH<Dl054E-x@KGBY$aHa9pqIy*c)K0iP~LPJDFMn_0VN=r;lPESx#Qd3k_R##YAS^)naP$MKICMN&@"
        "0000000000000",
        id="split",
    ),
    pytest.param(
        np.arange(300, dtype=np.float64) // 7,
        "1p$Q!U<m*KU<m*Ky8r+H0RR91000F50000000000Bme*a00000000000000000000000007ytkOD77#BU@QQ2000;O"
        "0DuDkizxvNS4;scNB{r;D77#BU@QRj0RY4T008g+2oMw)93UbjCMYT_E-*1NGc+|eH#j*uJ3Ku;KR`i3LqtVIMMXtL"
        "C72NK2LKQfygelO3|f!^7XSbND77#BU@QP_001BW06#zj5C9rV@U~b",
        id="split, zstd",
    ),
    pytest.param(
        np.full(500, 7, np.int16),
        "1pzez=mP)%=mP)%IsgCw0RR91000620000000000Bme*a5&!@I9|r*d|KT410RaEpPyhe`000",
        id="one stream",
    ),
    pytest.param(
        np.zeros(50, np.complex128),
        "1p$Q+AOipZAOipZAOHXW0RR91000F5000000000G",
        id="zeros",
    ),
    pytest.param(
        np.arange(20, dtype=np.uint8) * 37,
        "1px;E6aWAK6aWAKGynhq0000000031000000000003}Lql)2smC{1#gyx|5bP<5KW",
        id="stored",
    ),
]


@pytest.mark.parametrize(("array", "text"), OLD)
def test_what_an_older_blosc2_wrote_is_read(array, text):
    encoded = base64.b85decode(text)
    check_encoded(encoded, array.nbytes)
    out = np.empty_like(array)
    decode(encoded, out.view(np.uint8))
    assert (out == array).all()
    # elements of another size that do not divide the content are not written, so they are not read
    encoded = bytearray(encoded)
    encoded[3] = 7
    refused(encoded, array.nbytes)


@given(elements(), st.sampled_from(REAL), st.data())
def test_a_destination_that_is_too_small_is_not_written(given_, name, data):
    source, itemsize = given_
    encoded = Codec.from_string(name).encode(source, itemsize)
    out = np.full(source.nbytes, 77, np.uint8)
    room = data.draw(st.integers(0, source.nbytes - 1))
    with pytest.raises(CorruptDataError, match="could not be decoded"):
        decode(encoded, out[:room])
    assert (out == 77).all()


@pytest.mark.parametrize("encoded", [b"", b"x" * 15, bytes(32), b"x" * 100], ids=len)
def test_what_is_no_buffer_does_not_decode(encoded):
    with pytest.raises(CorruptDataError, match=f"chunk of {len(encoded)} bytes could not be decoded"):
        decode(encoded, np.empty(1000, np.uint8))


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
            blosc2.get_compressor(),
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


@pytest.mark.parametrize("nbytes", [0, -1])
def test_nothing_is_no_chunk(nbytes):
    encoded = bytearray(Codec().encode(np.zeros(1000, np.uint8), 1))
    encoded[4:12] = 2 * nbytes.to_bytes(4, "little", signed=True)  # of the buffer, and of a block
    encoded[31] = 0
    refused(encoded, nbytes)


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
    except CorruptDataError:
        pass
    assert (out[source.nbytes :] == 77).all()


@pytest.mark.parametrize("offset", [33, 34, 35, 37, 39])
def test_lengths_that_lead_out_of_the_buffer_are_refused(offset):
    encoded = bytearray(Codec().encode(np.arange(1600, dtype=np.uint8) // 3, 1))
    encoded[offset] = 0x10
    refused(encoded, 1600)


OVERRIDES = [
    "COMPRESSOR=zstd",
    "BLOCKSIZE=100",
    "COMPRESSOR=blosclz",
    "COMPRESSOR=junk",
    "TYPESIZE=3",
    "TYPESIZE=16",
    "SHUFFLE=BITSHUFFLE",
    "DELTA=1",
]


@pytest.mark.parametrize(
    "override", [*OVERRIDES[:2], *(pytest.param(each, marks=pytest.mark.slow) for each in OVERRIDES[2:])]
)
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
