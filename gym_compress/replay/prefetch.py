"""Batches that a background thread decodes ahead."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from contextlib import suppress
from queue import Empty, SimpleQueue
from types import TracebackType
from typing import Any, Generic, Self, TypeVar

__all__ = ["Prefetch"]

T = TypeVar("T")


class Prefetch(Generic[T]):
    """An endless iterator whose items a background thread makes ahead, within a ``with`` block.

    The thread begins when the first item is asked for, and ends when the block is left. Several threads may
    take items.

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
        self._starting = threading.Lock()
        self._worker: _Worker[T] | None = None
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
        with self._starting:
            if self._worker is None:
                self._worker = _Worker(self._make, self._depth)
            worker = self._worker
            worker.start()
        made = worker.ready.get()
        if isinstance(made, _End):
            worker.ready.put(made)  # for others who wait
            if self._worker is worker:
                self._worker = None
            raise made.error or RuntimeError("The with block was left while this thread waited for a batch")
        item, receipt = made
        self._taken(receipt)
        worker.wanted.put(None)
        return item

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._left = True
        if self._process == os.getpid() and self._worker is not None:
            self._give_back(self._worker.stop())


class _End:
    """In the place of an item: no more will come, because of an error or since the block was left."""

    def __init__(self, error: BaseException | None) -> None:
        self.error = error


class _Worker(Generic[T]):
    """A thread that makes an item each time that one is wanted.

    What passes between threads goes through queues written in C, which an interrupt at any moment leaves
    whole.
    """

    def __init__(self, make: Callable[[], tuple[T, Any]], depth: int) -> None:
        self._make = make
        self.wanted: SimpleQueue[None] = SimpleQueue()
        self.ready: SimpleQueue[tuple[T, Any] | _End] = SimpleQueue()
        for _ in range(depth):
            self.wanted.put(None)
        self._stopped = False
        self._thread = threading.Thread(target=self._run, name="prefetch", daemon=True)

    def start(self) -> None:
        """Starts the thread, unless it was."""
        if self._thread.ident is None:
            self._thread.start()

    def _run(self) -> None:
        try:
            self.wanted.get()
            while not self._stopped:
                self.ready.put(self._make())
                self.wanted.get()
        except BaseException as error:
            self.ready.put(_End(error))

    def stop(self) -> list[Any]:
        """Ends the thread, and returns the receipts of what nobody took."""
        self._stopped = True
        self.wanted.put(None)
        if self._thread.ident is not None:
            self._thread.join()
        receipts = []
        with suppress(Empty):
            while not isinstance(made := self.ready.get_nowait(), _End):
                receipts.append(made[1])
        self.ready.put(_End(None))  # for others who wait
        return receipts
