"""Replay memory in Ray actors. A reward is ``step + env / 4``, which tells what a transition has to hold."""

import json
import os
import pickle
import select
import shutil
import signal
import sqlite3
import subprocess
import sys
import threading
from collections import deque
from contextlib import closing, contextmanager, nullcontext
from itertools import chain

import numpy as np
import pytest
import ray
from gymnasium import spaces
from ray.exceptions import ActorUnavailableError

import gym_compress.ray.shards
import gym_compress.ray.writer
from gym_compress import CompressedFrameStack, CompressedReplayBuffer, CorruptDataError, GymCompressError
from gym_compress.ray import ReplayWriter, ShardedReplay
from gym_compress.ray.actor import answer
from gym_compress.ray.writer import _IN_FLIGHT, _ROWS
from gym_compress.replay.file.writer import open_to_save
from tests.envs import MovingSquare, assert_same
from tests.replays import ACTIONS, MIXED, STACKS, made, transition


@pytest.fixture(scope="module", autouse=True)
def local_ray():
    ray.init(
        num_cpus=2,
        include_dashboard=False,
        object_store_memory=100 * 2**20,
        log_to_driver=False,
        _node_ip_address="127.0.0.1",
    )
    yield
    ray.shutdown()


FOREVER = 1e6  # seconds: whatever waits for a timeout hangs


@pytest.fixture
def patience(monkeypatch):
    """How long a shard may take until it is away. For ever, or one would be away because the machine is busy."""

    def set_(seconds):
        monkeypatch.setattr(gym_compress.ray.shards, "_PATIENCE", seconds)

    set_(FOREVER)
    return set_


@pytest.fixture
def sharded(patience):
    """Makes replay memories, and closes them."""
    open_ = []

    def make(buffer_size=2000, space=STACKS, *, load=None, **kwargs):
        if load is not None:
            open_.append(ShardedReplay.load(load, **kwargs))
        else:
            kwargs = {"num_shards": 2, "seed": 0, "frames_per_chunk": 12, "timeout": FOREVER, **kwargs}
            open_.append(ShardedReplay(buffer_size, space, ACTIONS, **kwargs))
        return open_[-1]

    yield make
    for replay in open_:
        replay.close()


def add(writer, steps, n_envs=1, space=STACKS):
    """Adds steps through a writer."""
    for step in steps:
        obs, next_obs, *rest = transition(step, n_envs)
        if not isinstance(space, spaces.Dict):
            obs, next_obs = obs["image"], next_obs["image"]
        writer.add(obs, next_obs, *rest)
    return writer


@ray.remote(num_cpus=0, max_retries=0)
def collect(writer, steps, n_envs=1, space=STACKS):
    add(writer, steps, n_envs, space).flush()


def in_shard(replay, number):
    """The rewards of a shard's transitions, oldest first."""

    def look(self):
        buffer = self._ready()
        return np.roll(buffer.rewards, -buffer.pos if buffer.full else 0)[: buffer.size(), 0]

    return ray.get(replay.shards[number].__ray_call__.remote(look)).tolist()


def contents(replay):
    """The rewards of all transitions, by shard."""
    return [in_shard(replay, number) for number in range(len(replay.shards))]


def assert_right(batch, space=STACKS):
    """Each transition of a batch is what the environment did at the step that its reward tells."""
    for i, reward in enumerate(batch.rewards[:, 0].tolist()):
        step, env = int(reward), round(reward % 1 * 4)
        obs, next_obs, action, _, done, infos = transition(step, env + 1)
        for got, expected in ((batch.observations, obs), (batch.next_observations, next_obs)):
            got = got if isinstance(space, spaces.Dict) else {"image": got}
            for key, values in got.items():
                assert_same(values[i], expected[key][env])
        assert batch.actions[i] == action[env]
        assert batch.dones[i] == (done[env] and not infos[env]["TimeLimit.truncated"])


def kill(shard, *, for_good=False):
    """Kills an actor's process, and returns when it is gone."""
    pid = ray.get(shard.__ray_call__.remote(lambda self: os.getpid()))
    process = os.pidfd_open(pid)
    if for_good:
        ray.kill(shard)
    else:
        os.kill(pid, signal.SIGKILL)
    select.select([process], [], [])  # can be read when the process has ended
    os.close(process)


@contextmanager
def stopped(shard):
    """An actor that is not dead and does nothing, as on a machine that swaps."""
    pid = ray.get(shard.__ray_call__.remote(lambda self: os.getpid()))
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def until(true):
    """Returns when something is true. If it never is, pytest's faulthandler tells who waits."""
    while not true():
        pass


