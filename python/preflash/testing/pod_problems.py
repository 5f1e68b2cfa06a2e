"""Problems for prefill beside decode: both wrappers, both sides with lengths and options of their
own as far as the wrapper has them, and everything that is wrong with what they return."""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import random
from collections.abc import Sequence

import torch

import preflash

from .. import _pod
from . import fuzz, guarded, runner
from .case import Case, KvForm, MaskKind, Sinks
from .fuzz import Verdict, verdict_of
from .guarded import Guarded, Padding, Untouched
from .inputs import Inputs, build, surrounded
from .oracle import reference
from .outputs import GivenOutputs, Result
from .problems import Brought
from .random_cases import Limits, random_case

_WORKSPACES = (0, 1 << 14, 1 << 22)
_ROOM_FOR_COPIES = 1 << 26


class Kind(enum.Enum):
    """Whose run() it is."""

    SINGLE = "PODWithPagedKVCacheWrapper"  # a prefill of one request, ragged
    BATCH = "BatchPODWithPagedKVCacheWrapper"


@dataclasses.dataclass(frozen=True)
class PodCall:
    """How both cases are called. A pair is of the prefill and of the decode side."""

    return_lse: tuple[bool, bool] = (True, True)
    out: tuple[Brought, Brought] = (Brought.ABSENT, Brought.ABSENT)
    lse: tuple[Brought, Brought] = (Brought.ABSENT, Brought.ABSENT)
    lse_base: str = "log2"
    lse_layout: str = "NH"
    q_scale: float | None = None
    k_scale: float | None = None
    v_scale: float | None = None
    scales_in_tensors: bool = False
    workspace: int = 1 << 22
    replan: bool = False  # the wrapper had another plan before, and another prefill
    repeat: bool = False  # two runs give the same bits
    two_launches: bool = False  # also where a kernel takes both sides
    shorter_before: bool = False  # one plan has another prefill before (of one request)
    repeated: bool = False  # run() is given the options of the decode side again (of one request)
    other_mask: bool = False  # beside a packed mask a dense one, which does not count
    padding: int = 0  # rows of q before and behind those of requests (of one request: behind)


@dataclasses.dataclass(frozen=True)
class PodProblem:
    """Both sides, with options that the wrapper has."""

    kind: Kind
    prefill: Case
    decode: Case
    call: PodCall
    seed: int


# --- drawing -------------------------------------------------------------------


def draw(seed: int, index: int, limits: Limits) -> PodProblem:
    """Problem `index` of `seed`."""
    rng = random.Random(f"pod {seed} {index}")
    kind = rng.choice(list(Kind))
    work = dataclasses.replace(limits, work=limits.work / 2)
    prefill, decode = (_plain(random_case(rng, name, work)) for name in ("prefill", "decode"))
    most = int(limits.work / (2 * prefill.num_qo_heads * prefill.head_dim * 8))
    kv_lens = _at_most(decode.kv_lens, most)
    decode = dataclasses.replace(
        decode,
        qo_lens=tuple(_queries(rng, kind) for _ in kv_lens),
        kv_lens=kv_lens,
        num_qo_heads=prefill.num_qo_heads,
        num_kv_heads=prefill.num_kv_heads,
        head_dim=prefill.head_dim,
        mask=MaskKind.NONE,
        page_size=decode.page_size or rng.choice([1, 3, 16, 64]),
    )
    if rng.random() < 0.06:
        decode = dataclasses.replace(decode, qo_lens=(), kv_lens=())
    prefill = _alone(prefill) if kind is Kind.SINGLE else _like(prefill, decode, rng)
    return PodProblem(
        kind, _possible(prefill), _possible(decode), _random_call(rng, kind), rng.randrange(2**31)
    )


def _plain(case: Case) -> Case:
    """The case without what neither wrapper has."""
    return dataclasses.replace(
        case,
        head_dim_vo=None,
        soft_cap=None,
        sinks=Sinks.NONE,
        head_scales=False,
        o_dtype=None,
        fixed_split_size=None,
        disable_split_kv=False,
    )


def _queries(rng: random.Random, kind: Kind) -> int:
    return 1 if kind is Kind.SINGLE else rng.choice([0, 1, 1, 1, 1, 3])


def _at_most(lengths: Sequence[int], total: int) -> tuple[int, ...]:
    lengths = list(lengths)
    while sum(lengths) > max(total, len(lengths)):
        longest = lengths.index(max(lengths))
        lengths[longest] //= 2
    return tuple(lengths)


