"""One framework's share of the tests of initialization; `worker.py` runs it."""

from __future__ import annotations

import sys

import numpy as np

from tests import workers

NAME = sys.argv[1]
FRAMEWORK = "pt" if NAME == "pt" else "tf"
impl = workers.implementation(FRAMEWORK, "recipes.initialization", "kit.examples")
initialization = impl.recipes.initialization
SCHEMES = initialization.SCHEMES
ORTHOGONAL = "orthogonal"

if FRAMEWORK == "pt":
    import torch
    from torch import nn

    functional = nn.functional

    def layers():
        """One layer of each kind, by name."""
        return {
            "dense": nn.Linear(200, 300),
            "convolution": nn.Conv2d(16, 64, 3),
            "grouped": nn.Conv2d(32, 64, 3, groups=4),
            "depthwise": nn.Conv2d(96, 192, 5, groups=96),
            "transposed": nn.ConvTranspose2d(32, 48, 4, stride=2),
            "attention": nn.MultiheadAttention(64, 4, batch_first=True),
            "lstm": nn.LSTM(48, 32),
            "gru": nn.GRU(48, 32),
        }

    def matrices(name, layer):
        """(kernel, matrices of (inputs, outputs)) written out apart from the technique."""
        if name == "dense":
            return {"dense": [layer.weight.T]}
        if name in ("convolution", "grouped", "depthwise"):
            groups = layer.weight.chunk(layer.groups)
            return {name: [group.flatten(1).T for group in groups]}
        if name == "transposed":
            return {name: [layer.weight.transpose(1, 2).transpose(2, 3).flatten(0, 2)]}
        if name == "attention":
            query, key, value = layer.in_proj_weight.chunk(3)
            found = {"query": query, "key": key, "value": value, "out": layer.out_proj.weight}
            return {each: [weight.T] for each, weight in found.items()}
        gates = 4 if name == "lstm" else 3
        return {
            f"{name} input": [gate.T for gate in layer.weight_ih_l0.chunk(gates)],
            f"{name} recurrent": [gate.T for gate in layer.weight_hh_l0.chunk(gates)],
        }

    def model_of(all_layers):
        return nn.ModuleDict(all_layers)

    def run(name, layer, random):
        """What a layer makes of inputs of variance one, away from the borders."""
        sizes = {"dense": (500, 200), "convolution": (8, 16, 20, 20), "grouped": (8, 32, 20, 20)}
        sizes |= {"depthwise": (8, 96, 20, 20), "transposed": (8, 32, 20, 20)}
        x = torch.tensor(random.normal(size=sizes[name]).astype(np.float32))
        with torch.no_grad():
            out = layer(x)
        return out if name == "dense" else out[:, :, 4:-4, 4:-4]

    def biases(name, layer):
        return [p for key, p in layer.named_parameters() if "bias" in key]

    def foreign():
        """Torchvision's networks and PyTorch's own transformer."""
        from torchvision import models

        small = {"num_layers": 2, "num_heads": 2, "hidden_dim": 32, "mlp_dim": 64}
        block = nn.TransformerEncoderLayer(32, 2, 64, batch_first=True)
        return {
            "resnet18": models.resnet18(weights=None),
            "vit": models.VisionTransformer(32, 16, **small),
            "transformer": nn.TransformerEncoder(block, 2),
        }

    class Language(nn.Module):
        """An embedding tied to the head, a frozen layer, normalisation."""

        def __init__(self):
            super().__init__()
            self.embedding = nn.Embedding(50, 16)
            self.frozen = nn.Linear(16, 16).requires_grad_(False)
            self.dense = nn.Linear(16, 16)
            self.norm = nn.LayerNorm(16)
            self.drop = nn.Dropout(0.5)
            self.batch_norm = nn.BatchNorm1d(16)
            self.head = nn.Linear(16, 50, bias=False)
            self.head.weight = self.embedding.weight

        def forward(self, codes):
            x = self.norm(self.dense(self.frozen(self.embedding(codes))).relu())
            return self.head(self.batch_norm(self.drop(x)))

    def language():
        torch.manual_seed(7)
        return Language()

    def parameters(model):
        return {name: p.detach().numpy().copy() for name, p in model.named_parameters()}

    def everything(model):
        return [value.numpy().copy() for value in model.state_dict().values()]

    def random_state():
        return torch.get_rng_state().numpy().copy()

    def codes():
        return torch.arange(12)

    def labels():
        return torch.arange(12) % 7

    def cross_entropy(output, y):
        return functional.cross_entropy(output, y)

    def refused():
        lazy = nn.Sequential(nn.LazyLinear(3))
        normed = nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(3, 3)))
        return {"no parameters yet": lazy, "computed": normed}

    tensor = torch.tensor

