"""One framework's share of the tests of adaptation by discrepancy; `worker.py` runs it."""

from __future__ import annotations

import numpy as np

from tests.adaptation.common import (
    FRAMEWORK,
    RECIPE,
    STEPS,
    batches,
    gradient,
    impl,
    kit,
    model,
    pt_forms,
    said,
    tf_forms,
    weights,
)

discrepancy = impl.adaptation.discrepancy


def features():
    """Features of two domains, far from 0, so that rounding would show."""
    random = np.random.default_rng(1)
    source = random.normal(size=(6, 4)) + 30
    target = 1.5 * random.normal(size=(9, 4)) + 31
    return source.astype(np.float32), target.astype(np.float32)


def values():
    """Values and gradients of the discrepancy, with several kernels and with one."""
    found = {}
    for name, settings in (("several", {}), ("one", {"bandwidths": (0.5,)})):
        value, gradients = gradient(
            lambda s, t, g=settings: discrepancy.mmd(s, t, **g), *features()
        )
        found[name] = {"value": value, "gradients": gradients}
    return found


def degenerate():
    """Where all features are the same, and where those of one domain are the other's."""
    same = np.ones((4, 3), np.float32)
    value, gradients = gradient(discrepancy.mmd, same, same)
    source, _ = features()
    maps = source.reshape(6, 2, 2)
    return {
        "same": value,
        "gradients": gradients,
        "maps": gradient(discrepancy.mmd, maps, maps + 1)[0],
        "flat": gradient(discrepancy.mmd, source, source + 1)[0],
    }


def chance():
    """The mean over draws of two domains that are alike, which is 0, and its standard error."""
    random = np.random.default_rng(2)
    drawn = [
        float(discrepancy.mmd(*map(kit_tensor, random.normal(size=(2, 8, 3)).astype(np.float32))))
        for _ in range(200)
    ]
    return {"mean": np.mean(drawn), "standard error": np.std(drawn) / len(drawn) ** 0.5}


def ten_steps():
    """Losses and weights of ten steps, and of ten without weight."""
    found = {}
    for weight in (1.0, 0.0):
        made, parts = model()
        aligned = discrepancy.AlignedModel(*parts)
        optimizer = kit.training.make_optimizer(aligned, RECIPE)
        loss_fn = discrepancy.discrepancy_loss(kit.training.cross_entropy, weight=weight)
        step = kit.training.make_train_step(aligned, optimizer, loss_fn)
        losses = [float(step(x, y)) for x, y in batches(STEPS)]
        found[str(weight)] = {"losses": losses, "weights": weights(made)}
    return found


def together():
    """The discrepancy of both domains' features after training without it, and with it."""
    found = {}
    (x, target), _ = batches(1, size=200)[0]
    for weight in (0.0, 1.0):
        _, parts = model()
        aligned = discrepancy.AlignedModel(*parts)
        optimizer = kit.training.make_optimizer(aligned, RECIPE)
        loss_fn = discrepancy.discrepancy_loss(kit.training.cross_entropy, weight=weight)
        step = kit.training.make_train_step(aligned, optimizer, loss_fn)
        for both, y in batches(40):
            step(both, y)
        _, *ours = kit.training.make_predict(aligned)((x, target))
        found[str(weight)] = float(discrepancy.mmd(*ours))
    return found


def low_precision():
    """The discrepancy of bfloat16 features, beside that of the same in float32."""
    source, target = features()
    if FRAMEWORK == "pt":
        import torch

        low = [torch.tensor(part).bfloat16() for part in (source, target)]
        with torch.autocast("cpu", torch.bfloat16):
            found = discrepancy.mmd(*low)
        wanted = discrepancy.mmd(*(part.float() for part in low))
        return [str(found.dtype), float(found), float(wanted)]
    import tensorflow as tf

    low = [tf.cast(part, tf.bfloat16) for part in (source, target)]
    found = discrepancy.mmd(*low)
    wanted = discrepancy.mmd(*(tf.cast(part, tf.float32) for part in low))
    return [found.dtype.name, float(found), float(wanted)]


def one_sample():
    """What a graph says that learns as it runs that a domain has one sample."""
    source, target = features()
    if FRAMEWORK == "pt":
        return said(lambda: discrepancy.mmd(*map(kit_tensor, (source[:1], target))))
    import tensorflow as tf

    program = tf.function(discrepancy.mmd, input_signature=[tf.TensorSpec((None, 4))] * 2)
    assert np.isfinite(float(program(source, target)))
    try:
        return float(program(source[:1], target))
    except tf.errors.InvalidArgumentError as error:
        return str(error)


def kit_tensor(array):
    return kit.data.to_device(array, np.zeros(1))[0]


def forms():
    """Of domains that do not go together, and of features without a row a sample."""
    if FRAMEWORK != "pt":
        return tf_forms(lambda features, head: discrepancy.AlignedModel(features, head))
    import torch

    return pt_forms(lambda features: discrepancy.AlignedModel(features, torch.nn.Linear(3, 2)))


def refusals():
    source, target = features()
    x, other = (kit.data.to_device(part, np.zeros(1))[0] for part in (source, target))
    loss = kit.training.cross_entropy
    return [
        said(lambda: discrepancy.mmd(x, other, bandwidths=())),
        said(lambda: discrepancy.mmd(x, other, bandwidths=(1.0, 0.0))),
        said(lambda: discrepancy.mmd(x[:1], other)),
        said(lambda: discrepancy.discrepancy_loss(loss, weight=-1.0)),
        said(lambda: discrepancy.discrepancy_loss(loss, bandwidths=(float("inf"),))),
    ]


SCENARIOS = (values, degenerate, chance, ten_steps, together, low_precision)
SCENARIOS += (one_sample, forms, refusals)
