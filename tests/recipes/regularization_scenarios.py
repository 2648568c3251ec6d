"""One framework's share of the regularization's tests; `worker.py` runs it."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import numpy as np

from bench.harness.plan import Work
from bench.recipes import bench_regularization
from shared.specs import TASKS
from shared.weights import init_weights
from tests import workers

NAME = sys.argv[1]
FRAMEWORK = "pt" if NAME == "pt" else "tf"
impl = workers.implementation(FRAMEWORK, "recipes.regularization")
regularization = impl.recipes.regularization
DECAY = 0.3
WIDTH = 400

if FRAMEWORK == "pt":
    import torch
    from torch import nn

    class Small(nn.Module):
        """A parameter of each kind: tied head, frozen layer, class token."""

        def __init__(self):
            super().__init__()
            self.embedding = nn.Embedding(6, 4)
            self.frozen = nn.Linear(4, 4).requires_grad_(False)
            self.dense = nn.Linear(4, 4)
            self.norm = nn.LayerNorm(4)
            self.token = nn.Parameter(torch.ones(1, 4))
            self.head = nn.Linear(4, 6, bias=False)
            self.head.weight = self.embedding.weight

        def forward(self, codes):
            return self.head(self.norm(self.dense(self.frozen(self.embedding(codes)))) + self.token)

    def small():
        torch.manual_seed(0)
        return Small()

    def parameters(model):
        return {name: p.detach().numpy().copy() for name, p in model.named_parameters()}

    def write(model, random):
        """The same numbers in both frameworks, by kind."""
        values = draws(random)
        with torch.no_grad():
            model.dense.weight.copy_(torch.tensor(values["kernel"].T))
            model.dense.bias.copy_(torch.tensor(values["bias"]))
            model.norm.weight.copy_(torch.tensor(values["gamma"]))
            model.embedding.weight.copy_(torch.tensor(values["embedding"]))

    def shift(model):
        nn.init.ones_(model.norm.bias)  # zero would decay unseen

    def gradients(value, model):
        """By kind, in the layout of the draws."""
        wanted = {
            "kernel": model.dense.weight,
            "bias": model.dense.bias,
            "gamma": model.norm.weight,
            "embedding": model.embedding.weight,
        }
        found = torch.autograd.grad(value(), list(wanted.values()), allow_unused=True)
        found = dict(zip(wanted, found, strict=True))
        found = {name: None if g is None else g.numpy() for name, g in found.items()}
        if found["kernel"] is not None:
            found["kernel"] = found["kernel"].T
        return found

    def decay_of(optimizer):
        return max(group["weight_decay"] for group in optimizer.param_groups)

    def adamw(model):
        return torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.9)

    def steps_of_no_gradient(model, optimizer, count):
        for _ in range(count):
            optimizer.zero_grad()
            (0.0 * model(torch.arange(6)).sum() + 0.0 * model.token.sum()).backward()
            optimizer.step()

    def weight():
        """A kernel of two ones."""
        model = nn.Linear(2, 1, bias=False)
        nn.init.ones_(model.weight)
        return model

    def optimizers(model):
        return {
            "sgd": torch.optim.SGD(model.parameters(), lr=1e-3),
            "adam": torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0),
        }

    def train(model, optimizer, loss_fn, inputs):
        step = impl.kit.training.make_train_step(model, optimizer, loss_fn)
        for x in inputs:
            step(torch.tensor(x), None)
        return model.weight.detach().numpy().ravel()

    def total(output, y):
        return output.sum()

    def output_in_training(model, x):
        with torch.no_grad():
            return model.train()(x).numpy()

    def smoothed(logits, labels, smoothing):
        given = torch.tensor(logits, requires_grad=True)
        value = regularization.smoothed_cross_entropy(
            given, torch.tensor(labels), smoothing=smoothing
        )
        value.backward()
        return {"value": value.item(), "gradient": given.grad.numpy()}

    def identities():
        """Models whose output is their input, if nothing is dropped."""

        class Block(nn.Module):
            def __init__(self):
                super().__init__()
                self.norm = nn.Identity()
                self.dropout = nn.Dropout(0.0)  # within a branch, say, and not the last to run

            def forward(self, x):
                return self.norm(self.dropout(x))

        class Keyword(nn.Module):
            def __init__(self):
                super().__init__()
                self.attention = nn.Linear(WIDTH, 1)  # of another module than the head
                self.tail = nn.Sequential(nn.Linear(WIDTH, WIDTH))

            def forward(self, x):
                return self.tail[0](input=x)

        found = {
            "by keyword": Keyword(),
            "behind a block": nn.Sequential(Block(), nn.Linear(WIDTH, WIDTH)),
            "sequential": nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)),
            "with a tail": nn.Sequential(
                nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Identity()
            ),
        }
        for model in found.values():
            for module in model.modules():
                if isinstance(module, nn.Linear) and module.out_features == WIDTH:
                    nn.init.eye_(module.weight)
                    nn.init.zeros_(module.bias)
        return found

    def output(model, training):
        torch.manual_seed(1)
        model.train(training)
        with torch.no_grad():
            return model(torch.ones(20, WIDTH)).numpy()

    def names(model):
        return sorted(model.state_dict())

    def dropped():
        """Attention with dropout, one that is off, one of each other kind."""
        block = nn.TransformerEncoderLayer(8, 2, 8, dropout=0.1, batch_first=True)
        kinds = nn.Dropout2d, nn.AlphaDropout, nn.FeatureAlphaDropout
        return nn.Sequential(block, nn.Dropout(0.0), *[kind(0.2) for kind in kinds])

    def attention_rates(model):
        return [model[0].self_attn.dropout, *(module.p for module in model[1:])]

    def foreign():
        """How many decay of ResNet-18, and how many convolutions and dense layers it has."""
        from torchvision import models

        model = models.resnet18(weights=None)
        kinds = (nn.Conv2d, nn.Linear)
        return {
            "decayed": len(regularization.decayed_parameters(model)),
            "layers": sum(isinstance(module, kinds) for module in model.modules()),
        }

    def computed():
        """What decays of layers whose weights are computed from others."""
        parametrizations = nn.utils.parametrizations
        model = nn.Sequential(
            parametrizations.spectral_norm(nn.Embedding(5, 3)),
            parametrizations.spectral_norm(nn.Conv1d(3, 4, 1)),
            parametrizations.weight_norm(nn.Linear(4, 4)),
            parametrizations.weight_norm(nn.LayerNorm(4), dim=None),
        )
        return regularization.decayed_parameters(model)

    def framework_s_own():
        """What only this framework refuses."""
        model = small()
        decay = regularization.apply_decoupled_decay
        scheduled = adamw(model)
        torch.optim.lr_scheduler.ConstantLR(scheduled)
        coupled = torch.optim.Adam(model.parameters())
        momentum = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        norm = torch.optim.AdamW(model.norm.parameters())
        return {
            "a norm alone": lambda: decay(model, norm, weight_decay=0.1),
            "Adam": lambda: decay(model, coupled, weight_decay=0.1),
            "momentum": lambda: decay(model, momentum, weight_decay=0.1),
            "a scheduler": lambda: decay(model, scheduled, weight_decay=0.1),
            "no head": lambda: regularization.add_dropout(nn.Sequential(nn.ReLU()), rate=0.5),
            "two heads": lambda: regularization.add_dropout(
                nn.ModuleDict({"classes": nn.Linear(8, 3), "boxes": nn.Linear(8, 4)}), rate=0.5
            ),
            "dropout at a part's end": lambda: regularization.add_dropout(
                nn.Sequential(nn.Sequential(nn.Linear(2, 2), nn.Dropout()), nn.Linear(2, 2)),
                rate=0.5,
            ),
        }

    def moments_stay():
        """A group that is split in the middle of a training keeps its moments."""
        model = small()
        optimizer = adamw(model)
        (model(torch.arange(6)).square().sum() + model.token.sum()).backward()
        optimizer.step()
        kept = {id(p): state["exp_avg"].clone() for p, state in optimizer.state.items()}
        regularization.apply_decoupled_decay(model, optimizer, weight_decay=0.1)
        groups = [p for group in optimizer.param_groups for p in group["params"]]
        trained = [p for p in model.parameters() if p.requires_grad]
        part = torch.optim.AdamW(model.dense.parameters())
        return {
            "of a part": regularization.apply_decoupled_decay(
                model, part, weight_decay=0.1, norms=True
            ),
            "same": all(torch.equal(optimizer.state[p]["exp_avg"], kept[id(p)]) for p in trained),
            "once each": sorted(map(id, groups)) == sorted(map(id, model.parameters())),
        }

else:
    import tensorflow as tf

    from tests.recipes.keras_foreign import mobilenet

    keras = tf.keras

    class Small(keras.Model):
        """A parameter of each kind: tied head, frozen layer, class token."""

        def __init__(self):
            super().__init__()
            self.embedding = keras.layers.Embedding(6, 4, name="embedding")
            self.frozen = keras.layers.Dense(4, trainable=False, name="frozen")
            self.dense = keras.layers.Dense(4, name="dense")
            self.norm = keras.layers.LayerNormalization(name="norm")
            self.token = self.add_weight(name="token", shape=(1, 4), initializer="ones")

        def call(self, codes):
            x = self.norm(self.dense(self.frozen(self.embedding(codes)))) + self.token
            return tf.matmul(x, self.embedding.embeddings, transpose_b=True)

    def small():
        keras.utils.set_random_seed(0)
        model = Small()
        model(tf.range(6))
        return model

    def name_of(variable):
        return getattr(variable, "path", variable.name)

    def parameters(model):
        return {name_of(v): np.array(tf.convert_to_tensor(v)) for v in model.weights}

    def write(model, random):
        """The same numbers in both frameworks, by kind."""
        values = draws(random)
        model.dense.kernel.assign(values["kernel"])
        model.dense.bias.assign(values["bias"])
        model.norm.gamma.assign(values["gamma"])
        model.embedding.embeddings.assign(values["embedding"])

    def shift(model):
        model.norm.beta.assign(tf.ones(4))  # zero would decay unseen

    def gradients(value, model):
        """By kind, in the layout of the draws."""
        wanted = {
            "kernel": model.dense.kernel,
            "bias": model.dense.bias,
            "gamma": model.norm.gamma,
            "embedding": model.embedding.embeddings,
        }
        with tf.GradientTape() as tape:
            found = value()
        found = tape.gradient(found, list(wanted.values()))
        return {
            name: None if g is None else np.array(tf.convert_to_tensor(g))
            for name, g in zip(wanted, found, strict=True)
        }

    def decay_of(optimizer):
        return float(optimizer.weight_decay)

    def adamw(model):
        return keras.optimizers.AdamW(0.1, weight_decay=0.9)

    def steps_of_no_gradient(model, optimizer, count):
        variables = model.trainable_variables
        for _ in range(count):
            optimizer.apply_gradients([(tf.zeros(v.shape), v) for v in variables])

    def weight():
        """A kernel of two ones."""
        model = keras.Sequential([keras.layers.Dense(1, use_bias=False)])
        model(tf.zeros((1, 2)))
        model.set_weights([np.ones((2, 1))])
        return model

    def optimizers(model):
        return {"sgd": keras.optimizers.SGD(1e-3), "adam": keras.optimizers.Adam(1e-2)}

    def train(model, optimizer, loss_fn, inputs):
        step = impl.kit.training.make_train_step(model, optimizer, loss_fn)
        for x in inputs:
            step(tf.constant(x), tf.constant(0))
        return np.ravel(model.get_weights()[0])

    def total(output, y):
        return tf.reduce_sum(output)

    def output_in_training(model, x):
        return np.array(model(x, training=True))

    def smoothed(logits, labels, smoothing):
        given = tf.constant(logits)
        with tf.GradientTape() as tape:
            tape.watch(given)
            value = regularization.smoothed_cross_entropy(
                given, tf.constant(labels), smoothing=smoothing
            )
        return {"value": float(value), "gradient": tape.gradient(value, given).numpy()}

    def identities():
        """Models whose output is their input, if nothing is dropped."""

        def dense():
            return keras.layers.Dense(WIDTH, kernel_initializer="identity")

        inputs = keras.Input((WIDTH,))
        tail = keras.layers.ReLU()(dense()(dense()(inputs)))
        return {
            "sequential": keras.Sequential([keras.Input((WIDTH,)), dense(), dense()]),
            "with a tail": keras.Model(inputs, keras.layers.Activation("linear")(tail)),
        }

    def output(model, training):
        keras.utils.set_random_seed(1)
        return np.array(model(tf.ones((20, WIDTH)), training=training))

    def names(model):
        return sorted(name_of(v) for v in model.weights)

    def dropped():
        """Attention with dropout, one that is off, one of each other kind."""
        inputs = keras.Input((3, 8))
        x = keras.layers.MultiHeadAttention(2, 4, dropout=0.1)(inputs, inputs)
        x = keras.layers.Dropout(0.0)(x)
        for kind in ("SpatialDropout1D", "GaussianDropout", "AlphaDropout"):
            x = getattr(keras.layers, kind)(0.2)(x)
        return keras.Model(inputs, x)

    def attention_rates(model):
        attention = model.layers[1]
        assert attention._dropout == attention._dropout_layer.rate
        return [attention._dropout, *(layer.rate for layer in model.layers[2:])]

    def foreign():
        """How many decay of MobileNetV2, and how many convolutions and dense layers it has."""
        model = mobilenet()
        kinds = (keras.layers.Conv2D, keras.layers.DepthwiseConv2D, keras.layers.Dense)
        return {
            "decayed": len(regularization.decayed_parameters(model)),
            "layers": sum(isinstance(layer, kinds) for layer in model.layers),
        }

    def computed():
        """What decays of layers whose kernels are computed from others."""
        spectral = keras.layers.SpectralNormalization
        inner = [keras.layers.Embedding(5, 3), keras.layers.Conv1D(4, 1), keras.layers.Dense(4)]
        model = keras.Sequential([*map(spectral, inner), keras.layers.LayerNormalization()])
        model(np.zeros((1, 2), np.int32))
        return regularization.decayed_parameters(model)

    def framework_s_own():
        """What only this framework refuses."""
        model = small()
        built = adamw(model)
        built.build(model.trainable_variables)
        decay = regularization.apply_decoupled_decay
        return {
            "a built optimizer": lambda: decay(model, built, weight_decay=0.1),
            "a subclass": lambda: regularization.add_dropout(model, rate=0.5, head="dense"),
            "no head": lambda: regularization.add_dropout(
                keras.Sequential([keras.layers.ReLU()]), rate=0.5
            ),
            "a branch": lambda: regularization.add_dropout(branched(), rate=0.5),
            "a head within": lambda: regularization.add_dropout(
                keras.Sequential(
                    [keras.layers.Dense(2), keras.layers.TimeDistributed(keras.layers.Dense(2))]
                ),
                rate=0.5,
            ),
        }

    def branched():
        """A head whose output is added to another branch's."""
        inputs = keras.Input((4,))
        return keras.Model(inputs, keras.layers.Add()([keras.layers.Dense(4)(inputs), inputs]))

    def structured():
        """Models whose inputs and outputs are in dicts, or are integers, with dropout added."""
        one, other = keras.Input((4,), name="one"), keras.Input((4,), name="other")
        logits = keras.layers.Dense(3)(keras.layers.Dense(5)(keras.layers.Add()([one, other])))
        dicts = keras.Model({"x": one, "z": other}, {"logits": logits})
        codes = keras.layers
        integers = keras.Sequential(
            [
                keras.Input((7,), dtype="int32"),
                codes.Embedding(10, 4),
                codes.Flatten(),
                codes.Dense(3),
            ]
        )
        x = {"x": tf.ones((2, 4)), "z": tf.ones((2, 4))}
        changed = regularization.add_dropout(dicts, rate=0.5)
        same = np.allclose(changed(x)["logits"], dicts(x)["logits"])
        taken = regularization.add_dropout(integers, rate=0.5).inputs[0].dtype
        return {"same": bool(same), "dtype": tf.as_dtype(taken).name}

    def moments_stay():
        """Keras is told before there are moments."""
        return {"same": True, "once each": True}


