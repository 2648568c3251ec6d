"""Regularization: weight decay, label smoothing, dropout, and what BatchNorm does beside its work.

What it changes: what a step minimizes beside the loss, and so what the model can learn by heart.

- L2 in the loss: `l2_penalty`, weight_decay / 2 times the sum of squares, whose gradient is
  weight_decay times the weight. With plain SGD that is decay: each step takes rate x weight_decay
  of the weight away.
- Decoupled decay (Loshchilov and Hutter, 2019, "Decoupled Weight Decay Regularization"): the step
  takes the same share away beside the gradient. Under Adam the two are not the same: a penalty's
  gradient goes through the moments and is divided by the root of the second one, so that weights
  with large gradients decay less; in the extreme only its sign counts.
- Decay for kernels alone: a bias or a scale of normalisation has nothing to overfit with, and an
  embedding that a batch does not touch should not shrink (He et al., 2019, "Bag of Tricks",
  section 3.1: no bias decay). Each can be taken in.
- `scale_decay`: a share a step is one an epoch only for one batch size. At the same rate, a batch
  of k times the nominal one takes k times fewer steps, and wants k times the decay. Not where the
  rate is scaled with the batch, too: the share is their product.
- Label smoothing (Szegedy et al., 2016, "Rethinking the Inception Architecture", section 7).
- Dropout (Srivastava et al., 2014) before the head of a model that has none, and the rate of what
  there is.
- BatchNorm is a regularizer beside its work: a sample's output depends on its companions in the
  batch, which is noise of 1 / batch size (Luo et al., 2019, "Towards Understanding Regularization
  in Batch Normalization"). To see it: compare the loss of one batch in training mode with that in
  evaluation mode, and train with half and twice the batch. Nothing has to be switched on.

Its twin: `tf_impl/recipes/regularization.py`.

Where the frameworks differ and why:
- `weight_decay` means two things in PyTorch: L2 in `Adam` and `SGD`, decoupled in `AdamW` and where
  `decoupled_weight_decay=True` says so. Every Keras optimizer decouples, SGD as well: with momentum
  that is not PyTorch's SGD, whose buffer takes the decay in. Such optimizers are refused here.
- What decays is a matter of parameter groups, which may be set at any time; in Keras the optimizer
  is told before it is built.
- `Linear.weight` and an embedding's are both `weight`: the module tells them apart. Keras calls
  kernels kernels.
- `F.cross_entropy` smooths sparse labels itself; Keras does it for one-hot ones alone.
- Keras's `regularizers.L2(l)` is l times the sum, without the half: give it weight_decay / 2.
- Dropout before the head is a hook here: names of weights stay. Keras models are graphs, of which
  a new one is made over the same layers.
- A module reads its rate in every call. A traced Keras step keeps the old one: trace anew.

When it helps and when it hurts: all of it helps where training and validation part: few labels,
many epochs, large models. Where a model does not yet fit its training data, all of it hurts. Decay
in front of BatchNorm does not shrink the function, as the scale is divided out: it raises the
effective rate (van Laarhoven, 2017). Smoothed labels make probabilities too timid on purpose, and
are poor teachers for distillation (Müller et al., 2019). Dropout before BatchNorm shifts its
variance between training and inference (Li et al., 2019): it belongs behind the last one.

Run it alone: `python -m pt_impl.recipes.regularization` prints training beside validation.

Copy with it: nothing.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer

NORMS = (
    nn.modules.batchnorm._NormBase,
    nn.LayerNorm,
    nn.GroupNorm,
    nn.RMSNorm,
)


def decayed_parameters(
    model: nn.Module, *, biases: bool = False, norms: bool = False, embeddings: bool = False
) -> list[str]:
    """The names of the parameters that decay: kernels, and what is asked for.

    Kernels are weights of two or more axes that are no embedding's (nor tied to one). Frozen
    parameters never decay, nor do those that are none of these: class tokens, positions, slopes.
    """
    wanted = {"kernel", *_asked(biases, norms, embeddings)}
    kinds = _kinds(model)
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    return [name for name, p in named if kinds[id(p)] in wanted]


def l2_penalty(
    model: nn.Module,
    *,
    weight_decay: float,
    biases: bool = False,
    norms: bool = False,
    embeddings: bool = False,
) -> Tensor:
    """Return weight_decay / 2 times the sum of squares of what decays, to be added to a loss."""
    _check_decay(weight_decay)
    names = decayed_parameters(model, biases=biases, norms=norms, embeddings=embeddings)
    if not names:
        raise ValueError("the model has nothing that decays")
    parameters = dict(model.named_parameters())
    return _penalty([parameters[name] for name in names], weight_decay)


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
    decayed = _wanted(model, **settings)

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

    Splits each parameter group in two; what is frozen decays once it trains. Returns the names of
    what decays now. Raises NotImplementedError for an optimizer whose decay is L2, and ValueError
    where a scheduler stands at it, which counts the groups, or nothing that it trains decays.
    """
    _check_decay(weight_decay)
    _refuse_l2(optimizer)
    if any("initial_lr" in group for group in optimizer.param_groups):
        raise ValueError("a scheduler stands at the optimizer: set the decay first")
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    wanted = _wanted(model, biases=biases, norms=norms, embeddings=embeddings)
    decayed = {id(p) for p in wanted} & held
    if not decayed:
        raise ValueError("the model has nothing in the optimizer that decays")
    named = model.named_parameters()
    names = [name for name, p in named if p.requires_grad and id(p) in decayed]
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
    return names


