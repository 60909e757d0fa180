"""``ReplayWriter``: adds to a shard, compressed where the environment runs."""

from __future__ import annotations

import secrets
import time
from collections import deque
from dataclasses import dataclass
from typing import Any

import numpy as np
from ray.exceptions import RayError

from gym_compress.errors import GymCompressError
from gym_compress.ray.actor import answer, check_ray
from gym_compress.replay.buffer import CompressedReplayBuffer
from gym_compress.replay.file.checkpoint import arguments_of
from gym_compress.replay.samples import CompressedSamples

__all__ = ["ReplayWriter"]

_ROWS = 192  # of a parcel: sixteen chunks of Atari frames, of each environment
_IN_FLIGHT = 4  # parcels that were sent and not acknowledged
_PAUSES = 0.01, 1.0  # seconds before what was lost is sent again: at first, and at most


@dataclass(slots=True)
class _Parcel:
    """Transitions on their way to the shard."""

    number: int  # from 1
    pos: int  # the row of the writer's buffer behind the last of them
    samples: CompressedSamples | None  # None in the place of a parcel before the first
    reference: Any = None  # to the shard's answer, once they are sent


class ReplayWriter:
    """Adds transitions to a shard of a :class:`ShardedReplay`: compresses them here, ships 192 steps at once.

    :meth:`ShardedReplay.writer` makes them. A writer can be passed to Ray's tasks and actors; each copy is a
    stream of its own, which begins empty. The shard gets the transitions of a stream in the order in which
    they were added, and each once: what it does not acknowledge, since it was restarted or the network
    failed, is sent again. What a writer has not shipped is lost with its process, so :meth:`flush` it in the
    end.

    Ray starts a task that failed again, up to three times: a task that adds needs ``max_retries=0``, or what
    it added before it failed is there twice. Calls of actors are not repeated by default.
    """

    def __init__(self, name: str, shard: Any, number: int, settings: dict[str, Any], timeout: float) -> None:
        """Made by :meth:`ShardedReplay.writer`; not meant to be called.

        Args:
            name: What errors call it.
            shard: The actor handle of its shard.
            number: Which of the shards that is.
            settings: The settings of its buffer, as a replay file has them.
            timeout: Seconds to wait for the shard.
        """
        self.name = name
        self._shard, self._number, self._settings, self._timeout = shard, number, settings, timeout
        self._identity = f"{name}-{secrets.token_hex(8)}"
        self._buffer: CompressedReplayBuffer | None = None  # made when the number of environments is known
        # the last parcel that was acknowledged, and those that are not; whether rows are in a parcel is told
        # by nothing else, so that an interrupt finds both in agreement
        self._parcels = deque([_Parcel(0, 0, None)])

    def add(self, obs: Any, next_obs: Any, action: Any, reward: Any, done: Any, infos: Any) -> None:
        """Stores a transition of each environment, as :meth:`gym_compress.CompressedReplayBuffer.add` does.

        If several parcels are on their way already, this waits for the shard. The first call's ``reward``
        says how many environments there are.

        Raises:
            ValueError: As there. Nothing is stored then.
            GymCompressError: If the shard has not answered for ``timeout`` seconds. Nothing is stored then,
                and what was added before is sent again with the next call.
            Exception: What the shard found wrong, as :meth:`flush` says.
        """
        buffer = self._buffer
        if buffer is None:
            # one row more than a parcel has, so that all rows differ from none
            sizes = {"buffer_size": _ROWS + 1, "n_envs": max(np.size(reward), 1)}
            buffer = CompressedReplayBuffer(**arguments_of({**self._settings, **sizes}), device=None)
        if self._waiting(buffer) == buffer.buffer_size - 1:
            self._ship(buffer)
        buffer.add(obs, next_obs, action, reward, done, infos)
        self._buffer = buffer

    def _waiting(self, buffer: CompressedReplayBuffer) -> int:
        """How many rows are in no parcel yet."""
        return (buffer.pos - self._parcels[-1].pos) % buffer.buffer_size

    def flush(self) -> None:
        """Ships all that was added, and returns when it is in the shard.

        Raises:
            GymCompressError: If the shard has not answered for ``timeout`` seconds. The next call tries
                again.
            Exception: What the shard found wrong, as a CorruptDataError if it could not load its checkpoint.
        """
        if self._buffer is not None and self._waiting(self._buffer):
            self._ship(self._buffer)
        self._settle(0)

    def _ship(self, buffer: CompressedReplayBuffer) -> None:
        self._settle(_IN_FLIGHT - 1)
        last = self._parcels[-1]
        rows = (last.pos + np.arange(self._waiting(buffer))) % buffer.buffer_size
        indices = rows[:, None] * buffer.n_envs + np.arange(buffer.n_envs)
        self._parcels.append(_Parcel(last.number + 1, buffer.pos, buffer.take(indices.ravel())))
        self._send(self._parcels[-1])

    def _send(self, parcel: _Parcel) -> None:
        oldest = self._parcels[1].number
        parcel.reference = self._shard.receive.remote(self._identity, parcel.number, oldest, parcel.samples)

    def _settle(self, most: int) -> None:
        """Waits until at most so many parcels are not acknowledged; sends again what was lost."""
        check_ray()
        shortest, longest = _PAUSES
        end, pause = time.monotonic() + self._timeout, shortest
        while len(self._parcels) > most + 1:
            oldest, problem, last = self._parcels[1], None, -1
            try:
                if oldest.reference is not None:  # an interrupt may have come before it was sent
                    last = answer(oldest.reference, self._timeout)
            except RayError as error:
                problem = error
            except Exception:  # of the shard's code: the next call sends it again
                oldest.reference = None
                raise
            if last >= oldest.number:
                self._parcels.popleft()
                end, pause = time.monotonic() + self._timeout, shortest
                continue
            if time.monotonic() > end:
                raise GymCompressError(
                    f"For {self._timeout} s, shard {self._number} has not taken what writer {self.name!r} "
                    "ships, and still has: it is gone, or the replay memory was closed"
                ) from problem
            time.sleep(pause)
            pause = min(2 * pause, longest)
            for parcel in list(self._parcels)[1:]:
                self._send(parcel)

    def __reduce__(self) -> tuple[Any, ...]:
        return ReplayWriter, (self.name, self._shard, self._number, self._settings, self._timeout)
