"""What the benchmarks measure with: layouts, contents, cycles, limits, one process for each system."""
