"""What models of others have that ours do not, in one framework, in a process of its own.

`python foreign_worker.py pt|tf|tf_keras` prints scenario -> what was found, or {"error": ...}.
`test_foreign.py` judges.
"""

from __future__ import annotations

import contextlib
import io
import sys
import tempfile
import warnings
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import numpy as np

from tests import workers
from tests.compression import quick
from tests.workers import raised_on_one_line as raised

FRAMEWORK = "pt" if sys.argv[1:] == ["pt"] else "tf"
FAMILY = ("distillation", "feature_distillation", "structured_pruning", "pruning", "combinations")
FAMILY += ("semi_structured_pruning",)
OF_PYTORCH = ("post_training_quantization", "quantization_aware_training", "weight_quantization")
OWN = [f"compression.{name}" for name in (*FAMILY, *(OF_PYTORCH if FRAMEWORK == "pt" else ()))]
OWN += ["deployment.native_export", "kit.copying"]
OWN += [] if FRAMEWORK == "pt" else ["compression.sparse_inference"]
OWN += [] if FRAMEWORK == "pt" else [f"compression.{name}" for name in OF_PYTORCH[1:]]
OWN += ["deployment.export"] if FRAMEWORK == "pt" else ["train_step.compilation"]
OWN += ["kit.quantized_files", "kit.int8_files"] if FRAMEWORK == "pt" else []
OWN += [] if FRAMEWORK == "pt" else ["train_step.gradient_accumulation"]
impl = workers.implementation(FRAMEWORK, *OWN)
kit, compression, deployment = impl.kit, impl.compression, impl.deployment

if FRAMEWORK == "pt":
    import torch
    from torch import nn
else:
    import tensorflow as tf

    keras, layers = tf.keras, tf.keras.layers
    KERAS_3 = keras.Model.__module__.startswith("keras.")


# PyTorch ------------------------------------------------------------------------------------------


def names_of_inputs():
    """Predictions of an ONNX file for inputs by name, in two orders; other names."""

    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, a, b):
            return self.layer(a) - b

    technique, model = compression.post_training_quantization, Two()
    a, b = torch.randn(2, 4), torch.randn(2, 4)
    with tempfile.TemporaryDirectory() as folder:
        path = technique.keep_onnxruntime_float32(model, {"a": a, "b": b}, Path(folder) / "file")
        predict = technique.load_onnxruntime(path)
    with torch.no_grad():
        wanted = model(a, b)
    return {
        "apart": [
            float((predict(x) - wanted).abs().max()) for x in ({"a": a, "b": b}, {"b": b, "a": a})
        ],
        "others": raised(predict, {"a": a, "c": b}),
    }


def code_in_a_keyword():
    """What a file raises whose node names a keyword that is Python code; whether the code ran."""
    with tempfile.TemporaryDirectory() as folder:
        mark, path = Path(folder) / "mark", Path(folder) / "file"
        code = f"self=x0); __import__('pathlib').Path({str(mark)!r}).touch(); y = dict(a"
        nodes = [["placeholder", [], {}], ["aten.relu.default", [], {code: 1}]]
        nodes.append(["output", ["%1"], {}])
        torch.save({"nodes": nodes, "tensors": [], "names": []}, path)
        said = raised(lambda: kit.saving.load(path)(torch.zeros(2)))
        return {"said": said, "ran": mark.exists()}


