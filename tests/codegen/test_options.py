"""One row of cpp/variants/options.toml makes an option known to signatures, checks, operators."""

from __future__ import annotations

import inspect
from pathlib import Path

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


def edited(directory: Path, old: str, new: str) -> options.Table:
    text = (spec.VARIANTS_DIR / "options.toml").read_text()
    assert old in text
    (directory / "options.toml").write_text(text.replace(old, new, 1))
    return spec.load_options(directory)


def test_a_row_is_an_option_of_the_calls_it_names(tmp_path):
    table = edited(tmp_path, FIRST, FIRST + ROW)
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
    (checked,) = (one for one in module["CHECKED_ALONE"] if one.name == "temperature")
    assert checked == ("temperature", preflash._check.validate.real, "soft_cap", None)


@pytest.mark.parametrize(
    ("of", "part"),
    [
        ('"float", default = "1.0"', "float temperature=1.0"),
        ('"float | torch.Tensor | None"',
         "float? temperature=None, Tensor? temperature_tensor=None"),
        ('"bytes"', None),
    ],
)  # fmt: skip
def test_an_operator_has_every_option(tmp_path, of, part):
    row = f'temperature = {{type = {of}, keyword_of = ["single"]}}\n'
    table = edited(tmp_path, FIRST, FIRST + row)
    if part is not None:
        assert table.options["temperature"].of_operator == part
        return
    with pytest.raises(spec.SpecError, match="temperature: an operator has no 'bytes'"):
        generate.calls_text(table)


def test_a_field_is_bound_and_in_the_stub(tmp_path):
    row = 'temperature = {type = "float", member = "logits.temperature"}\n'
    table = edited(tmp_path, "[field]\n", f"[field]\n{row}")
    accessor = '"temperature", [](auto& options) -> auto& { return options.logits.temperature; }'
    assert accessor in generate.bind_options_text(table)
    assert "temperature: float = ..." in options.stub(table)


@pytest.mark.parametrize(
    ("old", "new", "match"),
    [
        ('"single"]', '"singel"]', "keyword_of of .*'singel' is unknown"),
        ('field = "soft_cap"', 'field = "cap"', "field of logits_soft_cap: 'cap' is unknown"),
        ('alias_of = "head_dim"', 'alias_of = "dim"', "alias_of of head_dim_qk: 'dim' is unknown"),
        ('type.use_fp16_qk', "type.fp16_qk", "cascade_plan.*'fp16_qk_reduction' is unknown"),
        ('"last_page_len", "num_qo', '"indptr", "num_qo', "decode_plan. has an option twice"),
        ('"max_item_len_ptr", "seq_lens"', '"max_item_len_ptr", "sequence"',
         "newer of .call.paged_plan.: 'sequence' is unknown"),
        ("check = ", "checked_by = ", "checked_by"),
        ('memory = "rows"', 'memory = "lines"', r"options\.toml: .*lines"),
        ('device = "any"', 'device = "gpu"', r"options\.toml: .*gpu"),
        ("written = true", "is_written = true", r"options\.toml: .*is_written"),
    ],
)  # fmt: skip
def test_unknown_words_are_refused(tmp_path, old, new, match):
    with pytest.raises(spec.SpecError, match=match):
        edited(tmp_path, old, new)
