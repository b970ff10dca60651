"""Stand-in, see vllm."""
