"""DQN on an Atari game with many collectors: replay memory in Ray actors, frames compressed on their way.

    python examples/ray_dqn_atari.py --num-collectors 2 --num-shards 2 --steps 6000
    python examples/ray_dqn_atari.py --address auto --num-collectors 32 --num-shards 4 --steps 10000000

Needs the extras ``atari`` and ``ray`` and PyTorch. Collectors play with the network that the learner had when
they began a round, and add what they see to a shard each. The learner draws from all shards. The second line
is for a cluster: ``ray start --head`` on one machine, ``ray start --address=...`` on the others, and the line
on any of them.
"""

import argparse
from collections import deque

import ale_py
import gymnasium as gym
import numpy as np
import ray
import torch
import torch.nn.functional as F
from gymnasium.wrappers import AtariPreprocessing
from torch import nn, optim

from gym_compress import CompressedFrameStack
from gym_compress.ray import ReplayWriter, ShardedReplay

ROUND = 250  # steps that a collector plays between two looks at the network
GAMMA = 0.99


def make_env(env_id: str) -> gym.Env:
    """An Atari game with the usual preprocessing, whose stacks are compressed as they come."""
    gym.register_envs(ale_py)
    return CompressedFrameStack(AtariPreprocessing(gym.make(env_id, frameskip=1)), 4)


def spaces_of(env_id: str) -> tuple[gym.Space, gym.Space]:
    """The spaces of observations and actions."""
    env = make_env(env_id)
    return env.observation_space, env.action_space


def make_network(actions: int) -> nn.Module:
    """The network of Mnih et al. (2015)."""
    return nn.Sequential(
        nn.Conv2d(4, 32, 8, stride=4),
        nn.ReLU(),
        nn.Conv2d(32, 64, 4, stride=2),
        nn.ReLU(),
        nn.Conv2d(64, 64, 3, stride=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(3136, 512),
        nn.ReLU(),
        nn.Linear(512, actions),
    )


class Collector:
    """Plays a game and adds what happens to replay memory."""

    def __init__(self, env_id: str, writer: ReplayWriter, seed: int) -> None:
        torch.set_num_threads(1)
        self.env, self.writer = make_env(env_id), writer
        self.rng = np.random.default_rng(seed)
        self.obs, _ = self.env.reset(seed=seed)
        self.network = make_network(int(self.env.action_space.n))
        self.score = 0.0

    def play(self, weights: dict[str, torch.Tensor], epsilon: float) -> list[float]:
        """Plays a round, and returns the scores of the episodes that ended in it."""
        self.network.load_state_dict(weights)
        scores = []
        for _ in range(ROUND):
            if self.rng.random() < epsilon:
                action = int(self.rng.integers(self.env.action_space.n))
            else:
                with torch.no_grad():
                    action = int(self.network(torch.as_tensor(self.obs)[None] / 255.0).argmax())
            next_obs, reward, terminated, truncated, _ = self.env.step(action)
            # a truncation is no end to learn from, so the next observation stays worth something
            clipped = np.sign(reward)
            self.writer.add([self.obs], [next_obs], [action], [clipped], [terminated], [{}])
            self.score += float(reward)
            self.obs = next_obs
            if terminated or truncated:
                scores.append(self.score)
                self.score = 0.0
                self.obs, _ = self.env.reset()
        self.writer.flush()
        return scores


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--address", help="of a Ray cluster; without it, Ray is started here")
    parser.add_argument("--env-id", default="ALE/Pong-v5", help="the game")
    parser.add_argument("--num-collectors", type=int, default=2, help="actors that play")
    parser.add_argument("--num-shards", type=int, default=2, help="actors that keep transitions")
    parser.add_argument("--steps", type=int, default=6000, help="steps of all collectors together")
    parser.add_argument("--buffer-size", type=int, default=100_000, help="transitions in replay memory")
    parser.add_argument("--learning-starts", type=int, default=1000, help="steps before the first update")
    parser.add_argument("--train-frequency", type=int, default=4, help="steps for each update")
    parser.add_argument("--batch-size", type=int, default=32, help="transitions in a batch")
    parser.add_argument("--seed", type=int, default=1, help="of networks, games and draws")
    args = parser.parse_args()

    if args.address:
        ray.init(args.address)
    else:
        ray.init(include_dashboard=False, object_store_memory=200 * 2**20, _node_ip_address="127.0.0.1")
    torch.manual_seed(args.seed)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    observation_space, action_space = spaces_of(args.env_id)
    network, target = (make_network(int(action_space.n)).to(device) for _ in range(2))
    target.load_state_dict(network.state_dict())
    optimizer = optim.Adam(network.parameters(), lr=1e-4)

    replay = ShardedReplay(
        args.buffer_size,
        observation_space,
        action_space,
        num_shards=args.num_shards,
        seed=args.seed,
        device=device,
    )
    share = min(1.0, ray.cluster_resources()["CPU"] / args.num_collectors)  # of a CPU, for each collector
    actor = ray.remote(Collector).options(num_cpus=share)
    collectors = [
        actor.remote(args.env_id, replay.writer(f"collector-{i}"), 1000 * args.seed + i)
        for i in range(args.num_collectors)
    ]

    scores, rounds, idle = deque(maxlen=20), {}, collectors
    begun = steps = updates = 0
    with replay.batches(args.batch_size) as batches:
        while True:
            due = (steps - args.learning_starts) // args.train_frequency - updates
            while idle and due <= 0 and begun < args.steps:  # collectors wait for a learner that is behind
                weights = {name: values.cpu() for name, values in network.state_dict().items()}
                epsilon = max(0.01, 1 - begun / (0.1 * args.steps))
                collector = idle.pop()
                rounds[collector.play.remote(weights, epsilon)] = collector
                begun += ROUND
            if due <= 0 and not rounds:
                break
            for ended in ray.wait(list(rounds), timeout=0 if due > 0 else None)[0] if rounds else []:
                scores.extend(ray.get(ended))
                steps += ROUND
                idle.append(rounds.pop(ended))
            if due > 0:
                batch = next(batches)
                with torch.no_grad():
                    following = target(batch.next_observations / 255.0).max(dim=1).values
                    wanted = batch.rewards.flatten() + GAMMA * following * (1 - batch.dones.flatten())
                values = network(batch.observations / 255.0).gather(1, batch.actions).squeeze(1)
                loss = F.mse_loss(values, wanted)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                updates += 1
                if updates % 250 == 0:
                    target.load_state_dict(network.state_dict())
                    mean = f"{np.mean(scores):.1f}" if scores else "none yet"
                    print(f"{steps} steps, {updates} updates, loss {loss.item():.4f}, scores {mean}")

    kept = replay.size()
    dense = 2 * kept * int(np.prod(observation_space.shape))
    memory = f"{replay.cbytes / 1e6:.1f} MB, in arrays {dense / 1e6:.1f} MB"
    print(f"{updates} updates, {kept} transitions in {args.num_shards} shards: {memory}")
    replay.close()
    ray.shutdown()
