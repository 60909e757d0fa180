"""Replay memory across processes and machines, on Ray.

Collectors add through a :class:`ReplayWriter`, which compresses where the environment runs. Shards, which are
Ray actors, keep what is compressed and pick from it. The learner decodes.
"""

from importlib.util import find_spec

from gymnasium.error import DependencyNotInstalled

if find_spec("ray") is None:
    raise DependencyNotInstalled("Ray is not installed, run `pip install 'gym-compress[ray]'`")

from gym_compress.ray.sharded import ShardedReplay
from gym_compress.ray.writer import ReplayWriter

__all__ = ["ReplayWriter", "ShardedReplay"]
