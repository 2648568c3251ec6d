"""PyTorch's steps on models that nobody here wrote, and what plain code makes of them."""

from collections import UserDict
from contextlib import contextmanager
from functools import cache, partial, wraps
from unittest import mock

import numpy as np
import torch
from torch import nn

from pt_impl import kit
from pt_impl.deployment import native_export, reduced_precision
from pt_impl.train_step import (
    accumulated_statistics,  # noqa: F401 - the tests take these
    activation_checkpointing,
    baseline,  # noqa: F401
    compilation,
    finite_guard,
    gradient_accumulation,
    gradient_clipping,
    mixed_precision,
    optimizer_implementations,
    stacking,
)
from pt_impl.train_step.memory_format import apply_memory_format
from tests.train_step import pt_foreign_models as foreign
from tests.train_step.pt_foreign_models import SAMPLES
from tests.train_step.pt_steps import call

NORM, PARTS = 0.1, 3


def optimizer_of(model):
    """Its decay would reach what has no gradient, were that zero instead of none."""
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1)


# Plain code: how gradients come about, and what happens to them ----------------------------------


def backward(model, x, y, loss_fn):
    loss = loss_fn(call(model, x), y)
    loss.backward()
    return loss


def autocast(model, x, y, loss_fn):
    with torch.autocast("cpu", torch.bfloat16):
        output = call(model, x)
    loss = loss_fn(output, y)  # the losses of the models cast to float32
    loss.backward()
    return loss


