"""Named attention problems, shared by the tests and the benchmark.

A `Case` says everything about a problem but the numbers: lengths, heads, dimensions, storage,
mask, logits pipeline, position encoding, sinks and KV split. `core()` is the hand-written list that
covers every axis; `random_cases` draws more of them from a seed.
"""

from __future__ import annotations

import dataclasses
import enum
import random
from collections.abc import Iterator

import torch

DTYPE_NAMES = {
    torch.float16: "f16",
    torch.bfloat16: "bf16",
    torch.float32: "f32",
    torch.float8_e4m3fn: "e4m3",
    torch.float8_e5m2: "e5m2",
}


class MaskKind(enum.Enum):
    """Which keys a row keeps, before the window: all, causal, or a random custom mask."""

    NONE = "full"
    CAUSAL = "causal"
    CUSTOM = "custom"  # dense, flattened, bool
    CUSTOM_UINT8 = "custom8"  # dense, flattened, uint8
    PACKED = "packed"  # bits in little order, every request on its own byte


class KvForm(enum.Enum):
    """How K and V lie in memory. The logical shape is that of the layout in every form."""

    SEPARATE = "sep"  # two contiguous tensors
    COMBINED = "comb"  # one tensor with K and V interleaved: the 5-D cache
    HALVES = "halves"  # two halves of one last dimension of head_dim_qk + head_dim_vo
    PADDED = "padded"  # 16 poisoned columns behind every row, of q as well
    TRANSPOSED = "transp"  # memory order of the other layout
    FLAT = "flat"  # page_size 1 without the page dimension: 3-D


class Magnitude(enum.Enum):
    """What the logits look like."""

    NORMAL = "normal"  # independent normal numbers
    IDENTICAL = "identical"  # all logits of a row are equal
    VERY_NEGATIVE = "neg"  # around -2.5e5, exact in float32, with differences of a few units


class Garbage(enum.Enum):
    """What lies in memory that belongs to no request."""

    NON_FINITE = "nonfinite"  # NaN, +Inf and -Inf
    NAN = "nan"
    HUGE = "huge"  # 1e30 of either sign, or the largest number of the dtype
    ANY = "any"  # all of these


class Position(enum.Enum):
    """How logits depend on the distance of query and key: pos_encoding_mode of the wrappers."""

    NONE = "NONE"
    ALIBI = "ALIBI"
    ROPE = "ROPE_LLAMA"


class Sinks(enum.Enum):
    """Whether run() is given sinks, and how large they are beside the logits."""

    NONE = "none"
    ORDINARY = "ordinary"  # normal numbers, on which weights of every size fall
    ABOVE = "above"  # far above every logit: hardly anything is left of the output
    BELOW = "below"  # far below every logit, so that only rows without keys see them
    OFF = "off"  # -inf: as if there were none
    MIXED = "mixed"  # these four, head by head


