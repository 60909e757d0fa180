"""Errors of the package's own. Wrong arguments raise Python's TypeError and ValueError."""

import operator


class GymCompressError(Exception):
    """Base of the errors that only this package raises."""


class CorruptDataError(GymCompressError, ValueError):
    """Compressed bytes are damaged, cut off, or not what this package writes."""


def positive(value: int, name: str) -> int:
    """An argument that is to be an integer of at least 1.

    Raises:
        ValueError: If it is below.
        TypeError: If it is no integer.
    """
    number = operator.index(value)
    if number < 1:
        raise ValueError(f"{name} is expected to be at least 1, actual value: {value}")
    return number
