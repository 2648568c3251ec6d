"""One framework's share of the tests of initialization and gradient health; `worker.py` runs it."""

from __future__ import annotations

import sys
from contextlib import suppress
from dataclasses import dataclass

import numpy as np

from tests import workers

NAME = sys.argv[1]
FRAMEWORK = "pt" if NAME == "pt" else "tf"
impl = workers.implementation(FRAMEWORK, "recipes.initialization")
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

    def plain_norms(model, x, y):
        """By a plain backward pass, layer by layer."""
        state = random_state()
        output = model(x)
        output.retain_grad()
        cross_entropy(output, y).backward()
        torch.set_rng_state(torch.tensor(state))
        found = {}
        for name, parameter in model.named_parameters():
            if parameter.grad is not None:
                layer = name.rpartition(".")[0]
                found[layer] = found.get(layer, 0.0) + float(parameter.grad.square().sum())
        found["output"] = float(output.grad.square().sum())
        model.zero_grad()
        return {name: square**0.5 for name, square in found.items()}

    def write_kernels(model, kernels):
        with torch.no_grad():
            for layer, kernel in zip([*model.layers, model.head], kernels, strict=True):
                layer.weight.copy_(torch.tensor(kernel.T))
                layer.bias.zero_()

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

    def parameters(model):
        name = initialization._name
        return {name(v): np.array(tf.convert_to_tensor(v)) for v in model.weights}

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

    def plain_norms(model, x, y):
        """By a plain tape, layer by layer."""
        kept = everything(model)
        with tf.GradientTape() as tape:
            output = model(x, training=True)
            loss = cross_entropy(output, y)
        variables = model.trainable_variables
        found = {}
        for variable, gradient in zip(
            [*variables, None], tape.gradient(loss, [*variables, output]), strict=True
        ):
            layer = "output"
            if variable is not None:
                layer = initialization._name(variable).rpartition("/")[0]
            square = float(tf.reduce_sum(tf.convert_to_tensor(gradient) ** 2))
            found[layer] = found.get(layer, 0.0) + square
        for variable, value in zip(model.variables, kept, strict=True):
            variable.assign(value)
        return {name: square**0.5 for name, square in found.items()}

    def write_kernels(model, kernels):
        dense = [layer for layer in model.layers if layer.weights]
        for layer, kernel in zip(dense, kernels, strict=True):
            layer.set_weights([kernel, np.zeros(kernel.shape[1])])

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
        model = initialization.deep_network(layers=3, width=16)
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


def norms():
    """Those of a plain backward pass; and what else changed."""
    model = language()
    wanted = plain_norms(model, codes(), labels())
    before = everything(model), random_state()
    found = initialization.gradient_norms(model, cross_entropy, codes(), labels())
    with suppress(ZeroDivisionError):
        initialization.gradient_norms(model, lambda output, y: 1 / 0, codes(), labels())
    same = all(map(np.array_equal, before[0], everything(model)))
    gradients = FRAMEWORK == "pt" and any(p.grad is not None for p in model.parameters())
    return {
        "wanted": wanted,
        "found": found,
        "as before": same and np.array_equal(before[1], random_state()) and not gradients,
    }


def normalized_kernel():
    """Whether norms leave a kernel as it was that its layer writes to, in training."""
    if FRAMEWORK == "pt":
        return None  # there a buffer is written to
    layers = keras.layers
    spectral = layers.SpectralNormalization(layers.Dense(10, kernel_initializer="ones"))
    model = keras.Sequential([keras.Input((3,)), spectral])
    before = everything(model)
    x = tensor(np.ones((4, 3), np.float32))
    initialization.gradient_norms(model, cross_entropy, x, labels()[:4])
    return all(map(np.array_equal, before, everything(model)))


def frozen_kernel():
    """What is said of a layer whose kernel alone is frozen, and whether that stayed."""
    model = initialization.deep_network(layers=1, width=4)
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


