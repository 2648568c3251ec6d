"""What is done to a Keras model of the zoo with each technique, and what it is compared with.

The comparisons are made with plain TensorFlow code, eagerly, which stands here.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path

import numpy as np
import tensorflow as tf
from tensorflow.keras import layers

from shared import parallel, runtimes
from shared.datasets import batch_order
from tests.zoo.cells import COARSER, Cell, Coarse, Rounding, Wrong, apart, module_of
from tests.zoo.foreign import Foreign
from tests.zoo.tf import CLASSES, ZOO, cross_entropy, loss_of

BATCH, STEPS = 8, 2

# Two devices for what is parallel, and one thread: both are said before TensorFlow begins.
tf.config.threading.set_intra_op_parallelism_threads(1)
tf.config.threading.set_inter_op_parallelism_threads(1)
with contextlib.suppress(RuntimeError):
    tf.config.set_logical_device_configuration(
        tf.config.list_physical_devices("CPU")[0], [tf.config.LogicalDeviceConfiguration()] * 2
    )


# Plain code -------------------------------------------------------------------------------------


def call(model, x, training: bool):
    """As `fit` does it; a model whose `call` takes two arguments gets two."""
    if type(model).__name__ == "TwoArguments":
        return model(*x, training=training)
    return model(x, training=training)


def parts(output) -> list[np.ndarray]:
    """The tensors of an output."""
    wide = (
        part if part.dtype == tf.float64 else tf.cast(part, tf.float32) for part in _flat(output)
    )
    return list(map(np.asarray, wide))


def _flat(output) -> list[tf.Tensor]:
    """Its tensors: those of a dict in the order of its sorted names, as TensorFlow has it."""
    return list(map(tf.convert_to_tensor, tf.nest.flatten(output)))


def rows(x, count: int):
    """The first samples of x."""
    return tf.nest.map_structure(lambda part: part[:count], x)


def predict(model, x):
    """Without training."""
    return call(model, x, False)


def state(model) -> list[np.ndarray]:
    """Floating-point weights, as copies."""
    return [w.numpy().copy() for w in model.weights if _is_float(w)]


def _is_float(weight) -> bool:
    return tf.as_dtype(weight.dtype).is_floating


def sgd() -> tf.keras.optimizers.Optimizer:
    """The optimizer of every comparison."""
    return tf.keras.optimizers.SGD(0.01, momentum=0.9)


def without_dropout(model):
    """No random numbers in training, for techniques that draw others."""
    for layer in model._flatten_layers():
        if isinstance(layer, layers.Dropout):
            layer.rate = 0.0
        if isinstance(layer, layers.MultiHeadAttention):
            layer._dropout = 0.0
        if hasattr(layer, "cell"):
            layer.cell.dropout = layer.dropout = 0.0
    return model


def sparsified(model):
    """The smallest nine tenths of the weights of dense layers and convolutions become zero."""
    for layer in model._flatten_layers():
        if isinstance(layer, layers.Dense | layers.Conv1D | layers.Conv2D | layers.Conv3D):
            kernel = layer.kernel.numpy()
            layer.kernel.assign(kernel * (np.abs(kernel) > np.quantile(np.abs(kernel), 0.9)))
    return model


class Applied:
    """A model of the zoo, its data and what plain code makes of it: a cell's subject."""

    def __init__(self, foreign: Foreign):
        self.foreign, self.name = foreign, foreign.name
        self.x, self.y = foreign.inputs(BATCH), foreign.labels(BATCH)
        self.loss_fn = loss_of(foreign)
        self.given: list = []
        self.start = state(foreign.build())
        self.folder = Path()
        self._plain: dict[str, tuple] = {}

    def model(self):
        """A fresh one, which a refusal has to leave as it is."""
        model = self.foreign.build()
        self.given.append(model)
        return model

    def unchanged(self) -> bool:
        """Whether the models that were given are as they were."""
        return all(all(map(np.array_equal, state(model), self.start)) for model in self.given)

    @cached_property
    def output(self) -> list[np.ndarray]:
        """What the model predicts."""
        return parts(predict(self.foreign.build(), self.x))

    def trained(self, step: Callable, model) -> tuple[list, list]:
        """The losses of some steps, and what they added to the model's state."""
        before, losses = state(model), []
        for _ in range(STEPS):
            losses.append(np.float32(step(self.x, self.y)))
            self.given = [other for other in self.given if other is not model]  # it may change
        return losses, [a - b for a, b in zip(state(model), before, strict=True)]

    def plain(self, key: str = "", change: Callable = lambda model: model, loss=None) -> tuple:
        """The same of a plain step; kept under `key`."""
        if key not in self._plain:
            model = change(self.foreign.build())
            step = partial(plain_step, model, sgd(), loss or self.loss_fn)
            self._plain[key] = self.trained(step, model)
        return self._plain[key]

    @cached_property
    def rounding(self) -> Rounding:
        """What float32 costs this model: the distance of plain code from the same in float64.

        The larger one of the batch as it is and the other way round, which adds up otherwise.
        """
        exact = self._in_width("float64")
        found = [self._in_width("float32", turned=turned) for turned in (False, True)]
        return Rounding(
            *(max(apart(f, e) for f in each) for e, *each in zip(exact, *found, strict=True))
        )

    def _in_width(self, policy: str, *, turned: bool = False) -> tuple[list, list, list]:
        """Plain code's outputs, losses and updates."""
        model, x, y = _built(self.foreign.build, policy), self.x, self.y
        if turned:
            x, y = tf.nest.map_structure(lambda part: part[::-1], (x, y))
        output, before, optimizer = parts(predict(model, x)), state(model), sgd()
        losses = [np.array(plain_step(model, optimizer, self.loss_fn, x, y)) for _ in range(STEPS)]
        output = [array[::-1] for array in output] if turned else output
        return output, losses, list(map(np.subtract, state(model), before))

    def rounded(self, bits: int, *, activations: bool = False) -> float:
        """How far plain rounding moves the outputs: of weights by channel, and of what layers give
        and the model gets.

        Nearest values on the grid between the smallest and the largest one, and nothing cleverer.
        """
        model = self.foreign.build()
        for variable in model.trainable_variables:
            if len(variable.shape) > 1:
                kernel = variable.numpy()
                most = np.abs(kernel).max(tuple(range(kernel.ndim - 1))) / (2 ** (bits - 1) - 1)
                scale = np.maximum(most, 1e-12)
                variable.assign(np.round(kernel / scale) * scale)
        for layer in model._flatten_layers(include_self=False):
            if activations and len(layer._flatten_layers()) == 1:
                layer.call = partial(_called, layer.call)
        x = tf.nest.map_structure(_to_8_bits, self.x) if activations else self.x
        return apart(parts(predict(model, x)), self.output)

    def trains(self, cell: Cell, step: Callable, model, wanted: tuple) -> None:
        """Compare some steps with plain ones."""
        self.agrees(cell, self.trained(step, model), wanted)

    def agrees(self, cell: Cell, found: tuple, wanted: tuple) -> None:
        """Compare the losses and the updates of some steps."""
        wrong = Coarse if self.rounding.is_coarse else Wrong
        cell.near("losses", found[0], wanted[0], self.rounding.of_losses, wrong)
        cell.near("updates", found[1], wanted[1], self.rounding.of_updates, wrong)

    def changed(self, change: Callable) -> Applied:
        """The same subject with another model, which rounds in its own way."""
        return Applied(replace(self.foreign, build=lambda: change(self.foreign.build())))

    def in_float64(self) -> Applied:
        """The same subject without rounding to speak of, and without dropout."""
        build = partial(_built, self.foreign.build, "float64")
        exact = Applied(replace(self.foreign, build=build))
        exact.folder, exact.rounding = self.folder, Rounding(0.0, 0.0, 0.0)
        return exact

    def predicts(self, cell: Cell, predict: Callable) -> None:
        """Compare predictions with plain ones."""
        cell.near("outputs", parts(predict(self.x)), self.output, self.rounding.of_outputs)


