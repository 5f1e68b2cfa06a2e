"""The benchmark's rows, as data: what is computed, and the baselines of each."""

from __future__ import annotations

import dataclasses
import enum
import itertools

import torch

from ...testing.case import Case, KvForm, MaskKind

Lengths = tuple[int, ...]


class Metric(enum.Enum):
    """The unit of a row's speed."""

    TFLOPS = "TFLOP/s"  # 4 * head_dim * kept pairs * query heads: causal counts as half
    GBPS = "GB/s"  # bytes of K, V, q and o


class Baseline(enum.Enum):
    """A baseline that a row is measured against, in the same run."""

    SDPA = "sdpa"  # torch's scaled_dot_product_attention, once per backend
    VARLEN = "varlen"  # torch's variable-length FA2 operator, GPU only
    READ = "read"  # a plain read of as many bytes, the limit of decode, GPU only


@dataclasses.dataclass(frozen=True)
class BenchRow:
    """One row of a benchmark: a case, and the further fields of subclasses."""

    case: Case

    @property
    def name(self) -> str:
        return self.case.name

    @property
    def dtype_name(self) -> str:
        return str(self.case.dtype).removeprefix("torch.")

    @property
    def calls_per_graph(self) -> int:
        """Timed calls per CUDA graph."""
        return 10

    def with_dtype(self, dtype: torch.dtype) -> BenchRow:
        cases = {name: case for name, case in vars(self).items() if isinstance(case, Case)}
        changed = {name: case.with_dtype(dtype) for name, case in cases.items()}
        return dataclasses.replace(self, **changed)


@dataclasses.dataclass(frozen=True)
class Row(BenchRow):
    """A row of the wrappers; `relative_to` is the same case without pages, or, where it splits keys
    as batch invariance wants it, as the planner would."""

    metric: Metric = Metric.TFLOPS
    baselines: tuple[Baseline, ...] = ()
    relative_to: Case | None = None

    def bytes(self) -> int:
        """Bytes that have to move: K and V once, q and o once."""
        case = self.case
        rows = case.num_kv_heads * sum(case.kv_lens) + case.num_qo_heads * sum(case.qo_lens)
        return case.dtype.itemsize * rows * (case.head_dim + case.dim_vo)


# Sixteen mixed requests, 64 to 4096 tokens.
_MIXED = (4096, 3072, 2048, 1536, 1024, 1024, 768, 512, 512, 384, 256, 256, 128, 128, 64, 64)


def _dense(head_dim: int, length: int, tokens: int, num_heads: int, mask: MaskKind) -> Row:
    lengths = (length,) * max(tokens // length, 1)
    name = f"dense d{head_dim} s{length} {mask.value}"
    case = Case(name, lengths, lengths, num_heads, num_heads, head_dim, mask=mask)
    return Row(case, baselines=(Baseline.SDPA,))


def _grouped(
    name: str, qo_lens: Lengths, kv_lens: Lengths, kv_heads: int, page_sizes=()
) -> list[Row]:
    """GQA 4: a row without pages, and one of each page size."""
    case = Case(name, qo_lens, kv_lens, 4 * kv_heads, kv_heads, 128, mask=MaskKind.CAUSAL)
    rows = [Row(case, baselines=(Baseline.VARLEN,))]
    for size in page_sizes:
        changes = {"name": f"{name} page {size}", "page_size": size, "form": KvForm.COMBINED}
        rows.append(Row(dataclasses.replace(case, **changes), relative_to=case))
    return rows


def _decode(name: str, batch: int, kv_len: int, kv_heads: int) -> Row:
    _, paged = _grouped(name, (1,) * batch, (kv_len,) * batch, kv_heads, [16])
    return Row(paged.case, Metric.GBPS, (Baseline.READ,))


def _batch_invariant(row: Row) -> list[Row]:
    """The splits with which a request's bits do not depend on the rest of its batch."""
    rows = []
    splits = {"split 2048": {"fixed_split_size": 2048}, "unsplit": {"disable_split_kv": True}}
    for name, split in splits.items():
        case = dataclasses.replace(row.case, name=f"invariant {row.name} {name}", **split)
        rows.append(Row(case, row.metric, relative_to=row.case))
    return rows


def gpu_rows() -> list[Row]:
    """16k tokens in all; 2048 // head_dim heads for the dense rows, GQA 32/8 for the others."""
    rows = [
        _dense(head_dim, length, 16384, 2048 // head_dim, mask)
        for head_dim in (64, 128, 256)
        for length in (1024, 4096, 16384)
        for mask in (MaskKind.NONE, MaskKind.CAUSAL)
    ]
    mixed = _grouped("mixed", _MIXED, _MIXED, 8, [1, 16, 64])
    append = ("append 512 on 8k x8", (512,) * 8, (8192,) * 8)
    append = _grouped(*append, 8, [1, 16, 64, 128, 256])
    chunk = _grouped("chunk 2k on 64k", (2048,), (65536,), 8, [16])
    rows += [*mixed, *append, *chunk]
    four = (2048,) * 4
    wide = Case("4x2048 d192x128", four, four, 16, 16, 192, 128, mask=MaskKind.CAUSAL)
    rows.append(Row(wide, baselines=(Baseline.SDPA,)))
    lengths = {"256x1k": (256, 1024), "64x4k": (64, 4096), "4x32k": (4, 32768)}
    decodes = [_decode(f"decode {name}", *shape, 8) for name, shape in lengths.items()]
    small = _grouped("small 16 on 2k x32", (16,) * 32, (2048,) * 32, 8, [16])[1]
    small = dataclasses.replace(small, relative_to=None)
    invariant = map(_batch_invariant, (mixed[2], append[2], chunk[1], small, *decodes))
    return [*rows, small, *decodes, *itertools.chain(*invariant)]


def cpu_rows() -> list[Row]:
    """The same kinds, sized for a few CPU cores."""
    rows = [
        _dense(head_dim, 2048, 2048, 8, mask)
        for head_dim in (64, 128, 256)
        for mask in (MaskKind.NONE, MaskKind.CAUSAL)
    ]
    mixed = tuple(length // 8 for length in _MIXED)
    rows += _grouped("mixed", mixed, mixed, 2, [1, 16, 64])
    append = _grouped("append 64 on 1k x4", (64,) * 4, (1024,) * 4, 2, [16])
    decode = _decode("decode 8x1k", 8, 1024, 2)
    return [*rows, *append, decode, *_batch_invariant(append[1])]


def quick_rows() -> list[Row]:
    """A few small rows of each kind: seconds, even on one core."""
    lengths = (256, 129, 64, 7)
    return [
        _dense(128, 512, 512, 4, MaskKind.CAUSAL),
        _dense(64, 512, 512, 4, MaskKind.NONE),
        *_grouped("mixed", lengths, lengths, 2, [16]),
        _decode("decode 4x512", 4, 512, 2),
    ]


def rows_for(device_type: str, quick: bool) -> list[Row]:
    """The rows that suit a device: "cuda" or "cpu"."""
    if quick:
        return quick_rows()
    return gpu_rows() if device_type == "cuda" else cpu_rows()
