"""Combined compression: prune and then quantize; distil and then quantize.

    pruned = pruning.finalize_pruning(pruned)  # after its training
    rounded = qat.prepare_qat(pruned, x, weight_bits=8)
    step = make_sparse_train_step(rounded, optimizer, loss_fn)  # leaves zeros zero

What it changes: a trained model becomes a small file in stages. Pruning makes most weights zero.
Quantization-aware training then rounds the rest to 8 bits. The gradient of a zero weight is zero
here, so zeros stay. Or a larger model first teaches this one (`distillation.py`), which is then
rounded. A symmetric grid has an exact zero, so an int8 file keeps the zeros.

Its twin: `pt_impl/compression/combinations.py`, which says where the frameworks differ.

When it helps and when it hurts: it helps if a model is sent compressed or has to be small: a
compressor packs both zeros and 8-bit numbers. Zeros gain no speed: both runtimes multiply them. For
speed only, quantize without pruning, or remove whole channels (`structured_pruning.py`). The order
matters. Prune first, while weights can still change. Round last, since rounding needs final ranges.
Each stage can cost accuracy: check after each.

Run it alone: `TF_USE_LEGACY_KERAS=1 python -m tf_impl.compression.combinations` prints accuracy,
file size and zeros of each stage.

Copy with it: `tf_impl/kit/calling.py`, `tf_impl/kit/checks/combinations.py`.
"""

from collections.abc import Callable

import tensorflow as tf

from tf_impl.kit.calling import add_own_losses, call, scale_loss
from tf_impl.kit.checks.combinations import check_combinations


def make_sparse_train_step(
    model: tf.keras.Model, optimizer: tf.keras.optimizers.Optimizer, loss_fn: Callable
) -> Callable:
    """Make a plain train step that leaves the zeros of kernels zero.

    Zeros are those of trainable variables with two axes or more when this is called; biases and
    normalisation train as ever.

    Args:
        model: pruned, and perhaps prepared for rounding since.
        optimizer: made anew: a momentum from before would move what was pruned. SGD, Adam and
            RMSprop, with weight decay or without, keep what has no gradient and no moment at zero.
        loss_fn: `loss_fn(output, y)` returns the mean over the batch.

    Returns:
        `step(x, y) -> loss`: a scalar on the device, with the model's own losses. x: a tensor, or
        a structure of them as `fit` hands it over.

    Raises:
        ValueError: no kernel has a zero.
    """
    variables = model.trainable_variables
    used = [tf.convert_to_tensor(v) != 0 if len(v.shape) > 1 else None for v in variables]
    check_combinations([mask for mask in used if mask is not None])
    masks = [
        1.0 if mask is None else tf.cast(mask, variable.dtype)
        for mask, variable in zip(used, variables, strict=True)
    ]

    @tf.function(jit_compile=False)
    def step(x, y):
        with tf.GradientTape() as tape:
            loss = add_own_losses(loss_fn(call(model, x, training=True), y), model)
            scaled = scale_loss(loss, optimizer)
        gradients = tape.gradient(scaled, variables)
        masked = [  # what the loss does not read has no gradient
            None if gradient is None else gradient * mask
            for gradient, mask in zip(gradients, masks, strict=True)
        ]
        optimizer.apply_gradients(zip(masked, variables, strict=True))
        return loss

    return step


def main() -> None:
    """Print the files of the digits CNN: as trained, pruned, distilled, and each in 8 bits."""
    import itertools
    import tempfile
    import zlib
    from pathlib import Path

    from shared import teacher
    from tf_impl.compression import distillation, pruning
    from tf_impl.compression import quantization_aware_training as qat
    from tf_impl.kit import file_zeros, int8_files, models, training
    from tf_impl.kit.demo import Demo

    demo, path = Demo("digits-cnn"), Path(tempfile.mkdtemp(), "file")
    (x, y), test = demo.train, demo.test
    guide = models.build(teacher.TASK.model, teacher.load().weights)

    def train(model, make_step, *, epochs, labels=y):
        optimizer = training.make_optimizer(model, demo.task.recipe)
        demo.fit(make_step(model, optimizer, training.cross_entropy), epochs=epochs, y=labels)

    def show(stage, model, rounded=None):
        if rounded is None:
            int8_files.keep_float32(model, x[:64], path)
        else:
            int8_files.save_as_it_is(qat.convert_qat(rounded, x[:64]), path)
        predict, small = int8_files.load_int8(path), len(zlib.compress(path.read_bytes()))
        accuracy = training.evaluate(predict, *test, metric="accuracy", batch_size=599)
        zeros = max(file_zeros.kernel_zeros(path).values())
        print(f"{stage:18}{accuracy:5.1f}%, {small:6} bytes compressed, up to {zeros:.0%} zeros")

    def make_pruning_step(*given):
        plain_step, numbers = training.make_train_step(*given), itertools.count(1)

        def step(x, y):
            update(next(numbers))
            return plain_step(x, y)

        return step

    model = demo.build()[0]
    train(model, training.make_train_step, epochs=4)
    show("trained", model)
    schedule = {"begin_step": 0, "end_step": 420, "frequency": 10, "min_weights": 1000}
    pruned, update = pruning.apply_pruning(model, final_sparsity=0.82, **schedule)
    train(pruned, make_pruning_step, epochs=4)
    pruned = pruning.finalize_pruning(pruned)
    show("pruned", pruned)
    rounded = qat.prepare_qat(pruned, x[:256], weight_bits=8)
    train(rounded, make_sparse_train_step, epochs=2)
    show("pruned, 8 bits", pruned, rounded)

    model, labels = demo.build()[0], (y, distillation.store_logits(guide, x))
    train(model, distillation.make_stored_train_step, epochs=10, labels=labels)
    show("distilled", model)
    show("distilled, 8 bits", model, qat.prepare_qat(model, x[:256], weight_bits=8))


if __name__ == "__main__":
    main()