def scale_decay(*, weight_decay: float, batch_size: int, nominal_batch_size: int = 64) -> float:
    """Return the decay for `batch_size` where `weight_decay` is right for the nominal one.

    The share that an epoch takes away is then the same, at the same rate. batch_size: of a whole
    update, so times the accumulated batches and the replicas.
    """
    if batch_size < 1 or nominal_batch_size < 1:
        raise ValueError(f"batch sizes are 1 or more, not {batch_size}, {nominal_batch_size}")
    return weight_decay * batch_size / nominal_batch_size


def smoothed_cross_entropy(logits, labels: Tensor, *, smoothing: float = 0.1) -> Tensor:
    """Mean cross-entropy with 1 - smoothing of the target on the label, the rest on all classes.

    logits (..., classes), or an output that has them as `.logits`; labels integers of the leading
    shape, -100 for none. float32.
    """
    _check_share(smoothing, "smoothing")
    logits = getattr(logits, "logits", logits).float().flatten(0, -2)
    return F.cross_entropy(logits, labels.flatten(), label_smoothing=smoothing)


def add_dropout(model: nn.Module, *, rate: float, head: str = "") -> nn.Module:
    """Put dropout before the head, in place; return the model.

    head: the name of its module, whose first argument is a tensor; without one, the last
    `nn.Linear` that the model defines. Names of weights stay. Raises ValueError where there is no
    head, one of several that none names, or dropout before it already.
    """
    _check_share(rate, "rate")
    modules = dict(model.named_modules())
    head = head or _last_linear(modules)
    if head not in modules or not head:
        raise ValueError(f"no head {head!r}: name the module before which dropout is to stand")
    hooks = modules[head]._forward_pre_hooks.values()
    if isinstance(_before(modules, head), nn.Dropout) or any(
        isinstance(hook, _Dropout) for hook in hooks
    ):
        raise ValueError(f"{head} has dropout before it: set its rate with set_dropout_rate")
    modules[head].register_forward_pre_hook(_Dropout(rate), with_kwargs=True)
    return model


def set_dropout_rate(model: nn.Module, *, rate: float) -> list[str]:
    """Set the rate of every dropout that is on (rate above 0), in place; return their names.

    Of modules, of attention, and of `add_dropout`; not within recurrent layers, nor what a
    `forward` passes to `F.dropout` by itself. Raises ValueError where there is none.
    """
    _check_share(rate, "rate")
    found = []
    for name, module in model.named_modules():
        own = {nn.modules.dropout._DropoutNd: "p", nn.MultiheadAttention: "dropout"}
        attribute = next((a for kind, a in own.items() if isinstance(module, kind)), None)
        if attribute and getattr(module, attribute) > 0:
            setattr(module, attribute, rate)
            found.append(name)
        for hook in module._forward_pre_hooks.values():
            if isinstance(hook, _Dropout):
                hook.rate = rate
                found.append(name)
    if not found:
        raise ValueError("the model has no dropout that is on: use add_dropout")
    return found


def _last_linear(modules: dict[str, nn.Module]) -> str:
    """The name of the last one; raises ValueError where another seems to read the same.

    That is the one before, of one module with it, with as many inputs and other outputs: classes
    beside boxes, an actor beside a critic.
    """
    names = [name for name, module in modules.items() if type(module) is nn.Linear]
    if not names:
        return ""
    other, head = names[-2:] if len(names) > 1 else (None, names[0])
    around = head.rpartition(".")[0]
    beside = other is not None and other.rpartition(".")[0] == around
    if beside and not isinstance(modules[around], nn.Sequential):
        count, before = modules[head].in_features, modules[other]
        if before.in_features == count != before.out_features:
            both = f", or {around} for both" if around else ""
            raise ValueError(f"{other} seems to be a head beside {head}: name one{both}")
    return head


def _before(modules: dict[str, nn.Module], head: str) -> nn.Module | None:
    """The layer that runs before the head, as far as definitions tell: within blocks they don't."""
    leaves = [name for name, module in modules.items() if not list(module.children())]
    if head not in leaves[1:]:
        return None
    before = leaves[leaves.index(head) - 1]
    around = [name for name in modules if before.startswith(f"{name}.")]
    within = [modules[name] for name in around if not head.startswith(f"{name}.")]
    return modules[before] if all(isinstance(m, nn.Sequential) for m in within) else None


