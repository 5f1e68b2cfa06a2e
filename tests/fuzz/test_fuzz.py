"""The fuzzer notices faults of the wrappers and of every `--call NAME`: each is put between the
library and the fuzzer, and the printed command finds it again, and nothing once it is gone."""

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

from . import calls, command, problems, shrinking
from .guarded import memory_of
from .wrapper_trial import NEUTRAL, Verdict

# A fault is fault(honest, *args, **options), in the place of the function `honest`.


def changed(name, change):
    """Makes a fault that takes another value of an option: change, or change(value)."""

    def fault(honest, *args, **options):
        if name in options:
            options[name] = change(options[name]) if callable(change) else change
        return honest(*args, **options)

    return fault


def unless_given(name, value):
    """Makes a fault that takes a value of an option, except where the fuzzer overrides it, as with
    values that have to be refused."""
    return lambda honest, *args, **options: honest(*args, **{name: value, **options})


def after(spoil):
    """Makes a fault that spoils what the function returned."""

    def fault(honest, *args, **options):
        returned = honest(*args, **options)
        spoil(returned, *args, **options)
        return returned

    return fault


def raising(honest, *args, **options):
    raise RuntimeError("launch refused")


def out_of(returned) -> torch.Tensor:
    return returned[0] if isinstance(returned, tuple) else returned


def halve(returned, *args, **options):
    out = out_of(returned)
    out.copy_(out.float() * 0.5)  # 8-bit numbers cannot be multiplied


# --- faults of runner.run(wrapper, inputs, **options) and of runner.plan() ------------


def own(t: torch.Tensor, inputs, tokens: int = 0) -> torch.Tensor:
    """Returns the rows of requests; others are padding. tokens: the dimension of rows."""
    begin, end = inputs.qo_indptr[[0, -1]].tolist()
    return t.narrow(tokens, begin, end - begin)


def wrong_number(returned, wrapper, inputs, **options):
    last = own(out_of(returned), inputs)[-1:, -1:, -1:]
    last.copy_(last.float() + 0.25)  # 8-bit numbers cannot be added


def leaked_nan(returned, wrapper, inputs, **options):
    """Leaks NaN as if a page's unused slots were multiplied by a weight of zero."""
    if inputs.case.page_size > 1 and any(n % inputs.case.page_size for n in inputs.case.kv_lens):
        last = own(out_of(returned), inputs)[-1:]
        last.copy_(last.float() + 0.0 * inputs.k.float().min())


def has_garbage(inputs) -> bool:
    return bool(own(inputs.q, inputs).isnan().any())


def flip_last_bit(returned, inputs, options):
    """Flips the last bit of one LSE, whose bound is far wider than that."""
    if isinstance(returned, tuple):
        lse = own(returned[1], inputs, tokens=int(options.get("lse_layout") == "HN"))
        for place in lse.isfinite().nonzero()[:1].tolist():
            lse.view(torch.int32)[tuple(place)] ^= 1


RUNS = itertools.count()


def another_bit_every_time(returned, wrapper, inputs, **options):
    if next(RUNS) % 2 == 0:
        flip_last_bit(returned, inputs, options)


def bits_by_company(returned, wrapper, inputs, **options):
    if inputs.case.batch_size > 1 and not has_garbage(inputs):
        flip_last_bit(returned, inputs, options)


def bits_by_rows(returned, wrapper, inputs, **options):
    if own(inputs.q, inputs).shape[0] == 1:
        flip_last_bit(returned, inputs, options)


def contagion(returned, wrapper, inputs, **options):
    if has_garbage(inputs):
        out_of(returned).fill_(torch.nan)


def spill(returned, wrapper, inputs, out=None, **options):
    if out is not None and out._base is not None:
        out._base[-1] = 0


def written_padding(returned, wrapper, inputs, **options):
    """Writes the first row of q's, which is nobody's if it is garbage."""
    if bool(inputs.q[:1].isnan().any()):
        out_of(returned)[:1] = 0


def written_input(returned, wrapper, inputs, **options):
    memory_of(inputs.k)[0] ^= 1


def workspace_spill(returned, wrapper, inputs, **options):
    wrapper._plan.workspace.float_tensor._base[-1] = 0


def refused_nothing(honest, wrapper, inputs, **options):
    if options.get("lse_layout") == "NHD":
        options |= {"lse_layout": "NH", "lse": None}
    return honest(wrapper, inputs, **options)


def planned_once(honest, wrapper, inputs, **overrides):
    if wrapper.variant is None:
        honest(wrapper, inputs, **overrides)


# --- faults of the functions and wrappers of `--call` ----------------------------------


def last_row(returned, out, **arguments):
    if out is not None:
        out[-1:] = 0.0


def finite_lse(returned, **arguments):
    if returned[1] is not None:
        returned[1].masked_fill_(returned[1] == -torch.inf, 0.0)


