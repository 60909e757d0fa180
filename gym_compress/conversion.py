"""Replay files from arrays and from SB3's pickles, and arrays from replay files: for ``convert``."""

from __future__ import annotations

import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from gym_compress.errors import GymCompressError
from gym_compress.replay.buffer import CompressedReplayBuffer
from gym_compress.replay.checkpoint import SavedBuffer
from gym_compress.tree import map_leaves

__all__ = ["from_arrays", "from_pickle", "to_npz"]

Advance = Callable[[int, int], object]

_FIELDS = ("actions", "rewards", "dones", "timeouts")
_ROWS = 256  # that are written together


class _Transitions(NamedTuple):
    """Transitions to be stored.

    Attributes:
        fields: ``(rows, n_envs, ...)`` for each field, and for each leaf of observations.
        order: The rows to be stored, oldest first.
        first: The row of the buffer that the oldest goes to.
        arguments: Arguments of the buffer.
    """

    observations: Any
    next_observations: Any
    fields: dict[str, NDArray[Any]]
    order: NDArray[np.int64]
    first: int
    arguments: dict[str, Any]


def from_arrays(path: Path, out: Path, advance: Advance) -> None:
    """Makes a replay file of a ``.npy`` or ``.npz`` file.

    A single array is taken for frames ``(n, *frame)`` that follow each other, n - 1 transitions whose
    actions, rewards and dones are zero. Several are taken for what :func:`to_npz` writes.

    Args:
        path: The file of arrays.
        out: The replay file, which must not be there.
        advance: Called with how many rows are stored, and of how many.

    Raises:
        GymCompressError: If the arrays are neither.
        OSError: If a file cannot be read or written.
    """
    try:
        loaded = np.load(path, mmap_mode="r", allow_pickle=False)
        arrays = {"": loaded} if isinstance(loaded, np.ndarray) else dict(loaded)
    except (ValueError, EOFError, zipfile.BadZipFile) as error:
        raise GymCompressError(f"{path} does not hold arrays of numbers: {error}") from None
    if len(arrays) == 1:
        (frames,) = arrays.values()
        if frames.ndim < 3 or len(frames) < 2:
            raise GymCompressError(
                f"Expected two frames or more, (n, height, width, ...), got {frames.shape}"
            )
        rows = frames[:, None]
        zeros = np.zeros((len(frames) - 1, 1))
        fields = {"actions": zeros.astype(np.int64)[..., None], **dict.fromkeys(_FIELDS[1:], zeros)}
        _store(_from_fields(rows[:-1], rows[1:], fields), out, advance)
        return
    names = [name for name in arrays if name.split(".")[0] == "observations"]
    missing = [name for name in _FIELDS if name not in arrays]
    missing += [f"next_{name}" for name in names if f"next_{name}" not in arrays]
    if not names or missing:
        raise GymCompressError(
            f"{path} lacks {', '.join(missing or ['observations'])}: it has {list(arrays)}"
        )
    if len({array.shape[:2] for array in arrays.values()}) > 1:
        raise GymCompressError(f"The arrays of {path} differ in rows or environments")
    obs: Any = {name.partition(".")[2]: arrays[name] for name in names}
    next_obs: Any = {name.partition(".")[2]: arrays[f"next_{name}"] for name in names}
    if names == ["observations"]:
        obs, next_obs = obs[""], next_obs[""]
    _store(_from_fields(obs, next_obs, {name: arrays[name] for name in _FIELDS}), out, advance)


def _from_fields(obs: Any, next_obs: Any, fields: dict[str, NDArray[Any]]) -> _Transitions:
    rows, n_envs, *action = fields["actions"].shape
    numbers = fields["actions"]
    if numbers.dtype.kind in "iu" and action == [1]:
        start = min(int(numbers.min(initial=0)), 0)
        actions: spaces.Space[Any] = spaces.Discrete(int(numbers.max(initial=0)) - start + 1, start=start)
    else:
        actions = _box(numbers)
    space = (
        spaces.Dict({key: _box(leaf) for key, leaf in obs.items()}) if isinstance(obs, dict) else _box(obs)
    )
    arguments: dict[str, Any] = {"buffer_size": max(rows, 1) * n_envs, "n_envs": n_envs}
    arguments |= {"observation_space": space, "action_space": actions}
    return _Transitions(obs, next_obs, fields, np.arange(rows), 0, arguments)


def _box(array: NDArray[Any]) -> spaces.Box:
    """The space of all arrays of a shape and dtype, without the axes of rows and environments."""
    shape: Any = array.shape[2:]
    if array.dtype.kind not in "biuf":
        raise GymCompressError(f"Expected arrays of numbers, got dtype {array.dtype}")
    dtype: Any = array.dtype.type
    if array.dtype.kind == "b":
        return spaces.Box(0, 1, shape, dtype)
    if array.dtype.kind == "f":
        return spaces.Box(-np.inf, np.inf, shape, dtype)
    return spaces.Box(np.iinfo(dtype).min, np.iinfo(dtype).max, shape, dtype)


