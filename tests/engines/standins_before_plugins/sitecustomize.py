"""Run at every start of Python: SGLang 0.4.9 asks PyTorch for what a later PyTorch calls by another name."""

import torch

if not hasattr(torch._C._cpu, "_is_amx_tile_supported"):
    torch._C._cpu._is_amx_tile_supported = lambda: False
