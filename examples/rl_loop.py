"""Reinforcement learning with a trainer and an engine that take turns on one GPU.

They are two processes. Each lives in a pool of its own and gives its memory away while the other works. A row
of numbers goes in, and the action that a hidden rule wants earns a reward: one in eight by chance.

    python examples/rl_loop.py --device cuda:0      # or --device cpu, which needs no GPU
"""

import argparse
import multiprocessing

import torch
from torch.distributions import Categorical

import fencepool as fp

INPUTS, WIDTH, ACTIONS, BATCH = 16, 8192, 8, 512


def new_policy(device):
    layers = [torch.nn.Linear(INPUTS, WIDTH), torch.nn.Tanh(), torch.nn.Linear(WIDTH, ACTIONS)]
    return torch.nn.Sequential(*layers).to(device)


def rewards_of(states, actions):
    rule = torch.randn(INPUTS, ACTIONS, generator=torch.Generator().manual_seed(7))
    return (actions == (states @ rule).argmax(dim=1)).float()


def engine(device, pipe):
    """Acts. Fresh weights come with every turn, so its pool needs no backup."""
    torch.manual_seed(1)
    pool = fp.pool("engine", device)
    with pool.region():  # what PyTorch allocates in here lies in the pool
        policy = new_policy(pool.torch_device)
    fp.pause("engine")
    while (weights := pipe.recv()) is not None:
        fp.resume("engine", wait=60)  # seconds for the trainer's memory to become free
        policy.load_state_dict({name: torch.from_numpy(value) for name, value in weights.items()})
        states = torch.randn(BATCH, INPUTS)
        with torch.no_grad():
            actions = Categorical(logits=policy(states.to(pool.torch_device))).sample().cpu()
        released = fp.pause("engine").bytes_released
        pipe.send((states.numpy(), actions.numpy(), released))


def learn(policy, adam, states, actions, rewards):
    """One step of REINFORCE: make what was rewarded more likely."""
    chosen = Categorical(logits=policy(states)).log_prob(actions)
    (-(chosen * (rewards - rewards.mean())).mean()).backward()
    adam.step()
    adam.zero_grad()


def main():
    options = argparse.ArgumentParser()
    options.add_argument("--device", default="cuda:0" if torch.cuda.is_available() else "cpu")
    options.add_argument("--turns", type=int, default=60)
    given = options.parse_args()
    spawning = multiprocessing.get_context("spawn")  # a forked child could not use the GPU
    pipe, engines_end = spawning.Pipe()
    spawning.Process(target=engine, args=(given.device, engines_end), daemon=True).start()
    engines_end.close()  # this process's copy: if the engine dies, recv() raises instead of waiting

    torch.manual_seed(0)
    pool = fp.pool("trainer", given.device, backup="host")  # weights and Adam's state outlast each pause
    with pool.region():
        policy = new_policy(pool.torch_device)
        adam = torch.optim.Adam(policy.parameters(), lr=5e-4)
    for turn in range(1, given.turns + 1):
        weights = {name: value.cpu().numpy().copy() for name, value in policy.state_dict().items()}
        trainers = fp.pause("trainer").bytes_released
        pipe.send(weights)  # from here on the device is the engine's
        states, actions, engines = pipe.recv()
        fp.resume("trainer", wait=60)
        states, actions = torch.from_numpy(states), torch.from_numpy(actions)
        rewards = rewards_of(states, actions)
        with pool.region():
            learn(policy, adam, *(value.to(pool.torch_device) for value in (states, actions, rewards)))
        if turn == 1 or turn % 10 == 0:
            passed = f"the trainer gave away {trainers >> 20} MiB, the engine {engines >> 20} MiB"
            print(f"turn {turn:3}: mean reward {rewards.mean():.2f}; {passed}", flush=True)
    pipe.send(None)


if __name__ == "__main__":
    main()
