"""Each train step at its neutral setting on models of any kind, against plain Keras code.

`python -m tests.train_step.any_model_worker tf|tf_keras` prints one line of JSON: scenario ->
{model: relative difference of weights, statistics and losses, or the error}.
"""

from __future__ import annotations

import functools

import numpy as np
import tensorflow as tf

from tests import workers
from tests.train_step.keras_models import KERAS_3, ROWS, ZOO, squares
from tests.workers import raised

STEPS = (
    "mixed_precision",
    "compilation",
    "gradient_accumulation",
    "gradient_clipping",
    "finite_guard",
    "activation_checkpointing",
    "stacking",
)
impl = workers.implementation(
    "tf",
    *("kit.operators", "kit.optimizers", "deployment.reduced_precision"),
    *(f"train_step.{name}" for name in STEPS),
)
kit, family, operators = impl.kit, impl.train_step, impl.kit.operators
keras, layers = tf.keras, tf.keras.layers


def made(name):
    """A model of the zoo, always with the same weights and seeds, and an optimizer.

    Adam treats an embedding's slices otherwise than their sum and, with decay, a gradient of zero
    otherwise than none; its epsilon is large, so that it does not amplify rounding.
    """
    keras.utils.set_random_seed(0)
    model, *rest = ZOO[name]()
    optimizer = keras.optimizers.AdamW(0.05, weight_decay=0.1, epsilon=1e-2)
    optimizer.jit_compile = False
    optimizer.build(model.trainable_variables)
    return model, optimizer, *rest


def plain(model, optimizer, loss_fn):
    """The step of TensorFlow's guides; x is unpacked by hand where it has to be."""
    several = type(model).__name__ in ("Several", "Everything")

    @tf.function(jit_compile=False)
    def step(x, y):
        with tf.GradientTape() as tape:
            output = model(**x, training=True) if several else model(x, training=True)
            loss = loss_fn(output, y) + sum(model.losses)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return loss

    return step


def trained(model, step, x, y, steps=2):
    """Losses, weights and statistics after some steps, flat."""
    losses = [float(step(x, y)) for _ in range(steps)]
    return [np.array(losses), *(np.array(w, np.float64) for w in model.get_weights())]


def apart(ours, theirs):
    pairs = list(zip(ours, theirs, strict=True))
    return max(float(np.linalg.norm(a - b) / (np.linalg.norm(b) or 1.0)) for a, b in pairs)


expected = {}


def reference(name):
    if name not in expected:
        model, optimizer, x, y, loss_fn = made(name)
        expected[name] = trained(model, plain(model, optimizer, loss_fn), x, y)
    return expected[name]


def against_plain(make, names):
    """{model: difference} of what `make(model, optimizer, loss_fn)` trains."""
    found = {}
    for name in names:
        wanted = reference(name)
        try:
            model, optimizer, x, y, loss_fn = made(name)
            found[name] = apart(trained(model, make(model, optimizer, loss_fn), x, y), wanted)
        except Exception as error:
            found[name] = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
    return found


KEY = ["everything"]
WHOLE = ["everything_but_dropout"]  # the same in parts, in another dtype and under XLA


def kit_step():
    return against_plain(kit.training.make_train_step, KEY)


def float32():
    make = family.mixed_precision.make_train_step
    return against_plain(lambda *given: make(*given, dtype="float32"), KEY)


def eager():
    return against_plain(family.compilation.eager_train_step, KEY)


def xla():
    """But for dropout, of which XLA draws other masks."""
    return against_plain(family.compilation.compiled_train_step, WHOLE)


def xla_model():
    names = ["list_model_of_a_tuple", "several_by_name"]
    return against_plain(family.compilation.compiled_model_train_step, names)


@functools.cache
def several_blocks():
    """How far from plain a model is whose three blocks are compiled, its programs and layers."""
    kept = []

    def make(model, *given):
        blocks = "block.g*, block.add, block.relu"
        step = family.compilation.compiled_model_train_step(model, *given, blocks=blocks)
        kept.extend([model, step])
        return step

    (apart_from_plain,) = against_plain(make, ["branches"]).values()
    model, step = kept
    calls = [name for layer in model._flatten_layers() for name in vars(layer) if name == "call"]
    _, _, x, y, _ = made("branches")
    programs = operators.executed_graphs(step, x, y)["compiled"]
    return {"apart": apart_from_plain, "compiled": programs, "replaced": len(calls)}


def xla_blocks():
    return {"branches": several_blocks()["apart"]}


