"""Saving and loading buffers: what a loaded one holds, what is written, and what holds a file."""

import copy
import linecache
import pickle
import shutil
import sqlite3
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
from gymnasium import spaces
from hypothesis import given
from hypothesis import strategies as st

from gym_compress import CompressedFrameStack, CompressedReplayBuffer, CompressObservation, CorruptDataError
from gym_compress.chunk import Chunk
from gym_compress.errors import GymCompressError
from tests.envs import AnyEnv, MovingSquare, assert_same, play
from tests.replays import (
    ACTIONS,
    MIXED,
    STACKS,
    assert_equal,
    assert_holds,
    everything,
    feed,
    forge,
    made,
)

load = CompressedReplayBuffer.load


def ids(path):
    """The ids of the chunks, and of all blobs, of a file."""
    with sqlite3.connect(path) as database:
        found = [
            {id_ for (id_,) in database.execute(f"SELECT id FROM {table}")} for table in ("chunks", "blobs")
        ]
    database.close()
    return found


@pytest.mark.parametrize("lazy", [False, True])
@pytest.mark.parametrize("steps", [0, 1, 23, 40, 95])
def test_a_loaded_buffer_is_what_was_saved_and_goes_on_as_it_would_have(tmp_path, steps, lazy):
    path = tmp_path / "a.replay"
    buffer = made(steps)
    buffer.sample(3) if steps else None
    buffer.save(path)
    assert [p.name for p in tmp_path.iterdir()] == ["a.replay"]
    with load(path, device=None, lazy=lazy) as loaded:
        assert_holds(loaded, steps)
        assert_equal(loaded, buffer, draw=True)
        assert loaded.observation_space == MIXED
        assert loaded.action_space == ACTIONS
        feed(buffer, range(steps, steps + 60))
        feed(loaded, range(steps, steps + 60))
        assert_holds(loaded, steps + 60)
        assert_equal(loaded, buffer, draw=True)
        assert_same(tuple(loaded.sample_sequences(5, 4)), tuple(buffer.sample_sequences(5, 4)))
        loaded.save(path)
    assert [p.name for p in tmp_path.iterdir()] == ["a.replay"]
    assert_holds(load(path, device=None), steps + 60)


def test_settings_survive(tmp_path):
    arguments = {
        "optimize_memory_usage": True,
        "handle_timeout_termination": False,
        "stack_size": 2,
        "stack_axis": -1,
    }
    buffer = CompressedReplayBuffer(
        30,
        spaces.Box(-1, 1, (20, 18, 4)),
        spaces.Box(-1, 1, (2, 3), np.float64),
        None,
        3,
        codec="zstd:2",
        **arguments,
    )
    buffer.save(tmp_path / "a.replay")
    loaded = load(str(tmp_path / "a.replay"), device="cpu")
    assert loaded.buffer_size == 10
    assert loaded.device.type == "cpu"
    assert loaded.optimize_memory_usage
    assert not loaded.handle_timeout_termination
    assert loaded.table.compression == buffer.table.compression._replace(codec="zstd:2")
    assert loaded.action_space == buffer.action_space
    assert loaded.actions.dtype == np.float32


@given(data=st.data())
def test_any_order_of_adds_saves_loads_and_resets(tmp_path_factory, data):
    """Beside a buffer that is only filled: what is saved in steps, to two files, and loaded again, is the same."""
    folder = tmp_path_factory.mktemp("any")
    paths = [folder / "a.replay", folder / "b.replay"]
    rows, n_envs = data.draw(st.integers(1, 30)), data.draw(st.integers(1, 2))
    kwargs = {"rows": rows, "n_envs": n_envs, "frames_per_chunk": data.draw(st.integers(1, 6))}
    kwargs["codec"] = data.draw(st.sampled_from(["auto", "zstd:1", "none"]))
    kwargs["path"] = data.draw(st.sampled_from([None, folder / "own.replay"]))
    want, buffer = made(0, **kwargs | {"path": None}), made(0, **kwargs)
    step = 0
    orders = st.sampled_from(["add", "add", "add", "save", "save", "load", "lazy", "reset", "copy"])
    for order in data.draw(st.lists(orders, max_size=25)):
        if order == "add":
            count = data.draw(st.integers(1, 40))
            feed(want, range(step, step + count)), feed(buffer, range(step, step + count))
            step += count
        elif order == "reset":
            want.reset(), buffer.reset()
        elif order == "copy":
            if buffer._file is None:
                buffer = copy.deepcopy(buffer)
        else:
            path = data.draw(st.sampled_from([*paths, None] if buffer._file else paths))
            buffer.save(path)
            if order != "save":
                path = path or buffer._file.path
                buffer.close()
                buffer = load(path, device=None, lazy=order == "lazy")
    assert_equal(buffer, want)
    buffer.save(paths[0])
    buffer.close()
    assert_equal(load(paths[0], device=None), want, draw=True)


