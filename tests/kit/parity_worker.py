"""Run one framework through the work that the parity tests compare, and write the arrays.

    python -m tests.kit.parity_worker pt|keras3|tf_keras data_folder output.npz

The two kits have the same functions, so what follows is the same code for both, but for the
gradients and for how to compute in float64. The Keras flavour comes from the environment.
"""

import functools
import importlib
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np

from shared import boxes, datasets
from shared.specs import (
    TASKS,
    CNNSpec,
    DetectorSpec,
    GPTSpec,
    ModelSpec,
    Recipe,
    Task,
    layers,
    parameter_shapes,
)
from shared.weights import init_weights
from tests import workers


def _smaller(name: str, size: int, **model) -> Task:
    """A task on crops of `size` pixels, with other fields of its spec."""
    task = TASKS[name]
    data = replace(task.dataset, name=f"crops-{size}", image_size=size)
    return replace(
        task, dataset=data, model=replace(task.model, input_shape=(size, size, 3), **model)
    )


# One task of each model family, with fewer layers and channels: two of a kind, one after the other,
# are in some task of each. Wider and deeper models are the same code, and every timed row certifies
# its ten first losses.
_CNN, _RESNET20, _BERT = (TASKS[name] for name in ("digits-cnn", "digits-resnet20", "text-bert"))
_TWO = replace(_CNN.model, convolutions=_CNN.model.convolutions[:2])
PROVEN = {
    "digits-cnn": replace(_CNN, model=_TWO),
    "text-gpt": TASKS["text-gpt"],
    "text-bert": replace(_BERT, model=replace(_BERT.model, layers=1)),
    "digits-resnet20": replace(
        _RESNET20, model=replace(_RESNET20.model, blocks_per_stage=2, widths=(8,))
    ),
    "without-batchnorm": replace(
        _CNN, name="without-batchnorm", model=replace(_TWO, batch_norm=False)
    ),
}
PROVEN["photos-resnet18"] = _smaller("photos-resnet18", 48, blocks_per_stage=1, widths=(8, 12))
_DETECTION = TASKS["digits-detection"]
PROVEN["digits-detection"] = replace(
    _DETECTION,
    model=replace(_DETECTION.model, convolutions=((8, 2), (12, 2), (12, 1), (12, 2), (12, 1))),
)
PROVEN["photos-resnet50"] = _smaller("photos-resnet50", 48, blocks=(1, 2), widths=(8, 12))
BATCH_SIZE = 8
STEPS = 10
# As many samples as are read: to make all of a task's takes longer than to train on them.
PROVEN = {
    name: replace(task, dataset=replace(task.dataset, train_size=BATCH_SIZE * STEPS, test_size=8))
    for name, task in PROVEN.items()
}
# Rows of tf_keras train these alone; in campaigns it is held to all.
DONE = {"pt": tuple(PROVEN), "keras3": tuple(PROVEN), "tf_keras": ("digits-cnn", "digits-resnet20")}
# Without graphs a step takes long, and the step is the same code whatever the model.
EAGER = {"pt": (), "keras3": ("text-gpt",), "tf_keras": ("digits-cnn",)}
if workers.campaign():
    DONE["tf_keras"] = EAGER["keras3"] = EAGER["tf_keras"] = tuple(PROVEN)
SEED = 5
# Powers of two, which every dtype holds exactly: a learning rate that Keras keeps in float32 would
# otherwise differ from PyTorch's by 1e-8, which is a lot in float64.
RECIPE = Recipe("sgd", learning_rate=2.0**-5, epochs=1, accuracy_batch_size=1, momentum=0.875)
# In float32 rounding puts the odd ReLU on the other side of zero, which changes a gradient by
# about 1e-3 whichever framework computes it. Steps this small keep that out of the weights.
SMALL_STEPS = replace(RECIPE, learning_rate=2.0**-13)
STREAM_ROWS = 50

OPTIMIZER_SPEC = CNNSpec((8, 8, 2), ((16, 1),), num_classes=10)
OPTIMIZER_STEPS = 8
# Optimizer -> standard deviations of the gradients at which its rule is the same on both sides.
OPTIMIZERS = {"sgd": (1.0,), "adamw": (1.0, 1e-3), "rmsprop": (1.0, 0.1)}
TINY = 1e-7  # here epsilon decides


