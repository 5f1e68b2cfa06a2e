"""Gives engines the name `flashinfer`: the installed package with patch_flashinfer(), or modules of
that name that hold preflash's functions."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from types import ModuleType

import preflash

from .stand_ins import StandIn

_MODULES = ("attention", "cascade", "cudnn", "decode", "page", "pod", "prefill", "quantization")


def install() -> str:
    """Installs the name, and returns a sentence on what has it."""
    if importlib.util.find_spec("flashinfer") is not None:
        return repr(preflash.patch_flashinfer()).splitlines()[0]
    root = _module("flashinfer")
    for name in _MODULES:
        source = importlib.import_module(f"preflash.{name}")
        module = _module(f"flashinfer.{name}")
        setattr(root, name, module)
        functions = {public: getattr(source, public) for public in source.__all__}
        vars(module).update(functions)
        vars(root).update(functions)
    for name in ("utils", "mla", "norm", "fused_moe", "comm", "rope", "sampling"):
        setattr(root, name, _module(f"flashinfer.{name}"))
    return "flashinfer is not installed: modules of that name hold preflash's functions"


def _module(name: str) -> ModuleType:
    module = StandIn(name)
    module.__path__ = []
    module.__version__ = "0.7.2"
    module.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=True)
    sys.modules[name] = module
    return module
