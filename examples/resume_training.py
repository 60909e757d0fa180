"""DQN on an Atari game that can be killed at any time and goes on where its last checkpoint was.

    python examples/resume_training.py --folder pong --steps 200000

Needs the extras ``atari`` and ``sb3``. Stop it as you like, with Ctrl+C or ``kill -9``, and give the same
command again: it loads the newest model and the replay memory, and trains the steps that are left. To see
that in a minute, training in another process that is killed after its first checkpoint:

    python examples/resume_training.py --folder demo --steps 3000 --save-freq 1000 --learning-starts 500
    --demo
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


def models(folder: Path) -> dict[int, Path]:
    """The models in a folder, by the number of steps that they were trained."""
    found = {path: re.fullmatch(rf"{PREFIX}_(\d+)_steps\.zip", path.name) for path in folder.glob("*.zip")}
    return {int(match[1]): path for path, match in found.items() if match}


def train(args: argparse.Namespace) -> None:
    """Trains the steps that are left, with a checkpoint now and then."""
    env = make_env(args.env_id)
    callback = CheckpointReplayCallback(args.save_freq, str(args.folder), PREFIX, verbose=2)
    saved = models(args.folder)
    if saved:
        model = DQN.load(saved[max(saved)], env=env)
        model.replay_buffer = CompressedReplayBuffer.load(callback.replay_path, device=model.device)
        print(f"going on from {saved[max(saved)].name} with {model.replay_buffer.size():,} transitions")
    else:
        print(f"no model in {args.folder}: starting from the beginning")
        model = DQN(
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
    left = args.steps - model.num_timesteps
    if left > 0:
        model.learn(left, callback=callback, reset_num_timesteps=False)
        model.replay_buffer.save(callback.replay_path)
        model.save(args.folder / f"{PREFIX}_{model.num_timesteps}_steps.zip")
    memory = model.replay_buffer
    taken = f"{memory.size():,} transitions take {memory.cbytes / 1e6:.1f} MB"
    print(f"trained {model.num_timesteps:,} steps; {taken}")


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
    before = models(args.folder)
    child = subprocess.Popen(command)
    while child.poll() is None and models(args.folder).keys() == before.keys():
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