def graphs_within():
    """What models whose `forward` has a graph of its own raise."""

    class Within(nn.Module):
        def __init__(self, region):
            super().__init__()
            self.layer, self.head, self.region = nn.Linear(4, 4), nn.Linear(4, 2), region

        def forward(self, x):
            with self.region():
                x = self.layer(x)
            return self.head(x)

    class Branching(nn.Module):
        def forward(self, x):
            return x + 1 if x.sum() > 0 else x

    x, qat = torch.randn(4, 4), compression.quantization_aware_training
    with tempfile.TemporaryDirectory() as folder:
        autocast = Within(lambda: torch.autocast("cpu", enabled=False))
        said, own = io.StringIO(), Branching()
        with contextlib.redirect_stderr(said):
            refused = raised(kit.int8_files.keep_float32, own, x, Path(folder) / "file")
            raised(deployment.export.export_onnx, own, x, Path(folder) / "file")
        return {
            "branch": [refused, said.getvalue()],
            "autocast": raised(kit.int8_files.keep_float32, autocast, x, Path(folder) / "file"),
            "no_grad": raised(qat.prepare_qat, Within(torch.no_grad), x, weight_bits=8),
        }


def other_sizes():
    """What programs of a model that reads its images' size make of others, and of other numbers."""

    class Resized(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.head = nn.Conv2d(3, 4, 3, 2), nn.Linear(4, 4)

        def forward(self, x, scale):
            y = self.head(self.body(x).movedim(1, -1)).movedim(-1, 1)
            return nn.functional.interpolate(y, size=x.shape[-2:]) * scale[:, None, None, None]

    ptq, qat = compression.post_training_quantization, compression.quantization_aware_training
    model, files, int8_files = Resized().eval(), kit.quantized_files, kit.int8_files
    x, more, large = (
        {"scale": torch.ones(n), "x": torch.randn(n, 3, size, 8)}
        for n, size in ((2, 8), (3, 8), (2, 9))
    )
    with tempfile.TemporaryDirectory() as folder, quick.without_code():
        path = Path(folder) / "file"
        prepared = qat.prepare_qat(model, x, weight_bits=8)
        programs = {
            "ptq": int8_files.load_int8(int8_files.keep_float32(model, x, path)),
            "weights": files.load_quantized(files.save_quantized(model, x, path)),
            "ptq in memory": ptq.apply_static_int8(model, x),
            "qat": int8_files.load_int8(
                int8_files.save_as_it_is(qat.convert_qat(prepared, x), path)
            ),
            "qat in memory": prepared,
        }
    found = {}
    for name, program in programs.items():
        call = program if "memory" not in name else lambda x, program=program: program(**x)
        with torch.no_grad():
            found[name] = [raised(call, given) for given in (x, more, large)]
    return found


def left_in_float32():
    """Warnings of models with layers that torchao does not round, and of one without any."""
    one = nn.Sequential(nn.Conv1d(3, 4, 3), nn.GELU(), nn.Flatten(), nn.Linear(24, 2))
    two = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, 2))
    rows, images = torch.randn(16, 3, 8), torch.randn(16, 3, 8, 8)
    found = {}
    for name, model, x in (("1d", one, rows), ("2d", two, images)):
        ways = {
            "ptq": lambda model=model, x=x: (
                compression.post_training_quantization.apply_static_int8(model, x)
            ),
            "qat": lambda model=model, x=x: compression.quantization_aware_training.prepare_qat(
                model, x, weight_bits=8
            ),
        }
        for way, quantize in ways.items():
            with warnings.catch_warnings(record=True) as said:
                warnings.simplefilter("always")
                quantize()
            words = [str(one.message) for one in said]
            found[f"{name} {way}"] = [text for text in words if "left in float32" in text]
    return found


def a_shared_slope():
    """Channels and slope of a model with `nn.PReLU()` that loses its first channel."""
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.PReLU(), nn.Conv2d(4, 2, 1))
    with torch.no_grad():
        model[0].weight[0] *= 1e-3
        model[0].bias[0] = 0.0
    smaller = compression.structured_pruning.remove_channels(
        model, torch.randn(2, 3, 4, 4), share=0.25
    )
    return [smaller[0].out_channels, smaller[1].weight.numel()]