def draws(random):
    return {
        "kernel": random.normal(size=(4, 4)).astype(np.float32),
        "bias": random.normal(size=4).astype(np.float32),
        "gamma": random.normal(size=4).astype(np.float32),
        "embedding": random.normal(size=(6, 4)).astype(np.float32),
    }


def penalty():
    """Value and gradients of the penalty, for kernels and for all that can be asked for."""
    found = {"draws": draws(np.random.default_rng(0))}
    model = small()
    write(model, np.random.default_rng(0))
    everything = {"biases": True, "norms": True, "embeddings": True}
    for case, settings in {"kernels": {}, "everything": everything}.items():

        def value(settings=settings):
            return regularization.l2_penalty(model, weight_decay=DECAY, **settings)

        found[case] = {"value": float(value()), "gradients": gradients(value, model)}
    return found


def decayed():
    """Each parameter over what it was, after steps without a gradient, by what was asked for."""
    found = {}
    for case, settings in {
        "kernels": {},
        "biases": {"biases": True},
        "norms": {"norms": True},
        "embeddings": {"embeddings": True},
    }.items():
        model = small()
        write(model, np.random.default_rng(0))
        shift(model)
        before, optimizer = parameters(model), adamw(model)
        said = regularization.apply_decoupled_decay(
            model, optimizer, weight_decay=DECAY, **settings
        )
        steps_of_no_gradient(model, optimizer, 3)
        after = parameters(model)
        ratios = {}
        for name, value in before.items():
            large = np.abs(value) > 1e-3
            ratios[name] = float((after[name][large] / value[large]).mean()) if large.any() else 1.0
        found[case] = {"said": said, "ratios": ratios}
    return found


