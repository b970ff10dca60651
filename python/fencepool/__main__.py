"""`python -m fencepool` and the console script `fencepool`."""

from fencepool.cli.app import app

__all__ = ["main"]


def main() -> None:
    """Run the command line and end the process with its exit status."""
    app(prog_name="fencepool")


if __name__ == "__main__":
    main()
