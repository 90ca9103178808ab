"""The `edgellm` command; each file here without a leading underscore is a subcommand."""

from __future__ import annotations

import importlib
import os
import pkgutil
import sys

import click

from edgellm import __version__
from edgellm.errors import EdgeLLMError

__all__ = ["cli", "main"]


class _Commands(click.Group):
    """Finds a subcommand by its file and imports it when it is needed."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        modules = pkgutil.iter_modules(__path__)
        return sorted(module.name for module in modules if not module.name.startswith("_"))

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in self.list_commands(ctx):
            return None
        module = importlib.import_module(f"edgellm.cli.{cmd_name}")
        command: click.Command = module.command
        return command


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="edgellm")
def cli() -> None:
    """Run language models on the device in front of you."""


def main() -> None:
    """Entry point: a failure is one line on stderr and exit code 1, wrong usage is 2."""
    try:
        status = cli.main(prog_name="edgellm", standalone_mode=False)
        sys.stdout.flush()
    except click.exceptions.Exit as exit_:
        status = exit_.exit_code
    except click.ClickException as err:
        err.show()
        status = err.exit_code
    except (click.Abort, KeyboardInterrupt):
        click.echo(err=True)
        status = 130
    except BrokenPipeError:
        # The reader has gone; Python would complain again when it flushes stdout at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        status = 1
    except (EdgeLLMError, OSError, ValueError, MemoryError) as err:
        click.echo(f"edgellm: {_one_line(err)}", err=True)
        status = 1
    sys.exit(status)


def _one_line(err: BaseException) -> str:
    if isinstance(err, OSError) and err.filename is not None:
        return f"{err.filename}: {err.strerror}"
    return " ".join(str(err).split()) or type(err).__name__