def _built(build: Callable, policy: str):
    """The model with its weights of float32, without dropout, that computes under a policy."""
    weights = build().get_weights()
    tf.keras.config.set_dtype_policy(policy)
    try:
        model = without_dropout(build())
    finally:
        tf.keras.config.set_dtype_policy("float32")
    _set_weights(model, weights)
    return model


def _set_weights(model, weights: list[np.ndarray]) -> None:
    model.set_weights(weights)
    for layer in model._flatten_layers():
        if isinstance(layer, layers.Normalization):
            layer.finalize_state()


def _called(call: Callable, *arguments, **settings):
    return tf.nest.map_structure(_to_8_bits, call(*arguments, **settings))


def _to_8_bits(x):
    if not x.dtype.is_floating:
        return x
    low, high = tf.minimum(tf.reduce_min(x), 0.0), tf.maximum(tf.reduce_max(x), 1e-6)
    scale = (high - low) / 255
    return tf.round(x / scale) * scale


def plain_step(model, optimizer, loss_fn, x, y):
    """A train step as everybody writes it, the model's own losses included."""
    with tf.GradientTape() as tape:
        loss = loss_fn(call(model, x, True), y)
        total = tf.add_n([loss, *model.losses])
    gradients = tape.gradient(total, model.trainable_variables)
    optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
    return total


NO_DROPOUT = ("without dropout", without_dropout)


# Train step -------------------------------------------------------------------------------------


def baseline(technique, a: Applied, cell: Cell) -> dict[str, Callable]:
    """The tutorials' step and loop, which know cross-entropy alone."""

    def hand_written():
        model = a.model()
        trained = a.trained(technique.make_hand_written_step(model, sgd()), model)
        a.agrees(cell, trained, a.plain("cross-entropy", loss=cross_entropy))

    def fit_loop():
        model = without_dropout(a.model())  # an LSTM draws masks when it is asked for logits, too
        before = state(model)
        loop = technique.make_fit_loop(model, sgd())
        _, loss = loop([(a.x, a.y)] * STEPS)
        a.given.clear()  # it has been trained
        losses, moved = a.plain("cross-entropy alone", without_dropout, cross_entropy)
        cell.near("loss", np.float32(loss), np.mean(losses), a.rounding.of_losses)
        changes = [end - start for end, start in zip(state(model), before, strict=True)]
        cell.near("updates", changes, moved, a.rounding.of_updates)

    return {"hand_written_step": hand_written, "fit_loop": fit_loop}


def mixed_precision(technique, a: Applied, cell: Cell) -> dict[str, Callable]:
    """float32 is the plain step."""

    def float32():
        model = a.model()
        step = technique.make_train_step(model, sgd(), a.loss_fn, dtype="float32")
        a.trains(cell, step, model, a.plain())

    def bfloat16():
        model = a.model()
        before = state(model)
        step = technique.make_train_step(model, sgd(), a.loss_fn)
        losses = [np.float32(step(a.x, a.y)) for _ in range(STEPS)]
        a.given.clear()  # it has been trained
        cell.holds("a loss is not finite", np.isfinite(losses).all())
        cell.holds("nothing was trained", any(map(np.any, map(np.subtract, state(model), before))))

    return {"float32": float32, "bfloat16": bfloat16}


def loss_scaling(technique, a: Applied, cell: Cell) -> dict[str, Callable]:
    """A scaled loss in float32 is the plain step."""

    def float32():
        model = a.model()
        step = technique.make_train_step(
            model, sgd(), a.loss_fn, dtype="float32", initial_scale=2.0**10
        )
        a.trains(cell, step, model, a.plain())

    return {"float32": float32}


def compilation(technique, a: Applied, cell: Cell) -> dict[str, Callable]:
    """The graph of a step; XLA's prediction."""

    def step():
        model = a.model()
        step = technique.graph_train_step(model, sgd(), a.loss_fn)
        a.trains(cell, step, model, a.plain())

    def predicts():
        a.predicts(cell, technique.compiled_predict(a.model()))

    return {"graph_train_step": step, "compiled_predict": predicts}


