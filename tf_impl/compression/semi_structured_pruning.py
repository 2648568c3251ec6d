"""Semi-structured pruning: two zeros in each four weights, the pattern of sparse tensor cores.

What it changes: of each four weights of a dense or convolution kernel that read neighbouring inputs
the two of smaller magnitude are masked, once, and stay masked while the model trains on (Mishra et
al., 2021, "Accelerating Sparse Deep Neural Networks", section 4: train, prune once, train again
from these weights with the same recipe). Of a group that the inputs do not fill two weights stay:
a kernel of three inputs loses a third, one of two or fewer loses nothing.

Its twin: `pt_impl/compression/semi_structured_pruning.py`.

Where the frameworks differ and why:
- There are two routes here. In Keras 3, which has no pruning of its own, the layers' `call` reads
  masked kernels, in any model that can be copied; gradients are masked too, as by
  `torch.nn.utils.prune`. In tf_keras TensorFlow Model Optimization (tfmot) masks variables in the
  forward pass, of functional and Sequential models: steps move masked weights, the next forward
  pass sets them to zero again.
- A GPU multiplies the pattern at up to twice the speed: in PyTorch through
  `torch.sparse.to_sparse_semi_structured`. TensorFlow has no kernels for it; its converters keep
  the zeros.

When it helps and when it hurts: half of the weights by a rule that hardware can use, which costs
less accuracy than channels do and more than free choice of the same number. On a CPU it buys
nothing: kernels stay dense tensors.

Run it alone: `python -m tf_impl.compression.semi_structured_pruning` prints the dense model against
the masked.

Copy with it: `tf_impl/kit/copying.py`.
"""

from collections import Counter
from collections.abc import Iterator
from inspect import isfunction, signature

import numpy as np
import tensorflow as tf

from tf_impl.kit import copying


def apply_two_to_four(model: tf.keras.Model) -> tf.keras.Model:
    """Return a copy of `model` that trains and predicts with two of each four weights masked.

    Masked are `Dense` and `Conv2D` without groups, by their present weights, and of these types
    exactly: a subclass may use its kernel in another way. Make the optimizer for the copy; `model`
    stays as it is. Finalize the copy before it is exported or saved.

    Raises ValueError for a model without variables, one that is masked already and one without such
    layers; NotImplementedError for a kernel that two layers share, a model that Keras can't copy (a
    subclassed one), and in tf_keras where tfmot can't follow: a layer that runs twice in a forward
    pass, such layers within others.
    Source: Mishra et al. (2021); `tfmot.sparsity.keras.prune_low_magnitude`, `sparsity_m_by_n`.
    """
    layers = _prunable(model)
    if not _is_tf_keras():
        masked = copying.copy_model(model)
        for layer in _prunable(masked):
            layer.call = _MaskedCall(layer)
        copying.retrace(masked)
        return masked
    _check_calls(model, layers)
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
        wrapped.append(
            sparsity.prune_low_magnitude(
                copies[layer], pruning_schedule=once, sparsity_m_by_n=(2, 4)
            )
        )
        return wrapped[-1]

    masked = tf.keras.models.clone_model(model, clone_function=copy)
    copying.copy_state(list(copies.items()))
    for wrapper in wrapped:
        wrapper.pruning_step.assign(1)  # where the schedule begins and ends; training counts on
        wrapper.pruning_obj.conditional_mask_update()
        wrapper.pruning_obj.weight_mask_op()
    return masked


def finalize_two_to_four(model: tf.keras.Model) -> tf.keras.Model:
    """Set what is masked to zero and return a model without masks over the same variables.

    Raises ValueError for a model without masks.
    """
    layers = [layer for layer in model._flatten_layers() if _has_mask(layer)]
    if not layers:
        raise ValueError("the model has no masks: it comes from apply_two_to_four, and only once")
    if _is_tf_keras():
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
    copying.retrace(model)
    for traced in ("train_function", "test_function", "predict_function"):  # by `fit`, with masks
        setattr(model, traced, None)
    return model


