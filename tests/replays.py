"""Buffers for tests of replay files, and a reader of their format of its own."""

from __future__ import annotations

import hashlib
import json
import sqlite3
import struct
from contextlib import suppress
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import blosc2
import numpy as np
from gymnasium import spaces

from gym_compress import CompressedReplayBuffer, CorruptDataError
from tests.envs import assert_same

STACKS = spaces.Box(0, 255, (4, 20, 18), np.uint8)
MIXED = spaces.Dict(image=spaces.Box(0, 255, (4, 20, 18), np.uint8), vector=spaces.Box(-np.inf, np.inf, (3,)))
ACTIONS = spaces.Discrete(6)
EPISODE = 7


def frame(step: int, env: int) -> np.ndarray:
    """The frame of a step: a pattern that moves."""
    return _pattern((7 * step + 11 * env) % 251)


@cache
def _pattern(start: int) -> np.ndarray:
    pixels = np.arange(20 * 18, dtype=np.int64).reshape(20, 18)
    pattern = ((pixels * 3 + start) % 251).astype(np.uint8)
    pattern.flags.writeable = False
    return pattern


@lru_cache(4096)
def observation(step: int, env: int, episode: int) -> dict[str, np.ndarray]:
    """What an environment gives at a step of an episode: the stack begins anew with it."""
    steps = [max(step - back, episode * EPISODE) for back in (3, 2, 1, 0)]
    vector = np.array([step, -env, step / (episode + 1)], np.float32)
    image = np.stack([frame(i, env) for i in steps])
    image.flags.writeable = vector.flags.writeable = False
    return {"image": image, "vector": vector}


def transition(step: int, n_envs: int) -> tuple[Any, ...]:
    """A step of all environments, as ``add`` takes it; every second episode is ended by a time limit."""
    episode, done = step // EPISODE, step % EPISODE == EPISODE - 1

    def batch(at: int) -> dict[str, np.ndarray]:
        seen = [observation(at, env, episode) for env in range(n_envs)]
        return {key: np.stack([part[key] for part in seen]) for key in ("image", "vector")}

    numbers = np.arange(n_envs)
    infos = [{"TimeLimit.truncated": done and episode % 2 == 1}] * n_envs
    return batch(step), batch(step + 1), (step + numbers) % 6, step + numbers / 4, [done] * n_envs, infos


def feed(buffer: Any, steps: range) -> Any:
    """Adds steps to a buffer of images, or of images and vectors."""
    for step in steps:
        obs, next_obs, *rest = transition(step, buffer.n_envs)
        if not isinstance(buffer.observation_space, spaces.Dict):
            obs, next_obs = obs["image"], next_obs["image"]
        buffer.add(obs, next_obs, *rest)
    return buffer


def made(
    steps: int, rows: int = 40, n_envs: int = 2, space: Any = MIXED, **kwargs: Any
) -> CompressedReplayBuffer:
    """A buffer with some steps."""
    kwargs = {"frames_per_chunk": 5, "seed": 3, **kwargs}
    buffer = CompressedReplayBuffer(rows * n_envs, space, ACTIONS, None, n_envs, **kwargs)
    return feed(buffer, range(steps))


def everything(buffer: Any) -> tuple[Any, ...]:
    """All that a buffer holds."""
    return tuple(buffer.get(np.flatnonzero(buffer.table.valid[: buffer.size()])))


def assert_equal(one: Any, other: Any, *, draw: bool = False) -> None:
    """Both hold the same, and draw the same, if they are to draw."""
    assert (one.size(), one.pos, one.full, one.n_envs) == (other.size(), other.pos, other.full, other.n_envs)
    assert_same(everything(one), everything(other))
    assert_same(one.table.ends[: one.size()], other.table.ends[: other.size()])
    if draw and one.size():
        assert_same(tuple(one.sample(20)), tuple(other.sample(20)))


def assert_holds(buffer: Any, steps: int, rows: int = 40, n_envs: int = 2) -> None:
    """A buffer holds the newest of a number of steps, as they were made."""
    size = min(steps, rows)
    assert (buffer.size(), buffer.pos, buffer.full) == (size, steps % rows, steps >= rows)
    obs, actions, next_obs, dones, rewards = everything(buffer)
    for row in range(size):
        step = steps - 1 - (steps - 1 - row) % rows
        want = transition(step, n_envs)
        for env in range(n_envs):
            place = row * n_envs + env
            for got, expected in ((obs, want[0]), (next_obs, want[1])):
                assert_same(
                    {key: leaf[place] for key, leaf in got.items()}, {k: v[env] for k, v in expected.items()}
                )
            assert (actions[place, 0], rewards[place, 0]) == (want[2][env], np.float32(want[3][env]))
            assert dones[place, 0] == (want[4][env] and not want[5][env]["TimeLimit.truncated"])


