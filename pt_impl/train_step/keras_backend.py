"""Keras 3 on PyTorch: one Keras model, trained and run by Keras on either backend.

    # Import this before Keras: it sets KERAS_BACKEND to "torch".
    compile_keras(model, optimizer, loss_fn)
    step, predict = make_train_step(model), make_predict(model)  # or model.fit, model.predict

What it changes: model, optimizer, loss and loop are Keras's, and the backend computes.
`get_weights` and `set_weights`, or a file of `save_weights`, move weights from one backend to the
other. Nothing has to be transposed.

Its twin: `tf_impl/train_step/keras_backend.py`.

Where the frameworks differ and why:
- Keras runs a step eagerly on PyTorch, and as a graph (`tf.function`) on TensorFlow. By default it
  compiles with XLA on TensorFlow with a GPU, and never on PyTorch.
- `compiled=True` on PyTorch: `torch.compile` of Keras's step, with graph breaks at
  `loss.backward()` and wherever Keras's own code can't be traced. On TensorFlow: one program of the
  step by XLA.
- Keras keeps images and kernels in TensorFlow's layout on either backend. On PyTorch each
  convolution gets transposed views of them.
- On PyTorch, Keras's BatchNorm in training is several operators. `nn.BatchNorm2d` is one kernel.
- A Keras model on PyTorch is an `nn.Module`, but the argument `training` of a call sets its mode.
  `model.eval()` has no effect on its layers.
- TensorFlow is the default backend: KERAS_BACKEND need not be set.

When it helps and when it hurts: it helps if one source has to run in both frameworks.
- It helps if a PyTorch program has to use a Keras model.
- It costs Keras's Python code in each layer and step, and Keras does not call all of PyTorch's
  kernels. This matters for small models, not for large ones.

Run it alone: `python -m pt_impl.train_step.keras_backend` compares the native step with Keras's.

Copy with it: `shared/keras_backend.py`.
"""

import os
from collections.abc import Callable

import numpy as np

from shared.keras_backend import check_compiled, check_keras_backend

os.environ["KERAS_BACKEND"] = "torch"  # before Keras is imported

import keras


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
        compiled: with `torch.compile`. Else as Keras does it by default, eagerly.

    Raises:
        ValueError: it is no Keras model, or one on another backend.
        NotImplementedError: a layer of it can't be compiled.
    """
    check_keras_backend(model, "torch")
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
    from pt_impl.kit import keras_models, training
    from pt_impl.kit.demo import Demo
    from shared.weights import init_weights

    demo = Demo("digits-cnn", batch_size=32)
    model, optimizer, loss_fn = demo.build()
    steps = {"native": training.make_train_step(model, optimizer, loss_fn)}
    spec, recipe = demo.task.model, demo.task.recipe
    model = keras_models.build(spec, init_weights(spec, seed=0))
    optimizer = keras_models.make_optimizer(model, recipe)
    compile_keras(model, optimizer, keras_models.cross_entropy())
    keras_step = make_train_step(model)
    steps["keras"] = lambda x, y: keras_step(keras_models.images(x), y)
    for name, ms in demo.times(steps, rounds=10).items():
        print(f"{name:10}{ms:8.2f} ms a step")


if __name__ == "__main__":
    main()
