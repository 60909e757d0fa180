"""Wrappers for :class:`gymnasium.Env` whose observations are compressed."""

from gym_compress.wrappers.atari import CompressedAtariPreprocessing
from gym_compress.wrappers.compress import CompressObservation
from gym_compress.wrappers.frame_stack import CompressedFrameStack

__all__ = ["CompressObservation", "CompressedAtariPreprocessing", "CompressedFrameStack"]
