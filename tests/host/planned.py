"""Decodes plans as a kernel finds them: the int workspace, by the layout that came with it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

import numpy as np
from preflash import _core
from preflash_harness import planner

FINAL = -1
ITEM_COST, PARTIAL_COST = 2, 1  # work.h, CostModel: cost of an item besides its KV tiles

REQUEST = np.dtype(
    [(name, "<i4") for name in ("qo_begin", "qo_len", "kv_begin", "kv_len")]
    + [("mask_begin", "<i8"), ("chunk_keys", "<i4"), ("segment", "<i4")]
)
_TILE = [("request", "<i4"), ("row_begin", "<i4"), ("kv_head", "<i2")]
ITEM = np.dtype([*_TILE, ("chunk", "<i2"), ("partial_row", "<i4")])
MERGE = np.dtype([*_TILE, ("num_chunks", "<i2"), ("first_row", "<i4")])

SEGMENT_DEFAULTS = {
    "num_qo_heads": 4,
    "num_kv_heads": 2,
    "tile_m": 64,
    "tile_n": 64,
    "ctas_per_sm": 2,
    "causal": False,
    "window_left": -1,
    "chunk_size": 0,
}
LAUNCH_DEFAULTS = {"num_sms": 132, "float_workspace_bytes": 128 << 20}
DEFAULTS = SEGMENT_DEFAULTS | LAUNCH_DEFAULTS


def indptr(lengths) -> list[int]:
    return [0, *accumulate(int(n) for n in lengths)]


def segment(qo_lens, kv_lens, **options) -> dict:
    """Returns the arguments of one of two segments."""
    return SEGMENT_DEFAULTS | {"qo_indptr": indptr(qo_lens), "kv_indptr": indptr(kv_lens)} | options


def ragged(qo_lens, kv_lens, **options) -> dict:
    """Returns the arguments of a ragged case with these lengths."""
    return LAUNCH_DEFAULTS | segment(qo_lens, kv_lens, **options)


def traits_of(case: dict) -> _core.FamilyTraits:
    return _core.traits_of(getattr(_core.Family, case.get("family", "sm80")))


def rows_per_tile(case: dict) -> int:
    """Returns the packed rows of a query tile: of whole tokens where the family aligns tiles."""
    tile_m, group = case["tile_m"], case["num_qo_heads"] // case["num_kv_heads"]
    if traits_of(case).token_aligned and group <= tile_m:
        return tile_m // group * group
    return tile_m


def has_split_policy(options: dict) -> bool:
    """Returns true if splits of a segment do not depend on the batch."""
    return bool(options.get("fixed_split_size") or options.get("disable_split_kv"))


def partial_bytes(rows: int, head_dim: int = 128) -> int:
    """Returns the bytes of so many partial rows: head_dim floats and an LSE of two floats each."""
    return -(-rows * head_dim * 4 // 16) * 16 + -(-rows * 8 // 16) * 16


def keep_mask(
    qo_len: int, kv_len: int, *, causal: bool, window_left: int, chunk_size: int = 0
) -> np.ndarray:
    """Returns keep[row, key] of one request, by the definition of the masks."""
    diagonal = np.arange(qo_len)[:, None] + kv_len - qo_len
    key = np.arange(kv_len)[None, :]
    keep = np.ones((qo_len, kv_len), bool)
    if causal:
        keep &= key <= diagonal
    if window_left >= 0:
        keep &= key >= diagonal - window_left
    if chunk_size > 0:
        keep &= key >= diagonal // chunk_size * chunk_size
    return keep


@dataclass
class Planned:
    """A plan and the arguments that made it. A case of one segment has the segment's arguments."""

    case: dict
    segments: list[dict]
    sizes: dict
    layout: dict
    image: bytes
    canary: bytes
    requests: np.ndarray
    items: np.ndarray
    merges: np.ndarray
    cta_begin: np.ndarray | None
    end_tile: int | None  # first query tile of the next launch

    def segment_of(self, item) -> dict:
        """Returns the arguments of the segment of an item or a merge."""
        return self.segments[self.requests[item["request"]]["segment"]]

    def group_of(self, item) -> int:
        options = self.segment_of(item)
        return options["num_qo_heads"] // options["num_kv_heads"]

    def tile_rows_of(self, item) -> int:
        return rows_per_tile(self.segment_of(item))

    def is_aligned(self, item) -> bool:
        """Returns true if tiles of rows begin at fixed positions (plan.h, QueryGrid)."""
        options = self.segment_of(item)
        return bool(options.get("aligns_query_tiles") and has_split_policy(options))

    def tile_begin_of(self, item) -> int:
        """Returns the first row of an item's or a merge's tile, which may be before the request."""
        if not self.is_aligned(item):
            return int(item["row_begin"])
        request = self.requests[item["request"]]
        first = (int(request["kv_len"]) - int(request["qo_len"])) * self.group_of(item)
        return int(item["row_begin"]) - first % self.tile_rows_of(item)

    def rows_of(self, item) -> range:
        """Returns the request's rows in an item's or a merge's tile."""
        begin = self.tile_begin_of(item)
        rows = int(self.requests[item["request"]]["qo_len"]) * self.group_of(item)
        return range(max(begin, 0), min(begin + self.tile_rows_of(item), rows))

    def partial_rows_of(self, item) -> int:
        """Returns the partial rows of each chunk of an item's or a merge's tile."""
        if not self.is_aligned(item):
            return len(self.rows_of(item))
        rows = int(self.requests[item["request"]]["qo_len"]) * self.group_of(item)
        return min(rows, self.tile_rows_of(item))

    def keys_of(self, item) -> tuple[int, int]:
        """Returns the keys of the item's chunk, cut at the end of its request."""
        request = self.requests[item["request"]]
        if request["chunk_keys"] >= 1 << 30:  # not split
            return 0, int(request["kv_len"])
        begin = self.chunk_origin_of(item) + int(item["chunk"]) * int(request["chunk_keys"])
        end = min(begin + int(request["chunk_keys"]), int(request["kv_len"]))
        return max(begin, 0), max(end, 0)

    def chunk_origin_of(self, item) -> int:
        """Returns where the chunks of the item's request begin: 0, or a tile at the window."""
        options, request = self.segment_of(item), self.requests[item["request"]]
        window, chunk_size = options["window_left"], options["chunk_size"]
        reaches = [window] * (window >= 0) + [chunk_size - 1] * (chunk_size > 0)
        if has_split_policy(options) or not reaches:
            return 0
        first = int(request["kv_len"]) - int(request["qo_len"]) - min(reaches)
        return first // options["tile_n"] * options["tile_n"]

    def kv_tiles_of(self, item) -> int:
        """Returns the number of KV tiles that the item's rows touch in its chunk."""
        request, options = self.requests[item["request"]], self.segment_of(item)
        key_begin, key_end = self.keys_of(item)
        begin, _, _, end = planner.touched_tiles(
            qo_len=int(request["qo_len"]),
            kv_len=int(request["kv_len"]),
            first=self.tile_begin_of(item) // self.group_of(item),
            last=(self.rows_of(item).stop - 1) // self.group_of(item),
            key_begin=key_begin,
            key_end=key_end,
            **{name: options[name] for name in ("window_left", "chunk_size", "causal", "tile_n")},
        )
        return end - begin

    def cost_of(self, item) -> float:
        """Returns the cost of an item in KV tiles."""
        keys, tile_n = traits_of(self.case).item_keys, self.segment_of(item)["tile_n"]
        fixed = round(4 * keys / tile_n) / 4 if keys else ITEM_COST
        partial = PARTIAL_COST if item["partial_row"] != FINAL else 0
        return self.kv_tiles_of(item) + fixed + partial

    def costs(self) -> np.ndarray:
        """Returns the costs of all items in order; heads of one tile have the same cost."""
        tiles = self.items[["request", "row_begin", "chunk"]].tolist()
        known = dict(zip(tiles, self.items, strict=True))
        costs = {tile: self.cost_of(item) for tile, item in known.items()}
        return np.array([costs[tile] for tile in tiles])

    def loads(self) -> np.ndarray:
        """Returns the cost of each CTA's list."""
        return np.diff(np.concatenate([[0], np.cumsum(self.costs())])[self.cta_begin])

    def lists(self, values) -> list:
        """Returns one value per item as a list of values for each CTA."""
        return [values[begin:end] for begin, end in pairwise(self.cta_begin)]

    def cta_slots(self) -> int:
        return self.case["num_sms"] * min(options["ctas_per_sm"] for options in self.segments)

    def heads(self) -> list[tuple[int, int]]:
        """Returns request and KV head of each item."""
        return self.items[["request", "kv_head"]].tolist()


