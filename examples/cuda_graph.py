"""A CUDA graph whose memory is given away and taken back between replays. Needs a GPU.

Pools keep their addresses, so the captured graph stays good: it is neither captured nor warmed up again.

    python examples/cuda_graph.py --device cuda:0
"""

import argparse

import torch

import fencepool as fp


def main():
    options = argparse.ArgumentParser()
    options.add_argument("--device", default="cuda:0")
    device = options.parse_args().device
    if not (device.startswith("cuda") and torch.cuda.is_available()):
        print(f"Skipped: CUDA graphs need a GPU and a PyTorch with CUDA; --device {device} has none here.")
        return

    torch.cuda.set_device(device)
    weights = fp.pool("weights", device, backup="host")
    with weights.region():
        model = torch.nn.Sequential(*(torch.nn.Linear(4096, 4096) for _ in range(4))).to(device)
        given = torch.zeros(64, 4096, device=device)  # the graph's input: it has to stay where it is

    side = torch.cuda.Stream()  # PyTorch asks for a run or two on a side stream before a capture
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side), torch.no_grad():
        model(given)
    torch.cuda.current_stream().wait_stream(side)

    graph = torch.cuda.CUDAGraph()
    with torch.no_grad(), fp.cuda_graph(graph, tag="graph"):  # what it allocates lies in the pool "graph"
        result = model(given)

    for turn in range(1, 4):
        given.copy_(torch.randn(64, 4096))
        graph.replay()
        before = result.clone()

        free_before = fp.memory_info(device)[0]
        fp.pause("weights", "graph")
        freed = fp.memory_info(device)[0] - free_before
        fp.resume("weights", "graph")  # the replay below runs when the contents are back

        graph.replay()
        if not torch.equal(result, before):
            raise SystemExit("the graph gave another result")
        print(f"turn {turn}: {freed >> 20} MiB were free for others; the replay then gave the same result")


if __name__ == "__main__":
    main()
