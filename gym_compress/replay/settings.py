"""Spaces and random generators as JSON, for replay files: what FORMAT.md says of settings."""

from __future__ import annotations

import math
import re
from typing import Any

import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from gym_compress.errors import CorruptDataError
from gym_compress.spaces import CompressedBox

__all__ = ["element_nbytes", "generator_from_json", "generator_to_json", "space_from_json", "space_to_json"]

_MOST_NBYTES = 2**25  # of an element of a space
_DTYPE = re.compile(r"[<|][biuf](1|2|4|8)")
_GENERATORS = ("PCG64", "PCG64DXSM")


def space_to_json(space: spaces.Space[Any]) -> dict[str, Any]:
    """A space as JSON holds it.

    Raises:
        TypeError: If the space is of a kind that a file cannot hold.
        ValueError: If its elements are too large, more than 32 MiB.
    """
    spec = _to_json(space)
    space_from_json(spec)
    return spec


def _to_json(space: spaces.Space[Any]) -> dict[str, Any]:
    if isinstance(space, spaces.Box):
        kind = "CompressedBox" if isinstance(space, CompressedBox) else "Box"
        bounds = {"low": _bounds(space.low), "high": _bounds(space.high)}
        return {"kind": kind, "dtype": _dtype(space), "shape": space.shape, **bounds}
    if isinstance(space, spaces.Discrete):
        return {"kind": "Discrete", "dtype": _dtype(space), "n": int(space.n), "start": int(space.start)}
    if isinstance(space, spaces.MultiDiscrete):
        numbers = {"nvec": space.nvec.tolist(), "start": space.start.tolist()}
        return {"kind": "MultiDiscrete", "dtype": _dtype(space), **numbers}
    if isinstance(space, spaces.MultiBinary):
        return {"kind": "MultiBinary", "n": space.n if isinstance(space.n, int) else space.shape}
    if isinstance(space, spaces.Dict):
        if not all(isinstance(key, str) for key in space.spaces):
            raise TypeError(
                f"A replay file holds Dict spaces whose keys are strings, got {list(space.spaces)}"
            )
        return {"kind": "Dict", "spaces": [[key, _to_json(sub)] for key, sub in space.spaces.items()]}
    if isinstance(space, spaces.Tuple):
        return {"kind": "Tuple", "spaces": [_to_json(sub) for sub in space.spaces]}
    raise TypeError(
        "A replay file holds spaces that are Box, Discrete, MultiDiscrete, MultiBinary, Dict or Tuple, "
        f"actual: {space}"
    )


def space_from_json(spec: Any) -> spaces.Space[Any]:
    """The space that JSON tells of, sizes checked first.

    Raises:
        ValueError: If its elements are too large, more than 32 MiB.
        LookupError, TypeError: If it is no space.
    """
    if element_nbytes(spec) > _MOST_NBYTES:
        raise ValueError(
            f"A replay file holds elements of at most {_MOST_NBYTES} bytes, got {element_nbytes(spec)}"
        )
    return _space(spec)


def element_nbytes(spec: Any) -> int:
    """Bytes of an element of the space that JSON tells of."""
    kind = spec["kind"]
    if kind in ("Dict", "Tuple"):
        return sum(element_nbytes(sub[1] if kind == "Dict" else sub) for sub in spec["spaces"])
    if kind == "MultiDiscrete":
        shape = np.shape(spec["nvec"])
    elif kind == "MultiBinary":
        shape = tuple(np.atleast_1d(spec["n"]).tolist())
    else:
        shape = spec.get("shape", ())
    if not all(type(length) is int and length >= 0 for length in shape) or len(shape) > 32:
        raise ValueError(f"{shape} is no shape")
    # of an empty shape too, the other axes are bounded
    count = math.prod(max(length, 1) for length in shape)
    return int(count * np.dtype(spec.get("dtype", "|i1")).itemsize)


def _space(spec: Any) -> spaces.Space[Any]:
    kind = spec["kind"]
    dtype: Any = np.dtype(spec["dtype"]).type if "dtype" in spec and _DTYPE.fullmatch(spec["dtype"]) else None
    if kind in ("Box", "CompressedBox"):
        shape = tuple(spec["shape"])
        low, high = (_from_bounds(spec[name], shape, dtype) for name in ("low", "high"))
        return (CompressedBox if kind == "CompressedBox" else spaces.Box)(low, high, shape, dtype)
    if kind == "Discrete":
        # Gymnasium 1.0 knows one dtype
        kwargs = {} if dtype is np.int64 else {"dtype": dtype}
        return spaces.Discrete(spec["n"], start=spec["start"], **kwargs)
    if kind == "MultiDiscrete":
        start = np.array(spec["start"], dtype)
        return spaces.MultiDiscrete(np.array(spec["nvec"], dtype), dtype=dtype, start=start)
    if kind == "MultiBinary":
        return spaces.MultiBinary(spec["n"])
    if kind == "Dict":
        pairs = [(key, _space(sub)) for key, sub in spec["spaces"]]
        if not all(isinstance(key, str) for key, _ in pairs) or len(dict(pairs)) < len(pairs):
            raise ValueError("keys of a Dict are no strings, or not different")
        return spaces.Dict(pairs)
    if kind == "Tuple":
        return spaces.Tuple([_space(sub) for sub in spec["spaces"]])
    raise ValueError(f"{kind!r} is no kind of space")


def _dtype(space: spaces.Space[Any]) -> str:
    assert space.dtype is not None
    text = np.dtype(space.dtype).newbyteorder("<").str
    if not _DTYPE.fullmatch(text):
        raise TypeError(f"A replay file holds numbers and booleans, actual dtype: {space.dtype}")
    return text


def _bounds(array: NDArray[Any]) -> list[Any]:
    """All elements in C order, or one that stands for all; infinite ones as strings."""
    flat = array.ravel()
    same = flat[:1] if flat.size and (flat == flat[0]).all() else flat
    values = same.tolist()
    if array.dtype.kind != "f":
        return list(values)
    return [value if math.isfinite(value) else str(value) for value in map(float, values)]


def _from_bounds(values: list[Any], shape: tuple[int, ...], dtype: Any) -> NDArray[Any]:
    array = np.array([float(value) if isinstance(value, str) else value for value in values], dtype)
    return np.full(shape, array[0])[()] if array.size == 1 else array.reshape(shape)


def generator_to_json(generator: np.random.Generator) -> dict[str, Any]:
    """The state of a random generator.

    Raises:
        TypeError: If it is none that ``numpy.random.default_rng`` makes.
    """
    state: Any = generator.bit_generator.state
    if state["bit_generator"] not in _GENERATORS:
        raise TypeError(f"A replay file holds the state of {_GENERATORS}, actual: {state['bit_generator']}")
    return dict(state)


def generator_from_json(spec: Any) -> np.random.Generator:
    """The generator whose state JSON tells of."""
    if spec["bit_generator"] not in _GENERATORS:
        raise CorruptDataError(f"{spec['bit_generator']!r} is no random generator of replay files")
    bits = getattr(np.random, spec["bit_generator"])(0)
    bits.state = spec
    return np.random.Generator(bits)
