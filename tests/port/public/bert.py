"""A small BERT of transformers and of KerasHub, with random weights and padded sentences."""

import numpy as np

WORDS, LENGTH, LAYERS, HEADS, SIZE, CLASSES = 1000, 16, 4, 4, 128, 4


def pytorch():
    import torch
    from transformers import BertConfig, BertForSequenceClassification

    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=WORDS,
        hidden_size=SIZE,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        intermediate_size=4 * SIZE,
        max_position_embeddings=LENGTH,
        num_labels=CLASSES,
    )
    model = BertForSequenceClassification(config)

    def loss(output, y):
        return torch.nn.functional.cross_entropy(output.logits, y)

    return model, loss, torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.01)


def tensorflow():
    import keras
    import keras_hub

    backbone = keras_hub.models.BertBackbone(
        vocabulary_size=WORDS,
        num_layers=LAYERS,
        num_heads=HEADS,
        hidden_dim=SIZE,
        intermediate_dim=4 * SIZE,
        max_sequence_length=LENGTH,
    )
    model = keras_hub.models.BertTextClassifier(backbone, num_classes=CLASSES)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    return model, loss, keras.optimizers.AdamW(1e-4, weight_decay=0.01)


def batch(size=8, seed=0, framework="pytorch"):
    random = np.random.default_rng(seed)
    tokens = random.integers(1, WORDS, (size, LENGTH))
    kept = np.arange(LENGTH) < random.integers(LENGTH // 2, LENGTH + 1, (size, 1))
    tokens = np.where(kept, tokens, 0)
    y = random.integers(0, CLASSES, size)
    if framework == "pytorch":
        return {"input_ids": tokens, "attention_mask": kept.astype(np.int64)}, y
    return {"token_ids": tokens, "segment_ids": np.zeros_like(tokens), "padding_mask": kept}, y
