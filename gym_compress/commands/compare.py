"""What compression does for an environment: memory, step time and batch time of a recording of it."""

from __future__ import annotations

import ctypes
import functools
import gc
import importlib
import itertools
import multiprocessing
import operator
import os
import platform
import random
import re
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from gym_compress.batch import decompress_batch
from gym_compress.codec import resolve_codec
from gym_compress.errors import GymCompressError
from gym_compress.spaces import is_image, space_of
from gym_compress.tree import iter_leaves, map_leaves, map_space
from gym_compress.wrappers.frame_stack import CompressedFrameStack

DEFAULT_CODECS = ("auto", "lz4:5", "lz4hc:5", "zstd:1", "zstd:5")

# What is kept while memory is measured: this many observations, or as many as grow the process by this many
# bytes.
_KEPT = 40_000
_GROWTH = 300_000_000
_BATCH = 32
_STATM = Path("/proc/self/statm")


@dataclass(frozen=True)
class Row:
    """One line of the comparison.

    Attributes:
        method: What keeps the observations.
        codec: With which codec, ``"none"``, or ``"-"`` if there is no choice.
        bytes_per_observation: Resident bytes of a kept observation, Python objects included.
        ratio: How many times smaller that is than with FrameStackObservation.
        step_us: Microseconds that the wrapper adds to a step.
        batch_us: Microseconds to make one array of 32 random observations.
        gb_per_million: Gigabytes of a list of a million transitions, whose next observations are each
            other's.
    """

    method: str
    codec: str
    bytes_per_observation: float
    ratio: float
    step_us: float
    batch_us: float
    gb_per_million: float

    @property
    def label(self) -> str:
        """The method and codec, for people."""
        return self.method if self.codec == "-" else f"{self.method} {self.codec}"


@dataclass(frozen=True)
class Recording:
    """The images of an environment played with random actions.

    Attributes:
        images: For each image of an observation, named by its place, an array ``(steps, *shape)``.
        first: Whether an observation is the first of an episode, ``(steps,)`` bool.
    """

    images: dict[str, NDArray[Any]]
    first: NDArray[np.bool_]

    @property
    def nbytes(self) -> int:
        """Bytes of the images of one observation."""
        return sum(image[0].nbytes for image in self.images.values())

    def save(self, folder: Path) -> None:
        """Writes the arrays to a folder, for :meth:`load`."""
        arrays: dict[str, Any] = {**self.images, "first": self.first}
        np.savez(folder / "recording.npz", **arrays)

    @classmethod
    def load(cls, folder: Path) -> Recording:
        """Reads what :meth:`save` wrote into memory."""
        with np.load(folder / "recording.npz") as file:
            arrays = dict(file)
        return cls(first=arrays.pop("first"), images=arrays)


