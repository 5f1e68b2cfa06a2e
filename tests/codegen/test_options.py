"""One row of cpp/variants/options.toml makes an option known to signatures, checks, operators."""

from __future__ import annotations

import inspect

import generate
import options
import preflash
import pytest
import spec

ROW = (
    'temperature = {type = "float | None", check = "real", field = "soft_cap", '
    'keyword_of = ["paged_plan", "single"]}\n'
)
FIRST = "# Tensors.\n"


def test_a_row_is_an_option_of_the_calls_it_names(edited):
    table = edited("options.toml", FIRST, FIRST + ROW)
    module: dict = {"__name__": "preflash._check.grown", "__package__": "preflash._check"}
    exec(generate.calls_text(table), module)
    for name in ("PagedPlanArguments", "SingleArguments"):
        parameter = inspect.signature(module[name]).parameters["temperature"]
        assert parameter.kind is parameter.KEYWORD_ONLY
        assert parameter.default is None
        assert parameter.annotation == "float | None"
        assert "temperature" in module[name].OPTIONS
    assert "temperature" not in inspect.signature(module["RaggedPlanArguments"]).parameters
    assert module["SingleArguments"].OPERATOR["temperature"] == "float? temperature=None"
    checked = ("temperature", preflash._check.validate.real, "soft_cap", None)
    assert checked in module["CHECKED_ALONE"]


def test_an_operator_has_no_bytes(edited):
    row = 'temperature = {type = "bytes", keyword_of = ["single"]}\n'
    table = edited("options.toml", FIRST, FIRST + row)
    with pytest.raises(spec.SpecError, match="temperature: an operator has no 'bytes'"):
        generate.calls_text(table)


def test_a_field_is_bound_and_in_the_stub(edited):
    row = 'temperature = {type = "float", member = "logits.temperature"}\n'
    table = edited("options.toml", "[field]\n", f"[field]\n{row}")
    accessor = '"temperature", [](auto& options) -> auto& { return options.logits.temperature; }'
    assert accessor in generate.bind_options_text(table)
    assert "temperature: float = ..." in options.stub(table)
