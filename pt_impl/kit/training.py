"""The baseline: an eager float32 train step, prediction, and the loops around them.

What it holds: optimizers from a `shared.specs.Recipe`, a task's loss, the train step that every
technique is compared with, training for some epochs, evaluation.
Twin: `tf_impl/kit/training.py`.
Where the frameworks differ: this step is eager, as PyTorch is used by default; its twin is one
`tf.function`. PyTorch adds the epsilon of RMSprop outside the square root, and that is the rule of
the suite.
"""

import math
from collections.abc import Callable

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_map  # torch has no public one

from pt_impl.kit import data, detection
from pt_impl.kit.calling import call, trains
from shared import boxes
from shared.specs import NO_LABEL, DetectorSpec, Recipe, Task

Step = Callable[..., Tensor]
Predict = Callable[..., Tensor]


def make_optimizer(model: nn.Module, recipe: Recipe) -> torch.optim.Optimizer:
    """Make the optimizer of `recipe` with every hyperparameter explicit.

    The implementation is PyTorch's default one (a loop over tensors on a CPU, multi-tensor on
    CUDA). The rules, with gradient g, step t and learning rate lr:

    - "sgd": v = momentum v + g; w -= lr v
    - "adamw": w -= lr weight_decay w, then w -= lr m̂ / (sqrt(v̂) + eps), with m̂ and v̂ the
      moments of `beta1` and `beta2` corrected for bias (Loshchilov and Hutter, 2019); every
      parameter decays
    - "rmsprop": v = rho v + (1 - rho) g²; w -= lr g / (sqrt(v) + eps)
    """
    parameters = model.parameters()
    if recipe.optimizer == "sgd":
        return torch.optim.SGD(
            parameters,
            lr=recipe.learning_rate,
            momentum=recipe.momentum,
            dampening=0.0,
            weight_decay=0.0,
            nesterov=False,
        )
    if recipe.optimizer == "adamw":
        return torch.optim.AdamW(
            parameters,
            lr=recipe.learning_rate,
            betas=(recipe.beta1, recipe.beta2),
            eps=recipe.eps,
            weight_decay=recipe.weight_decay,
            amsgrad=False,
        )
    if recipe.optimizer == "rmsprop":
        return torch.optim.RMSprop(
            parameters,
            lr=recipe.learning_rate,
            alpha=recipe.rho,
            eps=recipe.eps,
            weight_decay=0.0,
            momentum=0.0,
            centered=False,
        )
    raise ValueError(f"unknown optimizer {recipe.optimizer!r}: sgd, adamw or rmsprop")


def cross_entropy(logits, labels: Tensor) -> Tensor:
    """Mean cross-entropy over all positions, a float32 scalar.

    `logits` (..., classes) of any float dtype, or an output that has them as `.logits`; `labels`
    int64 of the leading shape: (n,) or (n, t).
    """
    return F.cross_entropy(_logits(logits).float().flatten(0, -2), labels.flatten())


def sample_cross_entropy(logits, labels: Tensor) -> Tensor:
    """Cross-entropy of each sample, float32 (n,), of logits (n, classes) and labels (n,)."""
    return F.cross_entropy(_logits(logits).float(), labels, reduction="none")


def softmax(logits: Tensor) -> Tensor:
    """The probabilities of the last axis's classes."""
    return logits.softmax(-1)


def probability_cross_entropy(probabilities: Tensor, labels: Tensor) -> Tensor:
    """Mean of -log of the labels' probabilities, (n, classes) and (n,), where a model gives these.

    Not as exact as `cross_entropy`: `recipes/loss_checks.py` shows what is lost.
    """
    return F.nll_loss(probabilities.log(), labels)


def masked_cross_entropy(logits, labels: Tensor) -> Tensor:
    """Mean cross-entropy over the positions whose label is not `NO_LABEL`, a float32 scalar."""
    logits = _logits(logits).float().flatten(0, -2)
    return F.cross_entropy(logits, labels.flatten(), ignore_index=NO_LABEL)


def loss_of(task: Task) -> Callable:
    """The loss that a task is trained with: `loss(output, y)`."""
    if isinstance(task.model, DetectorSpec):
        return detection.make_detection_loss(task.model)
    if task.dataset.kind == "masked":
        return masked_cross_entropy
    return cross_entropy


def _logits(output) -> Tensor:
    """The logits of an output, which pretrained models wrap in a dataclass."""
    return getattr(output, "logits", output)


