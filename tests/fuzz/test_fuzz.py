"""The fuzzer notices faults of the wrappers and of every `--call NAME`: each is put between the
library and the fuzzer, and the printed commands find it again, and nothing once it is gone."""

import functools
import itertools
import os
import pathlib
import re
import shlex
import subprocess
import sys

import preflash
import pytest
import torch
from preflash.testing import runner

from . import calls, command, problems, wrapper_trial
from .random_cases import Limits

HONEST_PLAN, HONEST_RUN = runner.plan, runner.run


def commands(printed: str) -> list[list[str]]:
    """Returns the arguments of every command that the fuzzer printed."""
    lines = re.findall(r"^(?:FAILED|smaller:) python tests/fuzz (.*)$", printed, re.MULTILINE)
    return [shlex.split(line) for line in lines]


def out_of(returned) -> torch.Tensor:
    return returned[0] if isinstance(returned, tuple) else returned


def own_rows(inputs) -> tuple[int, int]:
    """Returns the first token of the requests and their number; others are padding."""
    begin, end = inputs.qo_indptr[[0, -1]].tolist()
    return begin, end - begin


def last_row_of(returned, inputs) -> torch.Tensor:
    return out_of(returned).narrow(0, *own_rows(inputs))[-1:]


def flip_last_bit(returned, inputs, options) -> None:
    """Flips the last bit of one LSE, whose bound is far wider than that."""
    if isinstance(returned, tuple):
        tokens = 1 if options.get("lse_layout") == "HN" else 0
        lse = returned[1].narrow(tokens, *own_rows(inputs))
        for place in lse.isfinite().nonzero()[:1].tolist():
            lse.view(torch.int32)[tuple(place)] ^= 1


# --- faults of run() and plan() of the wrappers -------------------------------------


def after_run(spoil):
    """Makes a fault of run() that spoils what an honest one has returned."""

    def run(wrapper, inputs, **options):
        returned = HONEST_RUN(wrapper, inputs, **options)
        spoil(returned, inputs, options)
        return returned

    return run


def with_option(name, change):
    """Makes a fault of run() that takes another value of an option."""

    def run(wrapper, inputs, **options):
        if name in options:
            options[name] = change(options[name])
        return HONEST_RUN(wrapper, inputs, **options)

    return run


def without_operand(name):
    """Makes a fault of run() that drops a tensor, but not one that has to be refused."""
    return lambda wrapper, inputs, **options: HONEST_RUN(wrapper, inputs, **{name: None, **options})


def wrong_number(returned, inputs, options):
    last = last_row_of(returned, inputs)[:, -1:, -1:]
    last.copy_(last.float() + 0.25)  # 8-bit numbers cannot be added


def leaked_nan(returned, inputs, options):
    """Leaks NaN as if a page's unused slots were multiplied by a weight of zero."""
    if inputs.case.page_size > 1 and any(n % inputs.case.page_size for n in inputs.case.kv_lens):
        last = last_row_of(returned, inputs)
        last.copy_(last.float() + 0.0 * inputs.k.float().min())


RUNS = itertools.count()


def another_bit_every_time(returned, inputs, options):
    if next(RUNS) % 2 == 0:
        flip_last_bit(returned, inputs, options)


def bits_by_company(returned, inputs, options):
    if inputs.case.batch_size > 1:
        flip_last_bit(returned, inputs, options)


def contagion(returned, inputs, options):
    if bool(inputs.q.narrow(0, *own_rows(inputs)).isnan().any()):
        out_of(returned).fill_(torch.nan)


def spill(returned, inputs, options):
    if options.get("out") is not None and options["out"]._base is not None:
        options["out"]._base[-1] = 0


def written_padding(returned, inputs, options):
    """Writes the first row of q's, which is nobody's if it is garbage."""
    if bool(inputs.q[:1].isnan().any()):
        out_of(returned)[:1] = 0


def written_input(returned, inputs, options):
    inputs.k.untyped_storage()[0] ^= 1


