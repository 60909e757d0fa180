"""Replay memory across processes and machines, on Ray.

Collectors add through a :class:`ReplayWriter`, which compresses where the environment runs. Shards, which are
Ray actors, keep what is compressed and pick from it. The learner decodes.
"""

from __future__ import annotations

import json
import operator
import os
import secrets
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple, Self

import numpy as np
from gymnasium import spaces
from gymnasium.error import DependencyNotInstalled
from numpy.typing import NDArray

from gym_compress.codec import Codec
from gym_compress.errors import CorruptDataError, GymCompressError
from gym_compress.replay.buffer import CompressedReplayBuffer
from gym_compress.replay.checkpoint import arguments_of
from gym_compress.replay.format import refusing
from gym_compress.replay.locks import fork_safe_lock
from gym_compress.replay.prefetch import Prefetch
from gym_compress.replay.reading import FileReader
from gym_compress.replay.samples import CompressedSamples, ReplaySamples, torch_device
from gym_compress.replay.settings import element_nbytes, generator_from_json, generator_to_json

try:
    import ray
    from ray.exceptions import RayError, RayTaskError
except ImportError as error:
    raise DependencyNotInstalled(
        "gym_compress.ray needs Ray, run `pip install 'gym-compress[ray]'`"
    ) from error

__all__ = ["ReplayWriter", "ShardedReplay"]

_IN_FLIGHT = 4  # parcels of a writer that were sent and not acknowledged
_ROWS = 96  # that a parcel has at least, but the last one: eight chunks of Atari frames
_PATIENCE = 1.0  # seconds after which sampling goes on without a shard
_MOST_ASKED, _MOST_ASKED_NBYTES = (
    1024,
    2**26,
)  # transitions of a request, and their bytes, if it is for several batches
_MOST_WRITERS = 2**16  # whose numbers a shard remembers

_MANIFEST, _FORMAT = "replay.json", "gym_compress sharded replay"


class ShardBuffer(CompressedReplayBuffer):
    """The transitions of a shard, and up to which parcel of each writer they are.

    Attributes:
        replay: Which replay memory this is a part of.
        received: The number of the last parcel of each writer, by the writer's identity.
    """

    replay = ""
    received: dict[str, int]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.received = {}

    def _settings(self) -> dict[str, Any]:
        return {**super()._settings(), "replay": self.replay, "received": self.received}

    def _restore(self, settings: dict[str, Any]) -> None:
        super()._restore(settings)
        self.replay, self.received = settings["replay"], settings["received"]
        if not all(isinstance(number, int) for number in self.received.values()):
            raise CorruptDataError("what was received from writers is no number")


class _Shard:
    """An actor that keeps a part of the transitions.

    Args:
        settings: Those of its buffer, as JSON.
        replay: Which replay memory it is a part of.
        path: Its file, or None.
        resumes: Whether the file is there already.
    """

    def __init__(self, settings: str, replay: str, path: str | None, resumes: bool) -> None:
        self._path = path
        self._error: Exception | None = None
        restarted = ray.get_runtime_context().was_current_actor_reconstructed
        try:
            arguments = arguments_of(json.loads(settings))
            self._buffer = ShardBuffer(**arguments, device=None)
            self._buffer.replay = replay
            if path is not None and (resumes or (restarted and _has_checkpoint(path))):
                saved = ShardBuffer.load(path, device=None)
                if saved.replay == replay:
                    self._buffer = saved
                elif resumes:
                    raise CorruptDataError(f"{path} belongs to another replay memory")
        except Exception as error:  # an actor that cannot begin does not say why
            self._error = error

    def _ready(self) -> ShardBuffer:
        if self._error is not None:
            raise self._error
        return self._buffer

    def receive(self, writer: str, number: int, oldest: int, samples: CompressedSamples) -> int:
        """Takes a parcel, unless it came before, or one before it is missing.

        Args:
            writer: The identity of its writer.
            number: Its number.
            oldest: The number of the oldest parcel that the writer still has: what came before was
                acknowledged, though this actor may have lost it since.
            samples: The transitions.

        Returns:
            The number of the last parcel that is here.
        """
        buffer = self._ready()
        last = buffer.received.get(writer, 0)
        if number != last + 1 and not last < number == oldest:
            return last
        buffer.adopt(samples)
        buffer.received.pop(writer, None)
        buffer.received[writer] = number
        if len(buffer.received) > _MOST_WRITERS:
            del buffer.received[next(iter(buffer.received))]
        return number

    def take(self, rows: NDArray[np.int32]) -> tuple[int, CompressedSamples | None]:
        """How many transitions there are, and those in some rows, or None if one of these is not filled."""
        buffer = self._ready()
        size = buffer.size()
        return size, buffer.take(rows) if len(rows) and rows.max() < size else None

    def size(self) -> int:
        """How many transitions there are."""
        return self._ready().size()

    def cbytes(self) -> int:
        """Bytes that they take."""
        return self._ready().cbytes

    def save(self) -> None:
        """Makes the next checkpoint of the file."""
        assert self._path is not None
        Path(self._path).parent.mkdir(parents=True, exist_ok=True)
        self._ready().save(self._path)


