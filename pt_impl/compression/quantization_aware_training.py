"""Quantization-aware training (QAT): train with the rounding that the int8 model will have.

    model = prepare_qat(model, images[:256], weight_bits=8)  # then train it as before
    quantized = convert_qat(model, images[:256])  # int8, for the CPU
    torch._inductor.config.freezing = True  # without it int8 is no faster than float32
    predict = torch.compile(quantized, dynamic=False)

What it changes: each convolution and dense layer multiplies rounded numbers in the forward pass. A
weight w becomes s * clamp(round(w / s), -n, n) with n = 2**(weight_bits - 1) - 1 and s = max|w| / n
of its output channel in this step. Activations have 8 bits, with a scale and a zero point per
tensor, whose range is a moving average over batches. The gradient ignores the rounding, and is zero
where a value was clipped (straight-through estimator; Jacob et al., 2018, arXiv:1712.05877).

Its twin: `tf_impl/compression/quantization_aware_training.py`.

Where the frameworks differ and why:
- PyTorch: torchao works on the graph that `torch.export` captures from any module.
- TensorFlow: layers of a copy compute with fake quantization in Keras 3. TensorFlow Model
  Optimization (tfmot), which is for tf_keras only, wraps layers.
- BatchNorm is folded into the kernel before rounding in PyTorch, and after it in TensorFlow.
- PyTorch's model stores weights of any width as int8. TensorFlow's file stores up to 4 bits as
  int4, with 15 values, which is slower than int8.
- Concatenations, averages and the last output are float32 in PyTorch and int8 in TensorFlow.

When it helps and when it hurts: it helps below 8 bits, where rounding a trained model costs
accuracy. At 8 bits that often costs little: try it first (`post_training_quantization.py`). A step
takes up to twice as long. It needs a trained model, labelled data and a small learning rate.

Run it alone: `python -m pt_impl.compression.quantization_aware_training` prints the accuracy with
8, 4 and 2 bits, with and without this training.

Copy with it: `pt_impl/kit/checks/quantization_aware_training.py`, `pt_impl/kit/pt2e_repairs.py`,
`pt_impl/kit/tracing.py`.
"""

import platform
from dataclasses import replace

import torch
from torch import fx, nn
from torchao.quantization import pt2e
from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_qat_pt2e
from torchao.quantization.pt2e.quantizer import x86_inductor_quantizer as x86

from pt_impl.kit import pt2e_repairs as repairs
from pt_impl.kit.checks import quantization_aware_training as checks
from pt_impl.kit.tracing import Program, outputs, trace


@torch.random.fork_rng(devices=[])  # torchao draws numbers
def prepare_qat(model: nn.Module, example_inputs, *, weight_bits: int) -> nn.Module:
    """Return a copy of `model` that computes with rounded weights and activations, to be trained.

    It is a graph in training mode; its `train()` and `eval()` switch BatchNorm, dropout and
    stochastic depth, while ranges follow every pass in both. Its parameters keep their names. Make
    the optimizer for the copy; `model` stays as it is.

    Args:
        example_inputs: two real samples or more, as a tensor, a tuple of the model's positional
            arguments or a dict of the named ones. The graph takes any number of samples of their
            sizes, and ranges start with theirs: a conversion without training is post-training
            quantization by the same quantizer.
        weight_bits: 2 to 8; at 2 bits weights are -s, 0 and s.

    Quantized are Conv2d, Linear and, before a ReLU, Conv1d, with what can be fused to them; the
    rest stays float32, and a warning names the convolutions and linear layers that do.

    Raises ValueError for other bits, one sample, values that are not finite, inputs that the model
    does not take, and a model without such a layer; NotImplementedError, with the reason, for a
    model in another dtype, one that does other things only in training, and where
    `torch.export` or torchao can't follow it; RuntimeError as `convert_qat`, which is tried: what
    cannot be converted is not trained, either.
    Source: torchao's `prepare_qat_pt2e` with `X86InductorQuantizer`.
    """
    checks.check_quantization_aware_training(model, example_inputs, weight_bits)
    captured = trace(model, example_inputs, training=True)
    norms = repairs.repair_captured(captured)
    checks.check_evaluation(captured, model, example_inputs)
    with checks.refusals():
        prepared = prepare_qat_pt2e(captured, _quantizer(weight_bits))
    checks.check_rounded(prepared)
    repairs.restore_norms(prepared, norms)
    prepared = repairs.SwitchableProgram(prepared, prepared.graph).eval()
    with torch.no_grad():
        outputs(prepared, example_inputs)  # ranges begin with the first values that are seen
    convert_qat(prepared, example_inputs)
    return prepared.train()