def under_adam():
    """Two weights of one whose gradients are +-1 and +-100, after training with either decay."""
    inputs = [np.array([[1.0, 100.0]], np.float32) * (-1) ** step for step in range(200)]
    found = {}
    for rule in ("sgd", "adam"):
        for kind in ("nothing", "l2", "decoupled"):
            model, loss_fn = weight(), total
            optimizer = optimizers(model)[rule]
            if kind == "l2":
                loss_fn = regularization.make_penalized_loss(total, model, weight_decay=0.1)
            if kind == "decoupled":
                regularization.apply_decoupled_decay(model, optimizer, weight_decay=0.1)
            found[f"{rule}, {kind}"] = train(model, optimizer, loss_fn, inputs)
    return found


def smoothing():
    random = np.random.default_rng(2)
    logits = random.normal(0, 3, (2, 5, 7)).astype(np.float32)
    labels = random.integers(0, 7, (2, 5))
    found = {str(share): smoothed(logits, labels, share) for share in (0.0, 0.1, 0.5)}
    return found | {"logits": logits, "labels": labels}


def dropout():
    """What dropout before the head makes of ones; what changes besides; another rate."""
    found = {}
    for case, model in identities().items():
        before = names(model)
        changed = regularization.add_dropout(model, rate=0.75)
        found[case] = {
            "training": sorted(set(output(changed, True).ravel().tolist())),
            "kept": float((output(changed, True) > 0).mean()),
            "inference": sorted(set(output(changed, False).ravel().tolist())),
            "names": names(changed) == before,
        }
        set_again = regularization.set_dropout_rate(changed, rate=0.25)
        found[case]["kept at a quarter"] = float((output(changed, True) > 0).mean())
        found[case]["set"] = len(set_again)
        try:
            regularization.add_dropout(changed, rate=0.5)
        except ValueError as error:
            found[case]["twice"] = str(error)
    return found