@pytest.mark.slow
@pytest.mark.parametrize("space", [STACKS, MIXED], ids=["box", "dict"])
def test_what_collectors_add_is_drawn(sharded, space):
    replay = sharded(space=space, num_shards=3)
    writers = [replay.writer(f"w{i}") for i in range(3)]
    ray.get(
        [
            collect.remote(writers[0], range(250), 1, space),
            collect.remote(writers[1], range(1000, 1100), 3, space),
            collect.remote(writers[2], range(2000, 2030), 2, space),
        ]
    )
    assert replay.size() == 250 + 300 + 60
    rows = [[step + env / 4 for env in range(3)] for step in range(1000, 1100)]
    two = [[step + env / 4 for env in range(2)] for step in range(2000, 2030)]
    assert contents(replay) == [list(range(250)), [*chain(*rows)], [*chain(*two)]]
    seen = set()
    with replay.batches(200) as batches:
        for _ in range(40):
            batch = next(batches)
            seen |= set(batch.rewards[:, 0].tolist())
    assert_right(batch, space)
    assert seen == {*chain(*contents(replay))}
    assert_right(replay.sample(64), space)


def test_samples_are_drawn_position_by_position_from_the_replays_own_generator(sharded):
    replay = sharded(seed=5)
    for number, steps in enumerate((range(300), range(1000, 1100))):
        add(replay.writer(f"w{number}"), steps).flush()
    kept, generator = np.array([*chain(*contents(replay))]), np.random.default_rng(5)

    def expected(count):
        return kept[generator.integers(400, size=count)]

    for size in (32, 1, 100):
        assert replay.sample(size).rewards[:, 0].tolist() == expected(size).tolist()
    assert replay.sample_compressed(9).decompress(None).rewards[:, 0].tolist() == expected(9).tolist()
    with replay.batches(100, depth=3) as batches:
        drawn = np.concatenate([next(batches).rewards[:, 0] for _ in range(25)])
    assert drawn.tolist() == np.concatenate([expected(2000), expected(2000)])[:2500].tolist()


@pytest.mark.slow
def test_shards_evict_first_in_first_out_and_hold_buffer_size_together(sharded):
    replay = sharded(500, num_shards=3)
    for number in range(3):
        add(replay.writer(f"w{number}"), range(1000 * number, 1000 * number + 300 + number)).flush()
    assert replay.size() == 500
    assert contents(replay) == [
        list(range(300 - 167, 300)),
        list(range(1301 - 167, 1301)),
        list(range(2302 - 166, 2302)),
    ]
    assert_right(replay.sample(64))
    ours = made(167, 167, 1, STACKS, frames_per_chunk=12)
    assert replay.cbytes < 3.5 * ours.cbytes


def test_writers_are_spread_and_copies_are_streams_of_their_own(sharded):
    replay = sharded(num_shards=2)
    writers = [replay.writer(str(i)) for i in range(4)]
    for number, writer in enumerate(writers):
        add(writer, range(1000 * number, 1000 * number + 5))
    copies = [pickle.loads(pickle.dumps(writers[0])) for _ in range(2)]
    for number, copy in enumerate(copies):
        add(copy, range(5000 + 100 * number, 5003 + 100 * number)).flush()
    for writer in writers:
        writer.flush()
    zero, one = contents(replay)
    assert zero == [5000, 5001, 5002, 5100, 5101, 5102, 0, 1, 2, 3, 4, 2000, 2001, 2002, 2003, 2004]
    assert one == [1000, 1001, 1002, 1003, 1004, 3000, 3001, 3002, 3003, 3004]


@pytest.mark.slow
def test_a_writer_waits_when_several_parcels_are_on_their_way(sharded, monkeypatch, tmp_path):
    replay = sharded(20_000, num_shards=1)
    writer, gate = replay.writer("w"), tmp_path / "gate"

    def hold(self, gate=str(gate)):
        while not os.path.exists(gate):
            pass

    class WaitsError(Exception):
        pass

    def answer_if_there(reference, timeout=None):
        if not ray.wait([reference], timeout=0)[0]:
            raise WaitsError
        return answer(reference, timeout)

    held = replay.shards[0].__ray_call__.remote(hold)
    monkeypatch.setattr(gym_compress.ray.writer, "answer", answer_if_there)
    step = (_IN_FLIGHT + 1) * _ROWS
    add(writer, range(step))
    for _ in range(2):  # the next one has no place to go
        with pytest.raises(WaitsError):
            add(writer, [step])
    gate.touch()
    ray.get(held)
    monkeypatch.undo()
    add(writer, range(step, step + 30)).flush()
    assert contents(replay) == [list(range(step + 30))]


