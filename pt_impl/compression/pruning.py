"""Magnitude pruning: the smallest weights become zero, more and more of them, while a model trains.

What it changes: the kernel of each dense and convolution layer is multiplied with a mask of zeros
and ones in every forward pass. From `begin_step` to `end_step`, every `frequency` steps, the masks
are made anew with the share of zeros that the cubic schedule of Zhu and Gupta (2017, "To prune, or
not to prune", section 3) gives for step t:

    final_sparsity * (1 - (1 - (t - begin_step) / (end_step - begin_step)) ** 3)

It rises fast at first, while there is much to spare, and slowly at the end. What stays are the
weights of largest magnitude: of each layer (`apply_pruning`) or of all layers together
(`apply_global_pruning`). Biases, normalisation, embeddings (and a kernel that is an embedding,
too), depthwise convolutions, recurrent layers, `nn.MultiheadAttention` and kernels that a
parametrization computes (weight norm, spectral norm) stay dense.
`finalize_pruning` writes the zeros into the weights.

Its twin: `tf_impl/compression/pruning.py`.

Where the frameworks differ and why:
- `torch.nn.utils.prune` keeps the trained tensor (`weight_orig`) and its mask apart and masks the
  gradient too, so a pruned weight gets no more gradient. TensorFlow Model Optimization (tfmot)
  masks the variable itself in the forward pass, and its gradient reaches pruned weights: each step
  moves them, the next one sets them to zero again, and where one step took it beyond the threshold
  such a weight returns when the masks are next made. Here a pruned weight stays pruned.
- `prune` has no schedule: `update` writes its buffers of masks. Its own way, pruning again what
  is pruned, would keep the mask of every update.
- tfmot works on functional and Sequential models of tf_keras and has no global magnitude.
- Both round alike (float32, half to even, one weight at least stays) and keep all that tie.

When it helps and when it hurts: it makes a file that compresses better, and it is the first half of
sparse computing. Alone it makes nothing faster and nothing smaller: zeros in a dense tensor are
multiplied like other numbers, and training costs a little more, for masks. It hurts accuracy beyond
what a model can spare, and where training ends with the schedule: leave steps for recovery. Global
magnitude spends the weights where they are large, and can empty a whole layer.

Run it alone: `python -m pt_impl.compression.pruning` prints the dense model against 80% and 95% of
zeros.
"""

import copy
from collections import Counter
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.utils import prune

_CONVOLUTIONS = (
    nn.Conv1d,
    nn.Conv2d,
    nn.Conv3d,
    nn.ConvTranspose1d,
    nn.ConvTranspose2d,
    nn.ConvTranspose3d,
)


def apply_pruning(
    model: nn.Module,
    *,
    final_sparsity: float,
    begin_step: int,
    end_step: int,
    frequency: int = 100,
    min_weights: int = 0,
) -> tuple[nn.Module, Callable]:
    """Return a copy of `model` that can be pruned, and `update(step)`: each layer by itself.

    Make the optimizer for the copy, whose kernels are called `weight_orig`; `model` stays as it is.
    Call `update(step)` before each train step with its number, counted from 1. At steps
    `begin_step`, `begin_step + frequency`, ... `end_step` it makes the masks, on the device; at all
    others it does nothing. Of n weights of a layer, n times the share of zeros are masked, rounded.
    A masked model cannot be deep-copied, and masks reach `weight` in the forward pass: finalize it
    before it is copied, exported or saved.

    final_sparsity: share of zeros at `end_step`, at least 0 and below 1; 0 changes nothing.
    min_weights: layers with fewer stay dense, most of all a first one: they weigh little.

    Raises ValueError, before anything is changed, for settings that cannot work, a model that is
    pruned already and one without such layers; NotImplementedError for a kernel that two layers
    share and a model that Python cannot copy. `update` raises ValueError for a step below 1.
    Source: `torch.nn.utils.prune`; schedule: Zhu and Gupta (2017).
    """
    return _apply(model, False, final_sparsity, begin_step, end_step, frequency, min_weights)


def apply_global_pruning(
    model: nn.Module,
    *,
    final_sparsity: float,
    begin_step: int,
    end_step: int,
    frequency: int = 100,
    min_weights: int = 0,
) -> tuple[nn.Module, Callable]:
    """Do what `apply_pruning` does, with one threshold for all layers together.

    Arguments, result and errors are the same; the share of zeros is that of all kernels, as in
    `torch.nn.utils.prune.global_unstructured`.
    """
    return _apply(model, True, final_sparsity, begin_step, end_step, frequency, min_weights)


