"""Regularization: weight decay, label smoothing, dropout, and what BatchNorm does beside its work.

What it changes: what a step minimizes beside the loss, and so what the model can learn by heart.

- L2 in the loss: `l2_penalty`, weight_decay / 2 times the sum of squares, whose gradient is
  weight_decay times the weight. With plain SGD that is decay: each step takes rate x weight_decay
  of the weight away.
- Decoupled decay (Loshchilov and Hutter, 2019, "Decoupled Weight Decay Regularization"): the step
  takes the same share away beside the gradient. Under Adam the two are not the same: a penalty's
  gradient goes through the moments and is divided by the root of the second one, so that weights
  with large gradients decay less; in the extreme only its sign counts.
- Decay for kernels alone: a bias or a scale of normalisation has nothing to overfit with, and an
  embedding that a batch does not touch should not shrink (He et al., 2019, "Bag of Tricks",
  section 3.1: no bias decay). Each can be taken in.
- `scale_decay`: a share a step is one an epoch only for one batch size. At the same rate, a batch
  of k times the nominal one takes k times fewer steps, and wants k times the decay. Not where the
  rate is scaled with the batch, too: the share is their product.
- Label smoothing (Szegedy et al., 2016, "Rethinking the Inception Architecture", section 7).
- Dropout (Srivastava et al., 2014) before the head of a model that has none, and the rate of what
  there is.
- BatchNorm is a regularizer beside its work: a sample's output depends on its companions in the
  batch, which is noise of 1 / batch size (Luo et al., 2019, "Towards Understanding Regularization
  in Batch Normalization"). To see it: compare the loss of one batch in training mode with that in
  evaluation mode, and train with half and twice the batch. Nothing has to be switched on.

Its twin: `pt_impl/recipes/regularization.py`.

Where the frameworks differ and why:
- Every Keras optimizer decouples its `weight_decay`, SGD as well: with momentum that is not
  PyTorch's SGD, whose buffer takes the decay in. PyTorch's `Adam` means L2 by the same word.
- The optimizer is told what not to decay before it is built (`exclude_from_weight_decay`). PyTorch
  has parameter groups, which may be set at any time.
- Kernels are called kernels. `Linear.weight` and an embedding's are both `weight` in PyTorch, where
  the module tells them apart.
- Keras smooths one-hot labels alone (`CategoricalCrossentropy(label_smoothing=...)`); this takes
  sparse ones, as `F.cross_entropy` does.
- Keras's `regularizers.L2(l)` is l times the sum, without the half: give it weight_decay / 2. It is
  given when a layer is made; this takes any model.
- Dropout before the head is in a new model over the same layers, as a Keras model is a graph; a
  subclassed one is refused: its `call` has to say it. PyTorch hooks it in.
- A traced step keeps the rates that it was traced with: set them first. PyTorch reads them in every
  call.

When it helps and when it hurts: all of it helps where training and validation part: few labels,
many epochs, large models. Where a model does not yet fit its training data, all of it hurts. Decay
in front of BatchNorm does not shrink the function, as the scale is divided out: it raises the
effective rate (van Laarhoven, 2017). Smoothed labels make probabilities too timid on purpose, and
are poor teachers for distillation (Müller et al., 2019). Dropout before BatchNorm shifts its
variance between training and inference (Li et al., 2019): it belongs behind the last one.

Run it alone: `python -m tf_impl.recipes.regularization` prints training beside validation.

Copy with it: nothing.
"""

import math
from collections.abc import Callable
from itertools import pairwise

import tensorflow as tf

Optimizer = tf.keras.optimizers.Optimizer


def decayed_parameters(
    model: tf.keras.Model, *, biases: bool = False, norms: bool = False, embeddings: bool = False
) -> list[str]:
    """The names of the parameters that decay: kernels, and what is asked for.

    Kernels are what Keras's layers call so. Frozen parameters never decay, nor do those that are
    none of these: class tokens, positions, slopes.
    """
    wanted = {"kernel", *_asked(biases, norms, embeddings)}
    kinds = _kinds(model)
    return [_name(v) for v in model.trainable_variables if kinds.get(id(v)) in wanted]


def l2_penalty(
    model: tf.keras.Model,
    *,
    weight_decay: float,
    biases: bool = False,
    norms: bool = False,
    embeddings: bool = False,
) -> tf.Tensor:
    """Return weight_decay / 2 times the sum of squares of what decays, to be added to a loss."""
    _check_decay(weight_decay)
    wanted = {"kernel", *_asked(biases, norms, embeddings)}
    kinds = _kinds(model)
    decayed = [v for v in model.trainable_variables if kinds.get(id(v)) in wanted]
    if not decayed:
        raise ValueError("the model has nothing that decays (or was not called yet)")
    widest = tf.float64 if all(v.dtype == "float64" for v in decayed) else tf.float32
    squares = [tf.reduce_sum(tf.square(tf.cast(v, widest))) for v in decayed]
    return weight_decay / 2 * tf.add_n(squares)


