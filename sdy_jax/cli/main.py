"""The command line: `sdy-jax opt`, `plan`, `run`, `verify`, `doctor` and `clear`.

Here are the exit statuses; `options` has the options, `sdy_jax.cli` does the work. It is imported when a command
runs, and jax with it, so that `--help` is quick.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from importlib import import_module

from sdy_jax.cli import UsageError, terminal
from sdy_jax.cli.options import option_parser
from sdy_jax.cli.terminal import described_bug
from sdy_jax.errors import SdyError

_INTERRUPTED = 130
"""Given by shells: 128 and the number of the signal."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command. Returns the exit status: 0, 1 where the input is bad, 2 where the options are."""
    if sys.stdout is None:  # it is closed
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115
    parser = option_parser()
    options = parser.parse_args(arguments)
    if options.command is None:
        parser.print_help()
        return 0
    try:
        return _run(options)
    except SdyError as error:
        terminal.print_error(error)
        return 2 if isinstance(error, UsageError) else 1
    except BrokenPipeError:  # who reads our output has stopped; nothing may be flushed to them at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except OSError as error:
        if error.filename is not None:
            terminal.print_error(SdyError(described_bug(error)))
        else:  # of writing our output: those of the user's files are explained where these are opened
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            terminal.print_error(SdyError(f"<stdout>: error: {error.strerror or error}"))
        return 1
    except KeyboardInterrupt:
        return _INTERRUPTED
    except Exception as error:
        terminal.print_error(SdyError(described_bug(error)))
        return 1


def _run(options: argparse.Namespace) -> int:
    command = import_module(f"sdy_jax.cli.{options.command}")
    unfiltered = import_module("sdy_jax.base.tracebacks").unfiltered  # for `described_bug`
    with unfiltered(), terminal.printed_warnings():
        status = int(command.run(options))
    sys.stdout.flush()
    return status