class _MaskedCall:
    """A layer's `call` over its kernel times a mask: for this call alone, its gradient too.

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


def _is_tf_keras() -> bool:
    return tf.keras.Model.__module__.partition(".")[0] == "tf_keras"


def _has_mask(layer) -> bool:
    """Whether it is wrapped by tfmot, or its `call` masks."""
    return hasattr(layer, "pruning_obj") or isinstance(vars(layer).get("call"), _MaskedCall)


def _prunable(model: tf.keras.Model) -> list:
    """The dense and 2-D convolution layers; raise where they can't be pruned."""
    subclassed = not (isinstance(model, tf.keras.Sequential) or getattr(model, "inputs", None))
    if subclassed and _is_tf_keras():
        raise NotImplementedError("tfmot prunes functional and Sequential models, not subclassed")
    if subclassed:
        raise NotImplementedError("a subclassed model says nothing of its inputs to copy it with")
    if not model.built:
        raise ValueError("the model has no variables yet: call it once on an example input")
    if any(_has_mask(layer) for layer in model._flatten_layers()):
        raise ValueError("the model has pruning masks already: finalize it first")
    kinds = (tf.keras.layers.Dense, tf.keras.layers.Conv2D)
    layers = [layer for layer in model._flatten_layers() if type(layer) in kinds]
    found = [layer for layer in layers if getattr(layer, "groups", 1) == 1]
    if not found:
        raise ValueError("the model has no Dense or Conv2D to prune")
    owners = Counter(id(w) for layer in model._flatten_layers() for w in _own_weights(layer))
    for layer in found:
        if getattr(layer, "lora_enabled", False) or getattr(layer, "quantization_mode", None):
            raise NotImplementedError(f"{layer.name!r} makes its kernel of others (LoRA, integers)")
        if owners[id(layer.kernel)] > 1:
            raise NotImplementedError(f"the kernel of {layer.name!r} has two owners")
    return found


def _own_weights(layer) -> list:
    """A layer's weights, not those of layers within it."""
    kept = getattr(layer, "_trainable_variables", None)  # Keras 3
    return list(kept if kept is not None else layer._trainable_weights)


def _check_calls(model: tf.keras.Model, layers: list) -> None:
    """Raise where tfmot can't prune the layers."""
    calls = Counter(_calls(model))
    for layer in layers:
        if calls[layer] != 1:
            where = "runs more than once" if calls[layer] else "is within another layer"
            raise NotImplementedError(
                f"tfmot prunes what a functional model runs once a step, but {layer.name!r} {where}"
            )


def _calls(model: tf.keras.Model) -> Iterator:
    """The layers that a forward pass calls, with those of models within the model."""
    for level in model._nodes_by_depth.values():
        for node in level:
            yield node.layer
            if getattr(node.layer, "_is_graph_network", False):
                yield from _calls(node.layer)


def main() -> None:
    """Print the digits CNN trained to its plateau, and from there on dense and masked."""
    import tempfile
    from pathlib import Path

    from shared import datasets
    from shared.specs import TASKS
    from shared.weights import init_weights
    from tf_impl.kit import data, models, training

    task = TASKS["digits-cnn"]
    recipe, size = task.recipe, task.recipe.accuracy_batch_size
    with tempfile.TemporaryDirectory() as folder:
        folder = datasets.materialise(task.dataset, Path(folder))
        train = data.to_device(*datasets.load(folder, "train"))
        test = data.to_device(*datasets.load(folder, "test"))
    weights = init_weights(task.model, seed=0)
    print("model        accuracy  zeros in all kernels")
    for name in ("trained", "dense", "two of four"):
        model = models.build(task.model, weights)
        if name == "two of four":
            model = apply_two_to_four(model)
        optimizer = training.make_optimizer(model, recipe)
        step = training.make_train_step(model, optimizer, training.cross_entropy)
        training.fit(step, *train, batch_size=size, epochs=recipe.epochs, seed=0)
        if name == "two of four":
            model = finalize_two_to_four(model)
        predict = training.make_predict(model)
        accuracy = training.evaluate(predict, *test, metric="accuracy", batch_size=size)
        kernels = [v for k, v in models.export_weights(model).items() if k.endswith("kernel")]
        zeros = sum((k == 0).sum() for k in kernels) / sum(k.size for k in kernels)
        print(f"{name:12}{accuracy:9.1f}{zeros:22.3f}")
        if name == "trained":
            weights = models.export_weights(model)


if __name__ == "__main__":
    main()
