"""One framework's share of the pruning tests, in a process of its own.

`python pruning_worker.py pt|tf|tf_keras` runs every scenario and prints one line of JSON: scenario
-> what was found, or {"error": traceback}. `test_pruning.py` judges.
"""

from __future__ import annotations

import copy
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np

from bench.compression import bench_pruning
from bench.harness.plan import Work
from bench.harness.stages import Stages
from shared.specs import TASKS, CNNSpec, GPTSpec
from shared.weights import init_weights
from tests import workers
from tests.workers import raised_on_one_line as raised

FRAMEWORK = "pt" if sys.argv[1:] == ["pt"] else "tf"
impl = workers.implementation(FRAMEWORK, "compression.pruning")
kit = impl.kit
technique = impl.compression.pruning
CNN = CNNSpec((8, 8, 2), ((4, 1), (6, 2)), num_classes=10)
GPT = GPTSpec(vocabulary=11, sequence_length=6, width=8, heads=2, layers=1)
SCHEDULE = {"final_sparsity": 0.8, "begin_step": 2, "end_step": 14, "frequency": 4}
AT_ONCE = {"final_sparsity": 0.8, "begin_step": 0, "end_step": 4, "frequency": 4}
RECIPE = TASKS["digits-cnn"].recipe


def batches(spec, count):
    """The same in every process."""
    random, found = np.random.default_rng(11), []
    for _ in range(count):
        if spec is GPT:
            x = random.integers(0, spec.vocabulary, (16, spec.sequence_length))
            y = (3 * x + 1) % spec.vocabulary
        else:
            y = random.integers(0, 10, 16)
            x = random.normal(size=(16, *spec.input_shape)) + y[:, None, None, None] / 3
            x = x.astype(np.float32)
        found.append((x, y))
    return kit.data.resident_batches(found)


def start(spec, *, ties=False):
    """Initial weights; with `ties` few different magnitudes, zero among them."""
    weights = init_weights(spec, seed=1)
    for name, value in weights.items():
        if ties and name.endswith("kernel"):
            weights[name] = (np.round(4 * value) / 4).astype(np.float32)
    return weights


def prepare(spec, settings, *, rate=RECIPE.learning_rate, weights=None, together=False):
    """A model with its step; pruned, and updated by its step, if there are settings."""
    model = source = kit.models.build(spec, weights or start(spec))
    update = None
    if settings:
        name = "apply_global_pruning" if together else "apply_pruning"
        model, update = getattr(technique, name)(source, **settings)
    optimizer = kit.training.make_optimizer(model, replace(RECIPE, learning_rate=rate))
    plain = kit.training.make_train_step(model, optimizer, kit.training.cross_entropy)
    made = SimpleNamespace(source=source, model=model, update=update, plain=plain, steps=0)

    def step(x, y):
        made.steps += 1
        if update:
            update(made.steps)
        return kit.runtime.to_float(plain(x, y))

    made.step = step
    return made


def predictions(model, x):
    return np.array(kit.training.make_predict(model)(x)).tolist()


def plain(arrays):
    return {name: np.asarray(value).tolist() for name, value in arrays.items()}


# Scenarios for both frameworks ----------------------------------------------------------------


def schedule():
    """The masks after each of 16 steps that change no weight (a learning rate of zero)."""
    found, stream = {}, batches(CNN, 16)
    for name, weights in (("distinct", start(CNN)), ("ties", start(CNN, ties=True))):
        made = prepare(CNN, SCHEDULE, rate=0.0, weights=weights)
        masks = []
        for batch in stream:
            made.step(*batch)
            masks.append(plain(own.masks(made.model)))
        kernels = {n: v for n, v in weights.items() if n.endswith("kernel")}
        found[name] = {"weights": plain(kernels), "masks": masks}
    return found


