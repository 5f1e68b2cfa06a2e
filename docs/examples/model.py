"""A Llama-shaped model of random weights, whose attention the caller brings."""

import torch
import torch.nn.functional as nn

HEADS, KV_HEADS, DIM, LAYERS, VOCAB = 8, 2, 64, 4, 512
HIDDEN = HEADS * DIM


class Model:
    """Llama's layers. attend(layer, q, k, v) -> [tokens, HEADS, DIM] is where batches come in."""

    def __init__(self, device, dtype, seed=0):
        torch.manual_seed(seed)
        wide = (HEADS + 2 * KV_HEADS) * DIM
        shapes = [(wide, HIDDEN), (HIDDEN, HIDDEN), (4 * HIDDEN, HIDDEN), (HIDDEN, 2 * HIDDEN)]
        make = lambda n, m: (torch.randn(n, m) * m**-0.5).to(device, dtype)  # noqa: E731
        self.layers = [[make(*shape) for shape in shapes] for _ in range(LAYERS)]
        self.embedding, self.head = make(VOCAB, HIDDEN), make(VOCAB, HIDDEN)

    def __call__(self, tokens, positions, attend):
        """Logits [tokens, VOCAB] of tokens [tokens] at positions [tokens] of their requests."""
        x = self.embedding[tokens]
        for layer, (qkv, out, up, down) in enumerate(self.layers):
            heads = nn.linear(norm(x), qkv).view(len(x), -1, DIM)
            q, k, v = heads.split([HEADS, KV_HEADS, KV_HEADS], 1)
            o = attend(layer, rope(q, positions), rope(k, positions), v)
            x = x + nn.linear(o.flatten(1), out)
            gate, value = nn.linear(norm(x), up).chunk(2, -1)
            x = x + nn.linear(nn.silu(gate) * value, down)
        return nn.linear(norm(x), self.head)


def norm(x):
    return nn.rms_norm(x.float(), x.shape[-1:]).to(x.dtype)


def rope(x, positions):
    rates = 10000 ** (-torch.arange(DIM // 2, device=x.device) / (DIM // 2))
    angles = (positions[:, None] * rates)[:, None]
    a, b = x.float().chunk(2, -1)
    turned = (a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin())
    return torch.cat(turned, -1).to(x.dtype)
