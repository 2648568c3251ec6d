"""Activation checkpointing: less memory for deep models, for one more forward pass.

    apply_checkpointing(model, blocks="layers.*")  # once; the training loop stays as it is

What it changes: for the backward pass, a block keeps only its inputs. Its activations are freed,
and recomputed when the gradient gets there, with the same random numbers. The results are those of
the plain model. With n equal blocks, memory holds n inputs and the activations of one block at most
(Chen et al., 2016, "Training Deep Nets with Sublinear Memory Cost").

Its twin: `tf_impl/train_step/activation_checkpointing.py`.

Where the frameworks differ and why:
- A block is a submodule in PyTorch. A functional Keras model is flat. So there a block may be a
  group of layers, which becomes a sub-model of a new model over the same layers.
- PyTorch: `torch.utils.checkpoint` restores the random generators for the second run.
- TensorFlow: `tf.recompute_grad` draws other dropout masks in the second run, which makes gradients
  wrong, and updates BatchNorm twice. So it runs here in a `keras.StatelessScope` with the state of
  the first run. `keras.RematScope` keeps every layer's input and has the same faults.
- PyTorch can keep the outputs of some operators (`save_products`) and move what it keeps to the
  host (`offload`). TensorFlow recomputes the whole block, and has no second derivatives through it.
- PyTorch's fused attention recomputes its scores; `make_attention_step` chooses the kernel.
  TensorFlow keeps them.

When it helps and when it hurts: it helps if activations need more memory than parameters, gradients
and optimizer: deep models, long sequences, large batches. It adds up to a third to a step's
arithmetic. Small blocks save nothing, since each keeps its input. Nor does one block around
everything.
- On a CPU, glibc may keep freed memory. MALLOC_MMAP_THRESHOLD_=65536 returns it to the system.

Run it alone: `python -m pt_impl.train_step.activation_checkpointing` compares no blocks recomputed,
every other one, and all.

Copy with it: `pt_impl/kit/checks/activation_checkpointing.py`, `pt_impl/kit/recomputation.py`.
"""

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial

import torch
from torch import nn
from torch.nn.attention import sdpa_kernel
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts, noop_context_fn

from pt_impl.kit.checks import activation_checkpointing as checks
from pt_impl.kit.recomputation import Replay


def apply_checkpointing(
    model: nn.Module, *, blocks: str, save_products: bool = False, offload: bool = False
) -> nn.Module:
    """Have the blocks of `model` recomputed in the backward pass.

    Calls without gradients run as before. A block takes any arguments and returns any structure of
    tensors. What it changes other than buffers (a counter, a list), it changes twice. Source:
    `torch.utils.checkpoint`, use_reentrant=False.

    Args:
        model: changed in place; names, parameters and `state_dict` stay.
        blocks: comma-separated names of submodules as in `model.named_modules()`, or patterns with
            *, ? and [] ("block*", "stage*.block?"). What lies within another chosen block is
            recomputed with it. "" chooses none.
        save_products: keep the outputs of matrix products, convolutions and attention, and repeat
            only the rest, such as activations and normalisation.
        offload: move a block's inputs from the device to the host until the second run.

    Returns:
        The model.

    Raises:
        ValueError: before anything is changed, a name or pattern that no submodule has, or a block
            that is recomputed already.
        NotImplementedError: before that, a block that its owner never calls, or under torch's old
            `spectral_norm`; in the forward pass, a block that changes its own input, or with
            save_products a product, and offload where the inputs are on the host; in the backward
            pass, what was given to a block and is changed in place after it. With save_products a
            second backward pass raises torch's RuntimeError.
    """
    chosen = checks.check_activation_checkpointing(model, blocks, _recomputed)
    for name, block in chosen.items():
        # A partial object, since copy.deepcopy follows it to the copy's own module; a closure
        # would keep computing with the parameters of the original.
        replay = Replay(name, block)
        block.forward = partial(_recomputed, block.forward, replay, save_products, offload)
    return model


def make_attention_step(step: Callable, *, kernel: str) -> Callable:
    """Make step(x, y) -> loss with one kernel for `F.scaled_dot_product_attention`.

    kernel: "math" (two products, which keep the scores of all pairs: n x heads x t x t values a
    block), or one that recomputes them in the backward pass (Dao et al., 2022, "FlashAttention"):
    "flash", "efficient" or "cudnn". Without it PyTorch takes the fastest that it has.

    Raises ValueError for another name; the first step raises torch's RuntimeError where the device,
    the dtype or the mask has no such kernel.
    """
    backend = checks.check_kernel(kernel)

    def attending(x, y):
        with sdpa_kernel(backend):
            return step(x, y)

    return attending


def _recomputed(
    forward: Callable, replay: Replay, save_products: bool, offload: bool, /, *args, **kwargs
):
    """Run `forward`, and have the backward pass run it again."""
    # The block's keywords apart: some may have the names of checkpoint's own.
    run = partial(checkpoint, partial(forward, **kwargs), *args, use_reentrant=False)
    kept = _products() if save_products else []
    contexts = partial(create_selective_checkpoint_contexts, kept) if kept else noop_context_fn
    # A compiler sees the update of a buffer as an output of the forward pass, and never repeats it.
    if torch.compiler.is_compiling() or not torch.is_grad_enabled():
        return run(context_fn=contexts) if kept else run()
    if offload:
        checks.check_offload((args, kwargs))
    with _on_host() if offload else nullcontext():
        return replay.run(run, (args, kwargs), contexts, kept)


def _products() -> list:
    """The operators whose outputs `save_products` keeps, where this version of torch has them."""
    names = "mm addmm bmm baddbmm convolution mkldnn_rnn_layer _cudnn_rnn _addmm_activation"
    attention = "flash_attention efficient_attention cudnn_attention flash_attention_for_cpu"
    names = names.split() + [f"_scaled_dot_product_{name}" for name in attention.split()]
    return [getattr(torch.ops.aten, n).default for n in names if hasattr(torch.ops.aten, n)]


def _on_host():
    """The context in which what autograd keeps is moved to the host, and back when it is needed."""
    return torch.autograd.graph.save_on_cpu(pin_memory=torch.cuda.is_available())


def main() -> None:
    """Print blocks recomputed against all kept, in order of memory: a process's peak only rises."""
    import resource

    from pt_impl.kit import runtime, training
    from pt_impl.kit.demo import Demo

    demo = Demo("text-gpt-deep")
    print("blocks                   ms a step  last loss  peak resident memory in MiB")
    for blocks in ("block*", "block[02468], block10", ""):
        model, optimizer, loss_fn = demo.build()
        apply_checkpointing(model, blocks=blocks)
        step = training.make_train_step(model, optimizer, loss_fn)
        ms = demo.times({blocks: step}, rounds=1)[blocks]
        loss = runtime.to_float(step(*demo.batches[0]))
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
        print(f"{blocks or 'none':22}{ms:12.0f}{loss:11.4f}{peak:14}")


if __name__ == "__main__":
    main()
