"""The two activations that SGLang takes from vLLM on a CPU, in PyTorch's terms."""

import torch


class SiluAndMul(torch.nn.Module):
    def forward(self, x):
        gate, value = x.chunk(2, dim=-1)
        return torch.nn.functional.silu(gate) * value


class GeluAndMul(torch.nn.Module):
    def __init__(self, approximate="none"):
        super().__init__()
        self.approximate = approximate

    def forward(self, x):
        gate, value = x.chunk(2, dim=-1)
        return torch.nn.functional.gelu(gate, approximate=self.approximate) * value
