"""Regularization: weight decay, label smoothing and dropout, against overfitting.

    apply_decoupled_decay(model, optimizer, weight_decay=0.05)  # only of kernels
    loss_fn = functools.partial(smoothed_cross_entropy, smoothing=0.1)
    add_dropout(model, rate=0.3)

What it changes: what a step minimizes besides the loss. L2 adds weight_decay / 2 times the sum of
squares to the loss. Decoupled decay subtracts rate x weight_decay of the weights, separately from
the gradient (Loshchilov and Hutter, 2019). Under plain SGD the two are equal. Under Adam a
penalty's gradient is divided by the root of the second moment, so weights with large gradients
decay less. By default only kernels decay: biases and norms don't overfit (He et al., 2019, "Bag of
Tricks", section 3.1).

Its twin: `tf_impl/recipes/regularization.py`.

Where the frameworks differ and why:
- PyTorch: `weight_decay` is L2 in `Adam` and `SGD`, and decoupled in `AdamW`. TensorFlow: every
  Keras optimizer decouples, SGD as well.
- In PyTorch parameter groups decide what decays, at any time. A Keras optimizer has to know before
  it is built.
- `F.cross_entropy` takes class numbers with smoothing. Keras's loss smooths only one-hot labels;
  the one here takes class numbers, too.
- Dropout is added by hooks in PyTorch, in TensorFlow by a new model over the same layers. A traced
  step keeps its rates: set them before.
- Keras's `regularizers.L2(l)` is l times the sum: give it weight_decay / 2.

When it helps and when it hurts: it helps if training and validation differ: few labels, many
epochs. It hurts a model that does not yet fit its training data. Decay of weights before BatchNorm
only raises the effective rate (van Laarhoven, 2017). Smoothed labels make poor teachers (Müller et
al., 2019). Dropout belongs after the last BatchNorm, because it shifts the variance (Li et al.,
2019).

Run it alone: `python -m pt_impl.recipes.regularization` prints training and validation accuracy.

Copy with it: `pt_impl/kit/checks/regularization.py`, `pt_impl/kit/parameter_kinds.py`.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer

from pt_impl.kit.checks import regularization as checks
from pt_impl.kit.parameter_kinds import of_kinds

DROPOUTS = (
    *(nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d),
    *(nn.AlphaDropout, nn.FeatureAlphaDropout),
)


def decayed_parameters(
    model: nn.Module, *, biases: bool = False, norms: bool = False, embeddings: bool = False
) -> list[str]:
    """Return the names of the parameters that decay: kernels, and what is asked for.

    Kernels are weights of two or more axes that are no embedding's (nor tied to one). Frozen
    parameters never decay, nor do those that are none of these: class tokens, positions, slopes.
    """
    decayed = _decayed(model, biases, norms, embeddings)
    return _names(model, {id(parameter) for parameter in decayed})


def l2_penalty(
    model: nn.Module,
    *,
    weight_decay: float,
    biases: bool = False,
    norms: bool = False,
    embeddings: bool = False,
) -> Tensor:
    """Return weight_decay / 2 times the sum of squares of what decays, to be added to a loss.

    Its gradient is weight_decay times the weight. Raises ValueError where nothing decays.
    """
    checks.check_decay(weight_decay)
    trained = [p for p in _decayed(model, biases, norms, embeddings) if p.requires_grad]
    checks.check_decayed(trained)
    return _penalty(trained, weight_decay)


def make_penalized_loss(
    loss_fn: Callable,
    model: nn.Module,
    *,
    weight_decay: float,
    biases: bool = False,
    norms: bool = False,
    embeddings: bool = False,
) -> Callable:
    """Return `loss(output, y)`: the given one and the penalty, for any step that takes a loss."""
    settings = {"biases": biases, "norms": norms, "embeddings": embeddings}
    l2_penalty(model, weight_decay=weight_decay, **settings)  # refuses at once what it refuses
    decayed = _decayed(model, **settings)

    def penalized(output, y) -> Tensor:
        trained = [p for p in decayed if p.requires_grad]
        return loss_fn(output, y) + _penalty(trained, weight_decay)

    return penalized


def apply_decoupled_decay(
    model: nn.Module,
    optimizer: Optimizer,
    *,
    weight_decay: float,
    biases: bool = False,
    norms: bool = False,
    embeddings: bool = False,
) -> list[str]:
    """Let the optimizer take rate x weight_decay of kernels away each step, and of nothing else.

    Splits each parameter group in two; what is frozen decays once it trains.

    Returns:
        The names of what decays now.

    Raises:
        NotImplementedError: the decay of the optimizer is L2.
        ValueError: it has a scheduler, which counts the groups, or nothing in it decays.
    """
    checks.check_decay(weight_decay)
    wanted = _decayed(model, biases, norms, embeddings)
    checks.check_optimizer(optimizer, wanted)
    decayed = {id(parameter) for parameter in wanted}
    for group in list(optimizer.param_groups):
        # A rate may be a tensor, which a scheduler changes in place: each group needs its own.
        others = {k: v.clone() if isinstance(v, Tensor) else v for k, v in group.items()}
        decays = [id(p) in decayed for p in group["params"]]
        for key in {"params", "param_names"} & group.keys():
            others[key] = [v for v, yes in zip(group[key], decays, strict=True) if not yes]
            group[key] = [v for v, yes in zip(group[key], decays, strict=True) if yes]
        group["weight_decay"] = weight_decay
        if not group["params"]:
            optimizer.param_groups.remove(group)
        if others["params"]:
            optimizer.add_param_group(others | {"weight_decay": 0.0})
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    return _names(model, decayed & held)


def scale_decay(*, weight_decay: float, batch_size: int, nominal_batch_size: int = 64) -> float:
    """Return the decay for `batch_size` where `weight_decay` is right for the nominal one.

    A batch of k times the nominal one takes k times fewer steps: with k times the decay, an epoch
    takes the same share away, at the same rate. Where the rate is scaled with the batch, leave the
    decay: the share is their product.

    batch_size: of a whole update, so times the accumulated batches and the replicas.
    """
    checks.check_batch_sizes(batch_size, nominal_batch_size)
    return weight_decay * batch_size / nominal_batch_size


def smoothed_cross_entropy(logits, labels: Tensor, *, smoothing: float = 0.1) -> Tensor:
    """Return the mean cross-entropy with 1 - smoothing of the target on the label, float32.

    The rest is spread over all classes (Szegedy et al., 2016, "Rethinking the Inception
    Architecture", section 7).

    logits: (..., classes), or an output that has them as `.logits`. labels: integers of the leading
    shape, -100 for none.
    """
    checks.check_share(smoothing, "smoothing")
    logits = getattr(logits, "logits", logits).float().flatten(0, -2)
    return F.cross_entropy(logits, labels.flatten(), label_smoothing=smoothing)


def add_dropout(model: nn.Module, *, rate: float, head: str = "") -> nn.Module:
    """Put dropout (Srivastava et al., 2014) before the head, in place; return the model.

    It is a hook, so that names of weights stay.

    head: the name of its module, whose first argument is a tensor; without one, the last
    `nn.Linear` that the model defines. Raises ValueError where there is no head, one of several
    that none names, or dropout before it already.
    """
    checks.check_share(rate, "rate")
    module = checks.find_head(model, head, _Dropout)
    module.register_forward_pre_hook(_Dropout(rate), with_kwargs=True)
    return model


def set_dropout_rate(model: nn.Module, *, rate: float) -> list[str]:
    """Set the rate of every dropout that is on (rate above 0), in place; return their names.

    Of modules, of attention, and of `add_dropout`; not within recurrent layers, nor what a
    `forward` passes to `F.dropout` by itself. Raises ValueError where there is none, and
    NotImplementedError for one within TorchScript.
    """
    checks.check_share(rate, "rate")
    checks.check_scripted(model)
    found = []
    for name, module in model.named_modules():
        attribute = "dropout" if isinstance(module, nn.MultiheadAttention) else "p"
        has_one = isinstance(module, (nn.MultiheadAttention, *DROPOUTS))
        if has_one and getattr(module, attribute) > 0:
            setattr(module, attribute, rate)
            found.append(name)
        for hook in module._forward_pre_hooks.values():
            if isinstance(hook, _Dropout):
                hook.rate = rate
                found.append(name)
    checks.check_dropouts(found)
    return found


class _Dropout:
    """Drops the input of the module that it hooks, when that is in training mode."""

    def __init__(self, rate: float) -> None:
        self.rate = rate

    def __call__(self, module: nn.Module, inputs: tuple, named: dict) -> tuple:
        if inputs:
            return (F.dropout(inputs[0], self.rate, module.training), *inputs[1:]), named
        name, x = next(iter(named.items()))
        return (), named | {name: F.dropout(x, self.rate, module.training)}


def _decayed(model: nn.Module, biases: bool, norms: bool, embeddings: bool) -> list[nn.Parameter]:
    """What decays, or would if it were not frozen."""
    asked = {"kernel": True, "bias": biases, "norm": norms, "embedding": embeddings}
    return of_kinds(model, [kind for kind, wanted in asked.items() if wanted])


def _names(model: nn.Module, wanted: set[int]) -> list[str]:
    return [n for n, p in model.named_parameters() if p.requires_grad and id(p) in wanted]


def _penalty(parameters: list[nn.Parameter], weight_decay: float) -> Tensor:
    wide = [p.to(torch.promote_types(p.dtype, torch.float32)) for p in parameters]
    return weight_decay / 2 * sum(p.square().sum() for p in wide)


def main() -> None:
    """Print accuracies on 400 handwritten digits that are learned by heart, and on others."""
    from pt_impl.kit import training
    from pt_impl.kit.demo import Demo

    demo = Demo("digits-cnn")
    few = [part[:400] for part in demo.train]
    print("                   training  validation")
    for name in ("nothing", "decoupled decay", "label smoothing", "dropout"):
        model, _, loss_fn = demo.build()
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.0)
        if name == "decoupled decay":
            apply_decoupled_decay(model, optimizer, weight_decay=0.5)
        if name == "label smoothing":
            loss_fn = smoothed_cross_entropy
        if name == "dropout":
            add_dropout(model, rate=0.5)
        step = training.make_train_step(model, optimizer, loss_fn)
        training.fit(step, *few, batch_size=50, epochs=20, seed=0)
        predict = training.make_predict(model)
        seen = training.evaluate(predict, *few, metric="accuracy", batch_size=200)
        print(f"{name:17}{seen:10.1f}{demo.score(model):12.1f}")


if __name__ == "__main__":
    main()