def _quantizer(weight_bits: int) -> x86.X86InductorQuantizer:
    usual = x86.get_default_x86_inductor_quantization_config(is_qat=True, reduce_range=_overflows())
    most = 2 ** (weight_bits - 1) - 1
    # The usual fused observer finds scales as if for -128..127, this one as convert_pt2e does; its
    # average is of the last step only.
    fake = pt2e.FakeQuantize.with_args(
        observer=pt2e.MovingAveragePerChannelMinMaxObserver, averaging_constant=1.0
    )
    weight = replace(usual.weight, quant_min=-most, quant_max=most, observer_or_fake_quant_ctr=fake)
    quantizer = x86.X86InductorQuantizer().set_global(replace(usual, weight=weight))
    for function in (torch.cat, nn.functional.avg_pool2d, nn.functional.adaptive_avg_pool2d):
        # What is joined, and both sides of an average, would share one moving range, which comes to
        # lie between theirs and clips the wider one. They are float32.
        quantizer.set_function_type_qconfig(function, None)
    return quantizer


def _overflows() -> bool:
    """Whether oneDNN adds pairs of products in 16 bits: on x86 without VNNI.

    Activations get 7 bits there, as torchao asks; what is converted on a CPU with VNNI is not for
    one without.
    """
    x86_64 = platform.machine().lower() in ("x86_64", "amd64")
    return x86_64 and not torch.cpu._is_vnni_supported()


@torch.random.fork_rng(devices=[])  # torchao draws numbers
def convert_qat(model: nn.Module, example_inputs) -> fx.GraphModule:
    """Return what `prepare_qat` made over integers, as a graph for the CPU; `model` stays as it is.

    Compile it with frozen weights. `kit/int8_files.py` does so, and writes it to a file.

    Raises ValueError for a model without fake quantization, RuntimeError where outputs for
    `example_inputs` differ by more than a relative 0.1. Source: torchao's `convert_pt2e`.
    """
    checks.check_prepared(model)
    copied = repairs.copy_to_cpu(model)
    repairs.fold_norms(copied)
    converted = convert_pt2e(copied)
    checks.check_converted(converted, model, example_inputs)
    return Program(converted, converted.graph)


def main() -> None:
    """Print the accuracy of the digits CNN at several widths, rounded, and then trained on."""
    from pt_impl.kit import training
    from pt_impl.kit.demo import Demo

    demo = Demo("digits-cnn")
    model, optimizer, loss_fn = demo.build()
    demo.fit(training.make_train_step(model, optimizer, loss_fn), epochs=demo.task.recipe.epochs)
    print(f"float32: {demo.score(model):.1f}%")
    for bits in (8, 4, 2):
        prepared = prepare_qat(model, demo.train[0][:256], weight_bits=bits)
        rounded = demo.score(prepared)
        optimizer = training.make_optimizer(prepared, demo.task.recipe)
        demo.fit(training.make_train_step(prepared, optimizer, loss_fn), epochs=2)
        print(f"{bits} bits: {rounded:.1f}% rounded, {demo.score(prepared):.1f}% after 2 epochs")


if __name__ == "__main__":
    main()
