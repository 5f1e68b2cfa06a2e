"""The tools that draw, spell and shrink random problems work."""

import dataclasses
import enum

import pytest
import torch
from fuzz import shrinking, wrapper_trial
from fuzz.problems import Also, Brought, Call, Problem, draw, parse
from fuzz.random_cases import Limits
from preflash.testing import Case, KvForm, MaskKind, Position, Sinks

SEED = 20261121
LIMITS = Limits(700, 1e7, (torch.float16, torch.bfloat16, torch.float32))
DRAWN = [draw(SEED, index, LIMITS) for index in range(300)]


def test_a_seed_names_its_problems():
    first, others = ([draw(seed, i, LIMITS) for i in range(20)] for seed in (SEED, SEED + 1))
    assert first == DRAWN[:20] != others


def test_problems_stay_within_their_limits():
    few = Limits(LIMITS.longest, LIMITS.work, (torch.bfloat16,), fp8=False, rope=False)
    for index, problem in enumerate(DRAWN):
        case = problem.case
        pairs = sum(a * b for a, b in zip(case.qo_lens, case.kv_lens, strict=True))
        assert max(case.qo_lens + case.kv_lens) <= LIMITS.longest
        work = pairs * case.num_qo_heads * (case.head_dim + case.dim_vo)
        assert work <= 10 * LIMITS.work
        other = draw(SEED, index, few).case
        assert other.dtype_kv is other.dtype_o is torch.bfloat16
        assert other.position is not Position.ROPE
        assert (other.qo_lens, other.mask, other.form) == (case.qo_lens, case.mask, case.form)


def test_every_axis_is_drawn():
    many = [draw(SEED, index, LIMITS) for index in range(4000)]
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
        assert parse(problem.text) == problem
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
        parse(lengths + text)


@pytest.mark.parametrize("lengths", ["0 kv_lens=0", "3 kv_lens=0 page_size=3", "0 kv_lens=9"])
def test_a_problem_may_have_no_keys_and_no_rows(lengths):
    verdict = wrapper_trial.examine(parse(f"qo_lens={lengths}"), backend="cpu")
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