def main(side: str, folder: str, output: str) -> None:
    """Do all of the work; keys of the arrays are `task/part/what`."""
    framework = "pt" if side == "pt" else "tf"
    kit = SimpleNamespace(
        framework=framework,
        **{
            name: importlib.import_module(f"{framework}_impl.kit.{name}")
            for name in ("models", "data", "training", "runtime", "detection")
        },
    )
    kit.runtime.configure(threads=1, seed=SEED)
    kit.predict = functools.cache(kit.training.make_predict)  # a graph a model
    found = {}
    for task in (PROVEN[name] for name in DONE[side]):
        x, y = datasets.load(datasets.materialise(task.dataset, Path(folder)), "train")
        work = {"stream": _stream(kit, x[:STREAM_ROWS], y[:STREAM_ROWS])}
        batches = datasets.first_batches(x, y, BATCH_SIZE, STEPS, seed=SEED)
        work |= _parity(kit, task, batches, eager=task.name in EAGER[side])
        if side == "keras3" or (side == "tf_keras" and workers.campaign()):
            work |= _faults(kit, task, batches)
        found |= _flat(task.name, work)
    found |= _flat("optimizers", _optimizers(kit))
    np.savez(output, **found)


def _flat(prefix, tree):
    if not isinstance(tree, dict):
        return {prefix: np.asarray(tree)}
    return {k: v for name, part in tree.items() for k, v in _flat(f"{prefix}/{name}", part).items()}


# The three models --------------------------------------------------------------------------------


def _parity(kit, task, batches, *, eager):
    spec, start = task.model, trained_looking(task.model)
    smooth = isinstance(spec, GPTSpec)
    recipe = RECIPE if smooth else SMALL_STEPS
    model = kit.models.build(spec, start)
    found = {"float32": _forward(kit, model, batches)}
    if smooth:
        found["float32"] |= _gradients(kit, spec, model, batches)
    found["float32"] |= _train(kit, spec, model, start, batches, recipe)
    kit.models.import_weights(model, init_weights(spec, SEED))
    found["recipe"] = {"losses": _steps(kit, spec, model, batches, task.recipe)}
    if not smooth:
        with _Float64(kit):
            wide = [(x.astype(np.float64), y) for x, y in batches]
            precise = kit.models.build(spec, start)
            found["float64"] = _gradients(kit, spec, precise, wide)
            found["float64"] |= _train(kit, spec, precise, start, wide, RECIPE)
    if isinstance(spec, DetectorSpec):
        kit.models.import_weights(model, start)
        found["mean_average_precision"] = _mean_average_precision(kit, task, model, batches[0][0])
    if eager:
        import tensorflow as tf

        tf.config.run_functions_eagerly(True)
        kit.models.import_weights(model, start)
        found["eager"] = _forward(kit, model, batches)
        found["eager"] |= _train(kit, spec, model, start, batches, recipe)
        tf.config.run_functions_eagerly(False)
    return found


def _mean_average_precision(kit, task, model, images):
    """Of objects that the weights find in part: their own best boxes, moved to whole pixels.

    Every second one is called by the next class's name.
    """
    predict = kit.predict(model)
    x, _ = kit.data.to_device(images, images)
    labels = np.full((len(images), 4, 5), -1.0, np.float32)
    for rows, found in zip(labels, boxes.decode(task.model, _numpy(predict(x))), strict=True):
        rows[:, :4] = found.corners[:4].round()
        rows[:, 4] = (found.labels[:4] + np.array([0, 1, 0, 1])) % task.model.num_classes
    x, y = kit.data.to_device(images, labels)
    return {"labels": labels} | {
        metric: kit.training.evaluate_task(predict, x, y, task, metric=metric, batch_size=3)
        for metric in boxes.OVERLAPS
    }


def trained_looking(spec: ModelSpec) -> dict[str, np.ndarray]:
    """Weights where no scale is 1 and no shift is 0, so that none can be mistaken for another."""
    random = np.random.default_rng(SEED)
    weights = init_weights(spec, SEED)
    for name, value in weights.items():
        kind = name.rpartition(".")[2]
        if name.endswith("conv2.bn.gamma" if spec.family == "bottleneck" else "conv1.bn.gamma"):
            # Trained residual branches add little; large ones amplify rounding from block to block.
            weights[name] = random.uniform(0.1, 0.3, value.shape).astype(np.float32)
        elif kind in ("gamma", "variance"):
            weights[name] = random.uniform(0.5, 1.5, value.shape).astype(np.float32)
        elif kind in ("beta", "bias", "mean"):
            weights[name] = random.normal(0.0, 0.3, value.shape).astype(np.float32)
    return weights


def _forward(kit, model, batches):
    ((x, _),) = kit.data.resident_batches(batches[:1])
    return {
        "parameters": kit.models.parameter_count(model),
        "logits": _numpy(kit.predict(model)(x)),
    }


def _train(kit, spec, model, start, batches, recipe):
    kit.models.import_weights(model, start)
    losses = _steps(kit, spec, model, batches, recipe)
    as_it_is = _evaluation(kit, model, batches)
    if _keeps_biased_variance(kit, batches):
        kit.models.import_weights(model, unbiased(spec, start, kit.models.export_weights(model)))
    found = {"losses": losses} | _evaluation(kit, model, batches)
    return found | {f"as_it_is/{name}": value for name, value in as_it_is.items()}


