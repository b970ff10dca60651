"""The command line: `fencepool demo` and `fencepool doctor`. Nothing in the library imports it."""
