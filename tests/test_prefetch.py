import copy
import multiprocessing
import pickle
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

import gym_compress.replay.buffer as buffer_module
from gym_compress import CompressedReplayBuffer
from gym_compress.replay.prefetch import Outputs
from tests.envs import assert_same
from tests.test_buffer import ACTIONS, PIXELS, filled


def threads():
    return [thread for thread in threading.enumerate() if thread.name == "prefetch"]


@pytest.fixture(autouse=True)
def _no_thread_is_left():
    yield
    assert not threads()


def wait_for_ready(batches, count):
    """Waits until so many are made ahead."""
    while batches._worker.ready.qsize() < count:
        time.sleep(0)  # lets the thread go on


def drawn(batches, count):
    return [next(batches) for _ in range(count)]


@pytest.mark.parametrize("depth", [1, 2, 7])
def test_batches_are_those_that_sample_would_draw(depth):
    ahead, plain = filled(60)[0], filled(60)[0]
    with ahead.prefetch(8, depth) as batches:
        assert not threads()  # nothing is drawn before it is wanted
        got = drawn(batches, 12)
        assert len(threads()) == 1
    assert not threads()
    for mine, other in zip(got, [plain.sample(8) for _ in range(12)], strict=True):
        assert_same(tuple(mine), tuple(other))


def test_what_was_not_taken_is_drawn_again():
    ahead, plain = filled(60)[0], filled(60)[0]
    for count in (3, 0, 1):
        with ahead.prefetch(8, 4) as batches:
            got = drawn(batches, count)
            for mine in got:
                assert_same(tuple(mine), tuple(plain.sample(8)))
    assert_same(tuple(ahead.sample(8)), tuple(plain.sample(8)))


def test_what_others_drew_meanwhile_is_not_drawn_again():
    """A draw after those ahead leaves them as they are; the generator never goes back over it."""
    buffer, _ = filled(60)
    with buffer.prefetch(8, 2) as batches:
        next(batches)
        wait_for_ready(batches, 2)
        taken = buffer.sample(8)
    plain, _ = filled(60)
    assert_same(tuple(taken), tuple([plain.sample(8) for _ in range(4)][3]))
    assert_same(tuple(buffer.sample(8)), tuple(plain.sample(8)))


def test_an_error_reaches_who_asks_and_the_next_call_tries_again():
    buffer = CompressedReplayBuffer(50, PIXELS, ACTIONS, None, seed=0)
    with buffer.prefetch(4) as batches:
        for _ in range(2):
            with pytest.raises(ValueError, match="nothing was added yet"):
                next(batches)
        obs = np.ones((1, *PIXELS.shape), np.uint8)
        buffer.add(obs, obs, np.array([3]), np.array([2.0]), np.array([False]), [{}])
        assert_same(next(batches).observations, np.repeat(obs, 4, axis=0))


def test_batches_before_an_error_come_first(monkeypatch):
    buffer, _ = filled(60)
    plain, _ = filled(60)
    draw, calls = buffer_module.gather_samples, []

    def failing(*args, **kwargs):
        calls.append(args)
        if len(calls) == 3:
            raise MemoryError("no memory")
        return draw(*args, **kwargs)

    monkeypatch.setattr(buffer_module, "gather_samples", failing)
    with buffer.prefetch(8, 5) as batches:
        got = drawn(batches, 2)
        with pytest.raises(MemoryError, match="no memory"):
            next(batches)
    monkeypatch.undo()
    for mine in got:
        assert_same(tuple(mine), tuple(plain.sample(8)))


def test_an_error_in_the_block_ends_the_thread():
    buffer, _ = filled(60)
    batches = buffer.prefetch(8)

    def leave():
        with batches:
            next(batches)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        leave()
    assert not threads()


def test_each_thread_that_waits_is_told_of_an_error(monkeypatch):
    buffer = CompressedReplayBuffer(50, PIXELS, ACTIONS, None, seed=0)
    draw, go = buffer_module.gather_samples, threading.Event()

    def slow(*args, **kwargs):
        go.wait()
        return draw(*args, **kwargs)

    monkeypatch.setattr(buffer_module, "gather_samples", slow)
    errors = []

    def consume():
        try:
            next(batches)
        except ValueError as error:
            errors.append(str(error))

    with buffer.prefetch(4) as batches:
        consumers = [threading.Thread(target=consume) for _ in range(3)]
        for consumer in consumers:
            consumer.start()
        go.set()
        for consumer in consumers:
            consumer.join()
    assert len(errors) == 3


