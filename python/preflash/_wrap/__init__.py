"""The wrapper classes: plan() once, run() for every layer.

batch           what all of them have; state and graph are its parts
paged, ragged   prefill and append; decode: one query per request
single          one request: plans that are remembered
traced          calls that torch records instead of making them
cudnn_kernels   cudnn_batch_prefill_with_kv_cache without cuDNN
"""
