import json

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces
from hypothesis import given
from hypothesis import strategies as st

from gym_compress import CompressedBox
from gym_compress.replay.settings import (
    element_nbytes,
    generator_from_json,
    generator_to_json,
    space_from_json,
    space_to_json,
)

DTYPES = ["u1", "u2", "u4", "u8", "i1", "i2", "i4", "i8", "f2", "f4", "f8"]


@st.composite
def boxes(draw):
    dtype = np.dtype(draw(st.sampled_from(DTYPES)))
    shape = tuple(draw(st.lists(st.integers(0, 4), max_size=3)))
    if dtype.kind == "f":
        numbers = st.floats(width=8 * dtype.itemsize, allow_nan=False)
    else:
        numbers = st.integers(np.iinfo(dtype).min, np.iinfo(dtype).max)
    if draw(st.booleans()):
        values = [draw(numbers)] * int(np.prod(shape))
    else:
        values = [draw(numbers) for _ in range(int(np.prod(shape)))]
    low = np.array(values, dtype).reshape(shape)
    kind = draw(st.sampled_from([spaces.Box, CompressedBox]))
    return kind(low[()], np.maximum(low, low.dtype.type(1))[()], shape, dtype.type)


leaves = st.one_of(
    boxes(),
    st.builds(lambda n, start: spaces.Discrete(n, start=start), st.integers(1, 9), st.integers(-5, 5)),
    st.builds(spaces.MultiDiscrete, st.lists(st.integers(1, 9), min_size=1, max_size=3)),
    st.builds(lambda n: spaces.MultiDiscrete([[n, 2], [3, n]], start=[[1, 2], [n, 0]]), st.integers(1, 9)),
    st.builds(
        spaces.MultiBinary, st.one_of(st.integers(1, 9), st.lists(st.integers(1, 3), min_size=1, max_size=3))
    ),
)
nested = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.dictionaries(st.text(max_size=3), inner, max_size=3).map(spaces.Dict),
        st.lists(inner, max_size=3).map(spaces.Tuple),
    ),
    max_leaves=5,
)


@given(nested)
def test_spaces_are_the_same_after_json(space):
    told = json.loads(json.dumps(space_to_json(space), allow_nan=False))
    again = space_from_json(told)
    assert again == space
    assert type(again) is type(space)
    assert again.dtype == space.dtype
    flat = gym.spaces.utils.flatten_space(space) if isinstance(space, spaces.Box) else None
    if flat is not None and 0 not in space.shape:
        assert element_nbytes(told) == np.zeros(space.shape, space.dtype).nbytes


def test_order_of_keys_is_kept():
    space = spaces.Dict([("b", spaces.Discrete(2)), ("a", spaces.Discrete(3))])
    assert list(space_from_json(space_to_json(space)).spaces) == list(space.spaces)


def test_bounds_stand_for_all_where_all_are_alike():
    assert space_to_json(spaces.Box(0, 255, (4, 84, 84), np.uint8)) == {
        "kind": "Box", "dtype": "|u1", "shape": (4, 84, 84), "low": [0], "high": [255],
    }  # fmt: skip
    low, high = np.array([[-np.inf, 0], [1, np.inf]], np.float32)
    told = space_to_json(spaces.Box(low, high, dtype=np.float32))
    assert (told["low"], told["high"]) == (["-inf", 0.0], [1.0, "inf"])


def test_what_a_file_cannot_hold():
    with pytest.raises(TypeError, match="keys are strings"):
        space_to_json(spaces.Dict({1: spaces.Discrete(2)}))
    for space in (
        spaces.Text(5),
        spaces.Graph(spaces.Discrete(2), None),
        spaces.Sequence(spaces.Discrete(2)),
    ):
        with pytest.raises(TypeError, match="Box, Discrete"):
            space_to_json(space)
    with pytest.raises(TypeError, match="dtype"):
        space_to_json(spaces.Box(0, 1, (2,), np.longdouble))
    space_to_json(spaces.Box(0, 255, (2**25,), np.uint8))
    with pytest.raises(ValueError, match="at most"):
        space_to_json(spaces.Tuple([spaces.Box(0, 255, (2**24,), np.uint8)] * 3))


@pytest.mark.parametrize("kind", [np.random.PCG64, np.random.PCG64DXSM])
def test_a_generator_goes_on(kind):
    generator = np.random.Generator(kind(5))
    generator.integers(9, size=3, dtype=np.int32)  # half a word is left
    again = generator_from_json(json.loads(json.dumps(generator_to_json(generator))))
    assert (
        again.integers(2**31, size=5, dtype=np.int32) == generator.integers(2**31, size=5, dtype=np.int32)
    ).all()
    assert (again.random(5) == generator.random(5)).all()
    assert type(again.bit_generator) is kind


def test_other_generators_are_refused():
    with pytest.raises(TypeError, match="PCG64"):
        generator_to_json(np.random.Generator(np.random.Philox(1)))