def rates():
    """Of dropouts that are there."""
    model = dropped()
    said = regularization.set_dropout_rate(model, rate=0.6)
    return {"rates": attention_rates(model), "said": said}


def refusals():
    model = small()
    cases = {
        "no dropout": lambda: regularization.set_dropout_rate(model, rate=0.5),
        "a rate of one": lambda: regularization.set_dropout_rate(dropped(), rate=1.0),
        "a negative decay": lambda: regularization.l2_penalty(model, weight_decay=-1.0),
        "all smoothed": lambda: smoothed(np.zeros((1, 2), np.float32), np.zeros(1, int), 1.0),
        "an unknown head": lambda: regularization.add_dropout(
            identities()["sequential"], rate=0.5, head="tail"
        ),
        "no batch": lambda: regularization.scale_decay(weight_decay=0.1, batch_size=0),
        **framework_s_own(),
    }
    found = {}
    for case, call in cases.items():
        try:
            call()
            found[case] = None
        except (ValueError, NotImplementedError) as error:
            found[case] = str(error)
    return found


def batch_norm():
    """Of the benchmark's rows: outputs of four samples in training, among two sets of others."""
    task, found = TASKS["digits-few"], {}
    drawn = np.random.default_rng(4).normal(size=(12, 32, 32, 1)).astype(np.float32)
    y = np.arange(8)
    weights = init_weights(task.model, seed=3)
    for variant in bench_regularization.TECHNIQUE.variants:
        if variant.name not in ("none", "without_batchnorm"):
            continue
        work = Work(task, variant.name, variant.settings, 8, weights)
        prepared = bench_regularization.prepare(impl, work)
        among = [np.concatenate([drawn[:4], drawn[start : start + 4]]) for start in (4, 8)]
        batches = [impl.kit.data.to_device(x, y) for x in among]
        outputs = [output_in_training(prepared.model, x)[:4] for x, _ in batches]
        kept = impl.kit.models.export_weights(prepared.model)
        said = bench_regularization.took_effect(impl, work, prepared, batches[0])
        losses = [impl.kit.runtime.to_float(prepared.step(*batches[0])) for _ in range(30)]
        found[variant.name] = {
            "moved": np.abs(outputs[0] - outputs[1]).max(),
            "same kernels": all(
                np.array_equal(kept[name], value)
                for name, value in weights.items()
                if name.endswith(".kernel")
            ),
            "biases": sorted(name for name in kept if name.endswith(".bias")),
            "said": said,
            "losses": losses,
        }
    plain = bench_regularization.prepare(impl, Work(task, "none", {}, 8, weights))
    asked = Work(task, "without_batchnorm", {"batch_norm": False}, 8, weights)
    found["with it"] = bench_regularization.took_effect(impl, asked, plain, batches[0])[1]
    return found


