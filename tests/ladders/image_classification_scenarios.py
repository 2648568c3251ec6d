"""One framework's share of the tests of image classification; `worker.py` runs it."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import numpy as np

from shared import photos
from shared.specs import CNNSpec, parameter_shapes
from shared.weights import init_weights
from tests import workers

FRAMEWORK = "pt" if sys.argv[1:] == ["pt"] else "tf"
impl = workers.implementation(FRAMEWORK, "ladders.image_classification", "input.folder")
program, kit = impl.ladders.image_classification, impl.kit
SPEC = CNNSpec((32, 32, 3), ((8, 2), (16, 2)), num_classes=6)
BATCH, SEED, DECAY = 8, 3, 0.7
FOLDER = Path(tempfile.mkdtemp(prefix="ladder-"))
PHOTOS = photos.make_photos(FOLDER, images=24, size=48, seed=0)


def build():
    return kit.models.build(SPEC, init_weights(SPEC, seed=1))


def training(*rungs, **settings):
    usual = {"image_size": 32, "batch_size": BATCH, "seed": SEED, "average_decay": DECAY}
    return program.Training(build, PHOTOS, rungs=rungs, **usual | settings)


def shared(count):
    """Batches that are the same in every process."""
    random = np.random.default_rng(5)
    found = [
        (random.normal(size=(BATCH, 32, 32, 3)).astype(np.float32), random.integers(0, 6, BATCH))
        for _ in range(count)
    ]
    return kit.data.resident_batches(found)


def weights(model):
    exported = kit.models.export_weights(model)
    return {name: np.array(exported[name]) for name in parameter_shapes(SPEC)}


def losses_of(run, epochs=1):
    return [float(loss) for _ in range(epochs) for loss in run.epoch()]


def plain():
    """The plain program on its photos, and plain framework code on the same; on shared batches."""
    run = training()
    found = {"epochs": losses_of(run, 2)}
    run.close()
    loader = impl.input.folder.naive_loader(PHOTOS, batch_size=BATCH, seed=SEED, image_size=32)
    found["by hand"] = by_hand([batch for _ in range(2) for batch in loader])
    other = training()
    found["shared"] = [float(other.step(*batch)) for batch in shared(4)]
    return found


def by_hand(batches):
    """Losses of SGD with momentum, written with the framework alone."""
    model = build()
    if FRAMEWORK == "pt":
        import torch

        optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9), []
        model.train()
        for x, y in batches:
            optimizer.zero_grad()
            loss = torch.nn.functional.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return losses
    import tensorflow as tf

    optimizer, losses = tf.keras.optimizers.SGD(0.02, momentum=0.9), []
    cost = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    for x, y in batches:
        with tf.GradientTape() as tape:
            loss = cost(y, model(x, training=True))
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        losses.append(float(loss))
    return losses


def _module_of(part) -> str:
    """Where a class, a function or a part of one is from."""
    part = getattr(part, "func", part)
    return getattr(part, "__module__", None) or type(part).__module__


def input_pipeline():
    """The same batches, made elsewhere."""
    run = training("input_pipeline")
    parts = run.loader, *vars(run.loader).values()
    found = {"epochs": losses_of(run, 2), "made in": [_module_of(part) for part in parts]}
    run.close()
    return found


def mixed_precision():
    """The dtypes that ran, in the step and in a prediction of what is deployed."""
    run, (batch,) = training("mixed_precision"), shared(1)
    found = {"step": kit.runtime.operator_dtypes(run.step, *batch)}
    predict = run.deploy(FOLDER / "bf16", batch[0])
    found["predict"] = kit.runtime.operator_dtypes(lambda x, y: predict(x), *batch)
    found["weights"] = sorted({str(w.dtype) for w in weights(run.model).values()})
    return found


def memory_format():
    """Where the channels lie of the weights and of what a convolution makes; plain, too."""
    run, (batch,) = training("memory_format"), shared(1)
    found = {"loss": float(run.step(*batch)), "last": is_channels_last(run.model)}
    run.close()
    return found | {"plain last": is_channels_last(build())}


def is_channels_last(model):
    if FRAMEWORK == "tf":
        return model.get_layer("conv0").data_format == "channels_last"
    import torch

    seen = []
    hook = model.conv0.register_forward_hook(lambda module, x, output: seen.append(output))
    with torch.no_grad():
        model.eval()(shared(1)[0][0].contiguous())
    hook.remove()
    last = torch.channels_last
    return all(t.is_contiguous(memory_format=last) for t in (model.conv0.conv.weight, *seen))


def accumulation():
    """The first loss of the whole, and of its halves by plain framework code."""
    (x, y), half = shared(1)[0], BATCH // 2
    whole = float(training("accumulation").step(x, y))
    halves = [by_hand([(x[part], y[part])]) for part in (slice(half), slice(half, None))]
    return {"whole": whole, "halves": halves}


def compiled():
    """Losses of compiled steps, and the graphs that were compiled."""
    with workers.without_inductor():
        run = training("compiled")
        found = {"shared": [float(run.step(*batch)) for batch in shared(4)]}
        found["graphs"] = kit.runtime.trace_count(run.step)
        found["xla"] = getattr(run.step, "_jit_compile", None)
    return found


def averaged_weights():
    """The weights after each step, and those that are used in the end."""
    run, seen = training("averaged_weights"), []
    for _ in run.epoch():
        seen.append(weights(run.model))
    before = kit.models.export_weights(run.model)
    before = {name: np.array(value) for name, value in before.items()}
    assert list(run.finish(shared(1)[0][0])) == []
    after = {name: np.array(v) for name, v in kit.models.export_weights(run.model).items()}
    statistics = [name for name in after if name.endswith((".mean", ".variance"))]
    return {
        "seen": seen,
        "used": weights(run.model),
        "statistics changed": any(not np.array_equal(before[n], after[n]) for n in statistics),
    }


def pruned():
    """Parameters before and after, and the epochs that follow, with the rungs below."""
    run = training("averaged_weights", "pruned", pruned_epochs=2, pruned_share=0.5)
    losses_of(run)
    found = {"before": kit.models.parameter_count(run.model)}
    (batch,) = shared(1)
    found["losses"] = [float(loss) for loss in run.finish(batch[0])]
    found["after"] = kit.models.parameter_count(run.model)
    found["averages"] = run.average is not None
    found["predicts"] = list(np.asarray(run.deploy(FOLDER / "pruned", batch[0])(batch[0])).shape)
    return found


def int8():
    """What a trained model predicts, and what its file in int8 holds and predicts."""
    (x, _), run = shared(1)[0], training("int8")
    losses_of(run, 3)
    list(run.finish(x))
    ours, theirs = run.deploy(FOLDER / "int8.onnx", x), kit.training.make_predict(run.model)
    found = {
        name: {"logits": np.asarray(predict(x))}
        for name, predict in (("int8", ours), ("float32", theirs))
    }
    run.close()
    import onnx

    graph = onnx.load(FOLDER / "int8.onnx").graph
    found["int8 tensors"] = sum(t.data_type == onnx.TensorProto.INT8 for t in graph.initializer)
    return found


def refused():
    """What a rung that is none is told."""
    try:
        training("faster")
    except ValueError as error:
        return str(error)


SCENARIOS = (
    plain,
    input_pipeline,
    mixed_precision,
    memory_format,
    accumulation,
    compiled,
    averaged_weights,
    pruned,
    int8,
    refused,
)
