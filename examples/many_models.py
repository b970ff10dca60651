"""Many models take turns on one GPU: those used last stay, the others wait in host memory.

A request for a model that is away pauses the one that was not used for longest and resumes the wanted one, at
the addresses it had. Nothing is loaded again, and every pointer into a model stays good.

    python examples/many_models.py --device cuda:0      # or --device cpu, which needs no GPU
"""

import argparse
import random
import time

import torch

import fencepool as fp


class Turns:
    """Keeps at most so many models on the device."""

    def __init__(self, device, places):
        self.device, self.places = device, places
        self.here = []  # tags, the one used last at the end

    def add(self, tag, model):
        self.make_room()
        self.here.append(tag)
        return fp.pool(tag, self.device, backup="host").adopt(model)  # moves it into the pool

    def take(self, tag):
        """Have a model on the device. Returns whether it had been away."""
        is_away = tag not in self.here
        if is_away:
            self.make_room()
            fp.resume(tag)  # on a GPU this does not wait: what is computed next runs after the copies
        else:
            self.here.remove(tag)
        self.here.append(tag)
        return is_away

    def make_room(self):
        if len(self.here) == self.places:
            fp.pause(self.here.pop(0))  # lets its last work finish first


def main():
    options = argparse.ArgumentParser()
    options.add_argument("--device", default="cuda:0" if torch.cuda.is_available() else "cpu")
    options.add_argument("--models", type=int, default=6)
    options.add_argument("--places", type=int, default=2)
    options.add_argument("--requests", type=int, default=20)
    given = options.parse_args()

    turns = Turns(given.device, given.places)
    models, answers = {}, {}
    for number in range(given.models):
        tag = f"model-{number}"
        model = torch.nn.Sequential(torch.nn.Linear(512, 4096), torch.nn.Linear(4096, 8))
        models[tag] = turns.add(tag, model)
        question = torch.ones(1, 512, device=next(models[tag].parameters()).device)
        answers[tag] = models[tag](question).detach()

    random.seed(0)
    for number in range(1, given.requests + 1):
        tag = random.choice(list(models))
        started = time.perf_counter()
        is_away = turns.take(tag)
        is_same = torch.equal(models[tag](question), answers[tag])  # waits for the answer
        took = (time.perf_counter() - started) * 1000
        if not is_same:
            raise SystemExit(f"{tag} gave another answer than at first")
        mapped = sum(status.bytes_mapped for status in fp.status())
        print(
            f"request {number:2}: {tag} {'came back' if is_away else 'was here '} and gave the same answer, "
            f"{took:5.1f} ms; {len(turns.here)} of {len(models)} models hold {mapped >> 20} MiB"
        )


if __name__ == "__main__":
    main()
