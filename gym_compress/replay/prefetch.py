"""Batches that a background thread decodes ahead, and memory for them."""

from __future__ import annotations

import math
import os
import sys
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor, wait
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
        self._lock = threading.Lock()
        self._ahead: deque[Future[tuple[T, Any]]] = deque()
        self._failed = False  # whether an item could not be made, so that none is made after it
        self._worker: ThreadPoolExecutor | None = None
        self._process: int | None = None  # the one that is in the block
        self._cancelled = False

    def cancelled(self) -> bool:
        """Whether the block was left: items that are being made are not wanted any more."""
        return self._cancelled

    def __enter__(self) -> Self:
        if self._process is not None:
            raise RuntimeError("Batches are prefetched in one with block; call prefetch again for another")
        self._process = os.getpid()
        self._worker = ThreadPoolExecutor(1, "prefetch")
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
        with self._lock:
            if self._process != os.getpid() or self._cancelled or self._worker is None:
                raise RuntimeError(
                    "Expected to be within a with block: 'with ... as batches', in the process that entered "
                    "it"
                )
            while len(self._ahead) <= self._depth:
                self._ahead.append(self._worker.submit(self._next))
            future = self._ahead.popleft()
        try:
            item, receipt = future.result()
        except CancelledError:
            raise RuntimeError("The with block was left while this thread waited for a batch") from None
        except Exception:
            self._begin_anew()
            raise
        self._taken(receipt)
        return item

    def _next(self) -> tuple[T, Any]:
        if self._failed:
            raise CancelledError
        try:
            return self._make()
        except BaseException:
            self._failed = True
            raise

    def _begin_anew(self) -> None:
        """Forgets what is made ahead after an item that could not be made; the next call tries again."""
        with self._lock:
            if self._failed:
                for future in self._ahead:
                    future.cancel()
                wait(self._ahead)
                self._ahead.clear()
                self._failed = False

    def __exit__(self, *_: object) -> None:
        self._cancelled = True
        if self._process == os.getpid() and self._worker is not None:
            self._worker.shutdown(cancel_futures=True)
            self._when_left()


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