@dataclasses.dataclass(frozen=True)
class Case:
    """One batch attention problem. `page_size` 0 means ragged K and V."""

    name: str
    qo_lens: tuple[int, ...]
    kv_lens: tuple[int, ...]
    num_qo_heads: int = 4
    num_kv_heads: int = 1
    head_dim: int = 128
    head_dim_vo: int | None = None
    dtype: torch.dtype = torch.bfloat16
    page_size: int = 0
    layout: str = "NHD"
    form: KvForm = KvForm.SEPARATE
    mask: MaskKind = MaskKind.NONE
    window_left: int = -1
    soft_cap: float | None = None
    sm_scale: float | None = None
    fixed_split_size: int | None = None
    disable_split_kv: bool = False
    magnitude: Magnitude = Magnitude.NORMAL
    position: Position = Position.NONE
    rope_scale: float | None = None
    rope_theta: float | None = None
    sinks: Sinks = Sinks.NONE
    garbage: Garbage = Garbage.NON_FINITE
    kv_dtype: torch.dtype | None = None  # of k and v; None: q's
    o_dtype: torch.dtype | None = None  # None: q's, bfloat16 for q of 8 bits
    head_scales: bool = False  # whether run() is given a factor of each head of the fp8 tensors

    def __post_init__(self) -> None:
        if len(self.qo_lens) != len(self.kv_lens):
            raise ValueError(
                f"{self.name}: {len(self.qo_lens)} qo_lens, {len(self.kv_lens)} kv_lens"
            )
        if self.num_qo_heads % self.num_kv_heads:
            raise ValueError(f"{self.name}: {self.num_qo_heads} heads over {self.num_kv_heads}")
        if self.form is KvForm.FLAT and self.page_size != 1:
            raise ValueError(f"{self.name}: the flat form is for page_size 1")
        if self.form is KvForm.COMBINED and self.dim_vo != self.head_dim:
            raise ValueError(f"{self.name}: one tensor holds K and V of one head_dim")

    @property
    def dim_vo(self) -> int:
        return self.head_dim if self.head_dim_vo is None else self.head_dim_vo

    @property
    def dtype_kv(self) -> torch.dtype:
        return self.dtype if self.kv_dtype is None else self.kv_dtype

    @property
    def dtype_o(self) -> torch.dtype:
        usual = torch.bfloat16 if self.dtype.itemsize == 1 else self.dtype
        return usual if self.o_dtype is None else self.o_dtype

    @property
    def batch_size(self) -> int:
        return len(self.qo_lens)

    @property
    def group_size(self) -> int:
        return self.num_qo_heads // self.num_kv_heads

    @property
    def paged(self) -> bool:
        return self.page_size > 0

    @property
    def scale(self) -> float:
        return self.head_dim**-0.5 if self.sm_scale is None else self.sm_scale

    @property
    def has_custom_mask(self) -> bool:
        return self.mask in (MaskKind.CUSTOM, MaskKind.CUSTOM_UINT8, MaskKind.PACKED)

    @property
    def has_staged_form(self) -> bool:
        """Whether copies of k, v and q may serve it: RoPE or fp8, in the dtype of the output."""
        products = self.dtype_o if self.dtype.itemsize == 1 else self.dtype
        changes = self.position is Position.ROPE or self.dtype_kv.itemsize == 1
        return changes and products.itemsize == 2 and self.dtype_o == products

    @property
    def may_need_copies(self) -> bool:
        """Whether a GPU backend may have no kernel that transforms what arrives."""
        wide = max(self.head_dim, self.dim_vo) > 256
        return self.has_staged_form and (wide or self.mask in (MaskKind.CUSTOM, MaskKind.PACKED))

    @property
    def contradiction(self) -> str:
        """The rule of numbers that the dtypes and the position break together, if they do.

        Wrappers refuse some of this. The rest they compute, but no bound would tell right numbers
        from wrong ones.
        """
        fp8 = self.dtype_kv.itemsize == 1
        exact = self.magnitude is Magnitude.VERY_NEGATIVE
        if fp8 and (self.head_dim % 16 or self.dim_vo % 16):
            return "rows of 8 bits start on multiples of 16 bytes"
        if exact and (fp8 or self.position is Position.ROPE):
            return "logits that must be exact are not rotated, nor of 8 bits"
        if self.head_scales and not fp8:
            return "factors of heads are for fp8"
        if self.dtype.itemsize > 1 and self.o_dtype not in (None, self.dtype):
            return "the output has q's dtype, but for fp8"
        has_rope_options = self.rope_scale is not None or self.rope_theta is not None
        if has_rope_options and self.position is not Position.ROPE:
            return "rope_scale and rope_theta are for RoPE"
        return ""

    @property
    def id(self) -> str:
        """Readable and unique within a list: the name, then what decides the kernel."""
        dims = f"d{self.head_dim}" + (f"x{self.dim_vo}" if self.dim_vo != self.head_dim else "")
        storage = f"p{self.page_size}" if self.paged else "ragged"
        dtype = DTYPE_NAMES[self.dtype]
        if self.kv_dtype is not None:
            dtype += f"_kv{DTYPE_NAMES[self.kv_dtype]}"
        if self.o_dtype is not None:
            dtype += f"_o{DTYPE_NAMES[self.o_dtype]}"
        parts = [self.name, dtype, dims, f"h{self.num_qo_heads}k{self.num_kv_heads}", storage]
        parts += [self.layout.lower(), self.form.value, self.mask.value]
        if self.window_left >= 0:
            parts.append(f"w{self.window_left}")
        if self.soft_cap:
            parts.append(f"cap{self.soft_cap:g}")
        if self.position is not Position.NONE:
            parts.append(self.position.name.lower())
        if self.rope_scale is not None or self.rope_theta is not None:
            parts.append(f"s{self.rope_scale or 1:g}t{self.rope_theta or 1e4:g}")
        if self.sinks is not Sinks.NONE:
            parts.append(f"sinks_{self.sinks.value}")
        if self.head_scales:
            parts.append("scales")
        if self.fixed_split_size is not None:
            parts.append(f"split{self.fixed_split_size}")
        if self.disable_split_kv:
            parts.append("nosplit")
        return "-".join(parts)

    def with_dtype(self, dtype: torch.dtype) -> Case:
        return dataclasses.replace(self, dtype=dtype)


