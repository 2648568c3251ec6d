"""Keras 3 on TensorFlow: one Keras model, trained and run by Keras on either backend.

    compile_keras(model, optimizer, loss_fn)
    step, predict = make_train_step(model), make_predict(model)  # or model.fit, model.predict

What it changes: model, optimizer, loss and loop are Keras's, and the backend computes.
`get_weights` and `set_weights`, or a file of `save_weights`, move weights from one backend to the
other. Nothing has to be transposed.

Its twin: `pt_impl/train_step/keras_backend.py`, which says where the frameworks differ.

When it helps and when it hurts: it helps if one source has to run in both frameworks.
- It costs a fixed time per step: data is handed over, metrics are kept, the host reads the loss.
  Small models feel that and large ones do not.

Run it alone: `python -m tf_impl.train_step.keras_backend` compares the native step with Keras's.

Copy with it: `shared/keras_backend.py`.
"""

from collections.abc import Callable

import keras
import numpy as np

from shared.keras_backend import check_compiled, check_keras_backend


def compile_keras(
    model: keras.Model,
    optimizer: keras.Optimizer,
    loss_fn: keras.losses.Loss,
    *,
    compiled: bool = False,
) -> keras.Model:
    """Give Keras the optimizer and the loss; return the model, changed.

    Args:
        model: a Keras 3 model on this backend.
        optimizer, loss_fn: Keras's; the loss may be a function (y, output), too.
        compiled: with XLA. Else as Keras does it by default: on a CPU a graph that is not compiled.

    Raises:
        ValueError: it is no Keras 3 model, or one on another backend.
        NotImplementedError: a layer of it can't be compiled.
    """
    check_keras_backend(model, "tensorflow")
    model.compile(optimizer=optimizer, loss=loss_fn, jit_compile=compiled or "auto")
    if compiled:
        check_compiled(model)
    return model


def make_train_step(model: keras.Model) -> Callable:
    """Make step(x, y) -> loss by `train_on_batch`: one update; the loss is read on the host.

    x: what the model takes; y: what its loss takes. Source: keras.io, "Model training APIs".
    """

    def step(x, y):
        return np.float64(model.train_on_batch(x, y))

    return step


def make_predict(model: keras.Model) -> Callable:
    """Make predict(x) -> NumPy array by `predict_on_batch`: one batch in evaluation mode.

    `predict` is for many batches: it makes an iterator and calls callbacks.
    """

    def predict(x):
        return model.predict_on_batch(x)

    return predict


def main() -> None:
    """Print the native step and Keras's on the digits CNN."""
    from tf_impl.kit import keras_models, training
    from tf_impl.kit.demo import Demo

    demo = Demo("digits-cnn", batch_size=32)
    model, optimizer, loss_fn = demo.build()
    steps = {"native": training.make_train_step(model, optimizer, loss_fn)}
    model, optimizer, _ = demo.build()
    compile_keras(model, optimizer, keras_models.cross_entropy())
    steps["keras"] = make_train_step(model)
    for name, ms in demo.times(steps, rounds=10).items():
        print(f"{name:10}{ms:8.2f} ms a step")


if __name__ == "__main__":
    main()
