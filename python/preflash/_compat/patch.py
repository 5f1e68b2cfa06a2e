"""The names of an installed flashinfer, replaced in place by those of this package.

An engine that did `from flashinfer.decode import X` holds a reference of its own, so a replacement
in flashinfer alone would not reach it: every imported module is searched for the object itself.
"""

from __future__ import annotations

import contextlib
import difflib
import importlib
import inspect
import os
import sys
from collections.abc import Iterable, Iterator
from types import ModuleType
from typing import Any, NamedTuple

from .._device import gpus

__all__ = ["FlashInferPatch", "Replacement", "patch_flashinfer"]

# Whose names are flashinfer's. By name, because these modules stand on top of this one.
_PACKAGE = __package__.partition(".")[0]
_MODULES = ("attention", "cascade", "cudnn", "decode", "page", "pod", "prefill", "quantization")
_MODULES += ("sparse",)


class Replacement(NamedTuple):
    """One attribute of one module."""

    module: ModuleType
    name: str  # in that module; `from ... import X as Y` makes it Y
    old: Any
    new: Any


class FlashInferPatch:
    """Replacements by one call of patch_flashinfer(). As a context manager, undoes them on exit.

    Attributes:
        replaced: every attribute that was replaced, in the order of the modules' imports.
        reason: why nothing was replaced; None where something was.
    """

    def __init__(self, target: str, replaced: list[Replacement], reason: str | None) -> None:
        self._target = target
        self._undone = False
        self._added = _add_extras(replaced)
        self.replaced = replaced
        self.reason = reason

    def undo(self) -> None:
        """Puts back what was replaced, also in modules of flashinfer that were imported since.

        An attribute that somebody else has set since is left alone. Another module that was
        imported since and did `from flashinfer import X` keeps preflash's X, which cannot be told
        from that of `from preflash import X`. A second call does nothing.
        """
        if self._undone:
            return
        for module, name, old, new in reversed(self.replaced):
            names = _names(module)
            if names.get(name) is new:
                names[name] = old
        own = {id(r.new): (r.new, r.old) for r in self.replaced if _is_flashinfer(r.module)}
        _replace([r for r in _references(own) if _is_flashinfer(r.module)])
        for holder, name in self._added:
            delattr(holder, name)
        self._undone = True

    def __enter__(self) -> FlashInferPatch:
        return self

    def __exit__(self, *error: object) -> None:
        self.undo()

    def __repr__(self) -> str:
        if self.reason is not None:
            return f"<patch of {self._target}: nothing replaced, {self.reason}>"
        places: dict[str, list[str]] = {}
        for module, name, _, new in self.replaced:
            where = str(_names(module).get("__name__"))
            where = where if name == new.__name__ else f"{where} (as {name})"
            places.setdefault(f"{new.__module__}.{new.__name__}", []).append(where)
        lines = [f"  {new} in {', '.join(modules)}" for new, modules in sorted(places.items())]
        state = "undone" if self._undone else "in effect"
        head = f"<patch of {self._target}, {state}: {len(self.replaced)} attributes"
        return "\n".join([head, *lines]) + ">"


def patch_flashinfer(names: Iterable[str] | None = None) -> FlashInferPatch:
    """Replaces the names that preflash serves in the installed flashinfer, in place.

    They are replaced in every module that is imported by now and holds flashinfer's object: in
    flashinfer's own, in engines that did `from flashinfer.decode import ...`, in the caller's. A
    module that is imported later gets them from flashinfer. What preflash does not serve stays
    flashinfer's: MLA, other trtllm functions, and kernels of one architecture; where such a
    function of flashinfer calls a replaced one, it calls preflash's.

    Call it before an engine constructs its wrappers. Instances that exist, subclasses of
    flashinfer's classes and references inside containers, closures and default arguments stay as
    they are.

    Calling it again replaces only what is not preflash's yet, most often nothing. Where flashinfer
    is absent or does not import, and where torch uses GPUs of which this build serves none, nothing
    is replaced and `reason` says so. Attributes that flashinfer gives its functions (`fi_trace`,
    `fi_init`) are given to preflash's.

    Args:
        names: replaces these alone, as in ["BatchPrefillWithPagedKVCacheWrapper"]; None: all.

    Raises:
        ValueError: one of `names` is not a name that preflash serves.

    Returns:
        FlashInferPatch: `replaced` lists (module, name, old, new), `reason` says why there is none,
        repr() shows all of it, undo() or the end of a `with` block puts everything back.
    """
    wanted = _checked_names(names)
    if unserved := gpus.unserved():
        return FlashInferPatch("flashinfer", [], unserved)
    try:
        root = importlib.import_module("flashinfer")
    except Exception as error:
        # A broken flashinfer is not our error; there is no name to replace.
        reason = f"it does not import: {type(error).__name__}: {error}"
        if isinstance(error, ModuleNotFoundError) and error.name == "flashinfer":
            reason = "flashinfer is not installed"
        return FlashInferPatch("flashinfer", [], reason)
    target = f"flashinfer {getattr(root, '__version__', 'of unknown version')}"
    if _names(root).get("patch_flashinfer") is patch_flashinfer:
        return FlashInferPatch(target, [], "flashinfer is preflash under that name")
    to_replace, already = _pairs(root, wanted)
    replaced = list(_references(to_replace))
    reason = None
    if not replaced:
        reason = "its names are preflash's already" if already else "it has none of the names"
    patch = FlashInferPatch(target, replaced, reason)
    try:
        _replace(replaced)
    except BaseException:  # an interrupt: all or nothing
        patch.undo()
        raise
    return patch


