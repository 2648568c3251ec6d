"""Regularization: weight decay, label smoothing and dropout, against overfitting.

    apply_decoupled_decay(model, optimizer, weight_decay=0.05)  # only of kernels
    loss_fn = functools.partial(smoothed_cross_entropy, smoothing=0.1)
    model = add_dropout(model, rate=0.3)

What it changes: what a step minimizes besides the loss. L2 adds weight_decay / 2 times the sum of
squares to the loss. Decoupled decay subtracts rate x weight_decay of the weights, separately from
the gradient (Loshchilov and Hutter, 2019). Under plain SGD the two are equal. Under Adam a
penalty's gradient is divided by the root of the second moment, so weights with large gradients
decay less. By default only kernels decay: biases and norms don't overfit (He et al., 2019, "Bag of
Tricks", section 3.1).

Its twin: `pt_impl/recipes/regularization.py`, which says where the frameworks differ.

When it helps and when it hurts: it helps if training and validation differ: few labels, many
epochs. It hurts a model that does not yet fit its training data. Decay of weights before BatchNorm
only raises the effective rate (van Laarhoven, 2017). Smoothed labels make poor teachers (Müller et
al., 2019). Dropout belongs after the last BatchNorm, because it shifts the variance (Li et al.,
2019).

Run it alone: `python -m tf_impl.recipes.regularization` prints training and validation accuracy.

Copy with it: `tf_impl/kit/checks/regularization.py`, `tf_impl/kit/parameter_kinds.py`.
"""

from collections.abc import Callable

import tensorflow as tf

from tf_impl.kit.checks import regularization as checks
from tf_impl.kit.parameter_kinds import of_kinds

Optimizer = tf.keras.optimizers.Optimizer


def decayed_parameters(
    model: tf.keras.Model, *, biases: bool = False, norms: bool = False, embeddings: bool = False
) -> list[str]:
    """Return the names of the parameters that decay: kernels, and what is asked for.

    Kernels are what Keras's layers call so. Frozen parameters never decay, nor do those that are
    none of these: class tokens, positions, slopes.
    """
    decayed = _trained(model, _decayed(model, biases, norms, embeddings))
    return [getattr(variable, "path", variable.name) for variable in decayed]