def copied_lse(honest, **arguments):
    out, lse = honest(**arguments)
    return out, None if lse is None else lse.clone()


def written_queries(returned, wrapper, q_p, *operands, **options):
    q_p.untyped_storage()[:1] = 7


def spilled(returned, key, value, owners, positions, cache, **table):
    memory_of(cache if isinstance(cache, torch.Tensor) else cache[0])[-1] ^= 1


def without_last(honest, key, value, owners, positions, cache, **table):
    owners = torch.where((owners >= 0) & (owners == owners.max()), -1, owners)
    honest(key, value, owners, positions, cache, **table)


FMHA, CUDNN = "trtllm_fmha_v2_prefill", "cudnn_batch_prefill_with_kv_cache"
APPEND = "append_paged_kv_cache"
DECODE = [preflash.BatchDecodeWithPagedKVCacheWrapper]
PODS = [preflash.PODWithPagedKVCacheWrapper, preflash.BatchPODWithPagedKVCacheWrapper]
# A search by its arguments: the owners of the function, the number of problems, how many operations
# each may take, and the seed.
SEARCHES = {
    "": ([runner], 250, 1e6, "9"),
    f"--call {FMHA}": ([preflash], 9, 3e6, "8:40"),
    f"--call {CUDNN}": ([preflash], 100, 1e6, "3"),
    f"--call {APPEND}": ([preflash], 20, 3e6, "3"),
    "--call decode": (DECODE, 150, 2e6, "3"),
    "--call pod": (PODS, 100, 2e6, "3"),
}
PLAN_OPTIONS = NEUTRAL | {"custom_mask": None, "packed_custom_mask": None}
WRITTEN = "elements around it were written"
# Arguments of the search, the name of the function, a fault of it, and the failure. Options are
# dropped where they are right: what must be refused still is, so that the numbers show the fault.
FAULTS = [
    ("", "run", after(wrong_number), "outside their bound"),
    ("", "run", after(leaked_nan), "wrong kind"),
    ("", "run", unless_given("sinks", None), "lse:|out:"),
    ("", "run", unless_given("scale_q", None), "lse:|out:"),
    ("", "run", unless_given("scale_k", None), "lse:|out:"),
    ("", "run", unless_given("scale_v", None), "out:"),
    ("", "run", changed("v_scale", lambda x: x if x == "loud" else None), "out:"),
    ("", "run", changed("lse_base", lambda x: "log2" if x == "ln" else x), "lse:"),
    ("", "run", changed("window_left", lambda x: min(x, -1)), "out:|lse:"),
    ("", "run", after(spill), f"out: .* {WRITTEN}"),
    ("", "run", after(written_padding), f"out: .* {WRITTEN}"),
    ("", "run", after(written_input), "k, an input, was written"),
    ("", "run", after(workspace_spill), f"workspace: .* {WRITTEN}"),
    ("", "run", raising, "RuntimeError: launch refused"),
    ("--also repeat", "run", after(another_bit_every_time), "other bits"),
    ("--also alone", "run", after(bits_by_company), "without the rest of its batch"),
    ("--also invariant", "run", after(bits_by_rows), "rows .* of request .* have other bits"),
    ("--also spoilt", "run", after(contagion), "has other bits with garbage in request"),
    ("--also refusals", "run", refused_nothing, "'NHD' was accepted"),
    *(
        ("", "plan", unless_given(name, PLAN_OPTIONS[name]), "out:|lse:|pos_encoding_mode")
        for name in PLAN_OPTIONS
    ),
    ("--also replan", "plan", planned_once, "out:|lse:"),
    (f"--call {FMHA}", FMHA, after(halve), "outside their bound"),
    (f"--call {CUDNN}", CUDNN, after(halve), f"outside their bound|{WRITTEN}"),
    (f"--call {CUDNN}", CUDNN, changed("lse_base", "ln"), "lse: .* outside"),
    (f"--call {CUDNN}", CUDNN, changed("causal", False), "(out|lse): .* outside"),
    (f"--call {CUDNN}", CUDNN, changed("k_scale", None), "outside their bound"),
    (f"--call {CUDNN}", CUDNN, after(last_row), f"out: .* {WRITTEN}"),
    (f"--call {CUDNN}", CUDNN, after(finite_lse), "are not -inf"),
    (f"--call {CUDNN}", CUDNN, copied_lse, "lse is not the tensor that was given"),
    *(
        ("--call pod", "run", changed(f"{name}_p", PLAN_OPTIONS[name]), "prefill: (out|lse):")
        for name in ("causal", "custom_mask", "packed_custom_mask", "sm_scale", "window_left")
    ),
    ("--call pod", "run", changed("k_scale", None), "decode: (out|lse):"),
    ("--call pod", "run", changed("v_scale", None), "decode: out:"),
    ("--call pod", "run", changed("lse_base", "log2"), "lse:"),
    (
        "--call pod",
        "run",
        after(lambda returned, *args, **options: halve(returned[1])),
        "decode: out:",
    ),
    ("--call pod", "run", after(written_queries), "prefill: q, an input, was written"),
    *(
        ("--call decode", "plan", changed(name, PLAN_OPTIONS[name]), "out:|lse:")
        for name in ("window_left", "logits_soft_cap", "sm_scale")
    ),
    ("--call decode", "run", changed("sinks", None), "out:|lse:"),
    ("--call decode", "run", changed("k_scale", None), "out:|lse:"),
    (f"--call {APPEND}", APPEND, after(spilled), "bytes differ from a loop's"),
    (f"--call {APPEND}", APPEND, without_last, "bytes differ from a loop's"),
]


