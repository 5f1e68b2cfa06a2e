"""Named cases: `core()` covers every axis, `tiny()` has a small case for each kernel path."""

from __future__ import annotations

from collections.abc import Iterator

from preflash.testing import Case, KvForm, Magnitude, MaskKind, Position, Sinks

_C = MaskKind.CAUSAL
_CUSTOM = MaskKind.CUSTOM
_CUSTOM8 = MaskKind.CUSTOM_UINT8
_PACKED = MaskKind.PACKED
_ALIBI = Position.ALIBI
_ROPE = Position.ROPE
_MIXED = Sinks.MIXED
_PADDED, _HALVES, _COMBINED = KvForm.PADDED, KvForm.HALVES, KvForm.COMBINED
_VERY_NEGATIVE = {"magnitude": Magnitude.VERY_NEGATIVE, "sm_scale": 1.0}
# Query and key lengths.
_MASKED = (13, 31, 7, 1), (13, 201, 13, 3)
_STEPS = (1, 2, 1, 1), (1, 33, 257, 400)
_LONG = (1, 2, 40), (700, 513, 600)


def _ragged_cases() -> Iterator[Case]:
    yield Case("mha", (64, 128, 129, 1), (64, 128, 129, 1), 4, 4, 64)
    yield Case("gqa4", (33, 11, 1, 120), (33, 11, 1, 120), 8, 2, 128, mask=_C)
    yield Case("append", (17, 65), (300, 65), 6, 2, 256, mask=_C)
    yield Case("mla", (37, 100), (37, 211), 4, 4, 192, 128, mask=_C)
    yield Case("d96", (70, 20), (96, 200), 4, 4, 96, form=_PADDED, mask=_C)
    yield Case("d72", (31,), (333,), 3, 1, 72, form=_HALVES, mask=_C)
    yield Case("hnd", (33, 11, 1, 120), (70, 11, 64, 120), 8, 2, 128, layout="HND", mask=_C)
    yield Case("nhd_over_hnd", (33, 90), (70, 90), 4, 2, 128, form=KvForm.TRANSPOSED)
    yield Case("halves", (33, 90), (70, 90), 4, 2, 128, form=_HALVES, mask=_C)
    yield Case("longer_q", (150, 70, 9), (64, 3, 1), 4, 1, 128, mask=_C)
    zero = (0, 20, 5, 0, 0, 3), (40, 0, 9, 0, 7, 130)
    yield Case("zero_lengths", *zero, 4, 2, 128, mask=_C)
    yield Case("all_empty", (0, 0), (0, 0), 4, 2, 64)
    yield Case("no_keys", (5, 70), (0, 0), 4, 2, 128, mask=_C)
    yield Case("window0", (40, 130), (100, 130), 4, 4, 128, mask=_C, window_left=0)
    yield Case("window31", (40, 130), (100, 300), 8, 2, 64, mask=_C, window_left=31)
    yield Case("left_only", (40, 130), (300, 130), 4, 1, 128, window_left=17)
    for window in (1, 63, 64, 65, 127, 128):  # edges of tiles
        yield Case("window", (4, 130, 200), (200, 130, 90), 4, 2, 64, mask=_C, window_left=window)
    yield Case("softcap", (60, 31), (60, 200), 8, 2, 128, mask=_C, soft_cap=30.0)
    yield Case("softcap_tight", (60, 31), (60, 200), 4, 4, 256, soft_cap=1.5, sm_scale=0.5)
    for head_dim in (64, 128, 256):
        yield Case("negative_scale", (20, 31), (60, 200), 4, 2, head_dim, sm_scale=-0.2)
    yield Case("custom", (60, 31, 7), (60, 200, 13), 4, 2, 128, mask=_CUSTOM)
    yield Case("custom_u8", (5, 1, 64), (67, 9, 129), 8, 1, 64, mask=_CUSTOM8, window_left=40)
    yield Case("packed", *_MASKED, 4, 4, 128, mask=_PACKED)
    yield Case("custom_mla", (61, 31), (61, 200), 2, 2, 192, 128, mask=_PACKED)
    same = Magnitude.IDENTICAL
    yield Case("identical", (20, 130), (77, 300), 4, 2, 128, magnitude=same, mask=_C)
    yield Case("very_negative", (20, 130), (77, 300), 4, 2, 64, **_VERY_NEGATIVE, mask=_C)
    few = (20, 7), (77, 300)
    yield Case("very_negative_custom", *few, 2, 1, 128, **_VERY_NEGATIVE, mask=_CUSTOM)


