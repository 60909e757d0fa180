import random
import threading

import numpy as np
import pytest
from gymnasium import spaces
from hypothesis import given
from hypothesis import strategies as st

import gym_compress.chunk
from gym_compress import CompressedFrameStack, CompressedObservation, CompressObservation, decompress_batch
from tests.envs import AnyEnv, MovingSquare, assert_same, compressor, play

MIXED = spaces.Dict(
    image=spaces.Box(0, 255, (20, 30, 3), np.uint8),
    inner=spaces.Tuple([spaces.Box(-1, 1, (500,), np.float32), spaces.Discrete(4)]),
    name=spaces.Text(5),
)


def plain(observation):
    if isinstance(observation, dict):
        return {key: plain(value) for key, value in observation.items()}
    if isinstance(observation, tuple):
        return tuple(plain(value) for value in observation)
    return np.asarray(observation)


def stacked(observations):
    """What the batch must be, by NumPy alone."""
    first = observations[0]
    if isinstance(first, dict):
        return {key: stacked([observation[key] for observation in observations]) for key in first}
    if isinstance(first, tuple):
        return tuple(stacked(list(leaves)) for leaves in zip(*observations, strict=True))
    return np.stack(observations)


@pytest.fixture(scope="module")
def kept():
    return play(CompressedFrameStack(MovingSquare(episode=9), 4), 120)


@given(
    picks=st.lists(st.integers(0, 60), min_size=1, max_size=12),
    kind=st.sampled_from(["box", "mixed", "stack", "long stack", "none"]),
)
def test_equals_numpys_stack(picks, kind):
    env = {
        "box": lambda: CompressObservation(AnyEnv()),
        "mixed": lambda: CompressObservation(AnyEnv(MIXED), frames_per_chunk=5),
        "stack": lambda: CompressedFrameStack(AnyEnv(), 3, padding_type="zero"),
        "long stack": lambda: CompressedFrameStack(AnyEnv(), 7, frames_per_chunk=2),
        "none": lambda: CompressedFrameStack(AnyEnv(), 3, codec="none"),
    }[kind]()
    seen = play(env, 60)
    batch = [seen[i] for i in picks]
    want = stacked([plain(observation) for observation in batch])
    assert_same(decompress_batch(batch), want)
    env.close()  # seals
    assert_same(decompress_batch(tuple(batch)), want)


def test_containers_and_plain_arrays(kept):
    want = np.stack([np.asarray(obs) for obs in kept[:5]])
    objects = np.empty(5, object)
    objects[:] = kept[:5]
    for batch in (
        kept[:5],
        tuple(kept[:5]),
        objects,
        iter(kept[:5]),
        want,
        list(want),
        [want[0], *kept[1:5]],
        [*kept[:4], want[4]],
    ):
        assert_same(decompress_batch(batch), want)
    assert_same(decompress_batch([1, 2, 3]), np.array([1, 2, 3]))
    big_endian = [np.arange(3, dtype=">f4")] * 2
    assert_same(decompress_batch(big_endian), np.stack(big_endian).astype("=f4"))


def test_each_chunk_is_decoded_once(kept, monkeypatch):
    decoded = []
    decode = gym_compress.chunk.decode
    monkeypatch.setattr(
        gym_compress.chunk, "decode", lambda content, out: decoded.append(content) or decode(content, out)
    )
    pairs = [obs for i in (7, 3, 9, 3, 30) for obs in (kept[i], kept[i + 1])]
    assert_same(decompress_batch(pairs), np.stack([np.asarray(obs) for obs in pairs]))
    del decoded[:]
    decompress_batch(pairs)
    touched = {id(chunk.content) for obs in pairs for chunk in obs.chunks}
    assert len(decoded) == len(touched) == len({id(content) for content in decoded})
    decompress_batch([kept[-1], kept[-2]])
    assert len(decoded) == len(touched)  # the newest are raw