def from_pickle(path: Path, out: Path, advance: Advance) -> None:
    """Makes a replay file of what ``model.save_replay_buffer`` of Stable-Baselines3 pickled.

    Unpickling runs whatever code the file holds.

    Args:
        path: The pickle.
        out: The replay file, which must not be there.
        advance: Called with how many rows are stored, and of how many.

    Raises:
        GymCompressError: If SB3 is not installed, or the pickle holds no replay memory of SB3's.
        OSError: If a file cannot be read or written.
    """
    try:
        from stable_baselines3.common.buffers import ReplayBuffer
        from stable_baselines3.common.save_util import load_from_pkl
    except ImportError:
        raise GymCompressError('SB3\'s pickles need SB3: pip install "gym-compress[sb3]"') from None
    try:
        with path.open("rb") as file:
            buffer: Any = load_from_pkl(file)
    except OSError:
        raise
    except Exception as error:
        raise GymCompressError(f"{path} cannot be unpickled: {error}") from error
    if isinstance(buffer, SavedBuffer):
        if out.exists():
            raise FileExistsError(f"{out} is there already")
        buffer.save(out)
        return
    if not isinstance(buffer, ReplayBuffer):
        raise GymCompressError(f"{path} holds no replay memory of SB3's, but a {type(buffer).__name__}")
    rows, first = buffer.size(), buffer.pos if buffer.full else 0
    order = (first + np.arange(rows)) % buffer.buffer_size
    obs, following = buffer.observations, getattr(buffer, "next_observations", None)
    if following is None:  # with optimize_memory_usage they stand a row further, and the oldest row is gone
        following = np.roll(obs, -1, axis=0)
        if buffer.full:
            order, first = order[1:], 0
    arguments = {
        "buffer_size": buffer.buffer_size * buffer.n_envs,
        "n_envs": buffer.n_envs,
        "observation_space": buffer.observation_space,
        "action_space": buffer.action_space,
        "optimize_memory_usage": buffer.optimize_memory_usage,
        "handle_timeout_termination": buffer.handle_timeout_termination,
    }
    fields = {name: getattr(buffer, name) for name in _FIELDS}
    _store(_Transitions(obs, following, fields, order, first, arguments), out, advance)


def _store(source: _Transitions, out: Path, advance: Advance) -> None:
    """Writes transitions to a new replay file."""
    buffer = CompressedReplayBuffer(device=None, path=out, **source.arguments)
    try:
        buffer.pos = source.first
        for done, row in enumerate(source.order):
            obs, next_obs = (
                map_leaves(
                    lambda store, leaf, row=row: leaf[row].reshape(store.shape[1:]), buffer.observations, tree
                )
                for tree in (source.observations, source.next_observations)
            )
            action, reward, ended, timeout = (source.fields[name][row] for name in _FIELDS)
            infos = [{"TimeLimit.truncated": bool(flag)} for flag in timeout]
            buffer.add(obs, next_obs, action, reward, ended, infos)
            advance(done + 1, len(source.order))
        buffer.save()
    except BaseException:
        buffer.close()
        out.unlink()
        raise
    buffer.close()


def to_npz(path: Path, out: Path, advance: Advance) -> None:
    """Writes the transitions of a replay file to an ``.npz`` file, oldest first, a few rows at a time.

    Its arrays are ``observations``, ``next_observations``, ``actions``, ``rewards``, ``dones`` and
    ``timeouts``, ``(rows, n_envs, ...)`` each; for Dict and Tuple observations ``observations.KEY`` and so
    on.

    Args:
        path: The replay file.
        out: The new file, which must not be there.
        advance: Called with how many rows are written, of those of all arrays together.

    Raises:
        CorruptDataError: If the replay file is damaged.
        OSError: If a file cannot be read or written.
    """
    with CompressedReplayBuffer.load(path, device=None, lazy=True) as buffer:
        rows = (np.arange(buffer.size()) + (buffer.pos if buffer.full else 0)) % buffer.buffer_size
        arrays: dict[str, Any] = {}
        for name in ("observations", "next_observations"):
            arrays |= _named(name, getattr(buffer, name))
        arrays |= {name: getattr(buffer, name) for name in _FIELDS}
        done, total = 0, len(rows) * len(arrays)
        try:
            with zipfile.ZipFile(out, "x", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
                for name, kept in arrays.items():
                    with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
                        shape = (len(rows), *kept.shape[1:])
                        header = {"descr": kept.dtype.str, "fortran_order": False, "shape": shape}
                        np.lib.format.write_array_header_2_0(member, header)
                        for start in range(0, len(rows), _ROWS):
                            part = rows[start : start + _ROWS]
                            member.write(np.ascontiguousarray(kept[part]).tobytes())
                            done += len(part)
                            advance(done, total)
        except FileExistsError:
            raise
        except BaseException:
            out.unlink(missing_ok=True)
            raise


def _named(name: str, tree: Any) -> dict[str, Any]:
    """The leaves of a tree, named by their keys."""
    if isinstance(tree, dict):
        parts = tree.items()
    elif isinstance(tree, tuple):
        parts = dict(enumerate(tree)).items()
    else:
        return {name: tree}
    return {key: leaf for part, sub in parts for key, leaf in _named(f"{name}.{part}", sub).items()}