def a_file_that_fails():
    """Whether anything is left of a file that can't be read again."""
    save, x = kit.quantized_files.save_quantized, torch.randn(2, 32)
    with tempfile.TemporaryDirectory() as folder:
        with mock.patch.object(kit.saving, "load", return_value=nn.Linear(1, 1)):
            said = raised(save, nn.Linear(32, 32), x, Path(folder) / "file")
        return {"said": said, "left": [path.name for path in Path(folder).iterdir()]}


def bfloat16():
    """What models in bfloat16, which NumPy lacks, raise of each export."""
    export, native = deployment.export, deployment.native_export
    codes = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 2)).bfloat16().eval()
    numbers = nn.Linear(4, 2).bfloat16().eval()
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        for way in (export.export_onnx, native.export_torchscript):
            for name, model, x in (
                ("numbers", numbers, torch.randn(2, 4).bfloat16()),
                ("codes", codes, torch.tensor([[1, 2], [3, 4]])),
            ):
                found[f"{way.__name__} {name}"] = raised(way, model, x, Path(folder) / "file")
    return found


def a_file_for_the_cpu():
    """What a file of a model on the CPU predicts where there seems to be a GPU."""
    technique, model, x = deployment.native_export, nn.Linear(4, 2).eval(), torch.randn(2, 4)
    with tempfile.TemporaryDirectory() as folder:
        path = technique.export_torchscript(model, x, Path(folder) / "file")
        with mock.patch.object(torch.cuda, "is_available", return_value=True):
            found = technique.load_torchscript(path, threads=1)(x.numpy())
    with torch.no_grad():
        return float(np.abs(found - model(x).numpy()).max())


def drawn():
    """Whether the numbers that are drawn next are those that would have been drawn anyway."""
    model, x = nn.Sequential(nn.Linear(8, 8), nn.ReLU()), torch.randn(4, 8)
    state, found = torch.get_rng_state(), {}
    prepared = compression.quantization_aware_training.prepare_qat(model, x, weight_bits=8)
    found["qat"] = torch.equal(torch.get_rng_state(), state)
    with tempfile.TemporaryDirectory() as folder:
        quantized = compression.quantization_aware_training.convert_qat(prepared, x)
        kit.int8_files.save_as_it_is(quantized, Path(folder) / "file")
    found["file"] = torch.equal(torch.get_rng_state(), state)
    compression.post_training_quantization.apply_static_int8(model, x)
    found["ptq"] = torch.equal(torch.get_rng_state(), state)
    return found


def merged():
    """Modes of models, a part of which is frozen, after a pass; whether more is trained."""
    from tests.train_step.pt_foreign_models import Merging

    logits, features = compression.distillation, compression.feature_distillation
    x, bad, found = torch.randn(3, 4), torch.randn(3, 5), {}
    for name in ("logits", "features", "copy", "onnx", "torchscript"):
        model, other = (nn.Sequential(Merging(), nn.BatchNorm1d(4)) for _ in range(2))
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        step = logits.make_train_step(model, other, optimizer, None, alpha=1.0)
        for each in (model, other):
            each[1].eval()
        if name == "logits":
            step(x, None)
        elif name == "features":
            features.attach_regressor(model, other, x, student_layer="0", teacher_layer="0")
        elif name == "copy":
            kit.copying.copy_model(model, x)
        else:
            ways = deployment.export.export_onnx, deployment.native_export.export_torchscript
            raised(ways[name == "torchscript"], model, bad, "file")
        found[name] = [
            [[m.training for m in each.modules()], each[0].merged] for each in (model, other)
        ]
    return found


