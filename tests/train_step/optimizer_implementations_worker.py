"""One framework's share of the tests of AdamW's implementations, in a process of its own.

`python optimizer_implementations_worker.py pt|tf|tf_keras` runs every scenario and prints one line
of JSON: scenario -> what was found, or {"error": traceback}. `test_optimizer_implementations.py`
judges it.
"""

from __future__ import annotations

import sys

import numpy as np

from shared.specs import CNNSpec, parameter_shapes
from shared.weights import init_weights
from tests import workers
from tests.workers import raised

SPEC = CNNSpec((8, 8, 2), ((4, 2), (6, 1)), num_classes=3)
STEPS = 5
SETTINGS = {"learning_rate": 0.01, "weight_decay": 0.1, "beta1": 0.8, "beta2": 0.95}
PLANTED = SETTINGS | {"weight_decay": 0.11}
# The twins take their epsilon at different places: what is large here decides the first update.
LARGE_EPS = {"learning_rate": 0.1, "beta2": 0.95, "eps": 1.0}


def given_gradients() -> list[dict[str, np.ndarray]]:
    """One set a step, in the canonical layout: away from zero, where epsilon would decide."""
    random = np.random.default_rng(5)
    return [
        {
            name: (random.choice([-1, 1], shape) * random.uniform(0.5, 1.5, shape)).astype("f4")
            for name, shape in parameter_shapes(SPEC).items()
        }
        for _ in range(STEPS)
    ]


if __name__ == "__main__":
    FRAMEWORK = "pt" if sys.argv[1:] == ["pt"] else "tf"
    impl = workers.implementation(
        FRAMEWORK, "kit.operators", "train_step.optimizer_implementations"
    )
    kit = impl.kit
    technique = impl.train_step.optimizer_implementations
    operators = impl.kit.operators
    NAMES = ("for_loop", "foreach", "fused", "compiled")
    if FRAMEWORK == "tf":
        NAMES = ("for_loop", "fused", "compiled")
    if FRAMEWORK == "pt":
        import torch
    else:
        import tensorflow as tf


def build():
    """A model, tensors to hold its gradients, and what puts a canonical set into them."""
    model = kit.models.build(SPEC, init_weights(SPEC, seed=1))
    if FRAMEWORK == "pt":
        buffers = [torch.zeros_like(parameter) for parameter in model.parameters()]
    else:
        buffers = [tf.Variable(tf.zeros(v.shape)) for v in model.trainable_variables]

    def put(gradients):
        statistics = {k: v for k, v in init_weights(SPEC, seed=1).items() if k not in gradients}
        carrier = kit.models.build(SPEC, gradients | statistics)
        if FRAMEWORK == "pt":
            for buffer, value in zip(buffers, carrier.parameters(), strict=True):
                buffer.copy_(value.detach())
        else:
            for buffer, value in zip(buffers, carrier.trainable_variables, strict=True):
                buffer.assign(value + 0.0)

    return model, buffers, put


def weights(model):
    found = kit.models.export_weights(model)
    return {name: found[name].tolist() for name in parameter_shapes(SPEC)}


def run(name, steps=STEPS, **settings):
    model, buffers, put = build()
    optimizer = getattr(technique, f"{name}_optimizer")(model, **settings)
    update = kit.training.make_update(model, optimizer, buffers)
    for gradients in given_gradients()[:steps]:
        put(gradients)
        update()
    return weights(model), update


def updates():
    """Weights after all steps and operators of one more, by implementation."""
    found = {}
    for name in NAMES:
        if name == "compiled" and FRAMEWORK == "pt" and "no-compiler" in sys.argv:
            continue
        after, update = run(name, **SETTINGS)
        found[name] = {"weights": after, "operators": operators.update_operators(update)}
        if name == "compiled":
            found[name]["traces"] = kit.runtime.trace_count(update)
            update()
            found[name]["retraced"] = kit.runtime.trace_count(update) - found[name]["traces"]
    found["planted"] = {"weights": run("for_loop", **PLANTED)[0]}
    return found


def large_eps():
    return run("for_loop", steps=1, **LARGE_EPS)[0]


def refusals():
    """What bad settings raise, and that no weight was touched."""
    model, _, _ = build()
    before = weights(model)
    bad = {
        "rate": {"learning_rate": -0.1},
        "beta": {"learning_rate": 0.1, "beta2": 1.0},
        "momentum": {"learning_rate": 0.1, "momentum": 1.0},
    }
    found = {}
    for name in NAMES:
        for reason in ("rate", "beta"):
            make = getattr(technique, f"{name}_optimizer")
            found[f"{name} {reason}"] = raised(make, model, **bad[reason])
    if FRAMEWORK == "pt":
        for reason in ("rate", "momentum"):
            found[f"fused_sgd {reason}"] = raised(technique.fused_sgd, model, **bad[reason])
    return {"errors": found, "untouched": weights(model) == before}


