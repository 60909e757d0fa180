"""The shards of a replay memory: which of them are there, and how much they hold."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import ray
from ray.exceptions import RayError

from gym_compress.errors import GymCompressError
from gym_compress.ray.actor import Shard, answer, check_ray

__all__ = ["ActorOptions", "Shards"]

ActorOptions = Mapping[str, Any] | Sequence[Mapping[str, Any]] | None

_logger = logging.getLogger(__name__)

_PATIENCE = 1.0  # seconds after which a shard that does not answer is away
_LONGEST = 5.0  # seconds that others have when a first one was slow
_PAUSE = 0.01  # seconds between looks at those that are away
_NO_ROWS = np.empty(0, np.int32)


class Shards:
    """Actors of which some may be away: dead, on their way back, or busy for long.

    Args:
        manifest: What they are the shards of. They are started here, and Ray if it does not run.
        folder: Where their files are, or None.
        actor_options: As for :class:`ShardedReplay`, which tells what is raised, too.

    Attributes:
        actors: The handles.
        timeout: Seconds after which it is an error that no shard answers.
    """

    def __init__(self, manifest: dict[str, Any], folder: Path | None, actor_options: ActorOptions) -> None:
        count = manifest["num_shards"]
        each = actor_options if isinstance(actor_options, Sequence) else [actor_options or {}] * count
        if len(each) != count:
            raise ValueError(f"Expected actor_options for {count} shards, got {len(each)}")
        if any("max_concurrency" in options for options in each):
            raise ValueError("A shard takes one call at a time: max_concurrency is no option of it")
        if not ray.is_initialized():
            try:
                ray.init()
            except Exception as error:
                raise GymCompressError(f"No Ray is running, and none could be started: {error}") from error
        self.actors: list[Any] = []
        self.timeout = manifest["timeout"]
        self._sizes = [0] * count  # by the last answer of each
        self._away: dict[int, Any] = {}  # what those were asked that are away
        shard: Any = ray.remote(Shard)
        try:
            for i, options in enumerate(each):
                # without a lease of a CPU, which others might have taken when Ray restarts it
                options = {"num_cpus": 0, "max_restarts": -1, "max_task_retries": 0, **options}
                self.actors.append(shard.options(**options).remote(manifest, i, folder))
            asked = [actor.take.remote(_NO_ROWS) for actor in self.actors]
            _, late = ray.wait(asked, num_returns=count, timeout=self.timeout)
            if late:
                raise GymCompressError(
                    f"{len(late)} of {count} shards did not start within {self.timeout} s: is there a node "
                    "for each that has what actor_options asks for?"
                )
            self._sizes = [answer(reference)[0] for reference in asked]
        except BaseException as error:
            self.close()
            if isinstance(error, RayError):
                raise GymCompressError(
                    f"A shard did not start. Is gym_compress installed on each node? {error}"
                ) from error
            raise

    @property
    def sizes(self) -> dict[int, int]:
        """How many transitions each shard that is there holds, by its last answer."""
        return {i: size for i, size in enumerate(self._sizes) if i not in self._away}

    def look(self, cancelled: Callable[[], bool] = lambda: False) -> None:
        """Asks how much each shard holds, but for those that are away; as :meth:`answers`."""
        check_ray()
        self.answers({i: self.actors[i].take.remote(_NO_ROWS) for i in self.sizes}, cancelled)

    def wait_for_transitions(self, cancelled: Callable[[], bool]) -> dict[int, int]:
        """Returns what :attr:`sizes` is when a shard is there that is not empty."""
        end = time.monotonic() + self.timeout
        while not any((sizes := self.sizes).values()):
            if len(sizes) == len(self.actors):
                raise ValueError(
                    f"Expected shards that hold transitions, but all {len(sizes)} are empty: nothing was "
                    "added yet, or they were restarted without a checkpoint"
                )
            if cancelled() or time.monotonic() > end:
                raise self._nobody(" that holds transitions")
            time.sleep(_PAUSE)
            self.look(cancelled)
        return sizes

    def _nobody(self, what: str) -> GymCompressError:
        away, count = len(self._away), len(self.actors)
        return GymCompressError(
            f"No shard{what} has answered for {self.timeout} s: {away} of {count} are away"
        )

    def answers(self, asked: dict[int, Any], cancelled: Callable[[], bool] = lambda: False) -> dict[int, Any]:
        """What shards answered in time. One that did not is away until it answers.

        A second is enough if one has answered then. Else the first that answers tells how long it takes, and
        the others have as long again, up to five seconds. A shard is there when this returns, though it may
        be another one, which was away.

        Args:
            asked: References to their answers, by shard. Each gives its size, and what is returned here.
            cancelled: Tells whether nobody waits for them any more.

        Raises:
            GymCompressError: If none has answered for ``timeout`` seconds.
        """
        begin = time.monotonic()
        end = begin + _PATIENCE
        found: dict[int, Any] = {}
        # of those that are away, no more is expected; if all are, any will do
        waiting = {i: reference for i, reference in asked.items() if i not in self._away} or dict(asked)
        while True:
            self._take(away := dict(self._away), len(away), 0)
            served = found or any(i not in waiting for i in self.sizes)
            now = time.monotonic()
            if served and (not waiting or now > end):
                break
            if not served and (cancelled() or now > begin + self.timeout):
                break
            if not waiting:
                time.sleep(_PAUSE)
            elif now < end:
                found |= self._take(waiting, len(waiting), end - now)
            elif first := self._take(waiting, 1, _PAUSE):  # slow, or hung
                found, end = first, now + min(now - begin, _LONGEST)
        for i in waiting:
            self._lose(i)
        if not served:
            raise self._nobody("")
        return found

    def _take(self, waiting: dict[int, Any], count: int, seconds: float) -> dict[int, Any]:
        """Waits for so many answers, and takes them out of those that are waited for."""
        check_ray()
        ready = ray.wait(list(waiting.values()), num_returns=count, timeout=seconds)[0] if waiting else []
        found = {}
        for i in [i for i, reference in waiting.items() if reference in ready]:
            try:
                self._sizes[i], found[i] = answer(waiting.pop(i))
            except RayError:
                self._lose(i)
            else:
                if self._away.pop(i, None) is not None:
                    _logger.warning("Shard %d is back, with %d transitions", i, self._sizes[i])
        return found

    def _lose(self, i: int) -> None:
        """Notes that a shard is away, and asks it once more."""
        if i not in self._away:
            _logger.warning("Shard %d, of %d transitions, is away: others serve", i, self._sizes[i])
        self._away[i] = self.actors[i].take.remote(_NO_ROWS)

    def close(self) -> None:
        """Ends the actors."""
        for actor in self.actors:
            with suppress(Exception):
                check_ray()
                ray.kill(actor)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_away": {}}
