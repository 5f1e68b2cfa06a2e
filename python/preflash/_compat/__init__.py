"""What flashinfer and serving engines expect beside the documented functions.

patch               patch_flashinfer(): our functions in an installed flashinfer
signatures          positional orders of later flashinfer releases; signatures that editors see
engine_attributes   attributes with an underscore that engines read
plan_module         wrapper._cached_module.plan(), which SGLang calls
"""