def repeated_ids():
    """The first update of an embedding that looks row 0 up twice, in units of the learning rate."""
    ids, pulls = [0, 0, 1], [[1.0], [2.0], [3.0]]
    found = {}
    for name in [name for name in NAMES if (FRAMEWORK, name) != ("pt", "compiled")]:
        if FRAMEWORK == "pt":
            model = torch.nn.Embedding(3, 1, _weight=torch.zeros(3, 1))
            optimizer = getattr(technique, f"{name}_optimizer")(model, learning_rate=0.5)
            (model(torch.tensor(ids)) * torch.tensor(pulls)).sum().backward()
            optimizer.step()
            table = model.weight.detach()
        else:
            table = tf.keras.layers.Embedding(3, 1, embeddings_initializer="zeros")
            model = tf.keras.Sequential([tf.keras.Input((), dtype="int64"), table])
            optimizer = getattr(technique, f"{name}_optimizer")(model, learning_rate=0.5)
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(model(tf.constant(ids)) * tf.constant(pulls))
            gradients = tape.gradient(loss, model.trainable_variables)
            optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
            table = table.get_weights()[0]
        found[name] = [float(row[0]) / 0.5 for row in table]
    return found


def fused_limits():
    """Parameters that PyTorch's fused kernels do not take."""
    model = torch.nn.Linear(2, 2, dtype=torch.complex64)
    names = ("for_loop_optimizer", "fused_optimizer", "fused_sgd")
    return {name: raised(getattr(technique, name), model, learning_rate=0.1) for name in names}


def fused_sgd():
    """Weights of plain SGD and of the fused one, by the same gradients, and what that one ran."""
    found = []
    for make in (torch.optim.SGD, technique.fused_sgd):
        model, buffers, put = build()
        rate = {"lr": 0.1} if make is torch.optim.SGD else {"learning_rate": 0.1}
        optimizer = make(*([model.parameters()] if "lr" in rate else [model]), momentum=0.9, **rate)
        update = kit.training.make_update(model, optimizer, buffers)
        for gradients in given_gradients():
            put(gradients)
            update()
        found.append(weights(model))
    return {"weights": found, "operators": operators.update_operators(update)}


def fit():
    """Weights that `fit` trained with the fused optimizer, against Keras's own."""
    keras, layers = tf.keras, tf.keras.layers
    random = np.random.default_rng(0)
    x, y = (
        random.permutation(32)[:, None],
        random.normal(size=(32, 2)),
    )  # each row is looked up once
    found = []
    for kind in (keras.optimizers.AdamW, technique.FusedAdamW):
        keras.utils.set_random_seed(0)
        model = keras.Sequential([keras.Input((1,)), layers.Embedding(32, 4), layers.Flatten()])
        model.add(layers.Dense(2))
        before = [np.array(value) for value in model.get_weights()]
        rate = keras.optimizers.schedules.CosineDecay(0.3, 12)
        # An epsilon that keeps Adam from amplifying how gradients were rounded, and moments whose
        # complements float32 has: the two round them at different places.
        settings = {"weight_decay": 0.1, "beta_1": 0.5, "beta_2": 0.75, "epsilon": 1e-2}
        model.compile(kind(rate, **settings, global_clipnorm=0.5), "mse")
        model.fit(x, y, batch_size=8, epochs=3, shuffle=False, verbose=0)
        found.append(model.get_weights())
    optimizer = technique.FusedAdamW(amsgrad=True)
    return {
        "moved": min(float(np.abs(a - b).max()) for a, b in zip(before, found[0], strict=True)),
        "apart": max(
            float(np.linalg.norm(a - b) / np.linalg.norm(a)) for a, b in zip(*found, strict=True)
        ),
        "refused": raised(optimizer.build, model.trainable_variables),
    }


def fit_compiled():
    """Losses of `fit` with the compiled optimizer, and with Keras's own: the first is the same."""
    keras = tf.keras
    random = np.random.default_rng(0)
    x, y = random.normal(size=(32, 4)), random.normal(size=(32, 2))
    found = []
    for make in (technique.for_loop_optimizer, technique.compiled_optimizer):
        keras.utils.set_random_seed(0)
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])
        model.compile(make(model, learning_rate=0.05, eps=1e-3), "mse")
        history = model.fit(x, y, batch_size=8, epochs=3, shuffle=False, verbose=0)
        found.append(history.history["loss"])
    return found


def some_variables():
    """Weights after updates of some variables, in an order of their own; a variable of another."""
    keras = tf.keras
    found = []
    for make in (technique.for_loop_optimizer, technique.compiled_optimizer):
        keras.utils.set_random_seed(0)
        model = keras.Sequential([keras.Input((4,)), *(keras.layers.Dense(4) for _ in range(3))])
        model.layers[2].trainable = False
        optimizer = make(model, learning_rate=0.05, eps=1e-3)
        for own in (model.trainable_variables[::-1], model.trainable_variables[2:]):
            pairs = [(tf.fill(v.shape, 1.0 + place), v) for place, v in enumerate(own)]
            optimizer.apply_gradients(pairs)
        found.append({str(n): weight.tolist() for n, weight in enumerate(model.get_weights())})
        other = tf.Variable(tf.zeros(4))
    return {"weights": found, "other": raised(optimizer.apply_gradients, [(tf.ones(4), other)])}


def main() -> None:
    kit.runtime.configure(threads=1, seed=0)
    scenarios = [updates, large_eps, refusals, repeated_ids]
    scenarios += (
        [fused_limits, fused_sgd] if FRAMEWORK == "pt" else [fit, fit_compiled, some_variables]
    )
    workers.report(scenarios)


if __name__ == "__main__":
    main()
