"""Replay files from arrays and from SB3's pickles, and arrays from replay files: for ``convert``."""

from __future__ import annotations

import os
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from gym_compress.errors import GymCompressError
from gym_compress.replay.buffer import CompressedReplayBuffer
from gym_compress.replay.file.checkpoint import CheckpointMixin
from gym_compress.spaces import space_of
from gym_compress.tree import iter_leaves, map_leaves

Advance = Callable[[int, int], object]

_OBSERVATIONS = ("observations", "next_observations")
_FIELDS = ("actions", "rewards", "dones", "timeouts")
_ROWS = 256  # that are written together


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
    arrays = _read_arrays(path)
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
    for name in ("actions", *names):
        if arrays[name].dtype.kind not in "biuf":
            raise GymCompressError(f"Expected arrays of numbers, got dtype {arrays[name].dtype}")

    source: dict[str, Any] = dict(arrays)
    if names != ["observations"]:
        for tree, prefix in zip(_OBSERVATIONS, ("", "next_"), strict=True):
            source[tree] = {name.partition(".")[2]: arrays[prefix + name] for name in names}
    numbers = arrays["actions"]
    rows, n_envs, *action = numbers.shape
    with _whole(out, "The arrays") as part:
        actions: spaces.Space[Any]
        if numbers.dtype.kind in "iu" and action == [1]:
            start = min(int(numbers.min(initial=0)), 0)
            actions = spaces.Discrete(int(numbers.max(initial=0)) - start + 1, start=start)
        else:
            actions = space_of(numbers, axes=2)
        space = space_of(source["observations"], axes=2)
        with CompressedReplayBuffer(max(rows, 1) * n_envs, space, actions, None, n_envs, path=part) as buffer:
            _fill(buffer, CompressedReplayBuffer.add, source, np.arange(rows), advance)
            buffer.save()


def _read_arrays(path: Path) -> dict[str, NDArray[Any]]:
    """The arrays of a file as :func:`to_npz` names them; a single one is taken for frames."""
    try:
        loaded = np.load(path, mmap_mode="r", allow_pickle=False)
        arrays = {"": loaded} if isinstance(loaded, np.ndarray) else dict(loaded)
    except OSError:
        raise
    except Exception:  # damaged files lead to many
        raise GymCompressError(
            f"{path} is no file of NumPy's, .npy or .npz, with arrays of numbers"
        ) from None
    if len(arrays) != 1:
        return arrays
    (frames,) = arrays.values()
    if frames.ndim < 3 or len(frames) < 2:
        raise GymCompressError(f"Expected two frames or more, (n, height, width, ...), got {frames.shape}")
    rows = frames[:, None]
    zeros = np.zeros((len(frames) - 1, 1))
    arrays = {"observations": rows[:-1], "next_observations": rows[1:], **dict.fromkeys(_FIELDS, zeros)}
    return {**arrays, "actions": zeros.astype(np.int64)[..., None]}


@contextmanager
def _whole(out: Path, what: str) -> Iterator[Path]:
    """A name to write to; the file is called ``out`` when it is whole, and is gone if it is not to be.

    Errors over wrong arguments become one of the package's own, which the command tells in a line.
    """
    part = out.with_name(f"{out.name}.part")
    part.unlink(missing_ok=True)
    try:
        yield part
        os.replace(part, out)
    except GymCompressError:
        raise
    except (ValueError, TypeError, OverflowError) as error:
        raise GymCompressError(f"{what} cannot be kept in {out}: {error}") from error
    finally:
        part.unlink(missing_ok=True)


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
    with _whole(out, str(path)) as part:
        if isinstance(buffer, CheckpointMixin):
            buffer.save(part)
            return
        cls: type[Any]
        names: tuple[str, ...]
        if isinstance(buffer, HerReplayBuffer):
            cls = ours.CompressedHerReplayBuffer
            names = ("env", "n_sampled_goal", "goal_selection_strategy", "copy_info_dict")
        elif isinstance(buffer, buffers.DictReplayBuffer):
            cls, names = ours.CompressedDictReplayBuffer, ()
        elif isinstance(buffer, buffers.NStepReplayBuffer):
            cls, names = ours.CompressedNStepReplayBuffer, ("n_steps", "gamma")
        elif isinstance(buffer, buffers.ReplayBuffer):
            cls, names = ours.CompressedReplayBuffer, ("optimize_memory_usage",)
        else:
            raise GymCompressError(f"{path} holds no replay memory of SB3's, but a {type(buffer).__name__}")
        names += ("n_envs", "handle_timeout_termination")
        kwargs = {name: getattr(buffer, name) for name in names}
        transitions = buffer.buffer_size * buffer.n_envs
        made = cls(transitions, buffer.observation_space, buffer.action_space, device="cpu", **kwargs)
        made.checked_settings()  # what could not be saved is refused before the work
        source = {name: getattr(buffer, name, None) for name in (*_OBSERVATIONS, *_FIELDS)}
        first = buffer.pos if buffer.full else 0
        order = (first + np.arange(buffer.size())) % buffer.buffer_size
        if source["next_observations"] is None:  # optimize_memory_usage: they stand a row further
            source["next_observations"] = np.roll(buffer.observations, -1, axis=0)
            if buffer.full:  # the oldest row is gone
                order, first = order[1:], 0
        made.pos = first
        _fill(made, ours.CompressedDictReplayBuffer.add, source, order, advance)
        for name in ("ep_start", "ep_length", "_current_ep_start"):
            if hasattr(buffer, name):
                setattr(made, name, getattr(buffer, name))
        made.save(part)


def _fill(
    buffer: Any, add: Callable[..., None], source: dict[str, Any], order: NDArray[np.int64], advance: Advance
) -> None:
    """Stores rows of transitions in an order, from the row of the buffer that is next.

    They are named as :func:`to_npz` does, but observations may be a dict of arrays ``(rows, n_envs, ...)``.
    """
    for done, row in enumerate(order):
        obs, next_obs = (
            map_leaves(
                lambda store, leaf, row=row: leaf[row].reshape(store.shape[1:]),
                buffer.observations,
                source[name],
            )
            for name in _OBSERVATIONS
        )
        action, reward, ended, timeout = (source[name][row] for name in _FIELDS)
        infos = [{"TimeLimit.truncated": bool(flag)} for flag in timeout]
        add(buffer, obs, next_obs, action, reward, ended, infos)
        advance(done + 1, len(order))


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
        for tree in _OBSERVATIONS:
            for keys, leaf in iter_leaves(getattr(buffer, tree), tree):
                name = ".".join(map(str, keys))
                if name in arrays:
                    raise GymCompressError(f"Two leaves would have the name {name} in the .npz")
                arrays[name] = leaf
        arrays |= {name: getattr(buffer, name) for name in _FIELDS}
        done, total = 0, len(rows) * len(arrays)
        with (
            _whole(out, str(path)) as part,
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