def gradient_accumulation(technique, a: Applied, cell: Cell) -> dict[str, Callable]:
    """One part is the plain step, and so are several where no layer mixes samples."""

    def one():
        model = a.model()
        step = technique.make_train_step(model, sgd(), a.loss_fn, micro_batches=1)
        a.trains(cell, step, model, a.plain())

    def two():
        model = without_dropout(a.model())
        step = technique.make_train_step(model, sgd(), a.loss_fn, micro_batches=2)
        a.trains(cell, step, model, a.plain(*NO_DROPOUT))

    return {"1 part": one} | ({} if a.foreign.sees_the_batch else {"2 parts": two})


def accumulated_statistics(technique, a: Applied, cell: Cell) -> dict[str, Callable]:
    """One part is the plain step, the update of statistics included."""

    def one():
        model = a.model()
        step = technique.make_train_step(model, sgd(), a.loss_fn, micro_batches=1)
        a.trains(cell, step, model, a.plain())

    def two():
        model = without_dropout(a.model())
        step = technique.make_train_step(model, sgd(), a.loss_fn, micro_batches=2)
        a.trains(cell, step, model, a.plain(*NO_DROPOUT))

    return {"1 part": one} | ({} if a.foreign.sees_the_batch else {"2 parts": two})


def gradient_clipping(technique, a: Applied, cell: Cell) -> dict[str, Callable]:
    """Without a limit it is the plain step, with one it is `tf.clip_by_global_norm`."""

    def unlimited():
        model = a.model()
        step = technique.make_train_step(model, sgd(), a.loss_fn, max_norm=float("inf"))
        a.trains(cell, step, model, a.plain())

    def limited():
        model, plain = a.model(), a.foreign.build()
        step = technique.make_train_step(model, sgd(), a.loss_fn, max_norm=0.01)
        a.trains(cell, step, model, a.trained(partial(_clipped, plain, sgd(), a.loss_fn), plain))

    return {"no limit": unlimited, "a limit": limited}


def _clipped(model, optimizer, loss_fn, x, y):
    with tf.GradientTape() as tape:
        loss = tf.add_n([loss_fn(call(model, x, True), y), *model.losses])
    # Of an embedding the sum of its slices: two of one word have the norm of their sum.
    found = map(tf.convert_to_tensor, tape.gradient(loss, model.trainable_variables))
    clipped, _ = tf.clip_by_global_norm(list(found), 0.01)
    optimizer.apply_gradients(zip(clipped, model.trainable_variables, strict=True))
    return loss


def finite_guard(technique, a: Applied, cell: Cell) -> dict[str, Callable]:
    """Where all is finite it is the plain step."""

    def guarded():
        model = a.model()
        step = technique.make_train_step(model, sgd(), a.loss_fn)
        a.trains(cell, step, model, a.plain())

    return {"guarded": guarded}


def activation_checkpointing(technique, a: Applied, cell: Cell) -> dict[str, Callable]:
    """Recomputed blocks give the gradients of plain ones, dropout and statistics included."""

    def blocks():
        model = technique.apply_checkpointing(a.model(), blocks=a.foreign.blocks)
        step = partial(plain_step, model, sgd(), a.loss_fn)
        a.trains(cell, step, model, a.plain())

    return {"blocks": blocks}


def memory_format(technique, a: Applied, cell: Cell) -> dict[str, Callable]:
    """Another layout, the same results; a CPU has no kernels for the one that is not its own."""

    def channels_last():
        model = technique.apply_memory_format(a.model())
        x = technique.convert_batch(a.x)
        cell.near("outputs", parts(predict(model, x)), a.output, a.rounding.of_outputs)

    def channels_first():
        model = technique.apply_memory_format(a.model(), memory_format="channels_first")
        x = technique.convert_batch(a.x, memory_format="channels_first")
        found = [np.moveaxis(v, 1, -1) if v.ndim == 4 else v for v in parts(predict(model, x))]
        cell.near("outputs", found, a.output, a.rounding.of_outputs)

    return {"channels_last": channels_last, "channels_first": channels_first}


def optimizer_implementations(technique, a: Applied, cell: Cell) -> dict[str, Callable]:
    """Each implementation makes the update that the rule says."""

    def updates(make: Callable):
        model, plain = a.model(), a.foreign.build()
        with tf.GradientTape() as tape:
            loss = a.loss_fn(call(plain, a.x, True), a.y)
        gradients = tape.gradient(loss, plain.trainable_variables)
        gradients = [tf.convert_to_tensor(gradient) for gradient in gradients]
        before = [variable.numpy() for variable in model.trainable_variables]
        optimizer = make(model, learning_rate=0.01)
        for _ in range(STEPS):
            optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        excess = 0.0
        for variable, weight, gradient in zip(
            model.trainable_variables, before, gradients, strict=True
        ):
            gradient = np.float64(gradient)
            wanted = _adamw(weight, gradient)
            # Keras corrects no epsilon for bias: 1e-8 / sqrt(1 - beta_2) beside |g| at most. The
            # rest is rounding: of the moments' powers, and of the weight itself.
            part = 1e-3 + np.minimum(1.0, 3.2e-7 / np.maximum(np.abs(gradient), 1e-30))
            most = STEPS * (0.01 * part + 1.2e-7 * np.abs(weight))
            excess = max(excess, float(np.max(np.abs(variable.numpy() - wanted) / most)))
        cell.holds(f"an element is {excess:.1f} times its bound from AdamW", excess <= 1)

    names = "for_loop_optimizer", "fused_optimizer"
    return {name: partial(updates, getattr(technique, name)) for name in names}


def _adamw(weight: np.ndarray, gradient: np.ndarray) -> np.ndarray:
    """Some steps with one gradient, whose corrected moments are the gradient and its square."""
    weight = np.float64(weight)
    for _ in range(STEPS):
        weight = weight - 0.01 * 0.01 * weight
        weight = weight - 0.01 * gradient / (np.abs(gradient) + 1e-8)
    return weight