def several_passes():
    """Masks after each of 16 steps of two forward passes; after passes alone; from step 14 on."""
    stream = batches(CNN, 16)
    two, none, late = (prepare(CNN, SCHEDULE, rate=0.0) for _ in range(3))
    found = {"two": []}
    for number, (x, y) in enumerate(stream, 1):
        two.update(number)
        own.training_pass(two.model, x)
        two.plain(x, y)
        none.plain(x, y)
        found["two"].append(plain(own.masks(two.model)))
    found["none"] = plain(own.masks(none.model))
    late.update(14)
    late.plain(*stream[0])
    found["late"] = plain(own.masks(late.model))
    return found


def rounding():
    """Zeros of a dense layer of 45 weights at 90%: float32 and float64 round 4.5 apart."""
    return own.dense_of_45()


def many_weights():
    """How many stay of more weights than float32 can count, at the schedule's start."""
    share = technique._sparsity(1, 0.5, 1, 101)
    return [technique._kept(2**24 + 3, share), technique._kept(10, share)]


def training():
    """Masks, zeros and predictions while SGD with momentum goes on after the schedule's end."""
    made, stream = prepare(CNN, AT_ONCE), batches(CNN, 12)
    before = kit.models.export_weights(made.source)
    for batch in stream[:4]:
        made.step(*batch)
    masks = plain(own.masks(made.model))
    for batch in stream[4:]:
        made.step(*batch)
    x = stream[0][0]
    found = {"masks": masks, "masks later": plain(own.masks(made.model))}
    found["masked"] = predictions(made.model, x)
    final = technique.finalize_pruning(made.model)
    found["final"] = predictions(final, x)
    weights = kit.models.export_weights(final)
    found["kernels"] = plain({n: v for n, v in weights.items() if n.endswith("kernel")})
    others = {n: v for n, v in weights.items() if not n.endswith("kernel")}
    found["zeros elsewhere"] = {
        n: int((v == 0).sum() - (before[n] == 0).sum()) for n, v in others.items()
    }
    found["rebuilt"] = predictions(kit.models.build(CNN, weights), x)
    after = kit.models.export_weights(made.source)
    found["source kept"] = all(np.array_equal(before[n], after[n]) for n in before)
    found["source masks"] = len(own.masks(made.source))
    found["twice"] = raised(technique.finalize_pruning, final)
    found["again"] = raised(technique.apply_pruning, final, **AT_ONCE)
    return found


def neutral():
    """Ten losses without pruning and with a final sparsity of zero, and the weights after them."""
    found = {}
    specs = {"cnn": CNN} | ({"gpt": GPT} if FRAMEWORK == "pt" else {})
    for name, spec in specs.items():
        stream = batches(spec, 10)
        none = prepare(spec, AT_ONCE | {"final_sparsity": 0.0, "frequency": 1})
        dense = prepare(spec, None)
        losses = [[made.step(*batch) for batch in stream] for made in (dense, none)]
        weights = [kit.models.export_weights(dense.model)]
        weights.append(kit.models.export_weights(technique.finalize_pruning(none.model)))
        found[name] = {"dense": losses[0], "none": losses[1]}
        found[name]["apart"] = max(
            float(np.linalg.norm(weights[1][n] - v) / max(np.linalg.norm(v), 1e-3))
            for n, v in weights[0].items()
        )
    return found


def losses():
    """Ten losses with one update of the masks, after the third step."""
    return {
        name: [made.step(*batch) for batch in batches(spec, 10)]
        for name, spec in (("cnn", CNN), ("gpt", GPT))
        for made in [prepare(spec, AT_ONCE)]
    }


def regrowth():
    """How many masked weights return at a later update: steps are large, the threshold is small."""
    settings = {"final_sparsity": 0.8, "begin_step": 0, "end_step": 200, "frequency": 1}
    made, returned, last = prepare(CNN, settings, rate=0.5), 0, None
    for batch in batches(CNN, 10):
        made.step(*batch)
        masks = own.masks(made.model)
        if last:
            returned += sum(int(((last[n] == 0) & (masks[n] == 1)).sum()) for n in masks)
        last = {name: np.array(mask) for name, mask in masks.items()}
    return returned


