"""The shards of a replay memory: which of them are there, and how much they hold."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import ray
from ray.exceptions import RayError

from gym_compress.errors import GymCompressError
from gym_compress.ray.actor import Shard, answer

__all__ = ["ActorOptions", "Shards"]

ActorOptions = Mapping[str, Any] | Sequence[Mapping[str, Any]] | None

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
        _start_ray()
        actors: list[Any] = []
        for own, path, options in zip(settings, paths, each, strict=True):
            # without a lease of a CPU, which others might have taken when Ray restarts it
            options = {"num_cpus": 0, "max_restarts": -1, "max_task_retries": 0, **options}
            actor: Any = ray.remote(Shard)
            actors.append(actor.options(**options).remote(json.dumps(own), replay, path, resumes))
        shards = cls(actors, timeout)
        try:
            asked = [actor.size.remote() for actor in actors]
            _, late = ray.wait(asked, num_returns=len(asked), timeout=timeout)
            if late:
                raise GymCompressError(
                    f"{len(late)} of {len(actors)} shards did not start within {timeout} s: is there a node "
                    "for each that has what actor_options asks for?"
                )
            shards.sizes = [answer(reference) for reference in asked]
        except BaseException:
            shards.close()
            raise
        return shards

    def look(self) -> None:
        """Asks how much each shard holds, but for those that are away. One is there when this returns.

        Raises:
            GymCompressError: If no shard has answered for ``timeout`` seconds.
        """
        self._poll()
        there = [i for i, size in enumerate(self.sizes) if size is not None]
        for i, size in self.answers({i: self.actors[i].size.remote() for i in there}).items():
            self.sizes[i] = size
        self._wait_for_one(empty_too=True)

    def wait_for_transitions(self) -> None:
        """Returns when a shard is there that is not empty.

        Raises:
            ValueError: If all are there, and empty.
            GymCompressError: If none has answered for ``timeout`` seconds.
        """
        self._wait_for_one(empty_too=False)

    def _wait_for_one(self, empty_too: bool) -> None:
        end = time.monotonic() + self._timeout
        while not any(size or (empty_too and size == 0) for size in self.sizes):
            away = self.sizes.count(None)
            if not away:
                raise ValueError("Expected shards that hold transitions, but nothing was added yet")
            if time.monotonic() > end:
                raise GymCompressError(
                    f"No shard{'' if empty_too else ' that holds transitions'} has answered for "
                    f"{self._timeout} s: {away} of {len(self.actors)} are away"
                )
            time.sleep(_PAUSE)
            self._poll()

    def _poll(self) -> None:
        """Looks whether shards that were away have answered."""
        for i in [i for i, size in enumerate(self.sizes) if size is None]:
            probe = self._probes.get(i)
            if probe is not None and not ray.wait([probe], timeout=0)[0]:
                continue
            try:
                if probe is not None:
                    self.sizes[i] = answer(probe)
                    continue
            except RayError:
                pass
            self._probes[i] = self.actors[i].size.remote()

    def answers(self, asked: Mapping[int, Any]) -> dict[int, Any]:
        """What shards answered in time. One that did not is away until it answers.

        Args:
            asked: References to their answers, by shard.
        """
        references = list(asked.values())
        if not references:
            return {}
        ready, _ = ray.wait(references, num_returns=len(references), timeout=_PATIENCE)
        found, in_time = {}, set(ready)
        for i, reference in asked.items():
            if reference in in_time:
                with suppress(RayError):
                    found[i] = answer(reference)
            if i not in found:
                self.sizes[i], self._probes[i] = None, self.actors[i].size.remote()
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