def batch_size_finder(technique, a: Applied, cell: Cell) -> dict[str, Callable]:
    """Trials in processes of their own."""

    def one():
        make = f"tests.zoo.trials_tf:{a.name}"
        found = technique.find_batch_size(make, budget_bytes=1 << 31, maximum=1)
        cell.holds("no sample fits", (found.batch_size, found.limit) == (1, "maximum"))
        cell.holds("it took no memory", 0 < found.peak_bytes <= 1 << 31)

    return {"a maximum of 1": one}


def stacking(technique, a: Applied, cell: Cell) -> dict[str, Callable]:
    """The defaults are the plain step; two micro-batches are where no layer mixes samples."""

    def defaults():
        model = a.model()
        step = technique.make_train_step(model, sgd(), a.loss_fn)
        a.trains(cell, step, model, a.plain())

    def two():
        model = without_dropout(a.model())
        step = technique.make_train_step(model, sgd(), a.loss_fn, micro_batches=2)
        a.trains(cell, step, model, a.plain(*NO_DROPOUT))

    return {"defaults": defaults} | ({} if a.foreign.sees_the_batch else {"2 parts": two})


def varying_lengths(technique, a: Applied, cell: Cell) -> dict[str, Callable]:
    """Padding changes neither the loss nor its gradient: they are those of each sample alone."""
    lengths = range(4, 4 + BATCH)
    samples = [
        (np.asarray(row[:length], np.int64), np.asarray(target[:length], np.int64))
        for row, target, length in zip(a.x, a.y, lengths, strict=True)
    ]

    def alone() -> tuple:
        plain, optimizer = without_dropout(a.foreign.build()), sgd()

        def step(*_):
            with tf.GradientTape() as tape:
                losses = [
                    len(x) * cross_entropy(call(plain, x[None], True)[0], y) for x, y in samples
                ]
                loss = tf.add_n(losses) / sum(lengths)
            gradients = tape.gradient(loss, plain.trainable_variables)
            optimizer.apply_gradients(zip(gradients, plain.trainable_variables, strict=True))
            return loss

        return a.trained(step, plain)

    def padded(padding: str, shapes: str):
        model = without_dropout(a.model())
        step = technique.make_train_step(model, sgd(), shapes=shapes)
        batch = technique.pad(samples, padding=padding, most=a.x.shape[1])
        a.trains(cell, lambda *_: step(*batch), model, alone())

    return {
        "longest": partial(padded, "longest", "plain"),
        "full": partial(padded, "full", "signature"),
    }


def keras_backend(technique, a: Applied, cell: Cell) -> dict[str, Callable]:
    """Keras's own step is the plain one, the model's own losses included, and its prediction."""

    def predicts():
        model = technique.compile_keras(a.model(), sgd(), _labels_first(a.loss_fn))
        a.predicts(cell, technique.make_predict(model))

    def trains():
        model = without_dropout(a.model())
        technique.compile_keras(model, sgd(), _labels_first(a.loss_fn))
        a.trains(cell, technique.make_train_step(model), model, a.plain(*NO_DROPOUT))

    # Keras wants a loss for each output, which the zoo's losses of several are not.
    several = {"tuple outputs", "dict outputs"} & {*a.foreign.traits}
    return {"predict_on_batch": predicts} | ({} if several else {"train_on_batch": trains})


def _labels_first(loss_fn: Callable) -> Callable:
    """As Keras calls a loss, with labels that it has made floats."""
    return lambda y, output: loss_fn(output, tf.cast(y, tf.int64))


def onednn(technique, a: Applied, cell: Cell) -> dict[str, Callable]:
    """It leaves the step as it is, in a process that computes as asked."""
    from tf_impl.kit import runtime

    def as_it_is():
        model = a.model()
        step = partial(plain_step, model, sgd(), a.loss_fn)
        step = technique.with_onednn(step, enabled=runtime.onednn())
        a.trains(cell, step, model, a.plain())

    return {"as the process has it": as_it_is}


# Compression ------------------------------------------------------------------------------------


def pruning(technique, a: Applied, cell: Cell) -> dict[str, Callable]:
    """No sparsity is plain training; half of it is half of the weights."""
    settings = {"begin_step": 1, "end_step": 2, "frequency": 1}

    def none():
        model, update = technique.apply_pruning(a.model(), final_sparsity=0.0, **settings)
        optimizer, losses = sgd(), []
        for number in (1, 2):
            update(number)
            losses.append(np.float32(plain_step(model, optimizer, a.loss_fn, a.x, a.y)))
        model = technique.finalize_pruning(model)
        wanted, moved = a.plain()
        cell.near("losses", losses, wanted, a.rounding.of_losses)
        changes = [end - start for end, start in zip(state(model), a.start, strict=True)]
        cell.near("updates", changes, moved, a.rounding.of_updates)

    def half():
        model, update = technique.apply_pruning(a.model(), final_sparsity=0.5, **settings)
        before = sum(np.count_nonzero(array) for array in a.start)
        optimizer = tf.keras.optimizers.SGD(0.0)
        for number in (1, 2):
            update(number)
            plain_step(model, optimizer, a.loss_fn, a.x, a.y)
        masked = parts(predict(model, a.x))
        model = technique.finalize_pruning(model)
        cell.near(
            "outputs without masks", parts(predict(model, a.x)), masked, a.rounding.of_outputs
        )
        cell.holds("no weight became zero", sum(map(np.count_nonzero, state(model))) < before)

    return {"0%": none, "50%": half}


def semi_structured_pruning(technique, a: Applied, cell: Cell) -> dict[str, Callable]:
    """Two of four: what stays is as it was, in the masked model and without masks."""

    def two_of_four():
        model = technique.apply_two_to_four(a.model())
        masked = parts(predict(model, a.x))
        model = technique.finalize_two_to_four(model)
        cell.near(
            "outputs without masks", parts(predict(model, a.x)), masked, a.rounding.of_outputs
        )
        changed = 0
        for found, weight in zip(state(model), a.start, strict=True):
            zero = found == 0
            if weight.ndim > 1 and zero.sum() > (weight == 0).sum():
                changed += 1
                cell.holds("a weight changed that stays", (found == weight)[~zero].all())
                cell.holds(f"{zero.mean():.0%} of a kernel are zero", zero.mean() <= 0.55)
        cell.holds("no weight became zero", changed)

    return {"two_to_four": two_of_four}


