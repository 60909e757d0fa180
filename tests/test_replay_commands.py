"""The commands inspect, verify and convert."""

import importlib.util
import pickle
import re
import subprocess
import sys

import matplotlib.image
import numpy as np
import pytest
import stable_baselines3 as sb3
from gymnasium import spaces
from stable_baselines3.common import buffers
from stable_baselines3.common.save_util import save_to_pkl
from stable_baselines3.common.vec_env import DummyVecEnv

import gym_compress.sb3 as ours
from gym_compress import CompressedReplayBuffer
from gym_compress.commands.cli import main
from gym_compress.commands.inspect import _newest
from tests.envs import assert_same
from tests.replays import ACTIONS, STACKS, assert_holds, everything, feed, forge, made
from tests.test_file import ATTACKS
from tests.test_sb3 import DICT, DISCRETE, Goals, Transitions, assert_equal_batches

load = CompressedReplayBuffer.load


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "a.replay"
    made(95).save(path)
    return path


def run(*arguments):
    return main([str(argument) for argument in arguments])


def test_inspect(path, tmp_path, capsys):
    assert run("inspect", path) == 0
    out = capsys.readouterr().out
    told = dict(re.findall(r"^ (\S.*?) {2,}(\S.*?) *$", out, re.MULTILINE))
    assert told["saved by"] == "CompressedReplayBuffer"
    assert told["transitions"] == "80 of 80, next row 15"
    assert told["environments"] == "2"
    raw = 80 * (2 * (4 * 20 * 18 + 3 * 4) + 8 + 3 * 4)
    size = path.stat().st_size
    assert told["in arrays"] == f"{raw:,} bytes"
    assert told["file"].startswith(f"{size:,} bytes, {size / 80:,.0f} a transition")
    assert told["ratio"] == f"{raw / size:.1f}x"
    assert re.fullmatch(r"\d+, \d+ by lz4hc:5", told["chunks"])
    partly = tmp_path / "partly.replay"
    made(7).save(partly)
    assert run("inspect", partly) == 0
    assert "14 of 80, next row 7" in capsys.readouterr().out
    made(0).save(tmp_path / "none.replay")
    assert run("inspect", tmp_path / "none.replay") == 0
    assert "0 of 80, next row 0" in capsys.readouterr().out


def test_inspect_draws_frames(path, tmp_path, capsys):
    png = tmp_path / "frames.png"
    assert run("inspect", path, "--frames", png) == 0
    assert matplotlib.image.imread(png).shape[2] == 4
    made(0).save(tmp_path / "none.replay")
    CompressedReplayBuffer(5, spaces.Box(0, 1, (3,)), ACTIONS, None).save(tmp_path / "flat.replay")
    for name in ("none", "flat"):
        assert run("inspect", tmp_path / f"{name}.replay", "--frames", png) == 2
        assert "holds no" in capsys.readouterr().err


def test_the_newest_frame_is_drawn():
    values = np.arange(4 * 20 * 18 * 3).reshape(4, 20, 18, 3)
    assert_same(_newest(values), values[3])
    assert_same(_newest(values[..., 0]), values[3, ..., 0])
    assert_same(_newest(values[0]), values[0])
    assert_same(_newest(np.moveaxis(values[0], 2, 0)), values[0])
    assert_same(_newest(np.moveaxis(values[..., 0], 0, 2)), values[3, ..., 0])
    assert_same(_newest(values[0, ..., 0]), values[0, ..., 0])


def test_verify(path, capsys):
    assert run("verify", path) == 0
    assert capsys.readouterr().out == f"{path} is whole\n"

    def break_two(told, arrays, database):
        ids = [id_ for (id_,) in database.execute("SELECT id FROM chunks LIMIT 2")]
        for id_ in ids:
            database.execute("UPDATE blobs SET data = CAST(data || x'00' AS BLOB) WHERE id = ?", [id_])
        database.execute("DELETE FROM blobs WHERE id = ?", [told["arrays"]["rewards"]["blocks"][0][0]])

    forge(path, break_two)
    assert run("verify", path) == 1
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 3
    assert [("Blob" in line, str(path) in line) for line in lines] == [(True, True)] * 3
    assert lines[2].startswith("rewards: ")
    assert "missing" in lines[2]


QUICK = {"a capacity beyond the limit", "full that is no flag", "a bomb", "a column more", "a later version"}


