import numpy as np
import pytest
from gymnasium import spaces

from gym_compress.tree import iter_leaves, map_leaves, map_space, replace_leaves

SPACE = spaces.Dict(
    {"b": spaces.Box(0, 1, (2,)), "a": spaces.Tuple([spaces.Discrete(3), spaces.Box(0, 1, (4,))])}
)


def test_each_leaf_meets_its_fellows():
    tree = {"b": 1, "a": (2, 3)}
    assert map_leaves(lambda x: x * 10, tree) == {"b": 10, "a": (20, 30)}
    assert map_leaves(lambda x, y: (x, y), tree, {"b": "x", "a": ("y", {"z": 1})}) == {
        "b": (1, "x"),
        "a": ((2, "y"), (3, {"z": 1})),
    }
    assert map_leaves(lambda x, y: y, tree, {"b": 4, "a": [5, 6]}) == {"b": 4, "a": (5, 6)}
    assert map_leaves(lambda x: x, 5) == 5


@pytest.mark.parametrize(
    "other", [{"b": 1}, {"b": 1, "a": (2, 3), "c": 4}, (1, 2), {"b": 1, "a": (2,)}, {"b": 1, "a": "23"}]
)
def test_another_structure_is_refused(other):
    with pytest.raises(ValueError, match=r"Expected a (dict|tuple).*got (one with|a (tuple|list) of|<class)"):
        map_leaves(lambda x, y: None, {"b": 1, "a": (2, 3)}, other)


def test_each_leaf_comes_with_its_keys():
    tree = {"b": 1, "a": (2, {"c": 3}), "none": {}}
    assert list(iter_leaves(tree)) == [(("b",), 1), (("a", 0), 2), (("a", 1, "c"), 3)]
    assert list(iter_leaves([4], "x", 5)) == [(("x", 5), [4])]


def test_spaces():
    assert map_space(lambda sub: sub.shape, SPACE) == {"b": (2,), "a": ((), (4,))}
    doubled = replace_leaves(
        lambda sub, factor: spaces.Box(0, factor, sub.shape) if isinstance(sub, spaces.Box) else sub,
        SPACE,
        {"b": 2, "a": (0, 3)},
    )
    assert doubled == spaces.Dict(
        {"b": spaces.Box(0, 2, (2,)), "a": spaces.Tuple([spaces.Discrete(3), spaces.Box(0, 3, (4,))])}
    )
    assert list(doubled.spaces) == list(SPACE.spaces)
    assert SPACE["b"].high.max() == 1
    assert doubled.seed(3)
    assert doubled.contains(doubled.sample())
    assert np.all(SPACE["a"][1].high == 1)
