import importlib.util
import json
import math
import subprocess
import sys

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces

import gym_compress.commands.compare as compare_module
from gym_compress.commands.cli import main
from gym_compress.commands.compare import Recording, Replay, image_places, record
from gym_compress.errors import GymCompressError
from tests.envs import PIXELS, AnyEnv, MovingSquare, assert_same, play

NESTED = spaces.Dict(
    camera=spaces.Tuple([PIXELS, spaces.Box(-1, 1, (40, 40), np.float32)]),
    vector=spaces.Box(-1, 1, (9000,), np.float32),
    icon=spaces.Box(0, 255, (4, 4), np.uint8),
)


def test_images_are_found_in_nested_spaces():
    space = spaces.Dict(a=NESTED, b=spaces.Box(0, 255, (32, 32), np.uint8))
    assert image_places(space) == {
        "['a']['camera'][1]": ("a", "camera", 1),
        "['b']": ("b",),
    }
    assert image_places(spaces.Box(0, 1, (16, 16))) == {"": ()}
    with pytest.raises(GymCompressError, match="no image"):
        image_places(spaces.Tuple([spaces.Discrete(3), spaces.Box(0, 1, (5000,))]))


def test_a_recording_plays_as_it_was(tmp_path):
    env = MovingSquare(episode=7)
    calls = []
    recording = record(env, 30, seed=5, advance=lambda: calls.append(1))
    want = play(MovingSquare(episode=7), 26, seed=5)[:30]
    assert len(calls) == 30
    assert_same(recording.images[""], np.stack(want))
    assert np.flatnonzero(recording.first).tolist() == [0, 8, 16, 24]
    assert recording.nbytes == 84 * 84
    recording.save(tmp_path)
    replay = Replay(Recording.load(tmp_path))
    assert_same(tuple(play(replay, 26)[:30]), tuple(want))
    assert play(Replay(record(AnyEnv(NESTED), 9, 1, lambda: None)), 3)[0].shape == (40, 40)


@pytest.mark.slow
@pytest.mark.parametrize("codecs", [["zstd:1"], ["auto", "lz4hc:5", "zstd:1"]], ids=len)
def test_compare(tmp_path, capsys, codecs):
    report, chart = tmp_path / "r.json", tmp_path / "m.png"
    arguments = [
        "compare",
        "tests.envs:MovingSquare-v0",
        "--steps",
        "300",
        "--codec",
        *codecs,
    ]
    assert main([*arguments, "--stack-size", "3", "--json", str(report), "--plot", str(chart)]) == 0
    out = capsys.readouterr().out
    data = json.loads(report.read_text())
    assert (data["env"], data["steps"]) == ("tests.envs:MovingSquare-v0", 300)
    rows = data["rows"]
    assert [(row["method"], row["codec"]) for row in rows] == [
        ("FrameStackObservation", "-"),
        ("SharedFrames", "none"),
        *(
            [("CompressedFrameStack", "lz4hc:5")] if "auto" in codecs else []
        ),  # asked for twice, measured once
        ("CompressedFrameStack", "zstd:1"),
    ]
    plain, shared, *compressed = rows
    stack = 3 * 84 * 84
    assert stack < plain["bytes_per_observation"] < 1.1 * stack
    assert 84 * 84 < shared["bytes_per_observation"] < 1.1 * 84 * 84
    for row in compressed:
        assert row["ratio"] > 50
        assert f"{row['bytes_per_observation']:,.0f}" in out
    for row in rows:
        assert row["ratio"] == pytest.approx(plain["bytes_per_observation"] / row["bytes_per_observation"])
        assert row["gb_per_million"] == pytest.approx(row["bytes_per_observation"] / 1000)
        assert row["batch_us"] > 0
        assert math.isfinite(row["step_us"])
    assert chart.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["NoSuchEnv-v0"], "NoSuchEnv"),
        (["ALE/NoSuchGame-v5"], "NoSuchGame"),
        (["no_such_module:Env-v0"], "no_such_module"),
        (["CartPole-v1"], "no image among the observations"),
        (["MovingSquare-v0", "--codec", "lzma"], "Unknown codec 'lzma'"),
        (["MovingSquare-v0", "--frames-per-chunk", "0"], "at least 1"),
        (["MovingSquare-v0", "--steps", "99"], "at least 100"),
        (["MovingSquare-v0", "--seed", "-1"], "recording failed"),
        ([".:Env-v0"], ".:Env-v0: TypeError"),
        (["tests.envs:Broken-v0"], "Broken-v0: RuntimeError: no camera"),
        (["tests.envs:Growing-v0", "--steps", "100"], "recording failed: ValueError"),
        (["MovingSquare-v0", "--plot", "/"], "cannot be written"),
        (["MovingSquare-v0", "--stack-size", "0"], "at least 1"),
        (["MovingSquare-v0", "--json", "/no/such/folder/r.json"], "cannot be written"),
    ],
)
def test_what_cannot_be_had_is_one_line_and_status_2(arguments, message, capsys):
    assert main(["compare", *arguments]) == 2
    streams = capsys.readouterr()
    assert streams.out == ""
    assert len(streams.err.splitlines()) == 1
    assert message in streams.err


