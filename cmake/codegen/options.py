"""cpp/variants/options.toml: the options of the public calls, and what Python makes of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields

from vocabulary import SpecError

INT32_MAX = 2**31 - 1
TOGETHER = "together"  # the check of an option that is not checked alone
PERMISSION = "permission"  # the check of what changes no result

# The types that an operator's argument may have, and what torch calls them.
_OF_OPERATORS = {
    "bool": "bool {}",
    "int": "SymInt {}",
    "str": "str {}",
    "float": "float {}",
    "float | None": "float? {}",
    "torch.Tensor | None": "Tensor? {}",
    "float | torch.Tensor | None": "float? {}=None, Tensor? {}_tensor",
}
# Required tensors and dtypes, of which _torch/operators.py has its own.
_BESIDE_OPTIONS = ("torch.Tensor", "str | torch.dtype | None")


@dataclass(frozen=True)
class Option:
    """A row of [option]."""

    name: str
    type: str
    default: str = ""  # "": None where the type has it, or else required
    check: str = ""
    field: str = ""
    alias_of: str = ""
    neutral: str = ""
    keyword_of: Sequence[str] = ()
    result: bool = False

    @property
    def declaration(self) -> str:
        return f"{self.name}: {self.type}" + (f" = {self.initial}" if self.initial else "")

    @property
    def initial(self) -> str:
        """Default of the option, as Python text; "" if the option is required."""
        return self.default or ("None" if "None" in self.type else "")

    @property
    def of_operator(self) -> str:
        """Part of an operator's schema for this option; "" if it has none."""
        elsewhere = self.result or self.neutral or self.check == PERMISSION
        if elsewhere or self.type in _BESIDE_OPTIONS:
            return ""
        if self.type not in _OF_OPERATORS:
            raise SpecError(f"options.toml: {self.name}: an operator has no {self.type!r}")
        return _OF_OPERATORS[self.type].format(self.name, self.name) + f"={self.initial}"


@dataclass(frozen=True)
class Field:
    """A row of [field]."""

    name: str
    type: str
    member: str = ""


@dataclass(frozen=True)
class Tensor:
    """A row of [tensor]."""

    DEVICES = ("call", "any")
    MEMORY = ("", "rows", "contiguous_rows", "contiguous", "aligned")

    name: str
    shape: Sequence[str] = ()
    kv_layout: bool = False
    dtype: Sequence[str] = ()
    note: str = ""
    device: str = "call"
    memory: str = ""
    written: bool = False

    @property
    def rule(self) -> str:
        """Arguments of TensorRule, as Python text."""
        given = ((one.name, getattr(self, one.name), one.default) for one in fields(self)[1:])
        return ", ".join(
            f"{name}={tuple(value) if isinstance(value, list) else value!r}"
            for name, value, default in given
            if value != default
        )


@dataclass(frozen=True)
class Call:
    """A [call.*] table, and the options that name it."""

    name: str
    about: str
    positional: Sequence[str]
    newer: Sequence[str] = ()
    operator: bool = False
    type: Mapping[str, str] = field(default_factory=dict)
    default: Mapping[str, str] = field(default_factory=dict)

    @property
    def class_name(self) -> str:
        return "".join(part.capitalize() for part in self.name.split("_")) + "Arguments"


@dataclass(frozen=True)
class Table:
    """All of options.toml."""

    options: Mapping[str, Option]
    fields: Mapping[str, Field]
    tensors: Mapping[str, Tensor]
    ranges: Mapping[str, Sequence[int]]
    calls: Mapping[str, Call]

    def keywords(self, call: Call) -> list[str]:
        return [option.name for option in self.options.values() if call.name in option.keyword_of]

    def options_of(self, call: Call) -> list[Option]:
        """Options of a call, in the order of the rows, with the call's types and defaults."""
        names = {*call.positional, *self.keywords(call)}
        changes = {
            name: {
                key: of[name] for key in ("type", "default") if name in (of := getattr(call, key))
            }
            for name in names
        }
        return [
            Option(**{**vars(option), **changes[option.name]})
            for option in self.options.values()
            if option.name in names
        ]


def read_table(document: Mapping) -> Table:
    """Reads a parsed options.toml. Raises SpecError for a name that the file does not explain."""
    table = Table(
        {name: _row(Option, name, row) for name, row in document["option"].items()},
        {name: _row(Field, name, row) for name, row in document["field"].items()},
        {name: _row(Tensor, name, row) for name, row in document["tensor"].items()},
        {name: (*bounds, INT32_MAX)[:2] for name, bounds in document["range"].items()},
        {name: _row(Call, name, row) for name, row in document["call"].items()},
    )
    for tensor in table.tensors.values():
        _check_known(f"device of {tensor.name}", [tensor.device], Tensor.DEVICES)
        _check_known(f"memory of {tensor.name}", [tensor.memory], Tensor.MEMORY)
    for call in table.calls.values():
        _check_known(
            f"[call.{call.name}]", [*call.positional, *call.type, *call.default], table.options
        )
        of_call = [*call.positional, *table.keywords(call)]
        if len(set(of_call)) != len(of_call):
            raise SpecError(f"options.toml: [call.{call.name}] has an option twice")
        _check_known(f"newer of [call.{call.name}]", call.newer, of_call)
    for option in table.options.values():
        _check_known(f"keyword_of of {option.name}", option.keyword_of, table.calls)
        if option.field:
            _check_known(f"field of {option.name}", [option.field], table.fields)
        if option.alias_of:
            _check_known(f"alias_of of {option.name}", [option.alias_of], table.options)
    return table