def foreign_models():
    return foreign()


def computed_kernels():
    return computed()


def structures():
    return structured() if FRAMEWORK == "tf" else {"none": True}  # modules have no such thing


def split():
    return moments_stay()


def thawed():
    """Of two dense layers, all ones, the first thawed after decay was applied: what a step leaves.

    The gradients are zero; kernel, bias, kernel, bias. And what the penalty is then.
    """
    if FRAMEWORK == "pt":
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        model[0].requires_grad_(False)
        optimizer = torch.optim.AdamW(model.named_parameters(), lr=torch.tensor(0.1))
        for parameter in model.parameters():
            parameter.data.fill_(1.0)
            parameter.grad = torch.zeros_like(parameter)
        penalized = regularization.make_penalized_loss(
            lambda output, y: 0.0, model, weight_decay=0.5
        )
        regularization.apply_decoupled_decay(model, optimizer, weight_decay=0.5)
        model.requires_grad_(True)
        value = float(penalized(None, None).detach())
        optimizer.step()
        groups = optimizer.param_groups
        names, (one, other) = [group["param_names"] for group in groups], groups
        assert one["lr"] == other["lr"]
        assert one["lr"] is not other["lr"]
        left = [float(parameter.detach().mean()) for parameter in model.parameters()]
        wide = regularization.l2_penalty(torch.nn.Linear(2, 1).double(), weight_decay=0.5).dtype
        return {"left": left, "penalty": value, "names": names, "wide": str(wide)[6:]}
    layers = [keras.layers.Dense(2, "linear", True, "ones", "ones") for _ in range(2)]
    model = keras.Sequential([keras.Input((2,)), *layers])
    layers[0].trainable = False
    optimizer = keras.optimizers.AdamW(0.1)
    penalized = regularization.make_penalized_loss(lambda output, y: 0.0, model, weight_decay=0.5)
    regularization.apply_decoupled_decay(model, optimizer, weight_decay=0.5)
    layers[0].trainable = True
    value, variables = float(penalized(None, None)), model.trainable_variables
    optimizer.apply_gradients([(tf.zeros(v.shape), v) for v in variables])
    wide = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1, dtype="float64")])
    wide = regularization.l2_penalty(wide, weight_decay=0.5).dtype.name
    left = [float(np.mean(v)) for v in model.get_weights()]
    return {"left": left, "penalty": value, "wide": wide}