def test_small_frames_alone_are_images():
    assert image_places(spaces.Box(0, 1, (10, 10, 4), bool)) == {"": ()}


def test_what_a_wrapper_adds_and_what_a_batch_takes_are_told_by_the_clock(monkeypatch):
    clock = [0.0]
    monkeypatch.setattr(compare_module.time, "perf_counter", lambda: clock[0])

    class Slow(MovingSquare):
        def __init__(self, seconds):
            super().__init__(episode=10**9)
            self.seconds = seconds

        def step(self, action):
            clock[0] += self.seconds
            return super().step(action)

    assert compare_module._added(Slow(5e-6), Slow(2e-6)) == pytest.approx(3)

    def decompress(batch):
        clock[0] += len(batch) * 1e-6

    monkeypatch.setattr(compare_module, "decompress_batch", decompress)
    assert compare_module._batch([0] * 50, plain=False) == pytest.approx(32)


def test_settings_reach_what_is_measured(monkeypatch, tmp_path):
    recording = record(MovingSquare(), 100, 7, lambda: None)
    assert_same(recording.images[""][0], MovingSquare().reset(seed=7)[0])
    recording.save(tmp_path)
    made = []
    stack = compare_module.CompressedFrameStack

    def spy(env, stack_size, **kwargs):
        made.append((stack_size, kwargs))
        return stack(env, stack_size, **kwargs)

    monkeypatch.setattr(compare_module, "CompressedFrameStack", spy)
    monkeypatch.setattr(compare_module, "_KEPT", 100)
    compare_module._measure(str(tmp_path), "zstd:3", 5, 9)
    assert made == [(5, {"codec": "zstd:3", "frames_per_chunk": 9})] * 2


def test_auto_stands_under_what_it_chose_or_under_its_own_name():
    small, large = np.zeros((1, 40, 40), np.uint8), np.zeros((1, 200, 200, 3), np.uint8)
    first = np.ones(1, np.bool_)
    assert compare_module._resolved("auto", Recording({"a": small}, first)) == "lz4hc:5"
    assert compare_module._resolved("auto", Recording({"a": small, "b": large}, first)) == "auto"
    assert compare_module._resolved("zstd", Recording({"a": small, "b": large}, first)) == "zstd:5"


def test_missing_extras_are_named(monkeypatch, capsys):
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *a: None if name == "matplotlib" else find_spec(name, *a)
    )
    assert main(["compare", "MovingSquare-v0", "--plot", "x.png"]) == 2
    assert 'pip install "gym-compress[plot]"' in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "ale_py", None)
    assert main(["compare", "ALE/Pong-v5"]) == 2
    assert 'pip install "gym-compress[atari]"' in capsys.readouterr().err
    monkeypatch.undo()
    monkeypatch.setitem(sys.modules, "cv2", None)
    assert main(["compare", "ALE/Pong-v5"]) == 2
    assert 'pip install "gym-compress[atari]"' in capsys.readouterr().err


def test_runs_as_a_module():
    run = subprocess.run(
        [sys.executable, "-m", "gym_compress", "compare", "Nope-v0"], capture_output=True, text=True
    )
    assert (run.returncode, run.stdout) == (2, "")
    assert "Traceback" not in run.stderr
    run = subprocess.run([sys.executable, "-m", "gym_compress", "--help"], capture_output=True, text=True)
    assert run.returncode == 0
    assert "compare" in run.stdout


@pytest.mark.slow
def test_stepping_an_atari_game(tmp_path):
    report = tmp_path / "r.json"
    assert main(["compare", "ALE/Pong-v5", "--steps", "300", "--codec", "zstd:1", "--json", str(report)]) == 0
    row = json.loads(report.read_text())["rows"][-1]
    assert row["bytes_per_observation"] < 4 * 84 * 84 / 50
    assert gym.spec("ALE/Pong-v5")
