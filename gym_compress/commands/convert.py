"""Replay files from arrays and from SB3's pickles, and arrays from replay files: for ``convert``."""

from __future__ import annotations

import os
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from gym_compress.errors import GymCompressError
from gym_compress.replay.buffer import CompressedReplayBuffer
from gym_compress.replay.file.checkpoint import CheckpointMixin
from gym_compress.tree import map_leaves

__all__ = ["from_arrays", "from_pickle", "to_npz"]

Advance = Callable[[int, int], object]

_FIELDS = ("actions", "rewards", "dones", "timeouts")
_ROWS = 256  # that are written together


class _Transitions(NamedTuple):
    """Transitions to be stored, ``(rows, n_envs, ...)`` for each field and each leaf of observations.

    Attributes:
        order: The rows to be stored, oldest first.
        first: The row of the buffer that the oldest goes to.
    """

    observations: Any
    next_observations: Any
    fields: dict[str, NDArray[Any]]
    order: NDArray[np.int64]
    first: int = 0


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
    except OSError:
        raise
    except Exception:  # damaged files lead to many
        raise GymCompressError(
            f"{path} is no file of NumPy's, .npy or .npz, with arrays of numbers"
        ) from None
    if len(arrays) == 1:
        (frames,) = arrays.values()
        if frames.ndim < 3 or len(frames) < 2:
            raise GymCompressError(
                f"Expected two frames or more, (n, height, width, ...), got {frames.shape}"
            )
        rows = frames[:, None]
        zeros = np.zeros((len(frames) - 1, 1))
        fields = {"actions": zeros.astype(np.int64)[..., None], **dict.fromkeys(_FIELDS[1:], zeros)}
        _convert_arrays(rows[:-1], rows[1:], fields, out, advance)
        return
    names = [name for name in arrays if name.split(".")[0] == "observations"] or ["observations"]
    needed = [*names, *[f"next_{name}" for name in names], *_FIELDS]
    if missing := [name for name in needed if name not in arrays]:
        raise GymCompressError(f"{path} lacks {', '.join(missing)}: it has {', '.join(arrays)}")
    shapes = {name: arrays[name].shape for name in needed}
    if len({shape[:2] for shape in shapes.values()}) > 1 or min(map(len, shapes.values())) < 2:
        raise GymCompressError(f"Expected arrays (rows, environments, ...) of the same length, got {shapes}")
    for name in names:
        ours, theirs = arrays[name], arrays[f"next_{name}"]
        if (ours.shape, ours.dtype) != (theirs.shape, theirs.dtype):
            expected = f"{ours.dtype} {ours.shape} as {name}"
            raise GymCompressError(f"Expected next_{name} of {expected}, got {theirs.dtype} {theirs.shape}")
    if len(shapes["actions"]) < 3:
        raise GymCompressError(f"Expected actions (rows, environments, numbers), got {shapes['actions']}")
    obs: Any = {name.partition(".")[2]: arrays[name] for name in names}
    next_obs: Any = {name.partition(".")[2]: arrays[f"next_{name}"] for name in names}
    if names == ["observations"]:
        obs, next_obs = obs[""], next_obs[""]
    _convert_arrays(obs, next_obs, {name: arrays[name] for name in _FIELDS}, out, advance)


def _convert_arrays(
    obs: Any, next_obs: Any, fields: dict[str, NDArray[Any]], out: Path, advance: Advance
) -> None:
    numbers = fields["actions"]
    rows, n_envs, *action = numbers.shape
    with _wrong_as_errors(f"The arrays cannot be kept in {out}"):
        if numbers.dtype.kind in "iu" and action == [1]:
            start = min(int(numbers.min(initial=0)), 0)
            actions: spaces.Space[Any] = spaces.Discrete(int(numbers.max(initial=0)) - start + 1, start=start)
        else:
            actions = _box(numbers)
        space = (
            spaces.Dict({key: _box(leaf) for key, leaf in obs.items()})
            if isinstance(obs, dict)
            else _box(obs)
        )
        source = _Transitions(obs, next_obs, fields, np.arange(rows))
        with (
            _whole(out) as part,
            CompressedReplayBuffer(max(rows, 1) * n_envs, space, actions, None, n_envs, path=part) as buffer,
        ):
            _fill(buffer, CompressedReplayBuffer.add, source, advance)
            buffer.save()


@contextmanager
def _whole(out: Path) -> Iterator[Path]:
    """A name to write to; the file is called ``out`` when it is whole, and is gone if it is not to be."""
    if out.exists():
        raise FileExistsError(f"{out} is there already")
    part = out.with_name(f"{out.name}.part")
    part.unlink(missing_ok=True)
    try:
        yield part
        os.replace(part, out)
    finally:
        part.unlink(missing_ok=True)