def a_weight_that_another_reads():
    """Two train steps where a layer's weight is read and the layer not called, as Swin's is.

    Another layer is called in training and read in evaluation.
    """

    class Reads(nn.Module):
        def __init__(self):
            super().__init__()
            self.read, self.head, self.then = nn.Linear(8, 8), nn.Linear(8, 2), nn.Linear(2, 2)

        def forward(self, x):
            x = self.head(nn.functional.linear(x, self.read.weight, self.read.bias))
            return self.then(x) if self.training else x @ self.then.weight.T + self.then.bias

    torch.manual_seed(0)
    model, x, found = Reads(), torch.randn(4, 8), {}
    pruned, update = compression.pruning.apply_pruning(
        model, final_sparsity=0.5, begin_step=0, end_step=1, frequency=1
    )
    masked = compression.semi_structured_pruning.apply_two_to_four(model)
    ways = {
        "pruned": (pruned, update, compression.pruning.finalize_pruning),
        "2:4": (
            masked,
            lambda step: None,
            compression.semi_structured_pruning.finalize_two_to_four,
        ),
    }
    for name, (own, update, finalize) in ways.items():
        optimizer = torch.optim.SGD(own.parameters(), lr=0.1)
        for step in (1, 2):
            update(step)
            optimizer.zero_grad()
            own(x).square().sum().backward()
            optimizer.step()
        evaluated, before = own.eval()(x), own.train()(x)
        names = [n.replace("_orig", "") for n, _ in own.named_parameters()]
        final = finalize(own)
        found[name] = {
            "in order": names == list(final.state_dict()) == list(model.state_dict()),
            "apart": (final(x) - before).abs().max().item(),
            "in evaluation": (final.eval()(x) - evaluated).abs().max().item(),
            "zeros": (final.read.weight == 0).float().mean().item(),
            "hooks": len(final._forward_pre_hooks),
        }
    return found


def a_loss_of_an_object():
    """What a loss gets of a student whose output is an object, at each alpha."""

    class Wrapped(nn.Linear):
        def forward(self, x):
            return SimpleNamespace(logits=super().forward(x), more=x)

    technique, found = compression.distillation, []
    for alpha in (0.0, 0.5):
        student, teacher = Wrapped(4, 3), Wrapped(4, 3)
        step = technique.make_train_step(
            student,
            teacher,
            torch.optim.SGD(student.parameters(), 0.1),
            lambda output, y: found.append(hasattr(output, "more")) or output.logits.sum(),
            alpha=alpha,
        )
        step(torch.randn(5, 4), torch.arange(5) % 3)
    return found


# TensorFlow ---------------------------------------------------------------------------------------


def functions_within():
    """What techniques make of a layer whose `call` is a `tf.function`, and of the same without."""

    class Block(layers.Layer):
        def __init__(self, **named):
            super().__init__(**named)
            self.dense = layers.Dense(8, "relu")

        def build(self, shape):
            self.dense.build(shape)

        def call(self, x):
            return self.dense(x)

    class Decorated(Block):
        call = tf.function(Block.call)

    x, found = tf.random.stateless_normal((4, 8), (0, 1)), {}
    for kind in (Block, Decorated):
        keras.utils.set_random_seed(0)
        model = keras.Sequential([keras.Input((8,)), kind(), layers.Dense(3)])
        sparse = model.layers[0].dense.kernel
        sparse.assign(tf.where(tf.abs(sparse) < 0.3, 0.0, sparse))
        predict = compression.sparse_inference.make_predict(model, min_sparsity=0.2)
        graph = predict.get_concrete_function(x).graph.as_graph_def()
        products = [n for n in graph.node if n.op == "SparseMatrixMatMul"]
        outputs = [predict(x)]
        qat = compression.quantization_aware_training
        outputs += [qat.prepare_qat(model, x, weight_bits=4)(x)]
        outputs += [compression.weight_quantization.apply_int4(model, x)(x)]
        halve = compression.semi_structured_pruning
        masked = halve.apply_two_to_four(model)
        for own in (masked, halve.finalize_two_to_four(masked)):
            with tf.GradientTape() as tape:
                outputs += [own(x)]
            outputs += [tape.gradient(outputs[-1], own.layers[0].dense.kernel)]
        found[kind.__name__] = [np.array(each).tolist() for each in outputs], len(products)
    return found