def _row(kind: type, name: str, row: Mapping) -> Option | Field | Tensor | Call:
    try:
        return kind(name=name, **row)
    except TypeError as error:
        raise SpecError(f"options.toml: {name}: {error}") from None


def _check_known(where: str, names: Sequence[str], known: Sequence[str]) -> None:
    for name in names:
        if name not in known:
            raise SpecError(f"options.toml: {where}: {name!r} is unknown")


def classes(table: Table) -> str:
    """A class for each call, whose constructor has the call's signature. Dataclasses would be
    compiled whenever they are imported, a tenth of what importing takes."""
    return "\n\n\n".join(_class(table, call) for call in table.calls.values())


def _class(table: Table, call: Call) -> str:
    options = {option.name: option for option in table.options_of(call)}
    keywords = table.keywords(call)
    names = [*call.positional, *keywords]
    parameters = ["self", *(options[name].declaration for name in call.positional)]
    if keywords:
        parameters += ["*", *(options[name].declaration for name in keywords)]
    lines = [f"class {call.class_name}:", f'    """{call.about}"""', ""]
    lines += ["    def __init__(", *_packed(parameters), "    ) -> None:"]
    lines += _packed((f"self.{name} = {name}" for name in names), ";")
    lines += ["", "    __slots__ = __init__.__code__.co_varnames[1:]"]
    lines += ["    OPTIONS = tuple(filter(__slots__.__contains__, DECIDING))"]
    if call.newer:
        lines += ["    NEWER = (", *_packed(map(_quoted, call.newer)), "    )"]
    if call.operator:
        parts = {name: option.of_operator for name, option in options.items()}
        schema = (f"{_quoted(name)}: {part!r}" for name, part in parts.items() if part)
        lines += ["    OPERATOR = {", *_packed(schema), "    }"]
    return "\n".join(lines)


def deciding(table: Table) -> str:
    """The options that decide the kernel and the work list, or are refused."""
    names = (one.name for one in table.options.values() if one.check or one.neutral)
    return "\n".join(line.removeprefix("    ") for line in _packed(map(_quoted, names)))


def _quoted(name: str) -> str:
    return f'"{name}"'


def _packed(items: Iterable[str], separator: str = ",") -> list[str]:
    """Packs the items into lines of up to 100 columns; breaks between items only."""
    lines = [""]
    for item in items:
        if len(lines[-1]) + len(item) > 90:
            lines.append("")
        lines[-1] += f"{item}{separator} "
    return [" " * 8 + line.rstrip(" ;") for line in lines]


def checked_alone(table: Table) -> str:
    """The options that one check takes, without others."""
    return "\n".join(
        f'    CheckedAlone("{one.name}", validate.{one.check}, "{one.field}", '
        f"{one.initial or None}),"
        for one in table.options.values()
        if one.check not in ("", TOGETHER)
    )


def tensors(table: Table) -> str:
    """The items of TENSORS in rules.py."""
    return "\n".join(
        f"    {_quoted(one.name)}: TensorRule({one.rule})," for one in table.tensors.values()
    )


def ranges(table: Table) -> str:
    """The items of RANGES in rules.py."""
    return "\n".join(f"    {_quoted(name)}: {bounds}," for name, bounds in table.ranges.items())


def neutral(table: Table) -> str:
    options = [option for option in table.options.values() if option.neutral]
    return "\n".join(f"    {_quoted(option.name)}: {option.neutral}," for option in options)


def aliases(table: Table) -> str:
    return ", ".join(
        f"{_quoted(o.name)}: {_quoted(o.alias_of)}" for o in table.options.values() if o.alias_of
    )


def visits(table: Table) -> str:
    """Every field of AttentionOptions, for the binding."""
    return "\n".join(
        f"  visit({_quoted(field.name)}, [](auto& options) -> auto& "
        f"{{ return options.{field.member or field.name}; }});"
        for field in table.fields.values()
    )


def stub(table: Table) -> str:
    """Fields of AttentionOptions, for _core.pyi."""
    fields = [f"{one.name}: {one.type}" for one in table.fields.values()]
    lines = ["def __init__(", "    self,", "    *,", *(f"    {one} = ...," for one in fields)]
    lines += [") -> None: ..."]
    for one in table.fields.values():
        lines += ["@property", f"def {one.name}(self) -> {one.type}: ..."]
    return "".join(f"    {line}\n" for line in lines)
