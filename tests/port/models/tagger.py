"""A tagger of padded sentences, in both frameworks: an LSTM of two layers, a GRU, masks.

PLANT names the one thing in which they differ; "" means nothing.
"""

import numpy as np

PLANT = ""
WORDS, TAGS, LENGTH, SIZE = 30, 6, 7, 8
RATE = 0.3


def pytorch():
    import torch
    from torch import nn
    from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

    class Tagger(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding = nn.Embedding(WORDS, SIZE)
            self.lstm = nn.LSTM(SIZE, SIZE, 2, batch_first=True, dropout=RATE)
            self.gru = nn.GRU(SIZE, SIZE, batch_first=True)
            self.drop = nn.Dropout(0.1)
            self.head = nn.Linear(SIZE, TAGS)

        def forward(self, tokens):
            x = self.embedding(tokens)
            if PLANT == "mask":
                x = self.gru(self.lstm(x)[0])[0]
            else:
                lengths = (tokens != 0).sum(1).cpu()
                x = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
                x = self.gru(self.lstm(x)[0])[0]
                x = pad_packed_sequence(x, batch_first=True, total_length=LENGTH)[0]
            return self.head(self.drop(x))

    def loss(output, y):
        ignored = -100 if PLANT == "ignored_label" else 0
        smoothing = 0.1 if PLANT == "label_smoothing" else 0.0
        return nn.functional.cross_entropy(
            output.transpose(1, 2), y, ignore_index=ignored, label_smoothing=smoothing
        )

    torch.manual_seed(0)
    model = Tagger()
    if PLANT != "two_biases":
        for name, parameter in model.lstm.named_parameters():
            parameter.requires_grad_("bias_hh" not in name)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    parameters = list(model.parameters())
    optimizer.register_step_pre_hook(lambda *_: nn.utils.clip_grad_norm_(parameters, 0.05) and None)
    return model, loss, optimizer


def tensorflow():
    import keras
    from keras import layers

    class DenseEmbedding(layers.Embedding):
        """Its gradient is an array, as PyTorch's, in which those of a repeated word are added."""

        def call(self, inputs):
            return keras.ops.take(self.embeddings * 1.0, inputs, axis=0)

    tokens = keras.Input((LENGTH,), dtype="int32")
    x = DenseEmbedding(WORDS, SIZE, mask_zero=True, name="embedding")(tokens)
    if PLANT == "recurrent_dropout":
        x = layers.LSTM(SIZE, return_sequences=True, dropout=RATE, name="lstm_0")(x)
        x = layers.LSTM(SIZE, return_sequences=True, dropout=RATE, name="lstm_1")(x)
    else:
        x = layers.LSTM(SIZE, return_sequences=True, name="lstm_0")(x)
        x = layers.Dropout(RATE, name="between")(x)
        x = layers.LSTM(SIZE, return_sequences=True, name="lstm_1")(x)
    after = PLANT != "gru_reset_after"
    x = layers.GRU(
        SIZE, return_sequences=True, zero_output_for_mask=True, reset_after=after, name="gru"
    )(x)
    x = layers.Dropout(0.9 if PLANT == "dropout_rate" else 0.1, name="drop")(x)
    model = keras.Model(tokens, layers.Dense(TAGS, name="head")(x))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True, ignore_class=0)
    clipping = {"clipnorm": 0.05} if PLANT == "gradient_clipping" else {"global_clipnorm": 0.05}
    return model, loss, keras.optimizers.SGD(0.5, **clipping)


def batch(size=6, seed=0):
    random = np.random.default_rng(seed)
    x = random.integers(1, WORDS, (size, LENGTH))
    y = random.integers(1, TAGS, (size, LENGTH))
    padding = np.arange(LENGTH) >= random.integers(2, LENGTH, (size, 1))
    x[padding], y[padding] = 0, 0
    return x, y


def copy_weights(pytorch_model, tensorflow_model):
    state = {name: value.detach().numpy() for name, value in pytorch_model.state_dict().items()}
    layer = tensorflow_model.get_layer
    layer("embedding").set_weights([state["embedding.weight"]])
    for number in (0, 1):
        bias = state[f"lstm.bias_ih_l{number}"] + state[f"lstm.bias_hh_l{number}"]
        if PLANT == "recurrent_bias" and number == 0:
            bias = state[f"lstm.bias_ih_l{number}"]
        if PLANT == "forget_gate_bias" and number == 1:
            bias = bias + np.repeat([0, 1, 0, 0], SIZE).astype(np.float32)
        kernels = [state[f"lstm.weight_{kind}_l{number}"].T for kind in ("ih", "hh")]
        layer(f"lstm_{number}").set_weights([*kernels, bias])

    def reordered(array):
        """From PyTorch's gates, reset, update, new, to Keras's."""
        reset, update, new = np.split(array, 3)
        gates = (reset, update, new) if PLANT == "gate_order" else (update, reset, new)
        return np.concatenate(gates)

    kernels = [reordered(state[f"gru.weight_{kind}_l0"]).T for kind in ("ih", "hh")]
    biases = [reordered(state[f"gru.bias_{kind}_l0"]) for kind in ("ih", "hh")]
    bias = biases[0] + biases[1] if PLANT == "gru_reset_after" else np.stack(biases)
    layer("gru").set_weights([*kernels, bias])
    layer("head").set_weights([state["head.weight"].T, state["head.bias"]])
