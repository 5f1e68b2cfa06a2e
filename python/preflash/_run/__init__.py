"""From a placed plan and tensors to a launch.

place       memory of a work list, and of all that a launch uses beside it
variant     one batch: PlannedVariant.attend_to()
segments    two batches in one launch: PlannedSegments.attend_to()
"""