def make_penalized_loss(
    loss_fn: Callable,
    model: tf.keras.Model,
    *,
    weight_decay: float,
    biases: bool = False,
    norms: bool = False,
    embeddings: bool = False,
) -> Callable:
    """Return `loss(output, y)`: the given one and the penalty, for any step that takes a loss."""
    settings = {"biases": biases, "norms": norms, "embeddings": embeddings}
    l2_penalty(model, weight_decay=weight_decay, **settings)  # refuses at once what it refuses

    def penalized(output, y) -> tf.Tensor:
        return loss_fn(output, y) + l2_penalty(model, weight_decay=weight_decay, **settings)

    return penalized


def apply_decoupled_decay(
    model: tf.keras.Model,
    optimizer: Optimizer,
    *,
    weight_decay: float,
    biases: bool = False,
    norms: bool = False,
    embeddings: bool = False,
) -> list[str]:
    """Let the optimizer take rate x weight_decay of kernels away each step, and of nothing else.

    What is frozen decays once it trains. Returns the names of what decays now. Raises ValueError
    for a model that was not called yet and an optimizer that is built: Keras wants to be told
    before.
    """
    _check_decay(weight_decay)
    holder = getattr(optimizer, "inner_optimizer", optimizer)  # of a LossScaleOptimizer
    if getattr(holder, "built", False) or getattr(holder, "_built", False):
        raise ValueError("the optimizer is built: set the decay before the first step")
    names = decayed_parameters(model, biases=biases, norms=norms, embeddings=embeddings)
    if not names:
        raise ValueError("the model has nothing that decays (or was not called yet)")
    holder.weight_decay = weight_decay
    if hasattr(holder, "adam_weight_decay"):  # of Muon, for all that is no matrix
        holder.adam_weight_decay = weight_decay
    wanted, kinds = {"kernel", *_asked(biases, norms, embeddings)}, _kinds(model)
    left = [v for v in model.weights if kinds.get(id(v)) not in wanted]
    holder.exclude_from_weight_decay(var_list=left)
    return names


def scale_decay(*, weight_decay: float, batch_size: int, nominal_batch_size: int = 64) -> float:
    """Return the decay for `batch_size` where `weight_decay` is right for the nominal one.

    The share that an epoch takes away is then the same, at the same rate. batch_size: of a whole
    update, so times the accumulated batches and the replicas.
    """
    if batch_size < 1 or nominal_batch_size < 1:
        raise ValueError(f"batch sizes are 1 or more, not {batch_size}, {nominal_batch_size}")
    return weight_decay * batch_size / nominal_batch_size


def smoothed_cross_entropy(logits, labels: tf.Tensor, *, smoothing: float = 0.1) -> tf.Tensor:
    """Mean cross-entropy with 1 - smoothing of the target on the label, the rest on all classes.

    logits (..., classes); labels integers of the leading shape, each a class: PyTorch leaves -100
    out. float32.
    """
    _check_share(smoothing, "smoothing")
    logits = tf.cast(logits, tf.float32)
    own = tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits)
    # The mean of -log p over all classes, without a one-hot target as large as the logits.
    all_classes = -tf.reduce_mean(tf.nn.log_softmax(logits), axis=-1)
    return tf.reduce_mean((1 - smoothing) * own + smoothing * all_classes)


def add_dropout(model: tf.keras.Model, *, rate: float, head: str = "") -> tf.keras.Model:
    """Return a model over the same layers with dropout before the head.

    head: the name of its layer; without one, the last `Dense`. What follows the head must be one
    layer after the other. Raises ValueError where there is no head, the last `Dense` is within a
    layer (name that), or dropout is before it already, NotImplementedError for a model that is no
    graph of layers.
    """
    _check_share(rate, "rate")
    layers = list(model.layers)
    named = [layer for layer in layers if layer.name == head] if head else []
    dense = [layer for layer in layers if isinstance(layer, tf.keras.layers.Dense)]
    found = named or ([] if head else dense)
    if not found:
        raise ValueError(f"no head {head!r}: name the layer before which dropout is to stand")
    at = layers.index(found[-1])
    for layer in [] if head else layers[at + 1 :]:
        inner = layer._flatten_layers(include_self=False)
        if any(isinstance(each, tf.keras.layers.Dense) for each in inner):
            raise ValueError(f"the last Dense is within {layer.name}: name the head")
    if at and isinstance(layers[at - 1], tf.keras.layers.Dropout):
        raise ValueError(f"{found[-1].name} has dropout before it: use set_dropout_rate")
    dropout = tf.keras.layers.Dropout(rate)
    if isinstance(model, tf.keras.Sequential):
        return _sequential(model, layers, at, dropout)
    return _functional(model, layers[at:], dropout)


def set_dropout_rate(model: tf.keras.Model, *, rate: float) -> list[str]:
    """Set the rate of every dropout that is on (rate above 0), in place; return their names.

    Also of attention, not within recurrent layers. Before a step is traced. Raises ValueError where
    there is none.
    """
    _check_share(rate, "rate")
    layers, found = tf.keras.layers, []
    kinds = layers.Dropout, layers.GaussianDropout, layers.AlphaDropout
    for layer in model._flatten_layers(include_self=False):
        if isinstance(layer, kinds) and layer.rate > 0:
            layer.rate = rate
            found.append(layer.name)
        elif isinstance(layer, layers.MultiHeadAttention) and layer._dropout > 0:
            layer._dropout = rate  # whether it calls its dropout layer at all
    if not found:
        raise ValueError("the model has no dropout that is on: use add_dropout")
    return found