else:
    import tensorflow as tf

    from tests.recipes.keras_foreign import mobilenet

    keras = tf.keras

    def layers():
        """One layer of each kind, by name."""
        kinds = keras.layers
        found = {
            "dense": kinds.Dense(300),
            "convolution": kinds.Conv2D(64, 3),
            "grouped": kinds.Conv2D(64, 3, groups=4),
            "depthwise": kinds.DepthwiseConv2D(5, depth_multiplier=2),
            "transposed": kinds.Conv2DTranspose(48, 4, strides=2),
            "attention": kinds.MultiHeadAttention(4, 16),
            "lstm": kinds.LSTM(32),
            "gru": kinds.GRU(32),
        }
        channels = {"convolution": 16, "grouped": 32, "depthwise": 96, "transposed": 32}
        for name, layer in found.items():
            if name == "attention":
                layer(tf.zeros((1, 2, 64)), tf.zeros((1, 2, 64)))
            elif name in channels:
                layer(tf.zeros((1, 8, 8, channels[name])))
            else:
                layer(tf.zeros((1, 200) if name == "dense" else (1, 2, 48)))
        return found

    def matrices(name, layer):
        """(kernel, matrices of (inputs, outputs)) written out apart from the technique."""
        if name == "dense":
            return {"dense": [layer.kernel]}
        if name in ("convolution", "grouped"):
            kernel = tf.convert_to_tensor(layer.kernel)
            groups = tf.split(kernel, layer.groups, axis=-1)
            return {name: [tf.reshape(group, (-1, group.shape[-1])) for group in groups]}
        if name == "depthwise":
            kernel = tf.convert_to_tensor(layer.weights[0])
            return {name: [tf.reshape(kernel[:, :, c], (25, 2)) for c in range(96)]}
        if name == "transposed":
            kernel = tf.transpose(tf.convert_to_tensor(layer.kernel), (0, 1, 3, 2))
            return {name: [tf.reshape(kernel, (-1, 48))]}
        if name == "attention":
            names = ("query", "key", "value", "out")
            kernels = [tf.convert_to_tensor(weight) for weight in layer.weights[::2]]
            return {each: [tf.reshape(k, (64, 64))] for each, k in zip(names, kernels, strict=True)}
        gates = 4 if name == "lstm" else 3
        kernel, recurrent = (tf.convert_to_tensor(weight) for weight in layer.weights[:2])
        return {
            f"{name} input": tf.split(kernel, gates, axis=1),
            f"{name} recurrent": tf.split(recurrent, gates, axis=1),
        }

    def model_of(all_layers):
        class Holder(keras.Model):
            def __init__(self):
                super().__init__()
                self.inner = list(all_layers.values())
                self.built = True

            def call(self, x):
                return x

        return Holder()

    def run(name, layer, random):
        """What a layer makes of inputs of variance one, away from the borders."""
        sizes = {"dense": (500, 200), "convolution": (8, 20, 20, 16), "grouped": (8, 20, 20, 32)}
        sizes |= {"depthwise": (8, 20, 20, 96), "transposed": (8, 20, 20, 32)}
        out = layer(random.normal(size=sizes[name]).astype(np.float32))
        return out if name == "dense" else out[:, 4:-4, 4:-4]

    def biases(name, layer):
        if name == "attention":
            return layer.weights[1::2]
        return layer.weights[-1:]

    def foreign():
        """Keras's own networks: depthwise, separable and ordinary convolutions."""
        inputs = keras.Input((8, 8, 3))
        x = keras.layers.SeparableConv2D(8, 3)(inputs)
        x = keras.layers.Reshape((36, 8))(x)
        x = keras.layers.Bidirectional(keras.layers.GRU(4))(x)
        return {
            "mobilenet": mobilenet(),
            "separable and recurrent": keras.Model(inputs, x),
        }

    class Language(keras.Model):
        """An embedding tied to the head, a frozen layer, normalisation."""

        def __init__(self):
            super().__init__()
            self.embedding = keras.layers.Embedding(50, 16, name="embedding")
            self.frozen = keras.layers.Dense(16, trainable=False, name="frozen")
            self.dense = keras.layers.Dense(16, activation="relu", name="dense")
            self.norm = keras.layers.LayerNormalization(name="norm")
            self.drop = keras.layers.Dropout(0.0 if NAME == "tf_keras" else 0.5)
            self.batch_norm = keras.layers.BatchNormalization(name="batch_norm")

        def call(self, codes, training=False):
            x = self.norm(self.dense(self.frozen(self.embedding(codes))))
            x = self.batch_norm(self.drop(x, training=training), training=training)
            return tf.matmul(x, self.embedding.embeddings, transpose_b=True)

    def language():
        keras.utils.set_random_seed(7)
        model = Language()
        model(codes())
        return model

    def variable_name(variable):
        return getattr(variable, "path", variable.name)

    def parameters(model):
        return {variable_name(v): np.array(tf.convert_to_tensor(v)) for v in model.weights}

    def everything(model):
        return [np.array(tf.convert_to_tensor(v)) for v in model.variables]

    def random_state():
        return np.array(tf.random.get_global_generator().state)

    def codes():
        return tf.range(12)

    def labels():
        return tf.range(12) % 7

    def cross_entropy(output, y):
        losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels=y, logits=output)
        return tf.reduce_mean(losses)

    def refused():
        kinds = keras.layers
        normed = keras.Sequential([kinds.SpectralNormalization(kinds.Dense(3))])
        normed(tf.zeros((1, 3)))
        return {"no parameters yet": keras.Sequential([kinds.Dense(3)]), "computed": normed}

    tensor = tf.constant


