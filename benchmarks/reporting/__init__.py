"""What the benchmarks write: result files, tables, pictures."""
