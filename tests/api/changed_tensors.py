"""Changes of a tensor that calls have to refuse, or to serve, by name."""

import torch
from torch._subclasses.fake_tensor import FakeTensorMode


def entry(index, value):
    """Returns a function that copies a tensor with another value at an index."""

    def entry(t):
        t = t.clone()
        t[index] = value
        return t

    return entry


def resized(t, nbytes: int):
    """Copies a tensor to a storage of so many bytes."""
    t = t.clone()
    t.untyped_storage().resize_(nbytes)
    return t


def freed(t):
    return resized(t, 0)


def freed_view(t):
    """Makes a view of freed storage, whose address is an offset from null, not null."""
    view = torch.cat([t, t])[t.shape[0] :]
    view.untyped_storage().resize_(0)
    return view


def short_view(t):
    """Makes a view from an offset on whose storage has the view's bytes, so not enough."""
    view = torch.cat([t[:1], t])[1:]
    view.untyped_storage().resize_(t.nbytes)
    return view


def meta(t):
    return t.to("meta")


def fake(t):
    return FakeTensorMode().from_tensor(t)


def negative(t):
    return torch._neg_view(t.clone())


def strided(t):
    """Copies the tensor to memory with gaps between the elements."""
    return torch.stack([t, t], -1)[..., 0]


def misaligned(t):
    """Copies the tensor to one element off a 16-byte boundary."""
    view = torch.zeros(t.numel() + 1, dtype=t.dtype, device=t.device)[1:].view(t.shape)
    return view.copy_(t)


def wide_rows(t, columns: int):
    """Copies the tensor to the first columns of wider rows."""
    wide = torch.zeros(*t.shape[:-1], columns, dtype=t.dtype, device=t.device)
    return wide[..., : t.shape[-1]].copy_(t)