def a_kernel_that_another_reads():
    """Two train steps where a kernel is read and its layer not called, or beside a call of it."""

    class Reads(layers.Layer):
        def __init__(self, calls, **named):
            super().__init__(**named)
            self.calls, self.read = calls, layers.Dense(8, use_bias=False)

        def build(self, shape):
            self.read.build(shape)
            self.read.kernel.constraint = keras.constraints.UnitNorm(axis=0)

        def call(self, x):
            x = self.read(x) if self.calls else x
            return tf.matmul(x, self.read.kernel, transpose_b=True)

        def get_config(self):
            return super().get_config() | {"calls": self.calls}

    x, found = tf.random.stateless_normal((4, 8), (0, 1)), {}
    prune, halve = compression.pruning, compression.semi_structured_pruning
    for calls in (False, True):
        model = keras.Sequential([keras.Input((8,)), Reads(calls), layers.Dense(2)])
        pruned, update = prune.apply_pruning(
            model, final_sparsity=0.5, begin_step=0, end_step=1, frequency=1
        )
        ways = {
            "pruned": (pruned, update, prune.finalize_pruning),
            "2:4": (halve.apply_two_to_four(model), lambda _: None, halve.finalize_two_to_four),
        }
        for name, (own, update, finalize) in ways.items():
            loss = lambda output, y: tf.reduce_sum(output**2)  # noqa: E731
            step = kit.training.make_train_step(own, keras.optimizers.SGD(0.1, 0.9), loss)
            for number in (1, 2):
                update(number)
                step(x, x)
            before, final = own(x), finalize(own)
            kernel = final.layers[0].read.kernel
            found[f"{name}, {calls}"] = {
                "apart": float(tf.reduce_max(tf.abs(final(x) - before))),
                "zeros": float(tf.reduce_mean(tf.cast(kernel == 0, "float32"))),
                "norms": tf.norm(kernel, axis=0).numpy().tolist(),
                "constraint": type(kernel.constraint).__name__,
            }
    return found


def state_within():
    """Outputs of models with state in layers of layers, and of copies that lose nothing or half."""
    rows = np.random.default_rng(0).normal(5.0, 3.0, (8, 4)).astype(np.float32)

    def head(x):
        return layers.Dense(3)(layers.Dense(8, "relu", name="hidden")(x))

    def nested():
        norm = layers.Normalization()
        norm.adapt(rows)
        inputs = keras.Input((4,))
        return keras.Model(inputs, head(keras.Sequential([keras.Input((4,)), norm])(inputs)))

    def texts():
        words = layers.TextVectorization(output_sequence_length=3)
        words.adapt(np.array(["a b c", "c b a", "a a d"]))
        inputs = keras.Input((), dtype="string")
        x = layers.Embedding(8, 4)(words(inputs))
        return keras.Model(inputs, head(layers.GlobalAveragePooling1D()(x)))

    class Scaled(layers.Layer):
        """A variable of its own, and a layer."""

        def build(self, shape):
            self.scale = self.add_weight(shape=(1,), initializer="random_normal", name="scale")
            self.inner = layers.Dense(4)
            self.inner.build(shape)
            super().build(shape)

        def call(self, x):
            return self.inner(x) * self.scale

        def compute_output_shape(self, shape):
            return shape

    def own():
        inputs = keras.Input((4,))
        return keras.Model(inputs, head(Scaled(name="scaled")(inputs)))

    texts_given = tf.constant(["a c", "d b a", "b"])
    found = {}
    for name, make, x in (
        ("nested", nested, rows),
        ("texts", texts, texts_given),
        ("own", own, rows),
    ):
        model = make()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            whole, half = (
                compression.structured_pruning.remove_channels(model, x, share=share)
                for share in (0.0, 0.5)
            )
        # The same channels gone, by hand.
        gone = np.argsort(np.abs(model.get_layer("hidden").get_weights()[0]).sum(0))[:4]
        last = model.layers[-1]
        kernel, bias = last.get_weights()
        kernel[gone] = 0.0
        before = np.array(model(x))
        last.set_weights([kernel, bias])
        found[name] = {
            "whole": float(np.abs(np.array(whole(x)) - before).max()),
            "half": float(np.abs(np.array(half(x)) - np.array(model(x))).max()),
        }
    return found


