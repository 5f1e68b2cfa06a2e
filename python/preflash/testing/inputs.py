"""Tensors for a `Case`. Every page slot and row that belongs to no request, and every padding
column, holds garbage, NaN and infinities unless the case says otherwise: a kernel that lets one of
them touch a result (0 * NaN is NaN) is found out. Pages are a random permutation of a larger pool.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Sequence

import torch

from .case import Case, Garbage, KvForm, Magnitude, MaskKind, Position, Sinks
from .oracle import HeadScales, Pipeline, Rope, alibi_slopes

# Prefix of the ids of kernels that multiply 8-bit operands as stored.
PRODUCTS_OF_8_BITS = "sm90_e4m3_"
PAD_COLUMNS = 16  # a multiple of 16 bytes in every dtype
SPARE_ROWS = 5  # ragged rows behind the last request
SPARE_PAGES = 3


@dataclasses.dataclass
class Request:
    """One request, dense: q [L, Hq, Dqk], k [S, Hkv, Dqk], v [S, Hkv, Dvo], mask [L, S] or None."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    mask: torch.Tensor | None


@dataclasses.dataclass
class Inputs:
    """Inputs of the wrappers. Ragged: k, v, kv_indptr in tokens. Paged: cache and a page table."""

    case: Case
    q: torch.Tensor
    qo_indptr: torch.Tensor
    kv_indptr: torch.Tensor
    k: torch.Tensor  # ragged: in the case's layout; paged: the pool, 4-D (3-D when flat)
    v: torch.Tensor
    cache: torch.Tensor | tuple[torch.Tensor, torch.Tensor] | None = None
    indices: torch.Tensor | None = None
    last_page_len: torch.Tensor | None = None
    custom_mask: torch.Tensor | None = None
    packed_custom_mask: torch.Tensor | None = None
    masks: list[torch.Tensor] | None = None
    page_table: list[list[int]] | None = None
    sinks: torch.Tensor | None = None
    scales: HeadScales = dataclasses.field(default_factory=HeadScales)
    variant: str = ""  # id of the kernel that ran last (runner.run)

    @property
    def products_of_8_bits(self) -> bool:
        """True if the kernel that ran last multiplies 8-bit operands as stored."""
        return self.variant.startswith(PRODUCTS_OF_8_BITS)

    @property
    def pipeline(self) -> Pipeline:
        case = self.case
        steps = {field.name for field in dataclasses.fields(Pipeline)}
        same = {name: value for name, value in vars(case).items() if name in steps}
        # None stands for the defaults of the interface, not for those of the oracle.
        rope = Rope(case.rope_scale or 1.0, case.rope_theta or 1e4)
        changes = {
            "sm_scale": case.scale,
            "causal": case.mask is MaskKind.CAUSAL,
            "soft_cap": case.soft_cap or 0.0,
            "slopes": alibi_slopes(case.num_qo_heads) if case.position is Position.ALIBI else None,
            "rope": rope if case.position is Position.ROPE else None,
            "sinks": self.sinks,
            "scales": self.scales,
            "quantizes_q": case.dtype.itemsize == 2 and self.products_of_8_bits,
        }
        return Pipeline(**{**same, **changes})

    def request(self, i: int) -> Request:
        """Gathers request i out of the storage, following the page table."""
        case = self.case
        q = self.q.narrow(0, sum(case.qo_lens[:i]), case.qo_lens[i])
        begin, kv_len = sum(case.kv_lens[:i]), case.kv_lens[i]
        if self.page_table is None:
            k, v = (as_nhd(t, case.layout).narrow(0, begin, kv_len) for t in (self.k, self.v))
        else:
            pages = torch.tensor(self.page_table[i], dtype=torch.long, device=q.device)
            k, v = (pages_of(t, case)[pages].flatten(0, 1)[:kv_len] for t in (self.k, self.v))
        return Request(q, k, v, None if self.masks is None else self.masks[i])


