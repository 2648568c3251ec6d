"""Compression, stacked: prune and then quantize; distil and then quantize.

What it changes: a trained model on its way to a small file, in stages, each of which starts with
what the one before has left. Pruning makes most weights zero (`pruning`); quantization-aware
training rounds what remains to 8 bits (`quantization_aware_training`), and must not wake the zeros:
here the gradient of a weight that is zero is zero, too (`make_sparse_train_step`). Or a larger
model teaches this one first (`distillation`), which is then rounded. A zero is a zero on any grid
that is symmetric, so a file of integers holds just the zeros that the weights have
(`kernel_zeros`).

Its twin: `pt_impl/compression/combinations.py`.

Where the frameworks differ and why:
- Here gradients are values, multiplied with masks on their way to the optimizer; PyTorch's stand on
  the parameters and are masked in place between backward pass and update.
- tfmot's wrapped layers have the variables of the model, torchao's graph has its parameters. Both
  hold the pruned weights themselves, so one step serves before and after.
- TensorFlow Model Optimization has a scheme of its own that keeps zeros ("PQAT", in
  `tfmot.experimental.combine`): for 8 bits alone, and with other ranges than its n-bit scheme.
  A masked gradient does the same for any width. torchao has none.
- Both runtimes multiply zeros like other numbers: these make a compressed file smaller, no faster.

When it helps and when it hurts: where a model is sent compressed or has to fit: zeros and narrow
numbers add up, since a compressor packs both. The order matters: prune first, while weights can
still move, and round last, since rounding needs final ranges. It hurts where each stage spends the
accuracy that the next one needs: look at the stages one by one. For speed alone, quantize and leave
the zeros out, or remove whole channels (`structured_pruning`).

Run it alone: `TF_USE_LEGACY_KERAS=1 python -m tf_impl.compression.combinations` prints the files of
each stage, their accuracy, size and zeros.

Copy with it: `tf_impl/compression/distillation.py`, `tf_impl/compression/pruning.py`,
`tf_impl/compression/quantization_aware_training.py`, `tf_impl/kit/calling.py`,
`tf_impl/kit/comparing.py`, `tf_impl/kit/copying.py`, `tf_impl/kit/tracing.py`.
"""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import tensorflow as tf

# A stack is about several techniques, so it imports them; they do not know each other.
from tf_impl.compression import distillation, pruning, quantization_aware_training
from tf_impl.kit import calling

_PRODUCTS = ("CONV_2D", "DEPTHWISE_CONV_2D", "FULLY_CONNECTED")


def make_sparse_train_step(
    model: tf.keras.Model, optimizer: tf.keras.optimizers.Optimizer, loss_fn: Callable
) -> Callable:
    """Return `step(x, y) -> loss`: a plain train step that leaves the zeros of kernels zero.

    Zeros are those of trainable variables with two axes or more when this is called; biases and
    normalisation train as ever. Make the optimizer anew: a momentum from before would move what was
    pruned. SGD, Adam and RMSprop, with weight decay or without, keep what has no gradient and no
    moment at zero. x: a tensor, or a structure of them as `fit` hands it over. loss: scalar on the
    device, with the model's own losses (of regularisers).

    Raises ValueError for a model whose kernels have no zeros: it is to be pruned first.
    """
    variables = model.trainable_variables
    used = [tf.convert_to_tensor(variable) != 0 for variable in variables]
    kernels = [len(variable.shape) > 1 for variable in variables]
    if all(tf.reduce_all(use) for use, kernel in zip(used, kernels, strict=True) if kernel):
        raise ValueError("no kernel of the model has a zero to keep: prune it first")
    masks = [
        tf.cast(use, variable.dtype) if kernel else 1.0
        for use, kernel, variable in zip(used, kernels, variables, strict=True)
    ]

    @tf.function(jit_compile=False)
    def step(x, y):
        arguments, named = calling.call_arguments(model, x)
        with tf.GradientTape() as tape:
            loss = loss_fn(model(*arguments, **named, training=True), y)
            loss = sum((tf.cast(term, loss.dtype) for term in model.losses), loss)
            scaled = optimizer.scale_loss(loss) if hasattr(optimizer, "scale_loss") else loss
        gradients = tape.gradient(scaled, variables)
        masked = [  # what the loss does not read has no gradient
            None if gradient is None else gradient * mask
            for gradient, mask in zip(gradients, masks, strict=True)
        ]
        optimizer.apply_gradients(zip(masked, variables, strict=True))
        return loss

    return step