@pytest.fixture
def find(monkeypatch, capsys):
    """Returns a function that finds a fault, and again with the printed commands, which find
    nothing without it."""

    def find(arguments, name, fault, message) -> list[list[str]]:
        owners, count, work, seed = SEARCHES.get(arguments, SEARCHES[""])
        asked = ["--backend", "cpu", *arguments.split()]
        monkeypatch.setattr(command, "_MOST_FAILURES", 1)
        monkeypatch.setattr(calls, "_WORK", work)
        with monkeypatch.context() as patch:
            for owner in owners:
                honest = getattr(owner, name)

                def faulty(*args, honest=honest, **options):
                    return fault(honest, *args, **options)

                patch.setattr(owner, name, faulty)
            assert command.main([*asked, "--fuzz", str(count), "--seed", seed]) == 1
            printed = capsys.readouterr().out
            assert re.search(message, printed), printed
            lines = re.findall(r"^(?:FAILED|smaller:) python tests/fuzz (.*)$", printed, re.M)
            found = [shlex.split(line) for line in lines]
            for again in found:
                assert command.main(again) == 1, again
        for again in found:
            assert command.main(again) == 0, again
        assert found[0][: len(asked)] == asked
        return found

    return find


@pytest.mark.parametrize(("arguments", "name", "fault", "message"), FAULTS)
def test_a_fault_is_found(monkeypatch, find, arguments, name, fault, message):
    monkeypatch.setattr(shrinking, "_TRIES", 0)
    assert len(find(arguments, name, fault, message)) == 1


def test_a_fault_is_found_in_a_smaller_problem(find):
    _, smaller = find("", "run", after(wrong_number), "outside their bound")
    problem = problems.parse(smaller[-1])
    case = problem.case
    assert (case.qo_lens, case.num_qo_heads, case.head_dim) == ((1,), 1, 8)
    assert len(problem.text) < 100


@pytest.mark.parametrize("arguments", SEARCHES)
def test_problems_that_pass(monkeypatch, capsys, arguments):
    monkeypatch.setattr(calls, "_WORK", 3e6)
    asked = ["--backend", "cpu", *arguments.split(), "--fuzz", "60", "--seed", "8:40"]
    assert command.main(asked) == 0
    out = capsys.readouterr().out
    assert "cpu on cpu: 60 passed, 0 failed" in out
    assert "all good" in out


def test_problems_that_no_kernel_serves_are_no_success(monkeypatch, capsys):
    def examine(problem, **place):
        return Verdict(not_compiled="head_dim 512 is not compiled")

    monkeypatch.setitem(calls.CALLS, calls.WRAPPERS, (problems.draw, examine))
    assert command.main(["--backend", "cpu", "--fuzz", "3"]) == 2
    assert "head_dim 512 is not compiled" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--fuzz", "0"], "--fuzz 0"),
        (["--fuzz", "1", "--seed", "one"], "--seed one"),
        (["--fuzz", "1", "--seed", "1:-2"], "--seed 1:-2"),
        ([], "one of them"),
        (["--problem", "qo_lens=1"], "--problem"),
        (["--problem", "qo_lens=3 kv_lens=5", "--fuzz", "1"], "one of them"),
        (["--problem", "qo_lens=3 kv_lens=5", "--seed", "4"], "--seed"),
        (["--problem", "qo_lens=3 kv_lens=5", "--call", FMHA], "--call"),
        (["--fuzz", "1", "--call", FMHA, "--also", "repeat"], "--also repeat"),
    ],
)
def test_refusals(capsys, arguments, message):
    assert command.main(["--backend", "cpu", *arguments]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert message in said.err


def test_a_process_of_its_own(tmp_path):
    """Starts in any directory, even with another `problems` module in it."""
    (tmp_path / "problems.py").write_text("raise AssertionError")
    fuzz = pathlib.Path(__file__).parent
    started = [sys.executable, str(fuzz), "--backend", "cpu", "--fuzz", "1", "--also", "repeat"]
    done = subprocess.run(
        started, env=os.environ, cwd=tmp_path, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("all good\n")