def frozen_within():
    """Which layers of a model are trainable, and which of its smaller copy."""
    inner = keras.Sequential([keras.Input((4,)), layers.Dense(4, name="a"), layers.Dense(4)])
    inner.layers[0].trainable = False
    inputs, last = keras.Input((4,)), layers.Dense(3)
    model = keras.Model(inputs, last(layers.Dense(8)(inner(inputs))))
    x = np.ones((2, 4), np.float32)
    if KERAS_3:  # a variable by itself
        last.kernel.trainable = inner.layers[1].kernel.trainable = False
    smaller = compression.structured_pruning.remove_channels(model, x, share=0.5)
    return [
        [part.trainable for part in [*m._flatten_layers(), *m.variables]] for m in (model, smaller)
    ]


def adapters():
    """LoRA's factors in a copy, what refuses their layer, and what is left of one by one more."""

    def make(*more):
        keras.utils.set_random_seed(0)
        adapted = layers.Dense(8, name="adapted")
        model = keras.Sequential([keras.Input((4,)), adapted, *more, layers.Dense(3)])
        adapted.enable_lora(2)
        adapted.lora_kernel_b.assign(keras.random.normal((2, 8)))
        return model

    model, more = make(), make(layers.Dense(6, name="more"))
    copy = kit.copying.copy_model(model, X)
    settings = {"final_sparsity": 0.5, "begin_step": 1, "end_step": 2, "frequency": 1}
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        smaller = compression.structured_pruning.remove_channels(more, X, share=0.5)
    return {
        "apart": [
            float(np.abs(a - b).max()) for a, b in zip(copy.weights, model.weights, strict=True)
        ],
        "trained": [[v.name for v in m.trainable_variables] for m in (copy, model)],
        "pruned": raised(compression.pruning.apply_pruning, model, **settings),
        "2:4": raised(compression.semi_structured_pruning.apply_two_to_four, model),
        "units": [smaller.get_layer(name).units for name in ("adapted", "more")],
        "whole": [str(one.message) for one in said if "left whole" in str(one.message)],
    }


def pair(width=4, policy=None):
    """A student or teacher with a layer of features, and inputs with labels."""
    keras.utils.set_random_seed(width)
    inputs = keras.Input((4,))
    x = layers.Dense(width, "relu", name="features", dtype=policy)(inputs)
    return keras.Model(inputs, layers.Dense(3, dtype="float32")(x))


X = np.random.default_rng(1).normal(size=(8, 4)).astype(np.float32)
Y = np.arange(8) % 3