def accumulated():
    makes = family.gradient_accumulation.make_train_step
    return {"3": against_plain(lambda *given: makes(*given, micro_batches=3), WHOLE)}


def clipped():
    technique = family.gradient_clipping
    return {
        "loosely": against_plain(
            lambda *given: technique.make_train_step(*given, max_norm=1e9), KEY
        ),
        "guarded": against_plain(family.finite_guard.make_train_step, KEY),
        "each": against_plain(
            lambda *given: technique.make_per_variable_step(*given, max_norm=1e9), KEY
        ),
    }


def stacked():
    makes = family.stacking.make_train_step
    return {
        "1": against_plain(makes, KEY),
        "2": against_plain(lambda *given: makes(*given, micro_batches=2), WHOLE),
        "2 compiled": against_plain(
            lambda *given: makes(*given, micro_batches=2, compiled=True), ["tied"]
        ),
    }


def recomputed():
    """With a block of some functional models."""
    found = {}
    for name in ("normalized", "attention"):
        wanted = reference(name)
        try:
            model, optimizer, x, y, loss_fn = made(name)
            apply = family.activation_checkpointing.apply_checkpointing
            model = apply(model, blocks="head" if name == "normalized" else "block")
            optimizer.build(model.trainable_variables)
            step = kit.training.make_train_step(model, optimizer, loss_fn)
            found[name] = apart(trained(model, step, x, y), wanted)
        except Exception as error:
            found[name] = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
    return found


def half_width():
    """Losses in bfloat16, where masks do not depend on the dtype."""
    found = {}
    for name in WHOLE:
        wanted = reference(name)[0]
        model, optimizer, x, y, loss_fn = made(name)
        try:
            step = family.mixed_precision.make_train_step(model, optimizer, loss_fn)
            found[name] = apart([np.array([float(step(x, y)) for _ in range(2)])], [wanted])
        except Exception as error:
            found[name] = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
    return found


def policies():
    """A model whose own policy is half-width, in each step that takes it as it is."""
    makers = {
        "eager": family.compilation.eager_train_step,
        "xla": family.compilation.compiled_train_step,
        "clipped": family.gradient_clipping.make_train_step,
        "accumulated": family.gradient_accumulation.make_train_step,
        "stacked": family.stacking.make_train_step,
        "kit": kit.training.make_train_step,
        "model": family.compilation.compiled_model_train_step,  # last, as it compiles its layers
    }
    # A step changes the weights alone: one model of a policy goes through all of them.
    cells = [("mixed_bfloat16", kind) for kind in makers] + [("mixed_float16", "kit")]
    found, models = {}, {}
    for policy, kind in cells:
        keras.mixed_precision.set_global_policy(policy)
        try:
            if policy not in models:
                models[policy] = made("regularized")
            model, _, x, y, loss_fn = models[policy]
            optimizer = keras.optimizers.SGD(0.05)
            optimizer.build(model.trainable_variables)
            parts = loss_fn(model(x, training=True), y), *model.losses
            wanted = np.array([sum(float(part) for part in parts)])
            loss = makers[kind](model, optimizer, loss_fn)(x, y)
            found[f"{policy} {kind}"] = apart([np.array([float(loss)])], [wanted]), loss.dtype.name
        except Exception as error:
            said = " ".join(str(error).split())[:300]
            found[f"{policy} {kind}"] = f"{type(error).__name__}: {said}"
        finally:
            keras.mixed_precision.set_global_policy("float32")
    return found


def from_a_pipeline():
    """A functional [a, b] model with the batches of a tf.data pipeline of tuples, everywhere."""
    model, optimizer, x, y, loss_fn = made("list_model_of_a_tuple")
    x, y = next(iter(tf.data.Dataset.from_tensor_slices((x, y)).batch(ROWS)))
    found = {"type": type(x).__name__}
    makers = [
        kit.training.make_train_step,
        family.compilation.graph_train_step,
        *(getattr(family, name).make_train_step for name in ("mixed_precision", "stacking")),
        *(
            getattr(family, f"gradient_{name}").make_train_step
            for name in ("clipping", "accumulation")
        ),
    ]
    wanted = model(x, training=False)
    predictions = [
        kit.training.make_predict(model),
        family.compilation.eager_predict(model),
        family.compilation.graph_predict(model),
        family.compilation.compiled_predict(model),
        family.compilation.compiled_predict(model, blocks="block"),
        impl.deployment.reduced_precision.make_predict(model, dtype="float32"),
    ]
    found["predicted"] = max(float(np.abs(predict(x) - wanted).max()) for predict in predictions)
    found["losses"] = []
    for maker in makers:
        model, optimizer, *_, loss_fn = made("list_model_of_a_tuple")
        found["losses"].append(float(maker(model, optimizer, loss_fn)(x, y)))
    return found


