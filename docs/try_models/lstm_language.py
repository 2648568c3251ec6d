"""A language model with a recurrent network, tied weights and dropout."""

import numpy as np

TOKENS, WIDTH, LENGTH = 2000, 256, 32


def pytorch():
    import torch.nn.functional as F
    from torch import nn

    class Language(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding = nn.Embedding(TOKENS, WIDTH)
            self.recurrent = nn.LSTM(WIDTH, WIDTH, num_layers=2, dropout=0.2, batch_first=True)
            self.head = nn.Linear(WIDTH, TOKENS)
            self.head.weight = self.embedding.weight
            nn.init.normal_(self.embedding.weight, std=0.02)

        def forward(self, tokens):
            hidden, _ = self.recurrent(self.embedding(tokens))
            return self.head(hidden)

    def loss(logits, following):
        return F.cross_entropy(logits.flatten(0, 1), following.flatten())

    return Language(), loss


def batch(size=16, seed=0):
    tokens = np.random.default_rng(seed).integers(0, TOKENS, (size, LENGTH + 1))
    return tokens[:, :-1], tokens[:, 1:]
