"""Prints requirement lists of pyproject.toml, one a line, for `pip install`.

Names on the command line: `build` (what a build needs, with the CUDA headers where the machine has
none), `base` (the package's own dependencies), or the name of an extra.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import cuda_headers

if sys.version_info >= (3, 11):
    import tomllib
else:
    from pip._vendor import tomli as tomllib  # Python 3.10 has no parser of its own

PYPROJECT = Path(__file__).resolve().parent.parent / "pyproject.toml"


def requirements(name: str, pyproject: dict[str, Any]) -> list[str]:
    """The list called `name`; raises KeyError for a name that is not there."""
    if name == "build":
        # An editable install asks for setuptools' own wheel support, which `setuptools` brings.
        return [*pyproject["build-system"]["requires"], *cuda_headers.build_requirements()]
    if name == "base":
        return list(pyproject["project"]["dependencies"])
    return list(pyproject["project"]["optional-dependencies"][name])


def main() -> None:
    """Prints the lists named on the command line."""
    pyproject = tomllib.loads(PYPROJECT.read_text(encoding="utf-8"))
    for name in sys.argv[1:]:
        # No spaces, so that a shell's word splitting leaves each requirement whole.
        print(*(item.replace(" ", "") for item in requirements(name, pyproject)), sep="\n")


if __name__ == "__main__":
    main()
