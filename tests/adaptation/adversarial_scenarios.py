"""One framework's share of the tests of adversarial adaptation; `worker.py` runs it."""

from __future__ import annotations

import contextlib
import importlib
import tempfile
from pathlib import Path

import numpy as np

from shared.specs import BottleneckSpec, GPTSpec, ResNetSpec
from shared.weights import init_weights
from tests.adaptation.common import (
    DESCENT,
    FRAMEWORK,
    HIDDEN,
    RECIPE,
    SPEC,
    STEPS,
    WIDTH,
    batches,
    domain_weights,
    gradient,
    impl,
    kit,
    model,
    pt_forms,
    said,
    scalar,
    tf_forms,
    weights,
)

adversarial = impl.adaptation.adversarial
LOSS = adversarial.adversarial_loss(kit.training.cross_entropy)


def adversary(steps=STEPS, strength=1.0):
    """A new model, its domain head and the adversarial model of both."""
    made, parts = model()
    head = adversarial.make_domain_head(width=WIDTH, hidden=HIDDEN, seed=2)
    return made, head, adversarial.AdversarialModel(*parts, head, steps=steps, strength=strength)


def reversal():
    """Values and gradients of 3 x^2 behind a reversal, and without."""
    x = np.random.default_rng(0).normal(size=(4, 3)).astype(np.float32)
    found = {"x": x}

    def plain(value):
        return (3 * value * value).sum() if FRAMEWORK == "pt" else _sum(3 * value * value)

    _, (found["plain"],) = gradient(plain, x)
    for strength in (0.0, 0.375, 2.0):
        through = {}

        def reversed_(value, strength=strength, through=through):
            # A number is as good as a tensor.
            given = strength if strength == 2.0 else scalar(strength)
            through["x"] = adversarial.reverse_gradient(value, given)
            return plain(through["x"])

        _, (found[str(strength)],) = gradient(reversed_, x)
        found[f"{strength}: value"] = through["x"].detach() if FRAMEWORK == "pt" else through["x"]
    return found


def _sum(value):
    import tensorflow as tf

    return tf.reduce_sum(value)


def schedule():
    """The strength in each of six passes over which it rises in four, and in evaluation."""
    _, _, both = adversary(steps=4, strength=0.5)
    optimizer = kit.training.make_optimizer(both, RECIPE)
    step = kit.training.make_train_step(both, optimizer, LOSS)
    predict, seen = kit.training.make_predict(both), []
    stream = batches(6)
    for x, y in stream:
        seen.append(float(both.current_strength()))
        step(x, y)
        predict(x)
    found = {"seen": seen, "restored": restored(both, stream[0][0])}
    progress = np.linspace(0, 1, 11).astype(np.float32)
    found["of progress"] = [float(adversarial.reversal_strength(scalar(p))) for p in progress]
    found["progress"] = progress
    return found


def put_back():
    """The count of passes, and the strength, after what runs the model and puts it back."""
    recipes = [
        importlib.import_module(f"{impl.__name__}.recipes.{name}")
        for name in ("gradient_health", "nonfinite", "learning_rate_finder", "checkpoints")
    ]
    health, nonfinite, finder, checkpoints = recipes
    _, _, both = adversary(steps=4)
    optimizer = kit.training.make_optimizer(both, RECIPE)
    step = kit.training.make_train_step(both, optimizer, LOSS)
    stream, found = batches(3), {}
    step(*stream[0])
    before = found["before"] = float(both.passes), float(both.current_strength())
    health.gradient_norms(both, LOSS, *stream[1])
    found["norms"] = float(both.passes), float(both.current_strength())
    nonfinite.find_nonfinite(both, LOSS, *stream[1])
    found["nonfinite"] = float(both.passes), float(both.current_strength())
    with contextlib.suppress(ValueError):  # a loss that never falls: all is put back then, too
        finder.find_learning_rate(both, optimizer, step, stream, steps=20, window=3)
    found["finder"] = float(both.passes), float(both.current_strength())
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "saved"
        checkpoints.save_checkpoint(path, both, None, {})
        other = adversary(steps=4)[2]
        checkpoints.load_checkpoint(path, other)
    found["checkpoint"] = float(other.passes), float(other.current_strength())
    return before, found


def restored(both, x):
    """The strength of another model that was given what this one saves."""
    other = adversary(steps=4, strength=0.5)[2]
    if FRAMEWORK == "pt":
        other.load_state_dict(both.state_dict())
        return float(other.current_strength())
    import tempfile

    import tensorflow as tf

    with tempfile.TemporaryDirectory() as folder:
        path = tf.train.Checkpoint(model=both).write(f"{folder}/saved")
        tf.train.Checkpoint(model=other).read(path)
    return float(other.current_strength())


