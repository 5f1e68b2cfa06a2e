"""Imports an engine's attention backend without the engine: modules that compute are the engine's
own files, every other module is a stand-in that lets them import."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Collection
from pathlib import Path
from types import ModuleType
from typing import Any


class Anything:
    """Imports, decorates, annotates and subclasses like any name, and computes nothing."""

    def __init__(self, name: str) -> None:
        self.__name__ = self.__qualname__ = name

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        value = Anything(f"{self.__name__}.{name}")
        setattr(self, name, value)
        return value

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if (
            len(args) == 1
            and not kwargs
            and (callable(args[0]) and not isinstance(args[0], Anything))
        ):
            return args[0]  # a decorator
        return Anything(f"{self.__name__}()")

    def __mro_entries__(self, bases: tuple) -> tuple:
        return () if any(isinstance(base, type) for base in bases) else (object,)

    def __getitem__(self, key: Any) -> Any:
        return self

    def __or__(self, other: Any) -> Any:
        return self

    __ror__ = __or__

    def __bool__(self) -> bool:
        return False

    def __iter__(self) -> Any:
        return iter(())

    def __repr__(self) -> str:
        return f"<stand-in for {self.__name__}>"


class _StandIn(ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        value = Anything(f"{self.__name__}.{name}")
        setattr(self, name, value)
        return value


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds `real` modules of a package as its files, the rest and `absent` packages as
    stand-ins."""

    def __init__(self, root: Path, package: str, real: Collection[str], absent: Collection[str]):
        self._root, self._package, self._real = root, package, set(real)
        self._absent = {name for name in absent if not _installed(name)}
        self.values: dict[str, dict[str, Any]] = {}  # of stand-ins, by module
        self.loaded: list[str] = []

    def file_of(self, name: str) -> Path | None:
        base = self._root.joinpath(*name.split("."))
        for path in (base.with_suffix(".py"), base / "__init__.py"):
            if path.exists():
                return path
        return None

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        top = name.partition(".")[0]
        if top == self._package and name in self._real and (file := self.file_of(name)):
            self.loaded.append(name)
            search = [str(file.parent)] if file.name == "__init__.py" else None
            return importlib.util.spec_from_file_location(
                name, file, submodule_search_locations=search
            )
        if top == self._package or top in self._absent:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: Any) -> ModuleType:
        return _StandIn(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        module.__path__ = []
        for name, value in self.values.get(module.__name__, {}).items():
            setattr(module, name, value)

    def install(self) -> None:
        sys.meta_path.insert(0, self)


def _installed(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except (ImportError, ValueError):
        return False
