"""Stand-in for Triton: kernels are defined, and never launched."""

from standin import stand_in

__version__ = "3.6.0"
__getattr__ = stand_in(__name__)


def jit(function=None, **_):
    return function if function is not None else lambda decorated: decorated


def autotune(*_, **__):
    return lambda decorated: decorated


heuristics = autotune


def cdiv(a, b):
    return -(-a // b)


def next_power_of_2(n):
    return 1 << (max(int(n), 1) - 1).bit_length()
