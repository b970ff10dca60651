"""Stand-in for xgrammar: the parsers of tool calls can be defined. Use ``grammar_backend="none"``."""

import pydantic

__version__ = "0.0.0"


def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)
    body = {"model_config": pydantic.ConfigDict(extra="allow"), "__module__": __name__}
    made = globals()[name] = type(name, (pydantic.BaseModel,), body)
    return made
