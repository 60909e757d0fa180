"""Errors of the package's own. Wrong arguments raise Python's TypeError and ValueError."""


class GymCompressError(Exception):
    """Base of the errors that only this package raises."""


class CorruptDataError(GymCompressError, ValueError):
    """Compressed bytes are damaged, cut off, or not what this package writes."""
