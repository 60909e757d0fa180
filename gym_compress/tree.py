"""Dict and Tuple observations: the same work for each leaf.

A tree is a dict or tuple of trees, or a leaf. Dicts stand for Dict spaces and tuples for Tuple spaces.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

from gymnasium import spaces

__all__ = ["iter_leaves", "map_leaves", "map_space", "replace_leaves"]


def iter_leaves(tree: Any, *keys: Any) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """Each leaf of a tree, after the keys and indices that lead to it, which follow those given."""
    if isinstance(tree, (dict, tuple)):
        for key, sub in tree.items() if isinstance(tree, dict) else enumerate(tree):
            yield from iter_leaves(sub, *keys, key)
    else:
        yield keys, tree


def map_leaves(function: Callable[..., Any], tree: Any, *others: Any) -> Any:
    """Calls ``function(leaf, *leaves)`` for each leaf of a tree and its fellows in other trees.

    The first tree says what is a leaf; the others need its keys and lengths (a list serves for a tuple), and
    may have more below a leaf.

    Returns:
        A tree of the results.

    Raises:
        ValueError: If another tree lacks the first one's structure.
    """
    if isinstance(tree, dict):
        for other in others:
            if not isinstance(other, dict) or other.keys() != tree.keys():
                raise ValueError(f"Expected a dict with the keys {list(tree)}, got {_told(other)}")
        return {key: map_leaves(function, tree[key], *[other[key] for other in others]) for key in tree}
    if isinstance(tree, tuple):
        for other in others:
            if not isinstance(other, (tuple, list)) or len(other) != len(tree):
                raise ValueError(f"Expected a tuple of {len(tree)}, got {_told(other)}")
        return tuple([map_leaves(function, *leaves) for leaves in zip(tree, *others, strict=True)])
    return function(tree, *others)


def _told(other: Any) -> str:
    """A short description for a message."""
    if isinstance(other, dict):
        return f"one with the keys {list(other)}"
    if isinstance(other, (tuple, list)):
        return f"a {type(other).__name__} of {len(other)}"
    return str(type(other))


def map_space(function: Callable[[spaces.Space[Any]], Any], space: spaces.Space[Any]) -> Any:
    """Calls ``function(space)`` for each leaf of a space, and returns a tree of the results."""
    if isinstance(space, spaces.Dict):
        return {key: map_space(function, sub) for key, sub in space.spaces.items()}
    if isinstance(space, spaces.Tuple):
        return tuple([map_space(function, sub) for sub in space.spaces])
    return function(space)


def replace_leaves(
    function: Callable[[spaces.Space[Any], Any], spaces.Space[Any]], space: spaces.Space[Any], tree: Any
) -> spaces.Space[Any]:
    """A copy of a space with each leaf replaced by ``function(leaf, leaf of the tree)``.

    The tree says what is a leaf: below one of its leaves, a Tuple space may stand.
    """
    if isinstance(tree, dict) and isinstance(space, spaces.Dict):
        mapping = copy.deepcopy(space)
        for key, sub in space.spaces.items():
            mapping.spaces[key] = replace_leaves(function, sub, tree[key])
        return mapping
    if isinstance(tree, tuple) and isinstance(space, spaces.Tuple):
        sequence = copy.deepcopy(space)
        pairs = zip(space.spaces, tree, strict=True)
        sequence.spaces = tuple([replace_leaves(function, *pair) for pair in pairs])
        return sequence
    return function(space, tree)