def workspace_spill(wrapper, inputs, **options):
    wrapper._plan.workspace.float_tensor._base[-1] = 0
    return HONEST_RUN(wrapper, inputs, **options)


def refused_nothing(wrapper, inputs, **options):
    if options.get("lse_layout") == "NHD":
        options |= {"lse_layout": "NH", "lse": None}
    return HONEST_RUN(wrapper, inputs, **options)


def raising(wrapper, inputs, **options):
    raise RuntimeError("launch refused")


# Options are dropped where they are right: what must be refused still is, so that it is the numbers
# that show the fault.
RUN_FAULTS = {
    "wrong number": (after_run(wrong_number), "outside their bound"),
    "leaked nan": (after_run(leaked_nan), "wrong kind"),
    "no sinks": (without_operand("sinks"), "lse:|out:"),
    "no scale_q": (without_operand("scale_q"), "out:|lse:"),
    "no scale_k": (without_operand("scale_k"), "out:|lse:"),
    "no scale_v": (without_operand("scale_v"), "out:"),
    "no v_scale": (with_option("v_scale", lambda x: x if x == "loud" else None), "out:"),
    "no lse_base": (with_option("lse_base", lambda x: "log2" if x == "ln" else x), "lse:"),
    "no window of run": (with_option("window_left", lambda x: min(x, -1)), "out:|lse:"),
    "another bit every time": (after_run(another_bit_every_time), "other bits"),
    "bits by company": (after_run(bits_by_company), "without the rest of its batch"),
    "contagion": (after_run(contagion), "has other bits with garbage in request"),
    "spill": (after_run(spill), "out: .* elements around it were written"),
    "written padding": (after_run(written_padding), "out: .* elements around it were written"),
    "written input": (after_run(written_input), "k, an input, was written"),
    "workspace spill": (workspace_spill, "around the workspace"),
    "refused nothing": (refused_nothing, "'NHD' was accepted"),
    "raising": (raising, "RuntimeError: launch refused"),
}
# Options of plan(), and the values that leave them out.
PLAN_OPTIONS = {
    "causal": False,
    "window_left": -1,
    "logits_soft_cap": None,
    "pos_encoding_mode": "NONE",
    "rope_scale": None,
    "rope_theta": None,
    "sm_scale": None,
    "custom_mask": None,
    "packed_custom_mask": None,
}


def planned_once(wrapper, inputs, **overrides):
    if wrapper.variant is None:
        HONEST_PLAN(wrapper, inputs, **overrides)


@pytest.fixture
def finds_again(monkeypatch, capsys):
    """Returns a function that finds a fault, and again with the printed commands, which find
    nothing without it."""

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


@pytest.mark.parametrize("name", RUN_FAULTS)
def test_a_fault_of_run_is_found(finds_again, name):
    fault, message = RUN_FAULTS[name]
    finds_again([(runner, "run", fault)], message)


@pytest.mark.parametrize("option", PLAN_OPTIONS)
def test_an_option_that_plan_drops_is_found(finds_again, option):
    def plan(wrapper, inputs, **overrides):
        HONEST_PLAN(wrapper, inputs, **{option: PLAN_OPTIONS[option], **overrides})

    finds_again([(runner, "plan", plan)], "out:|lse:")


def test_a_plan_that_stays_is_found(finds_again):
    finds_again([(runner, "plan", planned_once)], "out:|lse:")


def test_a_wrong_number_is_shrunk(finds_again):
    fault = after_run(wrong_number)
    _, smaller = finds_again([(runner, "run", fault)], "outside their bound")
    problem = problems.parse(smaller[-1])
    assert problem.case.qo_lens == (1,)
    assert problem.case.num_qo_heads == 1
    assert problem.case.head_dim == 8
    assert len(problem.text) < 100


# --- faults of the functions and wrappers of `--call` -------------------------------

FMHA, CUDNN = "trtllm_fmha_v2_prefill", "cudnn_batch_prefill_with_kv_cache"
APPEND = "append_paged_kv_cache"
HONEST_FMHA = preflash.prefill.trtllm_fmha_v2_prefill
HONEST_CUDNN = preflash.prefill.cudnn_batch_prefill_with_kv_cache
HONEST_APPEND = preflash.page.append_paged_kv_cache


