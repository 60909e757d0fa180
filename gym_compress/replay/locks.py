"""Locks that a fork does not leave locked."""

from __future__ import annotations

import os
import threading
import weakref

__all__ = ["fork_safe_lock"]

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


def _before() -> None:
    # whoever forks while it holds a lock itself is not kept waiting for ever
    _held.extend(lock for lock in list(_locks) if lock.acquire(timeout=10))


def _after() -> None:
    while _held:
        _held.pop().release()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before, after_in_parent=_after, after_in_child=_after)
