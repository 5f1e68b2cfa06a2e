"""Writes the stubs of the public modules, python/preflash/*.pyi, from the package's signatures.

stubs.py    rewrites the stubs for the package that this Python imports (`make stubs` builds it)

Decorators give many calls their signature at run time, which type checkers do not see in the
sources. The stubs have the real names and defaults, and an overload for each value of return_lse.
preflash.page, quantization and distributed have plain functions and no stub.
"""

from __future__ import annotations

import ast
import builtins
import importlib
import inspect
from collections.abc import Mapping
from itertools import product
from pathlib import Path
from types import ModuleType
from typing import Any

PACKAGE = "preflash"
DIRECTORY = Path(__file__).resolve().parents[2] / "python" / PACKAGE
# A name that several modules export is defined in the stub of the first of them.
MODULES = (
    "cudnn", "fmha_v2", "trtllm", "prefill", "decode", "pod", "cascade", "attention", "sparse",
)  # fmt: skip

_HEAD = [
    "# Written by cmake/codegen/stubs.py (`make stubs`).",
    "# fmt: off",
    # FlashInfer's API fixes signatures that differ from those of the base classes.
    '# mypy: disable-error-code="assignment, override"',
    "# pyright: reportAssignmentType=false, reportIncompatibleMethodOverride=false",
    "",
]
_WIDTH = 100

# The module of each name in annotations and defaults; "": the name is a module itself.
_IMPORTS = {
    "Sequence": "collections.abc",
    "Any": "typing",
    "Literal": "typing",
    "overload": "typing",
    "torch": "",
    "KvCache": "._check.arguments",
    "Result": "._check.arguments",
    "Scale": "._check.arguments",
    "Qkv": "._fmha.arguments",
}

# Options that decide how many tensors a call returns.
_FLAGS = ("return_lse", "return_lse_p", "return_lse_d", "save_softmax_stats")
_PAIR = "tuple[torch.Tensor, torch.Tensor]"
_ONE_OR_PAIR = {False: "torch.Tensor", True: _PAIR, None: "Result"}
# Return types by annotation and value of the flag; None: any value.
_RETURNS = {
    "Result": _ONE_OR_PAIR,
    f"torch.Tensor | {_PAIR}": _ONE_OR_PAIR,
    "tuple[torch.Tensor, torch.Tensor | None]": {
        False: "tuple[torch.Tensor, torch.Tensor | None]",
        True: _PAIR,
        None: "tuple[torch.Tensor, torch.Tensor | None]",
    },
}
_BOTH_SIDES = "tuple[Result, Result]"

Parameter = inspect.Parameter
Homes = Mapping[Any, str]  # module whose stub defines a public object


def stub_texts() -> dict[str, str]:
    """Returns the text of every stub, by the name of its module."""
    modules = {name: importlib.import_module(f"{PACKAGE}.{name}") for name in MODULES}
    homes: dict[Any, str] = {}
    for name, module in modules.items():
        for public in module.__all__:
            homes.setdefault(getattr(module, public), name)
    return {name: _module(name, module, homes) for name, module in modules.items()}


def _module(name: str, module: ModuleType, homes: Homes) -> str:
    public = {one: getattr(module, one) for one in module.__all__}
    own = [one for one in public if homes[public[one]] == name]
    own.sort(key=lambda one: len(getattr(public[one], "__mro__", ())))  # bases come first
    imported = {one: f".{homes[value]}" for one, value in public.items() if one not in own}
    lines: list[str] = []
    for one in own:
        value = public[one]
        if inspect.isclass(value):
            base = _public_base(value, homes)
            if base is not None and homes[base] != name:
                imported[base.__name__] = f".{homes[base]}"
            lines += ["", *_class(value, base)]
        else:
            lines += ["", *_function(one, inspect.signature(value))]
    for one in _names("\n".join(lines)) - public.keys() - imported.keys():
        if not hasattr(builtins, one):
            imported[one] = _IMPORTS[one]
    exported = ["", "__all__ = [", *(f'    "{one}",' for one in public), "]"]
    return "\n".join([*_HEAD, *_import_lines(imported), *exported, *lines, ""])


