"""What replay memory gives: batches of transitions, decoded or compressed."""

from __future__ import annotations

import pickle
import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from gym_compress.codec import Codec, check_encoded, decode
from gym_compress.errors import CorruptDataError
from gym_compress.replay.parcel import ImageParcel
from gym_compress.replay.store import Empty, read_references
from gym_compress.replay.transitions import Transitions
from gym_compress.tree import map_leaves

__all__ = [
    "CompressedSamples",
    "ReplaySamples",
    "gather_samples",
    "make_samples",
    "to_device",
    "torch_device",
]


# What pickled samples are compressed with once more, on their way.
_WIRE_CODEC = Codec("zstd", 1)

_ALIGNED = 16  # bytes, where tensors begin that are moved to a device together


class ReplaySamples(NamedTuple):
    """A batch of transitions: torch tensors on the buffer's device, or NumPy arrays if it has none.

    All are C-contiguous, writable, and share memory with nothing.

    Attributes:
        observations: ``(batch_size, *observation)``, of the space's dtype; a dict or tuple of these for such
            a space.
        actions: ``(batch_size, action_dim)``.
        next_observations: As ``observations``.
        dones: ``(batch_size, 1)`` float32: 1 where the episode terminated, 0 also where a time limit ended it
            if the buffer handles timeouts.
        rewards: ``(batch_size, 1)`` float32.
    """

    observations: Any
    actions: Any
    next_observations: Any
    dones: Any
    rewards: Any


