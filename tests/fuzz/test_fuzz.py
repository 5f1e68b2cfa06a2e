"""The fuzzer notices faults of the wrappers and of every `--call NAME`: each is put between the
library and the fuzzer, and the printed command finds it again, and nothing once it is gone."""

import dataclasses
import enum
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
from preflash.testing import Case, KvForm, MaskKind, Position, Sinks, runner

from . import command, problems, shrinking
from .guarded import memory_of
from .problems import Also, Brought, Call, Problem
from .random_cases import Limits
from .wrapper_trial import NEUTRAL, Verdict, examine

# A fault is fault(honest, *args, **options), in the place of the function `honest`.


def changed(name, change):
    """Makes a fault that takes another value of an option: change, or change(value)."""

    def fault(honest, *args, **options):
        if name in options:
            options[name] = change(options[name]) if callable(change) else change
        return honest(*args, **options)

    return fault


def given(name, value):
    """Makes a fault that takes this value of an option, whatever the inputs have."""
    return lambda honest, *args, **options: honest(*args, **options | {name: value})


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


def halve_decode(returned, *args, **options):
    halve(returned[1])


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


def flips_last_bit(condition):
    """Makes a fault that flips the last bit of one LSE, whose bound is far wider than that."""

    def spoil(returned, wrapper, inputs, **options):
        if isinstance(returned, tuple) and condition(inputs):
            lse = own(returned[1], inputs, tokens=int(options.get("lse_layout") == "HN"))
            for place in lse.isfinite().nonzero()[:1].tolist():
                lse.view(torch.int32)[tuple(place)] ^= 1

    return after(spoil)


RUNS = itertools.count()


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


FMHA, CUDNN = "--call trtllm_fmha_v2_prefill", "--call cudnn_batch_prefill_with_kv_cache"
POD = "--call pod"
PODS = [preflash.PODWithPagedKVCacheWrapper, preflash.BatchPODWithPagedKVCacheWrapper]
# A search by its arguments: the owners of the function, the number of problems, how many operations
# each may take, and the seed.
SEARCHES = {
    "": ([runner], 250, 1e6, "9"),
    FMHA: ([preflash], 9, 3e6, "8:40"),
    CUDNN: ([preflash], 100, 1e6, "3"),
    POD: (PODS, 100, 2e6, "3"),
}
NEUTRAL_PLAN = NEUTRAL | {"custom_mask": None, "packed_custom_mask": None}
WRITTEN, OUTSIDE, EITHER = "elements around it were written", "outside their bound", "out:|lse:"
# Arguments of the search, the name of the function, a fault of it, and the failure.
FAULTS = [
    ("", "run", after(wrong_number), OUTSIDE),
    ("", "run", after(leaked_nan), "wrong kind"),
    *(("", "run", given(name, None), EITHER) for name in ("sinks", "scale_q", "scale_k")),
    *(("", "run", given(name, None), "out:") for name in ("scale_v", "v_scale")),
    ("", "run", changed("lse_base", lambda x: "log2" if x == "ln" else x), "lse:"),
    ("", "run", changed("window_left", lambda x: min(x, -1)), EITHER),
    ("", "run", after(spill), f"out: .* {WRITTEN}"),
    ("", "run", after(written_padding), f"out: .* {WRITTEN}"),
    ("", "run", after(written_input), "k, an input, was written"),
    ("", "run", after(workspace_spill), f"workspace: .* {WRITTEN}"),
    ("", "run", raising, "RuntimeError: launch refused"),
    ("--also repeat", "run", flips_last_bit(lambda _: next(RUNS) % 2 == 0), "other bits"),
    ("--also alone", "run", flips_last_bit(lambda x: x.case.batch_size > 1 and not has_garbage(x)),
     "without the rest of its batch"),
    ("--also invariant", "run", flips_last_bit(lambda x: own(x.q, x).shape[0] == 1),
     "rows .* of request .* have other bits"),
    ("--also spoilt", "run", after(contagion), "has other bits with garbage in request"),
    *(("", "plan", given(name, neutral), f"{EITHER}|pos_encoding_mode")
      for name, neutral in NEUTRAL_PLAN.items()),
    ("--also replan", "plan", planned_once, f"{EITHER}|q (is|has) "),
    (FMHA, FMHA, after(halve), OUTSIDE),
    (CUDNN, CUDNN, after(halve), f"{OUTSIDE}|{WRITTEN}"),
    (CUDNN, CUDNN, changed("lse_base", "ln"), "lse: .* outside"),
    (CUDNN, CUDNN, changed("causal", False), "(out|lse): .* outside"),
    (CUDNN, CUDNN, changed("k_scale", None), OUTSIDE),
    (CUDNN, CUDNN, after(last_row), f"out: .* {WRITTEN}"),
    (CUDNN, CUDNN, after(finite_lse), "are not -inf"),
    (CUDNN, CUDNN, copied_lse, "lse is not the tensor that was given"),
    *((POD, "run", changed(f"{name}_p", NEUTRAL_PLAN[name]), "prefill: (out|lse):")
      for name in ("causal", "custom_mask", "packed_custom_mask", "sm_scale", "window_left")),
    (POD, "run", changed("k_scale", None), "decode: (out|lse):"),
    (POD, "run", changed("v_scale", None), "decode: out:"),
    (POD, "run", changed("lse_base", "log2"), "lse:"),
    (POD, "run", after(halve_decode), "decode: out:"),
]  # fmt: skip