def test_a_later_save_writes_what_changed_and_uses_space_again(tmp_path):
    path = tmp_path / "a.replay"
    buffer = made(400, rows=400, space=STACKS)
    buffer.save(path)
    chunks, _ = ids(path)
    highest = max(chunks)
    size = path.stat().st_size
    for start in range(400, 800, 20):
        feed(buffer, range(start, start + 20))
        buffer.save(path)
        before, (chunks, _) = chunks, ids(path)
        kept = len(before & chunks)
        assert kept >= 0.85 * len(before)  # 5 % of the rows are new; references begin within chunks
        assert min(chunks - before) > highest  # no id is used twice
        highest = max(chunks)
    assert path.stat().st_size <= 1.3 * size
    chunks, blobs = ids(path)
    array_blocks = blobs - chunks
    assert chunks <= blobs
    assert len(array_blocks) < 30
    buffer.save(path)
    assert ids(path)[0] == chunks  # nothing changed
    assert_equal(load(path, device=None), buffer)


def test_what_wrappers_still_write_is_saved_as_far_as_it_was_referred_to(tmp_path):
    path = tmp_path / "a.replay"
    for kwargs in ({}, {"path": tmp_path / "own.replay"}):
        env = CompressedFrameStack(
            CompressObservation(MovingSquare(), frames_per_chunk=6), 3, padding_type="zero"
        )
        buffer = CompressedReplayBuffer(40, env.observation_space, ACTIONS, None, seed=1, **kwargs)
        seen = play(env, 130)
        arrays = [np.asarray(obs) for obs in seen]
        for i in range(120):
            buffer.add([seen[i]], [seen[i + 1]], [0], [i], [False], [{}])
            if i % 4 == 3:
                buffer.save(path)
                rewards = everything(loaded := load(path, device=None))[4][:, 0].astype(int)
                assert_same(everything(loaded)[0], np.stack([arrays[k] for k in rewards]))
                assert_same(everything(loaded)[2], np.stack([arrays[k + 1] for k in rewards]))
                assert_same(everything(buffer), everything(loaded))
        buffer.close()


def test_an_env_that_is_stepped_between_add_and_save(tmp_path):
    """A chunk that was saved half written is saved anew when more of it is referred to."""
    env = CompressObservation(MovingSquare(), frames_per_chunk=6)
    buffer = CompressedReplayBuffer(50, env.observation_space, ACTIONS, None, seed=1)
    obs, _ = env.reset(seed=1)
    kept = []
    for i in range(45):
        following, *_ = env.step(0)
        buffer.add([obs], [following], [0], [i], [False], [{}])
        kept.append(np.asarray(obs))
        obs = following
        buffer.save(tmp_path / "a.replay")
        loaded = load(tmp_path / "a.replay", device=None)
        assert_same(everything(loaded)[0], np.stack(kept))


def test_saving_elsewhere_or_over_another_buffers_file(tmp_path):
    one, other = made(30), made(77, n_envs=1)
    first, second = tmp_path / "1.replay", tmp_path / "2.replay"
    one.save(first), other.save(second)
    for buffer, path in ((one, second), (other, first), (one, first), (one, first), (other, first)):
        feed(buffer, range(buffer.pos, buffer.pos + 5))
        buffer.save(path)
        assert_equal(load(path, device=None), buffer)
    first.rename(tmp_path / "moved.replay")
    blobs = ids(tmp_path / "moved.replay")[0]
    feed(other, range(3))
    other.save(tmp_path / "moved.replay")  # the checkpoint tells, not the name
    assert ids(tmp_path / "moved.replay")[0] & blobs
    assert_equal(load(tmp_path / "moved.replay", device=None), other)