def test_compressed_observations_are_shipped(sharded):
    env = CompressedFrameStack(MovingSquare(), 4, frames_per_chunk=5)
    replay = sharded(space=env.observation_space, num_shards=1)
    writer, kept = replay.writer("w"), []
    obs, _ = env.reset(seed=1)
    for step in range(60):
        next_obs, _, terminated, truncated, info = env.step(step % 2)
        writer.add([obs], [next_obs], np.array([0]), np.array([step]), np.array([terminated]), [info])
        kept.append((obs, next_obs))
        obs = env.reset()[0] if terminated or truncated else next_obs
    writer.flush()
    batch = replay.sample(100)
    for i, step in enumerate(batch.rewards[:, 0].astype(int).tolist()):
        assert_same(batch.observations[i], np.asarray(kept[step][0]))
        assert_same(batch.next_observations[i], np.asarray(kept[step][1]))


@pytest.mark.slow
@pytest.mark.parametrize("every", [2, 3])
def test_what_is_acknowledged_in_vain_is_there_once(sharded, monkeypatch, every):
    replay = sharded(4000, num_shards=1)
    writer, calls = replay.writer("w"), iter(range(10**9))

    def lossy(reference, timeout=None):
        found = answer(reference, timeout)
        if next(calls) % every == 0:
            raise ActorUnavailableError("lost on the way", None)
        return found

    monkeypatch.setattr(gym_compress.ray.writer, "answer", lossy)
    add(writer, range(7 * _ROWS + 20)).flush()
    assert next(calls) > 3
    assert contents(replay) == [list(range(7 * _ROWS + 20))]


def test_a_shard_takes_each_parcel_once_and_none_after_a_gap(sharded):
    replay = sharded(num_shards=1)
    source = made(50, 100, 1, STACKS)
    (shard,) = replay.shards

    def send(number, oldest, writer="w"):
        samples = source.take(np.arange(10 * number - 10, 10 * number))
        return ray.get(shard.receive.remote(writer, number, oldest, samples)), replay.size()

    assert send(2, 1) == (0, 0)
    assert send(1, 1) == (1, 10)
    assert send(1, 1) == (1, 10)
    assert send(3, 2) == (1, 10)
    assert send(2, 2) == (2, 20)
    assert send(1, 1) == (2, 20)  # late
    assert send(1, 1, "another") == (1, 30)
    assert send(5, 5) == (5, 40)  # what came between was acknowledged by a shard that lost it
    assert send(4, 4) == (5, 40)
    assert contents(replay) == [[*range(20), *range(10), *range(40, 50)]]


@pytest.mark.slow
def test_an_interrupt_before_a_parcel_is_sent(sharded, monkeypatch):
    replay = sharded(num_shards=1)
    writer = replay.writer("w")
    add(writer, range(_ROWS))

    def interrupted(parcel):
        raise KeyboardInterrupt

    monkeypatch.setattr(writer, "_send", interrupted)
    with pytest.raises(KeyboardInterrupt):
        add(writer, [_ROWS])
    monkeypatch.undo()
    add(writer, range(_ROWS, _ROWS + 10)).flush()
    writer.flush()
    assert contents(replay) == [list(range(_ROWS + 10))]


def test_a_shard_that_dies_comes_back_with_its_checkpoint(sharded, tmp_path):
    replay = sharded(4000, folder=tmp_path / "memory")
    writers = [replay.writer(f"w{i}") for i in range(2)]
    add(writers[0], range(100)).flush()
    add(writers[1], range(1000, 1100)).flush()
    replay.save()
    add(writers[0], range(100, 130)).flush()  # acknowledged, and lost below
    add(writers[0], range(130, 140))
    kill(replay.shards[0])
    # it may be back already
    assert set(replay.sample(50).rewards[:, 0].tolist()) <= {*range(100), *range(1000, 1100)}
    writers[0].flush()  # sends what the new process lacks and the writer has
    until(lambda: replay.size() == 210)
    assert contents(replay) == [[*range(100), *range(130, 140)], list(range(1000, 1100))]
    add(writers[0], range(140, 200)).flush()
    replay.save()
    kill(replay.shards[0])
    add(writers[0], range(200, 210)).flush()
    assert in_shard(replay, 0) == [*range(100), *range(130, 210)]
    until(lambda: replay.size() == 280)
    assert_right(replay.sample(100))


