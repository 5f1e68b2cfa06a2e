"""From a request to a placed plan.

pipeline    Request -> ExecutionPlan -> upload; workspace_size
masks       custom masks: packed, owned; those that calls describe in fewer numbers
pages       page tables as lists of pages
prepass     which plans rotate or dequantise in a pre-pass
"""
