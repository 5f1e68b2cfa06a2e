"""The fuzzer notices faults of the wrappers and of every `--call NAME`: each is put between the
library and the fuzzer, and the printed commands find it again, and nothing once it is gone."""

import functools
import os
import pathlib
import re
import subprocess
import sys

import preflash
import pytest
import torch
from preflash.testing import runner

from . import calls, command, problems, wrapper_trial
from .printed import commands, out_of
from .random_cases import Limits

HONEST_PLAN, HONEST_RUN = runner.plan, runner.run


def own_rows(inputs) -> tuple[int, int]:
    """The first token of the requests and their number; others are padding."""
    begin, end = inputs.qo_indptr[[0, -1]].tolist()
    return begin, end - begin


def flip_last_bit(returned, inputs, options) -> None:
    """Flips the last bit of one LSE, whose bound is far wider than that."""
    if isinstance(returned, tuple):
        tokens = 1 if options.get("lse_layout") == "HN" else 0
        lse = returned[1].narrow(tokens, *own_rows(inputs))
        for place in lse.isfinite().nonzero()[:1].tolist():
            lse.view(torch.int32)[tuple(place)] ^= 1


def wrong_number(wrapper, inputs, **options):
    returned = HONEST_RUN(wrapper, inputs, **options)
    last = out_of(returned).narrow(0, *own_rows(inputs))[-1:, -1:, -1:]
    last.copy_(last.float() + 0.25)  # 8-bit numbers cannot be added
    return returned


def leaked_nan(wrapper, inputs, **options):
    """Leaks NaN as if a page's unused slots were multiplied by a weight of zero."""
    returned = HONEST_RUN(wrapper, inputs, **options)
    if inputs.case.page_size > 1 and any(n % inputs.case.page_size for n in inputs.case.kv_lens):
        last = out_of(returned).narrow(0, *own_rows(inputs))[-1:]
        last.copy_(last.float() + 0.0 * inputs.k.float().min())
    return returned


# Options are dropped where they are right: what must be refused still is, so that it is the numbers
# that show the fault.


def without_sinks(wrapper, inputs, **options):
    return HONEST_RUN(wrapper, inputs, **{"sinks": None, **options})


def without_factors_of_heads(name):
    """Right only where they are absent or wrong."""

    def run(wrapper, inputs, **options):
        if name not in options and inputs.case.head_scales:
            options[name] = None
        return HONEST_RUN(wrapper, inputs, **options)

    run.__name__ = f"without_{name}"
    return run


def without_v_scale(wrapper, inputs, **options):
    scale = options.get("v_scale")
    return HONEST_RUN(wrapper, inputs, **{**options, "v_scale": scale if scale == "loud" else None})


def without_lse_base(wrapper, inputs, **options):
    base = options.get("lse_base", "log2")
    return HONEST_RUN(wrapper, inputs, **{**options, "lse_base": "log2" if base == "ln" else base})


def without_window_of_run(wrapper, inputs, **options):
    window = options.get("window_left", -1)
    return HONEST_RUN(wrapper, inputs, **{**options, "window_left": min(window, -1)})


def another_bit_every_time(wrapper, inputs, **options):
    returned = HONEST_RUN(wrapper, inputs, **options)
    another_bit_every_time.calls += 1
    if another_bit_every_time.calls % 2:
        flip_last_bit(returned, inputs, options)
    return returned


another_bit_every_time.calls = 0


def bits_by_company(wrapper, inputs, **options):
    returned = HONEST_RUN(wrapper, inputs, **options)
    if inputs.case.batch_size > 1:
        flip_last_bit(returned, inputs, options)
    return returned


def contagion(wrapper, inputs, **options):
    returned = HONEST_RUN(wrapper, inputs, **options)
    if bool(inputs.q.narrow(0, *own_rows(inputs)).isnan().any()):
        out_of(returned).fill_(torch.nan)
    return returned


def spill(wrapper, inputs, **options):
    returned = HONEST_RUN(wrapper, inputs, **options)
    if options.get("out") is not None and options["out"]._base is not None:
        options["out"]._base[-1] = 0
    return returned


def written_padding(wrapper, inputs, **options):
    """The first row of q is nobody's if it is garbage."""
    returned = HONEST_RUN(wrapper, inputs, **options)
    if bool(inputs.q[:1].isnan().any()):
        out_of(returned)[:1] = 0
    return returned


def workspace_spill(wrapper, inputs, **options):
    wrapper._plan.workspace.float_tensor._base[-1] = 0
    return HONEST_RUN(wrapper, inputs, **options)


def written_input(wrapper, inputs, **options):
    returned = HONEST_RUN(wrapper, inputs, **options)
    inputs.k.untyped_storage()[0] ^= 1
    return returned