def scaled_loss():
    """Steps of each maker with SGD, with a loss scaler around it; how far weights are apart.

    Of those that train alike the plain one alone runs without a scaler.
    """
    from tf_impl.train_step import compilation, gradient_accumulation

    loss_fn, teacher = kit.training.cross_entropy, pair(6)

    def with_features(model, optimizer):
        technique = compression.feature_distillation
        taught = technique.attach_regressor(
            model, teacher, X, student_layer="features", teacher_layer="features"
        )
        made = technique.make_train_step
        return made(taught, teacher, optimizer, loss_fn, teacher_layer="features")

    def sparse(model, optimizer):
        kernel = model.get_layer("features").kernel
        kernel.assign(np.where(np.arange(16).reshape(4, 4) % 2, 0.0, np.array(kernel)))
        return compression.combinations.make_sparse_train_step(model, optimizer, loss_fn)

    def stored(model, optimizer):
        make = compression.distillation.make_stored_train_step(model, optimizer, loss_fn)
        return lambda x, y: make(x, (y, teacher(X)))

    makers = {
        "plain": lambda m, o: kit.training.make_train_step(m, o, loss_fn),
        "graph": lambda m, o: compilation.graph_train_step(m, o, loss_fn),
        "blocks": lambda m, o: compilation.compiled_model_train_step(m, o, loss_fn),
        "parts": lambda m, o: gradient_accumulation.make_train_step(m, o, loss_fn),
        "logits": lambda m, o: compression.distillation.make_train_step(m, teacher, o, loss_fn),
        "stored": stored,
        "features": with_features,
        "sparse": sparse,
    }

    def trained(make, optimizer):
        model = pair()
        step = make(model, optimizer)
        for _ in range(2):
            step(tf.constant(X), tf.constant(Y))
        return model.get_weights()

    def apart(ours, theirs):
        return max(float(np.abs(a - b).max()) for a, b in zip(ours, theirs, strict=True))

    found, before, sgd = {}, pair().get_weights(), keras.optimizers.SGD
    plain = trained(makers["plain"], sgd(0.1))
    for name, make in makers.items():
        alike = name in ("plain", "graph", "blocks", "parts")
        alone = plain if alike else trained(make, sgd(0.1))
        scaled = trained(make, keras.optimizers.LossScaleOptimizer(sgd(0.1)))
        found[name] = [apart(scaled, alone), apart(before, alone)]
    return found


def half_width():
    """Losses of masked layers and of features that compute in bfloat16."""
    loss_fn = kit.training.cross_entropy
    pruned, update = compression.pruning.apply_pruning(
        pair(policy="mixed_bfloat16"), final_sparsity=0.5, begin_step=1, end_step=2, frequency=1
    )
    step = kit.training.make_train_step(pruned, keras.optimizers.SGD(0.1), loss_fn)
    masked = []
    for number in (1, 2, 3):
        update(number)
        masked.append(float(step(tf.constant(X), tf.constant(Y))))
    pruned = compression.pruning.finalize_pruning(pruned)
    technique = compression.feature_distillation
    student, teacher = (pair(width, "mixed_bfloat16") for width in (4, 6))
    names = {"student_layer": "features", "teacher_layer": "features"}
    taught = technique.attach_regressor(student, teacher, X, **names)
    optimizer = keras.optimizers.SGD(0.1)
    step = technique.make_train_step(taught, teacher, optimizer, loss_fn, teacher_layer="features")
    return {
        "masked": masked,
        "zeros": float((np.array(pruned.get_layer("features").kernel) == 0).mean()),
        "features": [float(step(tf.constant(X), tf.constant(Y))) for _ in range(3)],
    }


def a_folder_that_is_there():
    """What an export to a folder with other files raises, what is left; a second to its own."""
    export, model = deployment.native_export.export_package, pair()
    with tempfile.TemporaryDirectory() as folder:
        other, own = Path(folder, "other"), Path(folder, "own")
        other.mkdir()
        (other / "kept").touch()
        return {
            "said": raised(export, model, X, other),
            "kept": (other / "kept").exists(),
            "twice": [raised(export, model, X, own) for _ in range(2)],
        }


def main() -> None:
    kit.runtime.configure(threads=1, seed=0)
    if FRAMEWORK == "pt":
        quick.capture_patterns_once()
        scenarios = [drawn, names_of_inputs, code_in_a_keyword, graphs_within, left_in_float32]
        scenarios += [other_sizes, a_shared_slope, a_file_that_fails, bfloat16, a_file_for_the_cpu]
        scenarios += [merged, a_loss_of_an_object, a_weight_that_another_reads]
    else:
        scenarios = [state_within, frozen_within, a_folder_that_is_there]
        scenarios += [scaled_loss, half_width, adapters] if KERAS_3 else []
        scenarios += [a_kernel_that_another_reads, functions_within] if KERAS_3 else []
    workers.report(scenarios)


if __name__ == "__main__":
    main()