def _table(image: bytes, offset: int, count: int, dtype) -> np.ndarray:
    if offset < 0:
        return np.empty(0, dtype)
    return np.frombuffer(image, dtype=dtype, offset=offset, count=count)


def plan(**case) -> Planned:
    """Plans a case and decodes its image. Two segments are segments=[segment(...), ...]."""
    case = (LAUNCH_DEFAULTS if "segments" in case else DEFAULTS) | case
    made = planner.plan(**case)
    sizes, layout = made["sizes"], made["layout"]
    image = made["image"][: layout["int_bytes"]]
    parts = list(zip(layout["segments"], sizes["segments"], strict=True))
    merges = [_table(image, place["merges"], size["num_merges"], MERGE) for place, size in parts]
    if "segments" not in case:
        layout |= layout["segments"][0]
    ctas = _table(image, layout["cta_begin"], sizes["num_ctas"] + 1, "<i4")
    family = {"family": case.get("family", "sm80")}
    return Planned(
        case=case,
        segments=[one | family for one in case.get("segments", [case])],
        sizes=sizes,
        layout=layout,
        image=image,
        canary=made["image"][layout["int_bytes"] :],
        requests=_table(image, layout["requests"], sizes["num_requests"], REQUEST),
        items=_table(image, layout["items"], sizes["num_items"], ITEM),
        merges=np.concatenate(merges),
        cta_begin=ctas if layout["cta_begin"] >= 0 else None,
        end_tile=made["end_tile"],
    )