@pytest.mark.slow
def test_a_shard_that_dies_without_a_folder_comes_back_empty(sharded):
    replay = sharded()
    writers = [replay.writer(f"w{i}") for i in range(2)]
    for number, writer in enumerate(writers):
        add(writer, range(1000 * number, 1000 * number + 50)).flush()
    with replay.batches(16) as batches:
        next(batches)
        kill(replay.shards[1])
        for update in range(450):  # those that were asked for before
            batch = next(batches)
            if update % 20 == 0:
                assert_right(batch)
        drawn = {int(r) for r in np.concatenate([next(batches).rewards for _ in range(20)]).ravel()}
        assert drawn <= set(range(50))
    add(writers[1], range(1050, 1060)).flush()
    assert in_shard(replay, 1) == list(range(1050, 1060))
    until(lambda: replay.size() == 60)
    assert set(replay.sample(500).rewards[:, 0].tolist()) == {*range(50), *range(1050, 1060)}


@pytest.mark.slow
@pytest.mark.parametrize("how", ["killed", "stopped"])
def test_batches_go_on_without_a_shard_and_draw_from_a_shard_that_is_back(sharded, patience, tmp_path, how):
    """Without waiting for the timeout; and from the same iterator, without anything else being called."""
    replay = sharded(folder=tmp_path)
    for number in range(2):
        add(replay.writer(f"w{number}"), range(1000 * number, 1000 * number + 50)).flush()
    replay.save()
    patience(1.0)

    def taken():
        return set(next(batches).rewards[:, 0].tolist())

    with replay.batches(200, depth=1) as batches:
        taken()
        with stopped(replay.shards[1]) if how == "stopped" else nullcontext():
            if how == "killed":
                kill(replay.shards[1])
            turns = [taken() for _ in range(60)]
            if how == "stopped":
                assert turns[-1] <= set(range(50))
        until(lambda: taken() & set(range(1000, 1050)))


@pytest.mark.slow
def test_a_sample_goes_on_without_a_shard_and_a_hung_shard_is_told_by_save(
    sharded, patience, tmp_path, monkeypatch
):
    replay = sharded(folder=tmp_path)
    for number in range(2):
        add(replay.writer(f"w{number}"), range(1000 * number, 1000 * number + 50)).flush()
    patience(1.0)
    with stopped(replay.shards[0]):
        for _ in range(3):
            assert set(replay.sample(50).rewards[:, 0].tolist()) <= set(range(1000, 1050))
        timeouts, get = iter([0.5, None]), ray.get  # what is not stopped has the time that it takes
        with monkeypatch.context() as patch:
            patch.setattr(ray, "get", lambda reference, timeout: get(reference, timeout=next(timeouts)))
            with pytest.raises(GymCompressError, match=r"Shards \[0\] are away"):
                replay.save()
    until(lambda: replay.size() == 100)


@pytest.mark.slow
def test_a_shard_that_is_back_serves_while_the_others_hang(sharded, patience):
    """Without waiting for the timeout."""
    replay = sharded()
    for number in range(2):
        add(replay.writer(f"w{number}"), range(1000 * number, 1000 * number + 50)).flush()
    patience(1.0)
    with stopped(replay.shards[0]):
        replay.sample(10)
    with stopped(replay.shards[1]):
        assert set(replay.sample(50).rewards[:, 0].tolist()) <= set(range(50))