def l2_penalty(
    model: tf.keras.Model,
    *,
    weight_decay: float,
    biases: bool = False,
    norms: bool = False,
    embeddings: bool = False,
) -> tf.Tensor:
    """Return weight_decay / 2 times the sum of squares of what decays, to be added to a loss.

    Its gradient is weight_decay times the weight. Raises ValueError where nothing decays.
    """
    checks.check_decay(weight_decay)
    decayed = _trained(model, _decayed(model, biases, norms, embeddings))
    checks.check_decayed(decayed)
    wide = tf.float64 if all(v.dtype == "float64" for v in decayed) else tf.float32
    squares = [tf.reduce_sum(tf.square(tf.cast(v, wide))) for v in decayed]
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

    What is frozen decays once it trains.

    Returns:
        The names of what decays now.

    Raises:
        ValueError: the optimizer is built, or the model was not called yet or has nothing that
            decays.
    """
    checks.check_decay(weight_decay)
    optimizer = getattr(optimizer, "inner_optimizer", optimizer)  # of a LossScaleOptimizer
    checks.check_optimizer(optimizer)
    settings = {"biases": biases, "norms": norms, "embeddings": embeddings}
    names = decayed_parameters(model, **settings)
    checks.check_decayed(names)
    optimizer.weight_decay = weight_decay
    if hasattr(optimizer, "adam_weight_decay"):  # of Muon, for all that is no matrix
        optimizer.adam_weight_decay = weight_decay
    decayed = {id(variable) for variable in _decayed(model, **settings)}
    left = [variable for variable in model.weights if id(variable) not in decayed]
    optimizer.exclude_from_weight_decay(var_list=left)
    return names


def scale_decay(*, weight_decay: float, batch_size: int, nominal_batch_size: int = 64) -> float:
    """Return the decay for `batch_size` where `weight_decay` is right for the nominal one.

    A batch of k times the nominal one takes k times fewer steps: with k times the decay, an epoch
    takes the same share away, at the same rate. Where the rate is scaled with the batch, leave the
    decay: the share is their product.

    batch_size: of a whole update, so times the accumulated batches and the replicas.
    """
    checks.check_batch_sizes(batch_size, nominal_batch_size)
    return weight_decay * batch_size / nominal_batch_size


def smoothed_cross_entropy(logits, labels: tf.Tensor, *, smoothing: float = 0.1) -> tf.Tensor:
    """Return the mean cross-entropy with 1 - smoothing of the target on the label, float32.

    The rest is spread over all classes (Szegedy et al., 2016, "Rethinking the Inception
    Architecture", section 7).

    logits: (..., classes). labels: integers of the leading shape, each a class: PyTorch leaves -100
    out.
    """
    checks.check_share(smoothing, "smoothing")
    logits = tf.cast(logits, tf.float32)
    own = tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits)
    # The mean of -log p over all classes, without a one-hot target as large as the logits.
    all_classes = -tf.reduce_mean(tf.nn.log_softmax(logits), axis=-1)
    return tf.reduce_mean((1 - smoothing) * own + smoothing * all_classes)


def add_dropout(model: tf.keras.Model, *, rate: float, head: str = "") -> tf.keras.Model:
    """Return a model over the same layers with dropout (Srivastava et al., 2014) before the head.

    head: the name of its layer; without one, the last `Dense`. What follows the head must be one
    layer after the other.

    Raises:
        ValueError: there is no head, the last `Dense` is within a layer (name that), or dropout is
            before it already.
        NotImplementedError: the model is no graph of layers.
    """
    checks.check_share(rate, "rate")
    at = checks.find_head(model, head)
    layers, dropout = list(model.layers), tf.keras.layers.Dropout(rate)
    if isinstance(model, tf.keras.Sequential):
        layers.insert(at, dropout)
        if not model.built:
            return tf.keras.Sequential(layers)
        (x,) = model.inputs  # its dtype, too: with only a shape it would be one of floats
        entry = tf.keras.Input(shape=x.shape[1:], batch_size=x.shape[0], dtype=x.dtype)
        return tf.keras.Sequential([entry, *layers])
    x = dropout(layers[at].input)
    for layer in layers[at:]:
        x = layer(x)
    # In their structures: a dict is called, and read, as before.
    return tf.keras.Model(model.input, tf.nest.pack_sequence_as(model.output, [x]))


def set_dropout_rate(model: tf.keras.Model, *, rate: float) -> list[str]:
    """Set the rate of every dropout that is on (rate above 0), in place; return their names.

    Also of attention, not within recurrent layers. Before a step is traced. Raises ValueError where
    there is none.
    """
    checks.check_share(rate, "rate")
    layers, found = tf.keras.layers, []
    kinds = layers.Dropout, layers.GaussianDropout, layers.AlphaDropout
    for layer in model._flatten_layers(include_self=False):
        if isinstance(layer, kinds) and layer.rate > 0:
            layer.rate = rate
            found.append(layer.name)
        elif isinstance(layer, layers.MultiHeadAttention) and layer._dropout > 0:
            layer._dropout = rate  # whether it calls its dropout layer at all
    checks.check_dropouts(found)
    return found


def _decayed(model: tf.keras.Model, biases: bool, norms: bool, embeddings: bool) -> list:
    """What decays, or would if it were not frozen."""
    asked = {"kernel": True, "bias": biases, "norm": norms, "embedding": embeddings}
    return of_kinds(model, [kind for kind, wanted in asked.items() if wanted])


def _trained(model: tf.keras.Model, variables: list) -> list:
    wanted = {id(variable) for variable in variables}
    return [variable for variable in model.trainable_variables if id(variable) in wanted]


def main() -> None:
    """Print accuracies on 400 handwritten digits that are learned by heart, and on others."""
    from tf_impl.kit import training
    from tf_impl.kit.demo import Demo

    demo = Demo("digits-cnn")
    few = [part[:400] for part in demo.train]
    print("                   training  validation")
    for name in ("nothing", "decoupled decay", "label smoothing", "dropout"):
        model, _, loss_fn = demo.build()
        optimizer = tf.keras.optimizers.Adam(3e-3)
        if name == "decoupled decay":
            apply_decoupled_decay(model, optimizer, weight_decay=0.5)
        if name == "label smoothing":
            loss_fn = smoothed_cross_entropy
        if name == "dropout":
            model = add_dropout(model, rate=0.5)
        step = training.make_train_step(model, optimizer, loss_fn)
        training.fit(step, *few, batch_size=50, epochs=20, seed=0)
        predict = training.make_predict(model)
        seen = training.evaluate(predict, *few, metric="accuracy", batch_size=200)
        print(f"{name:17}{seen:10.1f}{demo.score(model):12.1f}")


if __name__ == "__main__":
    main()