@pytest.mark.parametrize(
    "attack", [pytest.param(each, marks=[] if each in QUICK else pytest.mark.slow) for each in ATTACKS]
)
def test_commands_over_files_of_somebody_with_bad_intent(path, capsys, attack):
    forge(path, ATTACKS[attack])
    assert run("verify", path) == 1
    assert capsys.readouterr().out
    assert run("inspect", path) in (0, 2)


def test_what_a_stranger_wrote_reaches_no_terminal(path, capsys):
    forge(path, lambda told, arrays, database: told.update({"class": "[/b] \x1b[31mred\n[bold]", "no": None}))
    assert run("inspect", path) == 0
    out = capsys.readouterr().out
    assert "\x1b" not in out
    assert "[/b] ?[31mred [bold]" in out


def test_verify_finds_parts_that_do_not_fit_together(path, capsys):
    forge(path, lambda told, arrays, database: database.execute("UPDATE chunks SET first = first + 100000"))
    assert run("verify", path) == 1
    assert "reference" in capsys.readouterr().out


def test_verify_of_damaged_pages_and_other_files(path, tmp_path, capsys):
    whole = path.read_bytes()
    found = 0
    for start in range(0, len(whole), 4096):
        path.write_bytes(whole[:start] + bytes(4096) + whole[start + 4096 :])
        status = run("verify", path)
        streams = capsys.readouterr()
        assert (status == 1) == ("is whole" not in streams.out)
        assert streams.err == ""
        found += status
    assert found > len(whole) / 4096 / 2
    (tmp_path / "text").write_text("no file of ours" * 99)
    assert run("verify", tmp_path / "text") == 1
    for command in ("inspect", "verify"):
        assert run(command, tmp_path / "nothing") == 2
        assert "There is no file" in capsys.readouterr().err
    assert run("inspect", tmp_path / "text") == 2


def test_frames_become_transitions(tmp_path):
    frames = np.random.default_rng(0).integers(0, 255, (50, 40, 30), dtype=np.uint8)
    np.save(tmp_path / "f.npy", frames)
    np.savez(tmp_path / "f.npz", anything=frames)
    for name in ("f.npy", "f.npz"):
        out = tmp_path / f"{name}.replay"
        assert run("convert", tmp_path / name, out) == 0
        buffer = load(out, device=None)
        obs, actions, next_obs, dones, rewards = everything(buffer)
        assert_same(obs, frames[:-1])
        assert_same(next_obs, frames[1:])
        assert not any(zeros.any() for zeros in (actions, dones, rewards))
        assert buffer.observation_space == spaces.Box(0, 255, (40, 30), np.uint8)
        assert_same(buffer.sample_sequences(1, 49).observations[0], frames[:-1])


@pytest.mark.parametrize("steps", [0, 30, 95])
def test_to_npz_and_back(tmp_path, steps):
    path, npz, again = (tmp_path / name for name in ("a.replay", "a.npz", "b.replay"))
    buffer = made(steps)
    buffer.save(path)
    assert run("convert", path, npz) == 0
    order = np.roll(np.arange(buffer.size()), -buffer.pos if buffer.full else 0)
    with np.load(npz) as arrays:
        assert sorted(arrays) == [
            "actions", "dones", "next_observations.image", "next_observations.vector", "observations.image",
            "observations.vector", "rewards", "timeouts",
        ]  # fmt: skip
        for name in ("image", "vector"):
            rows = order[:, None], np.arange(2)
            assert_same(arrays[f"observations.{name}"], buffer.observations[name][rows])
            assert_same(arrays[f"next_observations.{name}"], buffer.next_observations[name][rows])
        for name in ("actions", "rewards", "dones", "timeouts"):
            assert_same(arrays[name], getattr(buffer, name)[order])
    assert run("convert", npz, again) == 0
    indices = (order[:, None] * 2 + np.arange(2)).ravel()
    assert_same(everything(load(again, device=None)), tuple(buffer.get(indices)))


def test_leaves_of_the_same_name_are_refused(tmp_path, capsys):
    space = spaces.Dict({"a.b": spaces.Discrete(3), "a": spaces.Dict(b=spaces.Discrete(9))})
    CompressedReplayBuffer(5, space, ACTIONS, None).save(tmp_path / "a.replay")
    assert run("convert", tmp_path / "a.replay", tmp_path / "a.npz") == 2
    assert "name observations.a.b" in capsys.readouterr().err
    assert not list(tmp_path.glob("a.npz*"))


