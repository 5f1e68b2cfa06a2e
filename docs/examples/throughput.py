"""Tokens per second of a Llama-shaped model in transformers, by attention, in one run.

    python docs/examples/throughput.py [--layers 4] [--rounds 3] > table.md

Prefill is 8 requests of 8192 tokens (eager: one at a time, since the logits of all would fill the
GPU). Decode is 64 requests of 4096 tokens in a static cache. Weights are random. Without a GPU the
sizes are small and the figures mean nothing. FlashInfer is measured on a GPU where it is installed.
"""

import argparse
import importlib.util
import inspect
import statistics
import time

import torch
import transformers
from preflash.integrations.transformers import register
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

GPU = torch.cuda.is_available()
DEVICE, DTYPE = ("cuda", torch.bfloat16) if GPU else ("cpu", torch.float32)
REQUESTS, LENGTH = (8, 8192) if GPU else (2, 96)
DECODES, CONTEXT, STEPS = (64, 4096, 16) if GPU else (3, 32, 2)
SLOTS = CONTEXT + (256 if GPU else 64)  # of the static cache; torch asks for pages of 256 n
HIDDEN, WIDE, HEADS = (4096, 14336, 32) if GPU else (256, 512, 4)
so_far = torch.zeros(DECODES, dtype=torch.int32, device=DEVICE)  # tokens in the cache, for varlen


def varlen(module, query, key, value, mask, scaling=None, **kwargs):
    """torch's flash attention of packed sequences; a static cache is one page for each request."""
    from torch.nn.attention.varlen import varlen_attn

    (batch, heads, tokens, _), slots = query.shape, key.shape[2]
    q = query.transpose(1, 2).flatten(0, 1)
    options = {"scale": scaling, "window_size": (-1, 0)}
    if "enable_gqa" in inspect.signature(varlen_attn).parameters:  # older ones take GQA unasked
        options["enable_gqa"] = heads != key.shape[1]
    ends = torch.arange(batch + 1, dtype=torch.int32, device=q.device) * tokens
    if slots == tokens:
        k, v = (x.transpose(1, 2).flatten(0, 1) for x in (key, value))
        out = varlen_attn(q, k, v, ends, ends, tokens, tokens, **options)
    else:
        table = torch.arange(batch, dtype=torch.int32, device=q.device)[:, None]
        k, v = key.transpose(1, 2), value.transpose(1, 2)
        options |= {"seqused_k": so_far, "block_table": table}
        out = varlen_attn(q, k, v, ends, None, tokens, slots, **options)
    return out.view(batch, tokens, heads, -1), None


class FlashInfer:
    """FlashInfer's wrappers, planned in the first layer of a step as engines do; a static cache is
    one page for each request."""

    def __init__(self):
        import flashinfer

        space = torch.empty(384 << 20, dtype=torch.uint8, device=DEVICE)
        self.prefill = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(space, "NHD")
        self.decode = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
            space, "HND", use_tensor_cores=True
        )

    def __call__(self, module, query, key, value, mask, scaling=None, **kwargs):
        (batch, heads, tokens, dim), slots = query.shape, key.shape[2]
        q = query.transpose(1, 2).flatten(0, 1)
        shape, types = (heads, key.shape[1], dim), {"sm_scale": scaling, "q_data_type": q.dtype}
        starts = torch.arange(batch + 1, dtype=torch.int32, device=q.device)
        if slots == tokens:
            k, v = (x.transpose(1, 2).flatten(0, 1) for x in (key, value))
            if module.layer_idx == 0:
                ends = starts * tokens
                self.prefill.plan(ends, ends, *shape, causal=True, kv_data_type=k.dtype, **types)
            out = self.prefill.run(q, k, v)
        else:
            if module.layer_idx == 0:
                self.decode.plan(
                    starts, starts[:-1], so_far, *shape, slots, kv_data_type=key.dtype, **types
                )
            out = self.decode.run(q, (key, value))
        return out.view(batch, tokens, heads, -1), None


def seconds(call):
    if GPU:
        torch.cuda.synchronize()
    begin = time.perf_counter()
    call()
    if GPU:
        torch.cuda.synchronize()
    return time.perf_counter() - begin


@torch.inference_mode()
def measure(model, names, calls, rounds):
    """Median seconds of each call by attention, rounds interleaved; or why there is none."""
    times = {(name, kind): [] for name in names for kind in calls}
    for done in range(rounds + 1):  # the first loads and allocates
        for (name, kind), found in times.items():
            model.set_attn_implementation(name)
            try:
                took = seconds(lambda: calls[kind](name))  # noqa: B023
            except Exception as error:  # an operator that this torch or GPU has not
                times[name, kind] = f"{type(error).__name__}: {str(error).splitlines()[0][:60]}"
                continue
            if done and isinstance(found, list):
                found.append(took)
    return {key: x if isinstance(x, str) else statistics.median(x) for key, x in times.items()}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    register()
    ALL_ATTENTION_FUNCTIONS.register("torch varlen", varlen)
    ALL_MASK_ATTENTION_FUNCTIONS.register("torch varlen", lambda *args, **kwargs: None)
    others = []
    if GPU and importlib.util.find_spec("flashinfer"):
        ALL_ATTENTION_FUNCTIONS.register("FlashInfer", FlashInfer())
        ALL_MASK_ATTENTION_FUNCTIONS.register("FlashInfer", lambda *args, **kwargs: None)
        others = ["FlashInfer"]
    config = transformers.LlamaConfig(
        hidden_size=HIDDEN, intermediate_size=WIDE, num_attention_heads=HEADS, vocab_size=1024,
        num_key_value_heads=HEADS // 4, num_hidden_layers=args.layers,
    )  # fmt: skip
    torch.manual_seed(0)
    with torch.device(DEVICE):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=DTYPE).eval()
        prompts = torch.randint(1024, (REQUESTS, LENGTH))
        cache = transformers.StaticCache(config=config, max_cache_len=SLOTS)

    def extend(ids):
        so_far.add_(ids.shape[1])
        model(ids, past_key_values=cache, logits_to_keep=1)

    def prefill(name):
        for ids in prompts.split(1 if name == "eager" else REQUESTS):
            model(ids, use_cache=False, logits_to_keep=1)

    def decode(name):
        for _ in range(STEPS):
            extend(prompts[:1, :1].expand(DECODES, 1))

    names = ["preflash", *others, "torch varlen", "sdpa", "eager"]
    model.set_attn_implementation("sdpa")
    with torch.inference_mode():
        extend(prompts[:1, :CONTEXT].expand(DECODES, CONTEXT))
    prefills = measure(model, names, {"prefill": prefill}, args.rounds)
    torch.cuda.empty_cache()
    # Contexts grow by STEPS in each call; rounds are interleaved, and few enough for the cache.
    rounds = min(args.rounds, (SLOTS - CONTEXT) // STEPS // len(names) - 1)
    found = prefills | measure(model, names, {"decode": decode}, rounds)
    where = torch.cuda.get_device_name() if GPU else "CPU"
    versions = f"torch {torch.__version__}, transformers {transformers.__version__}"
    print(f"{where}, {versions}; {args.layers} layers, hidden {HIDDEN}; tokens/s\n")
    print(f"| attention | prefill {REQUESTS} x {LENGTH} | decode {DECODES} x {CONTEXT} |")
    print("|---|---|---|")
    tokens = {"prefill": REQUESTS * LENGTH, "decode": DECODES * STEPS}
    for name in names:
        cells = []
        for kind, count in tokens.items():
            took = found[name, kind]
            cells.append(took if isinstance(took, str) else f"{count / took:,.0f}")
        print(f"| {name} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