def numpy(value):
    return np.asarray(value.detach() if FRAMEWORK == "pt" else tf.convert_to_tensor(value), float)


def drawn():
    """Mean, variance, extremes and size of each kernel by scheme; and gains."""
    found, made = {}, layers()
    model = model_of(made)
    for scheme in SCHEMES:
        initialization.apply_initialization(model, scheme=scheme, seed=1)
        found[scheme] = {}
        for name, layer in made.items():
            for kernel, parts in matrices(name, layer).items():
                values = np.concatenate([numpy(part).ravel() for part in parts])
                found[scheme][kernel] = {
                    "mean": values.mean(),
                    "variance": values.var(),
                    "largest": np.abs(values).max(),
                    "count": values.size,
                }
    made = {"dense": layers()["dense"]}
    initialization.apply_initialization(model_of(made), scheme="he_normal", gain=3.0, seed=1)
    found["gain of 3"] = numpy(matrices("dense", made["dense"])["dense"][0]).var()
    return found


def kept_length():
    """How far each orthogonal matrix is from one that keeps lengths; its gain squared."""
    made, found = layers(), {}
    initialization.apply_initialization(model_of(made), scheme=ORTHOGONAL, seed=1)
    for name, layer in made.items():
        for kernel, parts in matrices(name, layer).items():
            wide = [m if m.shape[0] >= m.shape[1] else m.T for m in map(numpy, parts)]
            found[kernel] = max(np.abs(m.T @ m - np.eye(m.shape[1])).max() for m in wide)
    return found


