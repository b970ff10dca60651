"""The one place that says which version this is; the wheel and the C++ build read it from here."""

__version__ = "0.1.0"
