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


def _attribute(self: Any, name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    value = Anything(f"{self.__name__}.{name}")
    setattr(self, name, value)
    return value


class StandIn(ModuleType):
    """A module that has every name."""

    __getattr__ = _attribute


class Anything:
    """Imports, decorates, annotates and subclasses like any name, computes nothing, is false."""

    __getattr__ = _attribute

    def __init__(self, name: str, **attributes: Any) -> None:
        self.__name__ = self.__qualname__ = name
        vars(self).update(attributes)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        is_decorator = len(args) == 1 and not kwargs and callable(args[0])
        if is_decorator and not isinstance(args[0], Anything):
            return args[0]
        return Anything(f"{self.__name__}()")

    def __mro_entries__(self, bases: tuple) -> tuple:
        return () if any(isinstance(base, type) for base in bases) else (Base,)

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


class Base:
    """A base class that computes nothing."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds `real` modules of a package as files, its others and `absent` packages as stand-ins."""

    def __init__(self, root: Path, package: str, real: Collection[str], absent: Collection[str]):
        self._root, self._package, self._real = root, package, set(real)
        self._absent = {name for name in absent if importlib.util.find_spec(name) is None}
        self.values: dict[str, dict[str, Any]] = {}  # of stand-ins, by module
        self.loaded: list[str] = []

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        top, base = name.partition(".")[0], self._root.joinpath(*name.split("."))
        if name in self._real:
            for file in (base.with_suffix(".py"), base / "__init__.py"):
                if file.exists():
                    self.loaded.append(name)
                    return importlib.util.spec_from_file_location(name, file)
        if top == self._package or top in self._absent:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: Any) -> ModuleType:
        return StandIn(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        module.__path__ = []
        vars(module).update(self.values.get(module.__name__, {}))

    def install(self) -> None:
        sys.meta_path.insert(0, self)