def structured_pruning(technique, a: Applied, cell: Cell) -> dict[str, Callable]:
    """Nothing removed is the model itself; a third is a smaller model that trains."""

    def none():
        model = technique.remove_channels(a.model(), a.x, share=0.0)
        a.predicts(cell, partial(predict, model))

    def third():
        model = technique.remove_channels(a.model(), a.x, share=0.34)
        count = sum(array.size for array in state(model))
        cell.holds("it is no smaller", count < sum(array.size for array in a.start))
        shapes = [array.shape for array in parts(predict(model, a.x))]
        cell.holds("the outputs changed", shapes == [array.shape for array in a.output])
        loss = plain_step(model, sgd(), a.loss_fn, a.x, a.y)
        cell.holds("the loss is not finite", np.isfinite(loss))

    return {"0%": none, "34%": third}


def sparse_inference(technique, a: Applied, cell: Cell) -> dict[str, Callable]:
    """Zeros left out give what zeros give."""

    def sparse():
        model = sparsified(a.foreign.build())
        wanted = parts(predict(model, a.x))
        cell.near(
            "outputs", parts(technique.make_predict(model)(a.x)), wanted, a.rounding.of_outputs
        )

    def file():
        from tf_impl.kit.sparse_files import export_file, load_file

        model = sparsified(a.foreign.build())
        wanted = parts(predict(model, a.x))
        path = export_file(model, a.x, a.folder / "model.tflite")
        cell.near("outputs", parts(load_file(path)(a.x)), wanted, a.rounding.of_files)

    return {"make_predict": sparse, "export_file": file}


def _teacher(a: Applied):
    model = a.foreign.build()
    for variable in model.trainable_variables[-2:]:  # the last layer's: the rest stays as it rounds
        variable.assign(1.5 * variable)
    return model


def distillation(technique, a: Applied, cell: Cell) -> dict[str, Callable]:
    """No share of the teacher is the plain step; half of it is as the definition says."""

    def soft_targets():
        # The technique looks at logits once before: an LSTM draws dropout for that, too.
        model, plain = without_dropout(a.model()), without_dropout(a.foreign.build())
        teacher = _teacher(a)
        step = technique.make_train_step(model, teacher, sgd(), a.loss_fn, alpha=0.5)
        targets = tf.nest.flatten(_logits(predict(teacher, a.x)))

        def soft(student, target):
            p, log_p = tf.nn.softmax(target / 4), tf.nn.log_softmax(target / 4)
            log_q = tf.nn.log_softmax(student / 4)
            return 16 * tf.reduce_mean(tf.reduce_sum(p * (log_p - log_q), -1))

        def loss_fn(output, y):
            students = tf.nest.flatten(_logits(output))
            softly = sum(map(soft, students, targets))
            return 0.5 * softly + 0.5 * a.loss_fn(output, y)

        wanted = a.trained(partial(plain_step, plain, sgd(), loss_fn), plain)
        a.trains(cell, step, model, wanted)

    def none():
        model = a.model()
        step = technique.make_train_step(model, _teacher(a), sgd(), a.loss_fn, alpha=0.0)
        a.trains(cell, step, model, a.plain())

    def stored():
        teacher = _teacher(a)
        found = technique.store_logits(teacher, a.x, batch_size=2)
        cell.near(
            "logits", parts(found), parts(_logits(predict(teacher, a.x))), a.rounding.of_outputs
        )

    return {"half": soft_targets, "none": none, "store_logits": stored}


def _logits(output):
    return output["logits"] if isinstance(output, dict) and "logits" in output else output


def feature_distillation(technique, a: Applied, cell: Cell) -> dict[str, Callable]:
    """No weight of the features is the plain step; with one the loss is as the definition says."""
    given = {"student_layer": a.foreign.layer, "teacher_layer": a.foreign.layer}

    def none():
        model, teacher = a.model(), _teacher(a)
        taught = technique.attach_regressor(model, teacher, a.x, **given)
        step = technique.make_train_step(
            taught, teacher, sgd(), a.loss_fn, teacher_layer=a.foreign.layer, weight=0.0
        )
        a.trains(cell, step, model, a.plain())

    def features():
        model, teacher = without_dropout(a.model()), _teacher(a)
        taught = technique.attach_regressor(model, teacher, a.x, **given)
        layer = teacher.get_layer(a.foreign.layer)
        inner = tf.keras.Model(teacher.inputs, layer.output)
        x = tf.nest.flatten(a.x)
        target = inner(x if len(x) > 1 else x[0], training=False)
        # The taught model's own weights do not change before its first step.
        output, regressed = call(without_dropout(taught), a.x, True)
        wanted = a.loss_fn(output, a.y) + tf.reduce_mean(tf.square(regressed - target))
        wanted += tf.add_n([0.0, *model.losses])
        step = technique.make_train_step(
            taught, teacher, sgd(), a.loss_fn, teacher_layer=a.foreign.layer
        )
        cell.near("loss", np.float32(step(a.x, a.y)), np.float32(wanted), a.rounding.of_losses)

    return {"no weight": none} | ({} if a.foreign.sees_the_batch else {"features": features})


