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
from gym_compress.ray.actor import Shard, answer, check_ray

__all__ = ["ActorOptions", "Shards"]

ActorOptions = Mapping[str, Any] | Sequence[Mapping[str, Any]] | None

_logger = logging.getLogger(__name__)

_PATIENCE = 1.0  # seconds after which a shard that does not answer is away
_LONGEST = 5.0  # seconds that others have when a first one was slow
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
        origins: list[str],
        paths: list[str | None],
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
            for i, (own, path, options) in enumerate(zip(settings, paths, each, strict=True)):
                # without a lease of a CPU, which others might have taken when Ray restarts it
                options = {"num_cpus": 0, "max_restarts": -1, "max_task_retries": 0, **options}
                names = f"{replay}-{i}", [f"{origin}-{i}" for origin in origins]
                shards.actors.append(shard.options(**options).remote(json.dumps(own), *names, path))
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
        self._wait_for_one(empty_too=True, cancelled=lambda: False)

    def wait_for_transitions(self, cancelled: Callable[[], bool]) -> list[int | None]:
        """Returns what :attr:`sizes` is when a shard is there that is not empty.

        Args:
            cancelled: Tells whether nobody waits for it any more.

        Raises:
            ValueError: If all are there, and empty.
            GymCompressError: If none has answered for ``timeout`` seconds.
        """
        return self._wait_for_one(empty_too=False, cancelled=cancelled)

    def _wait_for_one(self, empty_too: bool, cancelled: Callable[[], bool]) -> list[int | None]:
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
            if cancelled() or time.monotonic() > end:
                raise self._nobody("" if empty_too else " that holds transitions")
            time.sleep(_PAUSE)

    def _nobody(self, what: str) -> GymCompressError:
        away = self.sizes.count(None)
        return GymCompressError(
            f"No shard{what} has answered for {self._timeout} s: {away} of {len(self.sizes)} are away"
        )

    def _poll(self) -> None:
        """Looks whether shards that were away have answered."""
        check_ray()
        for i, probe in list(self._probes.items()):
            if self.sizes[i] is None and ray.wait([probe], timeout=0)[0]:
                try:
                    size = answer(probe)
                except RayError:
                    self._probes[i] = self.actors[i].size.remote()
                else:
                    _logger.warning("Shard %d is back, with %d transitions", i, size)
                    self.sizes[i] = size

    def answers(
        self, asked: Mapping[int, Any], cancelled: Callable[[], bool] = lambda: False
    ) -> dict[int, Any]:
        """What shards answered in time. One that did not is away until it answers.

        A second is enough if one has answered then. Else the first that answers tells how long it takes, and
        the others have as long again, up to five seconds.

        Args:
            asked: References to their answers, by shard.
            cancelled: Tells whether nobody waits for them any more.

        Raises:
            GymCompressError: If none has answered for ``timeout`` seconds.
        """
        check_ray()
        begin = time.monotonic()
        waiting, found = dict(asked), {}

        def wait(patience: float, references: list[Any], enough: int) -> None:
            if references:
                ray.wait(references, num_returns=enough, timeout=patience)
                ready = set(ray.wait(list(waiting.values()), num_returns=len(waiting), timeout=0)[0])
                for i in [i for i, reference in waiting.items() if reference in ready]:
                    try:
                        found[i] = answer(waiting.pop(i))
                    except RayError:
                        self._lose(i)

        # of those that are away, no more is expected; if all are, any will do
        expected = [reference for i, reference in waiting.items() if self.sizes[i] is not None]
        expected = expected or list(waiting.values())
        wait(_PATIENCE, expected, len(expected))
        while waiting and not found:  # slow, or hung
            self._poll()
            if any(size is not None for i, size in enumerate(self.sizes) if i not in waiting):
                break  # another one is back
            if cancelled() or time.monotonic() > begin + self._timeout:
                for i in waiting:
                    self._lose(i)
                raise self._nobody("")
            wait(_PATIENCE, list(waiting.values()), 1)
            if found:
                wait(min(time.monotonic() - begin, _LONGEST), list(waiting.values()), len(waiting))
        for i in waiting:
            self._lose(i)
        return found

    def _lose(self, i: int) -> None:
        """Notes that a shard is away."""
        if self.sizes[i] is not None:
            _logger.warning("Shard %d, of %d transitions, is away: others serve", i, self.sizes[i])
            # in this order, so that another thread finds a probe of each that is away
            self._probes[i] = self.actors[i].size.remote()
            self.sizes[i] = None

    def close(self) -> None:
        """Ends the actors."""
        if not ray.is_initialized():  # or Ray would be started
            return
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