def _evaluation(kit, model, batches):
    ((x, _),) = kit.data.resident_batches(batches[:1])
    return {
        "weights": kit.models.export_weights(model),
        "evaluation": _numpy(kit.predict(model)(x)),
    }


def _keeps_biased_variance(kit, batches):
    """Keras 3 does; tf_keras where it cannot use the fused kernel, which has no float64."""
    if kit.framework == "pt":
        return False
    import tensorflow as tf

    return not tf.keras.Model.__module__.startswith("tf_keras") or batches[0][0].dtype == np.float64


def unbiased(spec, start, weights):
    """`weights` after STEPS steps from `start`, had they been fed unbiased variances."""
    if isinstance(spec, GPTSpec):
        return weights
    kept = (1.0 - spec.bn_momentum) ** STEPS
    fixed = dict(weights)
    for name, count in normalised_values(spec).items():
        old = kept * start[name].astype(np.float64)
        fixed[name] = (old + (weights[name] - old) * count / (count - 1)).astype(np.float32)
    return fixed


def normalised_values(spec) -> dict[str, int]:
    """Name of each running variance -> how many values of a batch it is over."""
    shapes = parameter_shapes(spec)
    return {
        f"{layer.name}.bn.variance": BATCH_SIZE
        * layer.macs
        // int(np.prod(shapes[f"{layer.name}.kernel"]))
        for layer in layers(spec)
        if f"{layer.name}.bn.gamma" in shapes
    }


def _steps(kit, spec, model, batches, recipe):
    step = kit.training.make_train_step(
        model, kit.training.make_optimizer(model, recipe), _loss_of(kit, spec, batches)
    )
    return [kit.runtime.to_float(step(*batch)) for batch in kit.data.resident_batches(batches)]


def _gradients(kit, spec, model, batches):
    named = kit.models.named_parameters(model)
    ((x, y),) = kit.data.resident_batches(batches[:1])
    loss_fn = _loss_of(kit, spec, batches)
    if kit.framework == "pt":
        loss = loss_fn(model.train()(x), y)
        loss.backward()
        gradients = [parameter.grad for parameter in named.values()]
    else:
        import tensorflow as tf

        with tf.GradientTape() as tape:
            loss = loss_fn(model(x, training=True), y)
        gradients = tape.gradient(loss, list(named.values()))
    pairs = zip(named, gradients, strict=True)
    return {
        "loss": _numpy(loss),
        "gradients": {name: kit.models.to_canonical(name, _numpy(g)) for name, g in pairs},
    }


def _numpy(tensor):
    return np.array(tensor.detach().cpu().numpy() if hasattr(tensor, "detach") else tensor)


# Float64 -----------------------------------------------------------------------------------------


class _Float64:
    """Models are built and run in float64 inside."""

    def __init__(self, kit):
        self.kit = kit

    def __enter__(self):
        self._set("float64")

    def __exit__(self, *error):
        self._set("float32")

    def _set(self, dtype):
        if self.kit.framework == "pt":
            import torch

            torch.set_default_dtype(getattr(torch, dtype))
        else:
            import tensorflow as tf

            tf.keras.backend.set_floatx(dtype)
            tf.keras.mixed_precision.set_global_policy(dtype)


def _loss_of(kit, spec, batches):
    """The kit's loss, which is float32 whatever it gets, or its like in float64."""
    if isinstance(spec, DetectorSpec):
        return kit.detection.make_detection_loss(spec)
    if isinstance(spec, GPTSpec) and not spec.causal:
        return kit.training.masked_cross_entropy
    if batches[0][0].dtype != np.float64:
        return kit.training.cross_entropy
    if kit.framework == "pt":
        import torch

        return torch.nn.functional.cross_entropy
    import tensorflow as tf

    return lambda logits, labels: tf.reduce_mean(
        tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits)
    )


# The data stream ---------------------------------------------------------------------------------


def _stream(kit, x, y):
    """Batches of two epochs as the kit draws them, in canonical layout."""
    split = kit.data.to_device(np.ascontiguousarray(x), np.ascontiguousarray(y))
    drawn = [
        batch
        for epoch in (0, 1)
        for batch in kit.data.epoch_batches(*split, batch_size=16, seed=SEED, epoch=epoch)
    ]
    found = {}
    for index, (inputs, labels) in enumerate(drawn):
        inputs = _numpy(inputs)
        if kit.framework == "pt" and inputs.ndim == 4:
            inputs = inputs.transpose(0, 2, 3, 1)
        found[str(index)] = {"x": inputs, "y": _numpy(labels)}
    return found


# Faults ------------------------------------------------------------------------------------------


