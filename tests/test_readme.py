"""The Python in the documents runs as it stands, and their links lead somewhere."""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
DOCUMENTS = sorted(
    path
    for path in (
        *ROOT.glob("*.md"),
        *(ROOT / "docs").rglob("*.md"),
        *ROOT.glob("examples/*.md"),
        *ROOT.glob("benchmarks/**/*.md"),
    )
    if "_build" not in path.parts
)


def name_of(document: Path) -> str:
    return str(document.relative_to(ROOT))


def python_of(document: Path) -> str:
    """A document's Python blocks as one program, every line on the number it has in the document.

    Blocks marked ``py`` instead of ``python`` need what this machine may not have, and are left out.
    """
    is_code = False
    lines = []
    for line in document.read_text(encoding="utf-8").splitlines():
        if line.startswith("```"):
            is_code = line == "```python"
            lines.append("")
        else:
            lines.append(line if is_code else "")
    return "\n".join(lines)


WITH_EXAMPLES = [document for document in DOCUMENTS if python_of(document).strip()]


@pytest.mark.parametrize("document", WITH_EXAMPLES, ids=name_of)
def test_examples_run(document, tmp_path):
    source = python_of(document)
    # A process of its own: the reader starts from nothing, too. Tracebacks name the document and its lines.
    program = f"exec(compile({source!r}, {name_of(document)!r}, 'exec'), {{'__name__': '__main__'}})"
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("document", ["README.md", "docs/start.md", "docs/guides/nccl-rdma.md"])
def test_there_are_examples(document):
    assert ROOT / document in WITH_EXAMPLES


@pytest.mark.parametrize(
    "module",
    [
        "fencepool",
        "fencepool.distributed",
        "fencepool.integrations.sglang",
        "fencepool.integrations.torch_memory_saver",
        "fencepool.integrations.vllm",
    ],
)
def test_every_public_name_is_in_the_reference(module):
    pages = (ROOT / "docs" / "reference").glob("*.rst")
    text = "\n".join(page.read_text(encoding="utf-8") for page in pages)
    names = [name for name in importlib.import_module(module).__all__ if not name.startswith("__")]
    assert [name for name in names if not re.search(rf"\b{name}\b", text)] == []


@pytest.mark.parametrize("document", DOCUMENTS, ids=name_of)
def test_links_to_files_lead_somewhere(document):
    links = re.findall(r"\]\(([^)#\s]+)[^)]*\)", document.read_text(encoding="utf-8"))
    missing = [link for link in links if "://" not in link and not (document.parent / link).exists()]
    assert not missing


def test_the_layout_in_contributing_is_there():
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (`[^|]+) \|", text.split("## Layout")[1].split("\n## ")[0], re.MULTILINE)
    paths = [path for row in rows for path in re.findall(r"`([^`]+)`", row)]
    assert "csrc/pool/" in paths
    assert not [path for path in paths if not (ROOT / path).exists()]


def test_every_layer_is_in_the_layout():
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    layers = [path for path in (ROOT / "csrc").iterdir() if path.is_dir()]
    assert not [path.name for path in layers if f"`csrc/{path.name}/`" not in text]