class CompressedSamples:
    """Transitions with their observations compressed: each chunk that they touch once, so they stand alone.

    :meth:`gym_compress.CompressedReplayBuffer.take` and ``ShardedReplay.sample_compressed`` give them,
    :meth:`decompress` decodes them, and :meth:`gym_compress.CompressedReplayBuffer.adopt` takes them over as
    they are. Their pickle is what crosses a wire; a chunk that is damaged on the way is found by a checksum.

    Example:
        >>> import gymnasium as gym
        >>> import numpy as np
        >>> from gym_compress import CompressedReplayBuffer
        >>> space = gym.spaces.Box(0, 255, (4, 84, 84), np.uint8)
        >>> rb = CompressedReplayBuffer(1000, space, gym.spaces.Discrete(6), device=None)
        >>> obs = np.zeros((1, 4, 84, 84), np.uint8)
        >>> for reward in range(100):
        ...     rb.add(obs, obs, np.array([0]), np.array([reward]), np.array([False]), [{}])
        >>> samples = rb.take(np.array([3, 50, 3]))
        >>> len(samples)
        3
        >>> samples.decompress(device=None).rewards.ravel()
        array([ 3., 50.,  3.], dtype=float32)
    """

    __slots__ = ("arrays", "images", "leaves")

    def __init__(self, leaves: Any, arrays: dict[str, NDArray[Any]], images: list[ImageParcel]) -> None:
        """Made by replay memory; not meant to be called.

        Args:
            leaves: A tree of the observation space, with the number of each leaf.
            arrays: What is kept as arrays, ``(n, ...)`` each, by the names of FORMAT.md.
            images: The leaves that are images, in their order.
        """
        self.leaves = leaves
        self.arrays = arrays
        self.images = images

    def __len__(self) -> int:
        """The number of transitions."""
        return len(self.arrays["rewards"])

    def decompress(self, device: Any = "auto") -> ReplaySamples:
        """Decodes all transitions, each chunk once.

        Args:
            device: Where they go: a torch device or its name, ``"auto"`` for CUDA if there is, the CPU if
                there is only torch, and NumPy arrays if there is no torch, or ``None`` for NumPy arrays.

        Raises:
            CorruptDataError: If a chunk cannot be decoded.
        """
        (samples,) = self.decompress_parts(max(len(self), 1), device)
        return samples

    def decompress_parts(
        self, size: int, device: Any = "auto", empty: Empty = np.empty
    ) -> Iterator[ReplaySamples]:
        """Decodes the transitions in batches, one after another.

        Args:
            size: How many transitions make a batch; of the last one, it may be fewer.
            device: As for :meth:`decompress`.
            empty: Makes the arrays of images, as NumPy's does.
        """
        device = torch_device(device)
        indexes = [image.indexed() for image in self.images]
        for start in range(0, max(len(self), 1), size):
            rows = slice(start, start + size)
            arrays = {name: values[rows].copy() for name, values in self.arrays.items()}
            references = iter([image.references[:, rows].ravel() for image in self.images])
            images = iter(
                [
                    read_references(index, np.zeros_like(own), own, 2, empty)
                    for index, own in zip(indexes, references, strict=True)
                ]
            )
            pairs = map_leaves(
                lambda number, arrays=arrays, images=images: (
                    [arrays[f"observations.{number}"], arrays[f"next_observations.{number}"]]
                    if f"observations.{number}" in arrays
                    else next(images)
                ),
                self.leaves,
            )
            obs, next_obs = (map_leaves(lambda _, pair, i=i: pair[i], self.leaves, pairs) for i in (0, 1))
            yield make_samples(obs, next_obs, arrays, device=device)

    def select(self, indices: Any) -> Self:
        """Some of the transitions, in another order; the chunks remain.

        Args:
            indices: What NumPy takes as an index of an axis.
        """
        arrays = {name: values[indices] for name, values in self.arrays.items()}
        return type(self)(self.leaves, arrays, [image.select(indices) for image in self.images])

    @classmethod
    def join(cls, parts: Sequence[Self]) -> Self:
        """The transitions of several, at least one and all of one kind, one after another."""
        if len(parts) == 1:
            return parts[0]
        arrays = {name: np.concatenate([part.arrays[name] for part in parts]) for name in parts[0].arrays}
        images = zip(*(part.images for part in parts), strict=True)
        return cls(parts[0].leaves, arrays, [ImageParcel.join(each) for each in images])

    def followed(self, n_envs: int) -> NDArray[np.bool_]:
        """Where the observation of the next row is the next observation of a transition, in the same chunks.

        Args:
            n_envs: How many transitions make a row.

        Returns:
            ``(n,)`` bool; True for the last row.
        """
        followed = np.ones(len(self), np.bool_)
        for image in self.images:
            followed[:-n_envs] &= image.followed(n_envs)
        for name, values in self.arrays.items():
            if name.startswith("observations."):
                pairs = zip(values[n_envs:], self.arrays[f"next_{name}"][:-n_envs], strict=True)
                followed[:-n_envs] &= np.array([a.tobytes() == b.tobytes() for a, b in pairs], np.bool_)
        return followed

    def check(self, like: Self) -> None:
        """Checks that these are of the kind of others, and all that adopting relies on.

        Raises:
            ValueError: If they are of another kind.
            CorruptDataError: If something is not as it must be.
        """
        ours, theirs = (
            {"observations": each.leaves, **{name: (a.dtype, a.shape[1:]) for name, a in each.arrays.items()}}
            for each in (self, like)
        )
        pairs = [(name, ours.get(name), theirs.get(name)) for name in [*theirs, *ours]]
        if ours == theirs:
            if len(self.images) != len(like.images):
                raise CorruptDataError(f"Expected {len(like.images)} images, got {len(self.images)}")
            images = zip(self.images, like.images, strict=True)
            pairs += [("stacks", image.slicing, other.slicing) for image, other in images]
        for name, our, their in pairs:
            if our != their:
                raise ValueError(
                    f"Expected transitions with {name} {their}, got {our}: both buffers need the same spaces "
                    "and stacks"
                )
        for image in self.images:
            image.check()
        counts = {len(values) for values in self.arrays.values()}
        if counts | {image.references.shape[1] for image in self.images} != {len(self)}:
            raise CorruptDataError("Parts of transitions differ in number")

    def __reduce__(self) -> tuple[Any, ...]:
        # in one piece, into which others that pickle need not look; and since what LZ4 leaves, and what
        # chunks of one game have in common, makes half of it or more
        data = np.frombuffer(
            pickle.dumps((self.leaves, self.arrays, self.images), pickle.HIGHEST_PROTOCOL), np.uint8
        )
        encoded = _WIRE_CODEC.encode(data, 1)
        return _restore, (encoded, data.nbytes, zlib.crc32(encoded))

    def __repr__(self) -> str:
        chunks = sum(len(image.contents) for image in self.images)
        cbytes = sum(len(content) for image in self.images for content in image.contents)
        return f"CompressedSamples({len(self)} transitions, {chunks} chunks of {cbytes} bytes)"