def refusals():
    """What bad input raises, and that the model is as before."""
    model = kit.models.build(CNN, start(CNN))
    before = kit.models.export_weights(model)
    good = dict(AT_ONCE)
    found = {
        str(bad): raised(technique.apply_pruning, model, **good | bad)
        for bad in (
            {"final_sparsity": 1.0},
            {"final_sparsity": -0.1},
            {"final_sparsity": float("nan")},
            {"begin_step": 4},
            {"begin_step": -1},
            {"frequency": 0},
            {"frequency": 3},
        )
    }
    pruned, update = technique.apply_pruning(model, **good)
    found["step 0"] = raised(update, 0)
    found["masked"] = raised(technique.apply_pruning, pruned, **good)
    found["dense"] = raised(technique.finalize_pruning, model)
    found["nothing to prune"] = raised(technique.apply_pruning, own.without_kernels(), **good)
    after = kit.models.export_weights(model)
    found["unchanged"] = all(np.array_equal(before[n], after[n]) for n in before)
    return found


def together():
    """All layers with one threshold."""
    found = {"raised": raised(technique.apply_global_pruning, kit.models.build(CNN), **AT_ONCE)}
    if found["raised"] is None:
        made = prepare(CNN, AT_ONCE, rate=0.0, together=True)
        for batch in batches(CNN, 4):
            made.step(*batch)
        found["masks"] = plain(own.masks(made.model))
        found["weights"] = plain(start(CNN))
    return found


# Scenarios of one framework, on models that are not ours --------------------------------------

random = np.random.default_rng(3)
LEFT, RIGHT = (random.normal(size=(9, 4)).astype(np.float32) for _ in range(2))
TARGET = random.normal(size=(9, 2)).astype(np.float32)
NOW = {"final_sparsity": 0.5, "begin_step": 0, "end_step": 1, "frequency": 1}


def small_layers():
    """Zeros of kernels of 72, 216 and 60 weights, the last and the first of them too small."""
    made = prepare(CNN, AT_ONCE | {"end_step": 1, "frequency": 1, "min_weights": 100})
    made.step(*batches(CNN, 1)[0])
    weights = kit.models.export_weights(technique.finalize_pruning(made.model))
    zeros = {n: float((v == 0).mean()) for n, v in weights.items() if n.endswith("kernel")}
    source = kit.models.build(CNN, start(CNN))
    return {
        "zeros": zeros,
        "none": raised(technique.apply_pruning, source, **AT_ONCE, min_weights=217),
        "just": raised(technique.apply_pruning, source, **AT_ONCE, min_weights=216),
    }


def stages():
    """What the benchmark trains: kernels after each of its stages, and what the last predicts.

    A row without settings comes after it, and once more.
    """
    settings = {"final_sparsity": 0.8, "begin_step": 0, "end_step": 1, "frequency": 1}
    task = replace(TASKS["digits-cnn"], model=CNN)
    work = Work(task, "sparsity_80", settings, batch_size=16, weights=start(CNN))
    make, stream, rows, epochs = bench_pruning._row, batches(CNN, 4), [], []

    def row(*given):
        rows.append(make(*given))
        return rows[-1]

    def fit(step, count):
        epochs.append(count)
        for batch in stream:
            step(*batch)

    with tempfile.TemporaryDirectory() as folder:
        shared = Stages(impl, task, work.weights, 0, Path(folder), fit)
        bench_pruning._row = row
        predict = bench_pruning.prepare(impl, work).train(shared)
        bench_pruning._row = make
        x, _ = stream[0]
        predicted = np.array(predict(x)).tolist()
        dense, pruned = shared.plain(), kit.models.export_weights(rows[-1].model)
        for seed in (0, 0, 1):
            other = Stages(impl, task, start(CNN), seed, Path(folder), fit)
            bench_pruning.prepare(impl, replace(work, settings={})).train(other)
        names = sorted(path.name.rpartition("-")[0] for path in Path(folder).iterdir())
    # The plain step of the kit, from the same weights, without anything kept.
    straight = bench_pruning._row(impl, replace(work, settings={}))
    for batch in stream:
        straight.step(*batch)
    return {
        "epochs": epochs,
        "kept": names,
        "straight": plain(kit.models.export_weights(straight.model)),
        "start": plain(start(CNN)),
        "dense": plain(dense),
        "pruned": plain(pruned),
        "predicted": predicted,
        "rebuilt": predictions(kit.models.build(CNN, pruned), x),
    }