def _alone(case: Case) -> Case:
    form = KvForm.SEPARATE if case.form is KvForm.FLAT else case.form
    return dataclasses.replace(
        case, qo_lens=case.qo_lens[:1], kv_lens=case.kv_lens[:1], page_size=0, form=form
    )


def _like(prefill: Case, decode: Case, rng: random.Random) -> Case:
    """With the options that plan() has once for both sides."""
    form = prefill.form
    if form is KvForm.FLAT and decode.page_size != 1:
        form = KvForm.SEPARATE
    shared = ("layout", "window_left", "sm_scale", "position", "rope_scale", "rope_theta")
    prefill = dataclasses.replace(
        prefill,
        dtype=decode.dtype,
        kv_dtype=decode.kv_dtype,
        page_size=decode.page_size,
        form=form,
        **{name: getattr(decode, name) for name in shared},
    )
    if rng.random() < 0.06:
        prefill = dataclasses.replace(prefill, qo_lens=(), kv_lens=(), mask=MaskKind.NONE)
    return prefill


def _possible(case: Case) -> Case:
    """With dtypes and numbers that go together."""
    form = case.form
    if form is KvForm.FLAT and case.page_size != 1:
        case = dataclasses.replace(case, form=KvForm.SEPARATE)
    if not case.contradiction:
        return case
    magnitude = type(case.magnitude).NORMAL
    case = dataclasses.replace(case, magnitude=magnitude)
    if case.contradiction:
        dtype = torch.bfloat16 if case.dtype.itemsize == 1 else case.dtype
        case = dataclasses.replace(case, dtype=dtype, kv_dtype=None)
    return case


def _random_call(rng: random.Random, kind: Kind) -> PodCall:
    # All exact in float32, so that a scale in a tensor is the same scale.
    scales = [None] * 6 + [0.5, 2.0, 1.25, -0.75]

    def pair(draw_one):
        return (draw_one(), draw_one())

    return_lse = pair(lambda: rng.random() < 0.7)
    if kind is Kind.BATCH:
        return_lse = (return_lse[0],) * 2
    return PodCall(
        return_lse=return_lse,
        out=pair(lambda: rng.choice(list(Brought))),
        lse=pair(lambda: rng.choice(list(Brought))),
        lse_base=rng.choice(["log2", "ln"]),
        lse_layout=rng.choice(["NH", "HN"]),
        q_scale=rng.choice(scales),
        k_scale=rng.choice(scales),
        v_scale=rng.choice([*scales, 0.0]),
        scales_in_tensors=rng.random() < 0.2,
        workspace=rng.choice(_WORKSPACES),
        replan=rng.random() < 0.2,
        repeat=rng.random() < 0.2,
        two_launches=rng.random() < 0.4,
        shorter_before=rng.random() < 0.2,
        repeated=rng.random() < 0.3,
        other_mask=rng.random() < 0.5,
        padding=rng.choice([0, 0, 2]),
    )


# --- one problem ---------------------------------------------------------------


def examine(problem: PodProblem, *, backend: str, device: torch.device | str = "cpu") -> Verdict:
    """Plans and runs the wrapper. What a broken backend raises is a failure like any other."""
    with _pod.forced_apart() if problem.call.two_launches else contextlib.nullcontext():
        return verdict_of(lambda: _examine(problem, backend, device), backend)


def _examine(problem: PodProblem, backend: str, device: torch.device | str) -> Verdict:
    sides = [_Side(problem, index, device) for index in (0, 1)]
    untouched = [Untouched(_tensors(side.inputs)) for side in sides]
    num_bytes = problem.call.workspace
    if problem.prefill.has_staged_form or problem.decode.has_staged_form:
        num_bytes = _ROOM_FOR_COPIES  # what only copies serve is refused without
    workspace = guarded.workspace(num_bytes, device)
    trial = _TRIALS[problem.kind](problem, sides, workspace, backend)
    verdict = Verdict()
    for side, result in zip(sides, trial.results(), strict=True):
        verdict.failures += [f"{side.name}: {failure}" for failure in result.failures]
        if result.out.shape[0] == 0:
            continue
        report = side.compare(result)
        verdict.failures += [f"{side.name}: {failure}" for failure in report.failures]
        verdict.worst = max(verdict.worst, report.worst)
    if problem.call.repeat:
        first = [result.copy() for result in trial.last]
        for side, one, other in zip(sides, first, trial.results(), strict=True):
            if not one.same_bits(other):
                verdict.failures.append(f"{side.name}: a second run has other bits")
    if spilled := workspace.spilled():
        verdict.failures.append(f"{spilled} bytes around the workspace were written")
    for side, memory in zip(sides, untouched, strict=True):
        verdict.failures += [
            f"{side.name}: {name}, an input, was written" for name in memory.changed()
        ]
    return verdict


