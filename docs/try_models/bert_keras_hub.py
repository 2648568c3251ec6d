"""A BERT of KerasHub with random weights: inputs in a dict. Needs `pip install keras-hub`."""

import numpy as np

TOKENS, LENGTH = 8000, 64


def tensorflow():
    import keras_hub
    import tensorflow as tf

    backbone = keras_hub.models.BertBackbone(
        vocabulary_size=TOKENS,
        num_layers=4,
        num_heads=4,
        hidden_dim=256,
        intermediate_dim=1024,
        max_sequence_length=LENGTH,
    )
    model = keras_hub.models.BertTextClassifier(backbone, num_classes=4)
    return model, tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def batch(size=16, seed=0):
    random = np.random.default_rng(seed)
    tokens = random.integers(0, TOKENS, (size, LENGTH)).astype(np.int32)
    segments = np.zeros((size, LENGTH), np.int32)
    padding = np.ones((size, LENGTH), bool)
    x = {"token_ids": tokens, "segment_ids": segments, "padding_mask": padding}
    return x, random.integers(0, 4, size)
