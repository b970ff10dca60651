"""`fencepool demo`: finds the device and the model, runs the demonstration, writes its report."""

from __future__ import annotations

import time
from pathlib import Path

import torch
from rich.console import Console

import fencepool as fp

from . import demo_view
from .demo import Demo, make_pools
from .demo_model import ModelError, SentenceModel, model_directory
from .device import choose_device
from .sentences import SENTENCES
from .stages import stages
from .text import MIB, say_error

_KV_MIB_GPU, _KV_MIB_EMBEDDED = 2048, 256


def run(
    console: Console, device: str | None, model: Path | None, kv_mib: int | None, cycles: int, as_json: bool
) -> int:
    """Run the demonstration and write its report to `console`.

    Returns the exit status: 0 the results were identical, 1 they were not, 2 it could not be run.
    """
    try:
        choice = choose_device(device, torch.__version__, torch.cuda.is_available())
        directory = model_directory(model)
        if kv_mib is None:
            kv_mib = _KV_MIB_GPU if choice.is_gpu else _KV_MIB_EMBEDDED
        with stages(3 + cycles) as stage:  # import, read, adopt, and one for each cycle
            # The pools first: a device that cannot be used is found before the model is loaded.
            pools = make_pools(choice.device)
            begin = time.perf_counter()
            embedder = SentenceModel(directory, stage)
            demo = Demo(pools, embedder, SENTENCES, kv_mib * MIB, stage)
            report = demo.run(cycles, time.perf_counter() - begin)
    except ModelError as error:
        say_error(str(error))
        return 2
    except fp.DriverUnavailable as error:
        say_error(str(error), "Without a GPU the embedded driver does: fencepool demo --device cpu")
        return 2
    except (fp.Error, torch.cuda.OutOfMemoryError, ValueError) as error:
        # Notes tell what else went wrong while the failure was undone.
        say_error("\n".join([str(error), *getattr(error, "__notes__", ())]), "See also: fencepool doctor")
        return 2
    if as_json:
        console.print_json(data=demo_view.as_json(choice, report))
    else:
        demo_view.show(console, choice, report)
    return 0 if report.is_ok else 1