def sparse():
    """That the slices of an embedding reach the optimizer as slices, of each kind of step."""
    seen = []

    class Spy(keras.optimizers.SGD):
        def apply_gradients(self, grads_and_vars, **settings):
            pairs = list(grads_and_vars)
            seen.append(any(isinstance(g, tf.IndexedSlices) for g, _ in pairs))
            return super().apply_gradients(pairs, **settings)

    makers = {
        "accumulation": (family.gradient_accumulation, {"micro_batches": 3}),
        "clipping": (family.gradient_clipping, {"max_norm": 0.1}),
        "guard": (family.finite_guard, {}),
        "stacking": (family.stacking, {"micro_batches": 2}),
    }
    found = {}
    for name, (technique, settings) in makers.items():
        model, _, x, y, loss_fn = made("looked_up")
        seen.clear()
        optimizer = Spy(0.1)
        optimizer.build(model.trainable_variables)
        technique.make_train_step(model, optimizer, loss_fn, **settings)(x, y)
        found[name] = seen[0]
    return found


def masks():
    """What XLA draws from the same seeds, against the graph: of ones, where dropout keeps them."""
    found = {}
    for name, settings in (("graph", {}), ("again", {}), ("xla", {"jit_compile": True})):
        keras.utils.set_random_seed(0)
        layer = layers.Dropout(0.5)
        draw = tf.function(lambda x, layer=layer: layer(x, training=True), **settings)
        found[name] = np.array(draw(tf.ones((40, 50)))).tolist()
    return found