def flops(case: Case) -> float:
    """Multiply-adds counted twice, causal and window regions by the keys that are kept."""
    total = 0
    for qo_len, kv_len in zip(case.qo_lens, case.kv_lens, strict=True):
        kept = qo_len * kv_len
        if case.mask is MaskKind.CAUSAL or case.window_left >= 0:
            delta = kv_len - qo_len
            kept = 0
            for row in range(qo_len):
                last = row + delta if case.mask is MaskKind.CAUSAL else kv_len - 1
                first = row + delta - case.window_left if case.window_left >= 0 else 0
                kept += max(0, min(last, kv_len - 1) - max(first, 0) + 1)
        total += 2 * kept * case.num_qo_heads * (case.head_dim + case.dim_vo)
    return float(total)


_C = MaskKind.CAUSAL
_CUSTOM = MaskKind.CUSTOM
_CUSTOM8 = MaskKind.CUSTOM_UINT8
_PACKED = MaskKind.PACKED
_ALIBI = Position.ALIBI
_ROPE = Position.ROPE
_MIXED = Sinks.MIXED


def _ragged_cases() -> Iterator[Case]:
    yield Case("mha", (64, 128, 129, 1), (64, 128, 129, 1), 4, 4, 64)
    yield Case("gqa4", (33, 11, 1, 120), (33, 11, 1, 120), 8, 2, 128, mask=_C)
    yield Case("append", (17, 65), (300, 65), 6, 2, 256, mask=_C)
    yield Case("append_full", (5, 70), (257, 130), 3, 3, 256)
    yield Case("mla", (37, 100), (37, 211), 4, 4, 192, 128, mask=_C)
    yield Case("mla_full", (129, 3), (130, 300), 4, 1, 192, 128)
    yield Case("mla_hnd", (40, 9), (90, 9), 2, 2, 192, 128, layout="HND", mask=_C)
    yield Case("d96", (70, 20), (96, 200), 4, 4, 96, form=KvForm.PADDED, mask=_C)
    yield Case("d80", (70, 20), (96, 200), 5, 1, 80, form=KvForm.PADDED)
    yield Case("d40", (70, 20), (96, 200), 8, 1, 40, form=KvForm.PADDED, mask=_C)
    yield Case("d8", (70, 20), (96, 200), 4, 2, 8, form=KvForm.PADDED)
    yield Case("d72", (31,), (333,), 3, 1, 72, form=KvForm.HALVES, mask=_C)
    yield Case("d136", (31, 64), (50, 64), 2, 2, 136, form=KvForm.PADDED, mask=_C)
    yield Case("d192", (31, 64), (50, 64), 2, 1, 192, form=KvForm.PADDED)
    yield Case("d248", (31, 64), (50, 64), 2, 1, 248, form=KvForm.PADDED, mask=_C)
    yield Case("hnd", (33, 11, 1, 120), (70, 11, 64, 120), 8, 2, 128, layout="HND", mask=_C)
    yield Case("hnd_full", (200, 3), (65, 128), 3, 1, 64, layout="HND")
    yield Case("nhd_over_hnd", (33, 90), (70, 90), 4, 2, 128, form=KvForm.TRANSPOSED)
    yield Case("hnd_over_nhd", (33, 90), (70, 90), 4, 2, 64, layout="HND", form=KvForm.TRANSPOSED)
    yield Case("halves", (33, 90), (70, 90), 4, 2, 128, form=KvForm.HALVES, mask=_C)
    yield Case("interleaved", (33, 90), (70, 90), 4, 2, 64, form=KvForm.COMBINED, mask=_C)
    yield Case("longer_q", (150, 70, 9), (64, 3, 1), 4, 1, 128, mask=_C)
    yield Case("longer_q_full", (150, 70, 9), (64, 3, 1), 4, 1, 64)
    zero_q, zero_kv = (0, 20, 5, 0, 0, 3), (40, 0, 9, 0, 7, 130)
    yield Case("zero_lengths", zero_q, zero_kv, 4, 2, 128, mask=_C)
    yield Case("zero_lengths_full", zero_q, zero_kv, 3, 1, 64)
    yield Case("all_empty", (0, 0), (0, 0), 4, 2, 64)
    yield Case("no_keys", (5, 70), (0, 0), 4, 2, 128, mask=_C)
    yield Case("window0", (40, 130), (100, 130), 4, 4, 128, mask=_C, window_left=0)
    yield Case("window31", (40, 130), (100, 300), 8, 2, 64, mask=_C, window_left=31)
    yield Case("window_wide", (40, 130), (100, 130), 4, 1, 128, mask=_C, window_left=1000)
    yield Case("left_only", (40, 130), (300, 130), 4, 1, 128, window_left=17)
    yield Case("left_only0", (40, 130), (300, 130), 2, 2, 64, window_left=0)
    yield Case("left_only_longer_q", (140, 70), (64, 3), 3, 1, 128, window_left=20)
    yield Case("softcap", (60, 31), (60, 200), 8, 2, 128, mask=_C, soft_cap=30.0)
    yield Case("softcap_wide", (60, 31), (60, 200), 8, 2, 128, mask=_C, soft_cap=1e4)
    yield Case("softcap_tight", (60, 31), (60, 200), 4, 4, 256, soft_cap=1.5, sm_scale=0.5)
    yield Case("scale", (60, 31), (60, 200), 4, 2, 64, sm_scale=0.4, mask=_C)
    yield Case("negative_scale", (20, 31), (60, 200), 4, 2, 64, sm_scale=-0.2)
    yield Case("custom", (60, 31, 7), (60, 200, 13), 4, 2, 128, mask=_CUSTOM)
    yield Case("custom_u8", (5, 1, 64), (67, 9, 129), 8, 1, 64, mask=_CUSTOM8, window_left=40)
    yield Case("packed", (13, 31, 7, 1), (13, 201, 13, 3), 4, 4, 128, mask=_PACKED)
    yield Case("custom_cap", (61, 31), (61, 200), 6, 2, 256, mask=_CUSTOM, soft_cap=20.0)
    yield Case("custom_mla", (61, 31), (61, 200), 2, 2, 192, 128, mask=_PACKED)
    yield Case("custom_longer_q", (90, 3), (17, 1), 3, 1, 64, mask=_CUSTOM)
    same = Magnitude.IDENTICAL
    yield Case("identical", (20, 130), (77, 300), 4, 2, 128, magnitude=same, mask=_C)
    neg = Magnitude.VERY_NEGATIVE
    yield Case(
        "very_negative", (20, 130), (77, 300), 4, 2, 64, magnitude=neg, sm_scale=1.0, mask=_C
    )
    yield Case(
        "very_negative_custom",
        (20, 7),
        (77, 300),
        2,
        1,
        128,
        magnitude=neg,
        sm_scale=1.0,
        mask=_CUSTOM,
    )