def _restore(encoded: bytes, nbytes: int, checksum: int) -> CompressedSamples:
    """Samples from a pickle; the checksum finds damage that Blosc2 would decode into something else."""
    if zlib.crc32(encoded) != checksum:
        raise CorruptDataError(f"Compressed transitions of {len(encoded)} bytes do not have their checksum")
    check_encoded(encoded, nbytes)
    data = np.empty(nbytes, np.uint8)
    decode(encoded, data)
    return CompressedSamples(*pickle.loads(data.data))


def gather_samples(
    table: Transitions,
    rows: NDArray[Any],
    envs: NDArray[Any],
    *,
    env: Any = None,
    device: Any = None,
    empty: Empty = np.empty,
) -> ReplaySamples:
    """The transitions in some places of a table; see :func:`make_samples`.

    Args:
        table: The table.
        rows: Their rows, an array of any shape.
        envs: Their environments, of the same shape.
        env: An SB3 ``VecNormalize``, or ``None``.
        device: A torch device, or ``None`` for NumPy arrays.
        empty: Makes the arrays of images, as NumPy's does.
    """
    arrays = {name: getattr(table, name)[rows, envs] for name in ("actions", "rewards", "dones", "timeouts")}
    return make_samples(*table.gather(rows, envs, empty), arrays, env=env, device=device)


def make_samples(
    obs: Any, next_obs: Any, arrays: Mapping[str, NDArray[Any]], *, env: Any = None, device: Any = None
) -> ReplaySamples:
    """A batch of transitions.

    Args:
        obs: Observations.
        next_obs: Next observations.
        arrays: The other fields, with ``timeouts``, by the names of FORMAT.md.
        env: An SB3 ``VecNormalize`` to normalise observations and rewards with, or ``None``.
        device: A torch device, or ``None`` for NumPy arrays.
    """
    rewards = arrays["rewards"][..., None]
    if env is not None:
        obs, next_obs = env.normalize_obs(obs), env.normalize_obs(next_obs)
        rewards = env.normalize_reward(rewards).astype(np.float32)
    dones = (arrays["dones"] * (1 - arrays["timeouts"]))[..., None]
    samples = ReplaySamples(obs, arrays["actions"], next_obs, dones, rewards)
    return samples if device is None else ReplaySamples(*to_device(tuple(samples), device))


def to_device(tree: Any, device: Any) -> Any:
    """Arrays as torch tensors, which nothing shares.

    On the CPU they are the arrays' memory; to another device, all go together in one transfer.
    """
    import torch

    tensors = map_leaves(torch.from_numpy, tree)
    if device.type == "cpu":
        return tensors
    parts: list[NDArray[np.uint8]] = []
    starts: list[int] = []

    def pack(array: NDArray[Any]) -> None:
        starts.append(sum(map(len, parts)))
        parts.append(np.ascontiguousarray(array).reshape(-1).view(np.uint8))
        parts.append(np.zeros(-array.nbytes % _ALIGNED, np.uint8))

    map_leaves(pack, tree)
    moved = torch.from_numpy(np.concatenate(parts)).to(device)
    place = iter(starts)

    def unpack(tensor: Any) -> Any:
        start = next(place)
        part = moved[start : start + tensor.nbytes]
        return part.view(tensor.dtype).view(tensor.shape).clone()

    return map_leaves(unpack, tensors)


def torch_device(device: Any) -> Any:
    """The torch device that an argument means, or None for NumPy arrays."""
    if device is None:
        return None
    if device == "auto":
        try:
            import torch
        except ImportError:
            return None
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    import torch

    return torch.device(device)