def in_parts(count, model, x, y, loss_fn):
    total = 0.0
    for index in range(count):
        rows = slice(index * SAMPLES // count, (index + 1) * SAMPLES // count)
        share = len(y[rows]) / SAMPLES
        part = lambda output, y, share=share: loss_fn(output, y) * share  # noqa: E731
        total += backward(model, cut(x, rows), y[rows], part).detach()
    return total


def cut(x, rows):
    if isinstance(x, UserDict):
        return {name: part[rows] if torch.is_tensor(part) else part for name, part in x.items()}
    return x[rows]


def clip(model):
    nn.utils.clip_grad_norm_(model.parameters(), NORM)


def clip_each(model):
    for parameter in model.parameters():
        nn.utils.clip_grad_norm_(parameter, NORM)


def by_hand(model, optimizer, loss_fn, gradients=backward, change=lambda model: None):
    model.train()

    def step(x, y):
        optimizer.zero_grad()
        loss = gradients(model, x, y, loss_fn)
        change(model)
        optimizer.step()
        return loss.detach()

    return step


def plain(model, optimizer, loss_fn):
    return by_hand(model, optimizer, loss_fn)


def trained(make, make_step, dtype=torch.float32):
    """Losses of two steps, and all parameters and buffers after them."""
    model, x, y, loss_fn = make()
    model = model.to(dtype)
    if dtype != torch.float32:
        x = x.to(dtype)
    step = make_step(model, optimizer_of(model), loss_fn)
    torch.manual_seed(1)  # dropout
    losses = np.array([step(x, y).item() for _ in range(2)])
    state = (*model.parameters(), *model.buffers())
    return [losses, *(tensor.detach().float().numpy().copy() for tensor in state)]


expected = cache(lambda make, theirs: trained(make, theirs))


# The steps ---------------------------------------------------------------------------------------


def eager(model, optimizer, loss_fn):
    return kit.training.make_train_step(model, optimizer, loss_fn)


def on(change, **settings):
    """The plain step on a changed model."""
    return lambda model, *given: eager(change(model, **settings), *given)


def with_settings(make, **settings):
    return lambda *given: make(*given, **settings)


half = partial(by_hand, gradients=autocast)
checkpointing = activation_checkpointing.apply_checkpointing
stacked, accumulate = stacking.make_train_step, gradient_accumulation.make_train_step
THIRDS, SINGLE = (partial(by_hand, gradients=partial(in_parts, n)) for n in (PARTS, SAMPLES))
STEPS = {
    "kit": (eager, plain),
    "float32": (with_settings(mixed_precision.make_train_step, dtype="float32"), plain),
    "bfloat16": (mixed_precision.make_train_step, half),
    "eager": (compilation.eager_train_step, plain),
    "graph": (compilation.graph_train_step, plain),
    "1 part": (with_settings(accumulate, micro_batches=1), plain),
    "parts": (with_settings(accumulate, micro_batches=PARTS), THIRDS),
    "clip": (
        with_settings(gradient_clipping.make_train_step, max_norm=NORM),
        partial(by_hand, change=clip),
    ),
    "clip each": (
        with_settings(gradient_clipping.make_per_variable_step, max_norm=NORM),
        partial(by_hand, change=clip_each),
    ),
    "no clip": (with_settings(gradient_clipping.make_train_step, max_norm=float("inf")), plain),
    "guard": (finite_guard.make_train_step, plain),
    "recomputed": (on(checkpointing, blocks="*"), plain),
    "products": (on(checkpointing, blocks="*", save_products=True), plain),
    "channels_last": (on(apply_memory_format), plain),
    "stacking": (stacked, plain),
    "stacking parts": (with_settings(stacked, micro_batches=SAMPLES), SINGLE),
    "stacking bfloat16": (
        with_settings(stacked, dtype="bfloat16", max_norm=NORM),
        partial(half, change=clip),
    ),
}
BARS = {"channels_last": 1e-5, "stacking parts": 1e-6}  # other kernels; sums, then a division
REFUSED = {
    ("channels_last", "everything"): "the model has no 4-D parameter",
    ("products", "in_place"): "save_products: block 'depthwise' changes a product in place",
}


def compare(name, kind) -> float:
    """How far the step is from plain code."""
    torch.compiler.reset()
    ours, theirs = STEPS[name]
    make = getattr(foreign, kind)
    pairs = zip(trained(make, ours), expected(make, theirs), strict=True)
    return max(np.linalg.norm(a - b) / (np.linalg.norm(b) or 1.0) for a, b in pairs)


# Compiled ----------------------------------------------------------------------------------------


@contextmanager
def captured():
    """`torch.compile` without its compiler; gives a list that grows with each captured graph."""
    ours, graphs = torch.compile, []

    def note(graph, inputs):
        graphs.append(graph)
        return graph.forward

    @wraps(ours)
    def capture(function, *, mode=None, backend=None, **settings):
        return ours(function, backend=note, **settings)

    torch.compiler.reset()
    with (
        mock.patch.object(torch, "compile", capture),
        torch._dynamo.config.patch(recompile_limit=2),  # eight by default
    ):
        yield graphs


def of_x(make):
    """A step of a prediction or an update."""

    def made(model, *_):
        run = make(model)
        return lambda x, y: run(x)

    return made


def compiled_update(model):
    gradients = [torch.ones_like(parameter) for parameter in model.parameters()]
    optimizer = optimizer_implementations.compiled_optimizer(model, learning_rate=0.1)
    update = kit.training.make_update(model, optimizer, gradients)
    return lambda x: update()


COMPILED = {
    "graph": compilation.graph_train_step,
    "compiled": compilation.compiled_train_step,
    "fullgraph": compilation.fullgraph_train_step,
    "model": compilation.compiled_model_train_step,
    "blocks": with_settings(compilation.compiled_model_train_step, blocks="blocks.*"),
    "predict": of_x(compilation.compiled_predict),
    "stacking": with_settings(stacked, compiled=True),
    "update": of_x(compiled_update),
    "in place": of_x(lambda model: native_export.compiled_predict(model.eval())),
}


def leaves(output) -> list:
    if isinstance(output, foreign.Output):
        return [output.logits, *output.hidden]
    return list(output.values() if isinstance(output, dict) else output)


predictors = {
    "kit": kit.training.make_predict,
    "eager": compilation.eager_predict,
    "float32": partial(reduced_precision.make_predict, dtype="float32"),
}
