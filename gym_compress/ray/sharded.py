"""``ShardedReplay``: replay memory in several Ray actors."""

from __future__ import annotations

import os
import secrets
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Self

import numpy as np
import ray
from gymnasium import spaces
from ray.exceptions import RayError

from gym_compress.codec import Codec
from gym_compress.errors import GymCompressError, positive
from gym_compress.ray.actor import answer
from gym_compress.ray.manifest import MANIFEST, checked_sizes, read_manifest, write_manifest
from gym_compress.ray.shards import ActorOptions, Shards
from gym_compress.ray.writer import ReplayWriter
from gym_compress.replay.buffer import CompressedReplayBuffer
from gym_compress.replay.locks import fork_safe_lock
from gym_compress.replay.prefetch import Outputs, Prefetch
from gym_compress.replay.samples import CompressedSamples, ReplaySamples, torch_device
from gym_compress.replay.settings import element_nbytes, generator_from_json, generator_to_json

__all__ = ["ShardedReplay"]

# Of a request that is for several batches: how many, their transitions, and the bytes of these when decoded.
_MOST_BATCHES, _MOST_ASKED, _MOST_ASKED_NBYTES = 16, 2048, 2**27
_REQUESTS = 2  # on their way at once


class ShardedReplay:
    """Replay memory in several Ray actors, for many collectors and one or more learners.

    Frames cross the network compressed: writers encode them where the environments run, shards keep them as
    they came, and samples are decoded here.

    Each writer adds to one shard, which holds its part of ``buffer_size`` and evicts first in, first out. So
    have as many writers as shards, or a multiple, of about the same speed: with one writer, one shard fills.

    A shard that dies is restarted by Ray with its last checkpoint in ``folder``, or empty without one.
    Meanwhile sampling goes on from the others, after a second. What came since the checkpoint is lost, as far
    as it was acknowledged; writers send the rest again, and nothing is stored twice. The log tells of shards
    that are away and come back. If a restarted shard's checkpoint is damaged, all calls raise that error.

    ``folder`` must be there for each shard's node: on one machine a folder of its own disk; on several, each
    shard's own disk if the shard stays on its node, since SQLite's log must not lie on a network file system.
    To pin shards to nodes, give ``actor_options`` one dict for each shard:
    ``[{"scheduling_strategy": NodeAffinitySchedulingStrategy(node_id, soft=False)}, ...]``, or, with nodes
    started by ``ray start --resources='{"shard-0": 1}'``, ``[{"resources": {"shard-0": 1}}, ...]``. The
    manifest, which makes the folder a checkpoint, is written here.

    Ray is started by ``ray.init()`` if it does not run.

    Args:
        buffer_size: How many transitions all shards together hold at most.
        observation_space: The space of one observation: Box, Discrete, MultiDiscrete, MultiBinary, Dict or
            Tuple.
        action_space: The space of one action.
        num_shards: How many shards there are.
        stack_size: As for :class:`gym_compress.CompressedReplayBuffer`.
        stack_axis: As there.
        codec: As there.
        frames_per_chunk: As there.
        seed: Seeds the generator that draws samples.
        device: Where samples go: a torch device or its name, ``"auto"`` as for
            :class:`gym_compress.CompressedReplayBuffer`, or ``None`` for NumPy arrays, since it is often made
            where no learner is.
        folder: Where :meth:`save` makes checkpoints; it is made if it is not there, and must hold none.
        timeout: Seconds after which it is an error that no shard answers.
        actor_options: Options of the actors, as for Ray's ``.options()``; a dict, or one for each shard.

    Raises:
        ValueError: If ``num_shards`` is below 1, ``buffer_size`` below ``num_shards``, ``timeout`` not above
            0, or another argument does not suit the observation space.
        TypeError: If a space is of another kind.
        FileExistsError: If the folder, here or where a shard is, holds a checkpoint already.
        OSError: If the folder cannot be made.
        GymCompressError: If there is no Ray and none can be started, or the shards do not start.

    A copy (:mod:`pickle`, or passed to a task) is another learner's: it draws for itself, with a generator
    seeded from this one's, and closing it does not end the shards.

    Example:
        In the learner's process; a collector is passed a writer of its own::

            replay = ShardedReplay(1_000_000, observation_space, action_space, num_shards=2, device="cuda")
            collectors = [Collector.remote(replay.writer(f"collector-{i}")) for i in range(8)]
            while replay.size() < learning_starts:
                time.sleep(1)
            with replay.batches(256) as batches:
                for update in range(updates):
                    learn(next(batches))
    """

    def __init__(
        self,
        buffer_size: int,
        observation_space: spaces.Space[Any],
        action_space: spaces.Space[Any],
        *,
        num_shards: int,
        stack_size: int | str = "auto",
        stack_axis: int = 0,
        codec: str | Codec = "auto",
        frames_per_chunk: int | None = None,
        seed: int | None = None,
        device: Any = None,
        folder: str | os.PathLike[str] | None = None,
        timeout: float = 60.0,
        actor_options: ActorOptions = None,
    ) -> None:
        sizes = checked_sizes(buffer_size, num_shards, timeout)
        if folder is not None and (Path(folder) / MANIFEST).exists():
            raise FileExistsError(
                f"{folder} holds a checkpoint: go on with it by ShardedReplay.load(folder), or move it away"
            )
        buffer = CompressedReplayBuffer(
            -(-sizes["buffer_size"] // sizes["num_shards"]),
            observation_space,
            action_space,
            None,
            stack_size=stack_size,
            stack_axis=stack_axis,
            codec=codec,
            frames_per_chunk=frames_per_chunk,
        )
        manifest = {
            "replay": secrets.token_hex(8),
            "origins": [],
            **sizes,
            "settings": {k: v for k, v in buffer.checked_settings().items() if k != "generator"},
            "generator": generator_to_json(np.random.default_rng(seed)),
        }
        path = None if folder is None else Path(folder).absolute()
        if path is not None:
            path.mkdir(parents=True, exist_ok=True)
        self._start(manifest, path, device, actor_options)

    def _start(
        self, manifest: dict[str, Any], folder: Path | None, device: Any, actor_options: ActorOptions
    ) -> None:
        self.buffer_size = manifest["buffer_size"]
        self.device = torch_device(device)
        self._manifest = manifest
        self._folder = folder
        self._rng = generator_from_json(manifest["generator"])
        self._lock = fork_safe_lock()
        self._writers = 0  # how many were made: the next one's shard follows
        self._closed = self._is_copy = False
        self._shards = Shards(manifest, folder, actor_options)

    @property
    def shards(self) -> list[Any]:
        """The handles of the actors."""
        return self._shards.actors

    @classmethod
    def load(
        cls,
        folder: str | os.PathLike[str],
        *,
        num_shards: int | None = None,
        device: Any = None,
        actor_options: ActorOptions = None,
    ) -> Self:
        """Starts the shards with the checkpoint of a folder.

        Args:
            folder: The folder, where it was for :meth:`save`; see ``folder`` and ``actor_options`` above.
            num_shards: How many shards are expected, or None for as many as were saved.
            device: As at construction.
            actor_options: As at construction.

        Raises:
            FileNotFoundError: If the folder holds no checkpoint, or a shard's file is not there.
            ValueError: If there were another number of shards.
            CorruptDataError: If the manifest or a file is damaged, or belongs to another replay memory.
            GymCompressError: If there is no Ray and none can be started, or the shards do not start.
        """
        path = Path(folder).absolute()
        manifest = read_manifest(path / MANIFEST)
        if num_shards not in (None, manifest["num_shards"]):
            raise ValueError(f"{folder} holds {manifest['num_shards']} shards, expected {num_shards}")
        # another one that is loaded from here is told apart by its name, which its files get when it saves
        manifest["origins"] = [manifest["replay"], *manifest["origins"]]
        manifest["replay"] = secrets.token_hex(8)
        replay = cls.__new__(cls)
        replay._start(manifest, path, device, actor_options)
        return replay

    def writer(self, name: str) -> ReplayWriter:
        """A writer, to be passed to a collector. Writers are spread over the shards in turn.

        Args:
            name: What errors call it.
        """
        self._check_open()
        with self._lock:
            number, self._writers = self._writers % len(self.shards), self._writers + 1
        settings = self._manifest["settings"]
        return ReplayWriter(name, self.shards[number], number, settings, self._shards.timeout)

    def size(self) -> int:
        """The number of transitions in all shards that are there.

        Raises:
            GymCompressError: If no shard has answered for ``timeout`` seconds.
        """
        self._check_open()
        self._shards.look()
        return sum(self._shards.sizes.values())

    @property
    def cbytes(self) -> int:
        """Bytes of chunks, references and arrays in the shards that are there."""
        self._check_open()
        self._shards.look()
        asked = {i: self.shards[i].cbytes.remote() for i in self._shards.sizes}
        return sum(self._shards.answers(asked).values())

    def sample(self, batch_size: int) -> ReplaySamples:
        """Draws transitions uniformly from all shards, with replacement.

        Args:
            batch_size: How many.

        Raises:
            ValueError: If all shards are empty, or ``batch_size`` is below 1.
            GymCompressError: If no shard has answered for ``timeout`` seconds.
            CorruptDataError: If a shard was restarted, and its checkpoint is damaged.
        """
        return self.sample_compressed(batch_size).decompress(self.device)

    def sample_compressed(self, batch_size: int) -> CompressedSamples:
        """As :meth:`sample`, but what crosses the wire: ``.decompress(device)`` gives the samples.

        It can be pickled, and passed on to another process that decodes it.
        """
        batch_size = positive(batch_size, "batch_size")
        self._check_open()
        self._shards.look()
        return self._ask(batch_size)()

    def batches(self, batch_size: int, depth: int = 2) -> Prefetch[ReplaySamples]:
        """Draws batches ahead: while one is decoded, in a background thread, shards pick the next ones.

        Each is drawn from what the shards held when they were asked. A request is for up to 16 batches, as
        long as these are no more than 2,048 transitions and 128 MiB decoded; two requests are on their way
        while the batches of a third are decoded. So with batches of 32, what is added now is drawn first some
        48 batches later. The memory of a batch is used again when nobody refers to it any more, nor to a part
        of it. :meth:`save` keeps the generator as it is after all that was asked for.

        Args:
            batch_size: How many transitions a batch has.
            depth: How many batches are decoded ahead.

        Returns:
            A context manager that gives an endless iterator of :class:`ReplaySamples`. The first ``next``
            begins; it raises what :meth:`sample` would. Leaving the block ends the thread.

        Raises:
            ValueError: If ``batch_size`` or ``depth`` is below 1.
        """
        batch_size, depth = positive(batch_size, "batch_size"), positive(depth, "depth")
        self._check_open()
        nbytes = 2 * element_nbytes(self._manifest["settings"]["observation_space"])
        most = min(_MOST_ASKED, _MOST_ASKED_NBYTES // max(nbytes, 1)) // batch_size
        count = max(1, min(most, _MOST_BATCHES)) * batch_size
        asked: deque[Callable[[], CompressedSamples]] = deque()
        decoded: Iterator[ReplaySamples] = iter(())
        outputs = Outputs()
        making = fork_safe_lock()  # an interrupted start may have left a thread that makes one more

        def make() -> tuple[ReplaySamples, None]:
            nonlocal decoded
            with making:
                try:
                    while (batch := next(decoded, None)) is None:
                        if not asked:
                            self._shards.look(prefetch.cancelled)
                        while len(asked) <= _REQUESTS:
                            asked.append(self._ask(count, prefetch.cancelled))
                        decoded = asked.popleft()().decompress_parts(batch_size, self.device, outputs.empty)
                    return batch, None
                except BaseException:
                    asked.clear()  # the next call begins anew
                    raise

        def when_left() -> None:
            nonlocal decoded
            decoded = iter(())
            asked.clear()
            outputs.clear()

        prefetch = Prefetch(make, depth, taken=lambda _: None, when_left=when_left)
        return prefetch

    def _ask(
        self, count: int, cancelled: Callable[[], bool] = lambda: False
    ) -> Callable[[], CompressedSamples]:
        """Draws transitions, and asks for them. What it returns waits, and draws others for those missing."""
        self._check_open()
        known = self._shards.wait_for_transitions(cancelled)
        sizes = np.array([*known.values()])
        with self._lock:
            drawn = self._rng.integers(sizes.sum(), size=count)
        ends = sizes.cumsum()
        numbers = np.searchsorted(ends, drawn, "right")
        rows = (drawn - (ends - sizes)[numbers]).astype(np.int32)
        owners = np.array([*known])[numbers]
        # those too of which nothing is wanted, since an answer says how much the shard holds now
        asked = {i: self.shards[i].take.remote(rows[owners == i]) for i in known}

        def receive() -> CompressedSamples:
            answers = self._shards.answers(asked, cancelled)
            found = {i: samples for i, samples in answers.items() if samples is not None}
            parts, places = [*found.values()], [np.flatnonzero(owners == i) for i in found]
            missing = np.flatnonzero(~np.isin(owners, [*found]))
            if len(missing):
                parts.append(self._ask(len(missing), cancelled)())
                places.append(missing)
            return CompressedSamples.join(parts).select(np.argsort(np.concatenate(places)))

        return receive

    def save(self) -> None:
        """Makes a checkpoint in ``folder``: each shard writes what changed since its last one, all at once.

        Each file is whole by itself, whenever something is killed; but they need not be of the same moment.
        What writers add meanwhile may be in one file and not yet in another, and if some shards had saved and
        others had not when they were killed, these have the checkpoint before.

        Raises:
            ValueError: If there is no folder.
            GymCompressError: If a shard is away; those that are there have saved then, and you can save
                again. Or if another replay memory, loaded from the same folder, saved there meanwhile.
            OSError: If the system refuses.
        """
        self._check_open()
        if self._folder is None:
            raise ValueError("Expected a folder, since this replay memory was made without one")
        path = self._folder / MANIFEST
        mine = self._manifest["replay"], *self._manifest["origins"]
        if path.exists() and read_manifest(path)["replay"] not in mine:
            raise GymCompressError(
                f"{self._folder} was saved by another replay memory meanwhile: load it to go on with that"
            )
        if self._manifest["origins"]:  # while some files have the new name, and others one of the old ones
            self._write_manifest(path)
        away = []
        for i, reference in enumerate([shard.save.remote() for shard in self.shards]):
            try:
                answer(reference, self._shards.timeout)
            except RayError:
                away.append(i)
        if away:
            raise GymCompressError(f"Shards {away} are away and may not be saved, the others are: save again")
        self._manifest = {**self._manifest, "origins": []}
        self._write_manifest(path)

    def _write_manifest(self, path: Path) -> None:
        with self._lock:
            generator = generator_to_json(self._rng)
        write_manifest(path, {**self._manifest, "generator": generator})

    def close(self) -> None:
        """Ends the shards, unless this is a copy. What was not saved is lost."""
        self._closed = True
        if not self._is_copy:
            self._shards.close()

    def _check_open(self) -> None:
        if self._closed or not ray.is_initialized():
            raise ValueError("This replay memory is closed, or Ray was shut down")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __getstate__(self) -> dict[str, Any]:
        """A copy draws for itself, so that several learners do not draw the same."""
        state = {name: value for name, value in self.__dict__.items() if name != "_lock"}
        with self._lock:
            generator = np.random.default_rng(self._rng.integers(2**63, size=2))
        writers = int(generator.integers(len(self.shards)))
        return {**state, "_rng": generator, "_writers": writers, "_is_copy": True}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._lock = fork_safe_lock()