def test_a_buffer_whose_chunks_are_in_a_file_can_be_copied_to_another(tmp_path):
    with made(70, path=tmp_path / "own.replay") as buffer:
        buffer.save(tmp_path / "copy.replay")
        assert_holds(load(tmp_path / "copy.replay", device=None), 70)
        feed(buffer, range(70, 80))
        buffer.save(tmp_path / "own.replay")
        assert_holds(buffer, 80)
    assert_holds(load(tmp_path / "own.replay", device=None), 80)
    assert_holds(load(tmp_path / "copy.replay", device=None), 70)


@pytest.mark.slow
def test_chunks_are_in_the_file_from_the_start(tmp_path):
    path, steps = tmp_path / "a.replay", 2000
    with (
        made(steps, rows=3 * steps // 10, space=STACKS, path=path) as buffer,
        made(steps, rows=3 * steps // 10, space=STACKS) as memory,
    ):
        assert buffer.cbytes < 0.3 * memory.cbytes  # arrays and references alone
        assert_equal(buffer, memory)
        with pytest.raises(CorruptDataError, match="no checkpoint"):
            load(path, device=None)
        buffer.save()
        assert_equal(load(path, device=None), memory)
        size = path.stat().st_size
        for start in range(steps, 4 * steps, steps // 4):  # what was evicted since is gone without a save
            feed(buffer, range(start, start + steps // 4))
            feed(memory, range(start, start + steps // 4))
        assert_equal(buffer, memory)
        buffer.save()
        with load(path, device=None, lazy=True) as lazy:
            assert_equal(lazy, buffer)
    assert [p.name for p in tmp_path.iterdir()] == ["a.replay"]
    assert path.stat().st_size < 2.2 * size
    with load(path, device=None, lazy=True) as lazy:  # to go on with it
        feed(lazy, range(4 * steps, 4 * steps + steps // 2))
        lazy.save()
        feed(memory, range(4 * steps, 4 * steps + steps // 2))
        assert_equal(lazy, memory)
    assert_equal(load(path, device=None), memory)


@pytest.mark.parametrize("kind", [pytest.param("memory", marks=pytest.mark.slow), "lazy"])
def test_what_was_written_ahead_of_a_checkpoint_does_not_count(tmp_path, kind):
    path = tmp_path / "a.replay"
    with made(300, rows=200, space=STACKS, path=path) as buffer:
        buffer.save()
        feed(buffer, range(300, 1500))
    _chunks, blobs = ids(path)
    assert_equal(load(path, device=None), made(300, rows=200, space=STACKS))
    if kind == "memory":  # loaded, and saved to the same file
        loaded = feed(load(path, device=None), range(300, 320))
        loaded.save(path)
        assert_equal(load(path, device=None), loaded)
        feed(loaded, range(320, 1500)).save(path)
    else:
        with load(path, device=None, lazy=True) as loaded:
            feed(loaded, range(300, 1500)).save()
    assert len(ids(path)[1]) < len(blobs)
    assert_equal(load(path, device=None), made(1500, rows=200, space=STACKS))


def test_a_lazy_buffer_sees_the_checkpoint_that_it_opened(tmp_path):
    path = tmp_path / "a.replay"
    buffer = made(50)
    buffer.save(path)
    with load(path, device=None, lazy=True) as lazy, load(path, device=None, lazy=True) as other:
        want = everything(lazy)
        for start in range(50, 150, 10):
            feed(buffer, range(start, start + 10))
            buffer.save(path)  # nobody holds it up
            assert_same(everything(lazy), want)
            assert_equal(load(path, device=None), buffer)
        feed(lazy, range(50, 60))
        with pytest.raises(GymCompressError, match="load it again"):
            lazy.save()
        assert_same(everything(other), want)
    assert_same(everything(load(path, device=None)), everything(buffer))


def test_of_two_that_go_on_with_a_file_the_first_is_told(tmp_path):
    path = tmp_path / "a.replay"
    made(50).save(path)
    one, other = load(path, device=None, lazy=True), load(path, device=None, lazy=True)
    feed(one, range(50, 60)).save()
    feed(other, range(50, 55))
    with pytest.raises(GymCompressError, match="load it again"):
        other.save()
    third = load(path, device=None, lazy=True)
    feed(third, range(60, 70)).save()
    with pytest.raises(GymCompressError, match="written from elsewhere"):
        one.save()
    other.save(tmp_path / "other.replay")  # what it sees, and what it added
    assert_equal(load(tmp_path / "other.replay", device=None), other)
    assert_holds(load(path, device=None), 70)
    for buffer in (one, other, third):
        buffer.close()


def test_closing(tmp_path):
    buffer = made(60, path=tmp_path / "a.replay")
    buffer.save()
    buffer.close(), buffer.close()
    for use in (lambda: buffer.get([0]), buffer.save):
        with pytest.raises(ValueError, match="closed"):
            use()
    with made(5) as memory:
        pass
    assert_holds(memory, 5)
    with pytest.raises(ValueError, match="Expected a path"):
        memory.save()


def test_a_buffer_with_a_file_cannot_be_copied(tmp_path):
    with made(60, path=tmp_path / "a.replay") as buffer:
        for copied in (pickle.dumps, copy.deepcopy):
            with pytest.raises(TypeError, match="load the file"):
                copied(buffer)
        assert_holds(buffer, 60)


def test_a_copy_of_a_saved_buffer_saves_all(tmp_path):
    path = tmp_path / "a.replay"
    buffer = made(60)
    buffer.save(path)
    copied = pickle.loads(pickle.dumps(buffer))
    feed(copied, range(60, 65)).save(path)
    assert_equal(load(path, device=None), copied)
    feed(buffer, range(60, 90)).save(path)
    assert_equal(load(path, device=None), buffer)


def test_targets_that_are_not_overwritten(tmp_path):
    text, database, empty = (tmp_path / name for name in ("text", "database", "empty"))
    text.write_text("somebody's thesis" * 500)
    with sqlite3.connect(database) as connection:
        connection.execute("CREATE TABLE blobs (a)")
    connection.close()
    newer = tmp_path / "newer"
    made(5).save(newer)
    with sqlite3.connect(newer) as connection:
        connection.execute("PRAGMA user_version = 2")
    connection.close()
    for path, error in ((text, CorruptDataError), (database, FileExistsError), (newer, CorruptDataError)):
        before = path.read_bytes()
        with pytest.raises((error, FileExistsError)):
            made(5).save(path)
        assert path.read_bytes() == before
        assert [p for p in tmp_path.iterdir() if p.name.startswith(f"{path.name}-")] == []
    with pytest.raises(IsADirectoryError):
        made(5).save(tmp_path)
    with pytest.raises(FileNotFoundError, match="no folder"):
        made(5).save(tmp_path / "no" / "a.replay")
    with pytest.raises(FileNotFoundError):
        load(tmp_path / "none")
    empty.touch()
    for path in (text, database, newer):
        with pytest.raises((FileExistsError, CorruptDataError)):
            made(5, path=path)
    with made(5, path=empty), pytest.raises(CorruptDataError, match="can be deleted or saved over"):
        load(empty)
    with made(5, path=empty) as buffer:  # nothing was saved to it
        buffer.save()
    assert_holds(load(empty, device=None), 5)
    with pytest.raises(FileExistsError, match="lazy=True"):
        made(5, path=empty)
    made(7).save(empty)
    assert_holds(load(empty, device=None), 7)


CRASH = """
import functools, os, sqlite3, sys
from tests.replays import feed, load_or_make
path, kind = sys.argv[1:]
left = 10**9
class Dying(sqlite3.Connection):
    def execute(self, *args):
        self.count()
        return super().execute(*args)
    def executemany(self, *args):
        self.count()
        return super().executemany(*args)
    def count(self):
        global left
        left -= 1
        if left < 0:
            os._exit(9)
sqlite3.connect = functools.partial(sqlite3.connect, factory=Dying)
def process(statements):
    global left
    buffer = load_or_make(path, kind)
    left = statements
    feed(buffer, range(buffer.size(), buffer.size() + 80))
    buffer.save(path if kind == "memory" else None)
for line in sys.stdin:
    pid = os.fork()  # a process that has imported all and opened nothing
    if not pid:
        code = 1
        try:
            process(int(line))
            code = 0
        finally:
            os._exit(code)
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
"""


@pytest.mark.parametrize("kind", [pytest.param("memory", marks=pytest.mark.slow), "file"])
def test_a_process_that_dies_at_any_statement_leaves_a_whole_checkpoint(tmp_path, kind):
    path = tmp_path / "a.replay"
    size, dead = 0, 0
    command = [sys.executable, "-c", CRASH, str(path), kind]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as processes:
        for statements in [*range(0, 40, 5), 60, 10_000, 7, 9, 15, 22, 28, 34, 45, 10_000]:
            print(statements, file=processes.stdin, flush=True)
            status = int(processes.stdout.readline())
            assert status in (0, 9)
            dead += status == 9
            try:
                loaded = load(path, device=None)
            except (CorruptDataError, FileNotFoundError):
                assert (size, status) == (0, 9)
                continue
            assert loaded.size() - size in ((0, 80) if status else (80,))  # it may die after its commit
            size = loaded.size()
            assert_equal(loaded, made(size, rows=2000, n_envs=1, space=STACKS))
    assert processes.returncode == 0
    assert dead > 8
    assert size >= 160


class Interrupting(sqlite3.Connection):
    """Raises an error before or after a statement."""

    left = 10**9
    after = False
    error: BaseException = KeyboardInterrupt()

    def _interrupted(self, call):
        cls = Interrupting
        cls.left -= 1
        if cls.left == 0 and not cls.after:
            raise cls.error
        result = call()
        if cls.left == 0:
            raise cls.error
        return result

    def execute(self, *args):
        return self._interrupted(lambda: super(Interrupting, self).execute(*args))

    def executemany(self, *args):
        return self._interrupted(lambda: super(Interrupting, self).executemany(*args))


FULL = sqlite3.OperationalError("database or disk is full")
FULL.sqlite_errorcode = sqlite3.SQLITE_FULL


@pytest.mark.parametrize(
    ("kind", "error", "after"),
    [
        ("memory", KeyboardInterrupt(), False),
        ("path", KeyboardInterrupt(), True),
        *(
            pytest.param(*each, marks=pytest.mark.slow)
            for each in (
                ("lazy", FULL, False),
                ("path", KeyboardInterrupt(), False),
                ("lazy", KeyboardInterrupt(), False),
                ("memory", KeyboardInterrupt(), True),
                ("lazy", KeyboardInterrupt(), True),
                ("memory", FULL, False),
                ("path", FULL, False),
            )
        ),
    ],
)
def test_an_error_at_any_statement_leaves_file_and_buffer_in_step(tmp_path, monkeypatch, kind, error, after):
    """Also where wrappers still write chunks, of which a file gets a copy."""
    connect = sqlite3.connect
    monkeypatch.setattr(
        sqlite3, "connect", lambda *args, **kwargs: connect(*args, **kwargs, factory=Interrupting)
    )
    monkeypatch.setattr(Interrupting, "error", error)
    monkeypatch.setattr(Interrupting, "after", after)
    env = CompressedFrameStack(CompressObservation(MovingSquare(), frames_per_chunk=3), 2)
    seen = play(env, 1200)
    arrays = [np.asarray(obs) for obs in seen]
    path, step, errors = tmp_path / "a.replay", 0, 0
    kwargs = {"path": path} if kind == "path" else {}
    buffer = CompressedReplayBuffer(30, env.observation_space, ACTIONS, None, seed=1, **kwargs)
    buffer.save(path)
    if kind == "lazy":
        buffer = load(path, device=None, lazy=True)
    for statement in range(1, 60):
        for _ in range(7):
            buffer.add([seen[step]], [seen[step + 1]], [0], [step], [False], [{}])
            step += 1
        Interrupting.left = statement
        try:
            buffer.save(path)
        except (KeyboardInterrupt, OSError):
            errors += 1
        finally:
            Interrupting.left = 10**9
        if statement % 3:
            buffer.save(path)
            assert_equal(load(path, device=None), buffer)
        rewards = everything(buffer)[4][:, 0].astype(int)
        assert_same(everything(buffer)[0], np.stack([arrays[i] for i in rewards]))
    assert errors > 20
    buffer.save(path)
    loaded = load(path, device=None)
    assert_equal(loaded, buffer)
    assert loaded.size() == 30
    buffer.close()


def interrupting(left):
    """A function for ``sys.settrace`` that raises KeyboardInterrupt at a line of replay memory."""

    def trace(frame, event, arg):
        nonlocal left
        name = frame.f_code.co_filename
        if "gym_compress/replay" not in name:
            return None
        # where a block is left, a function raises that no signal could: the block is not told
        leaves = linecache.getline(name, frame.f_lineno).lstrip().startswith("with ")
        left -= event == "line" and not leaves
        if left == 0 and event == "line" and not leaves:
            raise KeyboardInterrupt
        return trace

    return trace


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["memory", "path"])
def test_what_an_interrupted_add_leaves_can_be_saved(tmp_path, kind):
    """Ctrl+C at any line, then save: the file can be loaded, and holds what the buffer holds."""
    buffer = made(
        0, rows=60, n_envs=2, space=STACKS, path=tmp_path / "own.replay" if kind == "path" else None
    )
    path, interrupted = tmp_path / "a.replay", 0

    for lines in range(1, 260):
        step = 3 * lines
        if lines % 4 == 0:
            buffer.save(path)
        before = sys.gettrace()
        sys.settrace(interrupting(lines))
        try:
            feed(buffer, range(step, step + 1))
        except KeyboardInterrupt:
            interrupted += 1
        finally:
            sys.settrace(before)
        if lines % 5 == 0:
            buffer.save(path)
            loaded = load(path, device=None)
            assert_same(everything(loaded), everything(buffer))
            loaded.save(path)
            assert_same(everything(load(path, device=None)), everything(buffer))
        feed(buffer, range(step + 1, step + 3))
    assert interrupted > 120
    buffer.close()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["memory", "path"])
def test_what_an_interrupted_reset_leaves_can_be_saved(tmp_path, kind):
    buffer = made(0, rows=30, space=MIXED, path=tmp_path / "own.replay" if kind == "path" else None)
    path, interrupted = tmp_path / "a.replay", 0
    for lines in range(1, 60):
        feed(buffer, range(lines * 10, lines * 10 + 20))
        buffer.save(path)
        before = sys.gettrace()
        sys.settrace(interrupting(lines))
        try:
            buffer.reset()
        except KeyboardInterrupt:
            interrupted += 1
        finally:
            sys.settrace(before)
        buffer.save(path)
        assert_same(everything(load(path, device=None)), everything(buffer))
        if lines % 2:
            buffer.reset()
            assert buffer.size() == 0
    assert interrupted > 20
    buffer.close()


def test_a_damaged_chunk_does_not_keep_others_from_being_added(tmp_path):
    """Whether the newest row follows cannot be told then; whoever samples the chunk is told that it is damaged."""
    path = tmp_path / "a.replay"
    made(60, rows=60, n_envs=1, space=STACKS).save(path)
    forge(path, lambda told, arrays, database: None)
    with sqlite3.connect(path) as database:
        database.execute(
            "UPDATE blobs SET data = x'00' WHERE id = (SELECT id FROM chunks ORDER BY first DESC LIMIT 1)"
        )
    database.close()
    with load(path, device=None, lazy=True) as lazy:
        feed(lazy, range(70, 75))
        assert lazy.pos == 5
        assert lazy.table.ends[59]
        assert_same(lazy.get(range(5)).rewards[:, 0], np.arange(70, 75, dtype=np.float32))
        with pytest.raises(CorruptDataError):
            lazy.get([59])


@pytest.mark.parametrize("lazy", [False, True])
def test_rows_that_sb3_forgets_are_forgotten(tmp_path, lazy):
    """Its reset() moves ``pos`` alone; what the rows referred to is not saved."""
    buffer = made(30)
    buffer.pos, buffer.full = 0, False
    feed(buffer, range(5))
    buffer.save(tmp_path / "a.replay")
    with load(tmp_path / "a.replay", device=None, lazy=lazy) as loaded:
        assert_holds(loaded, 5)
        loaded.save(tmp_path / "a.replay")
    assert len(ids(tmp_path / "a.replay")[0]) <= 6
    assert_holds(load(tmp_path / "a.replay", device=None), 5)


def test_a_chunk_that_another_thread_seals_is_saved_as_it_was_referred_to(tmp_path, monkeypatch):
    """The thread that steps an environment is held within the sealing of a chunk, while another saves."""
    env = CompressedFrameStack(CompressObservation(MovingSquare(), frames_per_chunk=8), 2)
    buffer = CompressedReplayBuffer(60, env.observation_space, ACTIONS, None, seed=1)
    seen = play(env, 6)
    arrays = [np.asarray(obs) for obs in seen]
    for i in range(6):
        buffer.add([seen[i]], [seen[i + 1]], [0], [i], [False], [{}])
    go_on, held = threading.Event(), threading.Event()

    def seal(chunk, nbytes, itemsize):
        content = chunk.content
        if not isinstance(content, bytes):
            chunk.content = chunk.codec.encode(content[:nbytes], itemsize)
        if threading.current_thread() is not threading.main_thread():
            held.set()
            go_on.wait()
        chunk.nbytes = nbytes
        chunk.sealed = True

    monkeypatch.setattr(Chunk, "seal", seal)
    thread = threading.Thread(target=lambda: [env.step(0) for _ in range(30)])
    thread.start()
    held.wait()
    try:
        buffer.save(tmp_path / "a.replay")
    finally:
        go_on.set()
        thread.join()
    for _ in range(2):
        assert_same(everything(load(tmp_path / "a.replay", device=None))[0], np.stack(arrays[:6]))
        buffer.save(tmp_path / "a.replay")


def test_a_file_that_is_gone_or_replaced_is_noticed(tmp_path):
    path, other = tmp_path / "a.replay", tmp_path / "b.replay"
    for replaced in (False, True):
        made(30).save(other)
        with made(5, path=path) as buffer:
            buffer.save()
            other.replace(path) if replaced else path.unlink()
            feed(buffer, range(5, 9))
            with pytest.raises(FileNotFoundError, match="save it to another path"):
                buffer.save()
            buffer.save(other)
            assert_holds(load(other, device=None), 9)
        path.unlink(missing_ok=True)


def test_adding_after_closing_is_refused(tmp_path):
    buffer = made(5, path=tmp_path / "a.replay")
    buffer.close()
    with pytest.raises(ValueError, match="closed"):
        feed(buffer, range(5, 6))
    assert buffer.size() == 5


FORK = """
import os, sys
from gym_compress import CompressedReplayBuffer
from gym_compress.errors import GymCompressError
from tests.replays import assert_same, everything, feed, load_or_make
buffer = load_or_make(sys.argv[1], "file")
feed(buffer, range(900))
buffer.save()
want = everything(buffer)
lazy = CompressedReplayBuffer.load(sys.argv[1], device=None, lazy=True)
stale = CompressedReplayBuffer.load(sys.argv[2], device=None, lazy=True)
feed(CompressedReplayBuffer.load(sys.argv[2], device=None), range(60, 65)).save(sys.argv[2])
pid = os.fork()
if not pid:
    code = 1
    try:
        assert_same(everything(buffer), want)
        assert_same(everything(lazy), want)
        try:
            everything(stale)
        except GymCompressError as error:
            assert "load it in this process" in str(error)
        else:
            raise AssertionError("it cannot see what was there before")
        try:
            buffer.save()
        except GymCompressError as error:
            assert "forked" in str(error)
            code = 0
    finally:
        os._exit(code)
assert os.waitpid(pid, 0)[1] == 0
assert_same(everything(buffer), want)
assert_same(everything(lazy), want)
assert stale.size() == len(everything(stale)[4]) == 60
lazy.close(), stale.close()
feed(buffer, range(900, 950))
buffer.save()
"""


def test_a_forked_process_reads_and_does_not_write(tmp_path):
    path, other = tmp_path / "a.replay", tmp_path / "b.replay"
    made(60, rows=100, n_envs=1, space=STACKS).save(other)
    subprocess.run([sys.executable, "-c", FORK, str(path), str(other)], check=True)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.replay", "b.replay"]
    assert_equal(load(path, device=None), made(950, rows=2000, n_envs=1, space=STACKS))


DISK = """
import resource, signal, sys
from pathlib import Path
from gym_compress import CompressedReplayBuffer
from tests.replays import STACKS, assert_equal, feed, made
path, kind, steps = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
kwargs = dict(rows=5 * steps, n_envs=1, space=STACKS)
buffer = made(steps, **kwargs, path=path if kind == "file" else None)
buffer.save(path)
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
size = path.stat().st_size
step, saved, refused = steps, steps, 0
for limit in (size // 2, size + 50 * steps, size + 300 * steps):
    old = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, old[1]))
    try:
        for _ in range(steps):
            feed(buffer, range(step, step + 1))
            step += 1
        buffer.save(path)
        saved = step
    except OSError:
        refused += 1
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, old)
    assert_equal(CompressedReplayBuffer.load(path, device=None), made(saved, **kwargs))
    assert_equal(buffer, made(step, **kwargs))
assert refused >= 2, refused
feed(buffer, range(step, step + 100))
buffer.save(path)
assert_equal(CompressedReplayBuffer.load(path, device=None), made(step + 100, **kwargs))
"""


@pytest.mark.slow
@pytest.mark.parametrize("steps", [200, 1000])
@pytest.mark.parametrize("kind", ["memory", "file"])
def test_a_full_disk_leaves_file_and_buffer_as_they_were(tmp_path, kind, steps):
    subprocess.run([sys.executable, "-c", DISK, str(tmp_path / "a.replay"), kind, str(steps)], check=True)


def test_what_a_file_cannot_hold_is_refused_and_nothing_is_written(tmp_path):
    path = tmp_path / "a.replay"
    long = spaces.Box(0, 1, (40, 40), np.longdouble)
    huge = spaces.Box(0, 255, (6000, 6000), np.uint8)
    with pytest.raises(TypeError, match="dtype"):
        CompressedReplayBuffer(10, long, ACTIONS, None).save(path)
    with pytest.raises(ValueError, match="at most"):
        CompressedReplayBuffer(10, huge, ACTIONS, None).save(path)
    with pytest.raises(ValueError, match="at most"):
        CompressedReplayBuffer(10, huge, ACTIONS, None, path=path)
    with pytest.raises(ValueError, match="frames a chunk"):
        CompressedReplayBuffer(10, STACKS, ACTIONS, None, frames_per_chunk=10**6).save(path)
    buffer = made(5, seed=np.random.Generator(np.random.MT19937(1)))
    with pytest.raises(TypeError, match="PCG64"):
        buffer.save(path)
    assert list(tmp_path.iterdir()) == []


def test_nested_spaces_and_rare_kinds(tmp_path):
    space = spaces.Dict(
        b=spaces.Tuple(
            [spaces.Box(0, 255, (3, 20, 20), np.uint8), spaces.Discrete(4), spaces.MultiBinary(3)]
        ),
        a=spaces.Box(-1, 1, (40, 40), np.float64),
        empty=spaces.Box(0, 1, (0, 3)),
    )
    buffer = CompressedReplayBuffer(30, space, spaces.MultiDiscrete([3, 4]), None, seed=1)
    seen = play(AnyEnv(space), 45)
    for i, (obs, following) in enumerate(zip(seen, seen[1:], strict=False)):
        buffer.add([obs], [following], [[i % 3, i % 4]], [i], [i % 9 == 8], {})
    buffer.save(tmp_path / "a.replay")
    for lazy in (False, True):
        with load(tmp_path / "a.replay", device=None, lazy=lazy) as loaded:
            assert loaded.observation_space == space
            assert_same(everything(loaded), everything(buffer))


def test_golden_file_of_version_1(tmp_path):
    """Made when version 1 of the format was new, by ``made(95).save(path)`` after one ``sample(5)``."""
    path = tmp_path / "version-1.replay"
    shutil.copy(Path(__file__).parent / "data" / path.name, path)
    for lazy in (False, True):
        with load(path, device=None, lazy=lazy) as buffer:
            assert_holds(buffer, 95)
            generator = np.random.default_rng(3)
            generator.integers(40, size=5), generator.integers(2, size=5)
            rows, envs = generator.integers(40, size=9), generator.integers(2, size=9)
            steps = np.where(rows < 15, rows + 80, rows + 40)
            assert_same(buffer.sample(9).rewards[:, 0], (steps + envs / 4).astype(np.float32))


def test_chunks_of_a_file_that_nobody_knows_any_more_are_deleted(tmp_path):
    """As an interruption between a commit and noting its ids may leave them: they would stand there twice."""
    path = tmp_path / "a.replay"
    buffer = made(30)
    buffer.save(path)
    before = ids(path)[0]
    for store, _ in buffer.table.stores:
        place, _, _ = next(store.index.unsaved(0, everything=True))
        store.index.note_saved({place: 0})
    buffer.save(path)
    assert len(ids(path)[0]) == len(before)
    assert_equal(load(path, device=None), buffer)
