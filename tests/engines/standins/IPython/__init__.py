"""Stand-in for IPython, which SGLang's helpers for notebooks import."""