def _paged_cases() -> Iterator[Case]:
    mixed_q, mixed_kv = (33, 11, 1, 55, 0, 8), (261, 180, 231, 60, 77, 0)
    yield Case("seed_like", mixed_q, mixed_kv, 8, 2, 128, page_size=16, mask=_C)
    yield Case("page1", mixed_q, mixed_kv, 4, 1, 128, page_size=1, mask=_C)
    flat = KvForm.FLAT
    yield Case("page1_flat", mixed_q, mixed_kv, 3, 1, 64, page_size=1, form=flat, mask=_C)
    yield Case("page3", mixed_q, mixed_kv, 5, 1, 64, page_size=3, mask=_C)
    yield Case("page8_hnd", mixed_q, mixed_kv, 8, 1, 128, page_size=8, layout="HND", mask=_C)
    yield Case("page64", mixed_q, mixed_kv, 4, 4, 256, page_size=64)
    yield Case("page64_hnd", mixed_q, mixed_kv, 4, 1, 128, page_size=64, layout="HND")
    yield Case("page5_d96", mixed_q, mixed_kv, 4, 1, 96, page_size=5, form=KvForm.PADDED, mask=_C)
    yield Case("page16_d40", mixed_q, mixed_kv, 4, 2, 40, page_size=16, form=KvForm.PADDED)
    vllm = KvForm.HALVES
    yield Case(
        "vllm_like", (1, 1, 40, 9), (90, 17, 40, 129), 8, 2, 128, page_size=16, form=vllm, mask=_C
    )
    yield Case(
        "vllm_like_hnd",
        (1, 40, 9),
        (17, 40, 129),
        8,
        2,
        64,
        page_size=32,
        form=vllm,
        layout="HND",
        mask=_C,
    )
    yield Case("combined", (9, 70), (129, 70), 4, 2, 64, page_size=16, form=KvForm.COMBINED)
    yield Case(
        "combined_hnd",
        (9, 70),
        (129, 70),
        4,
        2,
        128,
        page_size=16,
        form=KvForm.COMBINED,
        layout="HND",
        mask=_C,
    )
    yield Case("transposed", (9, 70), (129, 70), 4, 2, 128, page_size=4, form=KvForm.TRANSPOSED)
    yield Case("mla_paged", (9, 70), (129, 70), 4, 4, 192, 128, page_size=16, mask=_C)
    yield Case(
        "decode", (1,) * 9, (1, 2, 15, 16, 17, 63, 65, 257, 400), 8, 1, 128, page_size=16, mask=_C
    )
    yield Case("decode_mha", (1,) * 4, (1, 33, 200, 400), 4, 4, 64, page_size=1)
    yield Case("speculative", (4, 3, 2, 1), (64, 333, 18, 2), 5, 1, 256, page_size=8, mask=_C)
    yield Case(
        "split", (1, 2, 40), (700, 513, 600), 4, 2, 128, page_size=16, mask=_C, fixed_split_size=64
    )
    yield Case(
        "split_hnd", (1, 70), (700, 130), 8, 1, 64, page_size=3, layout="HND", fixed_split_size=100
    )
    yield Case("split_ragged", (3, 150, 0), (512, 450, 9), 3, 3, 256, mask=_C, fixed_split_size=128)
    yield Case(
        "split_window", (3, 150), (512, 450), 4, 4, 64, mask=_C, window_left=70, fixed_split_size=64
    )
    yield Case(
        "split_cap_custom",
        (3, 50),
        (512, 450),
        4,
        1,
        128,
        page_size=16,
        mask=_CUSTOM,
        soft_cap=10.0,
        fixed_split_size=64,
    )
    yield Case("split_mla", (3, 50), (512, 450), 2, 2, 192, 128, mask=_C, fixed_split_size=64)
    yield Case(
        "no_split",
        (1, 2, 40),
        (700, 513, 600),
        4,
        2,
        128,
        page_size=16,
        mask=_C,
        disable_split_kv=True,
    )
    yield Case("window_paged", mixed_q, mixed_kv, 4, 2, 128, page_size=16, mask=_C, window_left=50)
    yield Case("left_only_paged", mixed_q, mixed_kv, 4, 2, 64, page_size=1, window_left=9)
    yield Case("softcap_paged", mixed_q, mixed_kv, 8, 2, 256, page_size=16, mask=_C, soft_cap=50.0)
    yield Case(
        "custom_paged", (13, 31, 0, 7, 1), (13, 201, 5, 13, 3), 4, 1, 128, page_size=8, mask=_CUSTOM
    )
    yield Case(
        "packed_paged",
        (13, 31, 7, 1),
        (13, 201, 13, 3),
        8,
        2,
        64,
        page_size=16,
        mask=_PACKED,
        window_left=100,
    )
    yield Case(
        "neg_paged",
        (9, 70),
        (129, 70),
        4,
        2,
        128,
        page_size=16,
        mask=_C,
        magnitude=Magnitude.VERY_NEGATIVE,
        sm_scale=1.0,
    )