@pytest.mark.slow
def test_after_ray_was_shut_down_none_is_started():
    code = """
import gymnasium as gym, numpy as np, ray
from gym_compress import GymCompressError
from gym_compress.ray import ShardedReplay
ray.init(num_cpus=1, include_dashboard=False, object_store_memory=80 * 2**20, log_to_driver=False,
         _node_ip_address="127.0.0.1")
space = gym.spaces.Box(0, 255, (4, 20, 18), np.uint8)
replay = ShardedReplay(100, space, gym.spaces.Discrete(6), num_shards=1)
writer, obs = replay.writer("w"), np.zeros((1, 4, 20, 18), np.uint8)
writer.add(obs, obs, [0], [0.0], [False], [{}])
ray.shutdown()
for call in (writer.flush, replay.size, lambda: replay.sample(3), replay.save):
    try:
        call()
    except (GymCompressError, ValueError) as error:
        print(error)
replay.close()
print(ray.is_initialized())
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    *errors, running = run.stdout.splitlines()
    assert len(errors) == 4
    assert all("Ray was shut down" in error for error in errors)
    assert running == "False"


@pytest.mark.slow
def test_an_answer_that_takes_longer_than_patience_is_waited_for(sharded, patience):
    patience(1e-6)
    replay = sharded(num_shards=1)
    add(replay.writer("w"), range(300)).flush()
    for size in (10, 2000):
        assert len(replay.sample(size).rewards) == size


@pytest.mark.slow
def test_leaving_the_block_does_not_wait_for_shards_that_are_gone(sharded):
    replay = sharded()
    add(replay.writer("w"), range(50)).flush()
    with replay.batches(8, depth=1) as batches:
        next(batches)
        for shard in replay.shards:
            kill(shard, for_good=True)
        for _ in range(40):  # those that were asked for before
            next(batches)


@pytest.mark.slow
def test_what_another_memory_saved_is_not_overwritten(sharded, tmp_path):
    old = sharded(folder=tmp_path)
    for number in range(2):
        add(old.writer(f"w{number}"), range(50)).flush()
    old.save()
    with pytest.raises(FileExistsError, match="holds a checkpoint"):
        sharded(folder=tmp_path)
    manifest = (tmp_path / "replay.json").read_text()
    (tmp_path / "replay.json").unlink()  # as where it is on another machine
    with pytest.raises(FileExistsError, match=r"shard-\d\.replay holds a checkpoint of another"):
        sharded(folder=tmp_path)
    (tmp_path / "replay.json").write_text(manifest)
    new = sharded(load=tmp_path)
    add(new.writer("w"), range(50, 60)).flush()
    new.save()
    add(old.writer("w"), range(70, 80)).flush()
    with pytest.raises(GymCompressError, match="was saved by another replay memory meanwhile"):
        old.save()
    with pytest.raises(GymCompressError, match="was saved by another process"):  # at the same moment
        answer(old.shards[0].save.remote())
    kill(old.shards[0])
    with pytest.raises(FileExistsError, match="another replay memory"):
        until(lambda: old.size() < 0)
    new.save()
    assert sharded(load=tmp_path).size() == 110


@pytest.mark.slow
@pytest.mark.parametrize("left", [b"", b"tables"])
def test_a_shard_that_dies_in_its_first_save_comes_back_empty(sharded, tmp_path, left):
    replay = sharded(folder=tmp_path)
    add(replay.writer("w0"), range(20)).flush()
    writer = add(replay.writer("w1"), range(20))
    writer.flush()
    path = tmp_path / "shard-1.replay"
    if left:
        open_to_save(path).close()  # what there is before the first save is committed
    else:
        path.touch()
    kill(replay.shards[1])
    add(writer, range(20, 25)).flush()
    until(lambda: replay.size() == 25)
    replay.save()
    assert sharded(load=tmp_path).size() == 25


@pytest.mark.slow
def test_a_restarted_shard_whose_checkpoint_is_damaged_tells(sharded, tmp_path):
    replay = sharded(folder=tmp_path)
    writer = add(replay.writer("w"), range(20))
    writer.flush()
    replay.save()
    data = bytearray((tmp_path / "shard-0.replay").read_bytes())
    data[16_384:] = bytes(len(data) - 16_384)
    (tmp_path / "shard-0.replay").write_bytes(data)
    kill(replay.shards[0])
    add(writer, range(20, 25))
    for _ in range(2):
        with pytest.raises(CorruptDataError):
            writer.flush()
    for call in (replay.size, lambda: replay.sample(3)):
        with pytest.raises(CorruptDataError):
            call()


@pytest.mark.slow
def test_a_writer_sends_again_what_the_shards_code_refused(sharded):
    replay = sharded(num_shards=1)
    writer = add(replay.writer("w"), range(20))

    def fail(self):
        self._buffer.adopt = lambda samples: (delattr(self._buffer, "adopt"), 1 / 0)

    ray.get(replay.shards[0].__ray_call__.remote(fail))
    with pytest.raises(ZeroDivisionError):
        writer.flush()
    add(writer, range(20, 30)).flush()
    assert contents(replay) == [list(range(30))]


@pytest.mark.slow
def test_an_interrupt_while_parcels_are_forgotten(sharded, tmp_path):
    """And the shard is restarted from a checkpoint before them."""
    replay = sharded(num_shards=1, folder=tmp_path)
    writer = add(replay.writer("w"), range(20))
    writer.flush()
    replay.save()
    add(writer, range(20, 30))

    class Interrupted(deque):
        def popleft(self):
            super().popleft()
            raise KeyboardInterrupt

    writer._parcels = Interrupted(writer._parcels)
    with pytest.raises(KeyboardInterrupt):
        writer.flush()
    writer._parcels = deque(writer._parcels)
    kill(replay.shards[0])
    add(writer, range(30, 35)).flush()
    assert contents(replay) == [[*range(20), *range(30, 35)]]


@pytest.mark.slow
def test_a_second_save_writes_what_is_new(sharded, tmp_path):
    replay = sharded(num_shards=1, folder=tmp_path)
    writer = add(replay.writer("w"), range(100))

    def rows():
        with closing(sqlite3.connect(tmp_path / "shard-0.replay")) as connection:
            return connection.execute("SELECT id, checksum FROM chunks ORDER BY id").fetchall()

    writer.flush()
    replay.save()
    before = rows()
    add(writer, range(100, 130)).flush()
    replay.save()
    assert rows()[: len(before)] == before
    assert len(rows()) > len(before) > 5


@pytest.mark.slow
def test_a_manifest_that_cannot_be_written(sharded, tmp_path, monkeypatch):
    replay = sharded(num_shards=1, folder=tmp_path)
    replay.save()
    before = (tmp_path / "replay.json").read_bytes()

    def full(*_):
        raise OSError("no space left")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="no space"):
        replay.save()
    assert (tmp_path / "replay.json").read_bytes() == before
    assert {path.name for path in tmp_path.iterdir()} == {"replay.json", "shard-0.replay"}


@pytest.mark.slow
def test_threads_sample_while_batches_are_drawn(sharded):
    replay = sharded()
    for number in range(2):
        add(replay.writer(f"w{number}"), range(1000 * number, 1000 * number + 80)).flush()
    errors = []

    def sample():
        try:
            for _ in range(30):
                assert_right(replay.sample(20))
                assert replay.size() == 160
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=sample) for _ in range(2)]
    with replay.batches(20) as batches:
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads):
            next(batches)
    assert not errors


@pytest.mark.slow
def test_all_shards_gone(sharded, tmp_path):
    replay = sharded(folder=tmp_path)
    add(replay.writer("v"), range(20)).flush()
    replay._shards.timeout = 0.5
    writer = replay.writer("w")
    for shard in replay.shards:
        kill(shard, for_good=True)
    with pytest.raises(GymCompressError, match=r"No shard.* has answered for 0.5 s: 2 of 2 are away"):
        replay.sample(4)
    for look in (replay.size, lambda: replay.cbytes):
        with pytest.raises(GymCompressError, match=r"No shard has answered"):
            look()
    with replay.batches(4) as batches, pytest.raises(GymCompressError, match=r"No shard"):
        next(batches)
    add(writer, range(20, 30))
    for _ in range(2):
        with pytest.raises(GymCompressError, match=r"For 0.5 s, shard 1 has not taken what writer 'w'"):
            writer.flush()
    with pytest.raises(GymCompressError, match=r"Shards \[0, 1\] are away"):
        replay.save()
    assert list(tmp_path.iterdir()) == []


def test_a_checkpoint_goes_on_as_without_an_interruption(sharded, tmp_path):
    replay = sharded(np.int64(300), MIXED, num_shards=np.int64(2), folder=tmp_path / "a", seed=7)
    writers = [replay.writer(f"w{i}") for i in range(2)]
    for steps in (range(100), range(100, 180)):
        for writer in writers:
            add(writer, steps, 1, MIXED).flush()
        replay.sample(10)
        replay.save()
    assert {path.name for path in (tmp_path / "a").iterdir()} == {
        "replay.json",
        "shard-0.replay",
        "shard-1.replay",
    }
    expected, kept, size = replay.sample(40), contents(replay), replay.size()
    replay.close()
    with pytest.raises(FileExistsError, match=r"holds a checkpoint.*ShardedReplay.load"):
        sharded(300, MIXED, folder=tmp_path / "a")
    with pytest.raises(ValueError, match=r"holds 2 shards, expected 3"):
        sharded(load=tmp_path / "a", num_shards=3)
    again = sharded(load=tmp_path / "a", num_shards=2)
    assert (again.size(), contents(again), again.buffer_size) == (size, kept, 300)
    assert_same(tuple(again.sample(40)), tuple(expected))
    add(again.writer("w"), range(500, 510), 1, MIXED).flush()
    assert in_shard(again, 0) == [*kept[0][10:], *range(500, 510)]
    alone = CompressedReplayBuffer.load(tmp_path / "a" / "shard-1.replay", device=None)
    assert_same(alone.rewards[:, 0], np.roll(np.array(kept[1], np.float32), alone.pos))


@pytest.mark.slow
def test_a_shard_in_a_file_goes_on_after_a_restart_of_a_loaded_memory(sharded, tmp_path):
    replay = sharded(folder=tmp_path)
    add(replay.writer("w"), range(30)).flush()
    replay.save()
    replay.close()
    again = sharded(load=tmp_path)
    kill(again.shards[0])
    until(lambda: again.size() == 30)
    assert in_shard(again, 0) == list(range(30))


@pytest.mark.slow
def test_a_save_of_a_loaded_memory_that_was_broken_off(sharded, tmp_path):
    """After some shards, and several times."""
    replay = sharded(folder=tmp_path)
    for number in range(2):
        add(replay.writer(f"w{number}"), range(20)).flush()
    replay.save()
    replay.close()
    for turn in range(3):
        again = sharded(load=tmp_path)
        assert again.size() == 40 + 5 * turn
        if turn == 2:
            break
        add(again.writer("w"), range(100 * turn, 100 * turn + 5)).flush()
        again._write_manifest(tmp_path / "replay.json")  # as save begins
        answer(again.shards[0].save.remote())
        again.close()
    again.save()
    assert sharded(load=tmp_path).size() == 50


def _edit(change):
    def damage(folder):
        manifest = json.loads((folder / "replay.json").read_text())
        change(manifest)
        (folder / "replay.json").write_text(json.dumps(manifest))

    return damage


def _flip(folder):
    """Another digit of the number of shards, as one bit makes it."""
    path = folder / "replay.json"
    path.write_text(path.read_text().replace('"num_shards": 2', '"num_shards": 3'))


def _other(folder):
    path = folder / "shard-0.replay"
    path.unlink()
    made(5, 100, 1, STACKS).save(path)


DAMAGES = {
    "no JSON": lambda folder: (folder / "replay.json").write_text("{"),
    "a bit": _flip,
    "another format": _edit(lambda m: m.update(format="zip")),
    "a later version": _edit(lambda m: m.update(version=2)),
    "no settings": _edit(lambda m: m.pop("settings")),
    "a space that is none": _edit(lambda m: m["settings"].update(observation_space={"kind": "Ball"})),
    "shards of another kind": _edit(lambda m: m.update(num_shards="2")),
    "no shards": _edit(lambda m: m.update(num_shards=0)),
    "files of each other": lambda folder: shutil.copy(folder / "shard-0.replay", folder / "shard-1.replay"),
    "another memory": _edit(lambda m: m.update(replay="x")),
    "a file of another class": _other,
    "a damaged file": lambda folder: (folder / "shard-1.replay").write_bytes(b"x" * 5000),
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A folder with a checkpoint."""
    folder = tmp_path_factory.mktemp("saved")
    with ShardedReplay(2000, STACKS, ACTIONS, num_shards=2, seed=0, folder=folder, timeout=FOREVER) as replay:
        for number in range(2):
            add(replay.writer(f"w{number}"), range(20)).flush()
        replay.save()
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_checkpoints_are_refused(saved, sharded, tmp_path, damage):
    folder = shutil.copytree(saved, tmp_path / "memory")
    DAMAGES[damage](folder)
    with pytest.raises(CorruptDataError):
        sharded(load=folder)