# What follows knows FORMAT.md and none of the package's code.


def digest(data: bytes) -> int:
    """The format's hash."""
    return struct.unpack("<q", hashlib.blake2b(data, digest_size=8).digest())[0]


def settings(path: Path) -> dict[str, Any]:
    """The settings of a file."""
    with sqlite3.connect(path) as database:
        (data,) = database.execute("SELECT data FROM settings").fetchone()
    database.close()
    return json.loads(data)


def forge(path: Path, change: Any) -> None:
    """Changes a file and makes all checksums right: what somebody with bad intent would do.

    ``change(settings, arrays, database)`` may change each; ``arrays`` are the decoded ones.
    """
    database = sqlite3.connect(path, isolation_level=None)
    (data,) = database.execute("SELECT data FROM settings").fetchone()
    told = json.loads(data)
    arrays = {name: read_array(database, array) for name, array in told["arrays"].items()}
    before = {name: array.copy() for name, array in arrays.items()}
    change(told, arrays, database)
    for name, array in arrays.items():
        if array.shape != before[name].shape or array.tobytes() != before[name].tobytes():
            write_array(database, told["arrays"][name], array)
            told["next_id"] = database.execute("SELECT max(id) + 1 FROM blobs").fetchone()[0]
    for id_, checksum in database.execute("SELECT id, checksum FROM chunks").fetchall():
        row = database.execute("SELECT data FROM blobs WHERE id = ?", [id_]).fetchone()
        if row is not None and isinstance(row[0], bytes):
            new = digest(struct.pack("<q", id_) + row[0])
            if new != checksum:
                database.execute("UPDATE chunks SET checksum = ? WHERE id = ?", [new, id_])
    data = json.dumps(told).encode()
    checksum = digest(struct.pack("<q", 1) + data)
    database.execute("UPDATE settings SET checksum = ?, data = ?", [checksum, data])
    total = checksum
    for row in database.execute("SELECT id, checksum, stream, first, nbytes, codec FROM chunks"):
        with suppress(struct.error, AttributeError):  # what is no integer or text has no hash
            total += digest(struct.pack("<qqqqq", *row[:5]) + row[5].encode())
    database.execute("UPDATE checkpoint SET digest = ?", [(total + 2**63) % 2**64 - 2**63])
    database.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    database.close()


def read_array(database: sqlite3.Connection, told: dict[str, Any]) -> np.ndarray:
    """An array of a file."""
    parts = []
    for id_, checksum in told["blocks"]:
        (data,) = database.execute("SELECT data FROM blobs WHERE id = ?", [id_]).fetchone()
        assert digest(struct.pack("<q", id_) + data) == checksum
        parts.append(blosc2.decompress(data))
    return np.frombuffer(b"".join(parts), told["dtype"]).reshape(told["shape"]).copy()


def write_array(database: sqlite3.Connection, told: dict[str, Any], array: np.ndarray) -> None:
    """Puts an array in the place of one, in blocks as before."""
    told |= {"dtype": array.dtype.str, "shape": list(array.shape), "blocks": []}
    for start in range(0, len(array), told["rows"]):
        part = np.ascontiguousarray(array[start : start + told["rows"]]).reshape(-1).view(np.uint8)
        (last,) = database.execute("SELECT max(id) FROM blobs").fetchone()
        data = blosc2.compress2(
            part, typesize=array.dtype.itemsize, blocksize=part.nbytes, nthreads=1,
            filters=[blosc2.Filter.SHUFFLE if array.dtype.itemsize > 1 else blosc2.Filter.NOFILTER],
        )  # fmt: skip
        database.execute("INSERT INTO blobs VALUES (?, ?)", [last + 1, data])
        told["blocks"].append([last + 1, digest(struct.pack("<q", last + 1) + data)])


def load_or_make(path: str, kind: str) -> CompressedReplayBuffer:
    """What a process goes on with: the last checkpoint of a file, or an empty buffer."""
    try:
        return CompressedReplayBuffer.load(path, device=None, lazy=kind == "file")
    except (CorruptDataError, FileNotFoundError):
        if kind == "memory":
            return made(0, rows=2000, n_envs=1, space=STACKS)
        Path(path).unlink(missing_ok=True)  # what a killed process left that had not saved yet
        return made(0, rows=2000, n_envs=1, space=STACKS, path=path)