def _alibi_cases() -> Iterator[Case]:
    yield Case("alibi", (33, 0, 1, 120), (33, 11, 64, 300), 8, 2, 128, mask=_C, position=_ALIBI)
    yield Case("alibi_full", (70, 5), (40, 131), 12, 4, 64, position=_ALIBI)
    yield Case(
        "alibi_d96", (70, 3), (96, 200), 5, 1, 96, form=KvForm.PADDED, mask=_C, position=_ALIBI
    )
    yield Case("alibi_mla", (37, 100), (37, 211), 3, 3, 192, 128, mask=_C, position=_ALIBI)
    yield Case("alibi_cap", (61, 4), (61, 200), 6, 2, 256, mask=_C, soft_cap=20.0, position=_ALIBI)
    yield Case("alibi_window", (40, 130), (300, 130), 4, 1, 128, window_left=37, position=_ALIBI)
    yield Case("alibi_custom", (61, 31), (61, 200), 10, 5, 64, mask=_CUSTOM, position=_ALIBI)
    yield Case(
        "alibi_custom_cap",
        (13, 31, 7, 1),
        (13, 201, 13, 3),
        4,
        4,
        128,
        mask=_PACKED,
        soft_cap=5.0,
        position=_ALIBI,
    )
    yield Case(
        "alibi_decode", (1, 2, 1, 1), (1, 33, 257, 400), 7, 1, 128, page_size=16, position=_ALIBI
    )
    yield Case(
        "alibi_split",
        (1, 2, 40),
        (700, 513, 600),
        6,
        2,
        64,
        page_size=3,
        mask=_C,
        position=_ALIBI,
        fixed_split_size=64,
    )


