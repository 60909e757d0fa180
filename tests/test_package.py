import ast
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
    heavy = {"torch", "cv2", "ale_py", "matplotlib", "jax", "ray", "stable_baselines3"}
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


def test_imports_run_one_way():
    """As the README's table of files says: from a file's own row and those above."""
    table = re.search(r"\| file \| its job \|\n((?:\|.*\n)+)", (ROOT / "README.md").read_text())[1]
    row_of = {}
    for number, row in enumerate(table.splitlines()):
        for name in re.findall(r"`([\w/.]+?)(?:\.py|/)`", row.split("|")[1]):
            row_of["gym_compress." + name.replace("/", ".")] = number

    def place(module):
        """The row of a module, or of the package that it is in."""
        return next((row_of[part] for part in (module, module.rsplit(".", 1)[0]) if part in row_of), None)

    files = [file for file in (ROOT / "gym_compress").rglob("*.py") if not file.name.startswith("__")]
    assert files
    for file in files:
        module = ".".join(file.relative_to(ROOT).with_suffix("").parts)
        assert place(module) is not None, f"{module} has no row"
        for package, name in re.findall(
            r"^\s*(?:from|import) (gym_compress\.[\w.]+)(?: import (\w+))?", file.read_text(), re.M
        ):
            other = f"{package}.{name}" if f"{package}.{name}" in row_of else package
            assert place(other) is not None, f"{other} has no row"
            assert place(other) <= place(module), f"{module} imports {other}"


def test_nothing_reaches_for_what_is_private_in_another_file():
    """Names that begin with an underscore are of their own file; those of other packages' classes are theirs."""
    trees = {file: ast.parse(file.read_text()) for file in (ROOT / "gym_compress").rglob("*.py")}

    def defined(tree):
        for node in ast.walk(tree):
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                yield node.name
            elif isinstance(node, (ast.Attribute, ast.Name)) and isinstance(node.ctx, ast.Store):
                yield node.attr if isinstance(node, ast.Attribute) else node.id

    names = {file: set(defined(tree)) for file, tree in trees.items()}
    of_the_package = set().union(*names.values()) - {"_fields"}  # which each NamedTuple has
    assert "_lock" in of_the_package or "_rng" in of_the_package
    for file, tree in trees.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and re.match("_[^_]", node.attr):
                assert node.attr in names[file] or node.attr not in of_the_package, f"{file}: {node.attr}"


EXAMPLES = {  # what is run, and what it prints
    "pong_memory.py --steps 400": r"400 .* MB .*11\.3 MB[\s\S]*a batch for the network: \(32, 4, 84, 84\), uint8",
    "sb3_dqn_atari.py --steps 300 --buffer-size 200 --learning-starts 250": r"200 transitions\n.*takes 0\.\d MB, in arrays 11\.3 MB",
    "cleanrl_dqn_atari.py --env-id ALE/Breakout-v5 --total-timesteps 700 --learning-starts 600 --num-envs 2"
    " --exploration-fraction 10 --buffer-size 1000": r"episode of \d+ steps, return \d+[\s\S]* memory 0\.\d MB, in arrays 39\.\d MB",
    "cleanrl_dqn_atari.py --total-timesteps 150 --learning-starts 100 --buffer-size 100"
    " --no-compressed": r"replay memory 5\.6 MB, in arrays 5\.6 MB",
    "cleanrl_dqn_atari.py --total-timesteps 150 --learning-starts 100 --buffer-size 100"
    " --prefetch": r"replay memory 0\.\d MB, in arrays 5\.6 MB",
    "ray_dqn_atari.py --num-collectors 2 --num-shards 2 --steps 1500 --learning-starts 500"
    " --buffer-size 5000": r"250 updates, 1500 transitions in 2 shards: 0\.\d MB, in arrays 84\.7 MB",
    "planet_pixels.py --episodes 2 --max-steps 60 --updates 2 --length 10 --buffer-size 1000": r"120 .* 0\.\d+ MB .* 1\.5 MB",
}


QUICK = {"pong_memory.py"}  # those that need no PyTorch


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        pytest.param(*each, marks=[] if each[0].split()[0] in QUICK else pytest.mark.slow)
        for each in EXAMPLES.items()
    ],
    ids=EXAMPLES,
)
def test_examples_run(command, expected):
    name, *arguments = command.split()
    run = subprocess.run(
        [sys.executable, str(ROOT / "examples" / name), *arguments],
        capture_output=True,
        text=True,
        check=True,
    )
    assert re.search(expected, run.stdout)


@pytest.mark.slow
def test_ppo_learns_the_same_from_compressed_rollouts():
    command = [
        sys.executable,
        str(ROOT / "examples" / "cleanrl_ppo_atari.py"),
        "--total-timesteps",
        "96",
        "--num-envs",
        "3",
    ]
    command += ["--num-steps", "16", "--num-minibatches", "2", "--update-epochs", "2"]
    losses = {}
    for flag in ("--compressed", "--no-compressed"):
        run = subprocess.run(
            [*command, flag],
            capture_output=True,
            text=True,
            check=True,
        )
        losses[flag] = re.findall(r"policy loss (\S+), value loss (\S+),", run.stdout)
    assert len(losses["--compressed"]) == 2
    assert losses["--compressed"] == losses["--no-compressed"]
