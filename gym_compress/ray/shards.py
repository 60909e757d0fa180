"""The shards of a replay memory: which of them are there, and how much they hold."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import ray
from ray.exceptions import RayError

from gym_compress.errors import GymCompressError
from gym_compress.ray.actor import Shard, answer

__all__ = ["ActorOptions", "Shards"]

ActorOptions = Mapping[str, Any] | Sequence[Mapping[str, Any]] | None

_logger = logging.getLogger(__name__)

_PATIENCE = 1.0  # seconds after which a shard that does not answer is away
_PAUSE = 0.01  # seconds between looks at those that are away


class Shards:
    """Actors of which some may be away: dead, on their way back, or busy for long.

    Args:
        actors: The handles of the actors.
        timeout: Seconds after which it is an error that no shard answers.

    Attributes:
        actors: The handles.
        sizes: How many transitions each of them holds, by its last answer; None if it is away.
    """

    def __init__(self, actors: list[Any], timeout: float) -> None:
        self.actors = actors
        self.sizes: list[int | None] = [0] * len(actors)
        self._timeout = timeout
        self._probes: dict[int, Any] = {}  # what those were asked that are away

    @classmethod
    def start(
        cls,
        settings: list[dict[str, Any]],
        replay: str,
        paths: list[str | None],
        resumes: bool,
        timeout: float,
        actor_options: ActorOptions,
    ) -> Shards:
        """Starts the actors, and Ray if it does not run.

        Raises:
            ValueError: If there are options for another number of actors.
            GymCompressError: If Ray or the actors cannot be started.
            Exception: What an actor found wrong with its file.
        """
        each = actor_options if isinstance(actor_options, Sequence) else [actor_options or {}] * len(paths)
        if len(each) != len(paths):
            raise ValueError(f"Expected actor_options for {len(paths)} shards, got {len(each)}")
        if any("max_concurrency" in options for options in each):
            raise ValueError("A shard takes one call at a time: max_concurrency is no option of it")
        _start_ray()
        shard: Any = ray.remote(Shard)
        shards = cls([], timeout)
        try:
            for own, path, options in zip(settings, paths, each, strict=True):
                # without a lease of a CPU, which others might have taken when Ray restarts it
                options = {"num_cpus": 0, "max_restarts": -1, "max_task_retries": 0, **options}
                actor = shard.options(**options).remote(json.dumps(own), replay, path, resumes)
                shards.actors.append(actor)
            asked = [actor.size.remote() for actor in shards.actors]
            _, late = ray.wait(asked, num_returns=len(asked), timeout=timeout)
            if late:
                raise GymCompressError(
                    f"{len(late)} of {len(asked)} shards did not start within {timeout} s: is there a node "
                    "for each that has what actor_options asks for?"
                )
            shards.sizes = [answer(reference) for reference in asked]
        except RayError as error:
            shards.close()
            raise GymCompressError(
                f"A shard did not start. Is gym_compress installed on each node? {error}"
            ) from error
        except BaseException:
            shards.close()
            raise
        return shards

    def look(self) -> None:
        """Asks how much each shard holds, but for those that are away. One is there when this returns.

        Raises:
            GymCompressError: If no shard has answered for ``timeout`` seconds.
        """
        asked = {i: self.actors[i].size.remote() for i, size in enumerate(self.sizes) if size is not None}
        for i, size in self.answers(asked).items():
            self.sizes[i] = size
        self._wait_for_one(empty_too=True, left=lambda: False)

    def wait_for_transitions(self, left: Callable[[], bool]) -> list[int | None]:
        """Returns what :attr:`sizes` is when a shard is there that is not empty.

        Args:
            left: Tells whether nobody waits for it any more.

        Raises:
            ValueError: If all are there, and empty.
            GymCompressError: If none has answered for ``timeout`` seconds.
        """
        return self._wait_for_one(empty_too=False, left=left)

    def _wait_for_one(self, empty_too: bool, left: Callable[[], bool]) -> list[int | None]:
        end = time.monotonic() + self._timeout
        while True:
            self._poll()
            sizes = list(self.sizes)
            if any(size or (empty_too and size == 0) for size in sizes):
                return sizes
            away = sizes.count(None)
            if not away:
                raise ValueError(
                    f"Expected shards that hold transitions, but all {len(sizes)} are empty: nothing was "
                    "added yet, or they were restarted without a checkpoint"
                )
            if left() or time.monotonic() > end:
                raise self._nobody("" if empty_too else " that holds transitions")
            time.sleep(_PAUSE)

    def _nobody(self, what: str) -> GymCompressError:
        away = self.sizes.count(None)
        return GymCompressError(
            f"No shard{what} has answered for {self._timeout} s: {away} of {len(self.sizes)} are away"
        )

    def _poll(self) -> None:
        """Looks whether shards that were away have answered."""
        for i, probe in list(self._probes.items()):
            if self.sizes[i] is None and ray.wait([probe], timeout=0)[0]:
                try:
                    size = answer(probe)
                except RayError:
                    self._probes[i] = self.actors[i].size.remote()
                else:
                    _logger.warning("Shard %d is back, with %d transitions", i, size)
                    self.sizes[i] = size

    def answers(self, asked: Mapping[int, Any], left: Callable[[], bool] = lambda: False) -> dict[int, Any]:
        """What shards answered in time. One that did not is away until it answers.

        When one has answered, the others have a second more, or twice the time that it took.

        Args:
            asked: References to their answers, by shard.
            left: Tells whether nobody waits for them any more.

        Raises:
            GymCompressError: If none has answered for ``timeout`` seconds.
        """
        begin = time.monotonic()
        # of those that are away, no more is expected; if all are, any will do
        waited = [reference for i, reference in asked.items() if self.sizes[i] is not None]
        waited = waited or list(asked.values())
        while waited and not ray.wait(waited, timeout=_PATIENCE)[0]:
            if left() or time.monotonic() > begin + self._timeout:
                raise self._nobody("")
        patience = max(_PATIENCE, 2 * (time.monotonic() - begin))
        if waited:
            ray.wait(waited, num_returns=len(waited), timeout=patience)
        references = list(asked.values())
        ready = set(ray.wait(references, num_returns=len(references), timeout=0)[0]) if references else set()
        found = {}
        for i, reference in asked.items():
            if reference in ready:
                with suppress(RayError):
                    found[i] = answer(reference)
            if i not in found and self.sizes[i] is not None:
                _logger.warning("Shard %d, of %d transitions, is away: others serve", i, self.sizes[i])
                # in this order, so that another thread finds a probe of each that is away
                self._probes[i], self.sizes[i] = self.actors[i].size.remote(), None
        return found

    def close(self) -> None:
        """Ends the actors."""
        for actor in self.actors:
            with suppress(Exception):  # Ray may have been shut down
                ray.kill(actor)

    def __reduce__(self) -> tuple[Any, ...]:
        return Shards, (self.actors, self._timeout)


def _start_ray() -> None:
    if ray.is_initialized():
        return
    try:
        ray.init()
    except Exception as error:
        raise GymCompressError(f"No Ray is running, and none could be started: {error}") from error
