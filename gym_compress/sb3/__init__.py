"""Stable-Baselines3's buffers with compressed observations: thin, they hold stores where SB3 holds arrays.

Hand them to an algorithm as ``replay_buffer_class=`` or ``rollout_buffer_class=``. They draw from
``np.random`` in SB3's order, so every batch, and all that is trained on it, equals SB3's own.
"""

from gym_compress.sb3.buffers import (
    CompressedDictReplayBuffer,
    CompressedHerReplayBuffer,
    CompressedNStepReplayBuffer,
    CompressedReplayBuffer,
)
from gym_compress.sb3.callbacks import CheckpointReplayCallback
from gym_compress.sb3.rollouts import CompressedDictRolloutBuffer, CompressedRolloutBuffer

__all__ = [
    "CheckpointReplayCallback",
    "CompressedDictReplayBuffer",
    "CompressedDictRolloutBuffer",
    "CompressedHerReplayBuffer",
    "CompressedNStepReplayBuffer",
    "CompressedReplayBuffer",
    "CompressedRolloutBuffer",
]
