"""A functional Keras model of two inputs (a dict) and two outputs."""

import numpy as np

TOKENS, LENGTH, COLUMNS = 5000, 40, 20


def tensorflow():
    import tensorflow as tf
    from tensorflow.keras import layers

    text = tf.keras.Input((LENGTH,), dtype="int64", name="text")
    table = tf.keras.Input((COLUMNS,), name="table")
    x = layers.Embedding(TOKENS, 128)(text)
    x = layers.Conv1D(256, 5, padding="same", activation="relu")(x)
    x = layers.GlobalMaxPooling1D()(x)
    y = layers.Dense(128, activation="relu")(table)
    x = layers.Concatenate()([x, y])
    x = layers.Dense(512, activation="relu")(x)
    x = layers.Dropout(0.2)(x)
    outputs = {"topic": layers.Dense(20)(x), "price": layers.Dense(1)(x)}
    model = tf.keras.Model({"text": text, "table": table}, outputs)
    topic = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    price = tf.keras.losses.MeanSquaredError()
    return (
        model,
        lambda output, y: topic(y["topic"], output["topic"]) + price(y["price"], output["price"]),
    )


def batch(size=64, seed=0):
    random = np.random.default_rng(seed)
    text = random.integers(0, TOKENS, (size, LENGTH))
    table = random.standard_normal((size, COLUMNS), dtype=np.float32)
    price = random.standard_normal((size, 1), dtype=np.float32)
    return {"text": text, "table": table}, {"topic": random.integers(0, 20, size), "price": price}