class _Dropout:
    """Drops the input of the module that it hooks, when that is in training mode."""

    def __init__(self, rate: float) -> None:
        self.rate = rate

    def __call__(self, module: nn.Module, inputs: tuple, named: dict) -> tuple:
        if inputs:
            return (F.dropout(inputs[0], self.rate, module.training), *inputs[1:]), named
        name, x = next(iter(named.items()))
        return (), named | {name: F.dropout(x, self.rate, module.training)}


def _wanted(model: nn.Module, **settings: bool) -> list[nn.Parameter]:
    """What decays, or would if it were not frozen."""
    wanted, kinds = {"kernel", *_asked(**settings)}, _kinds(model)
    return [p for p in model.parameters() if kinds[id(p)] in wanted]


def _penalty(parameters: list[nn.Parameter], weight_decay: float) -> Tensor:
    double = all(parameter.dtype == torch.float64 for parameter in parameters)
    widest = torch.float64 if double else torch.float32
    return weight_decay / 2 * sum(p.to(widest).square().sum() for p in parameters)


def _kinds(model: nn.Module) -> dict[int, str]:
    """Of each parameter: "kernel", "bias", "norm", "embedding" or "other"."""
    found: dict[int, str] = {}
    for module in model.modules():
        for name, parameter in _own(module):
            if isinstance(module, nn.Embedding | nn.EmbeddingBag):
                found[id(parameter)] = "embedding"  # also where a head is tied to it
            elif isinstance(module, NORMS):
                found.setdefault(id(parameter), "norm")
            elif "bias" in name:
                found.setdefault(id(parameter), "bias")
            else:
                kernel = "weight" in name and parameter.ndim > 1
                found.setdefault(id(parameter), "kernel" if kernel else "other")
    return found


def _own(module: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """The parameters of this module itself, by the names that it knows them by."""
    found = list(module.named_parameters(recurse=False))
    if nn.utils.parametrize.is_parametrized(module):  # what a weight is computed from is its own
        for name, originals in module.parametrizations.items():
            found += [(name, p) for p in originals.parameters(recurse=False)]
    return found


def _asked(biases: bool, norms: bool, embeddings: bool) -> set[str]:
    asked = {"bias": biases, "norm": norms, "embedding": embeddings}
    return {kind for kind, wanted in asked.items() if wanted}


def _refuse_l2(optimizer: Optimizer) -> None:
    kind = type(optimizer).__name__
    always = kind in ("AdamW", "Adafactor", "Muon")
    for group in optimizer.param_groups:
        plain = kind == "SGD" and not group["momentum"]  # L2 and decay are the same
        if not (always or plain or group.get("decoupled_weight_decay")):
            raise NotImplementedError(
                f"the weight_decay of {kind} is a gradient, which its state takes in: use AdamW or "
                "decoupled_weight_decay=True, or l2_penalty for what it does"
            )


def _check_decay(weight_decay: float) -> None:
    if not 0 <= weight_decay < float("inf"):
        raise ValueError(f"weight_decay is 0 or more, not {weight_decay!r}")


def _check_share(share: float, name: str) -> None:
    if not 0 <= share < 1:
        raise ValueError(f"{name} is at least 0 and below 1, not {share!r}")


def main() -> None:
    """Print accuracies on 400 handwritten digits that are learned by heart, and on others."""
    import tempfile
    from pathlib import Path

    from pt_impl.kit import data, models, training
    from shared import datasets
    from shared.specs import TASKS
    from shared.weights import init_weights

    task = TASKS["digits-cnn"]
    with tempfile.TemporaryDirectory() as folder:
        folder = datasets.materialise(task.dataset, Path(folder))
        x, y = (part[:400] for part in data.to_device(*datasets.load(folder, "train")))
        test = data.to_device(*datasets.load(folder, "test"))
    print("                   training  validation")
    for name in ("nothing", "decoupled decay", "label smoothing", "dropout"):
        model = models.build(task.model, init_weights(task.model, seed=0))
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.0)
        loss_fn = smoothed_cross_entropy if name == "label smoothing" else training.cross_entropy
        if name == "dropout":
            model = add_dropout(model, rate=0.5)
        if name == "decoupled decay":
            apply_decoupled_decay(model, optimizer, weight_decay=0.5)
        step = training.make_train_step(model, optimizer, loss_fn)
        training.fit(step, x, y, batch_size=50, epochs=20, seed=0)
        predict = training.make_predict(model)
        found = [
            training.evaluate(predict, *given, metric="accuracy", batch_size=200)
            for given in ((x, y), test)
        ]
        print(f"{name:17}{found[0]:10.1f}{found[1]:12.1f}")


if __name__ == "__main__":
    main()
