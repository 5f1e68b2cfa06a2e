"""Calls that plan for themselves: trtllm_fmha_v2_prefill and those that are like it.

arguments, lengths   checked
run                  planned, kept and run
direct               the same under the names of other calls
cudnn                the same for cudnn_batch_prefill_with_kv_cache
"""
