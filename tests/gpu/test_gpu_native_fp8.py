"""e4m3 queries, keys and values by products of 8 bits on fa3."""

import dataclasses
import itertools
import math
from collections.abc import Iterator

import backends
import pytest
import torch
from backends import on_cases, same_bits
from converted_cases import E4M3
from preflash import _core
from preflash.testing import Case, KvForm, MaskKind, Sinks, reference, runner
from preflash.testing.case import Garbage

pytestmark = pytest.mark.usefixtures("fa3")

CAUSAL, FULL = MaskKind.CAUSAL, MaskKind.NONE
BASE = Case("native", (190, 0, 77, 3), (470, 9, 77, 0), 4, 2, 128, dtype=E4M3, mask=CAUSAL)


def planned(case):
    """Plans, and requires products of 8 bits: another kernel's result proves nothing here."""
    wrapper, inputs = backends.planned(case, "fa3")
    native = f"sm90_e4m3_d{64 if case.head_dim <= 64 else 128}"
    if native not in {kernel["id"] for kernel in _core.kernels()}:
        raise NotImplementedError(f"{native} is not compiled")
    assert wrapper.variant == native
    return wrapper, inputs


def check_run(wrapper, inputs, expected=None, **options) -> tuple:
    """Compares a run with the oracle and with one without an LSE; returns (out, lse)."""
    out, lse = backends.check_run(wrapper, inputs, expected, **options)
    alone = runner.run(wrapper, inputs, lse=None, return_lse=False, **options)
    assert same_bits([alone], [out])
    return out, lse


def changed(**changes) -> Case:
    return dataclasses.replace(BASE, **changes)


def every(**axes) -> Iterator[dict]:
    """Yields all combinations of the values of each axis."""
    for values in itertools.product(*axes.values()):
        yield dict(zip(axes, values, strict=True))


@pytest.mark.sanitizer
@on_cases(
    changed(head_dim=head_dim, page_size=page_size)
    for head_dim in (16, 32, 64, 80, 96, 112, 128)
    for page_size in (0, 1, 3, 8, 16, 64, 128, 256)
)
def test_storage(case):
    check_run(*planned(case))


def changes_of_numbers() -> Iterator[dict]:
    # Each place of a key in a tile, and what follows a request in memory. The last request is why
    # the tiles are those of prefill.
    kv_lens = (1, 2, 7, 8, 15, 16, 17, 31, 33, 63, 65, 127, 128, 129, 255, 257)
    for kv_len, axes in itertools.product(kv_lens, every(page_size=(0, 5, 16), head_dim=(64, 128))):
        lens = {"qo_lens": (65, 1, 70), "kv_lens": (kv_len, 40, 150)}
        yield {"mask": FULL, "garbage": Garbage.ANY, **lens, **axes}
    yield from every(
        qo_lens=[(qo_len, 1) for qo_len in (17, 63, 64, 65, 127, 129, 300)],
        kv_lens=[(333, 50)],
        head_dim=(64, 128),
    )
    for heads, kv_heads in ((1, 1), (8, 1), (7, 1), (6, 3), (160, 1)):
        lens = {"qo_lens": (40, 21), "kv_lens": (300, 21)}
        for axes in every(mask=(CAUSAL, FULL)):
            yield {"num_qo_heads": heads, "num_kv_heads": kv_heads, **lens, **axes}
    windows = (0, 1, 60, 127, 128, 300)
    for axes in every(window_left=windows, page_size=(0, 3, 16), head_dim=(64, 128)):
        yield {"qo_lens": (200, 90, 3, 1), "kv_lens": (700, 90, 400, 5), **axes}
    layouts, forms = ("NHD", "HND"), (KvForm.PADDED, KvForm.TRANSPOSED)
    yield from every(layout=layouts, form=forms, page_size=(0, 16))
    yield from every(layout=layouts, form=(KvForm.COMBINED,), page_size=(16, 5))
    yield from every(
        sinks=[one for one in Sinks if one is not Sinks.NONE], fixed_split_size=(None, 128)
    )
    yield from every(
        o_dtype=(torch.bfloat16, torch.float16, E4M3),
        head_scales=(False, True),
        page_size=(0, 16),
        head_dim=(64, 128),
    )
    # With 4 a row has few weights, and later tiles exceed the first one's maximum by far.
    for axes in every(sm_scale=(-0.1, 0.0, 1.0, 4.0), disable_split_kv=(False, True)):
        yield {"kv_lens": (1470, 9, 77, 0), **axes}
    lens = {"qo_lens": (33, 40, 0, 18), "kv_lens": (3000, 333, 5, 700)}
    for axes in every(page_size=(0, 1, 16), fixed_split_size=(128, 256, 1024)):
        yield lens | axes


@on_cases(changed(**changes) for changes in changes_of_numbers())
def test_numbers(case):
    check_run(*planned(case))


@pytest.mark.parametrize("as_tensors", [False, True])
@pytest.mark.parametrize("factors", [(0.5, 3.0, -0.25), (-1.0, 1.0, 1.0), (0.0, 1.0, 2.0)], ids=str)
def test_one_factor_for_a_tensor(factors, as_tensors):
    wrapper, inputs = planned(BASE)
    q, k, v = factors
    given = {"q_scale": q, "k_scale": k, "v_scale": v}
    if as_tensors:
        given = {name: torch.tensor([x], device="cuda") for name, x in given.items()}
    pipeline = dataclasses.replace(inputs.pipeline, sm_scale=BASE.scale * q * k, out_scale=v)
    check_run(wrapper, inputs, reference(inputs, pipeline=pipeline), **given)


