"""NVIDIA's cuDNN, through its frontend package where that is installed: backend="cudnn".

call        the arguments of cudnn_batch_prefill_with_kv_cache
checks      what is wrong with them
graph       one cuDNN graph: its tensors and its workspace
execution   graphs that are built, remembered and run
planned     cuDNN as a backend: plan, place, run
"""