def as_nhd(t: torch.Tensor, layout: str) -> torch.Tensor:
    return t if layout == "NHD" else t.transpose(-3, -2)


def pages_of(pool: torch.Tensor, case: Case) -> torch.Tensor:
    """[pages, page_size, heads, dim] whatever the layout and form."""
    return pool[:, None] if case.form is KvForm.FLAT else as_nhd(pool, case.layout)


def fill_poison(
    t: torch.Tensor, generator: torch.Generator | None = None, garbage: Garbage = Garbage.NON_FINITE
) -> torch.Tensor:
    """Fills `t` with garbage, by default NaN, +Inf and -Inf in random places."""
    huge = min(1e30, torch.finfo(t.dtype).max)
    others = {
        Garbage.NON_FINITE: (math.inf, -math.inf),
        Garbage.NAN: (),
        Garbage.HUGE: (huge, -huge, huge, -huge),
        Garbage.ANY: (math.inf, -math.inf, huge),
    }[garbage]
    # On the CPU, where the generator is, whatever device the caller made the default.
    choice = torch.randint(0, 4, t.shape, generator=generator, dtype=torch.int8, device="cpu")
    poison = torch.full(t.shape, math.nan, device=t.device)
    choice = choice.to(t.device)
    for i, value in enumerate(others):
        poison.masked_fill_(choice == i, value)
    return t.copy_(poison.to(t.dtype))  # e4m3 has NaN for every infinity


