"""NVIDIA's cuDNN, through its frontend package where that is installed: backend="cudnn".

call        one form of a call, for all who run it, and its checks
graph       one cuDNN graph: its tensors and its workspace
execution   what a graph reads, its run, and the results
backend     cuDNN as a backend: plan, place, run
"""
