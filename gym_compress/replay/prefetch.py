"""Batches that a background thread decodes ahead."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable
from types import TracebackType
from typing import Any, Generic, Self, TypeVar

__all__ = ["Prefetch"]

T = TypeVar("T")


class Prefetch(Generic[T]):
    """An endless iterator whose items a background thread makes ahead, within a ``with`` block.

    The thread begins when the first item is asked for, and ends when the block is left.

    Args:
        make: Makes the next item, in the thread, and a receipt for it.
        depth: How many items are made ahead.
        taken: Is given the receipt for each item that is taken.
        give_back: Is given those for the items that nobody took, oldest first, when the block is left.
    """

    def __init__(
        self,
        make: Callable[[], tuple[T, Any]],
        depth: int,
        *,
        taken: Callable[[Any], None],
        give_back: Callable[[list[Any]], None],
    ) -> None:
        self._make, self._depth, self._taken, self._give_back = make, depth, taken, give_back
        self._ready: deque[tuple[T, Any]] = deque()
        self._error: BaseException | None = None
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._process: int | None = None  # the one that is in the block
        self._left = False

    def __enter__(self) -> Self:
        if self._process is not None:
            raise RuntimeError("Batches are prefetched in one with block; call prefetch again for another")
        self._process = os.getpid()
        return self

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> T:
        """The next item, as soon as it is there.

        Raises:
            RuntimeError: Outside the ``with`` block, or in a process that was forked in it.
            Exception: What was raised in the thread, once the items before it are taken. The next call tries
                again.
        """
        if self._process != os.getpid() or self._left:
            raise RuntimeError(
                "Expected to be within a with block: 'with buffer.prefetch(...) as batches', in this process"
            )
        with self._changed:
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="prefetch", daemon=True)
                self._thread.start()
            self._changed.wait_for(lambda: self._ready or self._error or self._left)
            if self._ready:
                item, receipt = self._ready.popleft()
                self._taken(receipt)
                self._changed.notify_all()
                return item
            thread, self._thread = self._thread, None
            error, self._error = self._error, None
        if error:
            thread.join()  # it ends with the error
        raise error or RuntimeError("The with block was left while this thread waited for a batch")

    def _run(self) -> None:
        try:
            while True:
                with self._changed:
                    self._changed.wait_for(lambda: self._left or len(self._ready) < self._depth)
                    if self._left:
                        return
                item = self._make()
                with self._changed:
                    self._ready.append(item)
                    self._changed.notify_all()
        except BaseException as error:
            with self._changed:
                self._error = error
                self._changed.notify_all()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._process != os.getpid():
            return
        with self._changed:
            self._left = True
            self._changed.notify_all()
            thread = self._thread
        if thread is not None:
            thread.join()
        self._give_back([receipt for _, receipt in self._ready])
        self._ready.clear()
