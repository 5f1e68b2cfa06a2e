"""Cases drawn from a seed, anywhere in the space of options that every wrapper takes."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterable
from typing import Any

import torch
from preflash.testing.case import Case, Garbage, KvForm, Magnitude, MaskKind, Position, Sinks

_MASKS = [MaskKind.NONE] * 2 + [MaskKind.CAUSAL] * 3 + list(MaskKind)[2:]


@dataclasses.dataclass(frozen=True)
class Limits:
    """Limits of random cases: their size, and the options of a backend that they may have."""

    longest: int = 300  # tokens of a request
    work: float = 2e9  # multiply-adds of q k^T and p v before any mask, a token counting as 32
    dtypes: tuple[torch.dtype, ...] = (torch.float16, torch.bfloat16)
    fp8: bool = True  # 8-bit keys and values, and queries and outputs
    rope: bool = True


def drawn(default: object, *others: object) -> Any:
    """Makes a field of a dataclass that random_fields() draws from these values."""
    return dataclasses.field(default=default, metadata={"values": (default, *others)})


def random_fields(rng: random.Random, kind: type) -> dict[str, object]:
    """Draws values for the drawn() fields of a dataclass."""
    fields = [field for field in dataclasses.fields(kind) if "values" in field.metadata]
    return {field.name: rng.choice(field.metadata["values"]) for field in fields}


def with_defaults(part, names: Iterable[str]):
    """Returns a case or call with the defaults of those of the named fields that it has."""
    fields = [field for field in dataclasses.fields(part) if field.name in names]
    return dataclasses.replace(part, **{field.name: field.default for field in fields})


def unflattened(case: Case) -> Case:
    """Returns the case in a form of pages of any size, or of no pages."""
    return with_defaults(case, ["form"]) if case.form is KvForm.FLAT else case


def first_request(case: Case) -> Case:
    """Returns the first request of the case, ragged."""
    one = {"qo_lens": case.qo_lens[:1], "kv_lens": case.kv_lens[:1], "page_size": 0}
    return dataclasses.replace(unflattened(case), **one)


def contradiction(case: Case) -> str:
    """Returns the rule that dtypes and position break together, if they do.

    Wrappers refuse some of this. For the rest no bound would tell right numbers from wrong ones.
    """
    fp8 = case.dtype_kv.itemsize == 1
    exact = case.magnitude is Magnitude.VERY_NEGATIVE
    if fp8 and (case.head_dim % 16 or case.dim_vo % 16):
        return "rows of 8 bits start on multiples of 16 bytes"
    if exact and (fp8 or case.position is Position.ROPE):
        return "logits that must be exact are not rotated, nor of 8 bits"
    if case.head_scales and not fp8:
        return "factors of heads are for fp8"
    if case.dtype.itemsize > 1 and case.o_dtype not in (None, case.dtype):
        return "the output has q's dtype, but for fp8"
    has_rope_options = case.rope_scale is not None or case.rope_theta is not None
    if has_rope_options and case.position is not Position.ROPE:
        return "rope_scale and rope_theta are for RoPE"
    return ""


def _length(rng: random.Random, longest: int) -> int:
    """Draws a length: mostly around tile edges or short, sometimes zero."""
    kind = rng.random()
    if kind < 0.08:
        return 0
    if kind < 0.3:
        return rng.randint(1, min(8, longest))
    if kind < 0.6:
        edge = rng.choice([16, 32, 64, 128, 192, 256]) + rng.randint(-1, 1)
        return min(edge, longest)
    return rng.randint(1, longest)


def _lengths(
    rng: random.Random, longest: int, most_pairs: float, group_size: int
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Draws lengths of a batch with about `most_pairs` pairs of a query and a key. A token, which
    tests make, poison and compare, counts as 32 pairs."""
    batch = rng.choice([1, 1, 2, 3, 5, 8])
    kv_lens = [_length(rng, longest) for _ in range(batch)]
    style = rng.choice(["self", "append", "decode", "decode", "free"])
    if style == "self":
        qo_lens = list(kv_lens)
    elif style == "decode":
        qo_lens = [rng.choice([0, 1, 1, 1, 2, 4]) for _ in range(batch)]
    elif style == "append":
        qo_lens = [rng.randint(0, kv_len) for kv_len in kv_lens]
    else:
        qo_lens = [_length(rng, longest // 2) for _ in range(batch)]
    while True:
        costs = [
            qo_len * kv_len + 32 * (qo_len + kv_len / group_size)
            for qo_len, kv_len in zip(qo_lens, kv_lens, strict=True)
        ]
        largest = costs.index(max(costs))
        if sum(costs) <= most_pairs or max(qo_lens[largest], kv_lens[largest]) <= 1:
            return tuple(qo_lens), tuple(kv_lens)
        longer = qo_lens if qo_lens[largest] >= kv_lens[largest] / group_size else kv_lens
        longer[largest] //= 2


def _random_storage(rng: random.Random, dims: tuple[int, int]) -> dict[str, object]:
    sizes = [0, 0, 0, 0, 1, 1, 2, 3, 7, 8, 16, 16, 32, 64, 100, rng.randint(1, 64)]
    page_size = rng.choice(sizes)
    forms = [form for form in KvForm if form is not KvForm.FLAT]
    if dims[0] != dims[1]:
        forms.remove(KvForm.COMBINED)
    form = KvForm.FLAT if page_size == 1 and rng.random() < 0.3 else rng.choice(forms)
    return {
        "page_size": page_size,
        "form": form,
        "layout": rng.choice(["NHD", "HND"]),
        "garbage": rng.choice(list(Garbage)),
    }


def _random_logits(rng: random.Random) -> dict[str, object]:
    """Draws masks and everything else between q k^T and the softmax."""
    return {
        "mask": rng.choice(_MASKS),
        "window_left": rng.choice([-1] * 6 + [0, 1, 17, 64, 200, 2**30]),
        "soft_cap": rng.choice([None] * 6 + [0.0, 0.5, 2.0, 30.0, 1000.0]),
        "sm_scale": rng.choice([None] * 5 + [0.05, 0.3, 1.0, -0.2, -1.0, 0.0, 1e-4]),
        "position": rng.choice([Position.NONE] * 4 + [Position.ALIBI]),
        "sinks": rng.choice([Sinks.NONE] * 12 + [s for s in Sinks if s is not Sinks.NONE]),
        "magnitude": rng.choice([Magnitude.NORMAL] * 12 + list(Magnitude)),
    }


def _random_fp8(rng: random.Random) -> dict[str, object]:
    """Draws tensors of 8 bits: keys and values alone, or queries too."""
    head_scales = rng.random() < 0.5
    cache = rng.choice([torch.float8_e4m3fn, torch.float8_e5m2])
    output = rng.choice([None, torch.float16, torch.bfloat16, torch.float8_e4m3fn])
    if rng.random() < 0.5:
        quantization = rng.choice(["none", "row"])
        return {"kv_dtype": cache, "head_scales": head_scales, "q_quantization": quantization}
    return {"dtype": torch.float8_e4m3fn, "o_dtype": output, "head_scales": head_scales}


def random_case(rng: random.Random, name: str, limits: Limits) -> Case:
    """Draws a case. The limits change no draw, so that all backends see the same lengths."""
    dim = rng.choice([64, 128, 128, 256, 512, 8 * rng.randint(1, 64)])
    dims = (192, 128) if rng.random() < 0.1 else (dim, dim)
    num_kv_heads = rng.choice([1, 1, 2, 3])
    group_size = rng.choice([1, 1, 1, 2, 2, 3, 3, 4, 4, 5, 7, 7, 8, 8, 16, 16, 128])
    num_qo_heads = num_kv_heads * group_size
    most_pairs = limits.work / (num_qo_heads * sum(dims))
    qo_lens, kv_lens = _lengths(rng, limits.longest, most_pairs, group_size)
    storage, logits = _random_storage(rng, dims), _random_logits(rng)
    split = rng.random()
    case = Case(
        *(name, qo_lens, kv_lens, num_qo_heads, num_kv_heads),
        *(dims[0], None if dims[0] == dims[1] else dims[1]),
        fixed_split_size=rng.choice([1, 64, 64, 100, 128, 256]) if split < 0.5 else None,
        disable_split_kv=split > 0.85,
        batch_invariant=0.5 <= split < 0.6,
        **storage,
        **logits,
        # Not choice(), which takes a number of draws that depends on how many there are.
        dtype=limits.dtypes[int(rng.random() * len(limits.dtypes))],
    )
    fp8 = _random_fp8(rng)
    rope = {
        "position": Position.ROPE,
        "rope_scale": rng.choice([None, None, 0.25, 1.0, 8.0]),
        "rope_theta": rng.choice([None, None, 1.0, 50.0, 5e5]),
    }
    for served, share, options in ((limits.fp8, 0.25, fp8), (limits.rope, 0.2, rope)):
        if rng.random() < share and served:
            changed = dataclasses.replace(case, **options)
            case = changed if not contradiction(changed) else case
    return case


def random_cases(count: int, *, seed: int, longest: int = 300, work: float = 2e9) -> list[Case]:
    """Draws `count` cases within `Limits` of `longest` and `work`."""
    rng = random.Random(seed)
    limits = Limits(longest, work, fp8=False, rope=False)
    return [random_case(rng, f"fuzz{index}", limits) for index in range(count)]


def random_prepass_cases(count: int, *, seed: int) -> list[Case]:
    """Draws `count` cases that have a pre-pass, with outputs in the dtype of the products."""
    rng = random.Random(seed)
    limits = Limits(300, 2e9, dtypes=(torch.float16, torch.bfloat16))
    found: list[Case] = []
    while len(found) < count:
        case = random_case(rng, f"fuzz{len(found)}", limits)
        if case.has_prepass_form and not case.head_scales:
            found.append(case)
    return found