@pytest.mark.slow
def test_checkpoints_that_are_not_there(saved, sharded, tmp_path):
    with pytest.raises(FileNotFoundError, match=r"replay\.json"):
        sharded(load=tmp_path)
    folder = shutil.copytree(saved, tmp_path / "memory")
    (folder / "shard-0.replay").unlink()
    with pytest.raises(FileNotFoundError, match=r"shard-0\.replay"):
        sharded(load=folder)
    with pytest.raises(ValueError, match="without one"):
        sharded(num_shards=1).save()


@pytest.mark.slow
def test_several_learners_draw_each_for_itself(sharded):
    replay = sharded()
    ray.get(collect.remote(replay.writer("w"), range(300)))

    @ray.remote(num_cpus=0)
    def learn(replay):
        with replay.batches(50) as batches:
            return [next(batches).rewards[:, 0].tolist() for _ in range(3)]

    drawn = [
        *ray.get([learn.remote(replay), learn.remote(replay)]),
        [replay.sample(50).rewards[:, 0].tolist()],
    ]
    assert len({tuple(each[0]) for each in drawn}) == 3
    assert {*chain(*chain(*drawn))} <= set(range(300))


def test_torch_tensors(sharded):
    torch = pytest.importorskip("torch")
    replay = sharded(device="cpu", num_shards=1)
    add(replay.writer("w"), range(30)).flush()
    with replay.batches(8) as batches:
        for batch in (replay.sample(8), next(batches)):
            assert batch.observations.dtype == torch.uint8
            assert batch.observations.shape == (8, *STACKS.shape)