def refused_nothing(wrapper, inputs, **options):
    if options.get("lse_layout") == "NHD":
        options["lse_layout"] = "NH"
        options["lse"] = None
    return HONEST_RUN(wrapper, inputs, **options)


def raising(wrapper, inputs, **options):
    raise RuntimeError("launch refused")


RUN_FAULTS = {
    wrong_number: "outside their bound",
    leaked_nan: "wrong kind",
    without_sinks: "lse:|out:",
    without_v_scale: "out:",
    without_factors_of_heads("scale_q"): "out:|lse:",
    without_factors_of_heads("scale_k"): "out:|lse:",
    without_factors_of_heads("scale_v"): "out:",
    without_lse_base: "lse:",
    without_window_of_run: "out:|lse:",
    another_bit_every_time: "other bits",
    bits_by_company: "without the rest of its batch",
    contagion: "has other bits with garbage in request",
    spill: "out: .* elements around it were written",
    written_padding: "out: .* elements around it were written",
    workspace_spill: "around the workspace",
    written_input: "k, an input, was written",
    refused_nothing: "'NHD' was accepted",
    raising: "RuntimeError: launch refused",
}


def without_option(name, neutral):
    def plan(wrapper, inputs, **overrides):
        HONEST_PLAN(wrapper, inputs, **{name: neutral, **overrides})

    return plan


def planned_once(wrapper, inputs, **overrides):
    if wrapper.variant is None:
        HONEST_PLAN(wrapper, inputs, **overrides)


PLAN_FAULTS = {
    "causal": without_option("causal", False),
    "window_left": without_option("window_left", -1),
    "logits_soft_cap": without_option("logits_soft_cap", None),
    "pos_encoding_mode": without_option("pos_encoding_mode", "NONE"),
    "rope_scale": without_option("rope_scale", None),
    "rope_theta": without_option("rope_theta", None),
    "sm_scale": without_option("sm_scale", None),
    "custom_mask": without_option("custom_mask", None),
    "packed_custom_mask": without_option("packed_custom_mask", None),
    "stale": planned_once,
}


@pytest.fixture
def finds_again(monkeypatch, capsys):
    """The fault is found, the printed commands find it again, and do not without it."""

    def find(faults, message, *call, fuzz=250, seed="3", work=3e6) -> list[list[str]]:
        monkeypatch.setattr(command, "_MOST_FAILURES", 1)
        monkeypatch.setattr(calls, "_WORK", work)
        asked = ["--backend", "cpu", *call]
        with monkeypatch.context() as patch:
            for owner, name, fault in faults:
                patch.setattr(owner, name, fault)
            assert command.main([*asked, "--fuzz", str(fuzz), "--seed", seed]) == 1
            printed = capsys.readouterr().out
            found = commands(printed)
            assert len(found) in (1, 2), printed
            assert re.search(message, printed), printed
            for arguments in found:
                assert arguments[: len(asked)] == asked
                assert command.main(arguments) == 1, arguments
                again = capsys.readouterr().out
                assert "FAILED" in again
                assert commands(again)[0] == arguments
        for arguments in found:
            assert command.main(arguments) == 0, arguments
        capsys.readouterr()
        return found

    return find


@pytest.mark.parametrize("fault", RUN_FAULTS, ids=lambda fault: fault.__name__)
def test_a_fault_of_run_is_found(finds_again, fault):
    finds_again([(runner, "run", fault)], RUN_FAULTS[fault])


@pytest.mark.parametrize("option", PLAN_FAULTS)
def test_a_fault_of_plan_is_found(finds_again, option):
    finds_again([(runner, "plan", PLAN_FAULTS[option])], "out:|lse:")


def test_a_wrong_number_is_shrunk(finds_again):
    _, smaller = finds_again([(runner, "run", wrong_number)], "outside their bound")
    problem = problems.parse(smaller[-1])
    assert problem.case.qo_lens == (1,)
    assert problem.case.num_qo_heads == 1
    assert problem.case.head_dim == 8
    assert len(problem.text) < 100


FMHA, CUDNN = "trtllm_fmha_v2_prefill", "cudnn_batch_prefill_with_kv_cache"
APPEND = "append_paged_kv_cache"


def scaled(out: torch.Tensor) -> torch.Tensor:
    return (out.float() * 0.5).to(out.dtype)  # 8-bit numbers cannot be multiplied


def halved_fmha(**arguments):
    result = preflash.prefill.trtllm_fmha_v2_prefill(**arguments)
    return (scaled(result[0]), result[1]) if isinstance(result, tuple) else scaled(result)


HONEST_CUDNN = preflash.prefill.cudnn_batch_prefill_with_kv_cache


