"""Pod and BatchPod compare the two wrappers of prefill with decode with the oracle."""

import dataclasses

import torch
from fuzz import pod_trial
from graph_stage import capture
from preflash.testing import Case, MaskKind, build, poison, runner

PREFILL = Case("prefill", (150,), (333,), 8, 2, 128, mask=MaskKind.CAUSAL)
DECODE = Case("decode", (1,) * 5, (90, 0, 17, 1, 1333), 8, 2, 128, page_size=16)
PREFILLS = Case(
    "prefills", (37, 0, 150, 5), (100, 9, 150, 300), 8, 2, 128, page_size=16, mask=MaskKind.CAUSAL
)
BOTH, BATCHES = (PREFILL, DECODE), (PREFILLS, DECODE)


def alike(pair: tuple[Case, Case], **changes) -> tuple[Case, Case]:
    return tuple(dataclasses.replace(case, **changes) for case in pair)


class Pod(pod_trial.Pod):
    pair = BOTH

    def __init__(self, target, pair=None, **options):
        self.device, self.workspace = target.device, runner.workspace(target.device)
        sides = (self.built(case, seed) for seed, case in enumerate(pair or self.pair))
        super().__init__(*sides, self.workspace, target.backend, **options)

    def built(self, case: Case, seed: int = 0):
        return build(case, seed=seed, device=self.device)

    def outputs(self) -> dict:
        made = {}
        for side, inputs in zip("pd", (self.prefill, self.decode), strict=True):
            case, rows = inputs.case, (inputs.q.shape[0], inputs.case.num_qo_heads)
            made[f"out_{side}"] = poison((*rows, case.head_dim), case.dtype_o, self.device)
            made[f"lse_{side}"] = poison(rows, torch.float32, self.device)
        return made

    def run(self, **options):
        return self.launch({**self.tensors(), **self.options(), **self.outputs(), **options})

    def check(self, **options):
        results = self.run(**options)
        self.compare(results)
        return results

    def compare(self, results) -> None:
        for inputs, (out, lse) in zip((self.prefill, self.decode), results, strict=True):
            if sum(inputs.case.qo_lens) > 0:
                runner.compare(inputs, out, lse).check()

    def check_replay(self, graph, outputs: dict) -> None:
        """Replays into the outputs and compares them with the oracle for the current inputs."""
        for value in outputs.values():
            value.fill_(float("nan"))
        graph.replay()
        self.compare([(outputs[f"out_{side}"], outputs[f"lse_{side}"]) for side in "pd"])


class BatchPod(Pod, pod_trial.BatchPod):
    pair = BATCHES


def graph_buffers(device, batch: int = 5) -> dict:
    names = {"paged_kv_indptr": batch + 1, "paged_kv_indices": 400, "paged_kv_last_page_len": batch}
    ints = {"dtype": torch.int32, "device": device}
    return {f"{name}_buffer": torch.zeros(size, **ints) for name, size in names.items()}


class GraphPod(Pod):
    """A wrapper with use_cuda_graph=True: decode tensors that never move, of any batch of five."""

    def __init__(self, target):
        super().__init__(target, use_cuda_graph=True, **graph_buffers(target.device))
        self.pool = torch.zeros(2, 200, 16, 2, 128, dtype=DECODE.dtype, device=self.device)
        self.q = torch.empty_like(self.decode.q)

    def load(self, kv_lens, seed: int, **changes) -> None:
        self.decode = self.built(dataclasses.replace(DECODE, kv_lens=kv_lens, **changes), seed)
        for place, values in zip(self.pool, self.decode.cache, strict=True):
            place[: values.shape[0]].copy_(values)
        self.q.copy_(self.decode.q)

    def tensors(self) -> dict:
        return {**super().tensors(), "q_d": self.q, "paged_kv_cache_d": tuple(self.pool)}


def captured(pod: Pod, recorder):
    outputs = pod.outputs()
    pod.check(**outputs)
    return capture(recorder, pod.device, lambda: pod.run(**outputs)), outputs
