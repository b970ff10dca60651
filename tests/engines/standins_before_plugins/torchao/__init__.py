"""Stand-in for torchao, which older releases of SGLang import for every model."""

from standin import stand_in

__version__ = "0.0.0"
__getattr__ = stand_in(__name__)