def scaled(out: torch.Tensor) -> torch.Tensor:
    return (out.float() * 0.5).to(out.dtype)  # 8-bit numbers cannot be multiplied


def halved_fmha(**arguments):
    result = HONEST_FMHA(**arguments)
    return (scaled(result[0]), result[1]) if isinstance(result, tuple) else scaled(result)


def cudnn(change_lse=lambda lse: lse, change_out=lambda out: out, **changed):
    """Makes a fault of cudnn_batch_prefill_with_kv_cache: other arguments or results."""

    def fault(**arguments):
        out, lse = HONEST_CUDNN(**{**arguments, **changed})
        return change_out(out), None if lse is None else change_lse(lse)

    return fault


def last_row(**arguments):
    returned = HONEST_CUDNN(**arguments)
    if arguments["out"] is not None:
        arguments["out"][-1:] = 0.0
    return returned


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
    return honest(*args, **options)[::-1]


def written_queries(honest, *args, **options):
    returned = honest(*args, **options)
    args[0].untyped_storage()[:1] = 7
    return returned


def written_padding_of_decode(honest, *args, **options):
    """Writes the last row of q's, which is nobody's if it is garbage."""
    returned = honest(*args, **options)
    if bool(args[-2][-1:].isnan().any()):
        out_of(returned[1])[-1:] = 0
    return returned


def of_pod(fault):
    """Puts the fault into either wrapper's run()."""
    for name in ("PODWithPagedKVCacheWrapper", "BatchPODWithPagedKVCacheWrapper"):
        made = getattr(preflash, name)

        def run(self, *args, honest=made.run, **options):
            return fault(functools.partial(honest, self), *args, **options)

        yield made, "run", run


def of_decode(name):
    """Drops an option of the decode wrapper."""
    made = preflash.BatchDecodeWithPagedKVCacheWrapper
    method = "run" if name in ("sinks", "k_scale") else "plan"
    honest, neutral = getattr(made, method), {name: -1 if name == "window_left" else None}
    return [(made, method, lambda self, *args, **options: honest(self, *args, **options | neutral))]


def spilled(key, value, owners, positions, cache, **table):
    HONEST_APPEND(key, value, owners, positions, cache, **table)
    first = cache if isinstance(cache, torch.Tensor) else cache[0]
    torch.empty(0, dtype=torch.uint8).set_(first.untyped_storage())[-1] ^= 1


def without_last(key, value, owners, positions, cache, **table):
    owners = torch.where((owners >= 0) & (owners == owners.max()), -1, owners)
    HONEST_APPEND(key, value, owners, positions, cache, **table)


CALL_FAULTS = [
    (FMHA, [(preflash, FMHA, halved_fmha)], "outside their bound"),
    *(
        (CUDNN, [(preflash, CUDNN, fault)], message)
        for fault, message in (
            (cudnn(change_out=scaled), "outside their bound"),
            (cudnn(lse_base="ln"), "lse: .* outside"),
            (cudnn(causal=False), "out: .* outside"),
            (cudnn(k_scale=None), "outside their bound"),
            (last_row, "rows that no request has are written"),
            (cudnn(lambda lse: lse.masked_fill_(lse == -torch.inf, 0.0)), "are not -inf"),
            (cudnn(torch.clone), "lse is not the tensor that was given"),
        )
    ),
    *(
        ("pod", [*of_pod(fault)], message)
        for fault, message in (
            *(
                (without(f"{name}_p", PLAN_OPTIONS[name]), "prefill: (out|lse):")
                for name in ("causal", "custom_mask", "packed_custom_mask", "sm_scale")
            ),
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
        (None, 5, "8:40"),
        (FMHA, 5, "8:40"),
        (CUDNN, 80, "21"),
        ("pod", 50, "21"),
        (APPEND, 60, "21"),
        ("decode", 80, "21"),
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
