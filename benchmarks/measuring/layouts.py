"""What is paused and resumed: the shapes of a model's weights, and how large its KV cache is."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

WEIGHTS = "weights"
KV_CACHE = "kv_cache"

# Every tensor is bfloat16.
ELEMENT_BYTES = 2


@dataclass(frozen=True)
class Layout:
    """Shapes of bfloat16 tensors, in elements."""

    name: str
    weights: tuple[tuple[int, ...], ...]
    kv_cache: tuple[tuple[int, ...], ...]

    def shapes(self, tag: str) -> tuple[tuple[int, ...], ...]:
        return {WEIGHTS: self.weights, KV_CACHE: self.kv_cache}[tag]

    def size(self, tag: str) -> int:
        """Bytes of one tag's tensors."""
        return sum(math.prod(shape) for shape in self.shapes(tag)) * ELEMENT_BYTES

    def facts(self) -> dict[str, Any]:
        """What results files hold of it."""
        sizes = {
            tag: {"tensors": len(self.shapes(tag)), "bytes": self.size(tag)} for tag in (WEIGHTS, KV_CACHE)
        }
        return {"name": self.name, **sizes}


def transformer(
    name: str,
    *,
    layers: int,
    hidden: int,
    grouped_keys: int,
    intermediate: int,
    vocabulary: int,
    kv_tensors: int,
    kv_tensor_bytes: int,
) -> Layout:
    """A decoder with grouped-query attention, its projections fused as inference engines fuse them.

    Args:
        name: how results call it.
        layers: number of blocks.
        hidden: width of the model.
        grouped_keys: rows that keys and values add to the fused projection.
        intermediate: width inside the feed-forward part.
        vocabulary: rows of the embedding and of the output head.
        kv_tensors: number of KV-cache tensors.
        kv_tensor_bytes: size of each.
    """
    block = [
        (hidden + grouped_keys, hidden),  # queries, keys and values, fused
        (hidden + grouped_keys,),  # their bias
        (hidden, hidden),  # attention output
        (2 * intermediate, hidden),  # gate and up, fused
        (hidden, intermediate),  # down
        (hidden,),  # the two norms
        (hidden,),
    ]
    return Layout(
        name=name,
        weights=tuple([(vocabulary, hidden)] * 2 + block * layers),
        kv_cache=tuple([(kv_tensor_bytes // ELEMENT_BYTES,)] * kv_tensors),
    )


LAYOUTS = {
    layout.name: layout
    for layout in (
        # 14.19 GiB in 198 tensors, the shapes of a 7-billion-parameter model, and 56 GiB of KV cache.
        transformer(
            "7b",
            layers=28,
            hidden=3584,
            grouped_keys=1024,
            intermediate=18944,
            vocabulary=152064,
            kv_tensors=56,
            kv_tensor_bytes=1 << 30,
        ),
        # 14 GiB in few large fused tensors, as a mixture of experts has them: 8 layers of 64 experts.
        Layout(
            "moe",
            weights=tuple([(64, 2 * 1408, 2048), (64, 2048, 1408), (3 * 2048, 2048), (2048, 2048)] * 13),
            kv_cache=tuple([((8 << 30) // ELEMENT_BYTES,)] * 2),
        ),
        # 3 GiB in 20,000 small tensors, most of which share segments.
        Layout(
            "small",
            weights=tuple([(320, 256), (256,), (96, 1024), (24, 128)] * 5000),
            kv_cache=tuple([((1 << 30) // ELEMENT_BYTES,)] * 4),
        ),
        # 4 GiB in 16 tensors: a disk takes seconds for them.
        Layout(
            "disk",
            weights=tuple([((256 << 20) // ELEMENT_BYTES,)] * 16),
            kv_cache=tuple([((64 << 20) // ELEMENT_BYTES,)] * 2),
        ),
        # The same kinds of tensors, small enough for the embedded driver.
        transformer(
            "tiny",
            layers=2,
            hidden=256,
            grouped_keys=128,
            intermediate=768,
            vocabulary=4096,
            kv_tensors=4,
            kv_tensor_bytes=4 << 20,
        ),
    )
}