def post_training_quantization(technique, a: Applied, cell: Cell) -> dict[str, Callable]:
    """float32 is the model itself; int8 is as near to it as plain rounding is."""
    from tests.workers import has_vnni
    from tf_impl.kit import int8_files

    coarse, same = COARSER * a.rounded(8, activations=True), a.rounding.of_files
    coarser = coarse * (1 if has_vnni() else 2)  # ONNX Runtime's weights have 7 bits without VNNI

    def written(write: Callable, load: Callable, name: str, bound: float):
        path = write(a.model(), a.x, a.folder / name)
        cell.near("outputs", parts(load(path)(a.x)), a.output, bound)

    load, run = int8_files.load_int8, technique.load_onnxruntime

    def int8(apply: Callable) -> Callable:
        return lambda model, x, path: int8_files.save_int8(apply(model, x), model, x, path)

    static, dynamic = int8(technique.apply_static_int8), int8(technique.apply_dynamic_int8)
    onnx = technique.quantize_onnxruntime_int8
    return {
        "static int8": partial(written, static, load, "s.tflite", coarse),
        "float32": partial(written, int8_files.keep_float32, load, "f.tflite", same),
        "dynamic int8": partial(written, dynamic, load, "d.tflite", coarse),
        "ONNX Runtime int8": partial(written, onnx, run, "m.onnx", coarser),
    }


def accuracy_aware_quantization(technique, a: Applied, cell: Cell) -> dict[str, Callable]:
    """Where no error is small enough, one layer is left in integers: plain rounding or nearer."""
    from tests.workers import has_vnni
    from tf_impl.kit.int8_files import interpret

    coarse = COARSER * a.rounded(8, activations=True) * (1 if has_vnni() else 2)

    def error(predict):
        return apart(parts(predict(a.x)), a.output)

    def own():
        found, search = technique.apply_accuracy_aware_int8(a.model(), a.x, error, most=0.0)
        cell.holds("one layer is left", len(search.kept) == len(search.names) - 1)
        cell.near("outputs", parts(interpret(found)(a.x)), a.output, coarse)

    def onnxruntime():
        search = technique.search_onnxruntime_int8(a.model(), a.x, error, most=0.0)
        cell.holds("one layer is left", len(search.kept) == len(search.names) - 1)
        cell.holds("it is near", search.tried[-1][1] <= coarse)

    return {"own runtime": own, "ONNX Runtime": onnxruntime}


def quantization_aware_training(technique, a: Applied, cell: Cell) -> dict[str, Callable]:
    """8 bits are as near to the model as plain rounding is; it trains, and so is its file."""
    from tf_impl.kit import int8_files
    from tf_impl.kit.checks.quantization_aware_training import MOST_APART

    def eight_bits():
        model = technique.prepare_qat(a.model(), a.x, weight_bits=8)
        coarse = COARSER * a.rounded(8, activations=True)
        cell.near("outputs", parts(predict(model, a.x)), a.output, coarse)
        before = state(model)
        loss = plain_step(model, sgd(), a.loss_fn, a.x, a.y)
        cell.holds("the loss is not finite", np.isfinite(loss))
        changed = any(map(np.any, map(np.subtract, state(model), before)))
        cell.holds("nothing was trained", changed)
        try:
            content = technique.convert_qat(model, a.x)
        except RuntimeError as error:
            raise Wrong(f"refused after it was trained: {error}") from error
        found = parts(int8_files.interpret(content)(a.x))
        cell.near("outputs of the file", found, parts(predict(model, a.x)), MOST_APART)

    return {"8 bits": eight_bits}


def weight_quantization(technique, a: Applied, cell: Cell) -> dict[str, Callable]:
    """float32 is the model itself; integers are as near to it as plain rounding is."""
    from tf_impl.kit.quantized_files import load_quantized, save_quantized

    eight, four = (COARSER * a.rounded(bits) for bits in (8, 4))

    def written(apply: Callable | None, bound: float):
        model = apply(a.model(), a.x) if apply else a.model()
        path = save_quantized(model, a.x, a.folder / "model.pb")
        cell.near("outputs", parts(load_quantized(path)(a.x)), a.output, bound)

    return {
        "int8": partial(written, technique.apply_int8, eight),
        "float32": partial(written, None, a.rounding.of_outputs),
        "int4": partial(written, technique.apply_int4, four),
    }


def combinations(technique, a: Applied, cell: Cell) -> dict[str, Callable]:
    """Zeros stay, and everything else trains as ever."""

    def sparse_step():
        model, plain = sparsified(a.foreign.build()), sparsified(a.foreign.build())
        step = technique.make_sparse_train_step(model, sgd(), a.loss_fn)
        kernels = [v for v in plain.trainable_variables if len(v.shape) > 1]
        masks = [np.float32(kernel.numpy() != 0) for kernel in kernels]
        optimizer = sgd()

        def wanted(x, y):
            loss = plain_step(plain, optimizer, a.loss_fn, x, y)
            for kernel, mask in zip(kernels, masks, strict=True):
                kernel.assign(kernel * mask)
            return loss

        # The gradients of masked weights flow through zeros in both, and change nothing else.
        a.changed(sparsified).trains(cell, step, model, a.trained(wanted, plain))

    return {"make_sparse_train_step": sparse_step}


# Adaptation -------------------------------------------------------------------------------------


class Backbone(tf.keras.Model):
    """What a model gives as one vector a sample, of the size of one value."""

    def __init__(self, model, **kwargs):
        super().__init__(**kwargs)
        self.model = model

    def call(self, x, training=None):
        """What the model takes -> (n, width)."""
        given = [
            tf.reshape(part, (-1, int(np.prod(part.shape[1:]))))
            for part in _flat(call(self.model, x, training))
        ]
        vector = tf.concat(given, 1)
        return vector / vector.shape[1] ** 0.5