@pytest.fixture
def find(monkeypatch, capsys):
    """Returns a function that finds a fault, also by the printed commands, and none without it."""

    def find(arguments, name, fault, message, tries=0) -> list[list[str]]:
        owners, count, work, seed = SEARCHES.get(arguments, SEARCHES[""])
        asked = ["--backend", "cpu", *arguments.split()]
        effort = command.Effort(work, failures=1, tries=tries)
        with monkeypatch.context() as patch:
            for owner in owners:
                honest = getattr(owner, name.removeprefix("--call "))

                def faulty(*args, honest=honest, **options):
                    return fault(honest, *args, **options)

                patch.setattr(owner, honest.__name__, faulty)
            assert command.main([*asked, "--fuzz", str(count), "--seed", seed], effort) == 1
            printed = capsys.readouterr().out
            assert re.search(message, printed), printed
            lines = re.findall(r"^(?:FAILED|smaller:) python tests/fuzz (.*)$", printed, re.M)
            found = [shlex.split(line) for line in lines]
            for again in found:
                assert command.main(again, effort) == 1, again
        for again in found:
            assert command.main(again, effort) == 0, again
        assert found[0][: len(asked)] == asked
        return found

    return find


@pytest.mark.parametrize(("arguments", "name", "fault", "message"), FAULTS)
def test_a_fault_is_found(find, arguments, name, fault, message):
    assert len(find(arguments, name, fault, message)) == 1


def test_a_fault_is_found_in_a_smaller_problem(find):
    _, smaller = find("", "run", after(wrong_number), OUTSIDE, tries=250)
    problem = problems.parse(smaller[-1])
    case = problem.case
    assert (case.qo_lens, case.num_qo_heads, case.head_dim) == ((1,), 1, 8)
    assert len(problem.text) < 100


def test_problems_that_no_kernel_serves_are_no_success(monkeypatch, capsys):
    def examine(problem, **place):
        return Verdict(not_compiled="head_dim 512 is not compiled")

    monkeypatch.setitem(command.CALLS, command.WRAPPERS, (problems.draw, examine))
    assert command.main(["--backend", "cpu", "--fuzz", "3"]) == 2
    assert "head_dim 512 is not compiled" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--fuzz 0", "--fuzz 0"),
        ("--fuzz 1 --seed one", "--seed one"),
        ("--fuzz 1 --seed 1:-2", "--seed 1:-2"),
        ("", "one of them"),
        ("--problem qo_lens=1", "--problem"),
        ("--problem 'qo_lens=3 kv_lens=5' --fuzz 1", "one of them"),
        ("--problem 'qo_lens=3 kv_lens=5' --seed 4", "--seed"),
        (f"--problem 'qo_lens=3 kv_lens=5' {FMHA}", "--call"),
        (f"--fuzz 1 {FMHA} --also repeat", "--also repeat"),
    ],
)
def test_refusals(capsys, arguments, message):
    assert command.main(["--backend", "cpu", *shlex.split(arguments)]) == 2
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


# --- the tools that draw, spell and shrink problems -------------------------------------

SEED = 20261121
LIMITS = Limits(700, 1e7, (torch.float16, torch.bfloat16, torch.float32))
DRAWN = [problems.draw(SEED, index, LIMITS) for index in range(300)]


def test_a_seed_names_its_problems():
    first, others = (
        [problems.draw(seed, i, LIMITS) for i in range(20)] for seed in (SEED, SEED + 1)
    )
    assert first == DRAWN[:20] != others


def test_problems_stay_within_their_limits():
    few = Limits(LIMITS.longest, LIMITS.work, (torch.bfloat16,), fp8=False, rope=False)
    for index, problem in enumerate(DRAWN):
        case = problem.case
        pairs = sum(a * b for a, b in zip(case.qo_lens, case.kv_lens, strict=True))
        assert max(case.qo_lens + case.kv_lens) <= LIMITS.longest
        work = pairs * case.num_qo_heads * (case.head_dim + case.dim_vo)
        assert work <= 10 * LIMITS.work
        other = problems.draw(SEED, index, few).case
        assert other.dtype_kv is other.dtype_o is torch.bfloat16
        assert other.position is not Position.ROPE
        assert (other.qo_lens, other.mask, other.form) == (case.qo_lens, case.mask, case.form)