def _sequential(model, layers: list, at: int, dropout):
    layers = [*layers[:at], dropout, *layers[at:]]
    if not model.built:
        return tf.keras.Sequential(layers)
    (x,) = model.inputs  # its dtype, too: a shape alone would make it one of floats
    entry = tf.keras.Input(shape=x.shape[1:], batch_size=x.shape[0], dtype=x.dtype)
    return tf.keras.Sequential([entry, *layers])


def _functional(model, tail: list, dropout):
    """Call the head on what dropout makes of its input, then what follows."""
    graph = getattr(model, "inputs", None) and len(model.outputs) == 1
    if not graph or not all(_one_input(layer) for layer in tail) or not _in_a_row(tail):
        raise NotImplementedError(
            "the model is no graph of layers that ends in a row behind its head: put "
            "tf.keras.layers.Dropout into its call"
        )
    x = dropout(tail[0].input)
    for layer in tail:
        x = layer(x)
    # In their structures: a dict is called, and read, as before.
    return tf.keras.Model(model.input, tf.nest.pack_sequence_as(model.output, [x]))


def _one_input(layer) -> bool:
    """Whether it was called once, on one tensor."""
    return len(layer._inbound_nodes) == 1 and not isinstance(layer.input, list | tuple | dict)


def _in_a_row(layers: list) -> bool:
    return all(after.input is before.output for before, after in pairwise(layers))


def _kinds(model: tf.keras.Model) -> dict[int, str]:
    """Of each parameter: "kernel", "bias", "norm", "embedding" or "other"."""
    found: dict[int, str] = {}
    for layer in model._flatten_layers(include_self=True):
        for variable in _own(layer):
            name = _name(variable).rpartition("/")[2].partition(":")[0]
            if isinstance(layer, tf.keras.layers.Embedding):
                found[id(variable)] = "embedding"
            elif _is_norm(layer):
                found.setdefault(id(variable), "norm")
            elif "bias" in name:
                found.setdefault(id(variable), "bias")
            else:
                kernel = "kernel" in name and len(variable.shape) > 1
                found.setdefault(id(variable), "kernel" if kernel else "other")
    return found


def _is_norm(layer) -> bool:
    """Whether it normalises what it gets: SpectralNormalization does so with a layer's kernel."""
    is_wrapper = isinstance(layer, tf.keras.layers.Wrapper)
    return "Normalization" in type(layer).__name__ and not is_wrapper


def _own(layer) -> list:
    """The parameters that this layer itself holds, not its layers'."""
    new = getattr(layer, "_trainable_variables", None)  # tf_keras says weights
    return list(layer._trainable_weights if new is None else new)


def _name(variable) -> str:
    return getattr(variable, "path", variable.name)


def _asked(biases: bool, norms: bool, embeddings: bool) -> set[str]:
    asked = {"bias": biases, "norm": norms, "embedding": embeddings}
    return {kind for kind, wanted in asked.items() if wanted}


def _check_decay(weight_decay: float) -> None:
    if not 0 <= weight_decay < math.inf:
        raise ValueError(f"weight_decay is 0 or more, not {weight_decay!r}")


def _check_share(share: float, name: str) -> None:
    if not 0 <= share < 1:
        raise ValueError(f"{name} is at least 0 and below 1, not {share!r}")


def main() -> None:
    """Print accuracies on 400 handwritten digits that are learned by heart, and on others."""
    import tempfile
    from pathlib import Path

    from shared import datasets
    from shared.specs import TASKS
    from shared.weights import init_weights
    from tf_impl.kit import data, models, training

    task = TASKS["digits-cnn"]
    with tempfile.TemporaryDirectory() as folder:
        folder = datasets.materialise(task.dataset, Path(folder))
        x, y = (part[:400] for part in data.to_device(*datasets.load(folder, "train")))
        test = data.to_device(*datasets.load(folder, "test"))
    print("                   training  validation")
    for name in ("nothing", "decoupled decay", "label smoothing", "dropout"):
        model = models.build(task.model, init_weights(task.model, seed=0))
        optimizer = tf.keras.optimizers.Adam(3e-3)
        loss_fn = smoothed_cross_entropy if name == "label smoothing" else training.cross_entropy
        if name == "dropout":
            model = add_dropout(model, rate=0.5)
        if name == "decoupled decay":
            apply_decoupled_decay(model, optimizer, weight_decay=0.5)
        step = training.make_train_step(model, optimizer, loss_fn)
        training.fit(step, x, y, batch_size=50, epochs=20, seed=0)
        predict = training.make_predict(model)
        found = [
            training.evaluate(predict, *given, metric="accuracy", batch_size=200)
            for given in ((x, y), test)
        ]
        print(f"{name:17}{found[0]:10.1f}{found[1]:12.1f}")


if __name__ == "__main__":
    main()
