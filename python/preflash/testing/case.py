"""A `Case` says everything about an attention problem but the numbers."""

from __future__ import annotations

import dataclasses
import enum

import torch

from .oracle import Pipeline, kept_pairs

DTYPE_NAMES = {
    torch.float16: "f16",
    torch.bfloat16: "bf16",
    torch.float32: "f32",
    torch.float8_e4m3fn: "e4m3",
    torch.float8_e5m2: "e5m2",
}


class MaskKind(enum.Enum):
    """Keys that a row keeps, before the window: all, causal, or a random custom mask."""

    NONE = "full"
    CAUSAL = "causal"
    CUSTOM = "custom"  # dense, flattened, bool
    CUSTOM_UINT8 = "custom8"  # dense, flattened, uint8
    PACKED = "packed"  # bits in little order, every request on its own byte


class KvForm(enum.Enum):
    """Memory form of K and V. The logical shape is that of `layout` in every form."""

    SEPARATE = "sep"  # two contiguous tensors
    COMBINED = "comb"  # one tensor with K and V interleaved: the 5-D cache
    HALVES = "halves"  # two halves of one last dimension of head_dim_qk + head_dim_vo
    PADDED = "padded"  # 16 poisoned columns after every row, of q as well
    TRANSPOSED = "transp"  # memory order of the other layout
    FLAT = "flat"  # page_size 1 without the page dimension: 3-D


class Magnitude(enum.Enum):
    """Distribution of the logits."""

    NORMAL = "normal"  # independent normal numbers
    IDENTICAL = "identical"  # all logits of a row are equal
    VERY_NEGATIVE = "neg"  # around -2.5e5, exact in float32, with differences of a few units


class Garbage(enum.Enum):
    """Content of memory that belongs to no request."""

    NON_FINITE = "nonfinite"  # NaN, +Inf and -Inf
    NAN = "nan"
    HUGE = "huge"  # 1e30 of either sign, or the largest number of the dtype
    ANY = "any"  # all of these


class Position(enum.Enum):
    """Position encoding: pos_encoding_mode of the wrappers."""

    NONE = "NONE"
    ALIBI = "ALIBI"
    ROPE = "ROPE_LLAMA"


class Sinks(enum.Enum):
    """Sinks that run() gets, by their size relative to the logits."""

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
    batch_invariant: bool = False
    magnitude: Magnitude = Magnitude.NORMAL
    position: Position = Position.NONE
    rope_scale: float | None = None
    rope_theta: float | None = None
    sinks: Sinks = Sinks.NONE
    garbage: Garbage = Garbage.NON_FINITE
    kv_dtype: torch.dtype | None = None  # None: q's
    o_dtype: torch.dtype | None = None  # None: q's, bfloat16 for q of 8 bits
    head_scales: bool = False  # run() gets per-head factors of the fp8 tensors
    q_quantization: str = "none"  # of plan()

    def __post_init__(self) -> None:
        if len(self.qo_lens) != len(self.kv_lens):
            lengths = f"{len(self.qo_lens)} qo_lens, {len(self.kv_lens)} kv_lens"
            raise ValueError(f"{self.name}: {lengths}")
        if self.num_kv_heads < 1 or self.num_qo_heads % self.num_kv_heads:
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
    def has_prepass_form(self) -> bool:
        """True if a pre-pass may copy k, v and q: RoPE or fp8, in the dtype of the output."""
        products = self.dtype_o if self.dtype.itemsize == 1 else self.dtype
        changes = self.position is Position.ROPE or self.dtype_kv.itemsize == 1
        return changes and products.itemsize == 2 and self.dtype_o == products

    @property
    def id(self) -> str:
        """Readable and unique within a list: the name, then what decides the kernel."""
        dtype = DTYPE_NAMES[self.dtype]
        if self.kv_dtype is not None:
            dtype += f"_kv{DTYPE_NAMES[self.kv_dtype]}"
        if self.o_dtype is not None:
            dtype += f"_o{DTYPE_NAMES[self.o_dtype]}"
        dims = f"d{self.head_dim}" + (f"x{self.dim_vo}" if self.dim_vo != self.head_dim else "")
        heads = f"h{self.num_qo_heads}k{self.num_kv_heads}"
        storage = f"p{self.page_size}" if self.paged else "ragged"
        rotated = self.rope_scale is not None or self.rope_theta is not None
        options = {
            f"w{self.window_left}": self.window_left >= 0,
            f"cap{self.soft_cap or 0:g}": self.soft_cap,
            self.position.name.lower(): self.position is not Position.NONE,
            f"s{self.rope_scale or 1:g}t{self.rope_theta or 1e4:g}": rotated,
            f"sinks_{self.sinks.value}": self.sinks is not Sinks.NONE,
            "scales": self.head_scales,
            f"q_by_{self.q_quantization}": self.q_quantization != "none",
            f"split{self.fixed_split_size}": self.fixed_split_size is not None,
            "nosplit": self.disable_split_kv,
            "invariant": self.batch_invariant,
        }
        parts = [self.name, dtype, dims, heads, storage, self.layout.lower(), self.form.value]
        parts += [self.mask.value, *(name for name, given in options.items() if given)]
        return "-".join(parts)

    @property
    def is_invariant(self) -> bool:
        """True if the bits of a request's rows depend on the request alone."""
        return self.batch_invariant or self.disable_split_kv or self.fixed_split_size is not None

    def with_dtype(self, dtype: torch.dtype) -> Case:
        return dataclasses.replace(self, dtype=dtype)


def flops(case: Case) -> float:
    """Multiply-adds counted twice, causal and window regions by the keys that are kept."""
    bounds = Pipeline(case.scale, case.mask is MaskKind.CAUSAL, case.window_left)
    lengths = zip(case.qo_lens, case.kv_lens, strict=True)
    kept = sum(kept_pairs(bounds, *pair) for pair in lengths)
    return 2.0 * kept * case.num_qo_heads * (case.head_dim + case.dim_vo)