def fine_tuning(technique, a: Applied, cell: Cell) -> dict[str, Callable]:
    """A head learns as over plain features; LoRA is the model until its first step, which is B's.

    Of W + 2 A B with B = 0 the gradient of B is A's transpose times that of W, twice.
    """
    classes = tf.range(BATCH, dtype=tf.int64) % CLASSES

    def learned(step: Callable, head, *batch) -> tuple[list, list]:
        before = state(head)
        losses = [np.float32(step(*batch)) for _ in range(STEPS)]
        return losses, list(map(np.subtract, state(head), before))

    def head(*, stored: bool):
        backbone, features = Backbone(a.model()), predict(Backbone(a.foreign.build()), a.x)
        predict(backbone, a.x)  # which builds it
        shape = features.shape[1:]
        ours, plain = (
            tf.keras.Sequential([tf.keras.Input(shape), layers.Dense(CLASSES)]) for _ in "ab"
        )
        plain.set_weights(ours.get_weights())
        step = partial(plain_step, plain, sgd(), cross_entropy)
        wanted = learned(step, plain, features, classes)
        optimizer, x = sgd(), a.x
        if stored:
            kept = technique.store_features(backbone, x, batch_size=3)
            cell.near("features", parts(kept), parts(features), a.rounding.of_outputs)
            step = technique.make_stored_train_step(kept, ours, optimizer, cross_entropy)
            x = tf.range(BATCH, dtype=tf.int64)
        else:
            step = technique.make_train_step(backbone, ours, optimizer, cross_entropy)
        a.agrees(cell, learned(step, ours, x, classes), wanted)
        cell.holds("the backbone moved", a.unchanged())

    def lora():
        model, plain = without_dropout(a.model()), without_dropout(a.foreign.build())
        weights = list(model.trainable_variables)
        technique.apply_lora(model, rank=2, alpha=4.0)
        a.predicts(cell, partial(predict, model))
        plain_weights = plain.trainable_variables
        for variable in plain_weights:
            variable.regularizer = None  # of what is frozen Keras adds no loss
        with tf.GradientTape() as tape:
            loss = tf.add_n([a.loss_fn(call(plain, a.x, True), a.y), *plain.losses])
        both = zip(model._flatten_layers(), plain._flatten_layers(), strict=True)
        pairs = [pair for pair in both if getattr(pair[0], "lora_enabled", False)]
        gradients = tape.gradient(loss, [theirs.kernel for _, theirs in pairs])
        wanted = [
            -0.01 * 2.0 * ours.lora_kernel_a.numpy().T @ gradient.numpy()
            for (ours, _), gradient in zip(pairs, gradients, strict=True)
        ]
        plain_step(model, sgd(), a.loss_fn, a.x, a.y)
        a.given.clear()  # it has been trained
        found = [ours.lora_kernel_b.numpy() for ours, _ in pairs]
        wrong = Coarse if a.rounding.is_coarse else Wrong
        cell.near("B", found, wanted, a.rounding.of_updates, wrong)
        frozen, as_plain = ([one.numpy() for one in some] for some in (weights, plain_weights))
        cell.near("frozen weights", frozen, as_plain, 1e-6)  # which some layers normalise
        adapted = parts(predict(model, a.x))
        technique.merge_lora(model)
        cell.near("merged outputs", parts(predict(model, a.x)), adapted, a.rounding.of_outputs)

    heads = {"frozen": partial(head, stored=False), "stored": partial(head, stored=True)}
    return heads | {"LoRA": lora}


# Deployment -------------------------------------------------------------------------------------


def reduced_precision(technique, a: Applied, cell: Cell) -> dict[str, Callable]:
    """float32 is the model's own prediction; bfloat16 is that of Keras's own policy.

    But for layers that read raw data, which stay float32 in both, and so what hands it to them.
    """

    def float32():
        a.predicts(cell, technique.make_predict(a.model(), dtype="float32"))

    def bfloat16():
        tf.keras.config.set_dtype_policy("mixed_bfloat16")
        try:
            plain = a.foreign.build()
        finally:
            tf.keras.config.set_dtype_policy("float32")
        _read_in_float32(plain)
        wanted = parts(tf.function(partial(predict, plain))(a.x))  # a graph fuses what is cast
        found = parts(technique.make_predict(a.model())(a.x))
        cell.near("outputs", found, wanted, a.rounding.of_outputs)

    return {"float32": float32, "bfloat16": bfloat16}


def _read_in_float32(model) -> None:
    raw = layers.Normalization, layers.Rescaling, layers.Discretization, layers.CategoryEncoding
    inside = list(model._flatten_layers())
    if not any(isinstance(layer, raw) for layer in inside):
        return
    for layer in inside:
        if isinstance(layer, (*raw, tf.keras.Sequential)):
            layer.dtype_policy = "float32"
        if isinstance(layer, layers.Normalization):
            layer.finalize_state()


def export(technique, a: Applied, cell: Cell) -> dict[str, Callable]:
    """A file in another runtime gives what the model gives, for any number of samples."""

    def written(write: Callable, load: Callable, name: str):
        path = write(a.model(), a.x, a.folder / name)
        predict = load(path, threads=1)
        for count in (BATCH, 3):
            found = predict(_arrays(rows(a.x, count)))
            wanted = [array[:count] for array in a.output]
            cell.near("outputs", parts(found), wanted, a.rounding.of_files)

    onnx, openvino, litert = (
        (technique.export_onnx, runtimes.load_onnx, "model.onnx"),
        (technique.export_openvino, runtimes.load_openvino, "model.xml"),
        (technique.export_litert, runtimes.load_litert, "model.tflite"),
    )
    return {
        "ONNX": partial(written, *onnx),
        "OpenVINO": partial(written, *openvino),
        "LiteRT": partial(written, *litert),
    }


def _arrays(x):
    return tf.nest.map_structure(lambda part: part.numpy(), x)


def native_export(technique, a: Applied, cell: Cell) -> dict[str, Callable]:
    """TensorFlow's own files."""

    def package():
        path = technique.export_package(a.model(), a.x, a.folder / "model")
        found = technique.load_package(path, threads=1)(_arrays(a.x))
        cell.near("outputs", parts(found), a.output, a.rounding.of_outputs)

    return {"package": package}


def frozen_inference(technique, a: Applied, cell: Cell) -> dict[str, Callable]:
    """Predictions are the model's, in a graph of constants."""

    def frozen():
        a.predicts(cell, technique.frozen_predict(a.model()))

    return {"frozen": frozen}


def serving_threads(technique, a: Applied, cell: Cell) -> dict[str, Callable]:
    """An instance answers what the model gives, in a process whose pool has the size asked for."""

    def instance():
        from tests.zoo import builds_tf

        x = _arrays(a.x)
        with technique.serve(partial(builds_tf.served, a.name), x, threads=1) as server:
            cell.near("outputs", server(x), a.output[0], a.rounding.of_outputs)
            cell.holds("its pool has one thread", server.started[0]["pools"]["intra_op"] == 1)

    return {"an instance": instance}


