"""torch_memory_saver's hooks, none of which fencepool needs."""
