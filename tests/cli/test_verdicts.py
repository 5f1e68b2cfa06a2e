"""Commands fail where a result is wrong: tests corrupt what public calls return."""

import json

import preflash
import pytest
import torch
from preflash.cli.bench import measure
from preflash.cli.bench.rows import quick_rows
from preflash.cli.machine import Place

WRAPPERS = (
    preflash.BatchPrefillWithPagedKVCacheWrapper,
    preflash.BatchPrefillWithRaggedKVCacheWrapper,
)
PACKBITS = preflash.packbits


def one_element_off(out, lse):
    """Adds more than rounding to an element."""
    if out.numel():
        out.view(-1)[0] += 0.25
    return out, lse


def refused(*_, **__):
    raise RuntimeError("launch refused")


@pytest.fixture
def corrupt(monkeypatch):
    """Returns a function that changes the (output, LSE) of every wrapper's run()."""

    def corrupt(change):
        for wrapper in WRAPPERS:

            def run(self, *arguments, honest=wrapper.run, **options):
                return change(*honest(self, *arguments, **options))

            monkeypatch.setattr(wrapper, "run", run)

    return corrupt


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        (one_element_off, ("FAILED prefill", "outside their bound")),
        (lambda out, lse: (out, lse * 0.6931), ("lse:",)),  # natural logarithms
        (refused, ("RuntimeError: launch refused",)),
    ],
)
def test_check_fails_on_wrong_results(corrupt, preflash_command, fault, words):
    corrupt(fault)
    done = preflash_command("check --quick --backend cpu")
    assert done.code == 1
    for word in words:
        assert word in done.out
    assert "FAILED packbits" not in done.out  # which calls no wrapper


def test_check_fails_on_wrong_bits_alone(monkeypatch, preflash_command):
    monkeypatch.setattr(preflash, "packbits", lambda x, order: PACKBITS(x, order) ^ 1)
    done = preflash_command("check --quick --backend cpu")
    assert (done.code, done.out.count("FAILED packbits")) == (1, 1)
    assert done.out.count("\nFAILED ") == 1


def test_demo_fails_on_a_wrong_row(corrupt, preflash_command):
    corrupt(lambda out, lse: (out + 0.25, lse))
    done = preflash_command("demo --quick --backend cpu")
    assert done.code == 1
    assert "FAILED layer 0" in done.out
    assert "all verified" not in done.out


def test_bench_does_not_time_a_wrong_result(corrupt, preflash_command, tmp_path):
    corrupt(one_element_off)
    options = "--quick --backend cpu --dtype f32 --rows d64 --repeats 1 --json bench.json"
    done = preflash_command(f"bench {options}")
    assert done.code == 1
    assert "WRONG" in done.out
    assert "FAILED dense d64 s512 full" in done.out
    (row,) = json.loads((tmp_path / "bench.json").read_text())["rows"]
    assert row["variant"].startswith("cpu_f32_")
    assert set(row["us"]) == {"sdpa"}


@pytest.mark.parametrize(("name", "fails"), [("preflash", True), ("base", True), ("cudnn", False)])
def test_bench_fails_where_a_launch_fails_while_it_is_timed(name, fails):
    """Our own launch and the one that a row is compared with; a baseline's is only absent."""

    def calls_of(result, place, repeats):
        result.baselines.append("cudnn")
        return {name: [refused]}

    gpu = Place("fa2", torch.device("cuda"), "a GPU")  # without a GPU every launch fails, too
    result = measure.measured(calls_of, quick_rows()[0], gpu, 1)
    assert (bool(result.failure), bool(result.absent)) == (fails, not fails)
    assert result.us == {}