def _faults(kit, task, batches):
    """The same work with one thing wrong each; the tests must notice every one."""
    spec, start = task.model, trained_looking(task.model)
    if isinstance(spec, GPTSpec):
        square = "block0.projection.kernel"
        swapped = start | {square: np.ascontiguousarray(start[square].T)}
        model = kit.models.build(spec)
        return {"fault": {"transposed": _train(kit, spec, model, swapped, batches, RECIPE)}}
    if not isinstance(spec, CNNSpec) or not spec.batch_norm:
        return {}
    kernel = start["conv1.kernel"]
    wrong = kernel.copy()
    wrong[np.unravel_index(np.random.default_rng(SEED).integers(wrong.size), wrong.shape)] *= 1.01
    swapped = np.ascontiguousarray(kernel.transpose(1, 0, 2, 3))
    order = np.random.default_rng(SEED).permutation(BATCH_SIZE)
    shuffled = [batches[0], (batches[1][0][order], batches[1][1]), *batches[2:]]
    momentum = replace(spec, bn_momentum=2 * spec.bn_momentum)
    same, other = kit.models.build(spec), kit.models.build(momentum)
    works = {
        "weight": (spec, same, start | {"conv1.kernel": wrong}, batches),
        "layout": (spec, same, start | {"conv1.kernel": swapped}, batches),
        "momentum": (momentum, other, start, batches),
        "batch": (spec, same, start, shuffled),
    }
    return {"fault": {name: _train(kit, *work, SMALL_STEPS) for name, work in works.items()}}


# Optimizers --------------------------------------------------------------------------------------


def _optimizers(kit):
    built = [kit.models.build(OPTIMIZER_SPEC) for _ in range(2)]
    apply = functools.partial(_apply, kit, *built)
    found = {
        f"{name}-{scale}": apply(optimizer_recipe(name), scale)
        for name, scales in OPTIMIZERS.items()
        for scale in scales
    }
    for name in ("adamw", "rmsprop"):
        found[f"{name}-tiny"] = apply(optimizer_recipe(name), TINY)
    other = {
        "adamw-eps": replace(optimizer_recipe("adamw"), eps=1e-7),
        "adamw-beta2": replace(optimizer_recipe("adamw"), beta2=0.991),
        "adamw-decay": replace(optimizer_recipe("adamw"), weight_decay=0.004),
        "rmsprop-eps": replace(optimizer_recipe("rmsprop"), eps=1e-4),
        "rmsprop-rho": replace(optimizer_recipe("rmsprop"), rho=0.901),
        "sgd-momentum": replace(optimizer_recipe("sgd"), momentum=0.901),
    }
    for name, recipe in other.items():
        found[f"other/{name}"] = apply(recipe, OPTIMIZERS[recipe.optimizer][-1])
    return found


def optimizer_recipe(name: str) -> Recipe:
    """A recipe where every hyperparameter of the rule matters."""
    return Recipe(
        name, learning_rate=1e-3, epochs=1, accuracy_batch_size=1, weight_decay=0.01, beta2=0.99
    )


def given_gradients(optimizer: str, scale: float) -> list[dict[str, np.ndarray]]:
    """One dictionary of gradients a step, normal with standard deviation `scale`.

    For RMSprop none is below a hundredth of that: no epsilon of Keras is PyTorch's (see
    `tf_impl.kit.training.make_optimizer`), and where sqrt(v) is not far above it, it shows.
    """
    random = np.random.default_rng(SEED)
    weights = init_weights(OPTIMIZER_SPEC, SEED)
    least = scale / 100 if optimizer == "rmsprop" and scale != TINY else 0.0
    steps = []
    for _ in range(OPTIMIZER_STEPS):
        values = {name: random.normal(0.0, scale, w.shape) for name, w in weights.items()}
        steps.append(
            {
                name: np.copysign(np.maximum(np.abs(g), least), g).astype(np.float32)
                for name, g in values.items()
            }
        )
    return steps


def _apply(kit, model, holder, recipe, scale):
    """Weights after the given gradients. Importing them as weights puts them into the layout."""
    kit.models.import_weights(model, trained_looking(OPTIMIZER_SPEC))
    optimizer = kit.training.make_optimizer(model, recipe)
    parameters = kit.models.named_parameters(model)
    gradients = kit.models.named_parameters(holder)
    for step in given_gradients(recipe.optimizer, scale):
        kit.models.import_weights(holder, step)
        if kit.framework == "pt":
            for name, parameter in parameters.items():
                parameter.grad = gradients[name].detach().clone()
            optimizer.step()
        else:
            import tensorflow as tf

            values = [tf.convert_to_tensor(gradients[name]) for name in parameters]
            optimizer.apply_gradients(zip(values, parameters.values(), strict=True))
    after = kit.models.export_weights(model)
    return {name: after[name] for name in parameters}


if __name__ == "__main__":
    main(*sys.argv[1:])
    print("{}")  # what it found is in the file
