"""What a train step of a Keras model takes on the backend that KERAS_BACKEND names.

    KERAS_BACKEND=torch python -m tf_impl.kit.keras_speed 32 < model.json

Reads the model's architecture as JSON; the argument is the batch. Prints seconds a step: of
`train_on_batch` with SGD, as Keras runs it by default on that backend.
"""

import json
import sys
from time import perf_counter

import numpy as np

UNKNOWN_AXIS = 32  # for an axis of any length
MOST_S, MOST_STEPS = 2.0, 20


def main() -> None:
    """Measure, and print one line of JSON."""
    import keras

    model = keras.models.model_from_json(sys.stdin.read())
    size = int(sys.argv[1])
    inputs = [_zeros(size, tensor) for tensor in model.inputs]
    x = inputs if len(inputs) > 1 else inputs[0]
    y = [np.zeros(np.shape(part), np.float32) for part in _list(model.predict_on_batch(x))]
    model.compile(optimizer="sgd", loss="mse")
    targets = y if len(y) > 1 else y[0]
    best, start = float("inf"), perf_counter()
    for step in range(MOST_STEPS):
        begun = perf_counter()
        model.train_on_batch(x, targets)
        if step:
            best = min(best, perf_counter() - begun)
        if step and perf_counter() - start > MOST_S:
            break
    print(json.dumps({"step_s": best}))


def _zeros(size: int, tensor) -> np.ndarray:
    """Inputs of a model's shape and dtype."""
    shape = [size, *(axis or UNKNOWN_AXIS for axis in tensor.shape[1:])]
    return np.zeros(shape, str(tensor.dtype).rpartition(".")[2])


def _list(outputs) -> list:
    return list(outputs) if isinstance(outputs, (tuple, list)) else [outputs]


if __name__ == "__main__":
    main()