def _paged_cases() -> Iterator[Case]:
    mixed_q, mixed_kv = (33, 11, 1, 55, 0, 8), (261, 180, 231, 60, 77, 0)
    yield Case("seed_like", mixed_q, mixed_kv, 8, 2, 128, page_size=16, mask=_C)
    yield Case("page1", mixed_q, mixed_kv, 4, 1, 128, page_size=1, mask=_C)
    yield Case("page1_flat", mixed_q, mixed_kv, 3, 1, 64, page_size=1, form=KvForm.FLAT, mask=_C)
    yield Case("page64", mixed_q, mixed_kv, 4, 4, 256, page_size=64)
    vllm = {"form": _HALVES, "mask": _C}
    yield Case("vllm_like", (1, 1, 40, 9), (90, 17, 40, 129), 8, 2, 128, page_size=16, **vllm)
    two, combined = ((9, 70), (129, 70)), {"page_size": 16, "form": _COMBINED}
    yield Case("combined", *two, 4, 2, 64, **combined)
    yield Case("transposed", *two, 4, 2, 128, page_size=4, form=KvForm.TRANSPOSED)
    yield Case("mla_paged", *two, 4, 4, 192, 128, page_size=16, mask=_C)
    steps = (1,) * 9, (1, 2, 15, 16, 17, 63, 65, 257, 400)
    yield Case("decode", *steps, 8, 1, 128, page_size=16, mask=_C)
    yield Case("decode_mha", (1,) * 4, (1, 33, 200, 400), 4, 4, 64, page_size=1)
    yield Case("speculative", (4, 3, 2, 1), (64, 333, 18, 2), 5, 1, 256, page_size=8, mask=_C)
    yield Case("split", *_LONG, 4, 2, 128, page_size=16, mask=_C, fixed_split_size=64)
    split, long, longer = {"fixed_split_size": 64}, ((3, 50), (512, 450)), ((3, 150), (512, 450))
    yield Case("split_window", *longer, 4, 4, 64, mask=_C, window_left=70, **split)
    capped = {"page_size": 16, "mask": _CUSTOM, "soft_cap": 10.0}
    yield Case("split_cap_custom", *long, 4, 1, 128, **capped, **split)
    yield Case("split_mla", *long, 2, 2, 192, 128, mask=_C, **split)
    yield Case("no_split", *_LONG, 4, 2, 128, page_size=16, mask=_C, disable_split_kv=True)
    masked = (13, 31, 0, 7, 1), (13, 201, 5, 13, 3)
    yield Case("custom_paged", *masked, 4, 1, 128, page_size=8, mask=_CUSTOM)
    yield Case("packed_paged", *_MASKED, 8, 2, 64, page_size=16, mask=_PACKED, window_left=100)
    yield Case("neg_paged", *two, 4, 2, 128, page_size=16, mask=_C, **_VERY_NEGATIVE)


def _alibi_cases() -> Iterator[Case]:
    yield Case("alibi", (33, 0, 1, 120), (33, 11, 64, 300), 8, 2, 128, mask=_C, position=_ALIBI)
    yield Case("alibi_d96", (70, 3), (96, 200), 5, 1, 96, form=_PADDED, mask=_C, position=_ALIBI)
    yield Case("alibi_mla", (37, 100), (37, 211), 3, 3, 192, 128, mask=_C, position=_ALIBI)
    yield Case("alibi_custom", (61, 31), (61, 200), 10, 5, 64, mask=_CUSTOM, position=_ALIBI)
    yield Case("alibi_decode", *_STEPS, 7, 1, 128, page_size=16, position=_ALIBI)
    split = {"page_size": 3, "fixed_split_size": 64}
    yield Case("alibi_split", *_LONG, 6, 2, 64, mask=_C, position=_ALIBI, **split)


def _rope_cases() -> Iterator[Case]:
    yield Case("rope", (33, 0, 1, 120), (33, 11, 64, 300), 8, 2, 128, mask=_C, position=_ROPE)
    yield Case("rope_d40", (70, 3), (96, 200), 5, 1, 40, form=_PADDED, mask=_C, position=_ROPE)
    yield Case("rope_mla", (37, 100), (37, 211), 3, 3, 192, 128, mask=_C, position=_ROPE)
    more = {"window_left": 37, "soft_cap": 20.0, "position": _ROPE, "rope_theta": 5e5}
    yield Case("rope_cap_window", (61, 4), (61, 200), 6, 2, 256, **more)
    more = {"page_size": 3, "mask": _PACKED, "position": _ROPE, "sinks": _MIXED}
    yield Case("rope_custom_sinks", (61, 31, 90), (61, 200, 17), 10, 5, 64, **more)
    yield Case("rope_decode", *_STEPS, 7, 1, 128, page_size=16, position=_ROPE)
    more = {"page_size": 3, "layout": "HND", "mask": _C, "position": _ROPE, "fixed_split_size": 64}
    yield Case("rope_split", *_LONG, 6, 2, 64, **more)


