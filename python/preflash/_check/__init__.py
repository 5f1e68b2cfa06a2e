"""The arguments of public calls: what they may be, and what is wrong with them.

calls       the arguments of each call, generated from cpp/variants/options.toml
rules       the rules of tensors and the ranges of sizes, generated from the same file
arguments   what calls have in common; the arguments of run()
validate    checks of numbers, names and dtypes; those of tensors are in tensor_checks
dtypes      the dtypes of calls
torch_modes checks that torch makes a call instead of recording or differentiating it
options     arguments -> AttentionOptions, which decide a kernel and a work list
lengths     index arrays -> the lengths of a batch and its pages
scales      softmax scale and calibration scales -> two factors
outputs     out, lse and their layout
extras      optional packages and the pip line that installs each
pages       the arguments of append_paged_kv_cache and its like
request     Request: what a plan is made for
tensors     the tensors of run() against the request
"""