class PyTorch:
    def __init__(self):
        import torch

        self.torch = torch

    def masks(self, model):
        """Canonical name -> mask."""
        return {
            name: kit.models.to_canonical(name, module.weight_mask.numpy())
            for path, module in model.named_modules()
            if hasattr(module, "weight_mask")
            for name in [f"{path.removesuffix('.conv')}.kernel"]
        }

    def training_pass(self, model, x):
        model.train()(x)

    def without_kernels(self):
        return self.torch.nn.BatchNorm1d(3)

    def dense_of_45(self):
        torch = self.torch
        weight = torch.arange(1.0, 46.0).reshape(5, 9)
        layer = torch.nn.Linear(9, 5, bias=False)
        with torch.no_grad():
            layer.weight.copy_(weight)
        model, update = technique.apply_pruning(torch.nn.Sequential(layer), **NOW_90)
        update(1)
        model(torch.ones(2, 9))
        return int((technique.finalize_pruning(model)[0].weight == 0).sum())

    def foreign(self):
        """A custom forward of two inputs with a convolution, an embedding and attention."""
        torch, nn = self.torch, self.torch.nn

        class Two(nn.Module):
            def __init__(self):
                super().__init__()
                self.conv = nn.Conv1d(4, 6, 1)
                self.depthwise = nn.Conv1d(6, 6, 1, groups=6)
                self.table = nn.Embedding(5, 6)
                self.norm = nn.LayerNorm(6)
                self.attention = nn.MultiheadAttention(6, 2, batch_first=True)
                self.inside = nn.ModuleDict({"head": nn.Linear(6, 2)})

            def forward(self, a, codes):
                x = self.depthwise(self.conv(a[:, :, None]))[:, :, 0] + self.table(codes)
                x = self.norm(x)[:, None]
                return {"y": self.inside["head"](self.attention(x, x, x)[0])[:, 0]}

        torch.manual_seed(0)
        source = Two()
        kept = copy.deepcopy(source.state_dict())
        model, update = technique.apply_pruning(source, **NOW)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        codes, losses = torch.arange(9) % 5, []
        for number in range(1, 4):
            update(number)
            optimizer.zero_grad()
            loss = (model(torch.from_numpy(LEFT), codes)["y"] - torch.from_numpy(TARGET)) ** 2
            loss.mean().backward()
            optimizer.step()
            losses.append(loss.mean().item())
        found = {"copy of a masked model": raised(copy.deepcopy, model)}
        final = copy.deepcopy(technique.finalize_pruning(model))
        state = final.state_dict()
        return found | {
            "losses": losses,
            "zeros": {n: float((v == 0).float().mean()) for n, v in state.items()},
            "names": sorted(state) == sorted(kept),
            "source kept": all(torch.equal(kept[n], v) for n, v in source.state_dict().items()),
        }

    def shared(self):
        """A kernel of two layers, one that is an embedding too, and a layer that runs twice."""
        torch, nn = self.torch, self.torch.nn
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        model[1].weight = model[0].weight
        layer = nn.Linear(4, 4)
        twice, _ = technique.apply_pruning(nn.Sequential(layer, nn.ReLU(), layer), **NOW)
        language = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 4), nn.Linear(4, 5))
        language[2].weight = language[0].weight
        pruned, update = technique.apply_pruning(language, **NOW)
        update(1)
        pruned(torch.arange(5))
        final = technique.finalize_pruning(pruned)
        return {
            "tied": raised(technique.apply_pruning, model, **NOW),
            "embedding": [float((module.weight == 0).float().mean()) for module in final],
            "still tied": final[2].weight is final[0].weight,
            "embedding alone": raised(technique.apply_pruning, language[::2], **NOW),
            "twice": [hasattr(module, "weight_mask") for module in twice],
        }

    def computed(self):
        """Kernels that old and new norms of weights compute, and one that is the layer's own."""
        nn = self.torch.nn
        old, new = nn.utils.weight_norm, nn.utils.parametrizations.weight_norm
        layers = [norm(nn.Linear(4, 4)) for norm in (old, nn.utils.spectral_norm, new)]
        model = nn.Sequential(*layers, nn.Linear(4, 4))
        found = {"fresh": raised(technique.apply_pruning, model, **NOW)}
        with self.torch.no_grad():
            model(self.torch.ones(2, 4))  # now the first one can be copied
        pruned, update = technique.apply_pruning(model, **NOW)
        update(1)
        final = technique.finalize_pruning(pruned)
        return found | {"zeros": [float((layer.weight == 0).float().mean()) for layer in final]}


