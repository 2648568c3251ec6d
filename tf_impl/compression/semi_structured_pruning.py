"""Semi-structured pruning: two zeros in every four weights, the pattern of sparse tensor cores.

    model = apply_two_to_four(model)  # a trained one; train it again, with an optimizer for it
    model = finalize_two_to_four(model)

What it changes: four weights of neighbouring inputs form a group. The two smaller ones become zero,
and stay zero while the model trains on (Mishra et al., 2021, section 4: train, prune once, train
again with the same recipe). In a group of fewer weights two stay: a kernel with three inputs loses
a third, one with two inputs nothing.

Its twin: `pt_impl/compression/semi_structured_pruning.py`, which says where the frameworks differ.

When it helps and when it hurts: it helps on hardware that can use the pattern. It costs less
accuracy than removing channels, and more than the same number of freely chosen zeros. On a CPU it
gains nothing: kernels stay dense tensors.

Run it alone: `python -m tf_impl.compression.semi_structured_pruning` compares the dense with the
masked model.

Copy with it: `tf_impl/kit/checks/semi_structured_pruning.py`, `tf_impl/kit/copying.py`.
"""

from inspect import isfunction, signature

import numpy as np
import tensorflow as tf

from tf_impl.kit.checks.semi_structured_pruning import (
    check_masked,
    check_semi_structured_pruning,
    is_tf_keras,
    prunable,
)
from tf_impl.kit.copying import copy_model, copy_state, retrace


def apply_two_to_four(model: tf.keras.Model) -> tf.keras.Model:
    """Return a copy of `model` that trains and predicts with two of each four weights masked.

    Masked are `Dense` and `Conv2D` without groups, by their present weights, and of these types
    exactly: a subclass may use its kernel in another way. Make the optimizer for the copy; `model`
    stays as it is. Finalize the copy before it is exported or saved.

    Raises ValueError for a model without variables, one that is masked already and one without such
    layers; NotImplementedError for a kernel that two layers share, a subclassed model, and in
    tf_keras for a layer that runs twice in a forward pass and such layers within others.
    Source: Mishra et al., 2021, "Accelerating Sparse Deep Neural Networks"; in tf_keras
    `tfmot.sparsity.keras.prune_low_magnitude`, `sparsity_m_by_n`.
    """
    layers = check_semi_structured_pruning(model)
    if is_tf_keras():
        return _wrap(model, layers)
    masked = copy_model(model)
    for layer in prunable(masked):
        layer.call = _MaskedCall(layer)
    retrace(masked)
    return masked


def _wrap(model: tf.keras.Model, layers: list) -> tf.keras.Model:
    """Return a copy whose layers tfmot wraps, with masks from the beginning; in tf_keras."""
    sparsity = _tfmot().sparsity.keras
    once = sparsity.ConstantSparsity(0.5, begin_step=1, end_step=1, frequency=1)
    copies, wrapped = {}, []

    def copy(layer):
        if isinstance(layer, tf.keras.Model):
            return tf.keras.models.clone_model(layer, clone_function=copy)
        config = layer.get_config()
        if "activation" in config and isfunction(getattr(layer, "activation", None)):
            config["activation"] = layer.activation  # others may have its name
        copies[layer] = layer.__class__.from_config(config)
        if layer not in layers:
            return copies[layer]
        # The wrapper calls the layer's `call`, which leaves this regularizer to `__call__`.
        kept = {"activity_regularizer": layer.activity_regularizer, "sparsity_m_by_n": (2, 4)}
        wrapped.append(sparsity.prune_low_magnitude(copies[layer], pruning_schedule=once, **kept))
        return wrapped[-1]

    masked = tf.keras.models.clone_model(model, clone_function=copy)
    copy_state(list(copies.items()))
    for wrapper in wrapped:
        wrapper.pruning_step.assign(1)  # where the schedule begins and ends; training counts on
        wrapper.pruning_obj.conditional_mask_update()
        wrapper.pruning_obj.weight_mask_op()
    return masked