def descent():
    """What plain descent at rate 1 moves, in the second of two passes with a strength that rises.

    Beside it the gradients of the labels' loss and of the domains' loss, by plain framework code
    without any reversal.
    """
    x, y = batches(1)[0]
    found = {}
    for strength in (0.0, 1.0):
        made, head, both = adversary(strength=strength)
        kit.training.make_predict(both)(x)  # counts nothing
        own.count_one_pass(both)
        before = weights(made), domain_weights(head)
        optimizer = kit.training.make_optimizer(both, DESCENT)
        found["strength"] = float(both.current_strength())
        step = kit.training.make_train_step(both, optimizer, LOSS)
        found["loss"] = float(step(x, y))
        after = weights(made), domain_weights(head)
        found[f"moved {strength}"] = {name: before[0][name] - after[0][name] for name in before[0]}
        found[f"domain {strength}"] = [b - a for b, a in zip(before[1], after[1], strict=True)]
    made, head, _ = adversary()
    found |= own.plain_gradients(made, head, x, y)
    return found


def ten_steps():
    """Losses and weights of ten steps at a strength that rises to 1."""
    made, head, both = adversary()
    optimizer = kit.training.make_optimizer(both, RECIPE)
    step = kit.training.make_train_step(both, optimizer, LOSS)
    losses = [float(step(x, y)) for x, y in batches(STEPS)]
    return {"losses": losses, "weights": weights(made), "domain": domain_weights(head)}


def other_inputs():
    """Features of two inputs, and in lower precision; compiled where that is quick."""
    return own.other_inputs()


def split():
    """Whether a model's head of its features is the model, by family, and shares its weights."""
    found = {}
    specs = (
        SPEC,
        ResNetSpec((8, 8, 2), 1, (4, 6), num_classes=3, large_stem=True),
        BottleneckSpec((16, 16, 2), (1, 1), (4, 6), num_classes=3),
        GPTSpec(vocabulary=9, sequence_length=4, width=8, heads=2, layers=1),
    )
    for spec in specs:
        made = kit.models.build(spec, init_weights(spec, seed=1))
        codes = spec.family == "gpt"
        random = np.random.default_rng(0)
        x = random.integers(0, 9, (3, 4)) if codes else random.normal(size=(3, *spec.input_shape))
        x, _ = kit.data.to_device(x if codes else x.astype(np.float32), np.zeros(3))
        features, head = kit.models.split_head(made)
        kit.models.import_weights(made, init_weights(spec, seed=2))
        ours = np.array(own.plain(head, kit.training.make_predict(features)(x)))
        theirs = np.array(kit.training.make_predict(made)(x))
        found[spec.family] = np.allclose(ours, theirs, rtol=1e-6) and np.abs(theirs).sum() > 0
    return found


def forms():
    """Of domains that do not go together, and of features without a row a sample."""
    if FRAMEWORK != "pt":
        return tf_forms(
            lambda features, head: adversarial.AdversarialModel(
                features, head, adversarial.make_domain_head(width=3), steps=1
            )
        )
    import torch

    head, domain = torch.nn.Linear(3, 2), adversarial.make_domain_head(width=3)
    make = adversarial.AdversarialModel
    return pt_forms(lambda features: make(features, head, domain, steps=1))


def refusals():
    _, parts = model()
    head = adversarial.make_domain_head(width=WIDTH)

    def make(**settings):
        return said(lambda: adversarial.AdversarialModel(*parts, head, **settings))

    return [
        make(steps=0),
        make(steps=1, strength=-0.1),
        make(steps=1, gamma=0.0),
        make(steps=1, strength=float("nan")),
    ]