def _tensors(inputs: Inputs) -> dict[str, torch.Tensor | None]:
    return {"q": inputs.q, "k": inputs.k, "v": inputs.v, "packed mask": inputs.packed_custom_mask}


def _padding_of(problem: PodProblem, index: int) -> Padding:
    """A prefill of one request is its tensors; requests of one query each begin at row 0."""
    rows = problem.call.padding
    if problem.kind is Kind.BATCH:
        return Padding(rows, rows)
    return Padding(0, rows if index else 0)


class _Side:
    """One side: its inputs, its outputs and what it has to be."""

    def __init__(self, problem: PodProblem, index: int, device) -> None:
        self.name = ("prefill", "decode")[index]
        self._call, self._index = problem.call, index
        case, seed = (problem.prefill, problem.decode)[index], problem.seed + index
        self.inputs = build(case, device=device, index_device="cpu", seed=seed)
        fuzz.add_garbage(self.inputs)
        self._padding = _padding_of(problem, index)
        self.given = surrounded(self.inputs, self._padding.before, self._padding.behind)
        self.renew()

    def renew(self) -> None:
        """Fresh outputs."""
        call, index = self._call, self._index
        self._given = GivenOutputs(
            self.inputs,
            out=call.out[index],
            lse=call.lse[index],
            lse_layout=call.lse_layout,
            padding=self._padding,
        )

    def options(self) -> dict[str, object]:
        """Of run(), for its outputs."""
        suffix = self.name[0]
        return {f"out_{suffix}": self._given.out, f"lse_{suffix}": self._given.lse}

    def settle(self, returned) -> Result:
        return self._given.settle(returned, with_lse=self._call.return_lse[self._index])

    def compare(self, result: Result):
        pipeline, call = self.inputs.pipeline, self._call
        if self.name == "decode":
            given = [1.0 if one is None else one for one in (call.q_scale, call.k_scale)]
            pipeline = dataclasses.replace(
                pipeline,
                sm_scale=pipeline.sm_scale * given[0] * given[1],
                out_scale=1.0 if call.v_scale is None else call.v_scale,
            )
        expected = reference(self.inputs, pipeline=pipeline)
        return runner.compare(self.inputs, result.out, result.lse, expected, lse_base=call.lse_base)

    def table(self) -> tuple[torch.Tensor, ...]:
        return (self.given.kv_indptr, self.given.indices, self.given.last_page_len)


class _Trial:
    """A wrapper, planned."""

    def __init__(
        self, problem: PodProblem, sides: list[_Side], workspace: Guarded, backend: str
    ) -> None:
        self._problem, self._sides = problem, sides
        self._planned_as_asked = False
        make = getattr(preflash, problem.kind.value)
        self.wrapper = make(workspace.view, problem.decode.layout, backend=backend)
        if problem.call.replan:
            self.plan(window_left=3 if problem.decode.window_left < 0 else -1, sm_scale=0.1)
            self.run(causal_p=not sides[0].inputs.pipeline.causal, v_scale=3.0)
            for side in sides:
                side.renew()
        self.plan()
        self._planned_as_asked = True
        if problem.call.shorter_before:
            self._run_shorter()
        self.last: list[Result] = []

    def results(self) -> list[Result]:
        returned = self.run()
        if self._sides[0].inputs.q.is_cuda:
            torch.cuda.synchronize(self._sides[0].inputs.q.device)
        self.last = [side.settle(one) for side, one in zip(self._sides, returned, strict=True)]
        return self.last

    def _run_shorter(self) -> None:
        """What else a run() of the same plan may bring before."""

    def plan(self, **overrides) -> None:
        case = self._problem.decode
        options = {
            "pos_encoding_mode": case.position.value,
            "window_left": case.window_left,
            "q_data_type": case.dtype,
            "kv_data_type": case.dtype_kv,
            "sm_scale": case.sm_scale,
            "rope_scale": case.rope_scale,
            "rope_theta": case.rope_theta,
        }
        heads = (case.num_qo_heads, case.num_kv_heads, case.head_dim, case.page_size)
        self.wrapper.plan(*self._arrays(), *heads, **{**options, **overrides})

    def run(self, **overrides):
        call = self._problem.call
        options = {name: self._scale(getattr(call, name)) for name in _SCALES}
        options |= {"lse_base": call.lse_base, "lse_layout": call.lse_layout}
        options["causal_p"] = self._sides[0].inputs.pipeline.causal
        for side in self._sides:
            options |= side.options()
        return self.wrapper.run(*self._operands(), **{**options, **self._masks(), **overrides})

    def _scale(self, value: float | None) -> float | torch.Tensor | None:
        if value is None or not self._problem.call.scales_in_tensors:
            return value
        return torch.tensor([value], dtype=torch.float32, device=self.wrapper.device)

    def _dense_mask(self) -> torch.Tensor | None:
        """Of the prefills; beside a packed one the opposite, if anything."""
        inputs = self._sides[0].inputs
        if inputs.packed_custom_mask is None or not self._problem.call.other_mask:
            return inputs.custom_mask
        return ~torch.cat([mask.flatten() for mask in inputs.masks])


