"""Prefill and decode in one launch (POD-Attention, arXiv 2410.18038).

batch     the wrapper of prefills beside decode requests; preflash.pod has that of one prefill
pod_plan  plans of two batches, in one launch or one after the other; base of both public wrappers
"""
