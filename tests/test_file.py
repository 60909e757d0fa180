"""The format of replay files: read by rules alone, damaged at random, and made by somebody with bad intent."""

import json
import sqlite3
import struct
import subprocess
import sys
import tracemalloc

import blosc2
import numpy as np
import pytest
from gymnasium import spaces

from gym_compress import CompressedReplayBuffer, CorruptDataError
from tests.envs import assert_same
from tests.replays import digest, everything, feed, forge, made, read_array, settings, transition

load = CompressedReplayBuffer.load


@pytest.fixture
def path(tmp_path):
    """A file of 95 steps of two environments, in 40 rows, saved twice."""
    path = tmp_path / "a.replay"
    buffer = made(80)
    buffer.save(path)
    feed(buffer, range(80, 95)).save(path)
    return path


@pytest.mark.parametrize("codec", ["auto", "zstd:3", "none"])
def test_the_rules_of_the_format_alone_give_the_transitions(tmp_path, codec):
    path = tmp_path / "a.replay"
    buffer = made(80, codec=codec)
    buffer.save(path)
    feed(buffer, range(80, 95)).save(path)
    header = path.read_bytes()[:100]
    assert header[:16] == b"SQLite format 3\0"
    assert struct.unpack(">I", header[68:72]) == (0x47794D43,)
    assert struct.unpack(">I", header[60:64]) == (1,)
    told = settings(path)
    database = sqlite3.connect(path)
    total = 0
    streams = {0: {}, 1: {}}
    rows = database.execute("SELECT id, checksum, stream, first, nbytes, codec FROM chunks").fetchall()
    for id_, checksum, stream, first, nbytes, codec_name in rows:
        assert 1 <= id_ < told["next_id"]
        (data,) = database.execute("SELECT data FROM blobs WHERE id = ?", [id_]).fetchone()
        assert digest(struct.pack("<q", id_) + data) == checksum
        raw = data if codec_name == "none" else blosc2.decompress(data)
        assert len(raw) == nbytes
        for i, slice_ in enumerate(np.frombuffer(raw, np.uint8).reshape(-1, 20, 18)):
            assert first + i not in streams[stream]
            streams[stream][first + i] = slice_
        total += digest(struct.pack("<qqqqq", id_, checksum, stream, first, nbytes) + codec_name.encode())
    checksum, data = database.execute("SELECT checksum, data FROM settings").fetchone()
    assert digest(struct.pack("<q", 1) + data) == checksum
    assert (total + checksum + 2**63) % 2**64 - 2**63 == database.execute(
        "SELECT digest FROM checkpoint"
    ).fetchone()[0]
    arrays = {name: read_array(database, array) for name, array in told["arrays"].items()}
    database.close()
    assert (told["pos"], told["full"], told["buffer_size"], told["n_envs"]) == (15, True, 40, 2)
    for row in range(40):
        step = row + 80 if row < 15 else row + 40
        obs, next_obs, actions, rewards, dones, infos = transition(step, 2)
        for env in range(2):
            for name, want in (("observations", obs), ("next_observations", next_obs)):
                number = arrays[f"{name}.0"][row, env]
                numbers = range(number, number + 4)
                assert_same(np.stack([streams[env][int(n)] for n in numbers]), want["image"][env])
                assert_same(arrays[f"{name}.1"][row, env], want["vector"][env])
        assert_same(arrays["actions"][row, :, 0], actions)
        assert_same(arrays["rewards"][row], rewards.astype(np.float32))
        assert arrays["dones"][row].tolist() == dones
        assert arrays["timeouts"][row].tolist() == [info["TimeLimit.truncated"] for info in infos]
        assert arrays["ends"][row].tolist() == dones or row == 14
        assert arrays["valid"][row].all()


def outcome(path, want, lazy):
    """Whether a file gives the right data or is refused."""
    try:
        with load(path, device=None, lazy=lazy) as buffer:
            got = (*everything(buffer), buffer.pos, buffer.full, buffer.sample(9).rewards)
    except CorruptDataError:
        return "refused"
    assert_same(got, want)
    return "same"