# Parallel ---------------------------------------------------------------------------------------

# The models for techniques that start processes or take long, or that take few kinds; those of the
# parallel ones take one array.
FEW = {
    "fine_tuning": (
        "groups_net",
        "unet",
        "video",
        "two_heads",
        "dict_heads",
        "subclassed",
        "conv1d_text",
        "bilstm",
        "tied_language",
        "encoder",
        "bert",
        "gpt",
        "normalized",
        "two_arguments",
        "wide_and_deep",
        "eleven_heads",
        "critic",
        "centred",
        "lookups",
        "active",
        "speech",
    ),
    "keras_backend": (
        "groups_net",
        "unet",
        "video",
        "two_heads",
        "dict_heads",
        "subclassed",
        "conv1d_text",
        "bilstm",
        "tied_language",
        "encoder",
        "bert",
        "gpt",
        "normalized",
        "two_arguments",
        "wide_and_deep",
        "critic",
        "centred",
        "lookups",
        "active",
        "speech",
    ),
    "accuracy_aware_quantization": (
        "two_heads",
        "conv1d_text",
    ),
    "batch_size_finder": ("two_heads", "conv1d_text", "bert"),
    "frozen_inference": (
        "two_heads",
        "subclassed",
        "conv1d_text",
        "bert",
    ),
    "onednn": ("two_heads",),
    "serving_threads": (
        "subclassed",
        "conv1d_text",
        "encoder",
    ),
    "varying_lengths": ("tied_language",),
    "data_parallel": ("conv1d_text", "normalized", "encoder", "eleven_heads"),
    "model_parallel": ("conv1d_text", "normalized", "encoder"),
    "tensor_parallel": ("normalized", "encoder"),
}


def _ordered(a: Applied) -> list[float]:
    """The losses of plain steps over the shared order of two batches, without dropout."""
    model, optimizer = without_dropout(a.foreign.build()), sgd()
    x, y = a.foreign.inputs(2 * BATCH), a.foreign.labels(2 * BATCH)
    order = batch_order(2 * BATCH, BATCH, seed=0, epoch=0)
    steps = [
        plain_step(model, optimizer, a.loss_fn, tf.gather(x, rows), tf.gather(y, rows))
        for rows in order
    ]
    return [float(loss) for loss in steps]


def _launched(a: Applied, make: str, settings: dict, **devices: int) -> list[float]:
    """The losses of the processes or devices that train a model of the zoo together."""
    arrays = a.foreign.inputs(2 * BATCH).numpy(), a.foreign.labels(2 * BATCH).numpy()
    run = parallel.Run(global_batch=BATCH, steps=STEPS, seed=0, threads=2, **devices)
    launch = parallel.find("tf_impl.kit.replicas:launch")
    make, build = f"tf_impl.parallel.{make}", f"tests.zoo.builds_tf:{a.name}"
    return list(launch(make, build, arrays, run, settings).losses)


def data_parallel(technique, a: Applied, cell: Cell) -> dict[str, Callable]:
    """Two replicas train as one does, with its regularisation."""

    def processes():
        losses = _launched(a, "data_parallel:processes", {}, replicas=2)
        cell.near("losses", losses, _ordered(a), a.rounding.of_losses)

    return {"processes": processes}


def model_parallel(technique, a: Applied, cell: Cell) -> dict[str, Callable]:
    """Two stages train as one model does."""

    def layer_split():
        make, settings = "model_parallel:layer_split", {"cut": a.foreign.cut}
        losses = _launched(a, make, settings, replicas=1, parts=2)
        cell.near("losses", losses, _ordered(a), a.rounding.of_losses)

    return {"layer_split": layer_split}


def tensor_parallel(technique, a: Applied, cell: Cell) -> dict[str, Callable]:
    """Two halves of a pair of layers train as the whole does."""

    def halves():
        make, settings = "tensor_parallel:tensor_parallel", {"pairs": a.foreign.pairs}
        losses = _launched(a, make, settings, replicas=1, parts=2)
        cell.near("losses", losses, _ordered(a), a.rounding.of_losses)

    return {"2 shards": halves}


# What runs a cell -------------------------------------------------------------------------------


CELLS = {
    function.__name__: function
    for function in (
        *(baseline, mixed_precision, loss_scaling, compilation, gradient_accumulation),
        *(accumulated_statistics, gradient_clipping),
        *(finite_guard, activation_checkpointing, memory_format, optimizer_implementations),
        *(batch_size_finder, stacking, pruning, semi_structured_pruning, structured_pruning),
        *(sparse_inference, distillation, feature_distillation, post_training_quantization),
        *(quantization_aware_training, weight_quantization, combinations),
        *(accuracy_aware_quantization, varying_lengths, keras_backend, onednn),
        fine_tuning,
        *(reduced_precision, export, native_export, frozen_inference, serving_threads),
        *(data_parallel, model_parallel, tensor_parallel),
    )
}
_applied: dict[str, Applied] = {}


def _try_in_float64(technique: str, variant: str, a: Applied, cell: Cell) -> None:
    CELLS[technique](module_of("tf", technique), a.in_float64(), cell)[variant]()


def run(technique: str, name: str) -> dict:
    """Apply a technique to a model of the zoo; return the cell of the record."""
    if name not in _applied:
        _applied.clear()  # one model at a time: the record goes by models
        tf.keras.backend.clear_session()
        _applied[name] = Applied(ZOO[name])
    applied, cell = _applied[name], Cell()
    with tempfile.TemporaryDirectory() as folder:
        applied.folder = Path(folder)
        file = module_of("tf", technique)
        for variant, try_it in CELLS[technique](file, applied, cell).items():
            applied.given = []
            exactly = partial(_try_in_float64, technique, variant, applied, cell)
            cell.attempt(variant, try_it, applied.unchanged, exactly)
    return cell.result()
