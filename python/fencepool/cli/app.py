"""The commands and their options. What they do is in the modules beside this one, imported on use."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .text import output, say_error

app = typer.Typer(
    help="Give GPU memory back and take it again without moving it.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
    context_settings={"help_option_names": ["-h", "--help"]},
)

_JSON = typer.Option("--json", help="Write the report as JSON, with a schema version.")


def _version(is_wanted: bool) -> None:
    if is_wanted:
        import fencepool as fp

        typer.echo(f"fencepool {fp.__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Say which version this is.")
    ] = False,
) -> None:
    pass


@app.command()
def demo(
    device: Annotated[
        str | None,
        typer.Option(
            help="cuda, cuda:1, or cpu (the embedded driver).", show_default="a GPU if there is one, else cpu"
        ),
    ] = None,
    model: Annotated[
        Path | None,
        typer.Option(
            help="A directory with config.json, model.safetensors and tokenizer.json.",
            show_default="the one that fencepool[demo] installs",
        ),
    ] = None,
    kv_mib: Annotated[
        int | None,
        typer.Option(
            min=1, help="Size of the stand-in KV cache in MiB.", show_default="2048 on a GPU, else 256"
        ),
    ] = None,
    cycles: Annotated[int, typer.Option(min=1, max=1000, help="How often to pause and resume.")] = 2,
    json: Annotated[bool, _JSON] = False,
) -> None:
    """Pause and resume a small sentence model and a stand-in for a KV cache, and compare the results.

    The model embeds a dozen sentences before and after; the results must be the same to the bit. Nothing is
    downloaded while it runs.

    Exit status: 0 the results are identical, 1 they are not, 2 it could not be run.
    """
    try:
        import torch  # noqa: F401
    except ModuleNotFoundError:
        say_error(
            "PyTorch is not installed, and the demonstration needs it.", "pip install 'fencepool[demo]'"
        )
        raise typer.Exit(2) from None
    from .demo_command import run

    raise typer.Exit(run(output(), device, model, kv_mib, cycles, json))


@app.command()
def doctor(json: Annotated[bool, _JSON] = False) -> None:
    """Say what this machine, its packages and its environment mean for fencepool, and what to do.

    Changes nothing, and allocates nothing on a GPU.

    Exit status: 0 ready on a GPU; 1 works with limits (a line says warn: no GPU, say, or an old driver);
    2 broken (a line says fail: what is there cannot be used until it is repaired).
    """
    from .doctor import run

    raise typer.Exit(run(output(), json))


@app.command()
def residual(
    pid: Annotated[int | None, typer.Option(min=1, help="Only this process.", show_default="all")] = None,
    status_dir: Annotated[
        Path | None,
        typer.Option(
            help="Where programs write how their memory divides.",
            show_default="FENCEPOOL_STATUS_DIR, else that of FENCEPOOL_STATUS_DIR=1",
        ),
    ] = None,
    json: Annotated[bool, _JSON] = False,
) -> None:
    """Say who holds device memory, how it divides, and what gives each part back.

    Asks NVML for the processes of every GPU (the package nvidia-ml-py), and reads what programs started with
    FENCEPOOL_STATUS_DIR=1 wrote after their last pause or resume. No process is stopped or asked.

    Exit status: 0 it is shown, 2 nobody tells anything, or nothing of that process.
    """
    from fencepool.status_files import chosen_directory, directory

    from . import residual_view
    from .residual import NothingToShow, gather

    where = status_dir or chosen_directory() or directory("1")
    try:
        report = gather(where, pid)
    except NothingToShow as error:
        say_error(str(error), error.hint)
        raise typer.Exit(2) from None
    console = output()
    if json:
        console.print_json(data=residual_view.as_json(report))
    else:
        residual_view.show(console, report)


@app.command()
def trace(
    file: Annotated[Path, typer.Argument(help="What fencepool.trace(FILE) saved.", show_default=False)],
    picture: Annotated[
        Path | None,
        typer.Option(help="Draw it there: .png, .svg or .pdf. Needs matplotlib.", show_default="none"),
    ] = None,
    rows: Annotated[int, typer.Option(min=1, help="How many transitions to list, the last ones.")] = 40,
    json: Annotated[bool, _JSON] = False,
) -> None:
    """Show what was recorded: each transition with its phases and bytes, and a picture of memory over time.

    Exit status: 0 it is shown, 2 it cannot be read or drawn.
    """
    from fencepool import timeline

    from .trace import as_json, show

    try:
        recorded = timeline.load(file)
        if picture is not None:
            from fencepool.picture import draw_timeline, require

            require(picture)
            draw_timeline(recorded, picture)
    except OSError as error:
        say_error(f"{error.filename}: {error.strerror}")
        raise typer.Exit(2) from None
    except (ValueError, ModuleNotFoundError) as error:
        say_error(str(error))
        raise typer.Exit(2) from None
    console = output()
    if json:
        console.print_json(data=as_json(recorded))
        return
    show(console, recorded, rows)
    if picture is not None:
        console.print(f"drawn: {picture}", soft_wrap=True, markup=False)


@app.command()
def bench(
    device: Annotated[
        str | None,
        typer.Option(
            help="cuda, cuda:1, or cpu (the embedded driver).", show_default="a GPU if there is one, else cpu"
        ),
    ] = None,
    mib: Annotated[
        int | None,
        typer.Option(
            min=1, help="How much memory, in MiB.", show_default="4096 or a quarter of a GPU's free, else 256"
        ),
    ] = None,
    seconds: Annotated[float, typer.Option(min=0, help="How long to measure, about.")] = 20.0,
    picture: Annotated[
        Path | None,
        typer.Option(help="Draw it there: .png, .svg or .pdf. Needs matplotlib.", show_default="none"),
    ] = None,
    json: Annotated[bool, _JSON] = False,
) -> None:
    """Compare pause and resume on this machine with a naive offload and with the link's limit.

    Exit status: 0 all contents were kept, 1 some were not, 2 it could not be run.
    """
    try:
        import torch  # noqa: F401
    except ModuleNotFoundError:
        say_error("PyTorch is not installed, and the comparison needs it.", "pip install 'fencepool[torch]'")
        raise typer.Exit(2) from None
    from .bench_command import run

    raise typer.Exit(run(output(), device, mib, seconds, picture, json))
