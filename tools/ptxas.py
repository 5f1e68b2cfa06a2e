"""Reads what ptxas reported of each kernel: spills and registers.

`python tools/ptxas.py REPORT...` prints a line for each kernel that spills.
"""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass
from pathlib import Path

ENTRY = re.compile(
    r"Compiling entry function '(?P<name>\w+)' for '(?P<arch>\w+)'\n"
    r"(?:.*\n)?.*?(?P<stores>\d+) bytes spill stores, (?P<loads>\d+) bytes spill loads"
    r"(?:\n.*?Used (?P<registers>\d+) registers)?"
)
LENGTH_AND_ID = re.compile(r"(\d+)(sm\d+_\w+)")


@dataclass(frozen=True)
class PtxasEntry:
    """One kernel for one architecture in ptxas's report."""

    kernel: str
    arch: str
    spill_stores: int
    spill_loads: int
    registers: int  # of one thread


def kernel_id(symbol: str) -> str | None:
    """The variant in a mangled name, where its length precedes it."""
    found = LENGTH_AND_ID.search(symbol)
    return found[2][: int(found[1])] if found else None


def read_ptxas(text: str) -> list[PtxasEntry]:
    return [
        PtxasEntry(
            *match.group("name", "arch"),
            *(int(count or 0) for count in match.group("stores", "loads", "registers")),
        )
        for match in ENTRY.finditer(text)
    ]


def main(reports: list[str]) -> None:
    for report in reports:
        for entry in read_ptxas(Path(report).read_text()):
            if spilled := max(entry.spill_stores, entry.spill_loads):
                name = kernel_id(entry.kernel) or entry.kernel
                print(f"{name} ({entry.arch}): {spilled} bytes, {entry.registers} registers")


if __name__ == "__main__":
    main(sys.argv[1:])
