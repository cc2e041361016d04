"""The command `headrace`: its options, and what its errors become."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from headrace import __version__
from headrace.errors import HeadraceError, UserError

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)


def main() -> None:
    """The entry point: turns what headrace raises on purpose into one line and an exit code."""
    try:
        app(prog_name="headrace")
    except KeyboardInterrupt:  # before a run had started, or outside one
        print("stopped", file=sys.stderr)
        raise SystemExit(130) from None
    except HeadraceError as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        raise SystemExit(2 if isinstance(error, UserError) else 1) from None


def _version(wanted: bool) -> None:
    if wanted:
        print(__version__)
        raise typer.Exit


@app.callback(
    epilog="Start with: headrace train examples/addition.toml",
)
def _headrace(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Reinforcement learning of language models as one production line."""