def _rope_cases() -> Iterator[Case]:
    yield Case("rope", (33, 0, 1, 120), (33, 11, 64, 300), 8, 2, 128, mask=_C, position=_ROPE)
    yield Case("rope_full", (150, 5, 9), (40, 131, 0), 12, 4, 64, position=_ROPE, rope_scale=3.0)
    yield Case(
        "rope_d40", (70, 3), (96, 200), 5, 1, 40, form=KvForm.PADDED, mask=_C, position=_ROPE
    )
    yield Case(
        "rope_d8", (70, 3), (96, 200), 2, 2, 8, layout="HND", position=_ROPE, rope_theta=50.0
    )
    yield Case("rope_mla", (37, 100), (37, 211), 3, 3, 192, 128, mask=_C, position=_ROPE)
    yield Case(
        "rope_cap_window",
        (61, 4),
        (61, 200),
        6,
        2,
        256,
        window_left=37,
        soft_cap=20.0,
        position=_ROPE,
        rope_theta=5e5,
    )
    yield Case(
        "rope_custom_sinks",
        (61, 31, 90),
        (61, 200, 17),
        10,
        5,
        64,
        page_size=3,
        mask=_PACKED,
        position=_ROPE,
        sinks=_MIXED,
    )
    yield Case(
        "rope_decode", (1, 2, 1, 1), (1, 33, 257, 400), 7, 1, 128, page_size=16, position=_ROPE
    )
    yield Case(
        "rope_split",
        (1, 2, 40),
        (700, 513, 600),
        6,
        2,
        64,
        page_size=3,
        layout="HND",
        mask=_C,
        position=_ROPE,
        fixed_split_size=64,
    )


def _sink_cases() -> Iterator[Case]:
    usual = Sinks.ORDINARY
    yield Case("sinks", (33, 0, 1, 120), (33, 11, 64, 300), 8, 2, 128, mask=_C, sinks=usual)
    yield Case("sinks_full", (70, 5, 3), (40, 131, 0), 12, 4, 64, page_size=16, sinks=_MIXED)
    yield Case("sinks_longer_q", (150, 70), (64, 3), 5, 1, 128, mask=_C, sinks=_MIXED)
    yield Case("sinks_above", (40, 3), (77, 9), 4, 2, 64, sinks=Sinks.ABOVE)
    yield Case("sinks_below", (40, 3), (77, 9), 4, 2, 64, mask=_CUSTOM, sinks=Sinks.BELOW)
    yield Case("sinks_off", (40, 3), (9, 77), 4, 2, 128, mask=_C, sinks=Sinks.OFF)
    yield Case("sinks_window", (40, 130), (300, 9), 8, 1, 256, window_left=37, sinks=_MIXED)
    yield Case(
        "sinks_split", (1, 2, 40), (700, 513, 600), 6, 2, 64, sinks=usual, fixed_split_size=64
    )
    yield Case(
        "sinks_split_mixed",
        (1, 2, 90),
        (700, 0, 200),
        8,
        2,
        192,
        128,
        page_size=16,
        mask=_C,
        sinks=_MIXED,
        fixed_split_size=128,
    )
    yield Case(
        "sinks_alibi_cap",
        (61, 3),
        (61, 500),
        6,
        2,
        128,
        mask=_CUSTOM,
        soft_cap=20.0,
        position=_ALIBI,
        sinks=_MIXED,
        fixed_split_size=64,
    )