@contextmanager
def _wrong_as_errors(message: str) -> Iterator[None]:
    """What arguments are refused with as errors of the package's own, which the command tells in a line."""
    try:
        yield
    except GymCompressError:
        raise
    except (ValueError, TypeError, OverflowError) as error:
        raise GymCompressError(f"{message}: {error}") from error


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
        from stable_baselines3 import HerReplayBuffer
        from stable_baselines3.common import buffers
        from stable_baselines3.common.save_util import load_from_pkl
    except ImportError:
        raise GymCompressError('SB3\'s pickles need SB3: pip install "gym-compress[sb3]"') from None
    import gym_compress.sb3 as ours

    try:
        with path.open("rb") as file:
            buffer: Any = load_from_pkl(file)
    except OSError:
        raise
    except Exception as error:
        raise GymCompressError(f"{path} cannot be unpickled: {error}") from error
    with _whole(out) as part, _wrong_as_errors(f"{path} cannot be kept in {out}"):
        if isinstance(buffer, CheckpointMixin):
            buffer.save(part)
            return
        if not isinstance(buffer, buffers.ReplayBuffer):
            raise GymCompressError(f"{path} holds no replay memory of SB3's, but a {type(buffer).__name__}")
        kwargs: dict[str, Any] = {"n_envs": buffer.n_envs}
        kwargs |= {"handle_timeout_termination": buffer.handle_timeout_termination}
        cls: type[Any] = ours.CompressedReplayBuffer
        if isinstance(buffer, HerReplayBuffer):
            cls = ours.CompressedHerReplayBuffer
            names = "n_sampled_goal", "goal_selection_strategy", "copy_info_dict"
            kwargs |= {"env": None, **{name: getattr(buffer, name) for name in names}}
        elif isinstance(buffer, buffers.DictReplayBuffer):
            cls = ours.CompressedDictReplayBuffer
        elif isinstance(buffer, buffers.NStepReplayBuffer):
            cls = ours.CompressedNStepReplayBuffer
            kwargs |= {"n_steps": buffer.n_steps, "gamma": buffer.gamma}
        else:
            kwargs["optimize_memory_usage"] = buffer.optimize_memory_usage
        transitions = buffer.buffer_size * buffer.n_envs
        made = cls(transitions, buffer.observation_space, buffer.action_space, device="cpu", **kwargs)
        made.checked_settings()  # what could not be saved is refused before the work
        _fill(made, ours.CompressedDictReplayBuffer.add, _rows_of(buffer), advance)
        for name in ("ep_start", "ep_length", "_current_ep_start"):
            if hasattr(buffer, name):
                setattr(made, name, getattr(buffer, name))
        made.save(part)


def _rows_of(buffer: Any) -> _Transitions:
    """The transitions of one of SB3's own buffers."""
    first = buffer.pos if buffer.full else 0
    order = (first + np.arange(buffer.size())) % buffer.buffer_size
    obs, following = buffer.observations, getattr(buffer, "next_observations", None)
    if following is None:  # with optimize_memory_usage they stand a row further, and the oldest row is gone
        following = np.roll(obs, -1, axis=0)
        if buffer.full:
            order, first = order[1:], 0
    return _Transitions(obs, following, {name: getattr(buffer, name) for name in _FIELDS}, order, first)


def _fill(buffer: Any, add: Callable[..., None], source: _Transitions, advance: Advance) -> None:
    """Stores transitions in an empty buffer."""
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
        add(buffer, obs, next_obs, action, reward, ended, infos)
        advance(done + 1, len(source.order))


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
        with (
            _whole(out) as part,
            zipfile.ZipFile(part, "x", zipfile.ZIP_DEFLATED, compresslevel=1) as archive,
        ):
            for name, kept in arrays.items():
                with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
                    shape = (len(rows), *kept.shape[1:])
                    header = {"descr": kept.dtype.str, "fortran_order": False, "shape": shape}
                    np.lib.format.write_array_header_2_0(member, header)
                    for start in range(0, len(rows), _ROWS):
                        some = rows[start : start + _ROWS]
                        member.write(np.ascontiguousarray(kept[some]).tobytes())
                        done += len(some)
                        advance(done, total)


def _named(name: str, tree: Any) -> dict[str, Any]:
    """The leaves of a tree, named by their keys."""
    if isinstance(tree, dict):
        parts = tree.items()
    elif isinstance(tree, tuple):
        parts = dict(enumerate(tree)).items()
    else:
        return {name: tree}
    found: dict[str, Any] = {}
    for part, sub in parts:
        leaves = _named(f"{name}.{part}", sub)
        if leaves.keys() & found.keys():
            raise GymCompressError(
                f"Two leaves would have the name {min(leaves.keys() & found.keys())} in the .npz"
            )
        found |= leaves
    return found