def named_output():
    """Norms of a model whose last layer is called "last", and of one where it is "output"."""
    found = []
    for last in ("last", "output"):
        if FRAMEWORK == "pt":
            parts = {"first": nn.Linear(3, 3), last: nn.Linear(3, 4)}
            model = nn.Sequential()
            for name, layer in parts.items():
                model.add_module(name, layer)
        else:
            parts = [keras.layers.Dense(n, name=name) for n, name in ((3, "first"), (4, last))]
            model = keras.Sequential([keras.Input((3,)), *parts])
        initialization.apply_initialization(model)
        x = np.ones((4, 3), np.float32)
        found.append(initialization.gradient_norms(model, cross_entropy, tensor(x), labels()[:4]))
    return found


@dataclass
class Held:
    """An output that frameworks do not know as a container."""

    logits: object


def held():
    """The norm at an output in a dataclass, and at the same one plain; only PyTorch takes it."""
    if FRAMEWORK != "pt":
        return None
    model, y = nn.Linear(3, 2), torch.tensor([0, 1])
    outer = nn.Sequential(model)
    outer.forward = lambda x: Held({"all": Held(model(x))})
    norms = [
        initialization.gradient_norms(model, cross_entropy, torch.ones(2, 3), y),
        initialization.gradient_norms(
            outer, lambda out, y: cross_entropy(out.logits["all"].logits, y), torch.ones(2, 3), y
        ),
    ]
    return [each["output"] for each in norms]


def twins():
    """Norms of the same drawn kernels on the same batch."""
    random = np.random.default_rng(4)
    sizes = [(16, 16)] * 4 + [(16, 10)]
    kernels = [(random.normal(size=s) / 3).astype(np.float32) for s in sizes]
    x, y = random.normal(size=(8, 16)).astype(np.float32), random.integers(0, 10, 8)
    found = {}
    for residual in (False, True):
        model = initialization.deep_network(layers=4, width=16, residual=residual)
        write_kernels(model, kernels)
        norms = initialization.gradient_norms(model, cross_entropy, tensor(x), tensor(y))
        found[str(residual)] = list(norms.values())
    return found


def health():
    """Unhealthy layers of 30, plain and with residuals, by scheme."""
    random = np.random.default_rng(5)
    x = tensor(random.normal(size=(64, 64)).astype(np.float32))
    y = tensor(random.integers(0, 10, 64))
    models = {each: initialization.deep_network(residual=each) for each in (False, True)}
    found = {}
    for case, settings in {
        "default": {"scheme": "default"},
        "glorot": {"scheme": "glorot_normal"},
        "he": {"scheme": "he_normal"},
        "orthogonal": {"scheme": ORTHOGONAL, "gain": 2**0.5},
        "he, doubled": {"scheme": "he_normal", "gain": 2.0},
        "he, small": {"scheme": "he_normal", "gain": 30**-0.5},
    }.items():
        for residual, model in models.items():
            initialization.apply_initialization(model, **settings)
            norms = initialization.gradient_norms(model, cross_entropy, x, y)
            said = initialization.find_unhealthy(norms)
            found[f"{case}{', residual' if residual else ''}"] = {
                "said": sorted({reason.partition(":")[0] for reason in said.values()}),
                "count": len(said),
                "first": next(iter(norms.values())) / norms["output"],
            }
    return found


def rules():
    """What is said of norms that are given."""
    given = {"a": 1e-9, "b": 1.0, "c": 1e6, "d": 0.0, "e": float("nan"), "output": 1.0}
    saturated = {"a": 1e-3, "output": 0.0}  # a penalty's gradient alone
    return {
        "given": initialization.find_unhealthy(given),
        "saturated": initialization.find_unhealthy(saturated),
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
    norms,
    normalized_kernel,
    named_output,
    held,
    twins,
    health,
    rules,
    refusals,
)