def passed_on():
    """The mean square behind each layer of He's kernels, for inputs of one: theory says two."""
    made, random = layers(), np.random.default_rng(0)
    initialization.apply_initialization(model_of(made), scheme="he_normal", seed=1)
    names = ("dense", "convolution", "grouped", "depthwise", "transposed")
    return {name: np.square(numpy(run(name, made[name], random))).mean() for name in names}


def biased():
    """The distinct values of the biases of each layer by two schemes."""
    found = {}
    for scheme in ("glorot_uniform", "default"):
        made = layers()
        initialization.apply_initialization(model_of(made), scheme=scheme, seed=1)
        found[scheme] = {
            name: np.concatenate([numpy(bias).ravel() for bias in biases(name, layer)])
            for name, layer in made.items()
        }
    return found


def seeds():
    """Draws by seed, and whether the global random state stays."""
    found, state = {}, random_state()
    for case, scheme, seed in (
        ("one", "he_normal", 1),
        ("again", "he_normal", 1),
        ("other", "he_normal", 2),
        ("default", "default", 1),
        ("default again", "default", 1),
        ("default, other", "default", 2),
    ):
        model = impl.kit.examples.deep_network(layers=3, width=16)
        if FRAMEWORK == "pt":
            state = random_state()  # building draws
        initialization.apply_initialization(model, scheme=scheme, seed=seed)
        found[case] = np.concatenate([v.ravel() for v in parameters(model).values()])
        assert np.array_equal(state, random_state())
    return found


def left():
    """What is said of each parameter, and which ones changed."""
    found = {}
    for scheme in ("he_normal", "default"):
        model = language()
        before = parameters(model)
        report = initialization.apply_initialization(model, scheme=scheme, seed=3)
        changed = {
            name: not np.array_equal(before[name], value)
            for name, value in parameters(model).items()
            if name in report
        }
        found[scheme] = {"report": report, "changed": changed}
    return found


def foreign_models():
    """What is said of each parameter of models of others, and that they still compute."""
    found = {}
    for name, model in foreign().items():
        found[name] = initialization.apply_initialization(model, scheme="he_normal")
    return found


def frozen_kernel():
    """What is said of a layer whose kernel alone is frozen, and whether that stayed."""
    model = impl.kit.examples.deep_network(layers=1, width=4)
    if FRAMEWORK == "pt":
        kernel = model.layers[0].weight.requires_grad_(False)
    elif NAME == "tf":
        layer = next(layer for layer in model.layers if layer.weights)
        kernel, layer.kernel.trainable = layer.kernel, False
    else:
        return None  # freezes layers alone
    before = numpy(kernel).copy()
    said = initialization.apply_initialization(model)
    return {
        "said": next(iter(said.values())),
        "stayed": np.array_equal(before, numpy(kernel)),
        "others": list(said.values())[1:],
    }


def refusals():
    found = {}
    cases = {name: (model, {}) for name, model in refused().items()}
    model = language()
    cases["scheme"] = (model, {"scheme": "xavier"})
    cases["gain"] = (model, {"gain": 0.0})
    cases["gain of the default"] = (model, {"scheme": "default", "gain": 2.0})
    for name, (one, settings) in cases.items():
        try:
            initialization.apply_initialization(one, **settings)
            found[name] = None
        except (ValueError, NotImplementedError) as error:
            found[name] = f"{type(error).__name__}: {error}"
    return found


SCENARIOS = (
    drawn,
    kept_length,
    passed_on,
    biased,
    seeds,
    left,
    foreign_models,
    frozen_kernel,
    refusals,
)
