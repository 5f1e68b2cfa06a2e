"""From a placed plan and tensors to a launch.

variant     PlannedVariant: the kernel, work list and launches of one batch, or of two in one launch
"""
