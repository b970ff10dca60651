"""`fencepool bench`: finds the device, runs the comparison, writes its report."""

from __future__ import annotations

from pathlib import Path

import torch
from rich.console import Console

import fencepool as fp
from fencepool import picture as pictures

from . import bench, bench_view
from .device import choose_device
from .stages import stages
from .text import MIB, say_error


def run(
    console: Console, device: str | None, mib: int | None, seconds: float, picture: Path | None, as_json: bool
) -> int:
    """Run the comparison and write its report to `console`.

    Returns the exit status: 0 all contents were kept, 1 some were not, 2 it could not be run or drawn.
    """
    try:
        if picture is not None:
            pictures.require(picture)  # before the measuring, which would be for nothing
        choice = choose_device(device, torch.__version__, torch.cuda.is_available())
        size = mib * MIB if mib is not None else bench.default_size(choice.device)
        with stages(4) as stage:
            report = bench.run(choice.device, size, seconds, stage)
        if picture is not None:
            bench_view.draw(choice, report, picture)
    except fp.DriverUnavailable as error:
        say_error(str(error), "Without a GPU the embedded driver does: fencepool bench --device cpu")
        return 2
    except (fp.Error, torch.cuda.OutOfMemoryError) as error:
        say_error("\n".join([str(error), *getattr(error, "__notes__", ())]), "Less memory: --mib 512")
        return 2
    except (ValueError, ModuleNotFoundError) as error:
        say_error(str(error))
        return 2
    except OSError as error:
        say_error(f"{error.filename}: {error.strerror}")
        return 2
    if as_json:
        console.print_json(data=bench_view.as_json(choice, report))
    else:
        bench_view.show(console, choice, report)
        if picture is not None:
            console.print(f"drawn: {picture}", soft_wrap=True, markup=False)
    return 0 if report.is_ok else 1
