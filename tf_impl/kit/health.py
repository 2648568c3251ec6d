"""TensorFlow's facts for `twinbench doctor`: pools, products, modes, denormal numbers.

Twin: `pt_impl/kit/health.py`.
Where the frameworks differ: a pool can't be resized once TensorFlow runs. TensorFlow flushes
denormal numbers to zero. A step is a graph or eager, and `predict` of Keras has a cost a call.
"""

import gc
import sys
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from time import perf_counter

import numpy as np
import tensorflow as tf

from shared import health
from shared.health import Denormals, Mode, Predicting, Subject
from shared.user_model import RECIPE, first, leaves, made_of, pair
from tf_impl.kit import calling, operators, runtime, step_events, training, user_model

_DENORMAL = 1e-39


def version() -> str:
    """Of tensorflow."""
    return tf.__version__


def pools() -> dict[str, int]:
    """Threads by pool. What TensorFlow chooses by itself is seen by the threads that it starts."""
    threading = tf.config.threading
    intra = threading.get_intra_op_parallelism_threads()
    inter = threading.get_inter_op_parallelism_threads()
    if not intra:
        _start()
        intra = _STARTED.get("intra-op", 0)
    return {"intra-op": intra, "inter-op": inter or _STARTED.get("inter-op", 0)}


_STARTED: dict[str, int] = {}


def _start() -> None:
    """Start TensorFlow's pools, and count the threads of each by their names."""
    if _STARTED:
        return
    before = _threads()
    with tf.device("CPU:0"):
        tf.zeros((64, 64)) @ tf.zeros((64, 64))
    new = {name: n - before.get(name, 0) for name, n in _threads().items()}
    inter = sum(n for name, n in new.items() if name.startswith("tf_Compute"))
    intra = sum(n for name, n in new.items() if not name.startswith("tf_"))
    _STARTED.update({"intra-op": intra, "inter-op": inter})


def _threads() -> dict[str, int]:
    """This process's threads by name."""
    names: dict[str, int] = {}
    for path in tf.io.gfile.glob("/proc/self/task/*/comm"):
        with open(path) as file:
            name = file.read().strip()
        names[name] = names.get(name, 0) + 1
    return names


def product(*, dtype: str, size: int, seconds: float) -> float:
    """FLOP/s of a product."""
    return runtime.matmul_flops(size=size, dtype=dtype, seconds=seconds)


def product_with(*, threads: int, size: int, seconds: float) -> float | None:
    """None: a pool can't be resized."""
    return None


def without_onednn() -> float | None:
    """Seconds of `convolution`, where TensorFlow computes it without oneDNN."""
    return None if runtime.onednn() else convolution()


def convolution() -> float:
    """Seconds of a convolution with its gradients: 16 samples, 32 by 32 pixels, 64 channels."""
    shape = (16, 32, 32, 64, 3, 3, 64, 64, 1, 1, 1, 1, 1)
    return step_events.convolution_seconds(shape, dtype="float32", train=True, seconds=0.3)


def subject(module) -> Subject:
    """What a file trains. Raises BadFile where it has nothing of TensorFlow."""
    if hasattr(module, "make"):
        step, batches = made_of(module)
        return Subject(_models(), step, lambda: batches, keras=_json(_models()))
    model, loss, *optimizer = module.tensorflow()
    turned = partial(_targets_first, loss) if isinstance(loss, tf.keras.losses.Loss) else loss
    make = optimizer[0] if optimizer else training.make_optimizer(model, RECIPE)
    batches = health.batches_of(module, "tf")
    if not model.built:
        x, _ = on_device(next(iter(batches())))
        arguments, named = calling.call_arguments(model, x)
        model(*arguments, **named)
    step = training.make_train_step(model, make, turned)
    return Subject([model], step, batches, on_device, _json([model]))


def on_device(batch) -> tuple:
    """x and y of a batch of a file for `try`."""
    return user_model.to_device(*pair(batch, "batches"))


def _targets_first(loss: Callable, output, y):
    return loss(y, output)


