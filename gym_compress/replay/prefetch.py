"""Batches that a background thread decodes ahead, and memory for them."""

from __future__ import annotations

import math
import os
import sys
import threading
from collections.abc import Callable
from queue import SimpleQueue
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
            worker = self._worker = self._worker or _Worker(self._make, self._depth)
            if worker.ident is None:
                worker.start()
        worker.wanted.put(None)  # first, so that for an item that an interrupt loses another one comes
        made = worker.ready.get()
        if isinstance(made, BaseException):
            worker.ready.put(made)  # for others who wait
            if self._worker is worker:
                self._worker = None
            raise made
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


class _Worker(threading.Thread, Generic[T]):
    """A thread that makes an item whenever one is wanted, and puts an exception behind the last one.

    What passes between threads goes through queues written in C, which an interrupt at any moment leaves
    whole.
    """

    def __init__(self, make: Callable[[], tuple[T, Any]], depth: int) -> None:
        super().__init__(name="prefetch", daemon=True)
        self._make, self._stopped = make, False
        self.ready: SimpleQueue[tuple[T, Any] | BaseException] = SimpleQueue()
        self.wanted: SimpleQueue[None] = SimpleQueue()
        for _ in range(depth):
            self.wanted.put(None)

    def run(self) -> None:
        """Makes items until it is stopped, or making fails."""
        try:
            while True:
                self.wanted.get()
                if self._stopped:
                    raise RuntimeError("The with block was left while this thread waited for a batch")
                self.ready.put(self._make())
        except BaseException as error:
            self.ready.put(error)

    def stop(self) -> None:
        """Ends the thread when the item that it makes is done."""
        self._stopped = True
        self.wanted.put(None)
        if self.ident is not None:
            self.join()


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
