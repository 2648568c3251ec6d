"""Frozen inference: a model that only predicts, with its weights as constants.

    predict = frozen_predict(model)  # constants, folded by grappler

What it changes: what each call computes. If weights never change, everything that depends only on
them is computed once. BatchNorm in evaluation mode is one multiplication and addition per channel,
which the convolution before it can do: its kernel is scaled, its bias shifted.
- Variables become constants. Then grappler, TensorFlow's graph optimizer, folds them and fuses
  operators.

Its twin: `pt_impl/deployment/frozen_inference.py`, which says where the frameworks differ.

When it helps and when it hurts: it helps convolutions with BatchNorm, and small models, whose
operators have more overhead than arithmetic. If weights change later, predictions are still those
of the weights at the first call.
- Nothing is compiled, so the first call is fast.

Run it alone: `python -m tf_impl.deployment.frozen_inference` prints time and first call of each.

Copy with it: `tf_impl/kit/checks/frozen_inference.py`, `tf_impl/kit/tracing.py`.
"""

import time
from collections.abc import Callable

import tensorflow as tf

from tf_impl.kit.checks.frozen_inference import freeze
from tf_impl.kit.tracing import input_tensors, trace


def frozen_predict(model: tf.keras.Model) -> Callable:
    """Return `predict(x) -> output` of the model, as a graph whose weights are constants.

    x: a tensor, or a tuple, list or dict of tensors as `fit` takes them. Weights are those at the
    first call; what the model learns later is not seen. One graph serves any number of samples;
    samples of other sizes make a new one.

    Raises, in the first call, ValueError for inputs that the model does not take;
    NotImplementedError for a model that cannot be traced, or whose variables cannot be constants.
    Source: `convert_variables_to_constants_v2`, as TensorFlow's guides have it, and grappler.
    """
    graphs: dict[tuple, Callable] = {}

    def predict(x):
        sizes = tuple((part.dtype, tuple(part.shape[1:])) for part in input_tensors(x))
        if sizes not in graphs:
            graphs[sizes] = freeze(trace(model, x))
        return graphs[sizes](x)

    predict.graphs = graphs
    return predict


def main() -> None:
    """Print the first call and the time of predictions of a CNN, plain and frozen."""
    from tf_impl.kit.demo import Demo
    from tf_impl.kit.training import make_predict

    demo = Demo("digits-cnn", batch_size=8)
    model, x = demo.build()[0], demo.batches[0][0]
    ways, first = {"plain": make_predict(model), "frozen": frozen_predict(model)}, {}
    for name, predict in ways.items():
        start = time.perf_counter()
        predict(x)
        first[name] = time.perf_counter() - start
    calls = {name: lambda x, y, run=run: run(x) for name, run in ways.items()}
    print("           first call, s  ms a batch of 8")
    for name, ms in demo.times(calls).items():
        print(f"{name:11}{first[name]:13.3f}{ms:17.3f}")


if __name__ == "__main__":
    main()
