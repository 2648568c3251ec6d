"""Combined compression: prune and then quantize; distil and then quantize.

    pruned = pruning.finalize_pruning(pruned)  # after its training
    rounded = qat.prepare_qat(pruned, x, weight_bits=8)
    step = make_sparse_train_step(rounded, optimizer, loss_fn)  # leaves zeros zero

What it changes: a trained model becomes a small file in stages. Pruning makes most weights zero.
Quantization-aware training then rounds the rest to 8 bits. The gradient of a zero weight is zero
here, so zeros stay. Or a larger model first teaches this one (`distillation.py`), which is then
rounded. A symmetric grid has an exact zero, so an int8 file keeps the zeros.

Its twin: `tf_impl/compression/combinations.py`.

Where the frameworks differ and why:
- PyTorch: gradients are attributes of parameters, and are masked in place between backward pass and
  update.
- TensorFlow: gradients are values, and are multiplied by masks before the optimizer gets them.
- TensorFlow Model Optimization has another scheme that keeps zeros ("PQAT"), for 8 bits only.
  torchao has none.

When it helps and when it hurts: it helps if a model is sent compressed or has to be small: a
compressor packs both zeros and 8-bit numbers. Zeros gain no speed: both runtimes multiply them. For
speed only, quantize without pruning, or remove whole channels (`structured_pruning.py`). The order
matters. Prune first, while weights can still change. Round last, since rounding needs final ranges.
Each stage can cost accuracy: check after each.

Run it alone: `python -m pt_impl.compression.combinations` prints accuracy, file size and zeros of
each stage.

Copy with it: `pt_impl/kit/calling.py`, `pt_impl/kit/checks/combinations.py`.
"""

from collections.abc import Callable

import torch
from torch import nn

from pt_impl.kit.calling import call
from pt_impl.kit.checks.combinations import check_combinations


def make_sparse_train_step(
    model: nn.Module, optimizer: torch.optim.Optimizer, loss_fn: Callable
) -> Callable:
    """Make a plain train step that leaves the zeros of kernels zero.

    Zeros are those of parameters with two axes or more when this is called; biases and
    normalisation train as ever.

    Args:
        model: pruned, and perhaps prepared for rounding since; it is put into training mode.
        optimizer: made anew: a momentum from before would move what was pruned. SGD, Adam and
            RMSprop, with weight decay or without, keep what has no gradient and no moment at zero.
        loss_fn: `loss_fn(output, y)` returns the mean over the batch.

    Returns:
        `step(x, y) -> loss`: a scalar on the device. x: a tuple of the model's positional
        arguments, a mapping of its keywords, or its one argument.

    Raises:
        ValueError: no kernel has a zero.
    """
    kernels = [p for p in model.parameters() if p.ndim > 1 and p.requires_grad]
    masks = [kernel.detach() != 0 for kernel in kernels]
    check_combinations(masks)
    model.train()

    def step(x, y):
        optimizer.zero_grad(set_to_none=True)
        loss = loss_fn(call(model, x), y)
        loss.backward()
        for kernel, mask in zip(kernels, masks, strict=True):
            if kernel.grad is not None:  # the loss reads it
                kernel.grad.mul_(mask)
        optimizer.step()
        return loss.detach()

    return step


def main() -> None:
    """Print the files of the digits CNN: as trained, pruned, distilled, and each in 8 bits."""
    import itertools
    import tempfile
    import zlib
    from pathlib import Path

    from pt_impl.compression import distillation, pruning
    from pt_impl.compression import quantization_aware_training as qat
    from pt_impl.kit import file_zeros, int8_files, models, training
    from pt_impl.kit.demo import Demo
    from shared import teacher

    demo, path = Demo("digits-cnn"), Path(tempfile.mkdtemp(), "file")
    (x, y), test = demo.train, [part.cpu() for part in demo.test]  # for files, which are a CPU's
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
