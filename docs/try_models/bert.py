"""A BERT of transformers with random weights: inputs in a dict, outputs in an object, dropout.

Needs `pip install transformers`.
"""

import numpy as np

TOKENS, LENGTH = 8000, 64


def pytorch():
    import torch.nn.functional as F
    from transformers import BertConfig, BertForSequenceClassification

    config = BertConfig(
        vocab_size=TOKENS,
        hidden_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        intermediate_size=1024,
        num_labels=4,
    )
    model = BertForSequenceClassification(config)
    return model, lambda output, y: F.cross_entropy(output.logits, y)


def batch(size=16, seed=0):
    random = np.random.default_rng(seed)
    tokens = random.integers(0, TOKENS, (size, LENGTH))
    mask = np.ones((size, LENGTH), dtype=np.int64)
    return {"input_ids": tokens, "attention_mask": mask}, random.integers(0, 4, size)
