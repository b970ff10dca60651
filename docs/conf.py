"""Sphinx's settings. The source directory is the repository's root, so that the Markdown files and the links
between them are the same on the site and in the repository: `make docs` runs `sphinx-build -c docs . OUT`.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sphinx.application import Sphinx

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "python"))

from fencepool._version import __version__  # noqa: E402

project = "fencepool"
author = "The fencepool authors"
copyright = "the fencepool authors, Apache License 2.0"  # noqa: A001 - Sphinx's name for it
release = version = __version__

root_doc = "docs/index"
include_patterns = [
    "README.md",
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "docs/**.md",
    "docs/**.rst",
    "examples/README.md",
    "benchmarks/results/*.md",
]
exclude_patterns = [".*", "build", "dist", "docs/_build", "python", "csrc", "tests", "preload", "scripts"]

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_copybutton"]
myst_heading_anchors = 4  # GitHub's anchors
suppress_warnings = ["toc.excluded"]

# A reference that leads nowhere is an error, but for what other projects document.
nitpicky = True
nitpick_ignore_regex = [
    ("py:.*", r"(?!fencepool\b).*"),
    ("py:(class|obj)", r"fencepool\..*\.(Backup|Fill|Order)"),
]

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_preserve_defaults = True
autodoc_default_options = {"members": True, "undoc-members": True}
python_maximum_signature_line_length = 80
add_module_names = False
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True
napoleon_use_rtype = False

html_theme = "furo"
html_title = f"fencepool {release}"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_additional_pages = {"index": "to_index.html"}
templates_path = ["_templates"]
html_copy_source = False
html_show_sphinx = False
copybutton_exclude = ".linenos, .gp, .go"


# Names of types that only the sources know, as a reader would write them.
ALIASES = {
    r"\bBackup\b": "Literal['none', 'host', 'resident', 'disk']",
    r"\bFill\b": "Literal['undefined', 'zero']",
    r"\bOrder\b": "Literal['context', 'explicit']",
    r"\b_Owner\b": "Module | Tensor",
}
COLON = "\N{MODIFIER LETTER COLON}"


def readable_signature(
    _app: Sphinx,
    what: str,
    name: str,
    _object: Any,
    _options: Any,
    signature: str | None,
    returns: str | None,
) -> tuple[str | None, str | None]:
    """Most classes are made by functions, which are documented; only a trace is made by its users."""
    if what in ("class", "exception") and name != "fencepool.trace":
        return "", None
    for pattern, meaning in ALIASES.items():
        signature = re.sub(pattern, meaning, signature) if signature else signature
        returns = re.sub(pattern, meaning, returns) if returns else returns
    return signature, returns


def hide_colons(_app: Sphinx, what: str, _name: str, _object: Any, _options: Any, lines: list[str]) -> None:
    """Napoleon takes what stands before an attribute's first colon for its type; here it is a sentence."""
    if what in ("attribute", "property"):
        lines[:] = [line.replace(": ", f"{COLON} ") for line in lines]


def show_colons(_app: Sphinx, _what: str, _name: str, _object: Any, _options: Any, lines: list[str]) -> None:
    """Undo hide_colons()."""
    lines[:] = [line.replace(COLON, ":") for line in lines]


def setup(app: Sphinx) -> None:
    """Called by Sphinx. Napoleon's own priority is 500."""
    app.connect("autodoc-process-signature", readable_signature)
    app.connect("autodoc-process-docstring", hide_colons, priority=400)
    app.connect("autodoc-process-docstring", show_colons, priority=600)
