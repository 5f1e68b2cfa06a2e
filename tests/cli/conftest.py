"""A fixture calls the command line in this process."""

from dataclasses import dataclass

import pytest
from preflash import cli


@dataclass(frozen=True)
class Finished:
    code: int
    out: str
    err: str


@pytest.fixture
def preflash_command(tmp_path, monkeypatch, capsys):
    """Runs a command, given as words or as one line, outside the source tree."""
    monkeypatch.chdir(tmp_path)

    def call(line: str, *words: str) -> Finished:
        try:
            code = cli.main([*line.split(), *words])
        except SystemExit as end:  # as argparse ends --help and what it refuses
            code = end.code
        return Finished(code, *capsys.readouterr())

    return call
