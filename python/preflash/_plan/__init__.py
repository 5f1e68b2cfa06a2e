"""From a request to a placed plan.

pipeline    request -> draft -> place -> upload; workspace_size
masks       custom masks: packed, owned, classified by tile
staging     which plans rotate or dequantise in a pre-pass
"""