def patch_engine() -> None:
    """patch_flashinfer() as PREFLASH_PATCH in the environment says: the entry point that vLLM and
    SGLang call in each of their processes."""
    value = os.environ.get("PREFLASH_PATCH", "").strip()
    if value in ("", "0"):
        return
    names = None if value == "1" else [name.strip() for name in value.split(",") if name.strip()]
    try:
        patch = patch_flashinfer(names)
    except ValueError as error:
        raise ValueError(f"PREFLASH_PATCH={value!r} in the environment: {error}") from None
    print(patch, file=sys.stderr)


def _checked_names(names: Iterable[str] | None) -> frozenset[str]:
    served: set[str] = set()
    for module_name in _MODULES:
        served.update(importlib.import_module(f"{_PACKAGE}.{module_name}").__all__)
    if names is None:
        return frozenset(served)
    if isinstance(names, str):
        raise TypeError(f"names: must be a list of names, got the string {names!r}")
    wanted = frozenset(names)
    for name in sorted(wanted - served):
        near = difflib.get_close_matches(name, served, n=1)
        hint = f". Did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"names: preflash serves no {name!r} of flashinfer{hint}")
    return wanted


def _pairs(root: ModuleType, wanted: frozenset[str]) -> tuple[dict[int, tuple[Any, Any]], bool]:
    """Pairs (flashinfer's object, ours) by the id of flashinfer's, from every module that has it;
    and True if some name is ours already."""
    to_replace = {}
    already = False
    for module_name in _MODULES:
        module = importlib.import_module(f"{_PACKAGE}.{module_name}")
        homes = [root]
        # Not of a release without this module, or with one that no engine can import either.
        with contextlib.suppress(Exception):
            homes.append(importlib.import_module(f"flashinfer.{module_name}"))
        for name in module.__all__:
            if name not in wanted:
                continue
            new = getattr(module, name)
            for home in homes:
                old = getattr(home, name, None)
                if old is new:
                    already = True
                # A submodule may have a function's name.
                elif callable(old) and isinstance(old, type) == isinstance(new, type):
                    to_replace[id(old)] = (old, new)
    return to_replace, already


def _references(pairs: dict[int, tuple[Any, Any]]) -> Iterator[Replacement]:
    """Yields every attribute of an imported module that is the first object of a pair."""
    # One module may be imported under several names.
    modules = {id(module): module for module in list(sys.modules.values())}
    for module in modules.values():
        if not isinstance(module, ModuleType):
            continue
        for name, value in list(_names(module).items()):
            old, new = pairs.get(id(value), (None, None))
            if old is not None:
                yield Replacement(module, name, old, new)


def _replace(replacements: list[Replacement]) -> None:
    for module, name, _, new in replacements:
        _names(module)[name] = new


def _add_extras(replaced: list[Replacement]) -> list[tuple[Any, str]]:
    """Copies attributes that flashinfer has set on its functions and methods to ours. Returns the
    added ones."""
    added = []
    for old, new in {id(r.old): (r.old, r.new) for r in replaced}.values():
        both = [(old, new)]
        if isinstance(new, type):
            own = vars(new)
            both = [(theirs, own[name]) for name, theirs in vars(old).items() if name in own]
        for theirs, ours in both:
            if not (inspect.isfunction(theirs) and inspect.isfunction(ours)):
                continue
            for name, value in vars(theirs).items():
                if not name.startswith("_") and not hasattr(ours, name):
                    setattr(ours, name, value)
                    added.append((ours, name))
    return added


def _names(module: ModuleType) -> dict[str, Any]:
    """The module's attributes, without loading one that loads itself when it is looked at."""
    return object.__getattribute__(module, "__dict__")


def _is_flashinfer(module: ModuleType) -> bool:
    return str(_names(module).get("__name__")).partition(".")[0] == "flashinfer"