def finalize_two_to_four(model: tf.keras.Model) -> tf.keras.Model:
    """Set what is masked to zero and return a model without masks over the same variables.

    Raises ValueError for a model without masks.
    """
    layers = check_masked(model)
    if is_tf_keras():
        sparsity = _tfmot().sparsity.keras
        callback = sparsity.UpdatePruningStep()
        callback.set_model(model)
        callback.on_train_begin()  # finds the layers
        callback.on_epoch_end(-1)  # the last step has moved masked weights: mask them once more
        return sparsity.strip_pruning(model)
    for layer in layers:
        layer.kernel.assign(layer.kernel * layer.call.mask)
        layer.kernel.constraint = layer.call.constraint
        del layer.call
    retrace(model)
    for traced in ("train_function", "test_function", "predict_function"):  # by `fit`, with masks
        setattr(model, traced, None)
    return model


class _MaskedCall:
    """A layer's `call` over its kernel times a mask: for this call only, its gradient too.

    The kernel has the zeros as well, by a constraint: others may read it without this call.
    """

    def __init__(self, layer):
        self.call = layer.call
        self.kernel = layer.kernel
        mask = _two_of_four(np.array(layer.kernel))
        self.mask = tf.Variable(mask, trainable=False)  # a checkpoint has it, too
        self.__signature__ = signature(layer.call)
        self.constraint = layer.kernel.constraint
        layer.kernel.constraint = self.constrained
        layer.kernel.assign(layer.kernel * self.mask)

    def constrained(self, kernel):
        kernel = kernel * self.mask
        return kernel if self.constraint is None else self.constraint(kernel) * self.mask

    def __call__(self, *args, **kwargs):
        kernel = tf.convert_to_tensor(self.kernel.value)  # in the layer's compute dtype
        masked = kernel * tf.cast(self.mask, kernel.dtype)
        with tf.keras.StatelessScope(state_mapping=[(self.kernel, masked)]):
            return self.call(*args, **kwargs)


def _two_of_four(kernel: np.ndarray) -> np.ndarray:
    """A mask that keeps the larger two of each four along the inputs; of equal ones the first."""
    magnitude = np.moveaxis(np.abs(kernel), -2, -1)
    inputs = magnitude.shape[-1]
    fill = [(0, 0)] * (magnitude.ndim - 1) + [(0, -inputs % 4)]
    groups = np.pad(magnitude, fill).reshape(*magnitude.shape[:-1], -1, 4)
    order = np.argsort(-groups, axis=-1, kind="stable")
    mask = np.ones_like(groups)
    np.put_along_axis(mask, order[..., 2:], 0.0, axis=-1)
    return np.moveaxis(mask.reshape(*magnitude.shape[:-1], -1)[..., :inputs], -1, -2).copy()


def _tfmot():
    """Import it: late, since it takes seconds and chooses the Keras of an undecided process."""
    import tensorflow_model_optimization as tfmot

    return tfmot


def main() -> None:
    """Print the digits CNN trained to its plateau, and from there on dense and masked."""
    from tf_impl.kit import training
    from tf_impl.kit.demo import Demo

    demo = Demo("digits-cnn")
    recipe = demo.task.recipe
    model, optimizer, loss_fn = demo.build()
    demo.fit(training.make_train_step(model, optimizer, loss_fn), epochs=recipe.epochs)
    print(f"trained     {demo.score(model):6.1f}")
    masked = apply_two_to_four(model)
    for name, own in (("dense", model), ("two of four", masked)):
        step = training.make_train_step(own, training.make_optimizer(own, recipe), loss_fn)
        demo.fit(step, epochs=recipe.epochs)
        print(f"{name:12}{demo.score(own):6.1f}")
    finalize_two_to_four(masked)


if __name__ == "__main__":
    main()
