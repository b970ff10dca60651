"""A stack of decoder layers with the shapes of a layout's: norms, grouped-query attention, a gated MLP."""

from __future__ import annotations

import math

import torch
from torch.nn import functional

from measuring.layouts import Layout

_SHAPES_OF_A_LAYER = 7
_TABLES = 2  # embedding and output head, which come first in a layout
_HEAD = 128


class Layer(torch.nn.Module):
    """One decoder layer in bfloat16, its projections fused."""

    def __init__(self, shapes: tuple[tuple[int, ...], ...], device: str) -> None:
        super().__init__()
        (fused, hidden), _, _, (gate_and_up, _), (_, inner) = shapes[:5]
        self.grouped = (fused - hidden) // 2  # width of keys, and of values
        self.head = min(_HEAD, self.grouped)
        options = {"dtype": torch.bfloat16, "device": device}
        self.before_attention = torch.nn.RMSNorm(hidden, **options)
        self.query_key_value = torch.nn.Linear(hidden, fused, **options)
        self.output = torch.nn.Linear(hidden, hidden, bias=False, **options)
        self.before_mlp = torch.nn.RMSNorm(hidden, **options)
        self.gate_and_up = torch.nn.Linear(hidden, gate_and_up, bias=False, **options)
        self.down = torch.nn.Linear(inner, hidden, bias=False, **options)

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        hidden = given.shape[-1]
        sizes = [hidden, self.grouped, self.grouped]
        parts = self.query_key_value(self.before_attention(given)).split(sizes, dim=-1)
        query, key, value = (
            part.unflatten(-1, (part.shape[-1] // self.head, self.head)).transpose(-3, -2) for part in parts
        )
        repeats = query.shape[-3] // key.shape[-3]
        key, value = (one.repeat_interleave(repeats, dim=-3) for one in (key, value))
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        given = given + self.output(mixed.transpose(-3, -2).flatten(-2))
        gate, up = self.gate_and_up(self.before_mlp(given)).chunk(2, dim=-1)
        return given + self.down(functional.silu(gate) * up)


def shapes_of_a_layer(layout: Layout) -> tuple[tuple[int, ...], ...]:
    return layout.weights[_TABLES : _TABLES + _SHAPES_OF_A_LAYER]


def layer_bytes(layout: Layout) -> int:
    return sum(math.prod(shape) for shape in shapes_of_a_layer(layout)) * 2


def make(layout: Layout, layers: int, device: str) -> torch.nn.Sequential:
    """The stack, with weights that keep activations in range."""
    torch.manual_seed(11)
    shapes = shapes_of_a_layer(layout)
    model = torch.nn.Sequential(*[Layer(shapes, device) for _ in range(layers)])
    return model.requires_grad_(False)


def change(model: torch.nn.Module, cycle: int) -> None:
    """Change every weight a little, in a way of each cycle's own: the lowest bits of its fraction."""
    bits = cycle % 15 + 1
    mask = bits << 16 | bits
    for parameter in model.parameters():
        parameter.detach().view(-1).view(torch.int32).bitwise_xor_(mask)