def make_train_step(model: nn.Module, optimizer: torch.optim.Optimizer, loss_fn: Callable) -> Step:
    """Make the baseline step: eager, float32. `step(x, y)` updates the model, returns the loss.

    x: a tuple of the model's positional arguments, a mapping of its keywords, or its one argument.
    The loss stays on the device: reading it on the host would wait for the device in every step.
    """
    model.train()

    def step(x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad(set_to_none=True)
        loss = loss_fn(call(model, x), y)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def make_update(model: nn.Module, optimizer: torch.optim.Optimizer, gradients: list) -> Callable:
    """Make `update()`: only the optimizer's part of a step, on what `gradients` hold then.

    gradients: one tensor a trainable parameter, in the model's order; they become its `.grad`.
    """
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient
    return optimizer.step


def make_predict(model: nn.Module) -> Predict:
    """Make `predict(x) -> output` in evaluation mode, x as in the step; modes are left as found."""

    def predict(x: Tensor) -> Tensor:
        # Module by module: a part may be in another mode than its model, such as a frozen BatchNorm
        # or, in a model that is frozen, a head that is trained.
        modes = {module: module.training for module in model.modules()} if trains(model) else {}
        try:
            if modes:
                model.eval()
            # What a model keeps of a call, such as a mask, is trained with later.
            with torch.no_grad() if modes else torch.inference_mode():
                return call(model, x)
        finally:
            for module, mode in modes.items():
                if module.training != mode:
                    module.train(mode)  # some do more in it, as LoRA does

    return predict


def fit(step: Step, x: Tensor, y: Tensor, *, batch_size: int, epochs: int, seed: int) -> float:
    """Train for `epochs` over the shared batch order; x and y as `data.to_device` returned them.

    Returns the loss of the last batch. Raises ValueError where no batch would be drawn.
    """
    loss = None
    for epoch in range(epochs):
        for batch in data.epoch_batches(x, y, batch_size=batch_size, seed=seed, epoch=epoch):
            loss = step(*batch)
    if loss is None:
        raise ValueError(f"no batch of {batch_size} in {epochs} epochs of {len(x)} samples")
    return float(loss)


def evaluate(predict: Predict, x, y: Tensor, *, metric: str, batch_size: int) -> float:
    """Evaluate over all of x and y: "accuracy" in percent, or "bits_per_character".

    x: a tensor, or a tuple or dict of tensors with a row a sample. The last batch may be smaller.
    Positions whose label is `NO_LABEL` don't count. Sums stay on the device until the end.
    """
    score = {"accuracy": _correct, "bits_per_character": _bits}.get(metric)
    if score is None:
        raise ValueError(f"unknown metric {metric!r}: accuracy or bits_per_character")
    total = 0.0
    for start in range(0, len(y), batch_size):
        rows = slice(start, start + batch_size)
        logits = _logits(predict(tree_map(lambda whole, rows=rows: whole[rows], x)))
        total = total + score(logits.float(), y[rows])
    return float(total) / int((y != NO_LABEL).sum())


def evaluate_task(
    predict: Predict, x, y: Tensor, task: Task, *, batch_size: int, metric: str = ""
) -> float:
    """Evaluate by the task's metric over all of x and y, or by another `metric` of its kind."""
    metric = metric or task.metric
    if metric not in boxes.OVERLAPS:
        return evaluate(predict, x, y, metric=metric, batch_size=batch_size)
    outputs = [
        predict(x[start : start + batch_size]).float().cpu().numpy()
        for start in range(0, len(x), batch_size)
    ]
    found = boxes.decode(task.model, np.concatenate(outputs))
    objects = boxes.objects(y.cpu().numpy())
    return boxes.mean_average_precision(found, objects, metric=metric)


def _correct(logits: Tensor, labels: Tensor) -> Tensor:
    return 100.0 * (logits.argmax(-1) == labels).sum(dtype=torch.float64)


def _bits(logits: Tensor, labels: Tensor) -> Tensor:
    nats = F.cross_entropy(logits.flatten(0, -2), labels.flatten(), reduction="none")
    return nats.sum(dtype=torch.float64) / math.log(2.0)


def digits_cnn(batch_size: int) -> Callable:
    """The baseline step of the digits CNN on `batch_size` random images: a trial of that size."""
    from pt_impl.kit import models
    from shared.specs import TASKS

    task, random = TASKS["digits-cnn"], np.random.default_rng(0)
    model = models.build(task.model)
    optimizer = make_optimizer(model, task.recipe)
    step = make_train_step(model, optimizer, cross_entropy)
    images = random.normal(size=(batch_size, *task.model.input_shape)).astype(np.float32)
    batch = data.to_device(images, random.integers(0, 10, batch_size))
    return lambda: step(*batch)
