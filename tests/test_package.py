import re
import subprocess
import sys
from pathlib import Path

import pytest

import gym_compress

ROOT = Path(__file__).parents[1]


def test_all_is_sorted_and_there():
    assert gym_compress.__all__ == sorted(gym_compress.__all__)
    for name in gym_compress.__all__:
        assert getattr(gym_compress, name).__doc__


def test_heavy_packages_are_not_imported():
    heavy = {"torch", "cv2", "ale_py", "matplotlib", "jax", "stable_baselines3"}
    code = f"import gym_compress, sys; print(sorted({heavy} & set(sys.modules)))"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"


def test_only_the_codec_imports_blosc2():
    users = [
        path.name
        for path in (ROOT / "gym_compress").rglob("*.py")
        if re.search(r"^(import|from) blosc2", path.read_text(), re.M)
    ]
    assert users == ["codec.py"]


@pytest.mark.parametrize(
    "arguments", [["pong_memory.py", "--steps", "400"]], ids=lambda arguments: arguments[0]
)
def test_examples_run(arguments):
    run = subprocess.run(
        [sys.executable, str(ROOT / "examples" / arguments[0]), *arguments[1:]],
        capture_output=True,
        text=True,
        check=True,
    )
    assert "a batch for the network: (32, 4, 84, 84), uint8" in run.stdout
    assert re.search(r"400 .* MB .*11\.3 MB", run.stdout)