def in_fit():
    """What each technique is in `fit`, by Keras's own means, against its step: two batches."""
    rate = {"learning_rate": 0.1, "momentum": 0.9}
    found = {}

    def of_step(name, make, **settings):
        model, _, x, y, loss_fn = made(name)
        optimizer = keras.optimizers.SGD(**rate)
        optimizer.build(model.trainable_variables)
        return trained(model, make(model, optimizer, loss_fn, **settings), x, y)[1:]

    def of_fit(name, prepare=lambda model: model, batch_size=ROWS, **settings):
        model, _, x, y, loss_fn = made(name)
        model = prepare(model)
        model.compile(
            keras.optimizers.SGD(**rate, **settings), lambda y, output: loss_fn(output, y)
        )
        for _ in range(2):
            model.fit(x, y, batch_size=batch_size, shuffle=False, verbose=0)
        return [np.array(w, np.float64) for w in model.get_weights()]

    clipping = family.gradient_clipping
    clipped = of_step("subclassed", clipping.make_train_step, max_norm=0.1)
    found["clipped"] = apart(of_fit("subclassed", global_clipnorm=0.1), clipped)
    found["clip matters"] = apart(of_fit("subclassed"), clipped)
    each = of_step("subclassed", clipping.make_per_variable_step, max_norm=0.1)
    found["clipped each"] = apart(of_fit("subclassed", clipnorm=0.1), each)
    if KERAS_3:
        make = family.gradient_accumulation.make_train_step
        parts = of_step("subclassed", make, micro_batches=2)
        found["a mixin"] = apart(of_fit("subclassed", with_accumulation), parts)
        found["losses of fit"] = losses_of_fit()
        steps = {"batch_size": ROWS // 2, "gradient_accumulation_steps": 2}
        found["accumulated"] = apart(of_fit("subclassed", **steps), parts)
        apply = family.activation_checkpointing.apply_checkpointing
        again = of_fit("normalized", lambda model: apply(model, blocks="head"))
        found["recomputed"] = apart(again, of_fit("normalized"))
        half = of_step("sequence", family.mixed_precision.make_train_step)
        keras.mixed_precision.set_global_policy("mixed_bfloat16")
        # Keras casts the outputs for its losses; here the loss is a function and does not.
        found["bfloat16"] = apart(of_fit("sequence"), half)
        keras.mixed_precision.set_global_policy("float32")
        found["policies"] = apart(in_policies("sequence", rate), half)
    return found


def losses_of_fit():
    """The epoch's loss by Keras's step and by that of the mixin; the last batch is smaller."""
    random = np.random.default_rng(0)
    x, y = random.normal(size=(12, 4)), random.normal(size=(12, 2))
    found = []
    for change in (lambda model: model, with_accumulation):
        keras.utils.set_random_seed(0)
        model = change(keras.Sequential([keras.layers.Dense(2)]))  # it has no variables yet
        model.compile(keras.optimizers.SGD(0.1), "mse")
        history = model.fit(x, y, batch_size=8, shuffle=False, verbose=0)
        found.append(history.history["loss"][0])
    return found


def with_accumulation(model):
    """The model in the class of Keras's `fit` that computes each batch in two parts."""

    class Accumulated(family.gradient_accumulation.AccumulatedTraining, type(model)):
        micro_batches = 2

    model.__class__ = Accumulated
    return model


def in_policies(name, rate):
    """Weights that `fit` trains within the technique's policies."""
    model, _, x, y, loss_fn = made(name)
    precision = family.mixed_precision.MixedPrecision(model)
    to_float32 = family.mixed_precision.to_float32
    model.compile(keras.optimizers.SGD(**rate), lambda y, output: loss_fn(to_float32(output), y))
    for _ in range(2):
        with precision.policies():
            model.fit(x, y, batch_size=ROWS, shuffle=False, verbose=0)
    return [np.array(w, np.float64) for w in model.get_weights()]


def refused_loop(blocks):
    """What an LSTM's program raises in the first call, and whether a weight has moved."""
    model, optimizer, x, y, loss_fn = made("recurrent")
    before = model.get_weights()
    make = family.compilation.compiled_model_train_step
    error = raised(make(model, optimizer, loss_fn, blocks=blocks), x, y)
    return error, all(map(np.array_equal, model.get_weights(), before))


def settings():
    """What new settings do, and what they refuse before anything changes."""
    found = {"moved": {}}
    for dtype in ("float32", "bfloat16", "float16") if KERAS_3 else ():
        model, _, x, y, loss_fn = made("looked_up")
        before = [np.array(w) for w in model.get_weights()]
        optimizer = keras.optimizers.SGD(1.0)
        make = family.stacking.make_train_step
        step = make(model, optimizer, loss_fn, dtype=dtype, max_norm=0.01)
        step(x, y)
        change = [a - b for a, b in zip(model.get_weights(), before, strict=True)]
        found["moved"][dtype] = float(np.sqrt(sum(np.square(part).sum() for part in change)))
    model, optimizer, x, y, loss_fn = made("branches")
    compilation = family.compilation
    make = compilation.compiled_model_train_step
    found |= {
        "compiled": several_blocks()["compiled"],
        "replaced": several_blocks()["replaced"],
        "block": raised(make, model, optimizer, loss_fn, blocks="blok"),
        "predict": raised(compilation.compiled_predict, model, blocks="blok"),
        "loop": [refused_loop(blocks) for blocks in (("", "block") if KERAS_3 else ("",))],
    }
    inside = keras.Input((6,), dtype="int64")
    inner = keras.Model(inside, layers.Embedding(9, 4, mask_zero=True)(inside), name="inner")
    inputs = keras.Input((6,), dtype="int64")
    model = keras.Model(inputs, layers.LSTM(3)(inner(inputs)))
    if not KERAS_3:
        made_of = {
            "clipped": family.gradient_clipping.make_train_step,
            "guarded": family.finite_guard.make_train_step,
            "stacked": family.stacking.make_train_step,
            "compiled": compilation.compiled_train_step,
            "copied": lambda model, optimizer, _: impl.kit.optimizers.copy_optimizer(
                optimizer, model.trainable_variables
            ),
        }
        old = keras.optimizers.legacy.SGD(0.1)
        found["legacy"] = [raised(make, model, old, squares) for make in made_of.values()]
    predict = compilation.compiled_predict(model, blocks="inner")
    found["mask"] = raised(predict, made("looked_up")[2])
    return found


def main() -> None:
    kit.runtime.configure(threads=1, seed=0)
    # Steps know no flavour but where tf_keras refuses or has names of its own: each is tried once.
    alike = (eager, xla_model, policies, from_a_pipeline, sparse)
    lacking = () if KERAS_3 else (masks, float32, half_width, recomputed, *alike)
    scenarios = [
        masks,
        kit_step,
        float32,
        eager,
        xla,
        xla_model,
        xla_blocks,
        accumulated,
        clipped,
        stacked,
        recomputed,
        half_width,
        policies,
        from_a_pipeline,
        sparse,
        in_fit,
        settings,
    ]
    workers.report(scenario for scenario in scenarios if scenario not in lacking)


if __name__ == "__main__":
    main()
