"""The norms that SGLang takes from vLLM on a CPU, in PyTorch's terms."""

import torch


class RMSNorm(torch.nn.Module):
    def __init__(self, hidden_size, eps=1e-6, **_):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(hidden_size))
        self.eps = eps

    def forward(self, x, residual=None):
        if residual is not None:
            x = residual = x + residual
        normed = torch.nn.functional.rms_norm(x.float(), x.shape[-1:], self.weight.float(), self.eps)
        normed = normed.to(x.dtype)
        return normed if residual is None else (normed, residual)


GemmaRMSNorm = RMSNorm
