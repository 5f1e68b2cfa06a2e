"""`variants` shows what the registry holds, and filters it."""

import json

import pytest
from preflash import _core, cli


def listed(capsys, *arguments):
    assert cli.main(["variants", "--json", *arguments]) == 0
    return json.loads(capsys.readouterr().out)


def test_json_is_the_registry(capsys):
    kernels = listed(capsys)
    assert {kernel["id"] for kernel in kernels} == {kernel["id"] for kernel in _core.kernels()}
    assert len(kernels) == len(_core.kernels())


def test_filters(capsys):
    chosen = listed(capsys, "--family", "cpu", "--dtype", "f32")
    assert chosen
    assert {kernel["family"] for kernel in chosen} == {"cpu"}
    assert {kernel["q_dtype"] for kernel in chosen} == {"f32"}
    size = str(chosen[0]["head_dim_qk"])
    assert listed(capsys, "--family", "cpu", "--dtype", "f32", "--head-dim", size) == chosen


def test_table_has_a_line_per_variant(capsys):
    assert cli.main(["variants", "--family", "cpu"]) == 0
    out = capsys.readouterr().out
    for kernel in _core.kernels():
        assert (kernel["id"] in out) == (kernel["family"] == "cpu")


@pytest.mark.parametrize(
    ("option", "value"), [("--family", "sm70"), ("--dtype", "f64"), ("--head-dim", "7")]
)
def test_an_empty_choice_says_what_there_is(capsys, option, value):
    assert cli.main(["variants", option, value]) == 2
    message = capsys.readouterr().err
    assert f"{option} {value}" in message
    assert "families" in message
    assert "cpu" in message