def _wide_cases() -> Iterator[Case]:
    """More than 256 columns: warps (fa2) and CTAs (fa3) share those of O out."""
    few, many = (33, 130, 1, 0), (70, 300, 9, 5)
    yield Case("d512", few, many, 8, 4, 512, mask=_C)
    yield Case("d512_hnd", few, many, 4, 4, 512, layout="HND", form=KvForm.COMBINED)
    yield Case("d264", few, many, 4, 2, 264, form=KvForm.PADDED, mask=_C)
    yield Case("d320_paged", few, many, 8, 1, 320, page_size=16, mask=_C)
    yield Case("d384_page1", few, many, 4, 2, 384, page_size=1, mask=_C, window_left=40)
    yield Case("d448_page5", (70, 9), (129, 200), 6, 2, 448, page_size=5, layout="HND")
    yield Case("d512_page100", few, many, 4, 1, 512, page_size=100, mask=_C)
    yield Case("d512x64", (33, 5), (70, 90), 4, 2, 512, 64, mask=_C)
    yield Case("d64x512", (33, 5), (70, 90), 4, 2, 64, 512, page_size=8, mask=_C)
    yield Case("d512_left_only", (40, 130), (300, 130), 4, 1, 512, window_left=17)
    yield Case("d512_longer_q", (150, 7), (64, 0), 4, 2, 512, mask=_C)
    yield Case("d512_decode", (1,) * 4, (1, 16, 257, 400), 16, 1, 512, page_size=16, mask=_C)
    yield Case("d512_cap", (61, 4), (61, 200), 6, 2, 512, mask=_C, soft_cap=20.0)
    yield Case("d512_alibi", (61, 4), (61, 200), 6, 2, 512, page_size=16, mask=_C, position=_ALIBI)
    yield Case("d512_sinks", (40, 130), (300, 9), 32, 4, 512, page_size=8, mask=_C, sinks=_MIXED)
    yield Case("d512_custom", (61, 31), (61, 200), 4, 2, 512, mask=_CUSTOM)
    split = {"page_size": 16, "mask": _C, "fixed_split_size": 128, "sinks": _MIXED}
    yield Case("d512_split", (3, 50), (512, 450), 8, 2, 512, **split)


def core() -> list[Case]:
    """Hand-written cases that together touch every axis of the specification."""
    return [
        *_ragged_cases(),
        *_paged_cases(),
        *_alibi_cases(),
        *_rope_cases(),
        *_sink_cases(),
        *_wide_cases(),
    ]


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
        Case("d96", (20, 0, 3), (45, 7, 0), 2, 1, 96, form=KvForm.PADDED, mask=_C),
        Case("d256", (20,), (90,), 2, 1, 256, form=KvForm.HALVES, mask=_C),
        Case("d512", (20,), (90,), 2, 1, 512, page_size=16, mask=_C, window_left=40),
        Case("d264", (9, 3), (70, 33), 4, 1, 264, form=KvForm.PADDED, mask=_C, soft_cap=5.0),
        Case("alibi", (20, 1), (90, 40), 3, 1, 128, mask=_C, position=_ALIBI),
        Case("sinks", (20, 1), (9, 200), 4, 1, 64, mask=_C, sinks=_MIXED, fixed_split_size=64),
    ]


@dataclasses.dataclass(frozen=True)
class Limits:
    """How large random cases get, and what of a backend's options they may have."""

    longest: int = 300  # tokens of a request
    work: float = 2e9  # multiply-adds of q k^T and p v before any mask, a token counting as 32
    dtypes: tuple[torch.dtype, ...] = (torch.float16, torch.bfloat16)
    fp8: bool = True  # 8-bit keys and values, and queries and outputs
    rope: bool = True


