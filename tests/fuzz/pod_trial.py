"""Computes problems of `pod_problems`, with garbage around both sides, and says everything that is
wrong."""

from __future__ import annotations

from unittest import mock

import preflash
import torch
from preflash._pod import pod_plan
from preflash.testing import runner
from preflash.testing.case import Case
from preflash.testing.inputs import Inputs, build
from preflash.testing.oracle import reference

from . import guarded, wrapper_trial
from .altered_inputs import surrounded
from .guarded import Guarded, Padding, around_workspace, untouched_inputs
from .outputs import GivenOutputs, Result
from .pod_problems import Kind, PodProblem
from .problems import with_scales
from .wrapper_trial import Verdict, judged


def note_variants(wrapper, prefill: Inputs, decode: Inputs) -> None:
    """Sets the variants of both sides, whose wrapper has run in one launch or two."""
    ids = wrapper.variant.split(", ")
    prefill.variant, decode.variant = ids[0], ids[-1]


@judged
def examine(problem: PodProblem, backend: str, device: torch.device) -> Verdict:
    """Plans and runs the wrapper."""
    with mock.patch.object(pod_plan, "_forced_apart", problem.call.two_launches):
        return _examine(problem, backend, device)


def _examine(problem: PodProblem, backend: str, device: torch.device) -> Verdict:
    sides = [_Side(problem, index, device) for index in (0, 1)]
    untouched = [untouched_inputs(side.inputs) for side in sides]
    workspace = guarded.workspace(problem.call.workspace, device)
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
    verdict.failures += around_workspace(workspace)
    for side, memory in zip(sides, untouched, strict=True):
        verdict.failures += [f"{side.name}: {failure}" for failure in memory.changed()]
    return verdict


def plan_decode(wrapper, case: Case, arrays: tuple, **overrides) -> None:
    """wrapper.plan(*arrays) of a decode side with the options of its case, and with others."""
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
    wrapper.plan(*arrays, *heads, **{**options, **overrides})


def _padding_of(problem: PodProblem) -> Padding:
    """Rows of q around those of requests, which only batches with a qo_indptr may have."""
    rows = problem.call.padding if problem.kind is Kind.BATCH else 0
    return Padding(rows, rows)


class _Side:
    """Inputs and outputs of one side, and its expected result."""

    def __init__(self, problem: PodProblem, index: int, device) -> None:
        self.name = ("prefill", "decode")[index]
        self._call, self._index = problem.call, index
        case, seed = (problem.prefill, problem.decode)[index], problem.seed + index
        self.inputs = build(case, device=device, index_device="cpu", seed=seed)
        wrapper_trial.add_garbage(self.inputs)
        self._padding = _padding_of(problem)
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
        """Options of run() for this side's outputs."""
        suffix = self.name[0]
        return {f"out_{suffix}": self._given.out, f"lse_{suffix}": self._given.lse}

    def settle(self, returned) -> Result:
        return self._given.settle(returned, with_lse=self._call.return_lse[self._index])

    def compare(self, result: Result):
        pipeline, call = self.inputs.pipeline, self._call
        if self.name == "decode":
            pipeline = with_scales(pipeline, call)
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
        note_variants(self.wrapper, *(side.inputs for side in self._sides))
        if self._sides[0].inputs.q.is_cuda:
            torch.cuda.synchronize(self._sides[0].inputs.q.device)
        self.last = [side.settle(one) for side, one in zip(self._sides, returned, strict=True)]
        return self.last

    def _run_shorter(self) -> None:
        """Runs the same plan with a shorter prefill first, if the wrapper's run() takes one."""

    def plan(self, **overrides) -> None:
        plan_decode(self.wrapper, self._problem.decode, self._arrays(), **overrides)

    def run(self, **overrides):
        call = self._problem.call
        options = wrapper_trial.scale_arguments(call, self.wrapper.device)
        options |= {"lse_base": call.lse_base, "lse_layout": call.lse_layout}
        options["causal_p"] = self._sides[0].inputs.pipeline.causal
        for side in self._sides:
            options |= side.options()
        return self.wrapper.run(*self._operands(), **{**options, **self._masks(), **overrides})

    def _dense_mask(self) -> torch.Tensor | None:
        """Dense mask of the prefills; with a packed mask and other_mask, its inverse."""
        inputs = self._sides[0].inputs
        if inputs.packed_custom_mask is None or not self._problem.call.other_mask:
            return inputs.custom_mask
        return ~torch.cat([mask.flatten() for mask in inputs.masks])


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
        """Mask options and all other options of this run()."""
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