@pytest.mark.parametrize("dense", [0, 5, 31])
def test_one_array_among_observations_changes_nothing(kept, monkeypatch, dense):
    batch = list(kept[20:52])
    batch[dense] = np.asarray(batch[dense])
    want = np.stack([np.asarray(obs) for obs in kept[20:52]])
    decoded = []
    decode = gym_compress.chunk.decode
    monkeypatch.setattr(
        gym_compress.chunk, "decode", lambda content, out: decoded.append(content) or decode(content, out)
    )
    assert_same(decompress_batch(batch), want)
    assert len(decoded) == len({id(content) for content in decoded})
    big_endian = np.arange(6, dtype=">f4").reshape(2, 3)
    compressed = CompressedObservation.from_frames(list(big_endian))
    for pair in ([compressed, big_endian], [big_endian, compressed]):
        assert_same(decompress_batch(pair), np.stack([big_endian] * 2).astype("=f4"))


def test_out_may_overlap_what_is_read_but_not_itself():
    values = np.arange(12, dtype=np.uint8).reshape(4, 3)
    rows = values.copy()
    decompress_batch([rows[1], rows[0]], out=rows[:2])
    assert_same(rows[:2], values[[1, 0]])
    one = np.zeros((2, 3), np.uint8)
    with pytest.raises(ValueError, match="do not overlap"):
        decompress_batch([{"a": values[0], "b": values[1]}] * 2, out={"a": one, "b": one})
    assert not one.any()
    both = np.zeros((4, 3), np.uint8)
    decompress_batch([{"a": values[0], "b": values[1]}] * 2, out={"a": both[:2], "b": both[2:]})
    assert_same(both, values[[0, 0, 1, 1]])


def test_out_is_written_in_place(kept):
    import torch

    want = np.stack([np.asarray(obs) for obs in kept[:6]])
    out = np.empty_like(want)
    assert decompress_batch(kept[:6], out=out) is out
    assert_same(out, want)
    tensor = torch.zeros(want.shape, dtype=torch.uint8)
    decompress_batch(kept[:6], out=tensor.numpy())
    assert_same(tensor.numpy(), want)
    rows = np.empty((8, *want.shape[1:]), np.uint8)
    decompress_batch(kept[:6], out=rows[1:7])
    assert_same(rows[1:7], want)
    seen = play(CompressObservation(AnyEnv(MIXED)), 5)
    want = stacked([plain(observation) for observation in seen])
    out = {
        "image": np.empty_like(want["image"]),
        "inner": tuple(np.empty_like(leaf) for leaf in want["inner"]),
        "name": np.empty_like(want["name"]),
    }
    assert decompress_batch(seen, out=out) is out
    assert_same(out, want)


@pytest.mark.parametrize("make", [lambda shape: np.empty(shape, order="F", dtype=np.uint8),
                                  lambda shape: np.empty((shape[0] * 2, *shape[1:]), np.uint8)[::2],
                                  lambda shape: np.broadcast_to(np.empty(shape[1:], np.uint8), shape),
                                  lambda shape: np.empty(shape, np.int8),
        lambda shape: np.frombuffer(bytes(np.prod(shape)), np.uint8).reshape(shape),
                                  lambda shape: np.empty(shape[1:], np.uint8),
                                  lambda shape: np.empty((shape[0] + 1, *shape[1:]), np.uint8)])  # fmt: skip
def test_out_must_fit(kept, make):
    out = make((3, 4, 84, 84))
    with pytest.raises(ValueError, match="out is expected"):
        decompress_batch(kept[:3], out=out)
    with pytest.raises(ValueError, match="out is expected"):
        decompress_batch([np.asarray(obs) for obs in kept[:3]], out=out)
    for other in ([1], np.ma.masked_all((3, 4, 84, 84), np.uint8)):
        with pytest.raises(TypeError, match="NumPy array"):
            decompress_batch(kept[:3], out=other)


