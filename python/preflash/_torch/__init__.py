"""torch.ops.preflash.*: the operators that torch.compile, make_fx and torch.export record."""
