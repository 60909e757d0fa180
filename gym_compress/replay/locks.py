"""What neither a fork nor an interrupt leaves half done."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable

__all__ = ["fork_safe_lock", "to_the_end"]

_locks: weakref.WeakSet[threading.Lock] = weakref.WeakSet()
_held: list[threading.Lock] = []


def fork_safe_lock() -> threading.Lock:
    """A lock that is taken before this process is forked, and free in both processes afterwards.

    Else it would stay locked in the forked process if another thread held it, as prefetching does most of the
    time.
    """
    lock = threading.Lock()
    _locks.add(lock)
    return lock


def to_the_end(work: Callable[[], None]) -> None:
    """Does work that may be done again, until it is done; what interrupts it comes out then.

    Raises:
        BaseException: What came first; or an error that comes again, since the work cannot be done then.
    """
    first: BaseException | None = None
    while True:
        try:
            work()
            break
        except BaseException as error:
            if first is not None and isinstance(error, Exception):
                raise
            first = first or error
    if first is not None:
        raise first


def _before() -> None:
    # whoever forks while it holds a lock itself is not kept waiting for ever
    _held.extend(lock for lock in list(_locks) if lock.acquire(timeout=10))


def _after() -> None:
    while _held:
        _held.pop().release()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before, after_in_parent=_after, after_in_child=_after)
