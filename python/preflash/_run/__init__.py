"""From a placed plan and tensors to a launch.

variant     memory and checks of the runs of _core.ExecutionPlan; new workspaces
"""
