"""The commands that compare results must fail when a result is wrong: one value is corrupted on its
way from the wrapper to the comparison."""

import pytest
import torch
from preflash import cli
from preflash.cli import check, demo
from preflash.cli.bench import measure
from preflash.cli.bench.rows import quick_rows
from preflash.cli.machine import Place
from preflash.testing import runner


@pytest.fixture
def corrupted_runs(monkeypatch):
    """One element of every output of `runner.run` is off by more than rounding."""
    honest = runner.run

    def run(wrapper, inputs, **options):
        out, lse = honest(wrapper, inputs, **options)
        if out.numel():
            out.view(-1)[0] += 0.25
        return out, lse

    monkeypatch.setattr(runner, "run", run)


@pytest.mark.usefixtures("corrupted_runs")
def test_check_fails_on_a_wrong_output(capsys):
    assert cli.main(["check", "--quick", "--backend", "cpu"]) == 1
    out = capsys.readouterr().out
    assert "FAILED prefill" in out
    assert "outside their bound" in out
    # The areas that do not go through the corrupted call still pass.
    assert "FAILED packbits" not in out


def test_check_fails_on_a_wrong_lse(monkeypatch, capsys):
    honest = runner.run

    def run(wrapper, inputs, **options):
        out, lse = honest(wrapper, inputs, **options)
        return out, lse * 0.6931  # natural logarithms instead of base 2

    monkeypatch.setattr(runner, "run", run)
    assert cli.main(["check", "--quick", "--backend", "cpu"]) == 1
    assert "lse:" in capsys.readouterr().out


def test_check_fails_when_a_backend_raises(monkeypatch, capsys):
    def run(wrapper, inputs, **options):
        raise RuntimeError("launch refused")

    monkeypatch.setattr(runner, "run", run)
    assert cli.main(["check", "--quick", "--backend", "cpu"]) == 1
    assert "RuntimeError: launch refused" in capsys.readouterr().out


def test_check_fails_on_wrong_bits(monkeypatch, capsys):
    honest = check.preflash.packbits
    monkeypatch.setattr(check.preflash, "packbits", lambda x, order: honest(x, order) ^ 1)
    assert cli.main(["check", "--quick", "--backend", "cpu"]) == 1
    assert "FAILED packbits" in capsys.readouterr().out


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


@pytest.mark.usefixtures("corrupted_runs")
def test_bench_does_not_time_a_wrong_result(monkeypatch, capsys):
    timed = []
    monkeypatch.setattr(measure, "_time", lambda *arguments: timed.extend(arguments[-1]))
    arguments = ["bench", "--quick", "--backend", "cpu", "--rows", "d64", "--repeats", "1"]
    assert cli.main(arguments) == 1
    out = capsys.readouterr().out
    assert "WRONG" in out
    assert "FAILED dense d64 s512 full" in out
    assert timed == ["sdpa"]


def test_bench_fails_where_a_launch_fails_while_it_is_timed(monkeypatch):
    """Our own launch and the one that a row is compared with; a baseline's is only absent."""

    def refuse(call, calls):
        raise RuntimeError("launch refused")

    monkeypatch.setattr(measure.timing, "GraphReplay", refuse)
    gpu = Place("fa2", torch.device("cuda"), "a GPU")
    for name, failure in (("preflash", True), ("base", True), ("cudnn", False)):
        result = measure.Result(quick_rows()[0], baselines=["cudnn"])
        measure._time(result, gpu, 1, {name: []})
        assert (result.failure == "launch refused") == failure
        assert result.absent == ({} if failure else {"cudnn": "launch refused"})
        assert result.us == {}


@pytest.mark.parametrize("command", ["check", "bench", "demo"])
def test_a_backend_that_is_not_here_is_refused(capsys, command):
    assert cli.main([command, "--backend", "fa7"]) == 2
    assert "--backend fa7: must be one of cpu, fa2, fa3" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--rows", "nothing like it"], "names no row"),
        (
            ["--dtype", "f64"],
            "--dtype f64: there are bf16 (bfloat16), f16 (float16)",
        ),
        (["--dtype", "bf16,e4m3"], "--dtype e4m3: there are bf16"),
    ],
)
def test_bench_refuses_what_it_does_not_have(capsys, arguments, message):
    assert cli.main(["bench", "--quick", "--backend", "cpu", *arguments]) == 2
    assert message in capsys.readouterr().err