def finalize_pruning(model: nn.Module) -> nn.Module:
    """Write the zeros into the weights, remove the masks and return `model`, changed.

    Names and types are those of the model that was pruned. Training on would fill the zeros again.
    Raises ValueError for a model without masks.
    """
    masked = [module for module in model.modules() if hasattr(module, "weight_mask")]
    if not masked:
        raise ValueError("the model has no masks: it comes from apply_pruning, and only once")
    for module in masked:
        prune.remove(module, "weight")
        _put_bias_last(module)
    for key, hook in list(model._forward_pre_hooks.items()):
        if isinstance(hook, _MaskUncalled):
            del model._forward_pre_hooks[key]
    return model


def _apply(model, together, final_sparsity, begin_step, end_step, frequency, min_weights) -> tuple:
    """Check everything, copy the model, add masks of ones; `together`: one threshold for all."""
    _check_settings(final_sparsity, begin_step, end_step, frequency)
    _check_model(model, min_weights)
    model = _copy(model)
    layers = _prunable(model, min_weights)
    for layer in layers:
        prune.identity(layer, "weight")
        _put_bias_last(layer)
    model.register_forward_pre_hook(_MaskUncalled(layers))
    groups = [layers] if together else [[layer] for layer in layers]

    def update(step: int) -> None:
        if step < 1:
            raise ValueError(f"steps are counted from 1, not from {step!r}")
        if begin_step <= step <= end_step and (step - begin_step) % frequency == 0:
            sparsity = _sparsity(step, final_sparsity, begin_step, end_step)
            for group in groups:
                _mask_smallest(group, sparsity)

    return model, update


class _MaskUncalled:
    """Masks, before a pass, the weights of layers that a pass did not call; all in another mode.

    Some modules read the weight of a layer and do not call it, such as the attention of
    torchvision's Swin Transformer, or do so in evaluation alone: the layer's own hook does not run.
    """

    def __init__(self, layers: list[nn.Module]) -> None:
        self.layers, self.seen, self.mode = layers, [0] * len(layers), None

    def __call__(self, model: nn.Module, inputs) -> None:
        traced = torch.compiler.is_compiling()  # a compiler leaves out what nobody reads
        for index, layer in enumerate(self.layers):
            if self.seen[index] == id(layer.weight):  # a call makes another
                self.seen[index] = None
            if traced or self.mode != model.training or self.seen[index] is None:
                for hook in layer._forward_pre_hooks.values():
                    if isinstance(hook, prune.BasePruningMethod):
                        hook(layer, inputs)
            if not traced and self.seen[index] is not None:
                self.seen[index] = id(layer.weight)
        if not traced:
            self.mode = model.training


def _put_bias_last(module: nn.Module) -> None:
    """Undo that `prune` puts the weight there: saved optimizers know parameters by their order."""
    if "bias" in module._parameters:
        module._parameters["bias"] = module._parameters.pop("bias")


def _copy(model: nn.Module) -> nn.Module:
    try:
        return copy.deepcopy(model)
    except Exception as error:  # of `weight_norm` after a pass with gradients: a computed tensor
        line = " ".join(str(error).split())
        raise NotImplementedError(f"Python cannot copy the model: {line}") from error


def _check_settings(final_sparsity, begin_step, end_step, frequency) -> None:
    if not 0.0 <= final_sparsity < 1.0:
        raise ValueError(f"final_sparsity must be at least 0 and below 1, not {final_sparsity!r}")
    if not 0 <= begin_step < end_step:
        raise ValueError(
            f"begin_step must be at least 0 and below end_step, not {begin_step!r} and {end_step!r}"
        )
    if frequency < 1:
        raise ValueError(f"frequency must be at least 1, not {frequency!r}")
    if (end_step - begin_step) % frequency:
        raise ValueError(
            f"no update would fall on end_step, where final_sparsity is reached: {end_step} - "
            f"{begin_step} must be a multiple of the frequency, {frequency}"
        )


def _prunable(model: nn.Module, min_weights: int) -> list[nn.Module]:
    """Dense and convolution layers of at least so many weights, each once.

    Of these types exactly: a subclass may read its weight without a forward pass, as that of
    `nn.MultiheadAttention` does, and never see the mask. A head whose kernel is an embedding stays
    dense, as embeddings do: what is looked up would lose its smallest entries.
    """
    embeddings = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    return [
        module
        for module in model.modules()
        if (
            type(module) is nn.Linear
            # Depthwise convolutions have few weights, and tfmot leaves them dense too.
            or (type(module) in _CONVOLUTIONS and not 1 < module.groups == module.in_channels)
        )
        and "weight" in module._parameters  # not computed before each pass, as `weight_norm` does
        and id(module.weight) not in embeddings
        and module.weight.numel() >= min_weights
    ]