def _has_checkpoint(path: str) -> bool:
    """Whether there is a replay file whose first save was completed."""
    try:
        file = FileReader.open(path)
    except FileNotFoundError:
        return False
    file.close()
    return file.checkpoint.mark is not None


class _Parcel:
    """Transitions on their way from a writer to its shard.

    Attributes:
        number: Parcels of a writer are numbered from 1.
        pos: The row of the writer's buffer behind the last of them.
        samples: The transitions, until they are acknowledged.
        answer: Refers to the shard's answer, once they are sent.
    """

    __slots__ = ("answer", "number", "pos", "samples")

    def __init__(self, number: int, pos: int, samples: CompressedSamples | None) -> None:
        self.number = number
        self.pos = pos
        self.samples = samples
        self.answer: Any = None


class ReplayWriter:
    """Adds transitions to a shard of a :class:`ShardedReplay`, compressed here, some dozens at once.

    :meth:`ShardedReplay.writer` makes them. A writer can be passed to Ray's tasks and actors; each copy is a
    stream of its own, which begins empty. The shard gets the transitions of a stream in the order in which
    they were added, and each once: what it does not acknowledge, since it was restarted or the network
    failed, is sent again. What a writer has not sent yet is lost with its process; :meth:`flush` it in the
    end.

    Ray starts a task again that fails, up to three times: a task that adds needs ``max_retries=0``, or what
    it added before it failed is there twice. An actor's calls are not repeated by default.
    """

    def __init__(self, name: str, shard: Any, number: int, settings: str, timeout: float) -> None:
        """Made by :meth:`ShardedReplay.writer`; not meant to be called.

        Args:
            name: What errors and copies call it.
            shard: The actor handle of its shard.
            number: Which of the shards that is.
            settings: The settings of its buffer, as JSON.
            timeout: Seconds to wait for the shard.
        """
        self.name = name
        self._arguments = name, shard, number, settings, timeout
        self._shard, self._timeout = shard, timeout
        self._identity = f"{name}-{secrets.token_hex(8)}"
        self._buffer: CompressedReplayBuffer | None = None  # made when the number of environments is known
        self._sent = deque(
            [_Parcel(0, 0, None)]
        )  # the last one that was acknowledged, and those that were not

    def add(self, obs: Any, next_obs: Any, action: Any, reward: Any, done: Any, infos: Any) -> None:
        """Stores a transition of each environment; :meth:`gym_compress.CompressedReplayBuffer.add` says how.

        Compressed observations are shipped as they are. If several parcels are on their way already, this
        waits for the shard.

        Args:
            obs: ``(n_envs, *observation)``, a list of ``n_envs`` observations, or a dict or tuple of these.
            next_obs: As ``obs``: what the step gave, before any reset.
            action: ``(n_envs, *action)``.
            reward: ``(n_envs,)``; of the first call, it says how many environments there are.
            done: ``(n_envs,)``.
            infos: A list of ``n_envs`` dicts, or one dict of arrays as Gymnasium's vector environments give.

        Raises:
            ValueError: If something has another shape or number, or an observation does not fit the space.
                Nothing is stored then.
            GymCompressError: If the shard has not answered for ``timeout`` seconds. Nothing is stored then,
                and the next call tries again.
        """
        buffer = self._buffer or self._new_buffer(np.size(reward))
        if self._waiting(buffer) == buffer.buffer_size - 1:
            self._ship(buffer)
        buffer.add(obs, next_obs, action, reward, done, infos)
        self._buffer = buffer

    def _new_buffer(self, n_envs: int) -> CompressedReplayBuffer:
        settings = json.loads(self._arguments[3])
        per_chunk = settings["compression"]["frames_per_chunk"] or 1
        # one row more than a parcel has, so that all rows differ from none
        rows = -(-_ROWS // per_chunk) * per_chunk + 1
        arguments = arguments_of({**settings, "buffer_size": rows, "n_envs": max(n_envs, 1)})
        return CompressedReplayBuffer(**arguments, device=None)

    def _waiting(self, buffer: CompressedReplayBuffer) -> int:
        """How many rows are not in a parcel yet."""
        return (buffer.pos - self._sent[-1].pos) % buffer.buffer_size

    def flush(self) -> None:
        """Sends all that was added, and returns when it is in the shard.

        Raises:
            GymCompressError: If the shard has not answered for ``timeout`` seconds. The next call tries
                again.
        """
        if self._buffer is not None and self._waiting(self._buffer):
            self._ship(self._buffer)
        self._settle(0)

    def _ship(self, buffer: CompressedReplayBuffer) -> None:
        self._settle(_IN_FLIGHT - 1)
        last = self._sent[-1]
        rows = (last.pos + np.arange(self._waiting(buffer))) % buffer.buffer_size
        indices = rows[:, None] * buffer.n_envs + np.arange(buffer.n_envs)
        parcel = _Parcel(last.number + 1, buffer.pos, buffer.take(indices.ravel()))
        self._sent.append(parcel)
        self._send(parcel)

    def _send(self, parcel: _Parcel) -> None:
        oldest = self._sent[1].number
        parcel.answer = self._shard.receive.remote(self._identity, parcel.number, oldest, parcel.samples)

    def _settle(self, most: int) -> None:
        """Waits until at most so many parcels are not acknowledged, and sends again what was lost."""
        end, pause = time.monotonic() + self._timeout, 0.01
        while len(self._sent) - 1 > most:
            parcel, problem = self._sent[1], None
            try:
                last = -1 if parcel.answer is None else ray.get(parcel.answer, timeout=self._timeout)
            except RayTaskError:
                raise  # of the shard's code
            except RayError as error:
                last, problem = -1, error
            if last >= parcel.number:
                while len(self._sent) > 1 and self._sent[1].number <= last:
                    self._sent[1].samples = self._sent[1].answer = None
                    self._sent.popleft()
                end, pause = time.monotonic() + self._timeout, 0.01
                continue
            if time.monotonic() > end:
                raise GymCompressError(
                    f"Shard {self._arguments[2]} has not taken what writer {self.name!r} sent for "
                    f"{self._timeout} s: it is gone, or the replay was closed. Nothing is lost yet"
                ) from problem
            time.sleep(pause)
            pause = min(2 * pause, _PATIENCE)
            for each in list(self._sent)[1:]:
                self._send(each)

    def __reduce__(self) -> tuple[Any, ...]:
        return ReplayWriter, self._arguments


class _Request(NamedTuple):
    """Transitions that shards were asked for.

    Attributes:
        answers: The references to the shards' answers, by shard.
        places: ``(n,)``, of each shard where in the batch its transitions go.
    """

    answers: dict[int, Any]
    places: dict[int, NDArray[np.int64]]


class ShardedReplay:
    """Replay memory in several Ray actors, for many collectors and one or more learners.

    Frames cross the network compressed: writers encode them where the environments run, shards keep them as
    they came, and samples are decoded here. Each writer adds to one shard, which evicts first in, first out.

    A shard that dies is restarted by Ray with its last checkpoint in ``folder``, or empty without one.
    Meanwhile sampling goes on from the others, after a second. What came since the checkpoint is lost, as far
    as it was acknowledged; writers send the rest again, and nothing is stored twice.

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
        device: Where samples go: a torch device or its name, ``"auto"``, or ``None`` for NumPy arrays.
        folder: Where :meth:`save` makes checkpoints; it is made if it is not there.
        timeout: Seconds after which it is an error that no shard answers.
        actor_options: Options of the actors, as for Ray's ``.options()``; a dict, or one for each shard.

    Raises:
        ValueError: If ``num_shards`` is below 1, ``buffer_size`` below ``num_shards``, or an argument does
            not suit the observation space.
        TypeError: If a space is of another kind.
        FileExistsError: If the folder holds a checkpoint already.
        GymCompressError: If there is no Ray and none can be started, or the shards do not start.

    Example:
        >>> import gymnasium as gym  # doctest: +SKIP
        >>> replay = ShardedReplay(1_000_000, space, actions, num_shards=2)  # doctest: +SKIP
        >>> writer = replay.writer("collector-0")  # to be passed to a collector  # doctest: +SKIP
        >>> writer.add(obs, next_obs, action, reward, done, infos)  # doctest: +SKIP
        >>> writer.flush()  # doctest: +SKIP
        >>> with replay.batches(256) as batches:  # doctest: +SKIP
        ...     batch = next(batches)
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
        actor_options: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None = None,
    ) -> None:
        if operator.index(num_shards) < 1:
            raise ValueError(f"num_shards is expected to be at least 1, actual value: {num_shards}")
        if operator.index(buffer_size) < num_shards:
            raise ValueError(
                f"buffer_size is expected to be at least {num_shards}, one a shard, actual value: {buffer_size}"
            )
        if folder is not None and (Path(folder) / _MANIFEST).exists():
            raise FileExistsError(
                f"{folder} holds a checkpoint: go on with it by ShardedReplay.load(folder), or move it away"
            )
        buffer = CompressedReplayBuffer(
            -(-buffer_size // num_shards),
            observation_space,
            action_space,
            None,
            stack_size=stack_size,
            stack_axis=stack_axis,
            codec=codec,
            frames_per_chunk=frames_per_chunk,
        )
        manifest = {
            "format": _FORMAT,
            "version": 1,
            "replay": secrets.token_hex(8),
            "num_shards": num_shards,
            "buffer_size": buffer_size,
            "timeout": float(timeout),
            "settings": buffer._checked_settings(),
        }
        self._begin(manifest, np.random.default_rng(seed), device, folder, actor_options, resumes=False)

    def _begin(
        self,
        manifest: dict[str, Any],
        generator: np.random.Generator,
        device: Any,
        folder: str | os.PathLike[str] | None,
        actor_options: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None,
        *,
        resumes: bool,
    ) -> None:
        num_shards, buffer_size = manifest["num_shards"], manifest["buffer_size"]
        options = (
            [actor_options or {}] * num_shards if not isinstance(actor_options, Sequence) else actor_options
        )
        if len(options) != num_shards:
            raise ValueError(f"Expected actor_options for {num_shards} shards, got {len(options)}")
        self._manifest = manifest
        self._rng = generator
        self.device = torch_device(device)
        self.buffer_size = buffer_size
        self._folder = None if folder is None else Path(folder).absolute()
        self._timeout = manifest["timeout"]
        self._lock = fork_safe_lock()
        self._writers = 0
        _start_ray()
        shard = ray.remote(_Shard)
        self.shards: list[Any] = []
        for number, own in enumerate(options):
            size = buffer_size // num_shards + (number < buffer_size % num_shards)
            self.shards.append(
                # without a lease of a CPU, which might be taken when Ray restarts it
                shard.options(**{"num_cpus": 0, "max_restarts": -1, "max_task_retries": 0, **own}).remote(
                    json.dumps({**manifest["settings"], "buffer_size": size}),
                    manifest["replay"],
                    None if self._folder is None else str(self._folder / f"shard-{number}.replay"),
                    resumes,
                )
            )
        self._sizes: list[int | None] = [0] * num_shards  # None of those that are away
        self._probes: dict[int, Any] = {}  # what those were asked
        try:
            asked = [shard.size.remote() for shard in self.shards]
            ready, late = ray.wait(asked, num_returns=num_shards, timeout=self._timeout)
            if late:
                raise GymCompressError(
                    f"{len(late)} of {num_shards} shards did not start within {self._timeout} s: do the nodes "
                    "have what actor_options asks for?"
                )
            self._sizes = ray.get(asked)
        except BaseException:
            self.close()
            raise

    @classmethod
    def load(
        cls,
        folder: str | os.PathLike[str],
        *,
        num_shards: int | None = None,
        device: Any = None,
        actor_options: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None = None,
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
        path = Path(folder) / _MANIFEST
        if not path.exists():
            raise FileNotFoundError(f"{folder} holds no checkpoint: there is no {_MANIFEST}")
        with refusing(f"{path} is not valid"):
            manifest = json.loads(path.read_text())
            if manifest.pop("format") != _FORMAT or manifest["version"] != 1:
                raise CorruptDataError("it is of another format, or of a later version of gym_compress")
            generator = generator_from_json(manifest.pop("generator"))
            arguments_of(manifest["settings"])
            saved = operator.index(manifest["num_shards"])
            if not 0 < saved <= operator.index(manifest["buffer_size"]):
                raise CorruptDataError(f"{saved} is no number of shards")
            if not (isinstance(manifest["replay"], str) and isinstance(manifest["timeout"], float)):
                raise CorruptDataError("values are of other kinds")
        if num_shards not in (None, saved):
            raise ValueError(f"{folder} holds {saved} shards, expected {num_shards}")
        replay = cls.__new__(cls)
        replay._begin({"format": _FORMAT, **manifest}, generator, device, folder, actor_options, resumes=True)
        return replay

    def writer(self, name: str) -> ReplayWriter:
        """A writer, to be passed to a collector. Writers are spread over the shards in turn.

        Args:
            name: What errors call it.
        """
        self._check_open()
        with self._lock:
            number, self._writers = self._writers % len(self.shards), self._writers + 1
        settings = json.dumps(self._manifest["settings"])
        return ReplayWriter(name, self.shards[number], number, settings, self._timeout)

    def size(self) -> int:
        """The number of transitions in all shards that answer."""
        self._look()
        return sum(size or 0 for size in self._sizes)

    @property
    def cbytes(self) -> int:
        """Bytes of the compressed chunks, the references to them, and the arrays, of the shards that answer."""
        self._check_open()
        return sum(self._answers({i: shard.cbytes.remote() for i, shard in enumerate(self.shards)}).values())

    def sample(self, batch_size: int) -> ReplaySamples:
        """Draws transitions uniformly from all shards, with replacement.

        Args:
            batch_size: How many.

        Raises:
            ValueError: If all shards are empty, or ``batch_size`` is below 1.
            GymCompressError: If no shard has answered for ``timeout`` seconds.
        """
        return self.sample_compressed(batch_size).decompress(self.device)

    def sample_compressed(self, batch_size: int) -> CompressedSamples:
        """As :meth:`sample`, but what crosses the wire: ``.decompress(device)`` gives the samples.

        It can be pickled, and passed on to another process that decodes it.
        """
        _check_positive(batch_size, "batch_size")
        self._look()
        return self._receive(self._ask(np.arange(batch_size)))

    def batches(self, batch_size: int, depth: int = 2) -> Prefetch[ReplaySamples]:
        """Draws batches ahead: while one is decoded, in a background thread, shards pick the next ones.

        Each is drawn from what the shards held when they were asked. Where batches are small, a request is
        for several of them, up to 1,024 transitions or 64 MiB of them decoded, and two requests are on their
        way: so many transitions may be added before a batch is taken.

        Args:
            batch_size: How many transitions a batch has.
            depth: How many batches are decoded ahead.

        Returns:
            A context manager that gives an endless iterator of :class:`ReplaySamples`. The first ``next``
            begins; it raises what :meth:`sample` would. Leaving the block ends the thread.

        Raises:
            ValueError: If ``batch_size`` or ``depth`` is below 1.
        """
        _check_positive(batch_size, "batch_size")
        _check_positive(depth, "depth")
        self._check_open()
        nbytes = 2 * element_nbytes(self._manifest["settings"]["observation_space"])
        most = min(_MOST_ASKED, _MOST_ASKED_NBYTES // max(nbytes, 1))
        places = np.arange(max(most // batch_size, 1) * batch_size)

        def drawn() -> Iterator[ReplaySamples]:
            self._look()
            asked = deque([self._ask(places), self._ask(places)])
            while True:
                samples = self._receive(asked.popleft())
                asked.append(self._ask(places))
                yield from samples.decompress_parts(batch_size, self.device)

        batches = drawn()

        def make() -> tuple[ReplaySamples, None]:
            nonlocal batches
            try:
                return next(batches), None
            except BaseException:
                batches = drawn()
                raise

        return Prefetch(make, depth, taken=lambda _: None, left=lambda: None)

    def _look(self) -> None:
        """Asks how much each shard holds; those that were away are not waited for."""
        self._check_open()
        self._poll()
        asked = {i: self.shards[i].size.remote() for i, size in enumerate(self._sizes) if size is not None}
        for i, size in self._answers(asked).items():
            self._sizes[i] = size

    def _poll(self) -> None:
        """Looks whether shards that were away have answered."""
        for i, probe in list(self._probes.items()):
            if not ray.wait([probe], timeout=0)[0]:
                continue
            try:
                size = ray.get(probe)
            except RayTaskError:
                raise
            except RayError:
                self._probes[i] = self.shards[i].size.remote()
            else:
                self._probes.pop(i, None)
                self._sizes[i] = size

    def _answers(self, asked: dict[int, Any]) -> dict[int, Any]:
        """What shards answered in time. One that did not is away until it answers."""
        refs = list(asked.values())
        if not refs:
            return {}
        ready, _ = ray.wait(refs, num_returns=len(refs), timeout=_PATIENCE)
        if not ready:
            ready, _ = ray.wait(refs, num_returns=1, timeout=self._timeout)
        found, in_time = {}, set(ready)
        for i, ref in asked.items():
            try:
                if ref in in_time:
                    found[i] = ray.get(ref)
                    continue
            except RayTaskError:
                raise
            except RayError:
                pass
            self._sizes[i] = None
            self._probes[i] = self.shards[i].size.remote()
        return found

    def _ask(self, places: NDArray[np.int64]) -> _Request:
        """Draws transitions for some places of a batch, and asks the shards for them."""
        self._wait_for_any()
        with self._lock:
            present = [i for i, size in enumerate(self._sizes) if size is not None]
            sizes = np.array([self._sizes[i] or 0 for i in present])
            drawn = self._rng.integers(sizes.sum(), size=len(places))
        ends = sizes.cumsum()
        shards = np.searchsorted(ends, drawn, "right")
        rows = (drawn - (ends - sizes)[shards]).astype(np.int32)
        # those of which nothing is wanted, too, since answers say how much a shard holds now
        answers = {i: self.shards[i].take.remote(rows[shards == k]) for k, i in enumerate(present)}
        return _Request(answers, {i: places[shards == k] for k, i in enumerate(present)})

    def _wait_for_any(self) -> None:
        """Waits until a shard that is not empty is there."""
        end = time.monotonic() + self._timeout
        while not any(self._sizes):
            if not self._probes:
                raise ValueError("Expected shards that hold transitions, but nothing was added yet")
            if time.monotonic() > end:
                raise GymCompressError(
                    f"No shard that holds transitions has answered for {self._timeout} s: "
                    f"{len(self._probes)} of {len(self.shards)} are away"
                )
            ray.wait(list(self._probes.values()), timeout=_PATIENCE)
            time.sleep(0.01)  # one that is gone for good answers at once
            self._poll()

    def _receive(self, request: _Request) -> CompressedSamples:
        """The transitions that were asked for; those of shards that are away are drawn anew from the others."""
        parts, places = [], []
        while True:
            found = self._answers(request.answers)
            missing = []
            for i, where in request.places.items():
                size, samples = found.get(i, (None, None))
                if size is not None:
                    self._sizes[i] = size
                if samples is not None:
                    parts.append(samples)
                    places.append(where)
                elif len(where):
                    missing.append(where)
            if not missing:
                return CompressedSamples.join(parts).select(np.argsort(np.concatenate(places)))
            request = self._ask(np.concatenate(missing))

    def save(self) -> None:
        """Makes a checkpoint in ``folder``: each shard writes what changed since its last one, all at once.

        Each file is whole by itself, whenever something is killed. What writers add meanwhile may be in one
        file and not yet in another.

        Raises:
            ValueError: If there is no folder.
            GymCompressError: If a shard is away. Those that are there have saved; save again.
            OSError: If the system refuses.
        """
        self._check_open()
        if self._folder is None:
            raise ValueError("Expected a folder, since this replay memory was made without one")
        self._folder.mkdir(parents=True, exist_ok=True)
        away = []
        for i, answer in enumerate([shard.save.remote() for shard in self.shards]):
            try:
                ray.get(answer)
            except RayTaskError:
                raise
            except RayError:
                away.append(i)
        if away:
            raise GymCompressError(f"Shards {away} are away and were not saved, the others were: save again")
        with self._lock:
            text = json.dumps({**self._manifest, "generator": generator_to_json(self._rng)}, indent=1)
        part = self._folder / f"{_MANIFEST}.{secrets.token_hex(4)}.part"
        try:
            with part.open("w") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            part.replace(self._folder / _MANIFEST)
        finally:
            part.unlink(missing_ok=True)

    def close(self) -> None:
        """Ends the shards. What was not saved is lost."""
        shards, self.shards = self.shards, []
        for shard in shards:
            with suppress(Exception):  # Ray may be shut down already
                ray.kill(shard)

    def _check_open(self) -> None:
        if not self.shards:
            raise ValueError("This replay memory is closed")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _start_ray() -> None:
    if ray.is_initialized():
        return
    try:
        ray.init()
    except Exception as error:
        raise GymCompressError(f"No Ray is running, and none could be started: {error}") from error


def _check_positive(value: int, name: str) -> None:
    if operator.index(value) < 1:
        raise ValueError(f"{name} is expected to be at least 1, actual value: {value}")