def test_next_observations_of_another_shape_are_refused(tmp_path, capsys):
    arrays = {name: np.zeros((5, 2, 1)) for name in ("actions", "rewards", "dones", "timeouts")}
    shapes = {"observations": (5, 2, 40, 36), "next_observations": (5, 2, 36, 40)}
    np.savez(
        tmp_path / "a.npz", **arrays, **{name: np.zeros(shape, np.uint8) for name, shape in shapes.items()}
    )
    assert run("convert", tmp_path / "a.npz", tmp_path / "a.replay") == 2
    assert "(5, 2, 40, 36)" in capsys.readouterr().err


@pytest.mark.parametrize("full", [False, True])
@pytest.mark.parametrize("kind", ["ReplayBuffer", "optimized", "DictReplayBuffer", "compressed"])
def test_sb3s_pickle(tmp_path, kind, full, capsys):
    space = DICT if kind == "DictReplayBuffer" else STACKS
    cls = {"optimized": "ReplayBuffer", "compressed": "ReplayBuffer"}.get(kind, kind)
    arguments = (60, space, DISCRETE, "cpu", 2, kind == "optimized", kind != "optimized")
    theirs = getattr(buffers, cls)(*arguments)
    kept = ours.CompressedReplayBuffer(*arguments) if kind == "compressed" else theirs
    transitions = Transitions(space, DISCRETE, 2)
    steps = []
    for _ in range(44 if full else 20):
        steps.append(transitions())
        for buffer in {id(theirs): theirs, id(kept): kept}.values():
            buffer.add(*[dict(part) if isinstance(part, dict) else part for part in steps[-1]])
    pkl, out = tmp_path / "replay.pkl", tmp_path / "a.replay"
    save_to_pkl(pkl, kept)
    assert run("convert", pkl, out) == 2
    assert "--trust-pickle" in capsys.readouterr().err
    assert not out.exists()
    assert run("convert", pkl, out, "--trust-pickle") == 0
    if kind == "optimized":  # which keeps a transition less when full, and forgets next_obs at resets
        loaded = load(out, device=None)
        newest = steps[-29:] if full else steps
        rewards = np.concatenate([step[3] for step in newest]).astype(np.float32)
        assert_same(everything(loaded)[4][:, 0], rewards)
        assert_same(everything(loaded)[0], np.concatenate([step[0] for step in newest]))
        following = [step[0] for step in newest[1:]] + [newest[-1][1]]
        assert_same(everything(loaded)[2], np.concatenate(following))
    else:
        name = "CompressedDictReplayBuffer" if space is DICT else "CompressedReplayBuffer"
        loaded = getattr(ours, name).load(out, device="cpu")
        assert (loaded.pos, loaded.full) == (theirs.pos, theirs.full)
        assert_equal_batches(loaded, theirs)


def test_sb3s_n_step_and_hindsight_pickles(tmp_path, capsys):
    arguments = (60, STACKS, DISCRETE, "cpu", 2)
    theirs = buffers.NStepReplayBuffer(*arguments, n_steps=4, gamma=0.8)
    transitions = Transitions(STACKS, DISCRETE, 2)
    for _ in range(44):
        theirs.add(*transitions())
    save_to_pkl(tmp_path / "n.pkl", theirs)
    assert run("convert", tmp_path / "n.pkl", tmp_path / "n.replay", "--trust-pickle") == 0
    assert_equal_batches(ours.CompressedNStepReplayBuffer.load(tmp_path / "n.replay", device="cpu"), theirs)
    env = DummyVecEnv([Goals] * 2)
    for keeps, status in ((False, 0), (True, 2)):
        her = sb3.HerReplayBuffer(
            60, env.observation_space, env.action_space, env, "cpu", 2, copy_info_dict=keeps, n_sampled_goal=2
        )
        obs = env.reset()
        for _ in range(50):
            actions = np.zeros((2, 2), np.float32)
            following, rewards, dones, infos = env.step(actions)
            her.add(dict(obs), dict(following), actions, rewards, dones, infos)
            obs = following
        save_to_pkl(tmp_path / "h.pkl", her)
        assert run("convert", tmp_path / "h.pkl", tmp_path / "h.replay", "--trust-pickle") == status
        if not status:
            loaded = ours.CompressedHerReplayBuffer.load(tmp_path / "h.replay", device="cpu")
            loaded.set_env(env)
            assert_equal_batches(loaded, her)
            (tmp_path / "h.replay").unlink()
    assert "infos" in capsys.readouterr().err
    assert [path.name for path in tmp_path.glob("*.part")] == []