def under_muon():
    """What its decay leaves of ones, of no gradient: a convolution's and a dense layer's."""
    if not hasattr(keras.optimizers, "Muon"):
        return None  # of tf_keras
    layers = keras.layers
    convolution = layers.Conv2D(2, 1, kernel_initializer="ones", bias_initializer="ones")
    dense = layers.Dense(2, "linear", True, "ones", "ones")
    model = keras.Sequential([keras.Input((2, 2, 2)), convolution, layers.Flatten(), dense])
    optimizer = keras.optimizers.Muon(0.1)
    regularization.apply_decoupled_decay(model, optimizer, weight_decay=0.5)
    variables = model.trainable_variables
    optimizer.apply_gradients([(tf.zeros(v.shape), v) for v in variables])
    return [float(np.mean(v)) for v in model.get_weights()]


def scaled():
    return regularization.scale_decay(weight_decay=0.01, batch_size=256)


def twice_the_batch():
    """Of the benchmark's rows: the decay that a step takes, and the batch that is trained with."""
    task, found = TASKS["digits-few"], {}
    for variant in bench_regularization.TECHNIQUE.variants:
        if variant.name.startswith("decoupled"):
            work = Work(task, variant.name, variant.settings, 8, init_weights(task.model, seed=3))
            prepared, asked = bench_regularization.prepare(impl, work), {}
            prepared.train(SimpleNamespace(watch=lambda *_, asked=asked, **how: asked.update(how)))
            found[variant.name] = [decay_of(prepared.optimizer), asked["batch_size"]]
    return found


SCENARIOS = (
    penalty,
    decayed,
    under_adam,
    smoothing,
    dropout,
    rates,
    refusals,
    batch_norm,
    foreign_models,
    computed_kernels,
    structures,
    split,
    thawed,
    *[under_muon] * (FRAMEWORK != "pt"),
    scaled,
    twice_the_batch,
)
