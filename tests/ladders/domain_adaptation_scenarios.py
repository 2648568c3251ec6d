"""One framework's share of the tests of domain adaptation; `worker.py` runs it."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import numpy as np

from shared.specs import CNNSpec, parameter_shapes
from shared.weights import init_weights
from tests import workers

FRAMEWORK = "pt" if sys.argv[1:] == ["pt"] else "tf"
impl = workers.implementation(
    FRAMEWORK, "ladders.domain_adaptation", "input.in_memory", "adaptation.adversarial"
)
program, kit = impl.ladders.domain_adaptation, impl.kit
SPEC = CNNSpec((16, 16, 3), ((8, 2), (16, 2)), num_classes=6)
BATCH, SEED, STEPS, RATE = 8, 3, 10, 0.02
FOLDER = Path(tempfile.mkdtemp(prefix="ladder-"))
for number, name in enumerate(("source", "target")):
    random = np.random.default_rng(number)
    (FOLDER / name).mkdir()
    images = random.normal(size=(24, 16, 16, 3)).astype(np.float32) * (1 + number)
    np.save(FOLDER / name / "train_x.npy", images)
    np.save(FOLDER / name / "train_y.npy", random.integers(0, 6, 24) * (1 - number))
SOURCE, TARGET = FOLDER / "source", FOLDER / "target"


def parts():
    return kit.models.split_head(kit.models.build(SPEC, init_weights(SPEC, seed=1)))


def training(*rungs, **settings):
    return program.Training(
        parts, SOURCE, TARGET, steps=STEPS, rungs=rungs, batch_size=BATCH, seed=SEED, **settings
    )


def shared(count):
    """Batches of both domains that are the same in every process."""
    random = np.random.default_rng(5)
    found = [
        (
            random.normal(size=(2 * BATCH, 16, 16, 3)).astype(np.float32),
            random.integers(0, 6, BATCH),
        )
        for _ in range(count)
    ]
    return kit.data.resident_batches(found)


def weights(run):
    """Those of features and head."""
    if FRAMEWORK == "pt":
        return [weight.detach().clone().numpy() for weight in run.model.parameters()]
    return [weight.numpy() for weight in run.model.trainable_weights]


def plain():
    """The plain program on its domains, and plain framework code on the same; on shared batches."""
    run = training()
    found = {"epochs": [float(loss) for _ in range(2) for loss in run.epoch()]}
    settings = {"batch_size": BATCH}
    source = impl.input.in_memory.naive_loader(SOURCE, seed=SEED, **settings)
    target = impl.input.in_memory.naive_loader(TARGET, seed=SEED + 1, **settings)
    batches = []
    for _ in range(2):
        batches += [(*one, other) for one, (other, _) in zip(source, target, strict=True)]
    found["by hand"] = by_hand(batches)
    found["shared"] = [float(run.step(*batch)) for run in [training()] for batch in shared(4)]
    return found


def by_hand(batches):
    """Losses of features that climb the loss of the domains, which the domain head goes down.

    Two gradients apart and no reversal: that of the labels less the strength times the domains'.
    """
    features, head = parts()
    width = SPEC.convolutions[-1][0]
    domain_head = impl.adaptation.adversarial.make_domain_head(width=width)
    strengths = [2 / (1 + np.exp(-10 * step / STEPS)) - 1 for step in range(len(batches))]
    step = {"pt": _pt_step, "tf": _tf_step}[FRAMEWORK](features, head, domain_head)
    return [
        step(x, y, target, float(strength))
        for (x, y, target), strength in zip(batches, strengths, strict=True)
    ]


def _pt_step(features, head, domain_head):
    import torch
    from torch.nn import functional

    labelled, domains = (list(m.parameters()) for m in (head, domain_head))
    heads = {id(weight) for weight in labelled}  # which the kit's features hold, too
    own = [weight for weight in features.parameters() if id(weight) not in heads]
    optimizer = torch.optim.SGD([*own, *labelled, *domains], lr=RATE, momentum=0.9)
    features.train()

    def step(x, y, target, strength):
        both = features(torch.cat([x, target]))
        cost = functional.cross_entropy(head(both[: len(x)]), y)
        of_source = torch.cat([torch.zeros(len(x), 1), torch.ones(len(target), 1)])
        confusion = functional.binary_cross_entropy_with_logits(domain_head(both), of_source)
        down = torch.autograd.grad(cost, [*own, *labelled], retain_graph=True)
        up = torch.autograd.grad(confusion, [*own, *domains])
        for weight, a, b in zip(own, down, up, strict=False):
            weight.grad = a - strength * b
        for weight, gradient in zip(labelled, down[len(own) :], strict=True):
            weight.grad = gradient
        for weight, gradient in zip(domains, up[len(own) :], strict=True):
            weight.grad = gradient
        optimizer.step()
        return float(cost + confusion)

    return step


def _tf_step(features, head, domain_head):
    import tensorflow as tf

    own, labelled, domains = (list(m.trainable_weights) for m in (features, head, domain_head))
    optimizer = tf.keras.optimizers.SGD(RATE, momentum=0.9)
    labels_cost = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    domains_cost = tf.keras.losses.BinaryCrossentropy(from_logits=True)

    def step(x, y, target, strength):
        with tf.GradientTape(persistent=True) as tape:
            both = features(tf.concat([x, target], 0), training=True)
            cost = labels_cost(y, head(both[: len(x)]))
            of_source = tf.concat([tf.zeros([len(x), 1]), tf.ones([len(target), 1])], 0)
            confusion = domains_cost(of_source, domain_head(both))
        down, up = (
            tape.gradient(cost, [*own, *labelled]),
            tape.gradient(confusion, [*own, *domains]),
        )
        both = zip(down[: len(own)], up[: len(own)], strict=True)
        mixed = [a - strength * b for a, b in both]
        gradients = [*mixed, *down[len(own) :], *up[len(own) :]]
        optimizer.apply_gradients(zip(gradients, [*own, *labelled, *domains], strict=True))
        return float(cost + confusion)

    return step


def input_pipeline():
    """The same batches, made another way."""
    run = training("input_pipeline")
    return {"epochs": [float(loss) for _ in range(2) for loss in run.epoch()]}


def mixed_precision():
    """The dtypes that ran, in the step and in a prediction of what is deployed."""
    run, ((x, y),) = training("mixed_precision"), shared(1)
    found = {"step": kit.runtime.operator_dtypes(run.step, x, y)}
    predict = run.deploy(FOLDER / "bf16", x)
    found["predict"] = kit.runtime.operator_dtypes(lambda x, y: predict(x), x, y)
    found["weights"] = sorted({str(weight.dtype) for weight in weights(run)})
    return found


def clipping():
    """How far the first step leads, plain and clipped at a hundredth of its gradient."""
    found, (batch,) = {}, shared(1)
    for rungs in ((), ("clipping",)):
        run = training(*rungs, max_norm=0.01)
        before = weights(run)
        run.step(*batch)
        moved = [after - was for after, was in zip(weights(run), before, strict=True)]
        found["clipped" if rungs else "plain"] = np.concatenate([m.ravel() for m in moved])
    return found


def compiled():
    """Losses of compiled steps, and the graphs that were compiled."""
    with workers.without_inductor():  # which compiles those of photos
        run = training("compiled")
    found = {"shared": [float(run.step(*batch)) for batch in shared(4)]}
    found["graphs"] = kit.runtime.trace_count(run.adapt)
    return found


def everything():
    """All rungs at once, to the model in use."""
    x, _ = shared(1)[0]
    with workers.without_inductor():
        run = training(*program.RUNGS)
    found = {"losses": [float(loss) for loss in run.epoch()]}
    assert list(run.finish(x)) == []
    predict = run.deploy(FOLDER / "deployed", x)
    found["predicts"] = list(np.asarray(predict(x)).shape)
    found["bytes"] = (FOLDER / "deployed").stat().st_size
    found["weights"] = sum(int(np.prod(shape)) for shape in parameter_shapes(SPEC).values())
    run.close()
    return found


SCENARIOS = (plain, input_pipeline, mixed_precision, clipping, compiled, everything)
