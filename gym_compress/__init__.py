"""Compressed observations for reinforcement learning on images: small in memory, quick to read, lossless."""

from gym_compress.batch import CompressedBatch, decompress_batch
from gym_compress.codec import Codec
from gym_compress.errors import CorruptDataError, GymCompressError
from gym_compress.observation import CompressedObservation
from gym_compress.replay.buffer import CompressedReplayBuffer
from gym_compress.replay.samples import CompressedSamples
from gym_compress.spaces import CompressedBox
from gym_compress.wrappers import CompressedAtariPreprocessing, CompressedFrameStack, CompressObservation

__all__ = [
    "Codec",
    "CompressObservation",
    "CompressedAtariPreprocessing",
    "CompressedBatch",
    "CompressedBox",
    "CompressedFrameStack",
    "CompressedObservation",
    "CompressedReplayBuffer",
    "CompressedSamples",
    "CorruptDataError",
    "GymCompressError",
    "decompress_batch",
]

__version__ = "0.1.0"
