"""The wrapper classes: plan() once, run() for every layer.

batch           what all of them have; plan, graph and options are its parts
paged, ragged   prefill and append; decode: one query per request
batch_attention, bidirectional_ranges   BatchAttention; spans that see themselves both ways
single          one request: plans that are remembered
compile_ops     calls that torch records instead of making them
"""
