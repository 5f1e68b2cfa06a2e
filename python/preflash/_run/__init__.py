"""From a placed plan and tensors to a launch.

variant     PlannedVariant.attend_to(), of one batch or of two in one launch
kernels     each family of kernels as a backend
"""
