"""Pools under PyTorch's allocator and in its CUDA graphs. Everything here imports PyTorch."""