def _check_model(model: nn.Module, min_weights: int) -> None:
    if prune.is_pruned(model):
        raise ValueError("the model has pruning masks already: finalize it first")
    layers = set(_prunable(model, min_weights))
    if not layers:
        least = f" of {min_weights} weights or more" if min_weights else ""
        raise ValueError(f"the model has no dense or convolution layer{least} to prune")
    modules = dict(model.named_modules())
    owners = Counter(id(p) for m in modules.values() for p in m.parameters(recurse=False))
    for name, module in modules.items():
        if module in layers and owners[id(module.weight)] > 1:
            raise NotImplementedError(
                f"torch.nn.utils.prune masks one module's tensor, but {name}.weight has two owners"
            )


def _sparsity(step: int, final: float, begin: int, end: int) -> Tensor:
    """The share of zeros at `step`: a float32 scalar, computed in the order in which tfmot does.

    In float64 some counts of weights would be rounded to another integer.
    """
    left = 1 - torch.tensor(float(step - begin)) / (end - begin)
    return final - final * left**3


@torch.no_grad()
def _mask_smallest(layers: list[nn.Module], sparsity: Tensor) -> None:
    """Mask all but the largest weights of `layers`; what is masked stays so."""
    magnitudes = [(layer.weight_orig * layer.weight_mask).abs() for layer in layers]
    every = torch.cat([magnitude.flatten() for magnitude in magnitudes])
    count = len(every)
    threshold = every.kthvalue(count - _kept(count, sparsity) + 1).values  # the smallest that stays
    for layer, magnitude in zip(layers, magnitudes, strict=True):
        layer.weight_mask.mul_(magnitude >= threshold)


def _kept(count: int, sparsity: Tensor) -> int:
    """How many of `count` weights stay: one or more, and no more than there are.

    float32 rounds counts above 2**24, up as well.
    """
    return min(max(int(torch.round(count * (1 - sparsity))), 1), count)


def main() -> None:
    """Print the digits CNN trained to its plateau, and from there on dense and pruned."""
    import itertools
    import statistics
    import tempfile
    import time
    from pathlib import Path

    from pt_impl.kit import data, models, runtime, training
    from shared import datasets
    from shared.specs import TASKS
    from shared.weights import init_weights

    task = TASKS["digits-cnn"]
    recipe = task.recipe
    with tempfile.TemporaryDirectory() as folder:
        folder = datasets.materialise(task.dataset, Path(folder))
        train = data.to_device(*datasets.load(folder, "train"))
        test = data.to_device(*datasets.load(folder, "test"))
    weights = init_weights(task.model, seed=0)
    print("                ms a step  accuracy  zeros in all kernels")
    for name, sparsity in (("trained", 0), ("dense", 0), ("80% zeros", 0.8), ("95% zeros", 0.95)):
        model, update = models.build(task.model, weights), None
        if sparsity:
            settings = {"begin_step": 0, "end_step": 420, "frequency": 10, "min_weights": 1000}
            model, update = apply_pruning(model, final_sparsity=sparsity, **settings)
        optimizer = training.make_optimizer(model, recipe)
        step = training.make_train_step(model, optimizer, training.cross_entropy)
        times, numbers, size = [], itertools.count(1), recipe.accuracy_batch_size
        for epoch in range(recipe.epochs):
            for pair in data.epoch_batches(*train, batch_size=size, seed=0, epoch=epoch):
                start = time.perf_counter()
                if update:
                    update(next(numbers))
                step(*pair)
                runtime.synchronize()
                times.append(time.perf_counter() - start)
        if update:
            model = finalize_pruning(model)
        predict = training.make_predict(model)
        accuracy = training.evaluate(predict, *test, metric="accuracy", batch_size=size)
        kernels = [v for k, v in models.export_weights(model).items() if k.endswith("kernel")]
        zeros = sum((k == 0).sum() for k in kernels) / sum(k.size for k in kernels)
        ms = statistics.fmean(times) * 1e3
        print(f"{name:14}{ms:11.2f}{accuracy:10.1f}{zeros:22.3f}")
        if name == "trained":
            weights = models.export_weights(model)


if __name__ == "__main__":
    main()
