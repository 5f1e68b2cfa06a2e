"""Interfaces that flashinfer and serving engines expect besides the documented functions.

patch               patch_flashinfer(): our functions in an installed flashinfer
signatures          how the public calls receive arguments: both positional orders, signatures that
                    editors see; the fast path of plan() begins in plans()
engine_attributes   attributes with an underscore that engines read
plan_module         wrapper._cached_module.plan(), which SGLang calls
sink_variant        jit_args of flashinfer's variant with attention sinks
cudnn_offsets       plan() of backend="cudnn" with offsets in elements
"""