def test_unfit_transitions_are_refused_where_they_are_added(sharded):
    replay = sharded(num_shards=1)
    writer = replay.writer("w")
    obs, next_obs, *rest = transition(0, 1)
    fine = obs["image"], next_obs["image"], *rest
    for wrong in (
        (fine[0][:, :3], *fine[1:]),
        (fine[0].astype(np.float32), *fine[1:]),
        (fine[0], fine[1][0], *fine[2:]),
        (*fine[:3], [1.0, 2.0], *fine[4:]),
        (*fine[:2], [0.5], *fine[3:]),
    ):
        with pytest.raises(ValueError, match=r"xpected|does not"):
            writer.add(*wrong)
    add(writer, range(3))
    obs, next_obs, *rest = transition(3, 2)
    with pytest.raises(ValueError, match="shape"):
        writer.add(obs["image"], next_obs["image"], *rest)
    writer.flush()
    assert contents(replay) == [[0, 1, 2]]


def test_nothing_to_sample(sharded):
    replay = sharded()
    replay.writer("w").flush()
    assert replay.size() == 0
    with pytest.raises(ValueError, match="all 2 are empty: nothing was added"):
        replay.sample(4)
    with replay.batches(4) as batches:
        with pytest.raises(ValueError, match="nothing was added"):
            next(batches)
        add(replay.writer("w"), range(3)).flush()
        assert len(next(batches).rewards) == 4
        for shard in replay.shards:
            ray.get(shard.__ray_call__.remote(lambda self: self._buffer.reset()))
        with pytest.raises(ValueError, match="restarted without a checkpoint"):
            deque(batches, maxlen=0)  # those that were asked for before
        add(replay.writer("w"), range(3)).flush()
        assert len(next(batches).rewards) == 4
    for wrong in (0, -1):
        for call in (replay.sample, replay.sample_compressed, replay.batches, lambda n: replay.batches(4, n)):
            with pytest.raises(ValueError, match="at least 1"):
                call(wrong)