def _names(text: str) -> set[str]:
    """Returns the names that a text uses, without the methods that it defines."""
    nodes = list(ast.walk(ast.parse(text)))
    methods = {node.name for node in nodes if isinstance(node, ast.FunctionDef)}
    loaded = (n for n in nodes if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load))
    return {node.id for node in loaded} - methods


def _import_lines(imported: Mapping[str, str]) -> list[str]:
    """Returns import lines in the order that ruff checks."""
    groups: dict[int, list[str]] = {}
    for module in sorted(set(imported.values())):
        # Classes come before functions.
        names = sorted(
            (n for n in imported if imported[n] == module), key=lambda n: (n.islower(), n)
        )
        if not module:
            groups.setdefault(1, []).extend(f"import {name}" for name in names)
            continue
        group = groups.setdefault(2 if module.startswith(".") else 0, [])
        line = f"from {module} import {', '.join(names)}"
        if len(line) > _WIDTH:
            group += [f"from {module} import (", *(f"    {name}," for name in names), ")"]
        else:
            group.append(line)
    return "\n\n".join("\n".join(groups[at]) for at in sorted(groups)).split("\n")


def _public_base(kind: type, homes: Homes) -> type | None:
    return next((base for base in kind.__mro__[1:] if base in homes), None)


def _class(kind: type, base: type | None) -> list[str]:
    """Returns the lines of a class with its public members and those of its private bases."""
    lines: list[str] = []
    seen: dict[str, Any] = {}
    for owner in kind.__mro__:
        if owner is object or (base is not None and owner in base.__mro__):
            continue
        for name, value in vars(owner).items():
            if name in seen or (name.startswith("_") and name != "__init__"):
                continue
            same = next((other for other in seen if seen[other] is value), None)
            seen[name] = value
            if name == "run_return_lse":  # follows every run()
                continue
            lines += _member(name, value, same)
            if name == "run" and hasattr(kind, "run_return_lse"):
                lines += _run_return_lse(value)
    of_base = "" if base is None else f"({base.__name__})"
    return [f"class {kind.__name__}{of_base}:", *(f"    {line}" for line in lines)]


def _member(name: str, value: Any, same: str | None) -> list[str]:
    """Returns the lines of a member. same: the name of an earlier member with the same value."""
    if isinstance(value, property):
        returned = inspect.signature(value.fget).return_annotation
        return ["@property", f"def {name}(self) -> {returned}: ..."]
    if not inspect.isfunction(value):
        return []
    if same is not None:
        return [f"{name} = {same}"]
    return _function(name, inspect.signature(value), margin=4)


def _run_return_lse(run: Any) -> list[str]:
    """Returns the lines of run_return_lse() with the parameters of run(), to which it passes them;
    its own signature shows few of them."""
    signature = inspect.signature(run)
    flags = [name for name in _FLAGS if name in signature.parameters]
    with_lse = _with_flags(signature, dict.fromkeys(flags, True), flags)
    rest = [one for one in with_lse.parameters.values() if one.name not in flags]
    return _function("run_return_lse", with_lse.replace(parameters=rest), margin=4)


def _function(name: str, signature: inspect.Signature, margin: int = 0) -> list[str]:
    overloads = _overloads(signature)
    lines = []
    for one in overloads:
        if len(overloads) > 1:
            lines.append("@overload")
        lines += _definition(name, one, _WIDTH - margin)
    return lines


