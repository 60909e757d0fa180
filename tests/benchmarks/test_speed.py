"""Times of encode, decode, a step and a batch.

    pytest tests/benchmarks

Each group holds what it is to be compared with: read the groups, not the absolute times.
"""

from __future__ import annotations

import itertools
import random

import ale_py
import gymnasium as gym
import numpy as np
import pytest
from gymnasium.vector import SyncVectorEnv
from gymnasium.wrappers import AtariPreprocessing, FrameStackObservation

from gym_compress import (
    Codec,
    CompressedFrameStack,
    CompressedReplayBuffer,
    CompressObservation,
    decompress_batch,
)
from gym_compress.codec import decode
from gym_compress.commands.compare import Replay, record
from gym_compress.wrappers import vector
from tests.envs import compressor

CODECS = ["lz4:5", "lz4hc:5", "zstd:1", "zstd:5"]


@pytest.fixture(scope="session")
def recording():
    gym.register_envs(ale_py)
    return record(
        AtariPreprocessing(gym.make("ALE/Seaquest-v5", frameskip=1)), 3000, seed=0, advance=lambda: None
    )


@pytest.fixture(scope="session")
def chunks(recording):
    frames = recording.images[""]
    return [frames[i : i + 12].reshape(-1) for i in range(0, len(frames) - 12, 12)]


@pytest.mark.benchmark(group="encode a chunk of 12 frames, 84x84")
@pytest.mark.parametrize("codec", CODECS)
def test_encode(benchmark, chunks, codec):
    codec, turn = Codec.from_string(codec), itertools.cycle(chunks)
    benchmark(lambda: codec.encode(next(turn), 1))


@pytest.mark.benchmark(group="decode a chunk of 12 frames, 84x84")
@pytest.mark.parametrize("codec", CODECS)
def test_decode(benchmark, chunks, codec):
    codec, out = Codec.from_string(codec), np.empty_like(chunks[0])
    turn = itertools.cycle([codec.encode(chunk, 1) for chunk in chunks])
    benchmark(lambda: decode(next(turn), out))


WRAPPERS = {
    "bare": lambda env: env,
    "FrameStackObservation": lambda env: FrameStackObservation(env, 4),
    "CompressObservation": CompressObservation,
    "CompressedFrameStack": lambda env: CompressedFrameStack(env, 4),
    "CompressedFrameStack over CompressObservation": lambda env: CompressedFrameStack(
        CompressObservation(env), 4
    ),
}


@pytest.mark.benchmark(group="120 steps of a recording")
@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_step(benchmark, recording, wrapper):
    env = WRAPPERS[wrapper](Replay(recording))
    env.reset()
    benchmark(lambda: [env.step(0) for _ in range(120)])


def _kept(env, count=20_000):
    return [env.reset()[0], *[env.step(0)[0] for _ in range(count)]]


@pytest.mark.benchmark(group="batch of 32 stacks, 4x84x84")
@pytest.mark.parametrize("kind", ["np.stack over arrays", "no compression", *CODECS, "auto, neighbours"])
def test_batch(benchmark, recording, kind):
    rng = random.Random(0)
    if kind == "np.stack over arrays":
        kept = _kept(FrameStackObservation(Replay(recording), 4), 3000)
        benchmark(lambda: np.stack([kept[rng.randrange(3000)] for _ in range(32)]))
        return
    codec = {"no compression": "none", "auto, neighbours": "auto"}.get(kind, kind)
    kept = _kept(CompressedFrameStack(Replay(recording), 4, codec=codec))
    if kind == "auto, neighbours":
        benchmark(lambda: decompress_batch(kept[7000:7032]))
    else:
        benchmark(lambda: decompress_batch([kept[rng.randrange(19_900)] for _ in range(32)]))


@pytest.mark.benchmark(group="batch of 32 small leaves")
@pytest.mark.parametrize("compressed", [False, True], ids=["np.stack", "decompress_batch"])
@pytest.mark.parametrize("nbytes", [256, 1024, 4096])
def test_leaf(benchmark, nbytes, compressed):
    frames = np.zeros((5000, nbytes), np.uint8)
    for i, frame in enumerate(frames):
        frame[3 * i % nbytes :][: nbytes // 8] = 200
    compress = compressor(gym.spaces.Box(0, 255, (nbytes,), np.uint8))
    kept = [compress(frame) if compressed else frame.copy() for frame in frames]
    read = decompress_batch if compressed else np.stack
    rng = random.Random(0)
    benchmark(lambda: read([kept[rng.randrange(5000)] for _ in range(32)]))


@pytest.mark.benchmark(group="64 steps of ALE's 8 environments, Seaquest")
@pytest.mark.parametrize("codec", [None, "none", "lz4hc:5", "auto"], ids=str)
def test_vector_step(benchmark, codec):
    env = ale_py.AtariVectorEnv("seaquest", num_envs=8)
    env = env if codec is None else vector.CompressObservation(env, codec=codec)
    env.reset(seed=0)
    actions = np.random.default_rng(0).integers(18, size=(64, 8))
    benchmark(lambda: [env.step(each) for each in actions])


@pytest.mark.benchmark(group="64 steps of 8 environments, a recording played back")
@pytest.mark.parametrize("stacked", ["in each environment", "compressed"])
def test_vector_stack(benchmark, recording, stacked):
    if stacked == "compressed":
        env = vector.CompressedFrameStack(SyncVectorEnv([lambda: Replay(recording)] * 8), 4)
    else:
        env = SyncVectorEnv([lambda: FrameStackObservation(Replay(recording), 4)] * 8)
    env.reset()
    actions = np.zeros(8, np.int64)
    benchmark(lambda: [env.step(actions) for _ in range(64)])


@pytest.fixture(scope="session")
def transitions(recording):
    """Stacks of a recording, as views, and what is stored with each."""
    stacks = np.lib.stride_tricks.sliding_window_view(recording.images[""], (4, 84, 84))[:, 0, 0]
    zero = np.zeros(1)
    return [(a[None], b[None], zero, zero, zero, [{}]) for a, b in itertools.pairwise(stacks)]


SPACES = gym.spaces.Box(0, 255, (4, 84, 84), np.uint8), gym.spaces.Discrete(18)


@pytest.mark.benchmark(group="add 120 transitions of 4x84x84")
@pytest.mark.parametrize("codec", ["none", *CODECS])
def test_add(benchmark, transitions, codec):
    buffer, turn = CompressedReplayBuffer(2000, *SPACES, None, codec=codec), itertools.cycle(transitions)
    benchmark(lambda: [buffer.add(*next(turn)) for _ in range(120)])


@pytest.mark.benchmark(group="sample 32 transitions of 4x84x84")
@pytest.mark.parametrize("kind", ["bytes copied, memory used again", "bytes copied", "none", *CODECS])
def test_sample(benchmark, transitions, kind):
    nbytes = 32 * 5 * 84 * 84  # each frame of obs and next_obs once
    if kind.startswith("bytes"):
        source, out = np.ones(nbytes, np.uint8), np.empty(nbytes, np.uint8)
        benchmark(source.copy if kind == "bytes copied" else lambda: np.copyto(out, source))
        return
    buffer = CompressedReplayBuffer(2000, *SPACES, None, codec=kind)
    for transition in transitions[:2000]:
        buffer.add(*transition)
    benchmark(lambda: buffer.sample(32))
