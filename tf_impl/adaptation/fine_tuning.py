"""Fine-tuning: a trained model learns new data, and most of its weights stay fixed.

    stored = store_features(backbone, images)  # once
    step = make_stored_train_step(stored, head, optimizer, loss_fn)  # step(rows, labels)

    apply_lora(model, rank=8, alpha=16.0)  # then any train step, over `trainable_variables`
    merge_lora(model)  # the same predictions, without adapters

What it changes: what is trained.
- Frozen backbone: only the head learns, from the features of the trained backbone in evaluation
  mode. There is no backward pass through the backbone.
- Stored features: without random augmentation the features of an image are the same in every epoch,
  so they are computed once.
- LoRA (Hu et al., 2021, arXiv:2106.09685): a dense layer's kernel W becomes W + alpha / rank A B.
  W is frozen; A (inputs, rank) is random, B (rank, outputs) zero at first.

Its twin: `pt_impl/adaptation/fine_tuning.py`, which says where the frameworks differ.

When it helps and when it hurts: a frozen backbone helps if labels are few and the new data is like
the old. Stored features make an epoch almost free. Both hurt if the features do not suit the new
data: then train everything, or use LoRA. LoRA saves the optimizer's state and the gradients of the
weights, but no activations and little time.

Run it alone: `python -m tf_impl.adaptation.fine_tuning` prints time and accuracy of each.

Copy with it: `tf_impl/kit/calling.py`, `tf_impl/kit/checks/fine_tuning.py`.
"""

from collections.abc import Callable

import numpy as np
import tensorflow as tf

from tf_impl.kit.calling import add_own_losses, call, concatenate, infer, layers, rows, scale_loss
from tf_impl.kit.checks import fine_tuning as checks


def make_train_step(
    features: tf.keras.Model,
    head: tf.keras.layers.Layer,
    optimizer: tf.keras.optimizers.Optimizer,
    loss_fn: Callable,
) -> Callable:
    """Return `step(x, y) -> loss`: one update of the head; the backbone is frozen.

    Args:
        features: the backbone, x -> features; called with `training=False`.
        head: features -> output, built; called with `training=True`.
        optimizer: of the head's variables.
        loss_fn: `loss_fn(output, y)` returns the mean over the batch.

    Raises ValueError for a head without trainable variables.
    """
    checks.check_fine_tuning(head)
    learn = _make_head_step(head, optimizer, loss_fn)

    @tf.function(jit_compile=False)
    def step(x, y):
        return learn(infer(features, x), y)

    return step


def store_features(features: tf.keras.Model, x, *, batch_size: int = 256):
    """Return the features of all samples of x, computed `batch_size` at a time.

    x: what the backbone is called with, as `fit` hands it over, with the samples along the first
    axis. The backbone runs in evaluation mode.
    """

    # A smaller last batch makes a graph for any batch size, not one for each.
    @tf.function(jit_compile=False, reduce_retracing=True)
    def predict(part):
        return infer(features, part)

    samples = max(part.shape[0] for part in tf.nest.flatten(x) if getattr(part, "shape", ()) != ())
    starts = range(0, samples, batch_size)
    return concatenate([predict(rows(x, start, start + batch_size)) for start in starts])


def make_stored_train_step(
    stored: tf.Tensor,
    head: tf.keras.layers.Layer,
    optimizer: tf.keras.optimizers.Optimizer,
    loss_fn: Callable,
) -> Callable:
    """Return `step(rows, y) -> loss`: `make_train_step` over features of `store_features`.

    rows: the numbers of the batch's samples, int64 (n,).
    """
    checks.check_fine_tuning(head)
    learn = _make_head_step(head, optimizer, loss_fn)

    @tf.function(jit_compile=False)
    def step(rows, y):
        return learn(tf.gather(stored, rows), y)

    return step


def _make_head_step(head: tf.keras.layers.Layer, optimizer, loss_fn: Callable) -> Callable:
    variables = head.trainable_variables

    def learn(inputs, y):
        with tf.GradientTape() as tape:
            loss = add_own_losses(loss_fn(call(head, inputs, training=True), y), head)
            scaled = scale_loss(loss, optimizer)
        gradients = tape.gradient(scaled, variables)
        optimizer.apply_gradients(zip(gradients, variables, strict=True))
        return loss

    return learn


def apply_lora(
    model: tf.keras.Model, *, rank: int = 8, alpha: float = 16.0, seed: int = 0
) -> tf.keras.Model:
    """Freeze the model and give each of its Dense layers adapters; return the model.

    The model predicts what it predicted until a step has changed B. Make the optimizer afterwards.
    Biases are frozen, too. Subclasses of Dense get no adapters.

    Args:
        rank: of the product, 1 or more.
        alpha: the product is scaled by alpha / rank.
        seed: of A, uniform within 1 / sqrt(inputs), drawn by NumPy layer by layer.

    Raises ValueError for settings out of range, for a model without such layers, and for one that
    has adapters; NotImplementedError for legacy Keras and for a kernel with a constraint.
    Source: `keras.layers.Dense.enable_lora`.
    """
    checks.check_lora(model, rank, alpha)
    random = np.random.default_rng(seed)
    dense = checks.dense_layers(model)
    for variable in model.trainable_variables:
        variable.trainable = False  # of the variables: a layer's would freeze its adapters, too
    for layer in dense:
        inputs = layer.kernel.shape[0]
        layer.enable_lora(rank, lora_alpha=alpha)
        layer.lora_kernel_a.assign(random.uniform(-(inputs**-0.5), inputs**-0.5, (inputs, rank)))
    return model


def merge_lora(model: tf.keras.Model) -> tf.keras.Model:
    """Add the adapters to the kernels and switch them off; return the model, which stays frozen.

    The adapters stay among the layer's variables, as zeros that nothing reads.
    """
    for layer in layers(model):
        if getattr(layer, "lora_enabled", False):
            merged = tf.convert_to_tensor(layer.kernel)
            layer.lora_enabled = False  # `kernel` is the variable again
            layer.kernel.assign(merged)
            layer.lora_rank = None  # so that a copy by its configuration has none
            for adapter in (layer.lora_kernel_a, layer.lora_kernel_b):
                adapter.assign(tf.zeros_like(adapter))
                adapter.trainable = False
    return model


def main() -> None:
    """Print time and bits a character of a GPT that goes from text to text in swapped case."""
    from shared.datasets import SWAPPED
    from tf_impl.kit import models, training
    from tf_impl.kit.demo import Demo

    demo = Demo("text-gpt")
    before, optimizer, loss_fn = demo.build()
    demo.fit(training.make_train_step(before, optimizer, loss_fn))
    demo.train, demo.test = (
        [tf.gather(SWAPPED, part) for part in split] for split in (demo.train, demo.test)
    )

    def optimizer_of(part):
        return training.make_optimizer(part, demo.task.recipe)

    def everything(model):
        return training.make_train_step(model, optimizer_of(model), loss_fn)

    def head_alone(model):
        features, head = models.split_head(model)
        return make_train_step(features, head, optimizer_of(head), loss_fn)

    print("trained       ms a step  bits a character")
    for name, make in {
        "all": everything,
        "LoRA": lambda model: everything(apply_lora(model)),
        "head": head_alone,
    }.items():
        model = demo.build()[0]
        model.set_weights(before.get_weights())
        ms = demo.fit(make(model))
        print(f"{name:14}{ms:9.2f}{demo.score(model):18.2f}")


if __name__ == "__main__":
    main()