def _overloads(signature: inspect.Signature) -> list[inspect.Signature]:
    """Returns a signature for each type that a call may return.

    NOTE: a call that leaves the flags out must match the first signature only. Type checkers give a
    call with an argument of type Any the type Any if it matches several.
    """
    flags = [name for name in _FLAGS if name in signature.parameters]
    if not flags:
        return [signature]
    defaults = {name: signature.parameters[name].default for name in flags}
    values = [dict(zip(flags, v, strict=True)) for v in product((False, True), repeat=len(flags))]
    values.sort(key=lambda given: given != defaults)
    unknown = dict.fromkeys(flags)
    found = [
        _with_flags(signature, given, [name for name in flags if given[name] != defaults[name]])
        for given in values
    ]
    found += [_with_flags(signature, unknown, [name]) for name in flags]
    first, *others = flags
    if signature.parameters[first].kind is Parameter.POSITIONAL_OR_KEYWORD:
        if not others:
            given = {first: not defaults[first]}
            found.append(_with_flags(signature, given, flags, by_position=True))
        found.append(_with_flags(signature, unknown, [first], by_position=True))
    return found


def _with_flags(
    signature: inspect.Signature,
    given: Mapping[str, bool | None],
    required: list[str],
    by_position: bool = False,
) -> inspect.Signature:
    """Returns the signature of calls with these values of the flags; None stands for any value.

    required: flags without a default, which callers give by name or, with by_position, by position
    behind all parameters before it.
    """
    parameters: list[Parameter] = []
    first = list(signature.parameters).index(required[0]) if required else len(signature.parameters)
    for i, one in enumerate(signature.parameters.values()):
        if one.name in given:
            value = given[one.name]
            one = one.replace(annotation="bool" if value is None else f"Literal[{value}]")
        if one.name in required or (by_position and i < first):
            one = one.replace(default=Parameter.empty)
        if i >= first and not by_position:
            if one.kind is Parameter.VAR_POSITIONAL:
                continue
            if one.kind is Parameter.POSITIONAL_OR_KEYWORD:
                one = one.replace(kind=Parameter.KEYWORD_ONLY)
        parameters.append(one)
    returned = _returned(signature.return_annotation, list(given.values()))
    return signature.replace(parameters=parameters, return_annotation=returned)


def _returned(annotation: str, flags: list[bool | None]) -> str:
    if annotation == _BOTH_SIDES:
        return f"tuple[{_ONE_OR_PAIR[flags[0]]}, {_ONE_OR_PAIR[flags[-1]]}]"
    return _RETURNS[annotation][flags[0]]


def _definition(name: str, signature: inspect.Signature, width: int) -> list[str]:
    parameters = [_declaration(one) for one in signature.parameters.values()]
    kinds = [one.kind for one in signature.parameters.values()]
    if Parameter.KEYWORD_ONLY in kinds and Parameter.VAR_POSITIONAL not in kinds:
        parameters.insert(kinds.index(Parameter.KEYWORD_ONLY), "*")
    end = f") -> {signature.return_annotation}: ..."
    line = f"def {name}({', '.join(parameters)}{end}"
    if len(line) <= width:
        return [line]
    rows = [""]
    for parameter in parameters:
        if len(rows[-1]) + len(parameter) > width - len("    ,"):
            rows.append("")
        rows[-1] += f"{parameter}, "
    return [f"def {name}(", *(f"    {row.rstrip()}" for row in rows), end]


def _declaration(parameter: Parameter) -> str:
    stars = {Parameter.VAR_POSITIONAL: "*", Parameter.VAR_KEYWORD: "**"}.get(parameter.kind, "")
    text = stars + parameter.name
    if parameter.annotation is not Parameter.empty:
        text += f": {parameter.annotation}"
    if parameter.default is not Parameter.empty:
        given = parameter.default
        text += " = " + (f'"{given}"' if isinstance(given, str) else repr(given))
    return text


def main() -> None:
    for name, text in stub_texts().items():
        DIRECTORY.joinpath(f"{name}.pyi").write_text(text)


if __name__ == "__main__":
    main()