def halved_cudnn(**arguments):
    out, lse = HONEST_CUDNN(**arguments)
    return scaled(out), lse


def with_argument(name, value):
    return lambda **arguments: HONEST_CUDNN(**{**arguments, name: value})


def last_row(**arguments):
    given = arguments["out"]
    out, lse = HONEST_CUDNN(**arguments)
    if given is not None:
        given[-1:] = 0.0
    return out, lse


def padded_with_zeros(**arguments):
    out, lse = HONEST_CUDNN(**arguments)
    return out, None if lse is None else lse.masked_fill_(lse == -torch.inf, 0.0)


def other_lse(**arguments):
    out, lse = HONEST_CUDNN(**arguments)
    return out, None if lse is None else lse.clone()


def without(name, neutral):
    """Drops a keyword of run() of the wrappers for prefill and decode."""

    def fault(honest, *args, **options):
        return honest(*args, **options | ({name: neutral} if name in options else {}))

    return fault


def halved_decode(honest, *args, **options):
    prefill, decode = honest(*args, **options)
    out_of(decode).copy_(scaled(out_of(decode)))
    return prefill, decode


def sides_changed(honest, *args, **options):
    prefill, decode = honest(*args, **options)
    return decode, prefill


def written_queries(honest, *args, **options):
    returned = honest(*args, **options)
    args[0].untyped_storage()[:1] = 7
    return returned


def written_padding_of_decode(honest, *args, **options):
    """The last row of q is nobody's if it is garbage."""
    returned = honest(*args, **options)
    if bool(args[-2][-1:].isnan().any()):
        out_of(returned[1])[-1:] = 0
    return returned


def of_pod(fault):
    """The fault in either wrapper's run()."""
    for name in ("PODWithPagedKVCacheWrapper", "BatchPODWithPagedKVCacheWrapper"):
        made = getattr(preflash, name)

        def run(self, *args, honest=made.run, **options):
            return fault(functools.partial(honest, self), *args, **options)

        yield made, "run", run


def of_decode(name):
    """The option dropped by the decode wrapper."""
    made = preflash.BatchDecodeWithPagedKVCacheWrapper
    method = "run" if name in ("sinks", "k_scale") else "plan"
    honest, neutral = getattr(made, method), {name: -1 if name == "window_left" else None}
    return [(made, method, lambda self, *args, **options: honest(self, *args, **options | neutral))]


HONEST_APPEND = preflash.page.append_paged_kv_cache


def spilled(key, value, owners, positions, cache, **table):
    HONEST_APPEND(key, value, owners, positions, cache, **table)
    first = cache if isinstance(cache, torch.Tensor) else cache[0]
    torch.empty(0, dtype=torch.uint8).set_(first.untyped_storage())[-1] ^= 1


def without_last(key, value, owners, positions, cache, **table):
    owners = owners.clone()
    owners[owners >= 0] = torch.where(owners == owners.max(), -1, owners)[owners >= 0]
    HONEST_APPEND(key, value, owners, positions, cache, **table)


CALL_FAULTS = [
    (FMHA, [(preflash, FMHA, halved_fmha)], "outside their bound"),
    *(
        (CUDNN, [(preflash, CUDNN, fault)], message)
        for fault, message in (
            (halved_cudnn, "outside their bound"),
            (with_argument("lse_base", "ln"), "lse: .* outside"),
            (with_argument("causal", False), "out: .* outside"),
            (with_argument("k_scale", None), "outside their bound"),
            (last_row, "rows that no request has are written"),
            (padded_with_zeros, "are not -inf"),
            (other_lse, "lse is not the tensor that was given"),
        )
    ),
    *(
        ("pod", [*of_pod(fault)], message)
        for fault, message in (
            (without("causal_p", False), "prefill: (out|lse):"),
            (without("custom_mask_p", None), "prefill: (out|lse):"),
            (without("packed_custom_mask_p", None), "prefill: (out|lse):"),
            (without("sm_scale_p", None), "prefill: (out|lse):"),
            (without("window_left_p", -1), "prefill: (out|lse):"),
            (without("k_scale", None), "decode: (out|lse):"),
            (without("v_scale", None), "decode: out:"),
            (without("lse_base", "log2"), "lse:"),
            (halved_decode, "decode: out:"),
            (sides_changed, "prefill: out"),
            (written_queries, "prefill: q, an input, was written"),
            (written_padding_of_decode, "decode: out: .* elements around it were written"),
        )
    ),
    *(
        ("decode", of_decode(name), "out:|lse:")
        for name in ("window_left", "logits_soft_cap", "sm_scale", "sinks", "k_scale")
    ),
    *(
        (APPEND, [(preflash, APPEND, fault)], "bytes differ from a loop's")
        for fault in (spilled, without_last)
    ),
]
# Problems of a call, how many operations each may take, and the seed.
SEARCHES = {
    FMHA: (9, 3e6, "8:40"),
    CUDNN: (100, 1e6, "3"),
    "pod": (100, 2e6, "3"),
    "decode": (150, 2e6, "3"),
    APPEND: (20, 3e6, "3"),
}