def test_every_axis_is_drawn():
    many = [problems.draw(SEED, index, LIMITS) for index in range(4000)]
    for part in (lambda p: p, lambda p: p.case, lambda p: p.call):
        for field in dataclasses.fields(part(many[0])):
            values = {getattr(part(problem), field.name) for problem in many}
            first = next(iter(values))
            if isinstance(first, enum.Enum):
                assert values == set(type(first)), field.name
            elif isinstance(first, (bool, str)) and field.name != "name":
                assert len(values) == 2, field.name
    made = [p.case for p in many]
    e4m3, e5m2 = torch.float8_e4m3fn, torch.float8_e5m2
    assert {case.dtype for case in made} == {*LIMITS.dtypes, e4m3}
    pairs = {(case.dtype, case.kv_dtype) for case in made}
    assert pairs >= {(q, kv) for q in LIMITS.dtypes for kv in (None, e4m3, e5m2)}
    for name, values in {
        "o_dtype": {None, torch.float16, torch.bfloat16, e4m3},
        "rope_scale": {None, 0.25, 8.0},
        "rope_theta": {None, 1.0, 5e5},
        "group_size": {1, 3, 7, 16, 128},
        "head_dim": set(range(8, 257, 8)),
        "page_size": {0, 1, 3, 7, 16, 64},
        "sm_scale": {None, 0.0},
        "soft_cap": {None, 0.0},
        "fixed_split_size": {None, 1, 64},
    }.items():
        assert {getattr(case, name) for case in made} >= values, name
    assert (192, 128) in {(case.head_dim, case.dim_vo) for case in made}
    assert min(case.sm_scale or 0.0 for case in made) < 0
    requests = [pair for case in made for pair in zip(case.qo_lens, case.kv_lens, strict=True)]
    assert any(qo == 0 < kv for qo, kv in requests)
    assert any(kv == 0 < qo for qo, kv in requests)
    assert any(qo > kv > 0 for qo, kv in requests)


def test_text_is_the_problem():
    for problem in DRAWN:
        assert problems.parse(problem.text) == problem
        # A line of a shell, less its quotes.
        assert not set(problem.text) & set("\n'\"\\$")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("kv_lens=2,3", "qo_lens"),
        ("colour=red", "colour"),
        ("mask=round", "mask=round"),
        ("head_dim=wide", "head_dim=wide"),
        ("return_lse=1", "return_lse=1"),
        ("causal", "field=value"),
        ("padding=1 padding=1", "once"),
        ("qo_lens=1,1 kv_lens=2,2 entry=single", "one ragged request"),
        ("entry=forward lse_base=ln", "options of run"),
        ("also=alone", "also=alone"),
        ("head_dim=8 kv_dtype=e5m2", "multiples of 16 bytes"),
        ("head_scales=True", "for fp8"),
        ("o_dtype=e4m3", "q's dtype"),
        ("rope_theta=3.0", "RoPE"),
        ("magnitude=neg position=ROPE_LLAMA", "exact"),
    ],
)
def test_text_of_no_problem_is_refused(text, message):
    lengths = "".join(f"{name} " for name in ("qo_lens=1", "kv_lens=2") if name[:7] not in text)
    with pytest.raises(ValueError, match=message):
        problems.parse(lengths + text)


@pytest.mark.parametrize("lengths", ["0 kv_lens=0", "3 kv_lens=0 page_size=3", "0 kv_lens=9"])
def test_a_problem_may_have_no_keys_and_no_rows(lengths):
    verdict = examine(problems.parse(f"qo_lens={lengths}"), backend="cpu")
    assert verdict.failures == []


def test_shrinking_ends_at_what_matters():
    """A candidate that cannot be, as requests alone without a split policy, is passed over."""
    busy = Case(
        *("problem", (30, 4, 0, 200), (90, 4, 7, 200), 32, 2, 128),
        **{"page_size": 16, "layout": "HND", "form": KvForm.PADDED, "mask": MaskKind.CAUSAL},
        **{"window_left": 17, "soft_cap": 30.0, "sinks": Sinks.MIXED, "disable_split_kv": True},
    )
    problem = Problem(busy, Call(out=Brought.STRIDED, lse_base="ln", v_scale=2.0), Also.ALONE, 5)
    small = Case("problem", (0,), (41,), 1, 1, 8, dtype=busy.dtype, window_left=17)

    def fails(problem):
        case = problem.case
        return case.window_left >= 0 and max(case.kv_lens) > 40 and problem.call.lse_base == "ln"

    assert shrinking.shrink(problem, fails) == Problem(small, Call(lse_base="ln"), seed=5)
    tried = []  # where no candidate fails
    assert shrinking.shrink(problem, tried.append) == problem
    assert 7 < len(tried) < 1000
    alone = shrinking.shrink(problem, lambda other: other.also is Also.ALONE)
    assert (alone.case.disable_split_kv, alone.case.qo_lens) == (True, (0,))
