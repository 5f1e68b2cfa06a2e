"""Gives engines the name `flashinfer`: the installed package with patch_flashinfer(), or modules of
that name that hold preflash's functions."""

from __future__ import annotations

import importlib
import importlib.util
from pathlib import Path

import preflash

from .stand_ins import Finder

_MODULES = ("attention", "cascade", "cudnn", "decode", "page", "pod", "prefill", "quantization")


def install() -> str:
    """Installs the name, and returns a sentence on what has it."""
    if importlib.util.find_spec("flashinfer") is not None:
        return repr(preflash.patch_flashinfer()).splitlines()[0]
    finder, every = Finder(Path(), "flashinfer", real=(), absent=()), {"__version__": "0.7.2"}
    for name in _MODULES:
        source = importlib.import_module(f"preflash.{name}")
        functions = {public: getattr(source, public) for public in source.__all__}
        finder.values[f"flashinfer.{name}"] = functions
        every |= functions
    finder.values["flashinfer"] = every
    finder.install()
    return "flashinfer is not installed: modules of that name hold preflash's functions"
