"""DQN on an Atari game with Stable-Baselines3, its replay memory compressed.

    python examples/sb3_dqn_atari.py --steps 20000

Needs the extras ``atari`` and ``sb3``. Against a script of plain SB3, the four lines marked "changed" are new
or changed. What is learned is the same, bit for bit; a million transitions take 0.2 GB in place of 56 GB.
"""

import argparse

import ale_py
import gymnasium as gym
from gymnasium.wrappers import AtariPreprocessing, FrameStackObservation
from stable_baselines3 import DQN
from stable_baselines3.common.evaluation import evaluate_policy
from stable_baselines3.common.monitor import Monitor

from gym_compress.sb3 import CompressedReplayBuffer  # changed: new


def make_env(env_id: str) -> gym.Env:
    """An Atari game with the usual preprocessing and stacks of four frames."""
    env = AtariPreprocessing(gym.make(env_id, frameskip=1))
    return Monitor(FrameStackObservation(env, 4))


def main() -> None:
    """Trains, and says how well the agent plays and what its memory takes."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--env-id", default="ALE/Pong-v5")
    parser.add_argument("--steps", type=int, default=1_000_000)
    parser.add_argument("--buffer-size", type=int, default=1_000_000)
    parser.add_argument("--learning-starts", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    gym.register_envs(ale_py)
    model = DQN(
        "CnnPolicy",
        make_env(args.env_id),
        buffer_size=args.buffer_size,
        replay_buffer_class=CompressedReplayBuffer,  # changed: new
        learning_starts=args.learning_starts,
        learning_rate=1e-4,
        batch_size=32,
        train_freq=4,
        target_update_interval=1_000,
        seed=args.seed,
        verbose=1,
    )
    model.learn(args.steps, log_interval=1)

    reward, _ = evaluate_policy(model, make_env(args.env_id), n_eval_episodes=1, warn=False)
    memory = model.replay_buffer
    plain = memory.nbytes * memory.size() / memory.buffer_size  # changed: new; what they would take in arrays
    print(f"reward {reward:.0f}; {memory.size():,} transitions")
    print(f"the memory takes {memory.cbytes / 1e6:,.1f} MB, in arrays {plain / 1e6:,.1f} MB")  # changed: new


if __name__ == "__main__":
    main()
