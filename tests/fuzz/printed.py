"""Helpers that tests of the fuzzer share: reading what it prints, and what a call returns."""

import re
import shlex

import torch


def commands(printed: str) -> list[list[str]]:
    """The arguments of every command that the fuzzer printed."""
    lines = re.findall(r"^(?:FAILED|smaller:) python tests/fuzz (.*)$", printed, re.MULTILINE)
    return [shlex.split(line) for line in lines]


def out_of(returned) -> torch.Tensor:
    return returned[0] if isinstance(returned, tuple) else returned