@pytest.mark.parametrize("lazy", [False, True])
def test_what_is_refused_is_closed_while_the_error_is_still_held(path, tmp_path, lazy):
    """Else SQLite would delete the log of another file that has taken its name by then."""
    whole = path.read_bytes()
    folder = tmp_path / "bad"
    folder.mkdir()
    errors = []
    for place in range(3000, len(whole), len(whole) // 90):
        data = bytearray(whole)
        data[place : place + 64] = bytes(64)
        (folder / "bad.replay").write_bytes(data)
        try:
            load(folder / "bad.replay", device=None, lazy=lazy).close()
        except CorruptDataError as error:
            errors.append(error)
        assert [file.name for file in folder.iterdir()] == ["bad.replay"]
    assert errors


@pytest.mark.parametrize("every", [pytest.param(1, marks=pytest.mark.slow), 5])
def test_damage_gives_the_right_data_or_is_refused(path, tmp_path, every):
    whole = path.read_bytes()
    with load(path, device=None) as buffer:
        want = (*everything(buffer), buffer.pos, buffer.full, buffer.sample(9).rewards)
    bad = tmp_path / "bad.replay"
    rng = np.random.default_rng(1)
    seen = []

    def check(data):
        bad.write_bytes(data)
        seen.append(outcome(bad, want, lazy=len(seen) % 2 == 1))
        for extra in tmp_path.glob("bad.replay-*"):
            extra.unlink()

    # each byte of the headers of all pages, and some of the others: one bit of it, or all
    places = [page + i for page in range(0, len(whole), 16384) for i in range(0, 100 if page else 120, 3)]
    places += range(15000, 16384, 5)  # where the first page has the tables' SQL
    for place in [*places, *rng.integers(len(whole), size=250)][::every]:
        data = bytearray(whole)
        data[place] ^= int(rng.choice([1, 128, 255]))
        check(data)
    for _ in range(60 // every):
        data = bytearray(whole)
        at, length = int(rng.integers(len(whole))), int(rng.choice([16, 512, 4096]))
        data[at : at + length] = rng.bytes(len(data[at : at + length]))
        check(data)
    for _ in range(40 // every):
        check(whole[: rng.integers(len(whole))])
    assert seen.count("refused") > 150 / every
    assert seen.count("same") > 20


def test_pages_of_an_older_checkpoint_are_noticed(path, tmp_path):
    """A lost write: each page as it was before, alone and with its neighbour."""
    for change, most in (("more transitions", 2), ("the generator alone", 1)):
        older = path.read_bytes()
        buffer = load(path, device=None)
        if change == "more transitions":
            feed(buffer, range(95, 103))
        else:
            buffer.sample(5)
        buffer.save(path)
        whole = path.read_bytes()
        with load(path, device=None) as buffer:
            want = (*everything(buffer), buffer.pos, buffer.full, buffer.sample(9).rewards)
        seen = []
        for start in range(0, len(whole), 16384):
            for pages in range(1, most + 1):
                part = older[start : start + pages * 16384]
                bad = tmp_path / "bad.replay"
                bad.write_bytes(whole[:start] + part + whole[start + len(part) :])
                seen += [outcome(bad, want, lazy=False), outcome(bad, want, lazy=True)]
        assert seen.count("refused") >= 4


def test_every_part_of_the_settings_counts(path):
    whole = path.read_bytes()
    database = sqlite3.connect(path)
    (data,) = database.execute("SELECT data FROM settings").fetchone()
    database.close()
    assert len(data) < 4000  # in one piece
    start = whole.index(data)
    for place in range(start, start + len(data), 11):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        with pytest.raises(CorruptDataError, match="settings"):
            load(path, device=None)


@pytest.mark.slow
def test_a_huge_blob_is_not_read(path):
    forge(path, ATTACKS["a huge blob"])
    with pytest.raises(CorruptDataError, match="too big"):
        load(path, device=None)
    with load(path, device=None, lazy=True) as lazy, pytest.raises(CorruptDataError, match="too big"):
        everything(lazy)


def _set(*keys, value):
    def change(told, arrays, database):
        for key in keys[:-1]:
            told = told[key]
        told[keys[-1]] = value

    return change


def _sql(statement, *values):
    return lambda told, arrays, database: database.execute(statement, values)


def _array(name, change):
    def changed(told, arrays, database):
        arrays[name] = change(arrays[name])

    return changed


def _put(name, place, value):
    def change(array):
        array[place] = value
        return array

    return _array(name, change)


def _nested(depth):
    space = {"kind": "Discrete", "dtype": "<i8", "n": 2, "start": 0}
    for _ in range(depth):
        space = {"kind": "Tuple", "spaces": [space]}
    return space


def _box(*shape, dtype="|u1"):
    return {"kind": "Box", "dtype": dtype, "shape": list(shape), "low": [0], "high": [1]}


def _bomb(told, arrays, database):
    """A chunk of a few bytes that decodes to a gigabyte."""
    buffer = blosc2.compress2(np.zeros(10**9, np.uint8), typesize=1, blocksize=2**29 - 2**12, nthreads=1)
    database.execute("UPDATE blobs SET data = ? WHERE id = (SELECT min(id) FROM chunks)", [buffer])
    database.execute("UPDATE chunks SET nbytes = 1000000000 WHERE id = (SELECT min(id) FROM chunks)")


def _wrong_size(told, arrays, database):
    """A chunk that decodes to more than its row says."""
    buffer = blosc2.compress2(np.zeros(10**6, np.uint8), typesize=1, blocksize=10**6, nthreads=1)
    database.execute("UPDATE blobs SET data = ? WHERE id = (SELECT min(id) FROM chunks)", [buffer])


def _other_codec(told, arrays, database):
    (nbytes,) = database.execute("SELECT nbytes FROM chunks ORDER BY id").fetchone()
    raw = np.arange(nbytes, dtype=np.uint8)
    buffer = blosc2.compress2(raw, codec=blosc2.Codec.BLOSCLZ, typesize=1, blocksize=nbytes, nthreads=1)
    database.execute("UPDATE blobs SET data = ? WHERE id = (SELECT min(id) FROM chunks)", [buffer])


ATTACKS = {
    "a capacity beyond the limit": _set("buffer_size", value=10**12),
    "many environments": _set("n_envs", value=10**6),
    "no environment": _set("n_envs", value=0),
    "another number of environments": _set("n_envs", value=3),
    "no rows": _set("buffer_size", value=0),
    "fewer rows": _set("buffer_size", value=20),
    "rows that are no number": _set("buffer_size", value="40"),
    "a position before the first": _set("pos", value=-1),
    "a position behind the last": _set("pos", value=40),
    "full that is no flag": _set("full", value=1),
    "not full": _set("full", value=False),
    "next_id of another kind": _set("next_id", value=None),
    "next_id too small": _set("next_id", value=3),
    "next_id without a next": _set("next_id", value=2**63 - 1),
    "keys that are no text": _set(
        "observation_space", value={"kind": "Dict", "spaces": [[1, _box(4, 20, 18)]]}
    ),
    "keys that are alike": _set(
        "observation_space", value={"kind": "Dict", "spaces": [["a", _box(4, 20, 18)], ["a", _box(3)]]}
    ),
    "no choices": _set(
        "action_space", value={"kind": "MultiDiscrete", "dtype": "<i8", "nvec": [-1], "start": [0]}
    ),
    "no bits": _set("action_space", value={"kind": "MultiBinary", "n": 0}),
    "next_id too large for SQLite": _set("next_id", value=2**70),
    "arrays of another kind": _set("arrays", value=[]),
    "no compression": _set("compression", value={}),
    "an unknown codec": _set("compression", "codec", value="gzip"),
    "a stack size that does not divide": _set("compression", "stack_size", value=3),
    "an axis that is not there": _set("compression", "stack_axis", value=9),
    "frames without end": _set("compression", "frames_per_chunk", value=10**9),
    "no frames": _set("compression", "frames_per_chunk", value=0),
    "an unknown generator": _set("generator", "bit_generator", value="os.system"),
    "a state of another kind": _set("generator", "state", value={"state": "x", "inc": 1}),
    "a space of another kind": _set("observation_space", value={"kind": "eval"}),
    "no space": _set("observation_space", value=7),
    "a huge space": _set("observation_space", value=_box(10**6, 10**6)),
    "a huge action": _set("action_space", value=_box(10**9)),
    "a huge flat space": _set("observation_space", value=_box(0, 10**12)),
    "many actions": _set("action_space", value={"kind": "MultiBinary", "n": 10**12}),
    "objects": _set("observation_space", value=_box(4, 20, 18, dtype="|O")),
    "negative lengths": _set("observation_space", value=_box(-4, -20, 18)),
    "deep spaces": _set("observation_space", value=_nested(400)),
    "an array too few": lambda told, arrays, database: (told["arrays"].pop("rewards"), arrays.pop("rewards")),
    "an array of another dtype": _array("rewards", lambda array: array.astype(np.float64)),
    "an array of another dtype of that size": _array("rewards", lambda array: array.astype(np.int32)),
    "an array that is shorter": _array("dones", lambda array: array[:-1]),
    "an array that is longer": _array("dones", lambda array: np.concatenate([array, array])),
    "an array with other blocks": _set("arrays", "actions", "rows", value=7),
    "a block in two places": lambda told, arrays, database: told["arrays"]["dones"]["blocks"].__setitem__(
        0, told["arrays"]["timeouts"]["blocks"][0]
    ),
    "blocks beyond the checkpoint": lambda told, arrays, database: told.update(
        next_id=told["arrays"]["rewards"]["blocks"][0][0]
    ),
    "blocks that are missing": _set("arrays", "actions", "blocks", value=[]),
    "a block that is not there": _set("arrays", "actions", "blocks", value=[[9999, 0]]),
    "a block that is a list": _set("arrays", "actions", "blocks", value=[[[1], 2]]),
    "blocks of three": _set("arrays", "actions", "blocks", value=[[1, 2, 3]]),
    "blocks that are a number": _set("arrays", "actions", "blocks", value=7),
    "a block of another kind": _set("arrays", "actions", "blocks", value=[["x", None]]),
    "references that are no integers": _array("observations.0", lambda array: array.astype(np.float32)),
    "valid places of another dtype": _array("valid", lambda array: 2 * array.astype(np.int8)),
    "a reference behind the last slice": _put("observations.0", (3, 1), 2**31 - 1),
    "a reference to evicted slices": _put("observations.0", (3, 1), 1),
    "a reference below zero": _put("next_observations.0", (3, 1), -1),
    "a reference without an end": _array("observations.0", lambda a: np.full(a.shape, 2**63 - 1, np.int64)),
    "a stream that is not there": _sql(
        "UPDATE chunks SET stream = 2 WHERE id = (SELECT max(id) FROM chunks)"
    ),
    "a stream below zero": _sql("UPDATE chunks SET stream = -1"),
    "ranges that overlap": _sql(
        "UPDATE chunks SET first = first - 1 WHERE id = (SELECT max(id) FROM chunks)"
    ),
    "ranges far away": _sql("UPDATE chunks SET first = first + 9000000000000000000"),
    "ranges below zero": _sql("UPDATE chunks SET first = first - 1000"),
    "a first of another kind": _sql("UPDATE chunks SET first = 'x'"),
    "a stream that is no integer": _sql("UPDATE chunks SET stream = 0.5"),
    "a codec that is none": _sql("UPDATE chunks SET codec = 'gzip'"),
    "a codec that is no text": _sql("UPDATE chunks SET codec = x'ff00ff'"),
    "raw bytes that are compressed": _sql("UPDATE chunks SET codec = 'none'"),
    "chunks of no bytes": _sql("UPDATE chunks SET nbytes = 0"),
    "chunks of fewer bytes": _sql("UPDATE chunks SET nbytes = nbytes - 360"),
    "an id below one": _sql("UPDATE chunks SET id = -id"),
    "a chunk that is missing": _sql("DELETE FROM chunks WHERE id = (SELECT max(id) FROM chunks)"),
    "a blob that is missing": _sql("DELETE FROM blobs WHERE id = (SELECT max(id) FROM chunks)"),
    "a blob of text": _sql("UPDATE blobs SET data = 'x'"),
    "blobs of noise": _sql("UPDATE blobs SET data = randomblob(500) WHERE id IN (SELECT id FROM chunks)"),
    "blobs that are empty": _sql("UPDATE blobs SET data = x'' WHERE id IN (SELECT id FROM chunks)"),
    "a huge blob": _sql(
        "UPDATE blobs SET data = zeroblob(300000000) WHERE id = (SELECT min(id) FROM chunks)"
    ),
    "a bomb": _bomb,
    "a chunk of another size": _wrong_size,
    "a codec that is not LZ4 or ZSTD": _other_codec,
    "a further table": _sql("CREATE TABLE more (a)"),
    "an index": _sql("CREATE INDEX i ON chunks (stream)"),
    "a trigger": _sql("CREATE TRIGGER t AFTER INSERT ON chunks BEGIN DELETE FROM blobs; END"),
    "a column more": _sql("ALTER TABLE chunks ADD COLUMN more INTEGER"),
    "another application": _sql("PRAGMA application_id = 7"),
    "a later version": _sql("PRAGMA user_version = 2"),
}


QUICK = {*list(ATTACKS)[::3], "a bomb", "a trigger"} - {"a huge blob"}


@pytest.mark.parametrize(
    "attack", [pytest.param(each, marks=[] if each in QUICK else pytest.mark.slow) for each in ATTACKS]
)
def test_a_file_of_somebody_with_bad_intent_is_refused(path, attack):
    forge(path, ATTACKS[attack])
    for lazy in (False, True):
        tracemalloc.start()
        try:
            with pytest.raises(CorruptDataError), load(path, device=None, lazy=lazy) as buffer:
                everything(buffer)
            assert tracemalloc.get_traced_memory()[1] < 10e6
        finally:
            tracemalloc.stop()


def test_forging_nothing_changes_nothing(path):
    """The tests above refuse for the reason that they are about."""
    want = everything(load(path, device=None))
    forge(path, lambda told, arrays, database: None)
    assert_same(everything(load(path, device=None)), want)
    forge(path, _put("rewards", (0, 0), 17.0))
    assert load(path, device=None).get([0]).rewards[0, 0] == 17


def test_a_view_in_the_place_of_a_table_is_refused(path):
    with sqlite3.connect(path) as database:
        database.execute("ALTER TABLE blobs RENAME TO other")
        database.execute("CREATE VIEW blobs AS SELECT id, data FROM other")
    database.close()
    with pytest.raises(CorruptDataError, match="other tables"):
        load(path, device=None)


def test_a_capacity_that_is_larger_than_the_content_costs_nothing(path):
    def change(told, arrays, database):
        told |= {"buffer_size": 10**8, "full": False, "pos": 40}

    forge(path, change)
    with open("/proc/self/statm") as statm:
        before = int(statm.read().split()[1])
        buffer = load(path, device=None)
        statm.seek(0)
        assert int(statm.read().split()[1]) - before < 20_000  # pages
    assert (buffer.size(), buffer.buffer_size) == (40, 10**8)


def test_settings_of_no_json_or_too_many_bytes_are_refused(path):
    for data in (b"", b"{", b"[]", b"\xff", b"1" * 5000, b"[" * 100_000, b" " * (2**24 + 1)):
        with sqlite3.connect(path) as database:
            checksum = digest(struct.pack("<q", 1) + data)
            database.execute("UPDATE settings SET data = ?, checksum = ?", [data, checksum])
        database.close()
        with pytest.raises(CorruptDataError):
            load(path, device=None)


def test_no_pickle_is_used(path):
    code = """
import pickle, sys
def refuse(*args, **kwargs):
    raise AssertionError("pickle was used")
from gym_compress import CompressedReplayBuffer
pickle.load = pickle.loads = pickle.Unpickler = pickle.dump = pickle.dumps = pickle.Pickler = refuse
buffer = CompressedReplayBuffer.load(sys.argv[1], device=None)
buffer.save(sys.argv[1])
"""
    subprocess.run([sys.executable, "-c", code, str(path)], check=True)


def test_a_file_that_nobody_can_write_is_read(path):
    """Where neither locks nor a log can be written, as on a medium that is read-only."""
    import gym_compress.replay.file.reader as reading

    want = everything(load(path, device=None))
    modes = []

    class Refusing(sqlite3.Connection):
        def execute(self, *args):
            error = sqlite3.OperationalError("unable to open database file")
            error.sqlite_errorcode = sqlite3.SQLITE_CANTOPEN
            raise error

    def connect(path, mode):
        modes.append(mode)
        factory = sqlite3.Connection if "immutable" in mode else Refusing
        return sqlite3.connect(f"file:{path}?mode={mode}", uri=True, isolation_level=None, factory=factory)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reading.fmt, "connect", connect)
        patch.setattr(reading.os, "access", lambda *args: False)
        for lazy in (False, True):
            with load(path, device=None, lazy=lazy) as buffer:
                assert_same(everything(buffer), want)
    assert modes == ["rw", "ro&immutable=1"] * 2


def test_raw_chunks_survive(tmp_path):
    space = spaces.Box(-1, 1, (20, 20), np.float32)
    buffer = CompressedReplayBuffer(20, space, spaces.Discrete(2), None, codec="none")
    values = np.random.default_rng(0).normal(size=(31, 1, 20, 20)).astype(np.float32)
    for i in range(30):
        buffer.add(values[i], values[i + 1], [0], [i], [False], [{}])
    buffer.save(tmp_path / "a.replay")
    assert json.loads(json.dumps(settings(tmp_path / "a.replay")))["compression"]["codec"] == "none"
    for lazy in (False, True):
        with load(tmp_path / "a.replay", device=None, lazy=lazy) as loaded:
            assert_same(everything(loaded), everything(buffer))
