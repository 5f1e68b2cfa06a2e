"""The command line. Each command is a module with `configure(parser)` and `execute(args)`, which
returns the exit code. A module is imported only when its command is called."""

from __future__ import annotations

import argparse
import contextlib
import errno
import importlib
import os
import sys
from collections.abc import Sequence

from .. import _core

_COMMANDS = {
    "info": "version, libraries, GPUs, CPU, and what backend='auto' picks here and why",
    "variants": "the compiled kernel matrix",
    "check": "short self-test of every backend of this machine against a float64 oracle",
    "bench": "speed table against torch's scaled_dot_product_attention, one run",
    "demo": "the main job: paged batch prefill, planned once and run for many layers, verified",
}


def _parser(command: str | None) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m preflash", description="Prebuilt attention kernels for LLM inference."
    )
    version = f"preflash {_core.__version__}"
    parser.add_argument("--version", action="version", version=version, help="print it and exit")
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")
    for name, summary in _COMMANDS.items():
        sub = commands.add_parser(name, help=summary, description=f"preflash {name}: {summary}.")
        if name == command:
            importlib.import_module(f"preflash.cli.{name}").configure(sub)
    return parser


# As of what a shell says of a program that a closed pipe ended.
_PIPE_CLOSED = 128 + 13
# What writing fails with where it is no fault of the program's.
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EBADF)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code: 0 fine, 1 a check failed, 2 it could not run."""
    argv = list(sys.argv[1:] if argv is None else argv)
    if sys.stderr is None:  # closed by the shell (2>&-); None would send messages to stdout
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115, for as long as the process lives
    command = argv[0] if argv and argv[0] in _COMMANDS else None
    args = _parser(command).parse_args(argv)
    try:
        code = importlib.import_module(f"preflash.cli.{args.command}").execute(args)
        if sys.stdout is not None:
            sys.stdout.flush()
        return code
    except CommandError as error:
        return _could_not_run(args.command, str(error))
    except BrokenPipeError:  # `| head`: the reader has what it wanted
        _drop_output()
        return _PIPE_CLOSED
    except OSError as error:
        if error.errno not in _NO_ROOM:
            raise
        _drop_output()
        return _could_not_run(
            args.command, f"cannot write {error.filename or 'its output'}: {error.strerror}"
        )


def _could_not_run(command: str, why: str) -> int:
    with contextlib.suppress(OSError):
        print(f"preflash {command}: {why}", file=sys.stderr)
    return 2


def _drop_output() -> None:
    """What is left in the buffer of stdout goes nowhere: the interpreter flushes it as it ends."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def check_writable(option: str, path: os.PathLike[str]) -> None:
    """Raises CommandError where a report could not be written to the path once the work is done."""
    existed, folder = os.path.lexists(path), os.path.dirname(path) or os.curdir
    if not os.path.isdir(folder):
        raise CommandError(f"{option} {path}: there is no directory {folder}")
    try:
        with open(path, "ab"):
            pass
    except OSError as error:
        raise CommandError(f"{option} {path}: cannot be written: {error.strerror}") from None
    if not existed:
        os.remove(path)


class CommandError(Exception):
    """The command cannot run as asked; the message names the option and what would work."""
