"""Random problems with a fixed seed, and the tools that draw, write down and shrink them."""

import dataclasses
import enum

import pytest
import torch
from fuzz import shrinking, wrapper_trial
from fuzz.problems import Also, Brought, Call, Entry, Problem, Scratch, draw, parse
from fuzz.random_cases import Limits
from preflash.testing import Case, KvForm, MaskKind, Position, Sinks

SEED = 20261121
LIMITS = Limits(700, 1e7, (torch.float16, torch.bfloat16, torch.float32))
DRAWN = [draw(SEED, index, LIMITS) for index in range(300)]


@pytest.mark.parametrize("first", range(0, 300, 50))
def test_random_problems(first):
    wrong = []
    for problem in DRAWN[first : first + 50]:
        verdict = wrapper_trial.examine(problem, backend="cpu")
        wrong += [f"{problem.text}: {failure}" for failure in verdict.failures]
        assert not verdict.not_compiled
    assert not wrong, "\n".join(wrong)


def test_the_same_seed_is_the_same_problems():
    assert [draw(SEED, index, LIMITS) for index in range(20)] == DRAWN[:20]
    assert [draw(SEED + 1, index, LIMITS) for index in range(20)] != DRAWN[:20]


def test_backends_differ_in_what_they_serve_alone():
    few = Limits(LIMITS.longest, LIMITS.work, (torch.bfloat16,), fp8=False, rope=False)
    own = ("dtype", "kv_dtype", "o_dtype", "head_scales", "position", "rope_scale", "rope_theta")
    for index, problem in enumerate(DRAWN):
        other = draw(SEED, index, few)
        assert other.case.dtype_kv is other.case.dtype_o is torch.bfloat16
        assert other.case.position is not Position.ROPE
        case = dataclasses.replace(
            other.case, **{name: getattr(problem.case, name) for name in own}
        )
        own_of_call = ("graph", "skip_factor")  # not of RoPE, nor of fp8
        call = dataclasses.replace(
            other.call, **{name: getattr(problem.call, name) for name in own_of_call}
        )
        assert (case, call) == (problem.case, problem.call)


def test_problems_stay_within_their_limits():
    for problem in DRAWN:
        case = problem.case
        pairs = sum(a * b for a, b in zip(case.qo_lens, case.kv_lens, strict=True))
        assert max(case.qo_lens + case.kv_lens) <= LIMITS.longest
        work = pairs * case.num_qo_heads * (case.head_dim + case.dim_vo)
        assert work <= 10 * LIMITS.work


def test_every_axis_is_drawn():
    many = [draw(SEED, index, LIMITS) for index in range(4000)]
    parts = [(p, p.case, p.call) for p in many]
    for which, part in enumerate((Problem, Case, Call)):
        for field in dataclasses.fields(part):
            values = [getattr(group[which], field.name) for group in parts]
            if isinstance(values[0], enum.Enum):
                assert set(values) == set(type(values[0])), field.name
            elif isinstance(values[0], (bool, str)) and field.name != "name":
                assert len(set(values)) == 2, field.name
    made = [p.case for p in many]
    e4m3, e5m2 = torch.float8_e4m3fn, torch.float8_e5m2
    assert {case.dtype for case in made} == {*LIMITS.dtypes, e4m3}
    pairs = {(case.dtype, case.kv_dtype) for case in made}
    assert pairs >= {(q, kv) for q in LIMITS.dtypes for kv in (None, e4m3, e5m2)}
    assert {case.o_dtype for case in made} >= {None, torch.float16, torch.bfloat16, e4m3}
    for name, values in {
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
        assert parse(problem.text) == problem
        # A line of a shell, less its quotes.
        assert not set(problem.text) & set("\n'\"\\$")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("qo_lens=1 kv_lens=2,3", "qo_lens"),
        ("qo_lens=1", "kv_lens"),
        ("qo_lens=1 kv_lens=2 colour=red", "colour"),
        ("qo_lens=1 kv_lens=2 mask=round", "mask=round"),
        ("qo_lens=1 kv_lens=2 head_dim=wide", "head_dim=wide"),
        ("qo_lens=1 kv_lens=2 return_lse=1", "return_lse=1"),
        ("qo_lens=1 kv_lens=2 causal", "field=value"),
        ("qo_lens=1 kv_lens=2 qo_lens=1", "once"),
        ("qo_lens=1,1 kv_lens=2,2 entry=single", "one ragged request"),
        ("qo_lens=1 kv_lens=2 also=alone", "split policy"),
        ("qo_lens=1 kv_lens=2 head_dim=8 kv_dtype=e5m2", "multiples of 16 bytes"),
        ("qo_lens=1 kv_lens=2 head_scales=True", "for fp8"),
        ("qo_lens=1 kv_lens=2 o_dtype=e4m3", "q's dtype"),
        ("qo_lens=1 kv_lens=2 rope_theta=3.0", "RoPE"),
        ("qo_lens=1 kv_lens=2 magnitude=neg position=ROPE_LLAMA", "exact"),
    ],
)
def test_text_of_no_problem_is_refused(text, message):
    with pytest.raises(ValueError, match=message):
        parse(text)


def test_a_problem_may_have_no_keys_and_no_rows():
    for text in ("qo_lens=0 kv_lens=0", "qo_lens=3 kv_lens=0 page_size=3", "qo_lens=0 kv_lens=9"):
        assert wrapper_trial.examine(parse(text), backend="cpu").failures == []


BUSY = Problem(
    Case(
        *("problem", (30, 4, 0, 200), (90, 4, 7, 200), 32, 2, 128),
        **{"page_size": 16, "layout": "HND", "form": KvForm.PADDED, "mask": MaskKind.CAUSAL},
        **{"window_left": 17, "soft_cap": 30.0, "sinks": Sinks.MIXED},
    ),
    Call(out=Brought.STRIDED, lse_base="ln", v_scale=2.0, scratch=Scratch.HALF),
    Also.REPEAT,
    seed=5,
)


def test_shrinking_ends_at_what_matters():
    def fails(problem):
        case = problem.case
        return case.window_left >= 0 and max(case.kv_lens) > 40 and problem.call.lse_base == "ln"

    small = shrinking.shrink(BUSY, fails)
    assert fails(small)
    assert small == shrinking.shrink(BUSY, fails)
    case = dataclasses.replace(
        Case("problem", (0,), (41,), 1, 1, 8, dtype=BUSY.case.dtype), window_left=17
    )
    assert small == Problem(case, Call(lse_base="ln"), seed=5)


def test_shrinking_keeps_what_belongs_together():
    """A candidate that is no problem is passed over: requests alone need a split policy."""
    problem = dataclasses.replace(
        BUSY,
        case=dataclasses.replace(BUSY.case, disable_split_kv=True),
        call=Call(entry=Entry.BATCH),
        also=Also.ALONE,
    )
    small = shrinking.shrink(problem, lambda other: other.also is Also.ALONE)
    assert small.case.disable_split_kv
    assert small.case.qo_lens == (0,)


def test_no_more_tries_than_allowed(monkeypatch):
    monkeypatch.setattr(shrinking, "_TRIES", 7)
    seen = []
    assert shrinking.shrink(BUSY, lambda other: seen.append(other)) == BUSY
    assert len(seen) == 7