@pytest.mark.parametrize(
    ("kwargs", "error", "message"),
    [
        ({"num_shards": 0}, ValueError, "num_shards is expected to be at least 1, actual value: 0"),
        ({"buffer_size": 0}, ValueError, "buffer_size is expected to be at least 1, actual value: 0"),
        ({"buffer_size": 2, "num_shards": 3}, ValueError, "3 shards cannot hold 2"),
        ({"timeout": 0}, ValueError, "timeout"),
        ({"timeout": float("inf")}, ValueError, "timeout"),
        ({"num_shards": 1.5}, TypeError, "integer"),
        ({"space": spaces.Text(4)}, TypeError, "space"),
        ({"stack_size": 3}, ValueError, "stack_size"),
        ({"codec": "gzip"}, ValueError, "codec"),
        ({"device": "nowhere"}, RuntimeError, "device"),
        ({"actor_options": {"max_concurrency": 4}}, ValueError, "one call at a time"),
        ({"folder": "/proc/none"}, OSError, "none"),
        ({"folder": __file__}, OSError, "test_ray"),
        ({"actor_options": [{}]}, ValueError, "actor_options for 2 shards, got 1"),
    ],
)
def test_arguments_that_do_not_fit(sharded, kwargs, error, message):
    with pytest.raises(error, match=message):
        sharded(**kwargs)


def test_actors_that_cannot_be_placed(sharded, monkeypatch):
    wait = ray.wait

    def wait_for_the_first(references, *, num_returns, timeout):
        assert (len(references), num_returns, timeout) == (2, 2, 4)
        return wait(references, num_returns=1)  # has no more to wait for

    monkeypatch.setattr(ray, "wait", wait_for_the_first)
    with pytest.raises(GymCompressError, match=r"1 of 2 shards did not start within 4\.0 s"):
        sharded(timeout=4, actor_options=[{}, {"resources": {"nowhere": 1}}])


def test_a_closed_memory(sharded):
    replay = sharded(num_shards=1)
    with replay:
        pass
    for call in (replay.size, replay.save, lambda: replay.sample(3), lambda: replay.writer("w")):
        with pytest.raises(ValueError, match="closed"):
            call()
    replay.close()


def test_ray_that_cannot_be_started(monkeypatch):
    def refuse():
        raise ConnectionError("no cluster")

    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", refuse)
    with pytest.raises(GymCompressError, match=r"none could be started: no cluster"):
        ShardedReplay(10, STACKS, ACTIONS, num_shards=1)


def test_without_ray():
    code = "import sys; sys.modules['ray'] = None; import gym_compress; import gym_compress.ray"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert run.stderr.splitlines()[-1].startswith("gymnasium.error.DependencyNotInstalled:")
    assert "gym-compress[ray]" in run.stderr


@pytest.mark.slow
def test_what_travels_is_small(sharded):
    """A pickled Box of the shape of four Atari frames alone takes 113 KB."""
    replay = sharded(space=spaces.Box(0, 255, (4, 84, 84), np.uint8))
    assert len(ray.cloudpickle.dumps(replay.writer("w"))) < 4000
    assert isinstance(pickle.loads(pickle.dumps(replay.writer("w"))), ReplayWriter)
    assert len(ray.cloudpickle.dumps(replay)) < 8000
