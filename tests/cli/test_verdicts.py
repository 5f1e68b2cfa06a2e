"""Commands that compare results fail when a result is wrong: tests corrupt a value on its way from
the wrapper to the comparison."""

import json

import preflash
import pytest
import torch
from preflash import cli
from preflash.cli import demo
from preflash.cli.bench import measure
from preflash.cli.bench.rows import quick_rows
from preflash.cli.machine import Place
from preflash.testing import runner, timing

HONEST, HONEST_PACKBITS = runner.run, preflash.packbits


def faulty(change):
    """Returns runner.run() with another output or LSE."""
    return lambda *arguments, **options: change(*HONEST(*arguments, **options))


def one_element_off(out, lse):
    """Adds more than rounding to an element."""
    if out.numel():
        out.view(-1)[0] += 0.25
    return out, lse


def raising(*arguments, **options):
    raise RuntimeError("launch refused")


@pytest.mark.parametrize(
    ("owner", "name", "fault", "words"),
    [
        (runner, "run", faulty(one_element_off), ("FAILED prefill", "outside their bound")),
        (runner, "run", faulty(lambda out, lse: (out, lse * 0.6931)), ("lse:",)),
        (runner, "run", raising, ("RuntimeError: launch refused",)),
        (preflash, "packbits", lambda x, order: HONEST_PACKBITS(x, order) ^ 1, ()),
    ],
    ids=["out", "natural logarithms", "raising", "packbits"],
)
def test_check_fails_on_wrong_results(monkeypatch, capsys, owner, name, fault, words):
    monkeypatch.setattr(owner, name, fault)
    assert cli.main(["check", "--quick", "--backend", "cpu"]) == 1
    out = capsys.readouterr().out
    for word in words:
        assert word in out
    # The areas that do not go through this call still pass.
    assert ("FAILED packbits" in out) == (name == "packbits")


def test_demo_fails_on_a_wrong_row(monkeypatch, capsys):
    honest = demo.Sample.of

    def of(sample, x):
        rows = honest(sample, x)
        return rows + 0.25 if x.dtype != torch.float32 else rows

    monkeypatch.setattr(demo.Sample, "of", of)
    assert cli.main(["demo", "--quick", "--backend", "cpu"]) == 1
    out = capsys.readouterr().out
    assert "FAILED layer 0" in out
    assert "all verified" not in out


def test_bench_does_not_time_a_wrong_result(monkeypatch, preflash_command, tmp_path):
    monkeypatch.setattr(runner, "run", faulty(one_element_off))
    options = ("--quick", "--backend", "cpu", "--rows", "d64", "--repeats", "1")
    done = preflash_command("bench", *options, "--json", "bench.json")
    assert done.code == 1
    assert "WRONG" in done.out
    assert "FAILED dense d64 s512 full" in done.out
    (row,) = json.loads((tmp_path / "bench.json").read_text())["rows"]
    assert set(row["us"]) == {"sdpa"}


def test_bench_fails_where_a_launch_fails_while_it_is_timed(monkeypatch):
    """Our own launch and the one that a row is compared with; a baseline's is only absent."""

    monkeypatch.setattr(timing, "GraphReplay", raising)
    gpu = Place("fa2", torch.device("cuda"), "a GPU")
    for name, failure in (("preflash", True), ("base", True), ("cudnn", False)):

        def calls_of(result, place, repeats, name=name):
            result.baselines.append("cudnn")
            return {name: []}

        result = measure.measured(calls_of, quick_rows()[0], gpu, 1)
        assert (result.failure == "launch refused") == failure
        assert result.absent == ({} if failure else {"cudnn": "launch refused"})
        assert result.us == {}