class _PT:
    def count_one_pass(self, both):
        both.passes.fill_(1)

    def plain(self, module, x):
        import torch

        with torch.inference_mode():
            return module(x)

    def plain_gradients(self, made, head, x, y):
        import torch
        import torch.nn.functional as F

        features, top = kit.models.split_head(made)
        made.train()
        parameters = kit.models.named_parameters(made)
        out = features(torch.cat(x))
        label = F.cross_entropy(top(out[: len(y)]), y)
        logits = head(out)
        ones = [torch.full((len(part), 1), float(n)) for n, part in enumerate(x)]
        count = len(y)
        domain = sum(
            F.binary_cross_entropy_with_logits(given, wanted) / 2
            for given, wanted in zip((logits[:count], logits[count:]), ones, strict=True)
        )
        found = {"plain loss": float(label + domain)}
        for name, loss in (("labels", label), ("domains", domain)):
            gradients = torch.autograd.grad(
                loss, list(parameters.values()), retain_graph=True, allow_unused=True
            )
            found[name] = {
                key: kit.models.to_canonical(key, given.numpy())
                for key, given in zip(parameters, gradients, strict=True)
                if given is not None
            }
        own_ = torch.autograd.grad(domain, list(head.parameters()))
        return found | {"of the domain head": [given.numpy().T for given in own_]}

    def other_inputs(self):
        import torch

        class Two(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.layer = torch.nn.Linear(3, 4)

            def forward(self, a, b):
                return self.layer(a + b)

        found = {}
        torch.manual_seed(0)
        domain = adversarial.make_domain_head(width=4)
        both = adversarial.AdversarialModel(Two(), torch.nn.Linear(4, 2), domain, steps=1)
        a, b, c, d = torch.randn(4, 5, 3)
        wanted = both.head(both.features(a, b))
        for name, inputs in (
            ("tuple", ((a, b), (c, d))),
            ("dict", ({"a": a, "b": b}, {"a": c, "b": d})),
        ):
            logits, source, target = both(*inputs)
            found[name] = torch.allclose(logits, wanted) and len(source) == len(target) == 5
        both.passes.fill_(1)
        compiled = torch.compile(both, backend="aot_eager", fullgraph=True)
        gradients = []
        for each in (both, compiled):
            both.zero_grad()
            both.passes.fill_(1)
            adversarial.domain_loss(*each((a, b), (c, d))[1:]).backward()
            gradients.append(both.features.layer.weight.grad.clone())
        found["compiled"] = bool(torch.allclose(*gradients, rtol=1e-5, atol=1e-8))
        found["compiled: reversed"] = bool(gradients[0].abs().sum() > 0)
        with torch.autocast("cpu", torch.bfloat16):
            both.zero_grad()
            both.passes.fill_(1)
            adversarial.domain_loss(*both((a, b), (c, d))[1:]).backward()
        rounded = both.features.layer.weight.grad
        found["bfloat16"] = float((rounded - gradients[0]).norm() / gradients[0].norm())
        return found


class _TF:
    def count_one_pass(self, both):
        both.passes.assign(1)

    def plain(self, module, x):
        return module(x)

    def plain_gradients(self, made, head, x, y):
        import tensorflow as tf

        features, top = kit.models.split_head(made)
        parameters = kit.models.named_parameters(made)
        with tf.GradientTape(persistent=True) as tape:
            out = features(tf.concat(x, 0), training=True)
            count = len(y)
            label = kit.training.cross_entropy(top(out[:count]), y)
            logits = head(out)
            domain = sum(
                tf.reduce_mean(
                    tf.nn.sigmoid_cross_entropy_with_logits(tf.fill(given.shape, wanted), given)
                )
                / 2
                for given, wanted in ((logits[:count], 0.0), (logits[count:], 1.0))
            )
        found = {"plain loss": float(label + domain)}
        for name, loss in (("labels", label), ("domains", domain)):
            gradients = tape.gradient(loss, list(parameters.values()))
            found[name] = {
                key: given.numpy()
                for key, given in zip(parameters, gradients, strict=True)
                if given is not None
            }
        own_ = tape.gradient(domain, head.trainable_variables)
        return found | {"of the domain head": [given.numpy() for given in own_]}

    def other_inputs(self):
        import tensorflow as tf

        layers = tf.keras.layers
        inputs = [tf.keras.Input((3,)), tf.keras.Input((3,))]
        features = tf.keras.Model(inputs, layers.Dense(4)(layers.Add()(inputs)))
        domain = adversarial.make_domain_head(width=4)
        top = tf.keras.Sequential([tf.keras.Input((4,)), layers.Dense(2)])
        both = adversarial.AdversarialModel(features, top, domain, steps=1)
        a, b, c, d = tf.unstack(tf.random.stateless_normal((4, 5, 3), (0, 0)))
        logits, source, target = both(([a, b], [c, d]))
        same = np.allclose(logits, top(features([a, b])), rtol=1e-5)
        found = {"list": bool(same) and len(source) == len(target) == 5}
        both.passes.assign(1)

        def gradient_of():
            with tf.GradientTape() as tape:
                loss = adversarial.domain_loss(*both(([a, b], [c, d]))[1:])
            return tape.gradient(loss, features.trainable_variables)[0]

        eager, graph = gradient_of(), tf.function(gradient_of)()
        found["graph"] = bool(np.allclose(eager, graph, rtol=1e-5, atol=1e-8))
        found["graph: reversed"] = bool(np.abs(eager).sum() > 0)
        x = tf.cast(a, tf.bfloat16)
        with tf.GradientTape() as tape:
            tape.watch(x)
            value = tf.reduce_sum(adversarial.reverse_gradient(x, tf.constant(0.5)))
        given = tape.gradient(value, x)
        found["bfloat16"] = float(np.abs(np.float32(given) + 0.5).max())
        return found


own = _PT() if FRAMEWORK == "pt" else _TF()
SCENARIOS = (
    reversal,
    schedule,
    put_back,
    descent,
    ten_steps,
    other_inputs,
    split,
    forms,
    refusals,
)