def storage(
    case: Case, leading: Sequence[int], generator: torch.Generator, device: torch.device | str
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Poisoned K and V of shape [*leading, head, dim] in the layout, and the 5-D tensor if any;
    `leading` is (pages, page_size) or (tokens,)."""
    *outer, tokens = leading
    heads, form = case.num_kv_heads, case.form
    hnd = (case.layout == "HND") != (form is KvForm.TRANSPOSED)
    rows = [heads, tokens] if hnd else [tokens, heads]

    def make(*shape: int) -> torch.Tensor:
        if case.garbage is Garbage.NAN:  # the same everywhere: nothing to draw
            return torch.empty(shape, dtype=case.dtype_kv, device=device).fill_(math.nan)
        blank = torch.empty(shape, dtype=case.dtype_kv, device="cpu")
        return fill_poison(blank, generator, case.garbage).to(device)

    if form is KvForm.COMBINED:
        first, *others = [*outer, *rows]
        both = make(first, 2, *others, case.head_dim)
        return both[:, 0], both[:, 1], both if case.paged else None
    if form is KvForm.HALVES:
        both = make(*outer, *rows, case.head_dim + case.dim_vo)
        return both[..., : case.head_dim], both[..., case.head_dim :], None
    leading = [tokens, heads] if form is KvForm.FLAT else [*outer, *rows]
    padding = PAD_COLUMNS if form is KvForm.PADDED else 0
    k, v = (make(*leading, dim + padding)[..., :dim] for dim in (case.head_dim, case.dim_vo))
    if form is KvForm.TRANSPOSED:
        k, v = k.transpose(-3, -2), v.transpose(-3, -2)
    return k, v, None


def values(
    case: Case, kind: str, rows: int, heads: int, dim: int, generator: torch.Generator
) -> torch.Tensor:
    """Random contents of one request's q, k or v: [rows, heads, dim], where the generator is."""
    there = {"dtype": torch.float32, "device": generator.device}
    values = torch.randn(rows, heads, dim, generator=generator, **there)
    if kind == "v" or case.magnitude is Magnitude.NORMAL:
        return values
    if case.magnitude is Magnitude.IDENTICAL:
        return values[:1].expand(rows, heads, dim) if kind == "k" else values
    # -500 * 500 plus a small integer: exact in every format and in float32 sums.
    values = torch.zeros(rows, heads, dim, **there)
    values[..., 0] = -500.0 if kind == "q" else 500.0
    values[..., 1] = 1.0 if kind == "q" else 0.0
    if kind == "k":
        draws = torch.randint(-3, 4, (rows, heads), generator=generator, device=generator.device)
        values[..., 1] = draws.float()
    return values


def page_table(case: Case, generator: torch.Generator) -> list[list[int]]:
    """The pages of each request, out of a pool with SPARE_PAGES more."""
    counts = [-(-kv_len // case.page_size) for kv_len in case.kv_lens]
    num_pages = sum(counts) + SPARE_PAGES
    shuffled = torch.randperm(num_pages, generator=generator, device="cpu").tolist()
    ends = itertools.accumulate(counts, initial=0)
    return [shuffled[begin:end] for begin, end in itertools.pairwise(ends)]


def _masks(case: Case, generator: torch.Generator) -> list[torch.Tensor]:
    """Random masks; some rows keep nothing, some everything, and whole blocks are uniform."""
    masks, host = [], {"generator": generator, "dtype": torch.float32, "device": "cpu"}
    for qo_len, kv_len in zip(case.qo_lens, case.kv_lens, strict=True):
        mask = torch.rand(qo_len, kv_len, **host) < 0.6
        draw = torch.rand(qo_len, 1, **host)
        mask = (mask & (draw > 0.05)) | (draw > 0.9)
        if kv_len > 96:
            mask[:, 32:64] = False
            mask[:, 64:96] = True
        masks.append(mask)
    return masks


def pack_little(mask: torch.Tensor) -> torch.Tensor:
    """Bits of one flattened request: bit b of byte t is element 8 t + b, padded with zeros."""
    padded = torch.nn.functional.pad(mask.flatten().int(), (0, -mask.numel() % 8)).view(-1, 8)
    return (padded << torch.arange(8, dtype=torch.int32, device=mask.device)).sum(1).byte()


def indptr(lengths: Sequence[int], device: torch.device | str = "cpu") -> torch.Tensor:
    """int32 [len + 1]: 0 and the running sums."""
    sums = list(itertools.accumulate(lengths, initial=0))
    return torch.tensor(sums, dtype=torch.int32, device=device)


def _query(case: Case, generator: torch.Generator, device: torch.device | str) -> torch.Tensor:
    heads, dim = case.num_qo_heads, case.head_dim
    parts = [values(case, "q", n, heads, dim, generator) for n in case.qo_lens]
    q = torch.cat(parts or [torch.zeros(0, heads, dim, device=device)]).to(case.dtype)
    if case.form is not KvForm.PADDED:
        return q.to(device)
    wide = torch.empty(*q.shape[:2], dim + PAD_COLUMNS, dtype=case.dtype, device="cpu")
    fill_poison(wide, generator, case.garbage)[..., :dim] = q
    return wide.to(device)[..., :dim]


def _sinks(case: Case, generator: torch.Generator, device) -> torch.Tensor | None:
    """float32 [num_qo_heads]. No logit of a case is larger than 3e5."""
    if case.sinks is Sinks.NONE:
        return None
    host = {"generator": generator, "dtype": torch.float32, "device": "cpu"}
    ordinary = 3 * torch.randn(case.num_qo_heads, **host)
    off = torch.full_like(ordinary, -math.inf)
    kinds = (Sinks.ORDINARY, Sinks.ABOVE, Sinks.BELOW, Sinks.OFF)
    choices = torch.stack([ordinary, ordinary + 1e6, ordinary - 1e6, off])
    heads = torch.arange(case.num_qo_heads, device="cpu")
    chosen = heads % len(kinds) if case.sinks is Sinks.MIXED else kinds.index(case.sinks)
    return choices[chosen, heads].to(device)


def _head_scales(case: Case, generator: torch.Generator, device) -> HeadScales:
    """Positive and negative factors of the fp8 tensors, none near zero."""
    host = {"generator": generator, "device": "cpu"}

    def draw(heads: int) -> torch.Tensor:
        sizes = torch.rand(heads, dtype=torch.float32, **host) + 0.5
        return (sizes * (torch.randint(0, 2, (heads,), **host) * 2 - 1)).to(device)

    if not case.head_scales:
        return HeadScales()
    q = draw(case.num_qo_heads) if case.dtype.itemsize == 1 else None
    return HeadScales(q, draw(case.num_kv_heads), draw(case.num_kv_heads))


def build(
    case: Case,
    *,
    device: torch.device | str = "cpu",
    index_device: torch.device | str | None = None,
    seed: int = 0,
    generator: torch.Generator | None = None,
    table: list[list[int]] | None = None,
) -> Inputs:
    """Makes the tensors of a case on `device`; indptr, indices and lengths on `index_device`.

    A generator in the place of `seed` draws on its own device. One on a GPU takes cases whose
    garbage is NaN, without a custom mask, sinks and factors of heads. `table`: a page table of the
    case, else a random one."""
    generator = torch.Generator().manual_seed(seed) if generator is None else generator
    index_device = device if index_device is None else index_device
    q = _query(case, generator, device)
    contents = []
    for kv_len in case.kv_lens:
        k = values(case, "k", kv_len, case.num_kv_heads, case.head_dim, generator)
        v = values(case, "v", kv_len, case.num_kv_heads, case.dim_vo, generator)
        contents.append((k.to(case.dtype_kv).to(device), v.to(case.dtype_kv).to(device)))
    masks = [m.to(device) for m in _masks(case, generator)] if case.has_custom_mask else None

    offsets = (indptr(case.qo_lens, index_device), indptr(case.kv_lens, index_device))
    inputs = Inputs(case, q, *offsets, k=q, v=q, masks=masks)
    if case.paged:
        table = page_table(case, generator) if table is None else table
        _fill_paged(inputs, contents, table, generator, index_device)
    else:
        total = sum(case.kv_lens)
        inputs.k, inputs.v, _ = storage(case, (total + SPARE_ROWS,), generator, device)
        for pool, rows in zip((inputs.k, inputs.v), zip(*contents, strict=True), strict=False):
            as_nhd(pool, case.layout)[:total] = torch.cat(rows)
    if masks is not None:
        attach_masks(inputs, masks, device)
    inputs.sinks = _sinks(case, generator, device)
    inputs.scales = _head_scales(case, generator, device)
    return inputs


def _fill_paged(inputs: Inputs, contents, table, generator, index_device) -> None:
    case, device = inputs.case, inputs.q.device
    num_pages = sum(map(len, table)) + SPARE_PAGES
    leading = (num_pages,) if case.form is KvForm.FLAT else (num_pages, case.page_size)
    inputs.k, inputs.v, both = storage(case, leading, generator, device)
    inputs.cache = (inputs.k, inputs.v) if both is None else both
    inputs.page_table = table
    pools = [pages_of(pool, case) for pool in (inputs.k, inputs.v)]
    for pages, both_rows in zip(table, contents, strict=True):
        slots = torch.arange(both_rows[0].shape[0], device=device)
        page = torch.tensor(pages, dtype=torch.long, device=device)
        for pool, rows in zip(pools, both_rows, strict=True):
            pool[page[slots // case.page_size], slots % case.page_size] = rows
    flat = [page for pages in table for page in pages]
    inputs.indices = torch.tensor(flat, dtype=torch.int32, device=index_device)
    inputs.kv_indptr = indptr([len(pages) for pages in table], index_device)
    last = [(n - 1) % case.page_size + 1 if n else 0 for n in case.kv_lens]
    inputs.last_page_len = torch.tensor(last, dtype=torch.int32, device=index_device)


def attach_masks(inputs: Inputs, masks: list[torch.Tensor], device) -> None:
    flat = torch.cat([mask.flatten() for mask in masks])
    if inputs.case.mask is MaskKind.PACKED:
        inputs.packed_custom_mask = torch.cat([pack_little(mask) for mask in masks]).to(device)
    else:  # any non-zero integer keeps
        inputs.custom_mask = flat.byte() * 3 if inputs.case.mask is MaskKind.CUSTOM_UINT8 else flat