_SCALES = ("q_scale", "k_scale", "v_scale")


class _SingleTrial(_Trial):
    def _arrays(self) -> tuple:
        return self._sides[1].table()

    def _operands(self) -> tuple:
        prefill, decode = (side.given for side in self._sides)
        tokens = 0 if prefill.case.layout == "NHD" else 1
        keys = (t.narrow(tokens, 0, prefill.case.kv_lens[0]) for t in (prefill.k, prefill.v))
        return (prefill.q, *keys, decode.q, decode.cache)

    def _repeated(self) -> dict[str, object]:
        if not (self._problem.call.repeated and self._planned_as_asked):
            return {}
        case = self._problem.decode
        return {
            "causal_d": True,
            "kv_layout_d": case.layout,
            "pos_encoding_mode_d": case.position.value,
            "sm_scale_d": case.sm_scale,
            "window_left_d": case.window_left,
            "rope_scale_d": case.rope_scale,
            "rope_theta_d": case.rope_theta,
        }

    def _run_shorter(self) -> None:
        """Half of the prefill without its mask, into outputs of the library's own."""
        prefill, decode = (side.given for side in self._sides)
        case, (q, k, v, *_) = prefill.case, self._operands()
        tokens = 0 if case.layout == "NHD" else 1
        k, v = (t.narrow(tokens, 0, case.kv_lens[0] // 2) for t in (k, v))
        shorter = q[: case.qo_lens[0] // 2]
        self.wrapper.run(shorter, k, v, decode.q, decode.cache, kv_layout_p=case.layout)

    def _masks(self) -> dict[str, object]:
        """And all other options of this run()."""
        inputs, call = self._sides[0].inputs, self._problem.call
        case, mask = inputs.case, self._dense_mask()
        if inputs.custom_mask is not None:
            mask = mask.view(case.qo_lens[0], case.kv_lens[0])
        return {
            **self._repeated(),
            "custom_mask_p": mask,
            "packed_custom_mask_p": inputs.packed_custom_mask,
            "kv_layout_p": case.layout,
            "pos_encoding_mode_p": case.position.value,
            "sm_scale_p": case.sm_scale,
            "window_left_p": case.window_left,
            "rope_scale_p": case.rope_scale,
            "rope_theta_p": case.rope_theta,
            "return_lse_p": call.return_lse[0],
            "return_lse_d": call.return_lse[1],
        }


class _BatchTrial(_Trial):
    def _arrays(self) -> tuple:
        return tuple(
            array for side in self._sides for array in (side.given.qo_indptr, *side.table())
        )

    def _operands(self) -> tuple:
        prefill, decode = (side.given for side in self._sides)
        return (prefill.q, prefill.cache, decode.q, decode.cache)

    def _masks(self) -> dict[str, object]:
        inputs = self._sides[0].inputs
        return {
            "custom_mask_p": self._dense_mask(),
            "packed_custom_mask_p": inputs.packed_custom_mask,
            "return_lse": self._problem.call.return_lse[0],
        }


_TRIALS = {Kind.SINGLE: _SingleTrial, Kind.BATCH: _BatchTrial}