def kernel_zeros(path) -> dict[str, float]:
    """Return the share of zeros of each kernel in a file of `quantization_aware_training`.

    Kernels are what its products multiply by, float32 or int8, in the file's order and under the
    names that they have there. Raises FileNotFoundError, and ValueError for a file that is damaged
    or something else. Executes no code of the file.
    """
    from ai_edge_litert.interpreter import Interpreter, OpResolverType

    content = Path(path).read_bytes()
    try:
        # As it is in the file: XNNPACK would keep a copy in an order of its own.
        plain = OpResolverType.BUILTIN_WITHOUT_DEFAULT_DELEGATES
        interpreter = Interpreter(model_content=content, experimental_op_resolver_type=plain)
        interpreter.allocate_tensors()
    except (ValueError, RuntimeError) as error:
        what = " ".join(str(error).split())
        raise ValueError(f"{path} is no whole LiteRT file: {what}") from error
    products = [op for op in interpreter._get_ops_details() if op["op_name"] in _PRODUCTS]
    names = {tensor["index"]: tensor["name"] for tensor in interpreter.get_tensor_details()}
    kernels = (op["inputs"][1] for op in products)
    return {names[k]: float(np.mean(interpreter.get_tensor(k) == 0)) for k in kernels}


def main() -> None:
    """Print the files of the digits CNN: as trained, pruned, distilled, and each in 8 bits."""
    import itertools
    import tempfile
    import zlib

    from shared import datasets, teacher
    from shared.specs import TASKS
    from shared.weights import init_weights
    from tf_impl.kit import data, models, training

    qat, task, folder = quantization_aware_training, TASKS["digits-cnn"], Path(tempfile.mkdtemp())
    made = datasets.materialise(task.dataset, folder)
    (x, y), test = (data.to_device(*datasets.load(made, split)) for split in ("train", "test"))
    loss_fn = training.cross_entropy

    def train(make_step, model, epochs, labels=y):
        step = make_step(model, training.make_optimizer(model, task.recipe), loss_fn)
        training.fit(step, x, labels, batch_size=64, epochs=epochs, seed=0)

    def show(stage, export, model):
        path = export(model, x[:64], folder / "file")
        predict, content = qat.load_quantized(path), path.read_bytes()
        accuracy = training.evaluate(predict, *test, metric="accuracy", batch_size=599)
        zeros, small = max(kernel_zeros(path).values()), len(zlib.compress(content))
        size = f"{len(content):6} bytes,{small:7} compressed"
        print(f"{stage:18}{accuracy:5.1f}%, {size}, up to {zeros:.0%} zeros")

    model = models.build(task.model, init_weights(task.model, seed=0))
    train(training.make_train_step, model, epochs=4)
    show("trained", qat.export_float, model)
    schedule = {"begin_step": 0, "end_step": 420, "frequency": 10, "min_weights": 1000}
    pruned, update = pruning.apply_pruning(model, final_sparsity=0.82, **schedule)
    numbers = itertools.count(1)

    def make_pruning_step(*given):
        plain_step = training.make_train_step(*given)

        def step(x, y):
            update(next(numbers))
            return plain_step(x, y)

        return step

    train(make_pruning_step, pruned, epochs=4)
    pruned = pruning.finalize_pruning(pruned)
    show("pruned", qat.export_float, pruned)
    rounded = qat.prepare_qat(pruned, x[:256], weight_bits=8)
    train(make_sparse_train_step, rounded, epochs=2)
    show("pruned, 8 bits", qat.export_qat, rounded)

    guide = models.build(teacher.TASK.model, teacher.load().weights)
    model = models.build(task.model, init_weights(task.model, seed=0))
    labels = y, distillation.store_logits(guide, x)
    train(distillation.make_stored_train_step, model, epochs=10, labels=labels)
    show("distilled", qat.export_float, model)
    rounded = qat.prepare_qat(model, x[:256], weight_bits=8)
    show("distilled, 8 bits", qat.export_qat, rounded)


if __name__ == "__main__":
    main()