class Touches:
    """Pickled, it makes a file when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return (open, (self.path, "w"))


def test_no_code_of_a_pickle_runs_unasked(tmp_path):
    (tmp_path / "x.pkl").write_bytes(pickle.dumps(Touches(str(tmp_path / "touched"))))
    np.save(tmp_path / "x.npy", np.array([Touches(str(tmp_path / "touched"))]))
    for name in ("x.pkl", "x.npy"):
        assert run("convert", tmp_path / name, tmp_path / "a.replay") == 2
    assert not (tmp_path / "touched").exists()
    assert not (tmp_path / "a.replay").exists()


@pytest.mark.parametrize(
    ("name", "arrays", "message"),
    [
        ("flat.npz", {"a": np.zeros((9, 3))}, "two frames or more"),
        ("one.npz", {"a": np.zeros((1, 40, 40))}, "two frames or more"),
        ("text.npz", {"a": np.array([[["x"]], [["y"]]])}, "numbers"),
        ("large.npz", {"a": np.zeros((2, 6000, 6000), np.uint8)}, "at most"),
        ("long.npz", {"a": np.zeros((2, 40, 40), np.longdouble)}, "dtype"),
        ("odd.npz", {"a": np.zeros((9, 40, 40)), "b": np.zeros(9)}, "lacks observations, next_observations, actions"),
        ("obs.npz", {"observations": np.zeros((9, 1, 3)), "actions": np.zeros((9, 1, 1))}, "lacks next_observations, rewards"),
        ("flat.npz", {name: np.zeros((9, 1)) for name in (
            "observations", "next_observations", "actions", "rewards", "dones", "timeouts")}, "actions (rows"),
        ("rows.npz", {name: np.zeros((9 + (name == "dones"), 1, 1)) for name in (
            "observations", "next_observations", "actions", "rewards", "dones", "timeouts")}, "same length"),
    ],
)  # fmt: skip
def test_arrays_that_are_no_transitions(tmp_path, capsys, name, arrays, message):
    np.savez(tmp_path / name, **arrays)
    assert run("convert", tmp_path / name, tmp_path / "a.replay") == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "a.replay").exists()


def test_what_cannot_be_converted(path, tmp_path, capsys):
    frames = tmp_path / "f.npy"
    np.save(frames, np.zeros((5, 40, 40), np.uint8))
    for noise in (tmp_path / "n.npy", tmp_path / "n.pkl"):
        noise.write_bytes(b"noise")
    for arguments, message in (
        ((frames, path), "already"),
        ((path, tmp_path / "b.replay"), f"got {path} and {tmp_path}"),
        ((tmp_path / "none.npy", tmp_path / "b.replay"), "none.npy"),
        ((tmp_path / "none.replay", tmp_path / "b.npz"), "There is no file"),
        ((tmp_path / "n.npy", tmp_path / "b.replay"), "no file of NumPy's"),
        ((frames, tmp_path / "b.npz"), "name for a replay file"),
        ((frames, tmp_path / "no" / "b.replay"), "no folder"),
        ((tmp_path / "n.pkl", tmp_path / "b.replay", "--trust-pickle"), "unpickled"),
    ):
        assert run("convert", *arguments) == 2
        assert message in capsys.readouterr().err
        assert not (tmp_path / "b.replay").exists()
    save_to_pkl(tmp_path / "o.pkl", {"no": "buffer"})
    assert run("convert", tmp_path / "o.pkl", tmp_path / "b.replay", "--trust-pickle") == 2
    assert "no replay memory" in capsys.readouterr().err
    forge(path, lambda told, arrays, database: database.execute("UPDATE blobs SET data = randomblob(300)"))
    assert run("convert", path, tmp_path / "b.npz") == 2
    assert not list(tmp_path.glob("b.npz*"))


def test_missing_extras_are_named(path, monkeypatch, capsys):
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *a: None if name == "matplotlib" else find_spec(name, *a)
    )
    assert run("inspect", path, "--frames", "x.png") == 2
    assert 'pip install "gym-compress[plot]"' in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "stable_baselines3", None)
    assert run("convert", path.with_suffix(".pkl"), "x.replay", "--trust-pickle") == 2
    assert 'pip install "gym-compress[sb3]"' in capsys.readouterr().err


@pytest.mark.slow
def test_run_as_a_module(path):
    done = subprocess.run(
        [sys.executable, "-m", "gym_compress", "verify", str(path)],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == f"{path} is whole\n"
    assert done.stderr == ""
    done = subprocess.run(
        [sys.executable, "-m", "gym_compress", "convert", "--help"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert "whatever code" in done.stdout
    assert_holds(feed(load(path, device=None), range(95, 99)), 99)