def _models() -> list:
    """The models of Keras that are alive, without those that are a part of another."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of lazy modules that are only looked at
        every = [one for one in gc.get_objects() if isinstance(one, tf.keras.Model)]
    parts = {id(part) for one in every for part in one._flatten_layers(include_self=False)}
    return [one for one in every if id(one) not in parts]


def _json(models: list) -> str:
    """The architecture of the first model, where Keras can write it."""
    try:
        return models[0].to_json() if models else ""
    except Exception:  # a class of the user's
        return ""


def denormals(given: Subject, arguments) -> Denormals:
    """Denormal numbers in the weights, and what a product takes with such numbers and others."""
    weights = (np.asarray(weight) for model in given.models for weight in model.weights)
    share = health.denormal_share(weights)
    if not share:
        return Denormals(share, 0.0, 0.0, 0.0, "product")
    size = health.PRODUCT
    ordinary = tf.random.normal((size, size))
    tiny = tf.constant(np.full((size, size), _DENORMAL, np.float32))
    product = tf.function(tf.linalg.matmul)
    times = health.in_turns(lambda: product(tiny, ordinary), lambda: product(ordinary, ordinary))
    return Denormals(share, 0.0, *times, "product")


def modes(given: Subject, arguments) -> Iterator[Mode]:
    """Settings of the file that make its steps eager."""
    eager = _runs_eagerly(given, arguments)
    kept = [model for model in given.models if getattr(model, "run_eagerly", False)]
    if not eager and not kept:
        return
    x = arguments[0]
    step = partial(given.step, *arguments)
    if not eager:  # Keras's own fit would be
        model = kept[0]
        step = partial(calling.call, model, x)
    everywhere = tf.config.functions_run_eagerly()
    (slow,) = health.in_turns(step)
    tf.config.run_functions_eagerly(False)
    for model in kept:
        model.run_eagerly = False
        model.train_function = model.test_function = model.predict_function = None
    try:
        again = eager and _runs_eagerly(given, arguments)
        (fast,) = health.in_turns(tf.function(step) if again or not eager else step)
    except Exception:  # what can't be traced
        fast = None
    tf.config.run_functions_eagerly(everywhere)
    for model in kept:
        model.run_eagerly = True
        model.train_function = model.test_function = model.predict_function = None
    yield Mode("run_eagerly" if kept or everywhere else "eager step", slow, fast)


def _runs_eagerly(given: Subject, arguments) -> bool:
    """Whether a later step runs a model's `call` in Python, and not as a graph."""
    seen = []

    def watched(model) -> Callable:
        call = model.call

        def eager(*inputs, **named):
            seen.append(tf.executing_eagerly())
            return call(*inputs, **named)

        return eager

    given.step(*arguments)
    calls = {id(model): model.call for model in given.models}
    for model in given.models:
        model.call = watched(model)
    try:
        given.step(*arguments)
    finally:
        for model in given.models:
            model.call = calls[id(model)]
    return any(seen)


def predicting(given: Subject, arguments, in_a_loop: bool) -> Predicting | None:
    """What `predict` takes a call, where the step calls it or the file does so in a loop."""
    asked = []  # the model, its inputs and seconds of each call
    for model in given.models:
        model.predict = partial(_noted, asked, model, model.predict)
    given.step(*arguments)
    asked.clear()
    given.step(*arguments)
    for model in given.models:
        del model.predict
    if not asked and in_a_loop and given.models:
        model, x = given.models[0], arguments[0]
        numpy = tf.nest.map_structure(np.asarray, x)
        model.predict(numpy, verbose=0)
        _noted(asked, model, model.predict, numpy, verbose=0)
    if not asked:
        return None
    model, x, _ = asked[0]
    direct = tf.function(partial(calling.call, model))
    x = tf.nest.map_structure(tf.convert_to_tensor, x)
    (direct_s,) = health.in_turns(lambda: first(direct(x)).numpy())
    size = len(leaves(x)[0])
    return Predicting(size, min(seconds for *_, seconds in asked), direct_s)


def _noted(asked: list, model, predict: Callable, x, *arguments, **named):
    """Call `predict`, and note what it was given and how long it took."""
    start = perf_counter()
    answer = predict(x, *arguments, **named)
    asked.append((model, x, perf_counter() - start))
    return answer


def rows_by_python(loader) -> str:
    """The Python function that a `tf.data` pipeline calls for each row before it makes batches."""
    if not isinstance(loader, tf.data.Dataset):
        return ""
    variant = tf.data.experimental.to_variant(loader)
    graph = tf.compat.v1.GraphDef.FromString(
        tf.raw_ops.DatasetToGraphV2(input_dataset=variant).numpy()
    )
    batched = any("Batch" in node.op for node in graph.node)
    inside = [node.op for function in operators.functions(graph) for node in function.node_def]
    python = any(op in ("PyFunc", "EagerPyFunc", "PyFuncStateless") for op in inside)
    return "a Python function within tf.data" if batched and python else ""


if __name__ == "__main__":
    health.run(sys.modules[__name__], __doc__)
