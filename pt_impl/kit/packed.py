"""The kit's GPT on samples of many lengths: any length, positions and a mask as they are given.

What it holds: what a model has to take so that its samples can be packed.
Twin: `tf_impl/kit/packed.py`.
Where the frameworks differ: a mask is handed to the fused attention here.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pt_impl.kit import models


class PackedGPT(nn.Module):
    """`model(codes)`, or with positions and which places see which; it has the model's weights."""

    def __init__(self, spec, weights: dict):
        super().__init__()
        self.gpt = models.build(spec, weights)

    def forward(
        self, codes: Tensor, positions: Tensor | None = None, allowed: Tensor | None = None
    ) -> Tensor:
        """Logits (n, t, vocabulary). codes, positions: (n, t) int64; allowed: (n, 1, t, t) bool.

        Without `allowed` a place sees those before it.
        """
        if positions is None:
            positions = torch.arange(codes.shape[1], device=codes.device)
        x = self.gpt.tokens(codes) + self.gpt.positions(positions)
        for name in self.gpt.blocks:
            block = getattr(self.gpt, name)
            x = x + _attend(block, block.ln0(x), allowed)
            x = x + block.down(F.gelu(block.up(block.ln1(x)), approximate="tanh"))
        return self.gpt.head(self.gpt.ln(x))


def _attend(block: nn.Module, x: Tensor, allowed: Tensor | None) -> Tensor:
    n, t, width = x.shape
    split = block.qkv(x).view(n, t, 3, block.heads, width // block.heads)
    q, k, v = split.permute(2, 0, 3, 1, 4)
    y = F.scaled_dot_product_attention(q, k, v, attn_mask=allowed, is_causal=allowed is None)
    return block.projection(y.transpose(1, 2).reshape(n, t, width))


def build(spec, weights: dict) -> nn.Module:
    """The model of a GPT's spec and canonical weights, without dropout."""
    return PackedGPT(spec, weights)