def _length(rng: random.Random, longest: int) -> int:
    """Mostly around tile edges or short; sometimes zero."""
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
    """Query and key lengths of a batch with about `most_pairs` pairs of a query and a key. Tokens
    count too: tests make, poison and compare them, which takes the time of some 32 pairs; a key
    has one row where a query has `group_size`."""
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
    """Masks and everything else between q k^T and the softmax."""
    return {
        "mask": rng.choice([MaskKind.NONE, MaskKind.NONE, _C, _C, _C, _CUSTOM, _CUSTOM8, _PACKED]),
        "window_left": rng.choice([-1] * 6 + [0, 1, 17, 64, 200, 2**30]),
        "soft_cap": rng.choice([None] * 6 + [0.0, 0.5, 2.0, 30.0, 1000.0]),
        "sm_scale": rng.choice([None] * 5 + [0.05, 0.3, 1.0, -0.2, -1.0, 0.0, 1e-4]),
        "position": rng.choice([Position.NONE] * 4 + [_ALIBI]),
        "sinks": rng.choice([Sinks.NONE] * 12 + [s for s in Sinks if s is not Sinks.NONE]),
        "magnitude": rng.choice([Magnitude.NORMAL] * 12 + list(Magnitude)),
    }


def _random_fp8(rng: random.Random) -> dict[str, object]:
    """Tensors of 8 bits: keys and values alone, or queries too."""
    head_scales = rng.random() < 0.5
    cache = rng.choice([torch.float8_e4m3fn, torch.float8_e5m2])
    output = rng.choice([None, torch.float16, torch.bfloat16, torch.float8_e4m3fn])
    if rng.random() < 0.5:
        return {"kv_dtype": cache, "head_scales": head_scales}
    return {"dtype": torch.float8_e4m3fn, "o_dtype": output, "head_scales": head_scales}


def _random_rope(rng: random.Random) -> dict[str, object]:
    return {
        "position": _ROPE,
        "rope_scale": rng.choice([None, None, 0.25, 1.0, 8.0]),
        "rope_theta": rng.choice([None, None, 1.0, 50.0, 5e5]),
    }


def random_case(rng: random.Random, name: str, limits: Limits) -> Case:
    """A case from anywhere in the space of options that every wrapper takes.

    The limits change no draw, so that backends with other dtypes and options see the same lengths.
    """
    dim = rng.choice([64, 128, 128, 256, 512, 8 * rng.randint(1, 64)])
    dims = (192, 128) if rng.random() < 0.1 else (dim, dim)
    num_kv_heads = rng.choice([1, 1, 2, 3])
    groups = [1, 1, 1, 2, 2, 3, 3, 4, 4, 5, 7, 7, 8, 8, 16, 16, 128]
    group_size = rng.choice(groups)
    num_qo_heads = num_kv_heads * group_size
    most_pairs = limits.work / (num_qo_heads * sum(dims))
    qo_lens, kv_lens = _lengths(rng, limits.longest, most_pairs, group_size)
    storage = _random_storage(rng, dims)
    logits = _random_logits(rng)
    split = rng.random()
    case = Case(
        name,
        qo_lens,
        kv_lens,
        num_qo_heads,
        num_kv_heads,
        dims[0],
        None if dims[0] == dims[1] else dims[1],
        fixed_split_size=rng.choice([1, 64, 64, 100, 128, 256]) if split < 0.5 else None,
        disable_split_kv=split > 0.85,
        **storage,
        **logits,
        # NOTE: not choice(), which takes a number of draws that depends on how many there are.
        dtype=limits.dtypes[int(rng.random() * len(limits.dtypes))],
    )
    for served, share, options in (
        (limits.fp8, 0.25, _random_fp8(rng)),
        (limits.rope, 0.2, _random_rope(rng)),
    ):
        if rng.random() < share and served:
            changed = dataclasses.replace(case, **options)
            case = changed if not changed.contradiction else case
    return case


def random_cases(count: int, *, seed: int, longest: int = 300, work: float = 2e9) -> list[Case]:
    """`count` cases drawn from `seed`, within `Limits` of `longest` and `work`."""
    rng = random.Random(seed)
    limits = Limits(longest, work, fp8=False, rope=False)
    return [random_case(rng, f"fuzz{index}", limits) for index in range(count)]


def random_staged_cases(count: int, *, seed: int) -> list[Case]:
    """`count` cases that have a staged form: RoPE or fp8, and an output of 16 bits in the dtype of
    the products."""
    rng = random.Random(seed)
    limits = Limits(300, 2e9, dtypes=(torch.float16, torch.bfloat16))
    found: list[Case] = []
    while len(found) < count:
        case = random_case(rng, f"fuzz{len(found)}", limits)
        if case.has_staged_form and not case.head_scales:
            found.append(case)
    return found
