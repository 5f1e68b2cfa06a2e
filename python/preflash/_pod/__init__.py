"""Prefill and decode in one launch (POD-Attention, arXiv 2410.18038).

joint       plans of two batches: in one launch, or one after the other
wrapper     what both public wrappers have; batch: the one for batches of prefills
options     options that later calls repeat
"""
