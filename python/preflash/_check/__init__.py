"""The arguments of public calls: what they may be, and what is wrong with them.

arguments   one field per parameter of the public functions, with what each is for
values      checks of numbers, names, dtypes and tensors; tensor_checks, recording and spelling are
            its parts
options     arguments -> AttentionOptions, which decide a kernel and a work list
lengths     index arrays -> the lengths of a batch and its pages
scales      softmax scale and calibration scales -> two factors
outputs     out, lse and their layout
pages       the arguments of append_paged_kv_cache and its like
tensors     the tensors of run() against what was planned
request     all of these together: what a plan is made for
"""