class TensorFlow:
    def __init__(self):
        import tensorflow as tf

        self.tf = tf

    def masks(self, model):
        """Canonical name -> mask."""
        if sys.argv[1] == "tf":
            calls = {layer.name: vars(layer).get("call") for layer in model.layers}
            masked = {name: call.mask for name, call in calls.items() if hasattr(call, "mask")}
            return {f"{name}.kernel": np.array(mask) for name, mask in masked.items()}
        return {
            f"{layer.layer.name}.kernel": np.array(mask)
            for layer in model.layers
            for _, mask, _ in getattr(layer, "pruning_vars", ())
        }

    def training_pass(self, model, x):
        model(x, training=True)

    def without_kernels(self):
        keras = self.tf.keras
        return keras.Sequential([keras.Input((3,)), keras.layers.BatchNormalization()])

    def dense_of_45(self):
        keras = self.tf.keras
        source = keras.Sequential([keras.Input((9,)), keras.layers.Dense(5, use_bias=False)])
        source.set_weights([np.arange(1.0, 46.0, dtype=np.float32).reshape(9, 5)])
        model, update = technique.apply_pruning(source, **NOW_90)
        update(1)
        model(np.ones((2, 9), np.float32), training=True)
        (kernel,) = technique.finalize_pruning(model).get_weights()
        return int((kernel == 0).sum())

    def train(self, source, inputs, output=lambda y: y):
        """Three steps of a pruned copy in a graph; its losses, and zeros after finalizing."""
        tf = self.tf
        kept = [np.array(value) for value in source.weights]
        model, update = technique.apply_pruning(source, **NOW)
        optimizer = tf.keras.optimizers.SGD(0.1, momentum=0.9)

        @tf.function
        def step():
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean((output(model(inputs, training=True)) - TARGET) ** 2)
            variables = model.trainable_variables
            optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
            return loss

        def names(of):  # Keras 3 gives the inputs of a clone new ones
            return [
                one.name for one in of.layers if not isinstance(one, tf.keras.layers.InputLayer)
            ]

        losses = []
        for number in range(1, 4):
            update(number)
            losses.append(float(step()))
        shared = set(source._flatten_layers()) & set(model._flatten_layers())
        final = technique.finalize_pruning(model)
        return {
            "losses": losses,
            "shared": [layer.name for layer in shared],
            "zeros": {v.name: float((np.array(v) == 0).mean()) for v in final.weights},
            "names": names(final) == names(source),
            "source kept": all(
                np.array_equal(old, np.array(new))
                for old, new in zip(kept, source.weights, strict=True)
            ),
        }

    def foreign(self):
        """A functional model of two inputs with a dictionary as output; a Sequential model."""
        keras, layers = self.tf.keras, self.tf.keras.layers
        keras.utils.set_random_seed(0)
        a, codes = keras.Input((4,)), keras.Input((), dtype="int64")
        x = layers.Conv1D(6, 1, name="conv")(layers.Reshape((1, 4))(a))
        x = layers.Add()([layers.Flatten()(x), layers.Embedding(5, 6, name="table")(codes)])
        x = layers.LayerNormalization(name="norm")(x)
        x = layers.Dropout(0.0)(layers.Activation(lambda values: values)(x))
        functional = keras.Model([a, codes], {"y": layers.Dense(2, name="head")(x)})
        found = {"functional": self.train(functional, [LEFT, np.arange(9) % 5], lambda y: y["y"])}
        stack = [layers.Dense(6, "relu", name="first"), layers.Dense(2, name="last")]
        sequential = keras.Sequential([keras.Input((4,)), *stack])
        found["sequential"] = self.train(sequential, LEFT)
        inner = keras.Sequential([keras.Input((4,)), layers.Dense(6, "relu", name="inner")])
        x = keras.Input((4,))
        nested = keras.Model(x, layers.Dense(2, name="outer")(inner(x)))
        found["nested"] = self.train(nested, LEFT)
        late = keras.Sequential([layers.Dense(6, "relu"), layers.Dense(2)])
        found["unbuilt"] = raised(technique.apply_pruning, late, **NOW)
        late(LEFT)
        found["built late"] = self.train(late, LEFT)
        return found

    def unsupported(self):
        """What tfmot can't follow."""
        keras, layers = self.tf.keras, self.tf.keras.layers

        class Inside(layers.Layer):
            def __init__(self, **settings):
                super().__init__(**settings)
                self.deep = layers.Dense(4, name="deep")

            def call(self, x):
                return self.deep(x)

        class Own(keras.Model):
            def __init__(self):
                super().__init__()
                self.dense = layers.Dense(2)

            def call(self, x, training=False):
                return self.dense(x)

        subclassed = Own()
        subclassed(LEFT)
        x, layer = keras.Input((4,)), layers.Dense(4, name="shared")
        images = keras.Input((8, 2))
        models = {
            "subclassed": subclassed,
            "nested": keras.Model(x, layers.Dense(2)(Inside()(x))),
            "twice": keras.Model(x, layer(layer(x))),
            "transposed": keras.Model(images, layers.Conv1DTranspose(3, 3, name="up")(images)),
        }
        return {name: raised(technique.apply_pruning, m, **NOW) for name, m in models.items()}

    def widths(self):
        """Zeros of kernels of two dtypes under one threshold, of 8 weights 1 to 4 twice."""
        keras, dense = self.tf.keras, self.tf.keras.layers.Dense
        first, last = dense(2, use_bias=False, dtype="float16"), dense(2, use_bias=False)
        model = keras.Sequential([keras.Input((2,)), first, last])
        model.set_weights([np.arange(1.0, 5.0).reshape(2, 2)] * 2)
        model, update = technique.apply_global_pruning(model, **AT_ONCE | {"final_sparsity": 0.5})
        update(4)
        model = technique.finalize_pruning(model)
        return [[kernel.tolist(), str(kernel.dtype)] for kernel in model.get_weights()]

    def latency(self):
        """Zeros by layer of a model that XNNPACK runs sparsely; what it can't is refused."""
        keras, layers = self.tf.keras, self.tf.keras.layers

        def model(between=None):
            x = images = keras.Input((16, 16, 3))
            x = layers.Conv2D(8, 3, 2, name="first")(layers.ZeroPadding2D()(x))
            x = layers.Conv2D(16, 1, activation="relu", name="wide")(x)
            x = layers.DepthwiseConv2D(3, padding="same", name="depthwise")(x)
            x = x if between is None else between(x)
            x = layers.Conv2D(8, 1, name="narrow")(x)
            x = layers.Flatten()(layers.GlobalAveragePooling2D(keepdims=True)(x))
            return keras.Model(images, layers.Dense(2, name="head")(x))

        given, cnn = model(), kit.models.build(CNN)
        found = {"other": raised(technique.apply_latency_pruning, cnn, **NOW)}
        try:
            pruned, update = technique.apply_latency_pruning(given, **NOW)
        except NotImplementedError as error:
            return found | {"refused": str(error)}
        x = random.normal(size=(9, 16, 16, 3)).astype(np.float32)
        for number in (1, 2):
            update(number)
            pruned(x, training=True)

        def zeros(model):
            kernels = {each.name: each.get_weights()[0] for each in model.layers if each.weights}
            return {name: float((kernel == 0).mean()) for name, kernel in kernels.items()}

        pooled = model(layers.MaxPooling2D(2))
        return found | {
            "zeros": zeros(technique.finalize_pruning(pruned)),
            "given": zeros(given),
            "pooled": raised(technique.apply_latency_pruning, pooled, **NOW),
            "sparsity": raised(technique.apply_latency_pruning, given, **NOW | {"frequency": 0}),
        }

    def regularized(self):
        """Losses of a model's own with a regularizer of outputs: plain, and with masks of ones."""
        keras, layers = self.tf.keras, self.tf.keras.layers
        regular = layers.Dense(4, "relu", activity_regularizer="l2")
        source = keras.Sequential([keras.Input((4,)), regular, layers.Dense(2)])
        model, update = technique.apply_pruning(source, **NOW | {"final_sparsity": 0.0})
        update(1)
        found = []
        for each in (source, model):
            each(LEFT, training=True)
            found.append(float(sum(each.losses)))
        return found

    def fit(self):
        """Keras 3's `fit` over a layer that runs twice, a layer in another, adapted statistics."""
        keras, layers = self.tf.keras, self.tf.keras.layers

        class Inside(layers.Layer):
            def __init__(self, **settings):
                super().__init__(**settings)
                self.deep = layers.Dense(4, name="deep")

            def build(self, shape):
                self.deep.build(shape)

            def call(self, x):
                return self.deep(x)

        x, twice = keras.Input((4,)), layers.Dense(4, "tanh", name="twice")
        adapted = layers.Normalization()
        adapted.adapt(LEFT * 3 + 5)
        y = layers.Dense(2, name="head")(Inside()(twice(twice(adapted(x)))))
        source = keras.Model(x, y)
        before = np.array(source(LEFT))
        schedule = {"final_sparsity": 0.5, "begin_step": 0, "end_step": 4, "frequency": 2}
        model, update = technique.apply_pruning(source, **schedule)
        same = np.array(model(LEFT))
        steps, zeros = iter(range(1, 100)), []

        def count(batch, logs):
            zeros.append(float((self.tf.keras.ops.convert_to_numpy(twice_mask()) == 0).mean()))

        def twice_mask():
            return model.get_layer("twice").call.mask

        callbacks = [
            keras.callbacks.LambdaCallback(
                on_train_batch_begin=lambda b, logs: update(next(steps))
            ),
            keras.callbacks.LambdaCallback(on_train_batch_end=count),
        ]
        model.compile(keras.optimizers.Adam(0.05), "mse")
        settings = {"batch_size": 3, "epochs": 4, "shuffle": False, "verbose": 0}
        history = model.fit(LEFT, TARGET, **settings, callbacks=callbacks).history["loss"]
        masked = model.predict(LEFT, verbose=0)
        final = technique.finalize_pruning(model)
        kernels = {w.path: np.array(w) for w in final.trainable_variables if "kernel" in w.path}
        return {
            "loss": history,
            "zeros": zeros,
            "same": np.abs(before - same).max().item(),
            "final": np.abs(masked - final.predict(LEFT, verbose=0)).max().item(),
            "kernels": {name: float((kernel == 0).mean()) for name, kernel in kernels.items()},
        }


NOW_90 = NOW | {"final_sparsity": 0.9}


def main() -> None:
    kit.runtime.configure(threads=1, seed=0)
    scenarios = [schedule, several_passes, rounding, many_weights, training, neutral, losses]
    scenarios += [regrowth, refusals, together, small_layers]
    scenarios += [] if sys.argv[1] == "tf" else [stages]  # the benchmark's rows run tf_keras
    scenarios += [own.foreign]
    if FRAMEWORK == "pt":
        scenarios += [own.shared, own.computed]
    else:
        scenarios += [own.unsupported, own.latency, own.regularized]
    scenarios += [own.fit, own.widths] if sys.argv[1] == "tf" else []
    workers.report(scenarios)


own = PyTorch() if FRAMEWORK == "pt" else TensorFlow()
if __name__ == "__main__":
    main()