@pytest.mark.parametrize(("call", "faults", "message"), CALL_FAULTS)
def test_a_fault_of_a_call_is_found(finds_again, call, faults, message):
    fuzz, work, seed = SEARCHES[call]
    finds_again(faults, message, "--call", call, fuzz=fuzz, work=work, seed=seed)


@pytest.mark.parametrize(
    ("call", "count", "seed"),
    [
        *((call, 5, "8:40") for call in (None, FMHA)),
        *(
            (call, count, "21")
            for call, count in ((CUDNN, 80), ("pod", 50), (APPEND, 60), ("decode", 80))
        ),
    ],
)
def test_problems_that_pass(monkeypatch, capsys, call, count, seed):
    monkeypatch.setattr(calls, "_WORK", 3e6)
    named = [] if call is None else ["--call", call]
    assert command.main(["--backend", "cpu", *named, "--fuzz", str(count), "--seed", seed]) == 0
    out = capsys.readouterr().out
    assert f"cpu on cpu: {count} passed, 0 failed" in out
    assert "all good" in out


def test_problems_that_no_kernel_serves_are_no_success(monkeypatch, capsys):
    verdict = wrapper_trial.Verdict(not_compiled="head_dim 512 is not compiled")
    monkeypatch.setattr(wrapper_trial, "examine", lambda problem, **place: verdict)
    assert command.main(["--backend", "cpu", "--fuzz", "3"]) == 2
    assert "head_dim 512 is not compiled" in capsys.readouterr().err


def words(**fields: str) -> str:
    return " ".join(f"{name}={value}" for name, value in fields.items())


def problem(**fields: str) -> list[str]:
    return ["--problem", words(**{"qo_lens": "3", "kv_lens": "5"} | fields)]


NONSENSE = {
    "num_kv_heads": "0",
    "num_qo_heads": "0",
    "head_dim": "0",
    "head_dim_vo": "12",
    "qo_lens": "-1",
    "kv_lens": "100000000000",
    "page_size": "-3",
    "window_left": "-2",
    "soft_cap": "1e+31",
    "sm_scale": "nan",
    "rope_theta": "0.0",
    "fixed_split_size": "-64",
    "layout": "DHN",
    "lse_base": "10",
    "lse_layout": "NN",
    "threads": "0",
    "padding": "-1",
}
MANY = ",".join(["1"] * 600)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--fuzz", "0"], "--fuzz 0"),
        (["--fuzz", "1", "--seed", "one"], "--seed one"),
        (["--fuzz", "1", "--seed", "1:-2"], "--seed 1:-2"),
        ([], "one of them"),
        (["--problem", "qo_lens=1"], "--problem"),
        ([*problem(), "--fuzz", "1"], "one of them"),
        (["--seed", "4"], "--seed"),
        (["--call", FMHA], "--call"),
        *(
            (problem(**{name: value}), f"fuzz: --problem: {name}={value}: must be ")
            for name, value in NONSENSE.items()
        ),
        (problem(qo_lens="1000000", kv_lens="1000"), "must be at most"),
        (problem(kv_lens="1000000", head_dim="512"), "must be at most"),
        (problem(qo_lens=MANY, kv_lens=MANY, page_size="65536"), "must be at most"),
    ],
    ids=lambda part: str(part)[:60],
)
def test_refusals(capsys, arguments, message):
    assert command.main(["--backend", "cpu", *arguments]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert message in said.err


def test_every_random_problem_can_be_spelled_out():
    """The limits are for what nobody draws."""
    limits = Limits(700, 2e7, (torch.bfloat16, torch.float32))
    for index in range(300):
        drawn = problems.draw(5, index, limits)
        assert problems.parse(drawn.text) == drawn


TESTS = pathlib.Path(__file__).parents[1]


@pytest.mark.parametrize("started", [[str(TESTS / "fuzz")], ["-m", "fuzz"]], ids=["folder", "-m"])
def test_a_process_of_its_own(tmp_path, started):
    """Starts in any directory, even with another `problems` module in it."""
    (tmp_path / "problems.py").write_text("raise AssertionError")
    path = os.pathsep.join(filter(None, [str(TESTS), os.environ.get("PYTHONPATH")]))
    done = subprocess.run(
        [sys.executable, *started, "--backend", "cpu", "--fuzz", "1"],
        env={**os.environ, "PYTHONPATH": path} if "-m" in started else None,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("all good\n")
