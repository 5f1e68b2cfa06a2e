"""trtllm_fmha_v2_prefill: its arguments, operands, lengths and run."""