# Logits are the first column of the keys.
FIRST_COLUMN = {"num_qo_heads": 1, "num_kv_heads": 1, "sm_scale": 1.0}


def one_request(qo_len: int, kv_len: int, first_column: float | None = None, **changes) -> tuple:
    """Plans a request; first_column: of queries that are 0 elsewhere. Returns its k and v, too."""
    lens = {"qo_lens": (qo_len,), "kv_lens": (kv_len,)}
    wrapper, inputs = planned(changed(mask=FULL, disable_split_kv=True, **lens, **changes))
    one = inputs.request(0)
    if first_column is not None:
        inputs.q.fill_(0.0)
        inputs.q[..., 0] = first_column
    return wrapper, inputs, one.k, one.v


@pytest.mark.parametrize("step", [0.5, 2.0, 8.0, 40.0])
@pytest.mark.parametrize("rising", [True, False])
def test_maxima_that_move(step, rising):
    """Logits that rise or fall by `step` (base e) from tile to tile: P never saturates."""
    wrapper, inputs, k, _ = one_request(130, 1300, 1.0, **FIRST_COLUMN)
    tile = torch.arange(1300) // 128
    k[:, 0, 0].copy_(step * (tile.max() - tile if rising else tile))  # the last tile comes first
    expected = reference(inputs)
    # One product alone is exact.
    expected.product_bound.zero_()
    check_run(wrapper, inputs, expected)


@pytest.mark.parametrize("kv_len", [500, 513, 2048, 9000])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_equal_logits(kv_len, head_dim):
    """Every weight is equal, so that O is the mean of V: no weight may saturate or vanish."""
    wrapper, inputs, _, _ = one_request(70, kv_len, 0.0, head_dim=head_dim)
    _, lse = check_run(wrapper, inputs)
    # float32 adds powers of 2 up: the LSE has none of the errors of P.
    assert (lse - math.log2(kv_len)).abs().max() < 1e-4


@pytest.mark.parametrize("sm_scale", [50.0, 970.0, 1e4, 1e6])
@pytest.mark.parametrize("return_lse", [False, True])
def test_huge_logits_are_right_or_nan(sm_scale, return_lse):
    """The origin of exponents is rounded by so much that every weight may become 0."""
    wrapper, inputs, k, v = one_request(70, 500, 448.0, head_dim=64, sm_scale=sm_scale)
    k.copy_(inputs.q[:1, :1].expand(k.shape))
    v.copy_(torch.randn(v.shape) * 0.3 + 3.0)
    out = runner.run(wrapper, inputs, return_lse=return_lse, lse=None)
    out = (out[0] if return_lse else out).double()
    mean = v.double().mean(0).repeat_interleave(2, 0).expand(out.shape)
    right = (out - mean).abs() < 0.11  # 3.3 % of 3, and bfloat16's roundoff
    assert (right | out.isnan()).all()
    assert (right if sm_scale == 50.0 else out.isnan()).all()


@pytest.mark.parametrize("kv_len", [1000, 8192, 40000])
def test_outlier_channels(kv_len):
    """Values of one sign: without float32 sums every six tiles 40000 keys would lose 2 %."""
    wrapper, inputs, _, v = one_request(64, kv_len, num_qo_heads=2, num_kv_heads=1)
    values = torch.randn(v.shape) * 0.3
    values[..., ::7] += 6.0
    v.copy_(values)
    expected = reference(inputs)
    out, _ = check_run(wrapper, inputs, expected)
    outliers = out.double()[..., ::7] / expected.out[..., ::7]
    # bfloat16's roundoff, and what row sums lose more or less than values.
    assert (outliers - 1).abs().mean() < 2.0**-9 + 0.002


@pytest.mark.parametrize("key", [-100, -200, -300, -1000, -5000, 0])
@pytest.mark.parametrize("logit", [6.0, 8.0, 10.0, 12.0, 14.0])
@pytest.mark.parametrize("kv_len", [1500, 2300, 20000, 131072])
def test_one_large_logit(kv_len, logit, key):
    """Small weights together may outweigh the largest: lost ones would be 15 % at 20000 keys."""
    wrapper, inputs, k, v = one_request(40, kv_len, 1.0, **FIRST_COLUMN)
    logits, key = torch.randn(kv_len), max(key, -kv_len)
    logits[key] = logit
    k.fill_(0.0)
    k[:, 0, 0].copy_(logits)
    # Where the key of the large logit had such a value, too, lost weights would not change O.
    v.copy_(torch.randn(v.shape) * 0.3 + 3.0)
    v[key] = 0.0
    out, _ = runner.run(wrapper, inputs)
    errors = (out.double() - reference(inputs).out) / 3
    # The output's roundoff, and up to six tiles of small weights, the same in every row.
    assert errors.abs().max() < 2.0**-8 + 0.016


@pytest.mark.parametrize("page_size", [0, 1, 16])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_twenty_runs_are_equal(page_size, head_dim):
    case = changed(page_size=page_size, qo_lens=(300, 5, 77, 3), head_dim=head_dim)
    backends.check_runs(*planned(case))
