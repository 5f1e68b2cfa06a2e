"""torch.ops.preflash.*: the operators that torch.compile, make_fx and torch.export record.

operators   their schemas, implementations and fake implementations
"""
