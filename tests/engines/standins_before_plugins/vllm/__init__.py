"""Stand-in for vLLM, which older releases of SGLang fall back to where they find no GPU."""

from standin import stand_in

__version__ = "0.0.0"
__getattr__ = stand_in(__name__)