def check_covered(plan: Planned) -> None:
    """Every kept (row, key) of every KV head is in exactly one item, every row is written once."""
    keys_seen, rows_written = [], []
    for request in plan.requests:
        options = plan.segments[request["segment"]]
        heads = options["num_kv_heads"]
        rows = int(request["qo_len"]) * (options["num_qo_heads"] // heads)
        keys_seen.append(np.zeros((heads, rows, int(request["kv_len"])), np.int16))
        rows_written.append(np.zeros((heads, rows), np.int16))

    for item in plan.items:
        r, head, rows = int(item["request"]), int(item["kv_head"]), plan.rows_of(item)
        begin, end = plan.keys_of(item)
        assert item["row_begin"] % plan.tile_rows_of(item) == 0
        keys_seen[r][head, rows.start : rows.stop, begin:end] += 1
        if item["partial_row"] == FINAL:
            rows_written[r][head, rows.start : rows.stop] += 1
    for merge in plan.merges:
        rows = plan.rows_of(merge)
        written = rows_written[int(merge["request"])][int(merge["kv_head"])]
        written[rows.start : rows.stop] += 1

    for request, seen, written in zip(plan.requests, keys_seen, rows_written, strict=True):
        options = plan.segments[request["segment"]]
        bounds = {name: options[name] for name in ("causal", "window_left", "chunk_size")}
        keep = keep_mask(int(request["qo_len"]), int(request["kv_len"]), **bounds)
        kept_rows = np.repeat(keep, options["num_qo_heads"] // options["num_kv_heads"], axis=0)
        assert (seen[:, kept_rows] == 1).all()
        assert (seen <= 1).all()
        assert (written == 1).all()


def _check_partials(plan: Planned) -> None:
    """Partial rows are disjoint, used once, in chunk order, and inside the float workspace."""
    begins_and_ends, float_bytes = [], 0
    for index, (options, place, size) in enumerate(
        zip(plan.segments, plan.layout["segments"], plan.sizes["segments"], strict=True)
    ):
        _check_merges_of(plan, index)
        rows, head_dim = size["num_partial_rows"], options.get("head_dim_vo", 128)
        float_bytes += partial_bytes(rows, head_dim)
        if rows:
            o, lse = place["partial_o"], place["partial_lse"]
            begins_and_ends += [(o, o + rows * head_dim * 4), (lse, lse + rows * 8)]
    assert plan.layout["float_bytes"] == float_bytes <= plan.case["float_workspace_bytes"]
    assert not begins_and_ends or begins_and_ends[0][0] == 0
    for (_, end), (begin, _) in pairwise([*begins_and_ends, (float_bytes, float_bytes)]):
        assert begin % 16 == 0
        assert end <= begin


def _check_merges_of(plan: Planned, index: int) -> None:
    """A segment numbers its partial rows from 0, and each merge names the chunks of one tile."""

    def own(rows: np.ndarray) -> np.ndarray:
        return rows[plan.requests["segment"][rows["request"]] == index]

    partials = [item for item in own(plan.items) if item["partial_row"] != FINAL]
    partials.sort(key=lambda item: item["partial_row"])
    begins = [int(item["partial_row"]) for item in partials]
    *firsts, used = accumulate(map(plan.partial_rows_of, partials), initial=0)
    assert begins == firsts
    room = plan.sizes["segments"][index]["num_partial_rows"]
    assert used <= room if plan.segments[index].get("graph_max_rows") else used == room
    by_row, merged = dict(zip(begins, partials, strict=True)), []
    for merge in own(plan.merges):
        if merge["num_chunks"] == 0:
            assert not plan.rows_of(merge), "a surplus merge must have no rows"
            continue
        assert merge["num_chunks"] > 1
        first, rows = int(merge["first_row"]), plan.partial_rows_of(merge)
        places = [first + chunk * rows for chunk in range(merge["num_chunks"])]
        merged.extend(places)
        parts = [by_row[place] for place in places]
        for name in ("request", "row_begin", "kv_head"):
            assert all(part[name] == merge[name] for part in parts)
        chunks = [int(part["chunk"]) for part in parts]
        assert chunks == list(range(chunks[0], chunks[0] + len(chunks)))
    assert sorted(merged) == begins


def _check_image(plan: Planned) -> None:
    """Tables are aligned and apart, and the memory past the last one is untouched."""
    assert plan.canary == b"\xa5" * max(len(plan.canary), 64)
    ends = [(plan.layout[name], getattr(plan, name).nbytes) for name in ("requests", "items")]
    if plan.cta_begin is not None:
        ends.append((plan.layout["cta_begin"], plan.cta_begin.nbytes))
    for place, size in zip(plan.layout["segments"], plan.sizes["segments"], strict=True):
        ends.append((place["merges"], size["num_merges"] * MERGE.itemsize))
    places = [(begin, size) for begin, size in ends if begin >= 0]
    assert all(begin % 16 == 0 for begin, _ in places)
    for (begin, size), (following, _) in pairwise([*places, (plan.layout["int_bytes"], 0)]):
        assert begin + size <= following


def planned_rounds(**case) -> list[Planned]:
    """Plans every launch of a case whose partial results exceed the float workspace, and checks
    each, and that all together cover every row and key once."""
    rounds = [plan(**case)]
    while (first := rounds[-1].end_tile) is not None:
        rounds.append(replace(plan(**case, first_tile=first), requests=rounds[0].requests))
    for one in rounds:
        _check_launch(one)
    both = {name: np.concatenate([getattr(one, name) for one in rounds])
            for name in ("items", "merges")}  # fmt: skip
    check_covered(replace(rounds[0], **both))
    return rounds


def check(plan: Planned) -> None:
    """Asserts all that holds for any plan."""
    assert plan.end_tile is None
    check_covered(plan)
    _check_launch(plan)


def _check_launch(plan: Planned) -> None:
    """Asserts all that holds for any launch of a plan."""
    _check_image(plan)
    for request in plan.requests:
        assert request["chunk_keys"] > 0
        assert request["chunk_keys"] % plan.segments[request["segment"]]["tile_n"] == 0
    assert all(plan.rows_of(item) for item in plan.items)
    _check_partials(plan)
    kv_tiles = np.array([plan.kv_tiles_of(item) for item in plan.items], int)
    assert (kv_tiles[plan.items["partial_row"] != FINAL] > 0).all()
    assert plan.sizes["num_kv_tiles"] == kv_tiles.sum()
    if plan.cta_begin is not None:
        assert plan.cta_begin[0] == 0
        assert plan.cta_begin[-1] == plan.sizes["num_items"]
        assert (np.diff(plan.cta_begin) >= 0).all()
    else:
        assert plan.sizes["num_ctas"] == plan.sizes["num_items"]


def checked(qo_lens, kv_lens, **options) -> Planned:
    """Plans a ragged case and checks what holds for any plan."""
    made = plan(**ragged(qo_lens, kv_lens, **options))
    check(made)
    return made
