"""Wrappers whose observations are compressed; those for vector environments are in ``vector``."""

from gym_compress.wrappers import vector
from gym_compress.wrappers.atari import CompressedAtariPreprocessing
from gym_compress.wrappers.compress import CompressObservation
from gym_compress.wrappers.frame_stack import CompressedFrameStack

__all__ = ["CompressObservation", "CompressedAtariPreprocessing", "CompressedFrameStack", "vector"]