def _sink_cases() -> Iterator[Case]:
    usual = Sinks.ORDINARY
    yield Case("sinks", (33, 0, 1, 120), (33, 11, 64, 300), 8, 2, 128, mask=_C, sinks=usual)
    yield Case("sinks_longer_q", (150, 70), (64, 3), 5, 1, 128, mask=_C, sinks=_MIXED)
    yield Case("sinks_window", (40, 130), (300, 9), 8, 1, 256, window_left=37, sinks=_MIXED)
    yield Case("sinks_split", *_LONG, 6, 2, 64, sinks=usual, fixed_split_size=64)
    more = {"page_size": 16, "mask": _C, "sinks": _MIXED, "fixed_split_size": 128}
    yield Case("sinks_split_mixed", (1, 2, 90), (700, 0, 200), 8, 2, 192, 128, **more)
    more = {"mask": _CUSTOM, "soft_cap": 20.0, "position": _ALIBI, "sinks": _MIXED}
    yield Case("sinks_alibi_cap", (61, 3), (61, 500), 6, 2, 128, fixed_split_size=64, **more)


def _wide_cases() -> Iterator[Case]:
    """More than 256 columns: warps (fa2) and CTAs (fa3) share those of O out."""
    few, many = (33, 130, 1, 0), (70, 300, 9, 5)
    yield Case("d512", few, many, 8, 4, 512, mask=_C)
    yield Case("d320_paged", few, many, 8, 1, 320, page_size=16, mask=_C)
    yield Case("d384_page1", few, many, 4, 2, 384, page_size=1, mask=_C, window_left=40)
    yield Case("d512_page100", few, many, 4, 1, 512, page_size=100, mask=_C)
    yield Case("d512x64", (33, 5), (70, 90), 4, 2, 512, 64, mask=_C)
    yield Case("d64x512", (33, 5), (70, 90), 4, 2, 64, 512, page_size=8, mask=_C)
    yield Case("d512_decode", (1,) * 4, (1, 16, 257, 400), 16, 1, 512, page_size=16, mask=_C)
    yield Case("d512_cap", (61, 4), (61, 200), 6, 2, 512, mask=_C, soft_cap=20.0)
    yield Case("d512_alibi", (61, 4), (61, 200), 6, 2, 512, page_size=16, mask=_C, position=_ALIBI)
    yield Case("d512_sinks", (40, 130), (300, 9), 32, 4, 512, page_size=8, mask=_C, sinks=_MIXED)
    yield Case("d512_custom", (61, 31), (61, 200), 4, 2, 512, mask=_CUSTOM)
    split = {"page_size": 16, "mask": _C, "fixed_split_size": 128, "sinks": _MIXED}
    yield Case("d512_split", (3, 50), (512, 450), 8, 2, 512, **split)


def core() -> list[Case]:
    """Hand-written cases that together touch every axis of the specification."""
    parts = (_ragged_cases, _paged_cases, _alibi_cases, _rope_cases, _sink_cases, _wide_cases)
    return [case for part in parts for case in part()]


def tiny() -> list[Case]:
    """A few problems small enough for compute-sanitizer, one per kernel path."""
    return [
        Case("tall", (70,), (70,), 2, 1, 64, mask=_C),
        Case("short", (1, 2), (40, 19), 4, 1, 64, page_size=8, mask=_C),
        Case("tall_paged", (66,), (131,), 2, 2, 128, page_size=16, mask=_C),
        Case("page1", (9,), (37,), 2, 1, 128, page_size=1, layout="HND"),
        Case("group3", (45, 2), (131, 9), 3, 1, 128, page_size=24, mask=_C),
        Case("custom", (17,), (33,), 2, 1, 64, mask=_PACKED),
        Case("softcap", (9,), (70,), 2, 1, 128, soft_cap=5.0, window_left=11),
        Case("split", (2,), (300,), 4, 1, 128, page_size=3, mask=_C, fixed_split_size=64),
        Case("mla", (20,), (45,), 1, 1, 192, 128, mask=_C),
        Case("d96", (20, 0, 3), (45, 7, 0), 2, 1, 96, form=_PADDED, mask=_C),
        Case("d256", (20,), (90,), 2, 1, 256, form=_HALVES, mask=_C),
        Case("d512", (20,), (90,), 2, 1, 512, page_size=16, mask=_C, window_left=40),
        Case("d264", (9, 3), (70, 33), 4, 1, 264, form=_PADDED, mask=_C, soft_cap=5.0),
        Case("alibi", (20, 1), (90, 40), 3, 1, 128, mask=_C, position=_ALIBI),
        Case("sinks", (20, 1), (9, 200), 4, 1, 64, mask=_C, sinks=_MIXED, fixed_split_size=64),
    ]
