"""Compression, stacked: prune and then quantize; distil and then quantize.

What it changes: a trained model on its way to a small file, in stages, each of which starts with
what the one before has left. Pruning makes most weights zero (`pruning`); quantization-aware
training rounds what remains to 8 bits (`quantization_aware_training`), and must not wake the zeros:
here the gradient of a weight that is zero is zero, too (`make_sparse_train_step`). Or a larger
model teaches this one first (`distillation`), which is then rounded. A zero is a zero on any grid
that is symmetric, so a file of integers holds just the zeros that the weights have
(`kernel_zeros`).

Its twin: `tf_impl/compression/combinations.py`.

Where the frameworks differ and why:
- Here gradients stand on the parameters and are masked in place between backward pass and update;
  TensorFlow's are values, multiplied on their way to the optimizer.
- torchao's graph has the parameters of the model under their own names, tfmot's wrapped layers have
  the variables. Both hold the pruned weights themselves, so one step serves before and after.
- TensorFlow Model Optimization has a scheme of its own that keeps zeros ("PQAT", in
  `tfmot.experimental.combine`): for 8 bits alone, and with other ranges than its n-bit scheme.
  torchao has none.
- Both runtimes multiply zeros like other numbers: these make a compressed file smaller, no faster.

When it helps and when it hurts: where a model is sent compressed or has to fit: zeros and narrow
numbers add up, since a compressor packs both. The order matters: prune first, while weights can
still move, and round last, since rounding needs final ranges. It hurts where each stage spends the
accuracy that the next one needs: look at the stages one by one. For speed alone, quantize and leave
the zeros out, or remove whole channels (`structured_pruning`).

Run it alone: `python -m pt_impl.compression.combinations` prints the files of each stage, their
accuracy, size and zeros.

Copy with it: `pt_impl/compression/distillation.py`, `pt_impl/compression/pruning.py`,
`pt_impl/compression/quantization_aware_training.py`, `pt_impl/kit/calling.py`,
`pt_impl/kit/checks/distillation.py`, `pt_impl/kit/checks/example_inputs.py`,
`pt_impl/kit/checks/float_layers.py`, `pt_impl/kit/comparing.py`, `pt_impl/kit/saving.py`,
`pt_impl/kit/tracing.py`.
"""

from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

# A stack is about several techniques, so it imports them; they do not know each other.
from pt_impl.compression import distillation, pruning, quantization_aware_training
from pt_impl.kit import calling, saving


def make_sparse_train_step(
    model: nn.Module, optimizer: torch.optim.Optimizer, loss_fn: Callable
) -> Callable:
    """Return `step(x, y) -> loss`: a plain train step that leaves the zeros of kernels zero.

    Zeros are those of parameters with two axes or more when this is called; biases and
    normalisation train as ever. Make the optimizer anew: a momentum from before would move what was
    pruned. SGD, Adam and RMSprop, with weight decay or without, keep what has no gradient and no
    moment at zero. x: a tensor, a tuple of the model's positional arguments or a dict of the named
    ones. loss: scalar on the device.

    Raises ValueError for a model whose kernels have no zeros: it is to be pruned first.
    """
    kernels = [p for p in model.parameters() if p.ndim > 1 and p.requires_grad]
    masks = [(kernel, kernel.detach() != 0) for kernel in kernels]
    if all(mask.all() for _, mask in masks):
        raise ValueError("no kernel of the model has a zero to keep: prune it first")
    model.train()

    def step(x, y):
        optimizer.zero_grad(set_to_none=True)
        arguments, named = calling.call_arguments(model, x)
        loss = loss_fn(model(*arguments, **named), y)
        loss.backward()
        for kernel, mask in masks:
            if kernel.grad is not None:
                kernel.grad.mul_(mask)
        optimizer.step()
        return loss.detach()

    return step


def kernel_zeros(path) -> dict[str, float]:
    """Return the share of zeros of each kernel in a file of `quantization_aware_training`.

    Kernels are its tensors of two axes or more, float32 or int8, in the file's order and under the
    names that they have there. Raises FileNotFoundError, and ValueError for a file that is damaged
    or something else. Executes no code of the file.
    """
    tensors = saving.load(path).named_buffers()
    return {name: (t == 0).float().mean().item() for name, t in tensors if t.ndim > 1}


def main() -> None:
    """Print the files of the digits CNN: as trained, pruned, distilled, and each in 8 bits."""
    import itertools
    import tempfile
    import zlib

    from pt_impl.kit import data, models, training
    from shared import datasets, teacher
    from shared.specs import TASKS
    from shared.weights import init_weights

    qat, task, folder = quantization_aware_training, TASKS["digits-cnn"], Path(tempfile.mkdtemp())
    made = datasets.materialise(task.dataset, folder)
    (x, y), test = (data.to_device(*datasets.load(made, split)) for split in ("train", "test"))
    test = [part.cpu() for part in test]  # for files, which are a CPU's
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