def test_after_an_interrupt_the_next_batch_comes():
    """Also if it came when a batch was taken and the thread not told yet."""
    buffer, plain = filled(60)[0], filled(60)[0]
    batches = buffer.prefetch(8, 1)
    taken = batches._taken

    def interrupt(receipt):
        raise KeyboardInterrupt

    with batches:
        for _ in range(3):
            batches._taken = interrupt
            with pytest.raises(KeyboardInterrupt):
                next(batches)
            batches._taken = taken
            mine = next(batches)
    assert_same(tuple(mine), tuple([plain.sample(8) for _ in range(6)][-1]))
    assert not buffer._ahead


def test_a_batch_that_an_interrupt_lost_is_made_up_for():
    """The interrupt came as the queue gave it, before the thread was told."""

    class Losing:
        def __init__(self, queue):
            self.put, self.take = queue.put, queue.get

        def get(self):
            self.take()
            raise KeyboardInterrupt

    buffer, _ = filled(60)
    got = []
    with buffer.prefetch(8, 1) as batches:
        next(batches)
        wait_for_ready(batches, 1)
        queue = batches._worker.ready
        batches._worker.ready = Losing(queue)
        with pytest.raises(KeyboardInterrupt):
            next(batches)
        batches._worker.ready = queue
        got.append(next(batches))
    assert got


def test_an_error_that_keeps_the_block_from_being_left_comes_out():
    """It is not tried for ever."""
    buffer, _ = filled(60)
    batches = buffer.prefetch(8)

    def fail():
        raise OSError("never")

    batches._when_left = fail

    def leave():
        with batches:
            next(batches)

    with pytest.raises(OSError, match="never"):
        leave()
    assert not threads()


def test_copies_within_the_block_go_on_with_what_was_not_taken():
    buffer, plain = filled(60)[0], filled(60)[0]
    with buffer.prefetch(8, 3) as batches:
        for _ in range(20):
            again = copy.deepcopy(buffer)
            want = plain.sample(8)
            assert_same(tuple(again.sample(8)), tuple(want))
            assert_same(tuple(next(batches)), tuple(want))


@pytest.mark.parametrize("trials", [150, pytest.param(3000, marks=pytest.mark.slow)])
def test_interrupts_at_any_moment_end_the_block(trials):
    """Real signals, in a process of its own: the interrupt comes out, and nothing hangs."""
    code = """
import random, signal, sys, threading
import numpy as np
from gymnasium import spaces
import gym_compress.replay.buffer as buffer_module
from gym_compress import CompressedReplayBuffer

rb = CompressedReplayBuffer(50, spaces.Box(0, 255, (24, 50), np.uint8), spaces.Discrete(2), None, seed=0)
obs = np.zeros((1, 24, 50), np.uint8)
for i in range(50):
    rb.add(obs, obs, [0], [i], [0], [{}])

def interrupt(*_):
    raise KeyboardInterrupt

signal.signal(signal.SIGALRM, interrupt)
rng = random.Random(1)
for trial in range(int(sys.argv[1])):
    try:
        with rb.prefetch(2) as batches:
            next(batches)
            signal.setitimer(signal.ITIMER_REAL, rng.uniform(2e-5, 1e-3))
            while True:
                next(batches)
    except KeyboardInterrupt:
        pass
print("all", threading.active_count())
"""
    run = subprocess.run([sys.executable, "-c", code, str(trials)], capture_output=True, text=True)
    assert (run.stdout, run.stderr) == ("all 1\n", "")


def test_batches_are_had_within_one_block_alone():
    buffer, _ = filled(60)
    batches = buffer.prefetch(8)
    with pytest.raises(RuntimeError, match="within a with block"):
        next(batches)
    with batches:
        next(batches)
    with pytest.raises(RuntimeError, match="within a with block"):
        next(batches)
    with pytest.raises(RuntimeError, match="call prefetch again"), batches:
        pass


@pytest.mark.parametrize(("batch_size", "depth"), [(0, 2), (-1, 2), (4, 0), (4, -3)])
def test_numbers_below_one_are_refused(batch_size, depth):
    with pytest.raises(ValueError, match="at least 1, actual value"):
        filled(60)[0].prefetch(batch_size, depth)


def test_adding_meanwhile_tears_nothing():
    """Each transition is whole: its reward says which it is."""
    buffer, source = filled(60, capacity=20)
    with buffer.prefetch(16, 3) as batches:
        for i in range(60, 400):
            old = source[i % 60]
            buffer.add(old, source[(i + 1) % 60], [i % 6], [float(i)], [False], [{}])
            if i % 4 == 0:
                batch = next(batches)
                steps = batch.rewards[:, 0].astype(int)
                assert_same(batch.observations, source[steps % 60, 0])
                assert_same(batch.actions[:, 0], steps % 6)


