"""Batches that a background thread decodes ahead, and memory for them."""

from __future__ import annotations

import math
import os
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from queue import Empty, SimpleQueue
from types import TracebackType
from typing import Any, Generic, Self, TypeVar

import numpy as np
from numpy.typing import NDArray

__all__ = ["Outputs", "Prefetch"]

T = TypeVar("T")

# Of how many batches the memory is kept.
_MOST_OUTPUTS = 16


class Prefetch(Generic[T]):
    """An endless iterator whose items a background thread makes ahead, within a ``with`` block.

    The thread begins when the first item is asked for, and ends when the block is left. Several threads may
    take items.

    Args:
        make: Makes the next item, in the thread, and a receipt for it.
        depth: How many items are made ahead.
        taken: Is given the receipt for each item that is taken.
        when_left: Is called when the block is left and the thread has ended.
    """

    def __init__(
        self,
        make: Callable[[], tuple[T, Any]],
        depth: int,
        *,
        taken: Callable[[Any], None],
        when_left: Callable[[], None],
    ) -> None:
        self._make, self._depth, self._taken, self._when_left = make, depth, taken, when_left
        self._starting = threading.Lock()
        self._worker: _Worker[T] | None = None
        self._process: int | None = None  # the one that is in the block
        self._cancelled = False

    def cancelled(self) -> bool:
        """Whether the block was left: items that are being made are not wanted any more."""
        return self._cancelled

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
        if self._process != os.getpid() or self._cancelled:
            raise RuntimeError(
                "Expected to be within a with block: 'with ... as batches', in the process that entered it"
            )
        with self._starting:
            if self._worker is None or not self._worker.started:
                if self._worker is not None:  # an interrupt came while it started
                    self._worker.tell_to_stop()
                self._worker = _Worker(self._make, self._depth)
                self._worker.start()
            worker = self._worker
        worker.wake.put(None)  # an interrupt may have come before the other one below
        made = worker.ready.get()
        if isinstance(made, _End):
            worker.ready.put(made)  # for others who wait
            if self._worker is worker:
                self._worker = None
            raise made.error or RuntimeError("The with block was left while this thread waited for a batch")
        worker.wake.put(None)
        item, receipt = made
        self._taken(receipt)
        return item

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._cancelled = True
        if self._process == os.getpid():
            if self._worker is not None:
                self._worker.stop()
            self._when_left()


class _End:
    """In the place of an item: no more will come, because of an error or since the block was left."""

    def __init__(self, error: BaseException | None) -> None:
        self.error = error


class _Worker(Generic[T]):
    """A thread that makes items as long as fewer are ready than are wanted.

    What passes between threads goes through queues written in C, which an interrupt at any moment leaves
    whole.
    """

    def __init__(self, make: Callable[[], tuple[T, Any]], depth: int) -> None:
        self._make, self._depth = make, depth
        self.ready: SimpleQueue[tuple[T, Any] | _End] = SimpleQueue()
        self.wake: SimpleQueue[None] = SimpleQueue()  # says that it is worth looking whether items are wanted
        self.started = self._stopped = False
        self._thread = threading.Thread(target=self._run, name="prefetch", daemon=True)

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()
        self.started = True

    def _run(self) -> None:
        try:
            while not self._stopped:
                with suppress(Empty):
                    while True:
                        self.wake.get_nowait()
                if self.ready.qsize() < self._depth:
                    self.ready.put(self._make())
                elif not self._stopped:
                    self.wake.get()
        except BaseException as error:
            self.ready.put(_End(error))

    def tell_to_stop(self) -> None:
        """Lets the thread end when the item that it makes is done."""
        self._stopped = True
        self.wake.put(None)

    def stop(self) -> None:
        """Ends the thread, and tells those who wait."""
        self.tell_to_stop()
        if self._thread.ident is not None:
            self._thread.join()
        self.ready.put(_End(None))


class Outputs:
    """Arrays for batches, which are used again when nobody holds them any more.

    Memory that the system has to hand out anew takes as long to fill as a fifth of the decoding.
    """

    def __init__(self) -> None:
        self._memory: list[NDArray[np.uint8]] = []

    def clear(self) -> None:
        """Keeps none any more."""
        self._memory = []

    def empty(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> NDArray[Any]:
        """As ``numpy.empty``."""
        nbytes = math.prod(shape) * dtype.itemsize
        kept = self._memory
        for i in range(len(kept)):
            # views refer to the array that owns their memory; here, this list and the call do
            if sys.getrefcount(kept[i]) == 2 and kept[i].nbytes == nbytes:
                memory = kept.pop(i)
                break
        else:
            memory = np.empty(nbytes, np.uint8)
        self._memory = [memory, *kept[: _MOST_OUTPUTS - 1]]
        return memory.view(dtype).reshape(shape)
