"""What replay memory gives: batches of transitions, decoded or compressed."""

from __future__ import annotations

import json
import pickle
import zlib
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import count
from typing import Any, NamedTuple, Self

import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from gym_compress.codec import Codec, check_encoded, decode
from gym_compress.errors import CorruptDataError
from gym_compress.replay.index import ChunkIndex
from gym_compress.replay.parcel import ImageParcel
from gym_compress.replay.settings import space_from_json, space_to_json
from gym_compress.replay.store import Empty, read_references
from gym_compress.slicing import Slicing
from gym_compress.spaces import is_image
from gym_compress.tree import map_leaves, map_space, replace_leaves

__all__ = [
    "CompressedSamples",
    "ReplaySamples",
    "layout_of_samples",
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

    __slots__ = ("arrays", "images", "layout")

    def __init__(self, layout: str, arrays: dict[str, NDArray[Any]], images: list[ImageParcel]) -> None:
        """Made by replay memory; not meant to be called.

        Args:
            layout: See :func:`layout_of_samples`.
            arrays: What is kept as arrays, ``(n, ...)`` each, by the names of FORMAT.md.
            images: The leaves of observations that are images.
        """
        self.layout = layout
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
        space, slicings = _reading(self.layout)
        indexes = [image.indexed(slicing) for image, slicing in zip(self.images, slicings, strict=True)]
        for start in range(0, max(len(self), 1), size):
            rows = slice(start, start + size)
            images = zip(indexes, [image.references[:, rows] for image in self.images], strict=True)
            arrays = {name: values[rows].copy() for name, values in self.arrays.items()}
            obs, next_obs = _observations(space, images, arrays, empty)
            yield make_samples(obs, next_obs, arrays, device=device)

    def select(self, indices: Any) -> Self:
        """Some of the transitions, in another order; the chunks remain.

        Args:
            indices: What NumPy takes as an index of an axis.
        """
        arrays = {name: values[indices] for name, values in self.arrays.items()}
        return type(self)(self.layout, arrays, [image.select(indices) for image in self.images])

    @classmethod
    def join(cls, parts: Sequence[Self]) -> Self:
        """The transitions of several, at least one and all of one kind, one after another."""
        if len(parts) == 1:
            return parts[0]
        arrays = {name: np.concatenate([part.arrays[name] for part in parts]) for name in parts[0].arrays}
        images = zip(*(part.images for part in parts), strict=True)
        return cls(
            parts[0].layout,
            arrays,
            [
                ImageParcel.join(each, slicing)
                for each, slicing in zip(images, _reading(parts[0].layout)[1], strict=True)
            ],
        )

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
            {name: (values.dtype, values.shape[1:]) for name, values in each.arrays.items()}
            for each in (self, like)
        )
        if (self.layout, ours) != (like.layout, theirs):
            ours, theirs = ours | json.loads(self.layout), theirs | json.loads(like.layout)
            name = next(
                name
                for name in [*json.loads(like.layout), *theirs, *ours]
                if ours.get(name) != theirs.get(name)
            )
            raise ValueError(
                f"Expected transitions with {name} {theirs.get(name)}, got {ours.get(name)}: both "
                "buffers need the same spaces and stacks"
            )
        _, slicings = _reading(self.layout)
        if len(self.images) != len(slicings):
            raise CorruptDataError(f"Expected {len(slicings)} images, got {len(self.images)}")
        for image, slicing in zip(self.images, slicings, strict=True):
            image.check(slicing)
        counts = {len(values) for values in self.arrays.values()}
        if counts | {image.references.shape[1] for image in self.images} != {len(self)}:
            raise CorruptDataError("Parts of transitions differ in number")

    def __reduce__(self) -> tuple[Any, ...]:
        # in one piece, into which others that pickle need not look; and since what LZ4 leaves, and what
        # chunks of one game have in common, makes half of it or more
        data = np.frombuffer(
            pickle.dumps((self.layout, self.arrays, self.images), pickle.HIGHEST_PROTOCOL), np.uint8
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


def layout_of_samples(space: spaces.Space[Any], slicings: list[Slicing]) -> str:
    """How observations are laid out, in few words: shapes and dtypes, not bounds, and how images are cut.

    Args:
        space: The space of an observation.
        slicings: Of each leaf that is an image.

    Raises:
        TypeError: If a space is of a kind that cannot be written down.
    """

    def plain(leaf: spaces.Space[Any]) -> spaces.Space[Any]:
        if not isinstance(leaf, spaces.Box):
            return leaf
        return spaces.Box(0, 1, leaf.shape, leaf.dtype.type)

    leaves = map_space(lambda _: None, space)
    spec = {
        "observations": space_to_json(replace_leaves(lambda leaf, _: plain(leaf), space, leaves)),
        "stacks": [(slicing.count, slicing.axis) for slicing in slicings],
    }
    return json.dumps(spec, separators=(",", ":"))


@lru_cache(maxsize=64)
def _reading(layout: str) -> tuple[spaces.Space[Any], list[Slicing]]:
    """The space that a layout tells of, and how its images are cut."""
    spec = json.loads(layout)
    space = space_from_json(spec["observations"])
    stacks = iter(spec["stacks"])
    slicings: list[Slicing] = []

    def leaf(leaf_space: spaces.Space[Any]) -> None:
        if is_image(leaf_space):
            slicings.append(Slicing(leaf_space.shape, leaf_space.dtype, *next(stacks)))

    map_space(leaf, space)
    return space, slicings


def _observations(
    space: spaces.Space[Any],
    images: Iterator[tuple[ChunkIndex, NDArray[np.int32]]],
    arrays: Mapping[str, NDArray[Any]],
    empty: Empty,
) -> list[Any]:
    """Observations and next observations of a space, from its images in their order, and arrays by name."""
    numbers = count()

    def leaf(leaf_space: spaces.Space[Any]) -> Sequence[NDArray[Any]]:
        number = next(numbers)
        if not is_image(leaf_space):
            return [arrays[f"{name}.{number}"] for name in ("observations", "next_observations")]
        index, references = next(images)
        return read_references(index, np.zeros(references.size, np.int64), references.ravel(), 2, empty)

    leaves, pairs = map_space(lambda _: None, space), map_space(leaf, space)
    return [map_leaves(lambda _, pair, i=i: pair[i], leaves, pairs) for i in (0, 1)]


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