def test_frames_in_a_file(tmp_path):
    buffer, _ = filled(60)
    buffer.save(tmp_path / "memory.replay")
    lazy = CompressedReplayBuffer.load(tmp_path / "memory.replay", device=None, lazy=True)
    with lazy, lazy.prefetch(8) as batches:
        for mine in drawn(batches, 5):
            assert_same(tuple(mine), tuple(buffer.sample(8)))


def test_a_buffer_saved_in_the_block_goes_on_with_what_was_not_taken(tmp_path):
    buffer, plain = filled(60)[0], filled(60)[0]
    with buffer.prefetch(8, 3) as batches:
        drawn(batches, 2)
        wait_for_ready(batches, 3)
        buffer.save(tmp_path / "memory.replay")
        pickled = pickle.loads(pickle.dumps(buffer))
        going_on = drawn(batches, 2)
    again = CompressedReplayBuffer.load(tmp_path / "memory.replay", device=None)
    want = [plain.sample(8) for _ in range(4)][2:]
    for source in (going_on, [again.sample(8), again.sample(8)], [pickled.sample(8), pickled.sample(8)]):
        for mine, other in zip(source, want, strict=True):
            assert_same(tuple(mine), tuple(other))


def test_several_prefetch_at_once():
    """Each gets batches of its own, whichever thread draws first."""
    buffer, plain = filled(60)[0], filled(60)[0]
    with buffer.prefetch(8, 2) as one, buffer.prefetch(8, 2) as other:
        got = [next(batches).rewards.tobytes() for _ in range(10) for batches in (one, other)]
    want = [plain.sample(8).rewards.tobytes() for _ in range(24)]
    assert len(set(got)) == 20
    assert set(got) <= set(want)


def _in_child(batches, buffer, pipe):
    try:
        next(batches)
    except RuntimeError as error:
        pipe.send(str(error))
    batches.__exit__(None, None, None)  # as when the child leaves the block
    pipe.send(buffer.sample(4).observations.shape)


def test_a_forked_process_is_told_and_has_the_buffer():
    """Also if it was forked while the thread had the buffer's lock."""
    buffer, _ = filled(60)
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()
    with buffer.prefetch(2000, 50) as batches:
        for _ in range(6):
            next(batches)
            child = context.Process(target=_in_child, args=(batches, buffer, theirs))
            child.start()
            child.join()
            assert child.exitcode == 0
            assert "in the process that entered it" in ours.recv()
            assert ours.recv() == (4, *PIXELS.shape)
        next(batches)


def test_memory_of_batches_that_are_gone_is_used_again_and_of_others_never():
    buffer, source = filled(60)
    with buffer.prefetch(16, depth=2) as batches:
        kept = [next(batches) for _ in range(3)]
        views = [batch.observations[2:5, 1] for batch in kept]  # which alone remain below
        steps = [batch.rewards[2:5, 0].astype(int) for batch in kept]
        addresses = {batch.observations.ctypes.data for batch in kept}
        batch = kept = None
        later = set()
        for _ in range(30):
            batch = next(batches)
            later |= {array.ctypes.data for array in (batch.observations, batch.next_observations)}
            assert_same(batch.observations, source[batch.rewards[:, 0].astype(int), 0])
    assert len(later) <= 2 * 6  # depth, one that is made, and those that are looked at
    assert not addresses & later
    for view, step in zip(views, steps, strict=True):
        assert_same(view, source[step, 0, 1])
    buffers = [memoryview(view) for view in views]
    del views
    outputs = Outputs()
    first = outputs.empty((3, 4), np.dtype(np.float32))
    place, held = first.ctypes.data, memoryview(first)
    del first
    second = outputs.empty((3, 4), np.dtype(np.float32))
    assert second.ctypes.data != place
    del held, buffers
    assert outputs.empty((3, 4), np.dtype(np.uint32)).ctypes.data == place


@pytest.mark.parametrize("make", ["torch", "dlpack"])
def test_memory_that_a_tensor_shares_is_not_used_again(make):
    torch = pytest.importorskip("torch")
    outputs = Outputs()
    array = outputs.empty((3, 4), np.dtype(np.float32))
    tensor = torch.from_numpy(array) if make == "torch" else torch.from_dlpack(array)
    place = array.ctypes.data
    part = tensor[1:]
    del array, tensor
    second = outputs.empty((3, 4), np.dtype(np.float32))
    assert second.ctypes.data != place
    del part
    assert outputs.empty((3, 4), np.dtype(np.float32)).ctypes.data == place