class Replay(gym.Env[Any, Any]):
    """Plays a recording in a loop, so that what is measured is a wrapper and not an emulator."""

    def __init__(self, recording: Recording) -> None:
        images = recording.images
        self._images: Any = images if len(images) > 1 else next(iter(images.values()))
        self._first = recording.first
        self.observation_space = space_of(self._images, axes=1)
        self.action_space = spaces.Discrete(1)
        self._at = -1

    def _next(self) -> Any:
        self._at = (self._at + 1) % len(self._first)
        return map_leaves(lambda image: image[self._at].copy(), self._images)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """The next observation of the recording, and no info."""
        super().reset(seed=seed)
        return self._next(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """The next observation, with ``truncated`` before one that is the first of an episode."""
        observation = self._next()
        last = bool(self._first[(self._at + 1) % len(self._first)])
        return observation, 0.0, False, last, {}


def make_env(env_id: str, preprocess: bool = True) -> gym.Env[Any, Any]:
    """Makes an environment.

    Args:
        env_id: As for ``gymnasium.make``: ``"name"`` or ``"module:name"``.
        preprocess: Whether an Atari game gets Gymnasium's AtariPreprocessing.

    Raises:
        GymCompressError: If it is unknown, or needs a package that is not installed.
    """
    try:
        import ale_py
    except ImportError:
        if env_id.startswith("ALE/"):
            raise GymCompressError(
                'Atari games need ale-py and opencv: pip install "gym-compress[atari]"'
            ) from None
    else:
        gym.register_envs(ale_py)
    module, _, name = env_id.rpartition(":")
    try:
        if module:
            importlib.import_module(module)
        if not preprocess or "ale_py" not in str(gym.spec(name).entry_point):
            return gym.make(name)
        return gym.wrappers.AtariPreprocessing(gym.make(name, frameskip=1))
    except gym.error.DependencyNotInstalled as error:
        raise GymCompressError(f'{env_id}: {_line(error)} (pip install "gym-compress[atari]")') from None
    except Exception as error:
        raise GymCompressError(f"{env_id}: {_line(error)}") from error


def _line(error: Exception) -> str:
    """An error in one line: its message, and its type where that is not Gymnasium's or missing modules'."""
    text = " ".join(str(error).split())
    return text if isinstance(error, (gym.error.Error, ImportError)) else f"{type(error).__name__}: {text}"


def image_places(space: spaces.Space[Any]) -> dict[str, tuple[Any, ...]]:
    """The images in an observation space: Boxes of two dimensions or more that wrappers compress.

    Returns:
        For each image its name and the keys that lead to it through Dict and Tuple spaces.

    Raises:
        GymCompressError: If there is none.
    """
    places = {
        "".join(f"[{key!r}]" for key in keys): keys
        for keys, sub in iter_leaves(map_space(lambda sub: sub, space))
        if is_image(sub) or (sub is space and isinstance(sub, spaces.Box) and len(sub.shape) >= 2)
    }
    if not places:
        raise GymCompressError(f"no image among the observations: {' '.join(str(space).split())}")
    return places


def record(env: gym.Env[Any, Any], steps: int, seed: int | None, advance: Callable[[], object]) -> Recording:
    """Plays an environment with random actions and keeps its images.

    Args:
        env: The environment.
        steps: How many observations are kept.
        seed: Seeds the environment and the actions.
        advance: Called once an observation.

    Raises:
        GymCompressError: If the observations hold no image.
    """
    places = image_places(env.observation_space)
    kept: dict[str, list[NDArray[Any]]] = {name: [] for name in places}
    first: list[bool] = []
    try:
        env.action_space.seed(seed)
        for observation, begins in itertools.islice(_play(env, env.action_space.sample, seed), steps):
            first.append(begins)
            for name, keys in places.items():
                kept[name].append(np.array(functools.reduce(operator.getitem, keys, observation)))
            advance()
        return Recording({name: np.stack(images) for name, images in kept.items()}, np.array(first))
    except Exception as error:
        raise GymCompressError(f"recording failed: {_line(error)}") from error


def compare(
    recording: Recording,
    codecs: Sequence[str],
    stack_size: int,
    frames_per_chunk: int | None,
    advance: Callable[[str], object],
) -> list[Row]:
    """Measures each way to keep stacked observations, in a fresh process each.

    Args:
        recording: What is played.
        codecs: Codecs for CompressedFrameStack, as strings; a codec that stands twice is measured once.
        stack_size: Frames in an observation.
        frames_per_chunk: Frames compressed together, or ``None``.
        advance: Called with a description before each measurement.

    Returns:
        A row for Gymnasium's FrameStackObservation, one for frames that are shared but not compressed, and
        one for CompressedFrameStack with each codec.
    """
    methods = [("FrameStackObservation", "-"), ("SharedFrames", "none")]
    methods += [("CompressedFrameStack", _resolved(codec, recording)) for codec in codecs]
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as folder:
        recording.save(Path(folder))
        context = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(1, mp_context=context, max_tasks_per_child=1) as fresh:
            for method, codec in dict.fromkeys(methods):
                advance(f"{method} {codec}")
                task = fresh.submit(_measure, folder, codec, stack_size, frames_per_chunk)
                try:
                    size, step_us, batch_us = task.result()
                except (GymCompressError, MemoryError, BrokenProcessPool) as error:
                    raise GymCompressError(f"measuring {method} {codec} failed: {_line(error)}") from error
                plain = rows[0].bytes_per_observation if rows else size
                rows.append(Row(method, codec, size, plain / size, step_us, batch_us, size * 1e6 / 1e9))
    return rows


def _resolved(codec: str, recording: Recording) -> str:
    """The codec that an argument means, or the argument itself if it means another for each image."""
    meant = {str(resolve_codec(codec, image[0].nbytes)) for image in recording.images.values()}
    return meant.pop() if len(meant) == 1 else codec


def _measure(
    folder: str, codec: str, stack_size: int, frames_per_chunk: int | None
) -> tuple[float, float, float]:
    """Resident bytes of a kept observation, microseconds added to a step, microseconds of a batch."""
    recording = Recording.load(Path(folder))

    def wrapped() -> gym.Env[Any, Any]:
        if codec == "-":
            return gym.wrappers.FrameStackObservation(Replay(recording), stack_size)
        return CompressedFrameStack(
            Replay(recording), stack_size, codec=codec, frames_per_chunk=frames_per_chunk
        )

    stream = _play(wrapped())
    for _ in range(50):
        next(stream)
    kept: list[Any] = []
    portion = max(_BATCH, min(1000, _GROWTH // 10 // (stack_size * recording.nbytes)))
    before = _resident()
    while len(kept) < _KEPT and _resident() - before < _GROWTH:
        kept.extend(observation for observation, _ in itertools.islice(stream, portion))
    size = (_resident() - before) / len(kept)
    return size, _added(wrapped(), Replay(recording)), _batch(kept, plain=codec == "-")


def _play(
    env: gym.Env[Any, Any], act: Callable[[], Any] = lambda: 0, seed: int | None = None
) -> Iterator[tuple[Any, bool]]:
    """The observations of an environment without an end, and whether each is the first of an episode."""
    while True:
        observation, _ = env.reset(seed=seed)
        done, seed = False, None
        yield observation, True
        while not done:
            observation, _, terminated, truncated, _ = env.step(act())
            done = terminated or truncated
            yield observation, False


def _added(wrapped: gym.Env[Any, Any], bare: gym.Env[Any, Any]) -> float:
    """Median of what a wrapper adds to a step, over runs of both in turn."""
    ours, theirs = _play(wrapped), _play(bare)
    run = 240
    added = []
    for _ in range(9):
        start = time.perf_counter()
        for _ in itertools.islice(ours, run):
            pass
        middle = time.perf_counter()
        for _ in itertools.islice(theirs, run):
            pass
        added.append((2 * middle - start - time.perf_counter()) / run * 1e6)
    return statistics.median(added[1:])


def _batch(kept: list[Any], plain: bool) -> float:
    """Median time to make a batch of random observations."""
    rng = random.Random(0)
    times = []
    for _ in range(100):
        batch = [kept[rng.randrange(len(kept))] for _ in range(_BATCH)]
        start = time.perf_counter()
        if plain:
            map_leaves(lambda *leaves: np.stack(leaves), *batch)
        else:
            decompress_batch(batch)
        times.append((time.perf_counter() - start) * 1e6)
    return statistics.median(times)


def _resident() -> int:
    """Resident bytes of this process, after free memory was given back."""
    gc.collect()
    if sys.platform == "linux" and platform.libc_ver()[0] == "glibc":
        ctypes.CDLL("libc.so.6").malloc_trim(0)
    return int(_STATM.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def check_machine() -> None:
    """Raises a GymCompressError where resident memory cannot be measured."""
    if not _STATM.exists():
        raise GymCompressError(f"resident memory is read from {_STATM}, which this system lacks")


def machine() -> str:
    """The processor, its cores, and Python's version, for a report."""
    info = Path("/proc/cpuinfo")
    model = re.search(r"model name\s*:\s*(.*\S)", info.read_text()) if info.exists() else None
    name = model[1] if model else platform.processor() or platform.machine()
    return f"{name}, {os.cpu_count()} cores, Python {platform.python_version()}, {platform.system()}"


def report(env_id: str, recording: Recording, rows: list[Row], **settings: Any) -> dict[str, Any]:
    """The comparison as JSON holds it."""
    return {
        "env": env_id,
        "steps": len(recording.first),
        "rows": [asdict(row) for row in rows],
        "images": {key: [list(image.shape[1:]), str(image.dtype)] for key, image in recording.images.items()},
        "machine": machine(),
        "versions": {name: version(name) for name in ("gym-compress", "blosc2", "gymnasium", "numpy")},
        **settings,
    }


def plot(env_id: str, rows: list[Row], path: str) -> None:
    """Draws resident bytes of an observation as a bar chart, and writes it as a PNG."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 1.2 + 0.45 * len(rows)), layout="constrained")
    axes = figure.subplots()
    sizes = [row.bytes_per_observation for row in rows]
    colours = ["#2a7f62" if row.method == "CompressedFrameStack" else "#9aa5b1" for row in rows]
    bars = axes.barh([row.label for row in rows], sizes, color=colours)
    labels = [f" {size:,.0f} B, {row.ratio:,.0f}x smaller" for size, row in zip(sizes, rows, strict=True)]
    axes.bar_label(bars, [f" {sizes[0]:,.0f} B", *labels[1:]])
    axes.set_xlim(0, 1.3 * max(sizes))
    axes.invert_yaxis()
    axes.set_xlabel("resident bytes of an observation")
    axes.set_title(f"{env_id}: what a kept observation costs")
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, format="png", dpi=120)
