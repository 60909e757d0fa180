"""DQN on an Atari game that can be killed at any time and goes on where its last checkpoint was.

    python examples/resume_training.py --folder pong --steps 200000

Needs the extras ``atari`` and ``sb3``. Stop it as you like, with Ctrl+C or ``kill -9``, and give the same
command again: it loads the newest model and the replay memory of its last checkpoint, and trains the steps
that are left. ``--demo`` shows it in a minute: it trains in another process, kills that, and goes on.
"""

import argparse
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import ale_py
import gymnasium as gym
from gymnasium.wrappers import AtariPreprocessing, FrameStackObservation
from stable_baselines3 import DQN
from stable_baselines3.common.monitor import Monitor

from gym_compress.sb3 import CheckpointReplayCallback, CompressedReplayBuffer

PREFIX = "dqn"


def make_env(env_id: str) -> gym.Env:
    """An Atari game with the usual preprocessing and stacks of four frames."""
    env = AtariPreprocessing(gym.make(env_id, frameskip=1))
    return Monitor(FrameStackObservation(env, 4))


def newest_model(folder: Path, env: gym.Env) -> DQN | None:
    """The newest model that is whole, with the replay memory; None if there is none yet."""
    steps = {path: re.search(r"_(\d+)_steps", path.name) for path in folder.glob(f"{PREFIX}_*_steps.zip")}
    for path in sorted(steps, key=lambda path: int(steps[path][1]), reverse=True):
        try:
            model = DQN.load(path, env=env)
        except ValueError as error:  # the process was killed while SB3 wrote it
            print(f"{path.name} is not whole, looking for the one before: {error}")
            continue
        model.replay_buffer = CompressedReplayBuffer.load(folder / f"{PREFIX}.replay", device=model.device)
        memory = model.replay_buffer
        print(f"going on from {path.name} with {memory.size():,} transitions, {memory.cbytes / 1e6:.1f} MB")
        return model
    return None


def train(args: argparse.Namespace) -> None:
    """Trains the steps that are left, with a checkpoint now and then."""
    env = make_env(args.env_id)
    model = newest_model(args.folder, env) or DQN(
        "CnnPolicy",
        env,
        buffer_size=args.buffer_size,
        replay_buffer_class=CompressedReplayBuffer,
        learning_starts=args.learning_starts,
        learning_rate=1e-4,
        batch_size=32,
        train_freq=4,
        target_update_interval=1_000,
        seed=args.seed,
        verbose=1,
    )
    callback = CheckpointReplayCallback(args.save_freq, str(args.folder), name_prefix=PREFIX, verbose=2)
    left = args.steps - model.num_timesteps
    if left > 0:
        model.learn(left, callback=callback, reset_num_timesteps=False)
    print(f"trained {model.num_timesteps:,} steps; {model.replay_buffer.size():,} transitions in memory")


def demo(args: argparse.Namespace) -> None:
    """Trains in another process, kills it after a checkpoint, and goes on."""
    command = [sys.executable, __file__, "--folder", str(args.folder), "--steps", str(args.steps)]
    command += [
        "--env-id",
        args.env_id,
        "--save-freq",
        str(args.save_freq),
        "--buffer-size",
        str(args.buffer_size),
    ]
    command += ["--learning-starts", str(args.learning_starts), "--seed", str(args.seed)]
    child = subprocess.Popen(command)
    while child.poll() is None and not list(args.folder.glob(f"{PREFIX}_*_steps.zip")):
        time.sleep(0.1)
    child.send_signal(signal.SIGKILL)
    child.wait()
    print("killed; going on")
    train(args)


def main() -> None:
    """Trains, or shows how training goes on after a kill."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--folder", type=Path, default=Path("checkpoints"), help="where checkpoints go")
    parser.add_argument("--env-id", default="ALE/Pong-v5")
    parser.add_argument("--steps", type=int, default=1_000_000, help="of all runs together")
    parser.add_argument("--save-freq", type=int, default=10_000, help="steps between two checkpoints")
    parser.add_argument("--buffer-size", type=int, default=1_000_000)
    parser.add_argument("--learning-starts", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--demo", action="store_true", help="kill a training and go on with it")
    args = parser.parse_args()
    gym.register_envs(ale_py)
    demo(args) if args.demo else train(args)


if __name__ == "__main__":
    main()