def test_nothing_is_written_when_a_leaf_does_not_fit():
    seen = play(CompressObservation(AnyEnv(MIXED)), 5)
    want = stacked([plain(observation) for observation in seen])
    out = {
        "image": np.full_like(want["image"], 7),
        "inner": (np.empty_like(want["inner"][0]), np.empty(3)),
        "name": np.empty_like(want["name"]),
    }
    with pytest.raises(ValueError, match="out is expected to have shape"):
        decompress_batch(seen, out=out)
    assert (out["image"] == 7).all()
    for wrong in ({}, {**out, "more": 1}, (1, 2)):
        with pytest.raises(ValueError, match="Expected out for observation"):
            decompress_batch(seen, out=wrong)


OBS = CompressedObservation.from_frames([np.zeros((3, 2), np.uint8)] * 2)


@pytest.mark.parametrize(
    ("batch", "error", "message"),
    [
        ([], ValueError, "empty batch"),
        (7, TypeError, "list of observations"),
        (None, TypeError, "list of observations"),
        (OBS, TypeError, "list of observations"),
        ({"a": OBS}, TypeError, "list of observations"),
        ("abc", TypeError, "list of observations"),
        ({1, 2}, TypeError, "list of observations"),
        ([None], TypeError, "observation 0"),
        ([OBS, object()], TypeError, "observation 1"),
        ([OBS, OBS, np.zeros((2, 3, 3), np.uint8)], ValueError, r"observation 2 .*\(2, 3, 2\).*\(2, 3, 3\)"),
        (
            [OBS, CompressedObservation.from_frames([np.zeros((3, 2))] * 2)],
            ValueError,
            "observation 1.*uint8.*float64",
        ),
        ([np.zeros(3), OBS], ValueError, "observation 1"),
        ([{"a": OBS}, {"a": OBS, "b": OBS}], ValueError, r"observation 1 .*\['a'\].*\['a', 'b'\]"),
        ([{"a": OBS}, OBS], ValueError, "observation 1 to be a dict"),
        ([(OBS, OBS), (OBS,)], ValueError, "observation 1 to be a tuple of 2"),
        ([{"a": (OBS, 1)}, {"a": (OBS, 2.5)}], ValueError, r"observation\['a'\]\[1\] 1 .*int64.*float64"),
    ],
)
def test_bad_batches_are_refused(batch, error, message):
    with pytest.raises(error, match=message):
        decompress_batch(batch)


def test_empty_and_zero_dimensional_leaves():
    for shape in [(0,), (2, 0, 3), ()]:
        compress = compressor(spaces.Box(-1, 1, shape, np.float32), frames_per_chunk=2)
        frames = [np.full(shape, i / 10, np.float32) for i in range(7)]
        kept = [compress(frame) for frame in frames]
        assert_same(decompress_batch(kept), np.stack(frames))


def test_readers_beside_a_writer_get_whole_observations():
    env = CompressedFrameStack(MovingSquare(episode=50), 4, frames_per_chunk=3)
    kept = [env.reset(seed=1)[0]]
    want = [np.asarray(kept[0])]
    stop, wrong = threading.Event(), []

    def read():
        rng = random.Random(threading.get_ident())
        while not stop.is_set():
            count = len(want)
            picked = [rng.randrange(max(0, count - 20), count) for _ in range(8)]
            batch = decompress_batch([kept[i] for i in picked])
            wrong.extend(i for row, i in zip(batch, picked, strict=True) if not np.array_equal(row, want[i]))

    readers = [threading.Thread(target=read) for _ in range(3)]
    for reader in readers:
        reader.start()
    for _ in range(3000):
        obs, _, _, truncated, _ = env.step(0)
        obs = env.reset()[0] if truncated else obs
        kept.append(obs)
        want.append(np.asarray(obs))
    stop.set()
    for reader in readers:
        reader.join()
    assert not wrong


def test_keys_of_a_dict_are_no_observations():
    with pytest.raises(TypeError, match="got strings: are they the keys of a Dict observation"):
        decompress_batch(["image", "vector"])
