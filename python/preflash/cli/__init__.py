"""The command line. Each command is a module with `execute(args)`, which returns the exit code; it
is imported only when the command is called. preflash._command parses its options."""

from __future__ import annotations

import contextlib
import errno
import importlib
import os
import sys
from collections.abc import Sequence

from .._command import parse

# The exit code that a shell reports for a program that a closed pipe ended.
_PIPE_CLOSED = 128 + 13
# Errors of writing that are no fault of the program's.
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EBADF)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code: 0 fine, 1 a check failed, 2 it could not run."""
    args = parse(sys.argv[1:] if argv is None else argv)
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
    """Points stdout at the null device, because the interpreter flushes its buffer at exit."""
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
