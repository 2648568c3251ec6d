"""What is done to a PyTorch model of the zoo with each technique, and what it is compared with.

The comparisons are made with plain PyTorch code, which stands here.
"""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Callable
from dataclasses import fields, is_dataclass, replace
from functools import cached_property, partial
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map
from torchvision.ops import StochasticDepth

from shared import parallel, runtimes
from shared.datasets import batch_order
from tests.zoo.cells import COARSER, Cell, Rounding, Wrong, apart, module_of
from tests.zoo.foreign import Foreign
from tests.zoo.pt import CLASSES, DEVICE, ZOO, cross_entropy, loss_of

BATCH, STEPS = 8, 2


# Plain code -------------------------------------------------------------------------------------


def call(model: nn.Module, x):
    """A tuple as positional arguments, a dict as named ones; a copy, which the model may change."""
    x = tree_map(torch.clone, x)
    if isinstance(x, dict):
        return model(**x)
    return model(*x) if isinstance(x, tuple) else model(x)


def parts(output) -> list[np.ndarray]:
    """The tensors of an output, in the order in which the model gives them."""
    if isinstance(output, Tensor):
        output = output.detach().cpu()
        return [(output if output.dtype == torch.float64 else output.float()).numpy()]
    if isinstance(output, dict):
        output = list(output.values())
    elif is_dataclass(output):
        output = [getattr(output, field.name) for field in fields(output)]
    return [array for part in output if part is not None for array in parts(part)]


def named(output) -> dict[str, np.ndarray]:
    """The tensors of an output by the names that the model gives them."""
    if is_dataclass(output):
        output = {field.name: getattr(output, field.name) for field in fields(output)}
    return {name: part for name, part in output.items() if part is not None}


def rows(x, count: int):
    """The first samples of x."""
    if isinstance(x, dict):
        return {name: part[:count] for name, part in x.items()}
    return tuple(part[:count] for part in x) if isinstance(x, tuple) else x[:count]


def predict(model: nn.Module, x):
    """In evaluation mode, without gradients; every module's mode as found."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    with torch.no_grad():
        output = call(model, x)
    for module in training:
        module.training = True
    return output


def state(model: nn.Module) -> list[np.ndarray]:
    """Floating-point parameters and buffers, as copies."""
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    found = [t.detach().cpu().numpy().copy() for t in tensors.values() if t.is_floating_point()]
    return found


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    """The optimizer of every comparison, for all that is in the model."""
    return torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)


def without_dropout(model: nn.Module) -> nn.Module:
    """No random numbers in training, for techniques that draw others."""
    for module in model.modules():
        if isinstance(module, nn.Dropout | nn.Dropout1d | nn.Dropout2d | StochasticDepth):
            module.p = 0.0
        if isinstance(module, nn.MultiheadAttention | nn.LSTM):
            module.dropout = 0.0
    return model


def sparsified(model: nn.Module) -> nn.Module:
    """The smallest nine tenths of the weights of linear layers and convolutions become zero."""
    kinds = nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, kinds):
                magnitude = module.weight.abs()
                module.weight.mul_(magnitude > magnitude.quantile(0.9))
    return model


def logits_of(output) -> Tensor:
    """The tensor that says classes."""
    return getattr(output, "logits", output)


class Applied:
    """A model of the zoo, its data and what plain code makes of it: a cell's subject."""

    def __init__(self, foreign: Foreign):
        self.foreign, self.name = foreign, foreign.name
        self.y = foreign.labels(BATCH)
        self.loss_fn = loss_of(foreign)
        self.given: list[nn.Module] = []
        self.start = state(foreign.build())
        self.folder = Path()
        self._plain: dict[str, tuple] = {}

    @property
    def x(self):
        """The inputs, anew each time: a model may change them."""
        return self.foreign.inputs(BATCH)

    def model(self) -> nn.Module:
        """A fresh one, which a refusal has to leave as it is."""
        model = self.foreign.build()
        self.given.append(model)
        return model

    def unchanged(self) -> bool:
        """Whether the models that were given are as they were."""
        same = [all(map(np.array_equal, state(model), self.start)) for model in self.given]
        return all(same)

    @cached_property
    def output(self) -> list[np.ndarray]:
        """What the model predicts."""
        return parts(predict(self.foreign.build(), self.x))

    def trained(self, step: Callable, model: nn.Module) -> tuple[list, list]:
        """The losses of some steps, and what they added to the model's state."""
        before = state(model)
        losses = []
        for number in range(STEPS):
            seed_step(number)
            losses.append(np.array(step(self.x, self.y).detach().float().cpu()))
            self.given = [other for other in self.given if other is not model]  # it may change
        return losses, [a - b for a, b in zip(state(model), before, strict=True)]

    def plain(self, key: str = "", change: Callable = lambda model: model, **settings) -> tuple:
        """The same of a plain step; kept under `key`."""
        if key not in self._plain:
            model = change(self.foreign.build()).train()
            step = partial(plain_step, model, sgd(model), settings.get("loss", self.loss_fn))
            self._plain[key] = self.trained(partial(step, settings.get("context")), model)
        return self._plain[key]

    @cached_property
    def rounding(self) -> Rounding:
        """What float32 costs this model: the distance of plain code from the same in float64.

        The larger one of the batch as it is and the other way round, which adds up otherwise.
        """
        exact = self._in_width(torch.float64)
        found = [self._in_width(torch.float32, turned=turned) for turned in (False, True)]
        return Rounding(
            *(max(apart(f, e) for f in each) for e, *each in zip(exact, *found, strict=True))
        )

    def _in_width(self, width: torch.dtype, *, turned: bool = False) -> tuple[list, list, list]:
        """Plain code's outputs, losses and updates."""
        model = without_dropout(self.foreign.build()).to(width)
        x, y = tree_map(partial(_to, width), self.x), self.y
        if turned:
            x, y = tree_map(lambda part: part.flip(0), (x, y))
        output, before = parts(predict(model, x)), state(model)
        step = partial(plain_step, model.train(), sgd(model), self.loss_fn, None)
        losses = [np.array(step(x, y).detach().cpu()) for _ in range(STEPS)]
        output = [array[::-1] for array in output] if turned else output
        return output, losses, list(map(np.subtract, state(model), before))

    def rounded(self, bits: int, *, activations: bool = False) -> float:
        """How far plain rounding moves the outputs: of weights by channel, and of what layers give.

        Nearest values on the grid between the smallest and the largest one, and nothing cleverer.
        """
        model = self.foreign.build()
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.ndim > 1:
                    most = parameter.abs().flatten(1).amax(1) / (2 ** (bits - 1) - 1)
                    scale = most.clamp(min=1e-12).view(-1, *[1] * (parameter.ndim - 1))
                    parameter.copy_((parameter / scale).round() * scale)
        for module in model.modules():
            if isinstance(module, torch.jit.ScriptModule):
                continue  # it takes no hook, and is refused by what quantizes activations
            if activations and not [*module.children()]:
                module.register_forward_hook(lambda *called: tree_map(_to_8_bits, called[-1]))
        return apart(parts(logits_of(predict(model, self.x))), self.logits)

    @cached_property
    def logits(self) -> list[np.ndarray]:
        """What of its output a file of the model gives."""
        return parts(logits_of(predict(self.foreign.build(), self.x)))

    def trains(self, cell: Cell, step: Callable, model: nn.Module, wanted: tuple) -> None:
        """Compare some steps with plain ones."""
        self.agrees(cell, self.trained(step, model), wanted)

    def agrees(self, cell: Cell, found: tuple, wanted: tuple) -> None:
        """Compare the losses and the updates of some steps."""
        cell.near("losses", found[0], wanted[0], self.rounding.of_losses)
        cell.near("updates", found[1], wanted[1], self.rounding.of_updates)

    def changed(self, change: Callable) -> Applied:
        """The same subject with another model, which rounds in its own way."""
        return Applied(replace(self.foreign, build=lambda: change(self.foreign.build())))

    def predicts(self, cell: Cell, predict: Callable) -> None:
        """Compare predictions with plain ones."""
        cell.near("outputs", parts(predict(self.x)), self.output, self.rounding.of_outputs)


def seed_step(number: int) -> None:
    """Begin the random numbers anew: of a GPU in each step.

    There recurrent layers draw from a state that only a seed begins anew.
    """
    if number == 0 or DEVICE != "cpu":
        torch.manual_seed(7 + number)


def _to(dtype: torch.dtype, x: Tensor) -> Tensor:
    return x.to(dtype) if x.is_floating_point() else x


def _to_8_bits(x):
    if not isinstance(x, Tensor) or not x.is_floating_point():
        return x
    low, high = x.min().clamp(max=0), x.max().clamp(min=0)
    scale = ((high - low) / 255).clamp(min=1e-12)
    return (x / scale).round() * scale


def plain_step(model, optimizer, loss_fn, context, x, y) -> Tensor:
    """A train step as everybody writes it."""
    optimizer.zero_grad()
    if context is None:
        loss = loss_fn(call(model, x), y)
    else:
        with context():
            output = call(model, x)
        loss = loss_fn(output, y)
    loss.backward()
    optimizer.step()
    return loss


NO_DROPOUT = ("without dropout", without_dropout)


# Train step -------------------------------------------------------------------------------------


def baseline(technique, a: Applied, cell: Cell) -> dict[str, Callable]:
    """The tutorials' step, which knows cross-entropy alone."""

    def hand_written():
        model = a.model()
        trained = a.trained(technique.make_hand_written_step(model, sgd(model)), model)
        a.agrees(cell, trained, a.plain("cross-entropy", loss=cross_entropy))

    return {"hand_written_step": hand_written}


def mixed_precision(technique, a: Applied, cell: Cell) -> dict[str, Callable]:
    """float32 is the plain step; bfloat16 is plain code under autocast."""
    autocast = partial(torch.autocast, DEVICE, torch.bfloat16)

    def float32():
        model = a.model()
        step = technique.make_train_step(model, sgd(model), a.loss_fn, dtype="float32")
        a.trains(cell, step, model, a.plain())

    def bfloat16():
        model = a.model()
        step = technique.make_train_step(model, sgd(model), a.loss_fn)
        a.trains(cell, step, model, a.plain("bfloat16", context=autocast))

    return {"float32": float32, "bfloat16": bfloat16}


def loss_scaling(technique, a: Applied, cell: Cell) -> dict[str, Callable]:
    """A scaled loss in float32 is the plain step."""

    def float32():
        model = a.model()
        step = technique.make_train_step(
            model, sgd(model), a.loss_fn, dtype="float32", initial_scale=2.0**10
        )
        a.trains(cell, step, model, a.plain())

    return {"float32": float32}


def compilation(technique, a: Applied, cell: Cell) -> dict[str, Callable]:
    """A captured step and a compiled prediction."""

    def step():
        torch.compiler.reset()
        model = without_dropout(a.model())
        step = technique.graph_train_step(model, sgd(model), a.loss_fn)
        a.trains(cell, step, model, a.plain(*NO_DROPOUT))

    def predicts():
        torch.compiler.reset()
        a.predicts(cell, technique.compiled_predict(a.model()))

    return {"graph_train_step": step, "compiled_predict": predicts}


def gradient_accumulation(technique, a: Applied, cell: Cell) -> dict[str, Callable]:
    """One part is the plain step, and so are several where no layer mixes samples."""

    def one():
        model = a.model()
        step = technique.make_train_step(model, sgd(model), a.loss_fn, micro_batches=1)
        a.trains(cell, step, model, a.plain())

    def two():
        model = without_dropout(a.model())
        step = technique.make_train_step(model, sgd(model), a.loss_fn, micro_batches=2)
        a.trains(cell, step, model, a.plain(*NO_DROPOUT))

    return {"1 part": one} | ({} if a.foreign.sees_the_batch else {"2 parts": two})


def accumulated_statistics(technique, a: Applied, cell: Cell) -> dict[str, Callable]:
    """One part is the plain step, the update of statistics included."""

    def one():
        model = a.model()
        step = technique.make_train_step(model, sgd(model), a.loss_fn, micro_batches=1)
        a.trains(cell, step, model, a.plain())

    def two():
        model = without_dropout(a.model())
        step = technique.make_train_step(model, sgd(model), a.loss_fn, micro_batches=2)
        a.trains(cell, step, model, a.plain(*NO_DROPOUT))

    return {"1 part": one} | ({} if a.foreign.sees_the_batch else {"2 parts": two})


def gradient_clipping(technique, a: Applied, cell: Cell) -> dict[str, Callable]:
    """Without a limit it is the plain step, with one it is `clip_grad_norm_`."""

    def unlimited():
        model = a.model()
        step = technique.make_train_step(model, sgd(model), a.loss_fn, max_norm=float("inf"))
        a.trains(cell, step, model, a.plain())

    def limited():
        model, plain = a.model(), a.foreign.build()
        step = technique.make_train_step(model, sgd(model), a.loss_fn, max_norm=0.01)
        optimizer = sgd(plain)

        def clipped(x, y):
            optimizer.zero_grad()
            loss = a.loss_fn(call(plain, x), y)
            loss.backward()
            nn.utils.clip_grad_norm_(plain.parameters(), 0.01)
            optimizer.step()
            return loss

        a.trains(cell, step, model, a.trained(clipped, plain))

    return {"no limit": unlimited, "a limit": limited}


def finite_guard(technique, a: Applied, cell: Cell) -> dict[str, Callable]:
    """Where all is finite it is the plain step."""

    def guarded():
        model = a.model()
        step = technique.make_train_step(model, sgd(model), a.loss_fn)
        a.trains(cell, step, model, a.plain())

    return {"guarded": guarded}


def activation_checkpointing(technique, a: Applied, cell: Cell) -> dict[str, Callable]:
    """Recomputed blocks give the gradients of plain ones, dropout and statistics included."""

    def blocks():
        model = technique.apply_checkpointing(a.model(), blocks=a.foreign.blocks).train()
        step = partial(plain_step, model, sgd(model), a.loss_fn, None)
        a.trains(cell, step, model, a.plain())

    return {"blocks": blocks}


def memory_format(technique, a: Applied, cell: Cell) -> dict[str, Callable]:
    """Another layout, the same results."""

    def channels_last():
        model = technique.apply_memory_format(a.model())
        x = technique.convert_batch(a.x)
        cell.near("outputs", parts(predict(model, x)), a.output, a.rounding.of_outputs)
        model.train()
        step = partial(plain_step, model, sgd(model), a.loss_fn, None)
        a.trains(cell, lambda _, y: step(x, y), model, a.plain())

    return {"channels_last": channels_last}


def optimizer_implementations(technique, a: Applied, cell: Cell) -> dict[str, Callable]:
    """Each implementation makes the update of PyTorch's own AdamW."""

    def updates(make: Callable):
        model, plain = a.model(), a.foreign.build()
        torch.manual_seed(7)
        a.loss_fn(call(plain.train(), a.x), a.y).backward()
        gradients = [None if p.grad is None else p.grad.clone() for p in plain.parameters()]
        optimizer = torch.optim.AdamW(plain.parameters(), lr=0.01)
        before = state(model)
        ours = make(model, learning_rate=0.01)
        for parameter, gradient in zip(model.parameters(), gradients, strict=True):
            parameter.grad = gradient
        for _ in range(STEPS):
            ours.step()
            optimizer.step()
        trainable = [[p.detach().cpu().numpy() for p in m.parameters()] for m in (model, plain)]
        cell.near("weights", *trainable, 1e-6)  # a rule of elements: no sum of many
        cell.holds("nothing was updated", any(map(np.any, map(np.subtract, state(model), before))))

    names = "for_loop_optimizer", "foreach_optimizer", "fused_optimizer"
    return {name: partial(updates, getattr(technique, name)) for name in names}


def batch_size_finder(technique, a: Applied, cell: Cell) -> dict[str, Callable]:
    """Trials in processes of their own."""

    def one():
        make = f"tests.zoo.trials_pt:{a.name}"
        found = technique.find_batch_size(make, budget_bytes=1 << 31, maximum=1)
        cell.holds("no sample fits", (found.batch_size, found.limit) == (1, "maximum"))
        cell.holds("it took no memory", 0 < found.peak_bytes <= 1 << 31)

    return {"a maximum of 1": one}


def stacking(technique, a: Applied, cell: Cell) -> dict[str, Callable]:
    """The defaults are the plain step; two micro-batches are where no layer mixes samples."""

    def defaults():
        model = a.model()
        a.trains(cell, technique.make_train_step(model, sgd(model), a.loss_fn), model, a.plain())

    def two():
        model = without_dropout(a.model())
        step = technique.make_train_step(model, sgd(model), a.loss_fn, micro_batches=2)
        a.trains(cell, step, model, a.plain(*NO_DROPOUT))

    return {"defaults": defaults} | ({} if a.foreign.sees_the_batch else {"2 parts": two})


def varying_lengths(technique, a: Applied, cell: Cell) -> dict[str, Callable]:
    """Padding changes neither the loss nor its gradient: they are those of each sample alone."""
    codes = next(iter(a.x.values())) if isinstance(a.x, dict) else a.x
    lengths = range(4, 4 + BATCH)
    samples = [
        (row[:length].cpu().numpy(), target[:length].cpu().numpy())
        for row, target, length in zip(codes, a.y, lengths, strict=True)
    ]

    def alone() -> tuple:
        plain = without_dropout(a.foreign.build()).train()
        optimizer = sgd(plain)

        def step(*_) -> Tensor:
            optimizer.zero_grad()
            loss = 0.0
            for x, y in samples:
                logits = logits_of(call(plain, (torch.tensor(x)[None].to(DEVICE),)))[0]
                target = torch.tensor(y).to(DEVICE)
                loss = loss + F.cross_entropy(logits, target, reduction="sum") / sum(lengths)
            loss.backward()
            optimizer.step()
            return loss

        return a.trained(step, plain)

    def padded(padding: str):
        model = without_dropout(a.model()).train()
        step = technique.make_train_step(model, sgd(model))
        x, y = technique.pad(samples, padding=padding, most=codes.shape[1])
        batch = tuple(part.to(DEVICE) for part in x), y.to(DEVICE)
        a.trains(cell, lambda *_: step(*batch), model, alone())

    return {name: partial(padded, name) for name in ("longest", "full")}


def keras_backend(technique, a: Applied, cell: Cell) -> dict[str, Callable]:
    """It takes models of Keras, which none here is: a module is refused."""

    def module():
        technique.compile_keras(a.model(), None, a.loss_fn)

    return {"a module": module}


def onednn(technique, a: Applied, cell: Cell) -> dict[str, Callable]:
    """Without the library the plain step is the same, to rounding."""

    def without():
        model = a.model()
        step = partial(plain_step, model, sgd(model), a.loss_fn, None)
        a.trains(cell, technique.with_onednn(step, enabled=False), model, a.plain())

    return {"without": without}


# Compression ------------------------------------------------------------------------------------


def pruning(technique, a: Applied, cell: Cell) -> dict[str, Callable]:
    """No sparsity is plain training; half of it is half of the weights."""
    settings = {"begin_step": 1, "end_step": 2, "frequency": 1}

    def none():
        model, update = technique.apply_pruning(a.model(), final_sparsity=0.0, **settings)
        model.train()
        optimizer, losses = sgd(model), []
        for number in (1, 2):
            seed_step(number - 1)
            update(number)
            loss = plain_step(model, optimizer, a.loss_fn, None, a.x, a.y)
            losses.append(np.array(loss.detach().cpu()))
        model = technique.finalize_pruning(model)
        wanted, moved = a.plain()
        cell.near("losses", losses, wanted, a.rounding.of_losses)
        found = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        plain = a.foreign.build()
        names = {**dict(plain.named_parameters()), **dict(plain.named_buffers())}
        ends = [found[n].detach().cpu().numpy() for n, t in names.items() if t.is_floating_point()]
        changes = [end - start for end, start in zip(ends, a.start, strict=True)]
        cell.near("updates", changes, moved, a.rounding.of_updates)

    def half():
        model, update = technique.apply_pruning(a.model(), final_sparsity=0.5, **settings)
        before = sum(np.count_nonzero(array) for array in a.start)
        update(1), update(2)
        masked = parts(predict(model, a.x))
        model = technique.finalize_pruning(model)
        cell.near(
            "outputs without masks", parts(predict(model, a.x)), masked, a.rounding.of_outputs
        )
        cell.holds("no weight became zero", sum(map(np.count_nonzero, state(model))) < before)

    return {"0%": none, "50%": half}


def semi_structured_pruning(technique, a: Applied, cell: Cell) -> dict[str, Callable]:
    """Two of four: what stays is as it was, in the masked model and without masks."""

    def two_of_four():
        model = technique.apply_two_to_four(a.model())
        masked = parts(predict(model, a.x))
        model = technique.finalize_two_to_four(model)
        cell.near(
            "outputs without masks", parts(predict(model, a.x)), masked, a.rounding.of_outputs
        )
        plain, changed = a.foreign.build(), 0
        found = dict(model.named_parameters())
        for name, weight in plain.named_parameters():
            zero = found[name] == 0
            if weight.ndim > 1 and zero.sum() > (weight == 0).sum():
                changed += 1
                cell.holds(f"{name} changed where it stays", (found[name] == weight)[~zero].all())
                share = zero.float().mean()
                cell.holds(f"{share:.0%} of {name} are zero", share <= 0.55)
        cell.holds("no weight became zero", changed)

    return {"two_to_four": two_of_four}


def structured_pruning(technique, a: Applied, cell: Cell) -> dict[str, Callable]:
    """Nothing removed is the model itself; a third is a smaller model that trains."""

    def none():
        model = technique.remove_channels(a.model(), a.x, share=0.0)
        a.predicts(cell, partial(predict, model))

    def third():
        model = technique.remove_channels(a.model(), a.x, share=0.34)
        count = sum(array.size for array in state(model))
        cell.holds("it is no smaller", count < sum(array.size for array in a.start))
        shapes = [array.shape for array in parts(predict(model, a.x))]
        cell.holds("the outputs changed", shapes == [array.shape for array in a.output])
        loss = plain_step(model.train(), sgd(model), a.loss_fn, None, a.x, a.y)
        cell.holds("the loss is not finite", torch.isfinite(loss))

    return {"0%": none, "34%": third}


def sparse_inference(technique, a: Applied, cell: Cell) -> dict[str, Callable]:
    """Zeros left out give what zeros give."""

    def sparse():
        model = sparsified(a.foreign.build())
        wanted = parts(predict(model, a.x))
        found = parts(technique.make_predict(model)(a.x))
        cell.near("outputs", found, wanted, a.rounding.of_outputs)

    return {"make_predict": sparse}


def _teacher(a: Applied) -> nn.Module:
    model = a.foreign.build()
    with torch.no_grad():
        for parameter in [*model.parameters()][
            -2:
        ]:  # the last layer's: the rest stays as it rounds
            parameter.mul_(1.5)
    return model.eval()


def distillation(technique, a: Applied, cell: Cell) -> dict[str, Callable]:
    """No share of the teacher is the plain step; half of it is as the definition says."""
    axis = 1 if a.name == "unet" else -1

    def soft_targets():
        model, plain, teacher = a.model(), a.foreign.build().train(), _teacher(a)
        settings = {"alpha": 0.5, "class_axis": axis}
        step = technique.make_train_step(model, teacher, sgd(model), a.loss_fn, **settings)
        optimizer = sgd(plain)

        def soft(student, target):
            p = (target / 4).softmax(axis)
            log_q, log_p = (student / 4).log_softmax(axis), (target / 4).log_softmax(axis)
            return 16 * (p * (log_p - log_q)).sum(axis).mean()

        def wanted(x, y):
            optimizer.zero_grad()
            output = call(plain, x)
            with torch.no_grad():
                target = call(teacher, x)
            pairs = zip(tree_leaves(logits_of(output)), tree_leaves(logits_of(target)), strict=True)
            loss = 0.5 * sum(soft(*pair) for pair in pairs) + 0.5 * a.loss_fn(output, y)
            loss.backward()
            optimizer.step()
            return loss

        a.trains(cell, step, model, a.trained(wanted, plain))

    def none():
        model = a.model()
        step = technique.make_train_step(model, _teacher(a), sgd(model), a.loss_fn, alpha=0.0)
        a.trains(cell, step, model, a.plain())

    def stored():
        teacher = _teacher(a)
        found = technique.store_logits(teacher, a.x, batch_size=2)
        wanted = logits_of(call(teacher, a.x))
        if isinstance(wanted, dict):  # stored by name, in whichever order
            found = {name: found[name] for name in wanted}
        cell.near("logits", parts(found), parts(wanted), a.rounding.of_outputs)

    return {"half": soft_targets, "none": none, "store_logits": stored}


def feature_distillation(technique, a: Applied, cell: Cell) -> dict[str, Callable]:
    """No weight of the features is the plain step; with one the loss is as the definition says."""
    layers = {"student_layer": a.foreign.layer, "teacher_layer": a.foreign.layer}

    def none():
        model, teacher = a.model(), _teacher(a)
        taught = technique.attach_regressor(model, teacher, a.x, **layers)
        step = technique.make_train_step(
            taught, teacher, sgd(taught), a.loss_fn, teacher_layer=a.foreign.layer, weight=0.0
        )
        a.trains(cell, step, model, a.plain())

    def features():
        model, teacher = a.model(), _teacher(a)
        taught = technique.attach_regressor(model, teacher, a.x, **layers)
        given = []
        hook = teacher.get_submodule(a.foreign.layer).register_forward_hook(
            lambda module, inputs, output: given.append(output.detach().clone())
        )
        predict(teacher, a.x)
        hook.remove()
        torch.manual_seed(7)
        output, regressed = call(copy.deepcopy(taught).train(), a.x)
        wanted = a.loss_fn(output, a.y) + F.mse_loss(regressed, given[0])
        step = technique.make_train_step(
            taught, teacher, sgd(taught), a.loss_fn, teacher_layer=a.foreign.layer
        )
        torch.manual_seed(7)
        loss = step(a.x, a.y)
        cell.near("loss", *(part.detach().cpu() for part in (loss, wanted)), a.rounding.of_losses)

    return {"no weight": none, "features": features}


def post_training_quantization(technique, a: Applied, cell: Cell) -> dict[str, Callable]:
    """float32 is the model itself; int8 is as near to it as plain rounding is.

    The files run operator by operator here, not compiled: the arithmetic is the same.
    """
    from pt_impl.kit import int8_files
    from tests.workers import has_vnni

    # Without VNNI activations, or ONNX Runtime's weights, have 7 bits: a grid twice as coarse.
    coarse = COARSER * a.rounded(8, activations=True) * (1 if has_vnni() else 2)

    def int8(apply: Callable) -> Callable:
        return lambda model, x, path: int8_files.save_int8(apply(model, x), model, x, path)

    def onnxruntime():
        path = technique.quantize_onnxruntime_int8(a.model(), a.x, a.folder / "model.onnx")
        found = technique.load_onnxruntime(path)(a.x)
        cell.near("outputs", parts(found), a.logits, coarse)

    return {
        "static int8": partial(_written, int8(technique.apply_static_int8), a, cell, coarse),
        "float32": partial(_written, int8_files.keep_float32, a, cell),
        "dynamic int8": partial(_written, int8(technique.apply_dynamic_int8), a, cell, coarse),
        "ONNX Runtime int8": onnxruntime,
    }


def _written(write: Callable, a: Applied, cell: Cell, bound: float = 0.0) -> None:
    """Compare what a file gives with the model."""
    from pt_impl.kit import saving

    write(a.model(), a.x, a.folder / "model.pt")
    program = saving.load(a.folder / "model.pt")
    with torch.no_grad():
        found = parts(program(*_flat(a.x)))
    cell.near("outputs", found, a.logits, bound or a.rounding.of_outputs)


def _flat(x) -> tuple:
    """The inputs of a file, which is a CPU's."""
    given = tuple(x.values()) if isinstance(x, dict) else x if isinstance(x, tuple) else (x,)
    return tuple(part.cpu() for part in given)


def accuracy_aware_quantization(technique, a: Applied, cell: Cell) -> dict[str, Callable]:
    """Where no error is small enough, one layer is left in integers: plain rounding or nearer."""
    from tests.workers import has_vnni

    coarse = COARSER * a.rounded(8, activations=True) * (1 if has_vnni() else 2)

    def error(predict):
        return apart(parts(predict(a.x)), a.logits)

    def own():
        found, search = technique.apply_accuracy_aware_int8(a.model(), a.x, error, most=0.0)
        cell.holds("one layer is left", len(search.kept) == len(search.names) - 1)
        with torch.no_grad():
            cell.near("outputs", parts(found(*_flat(a.x))), a.logits, coarse)

    def onnxruntime():
        search = technique.search_onnxruntime_int8(a.model(), a.x, error, most=0.0)
        cell.holds("one layer is left", len(search.kept) == len(search.names) - 1)
        cell.holds("it is near", search.tried[-1][1] <= coarse)

    return {"own runtime": own, "ONNX Runtime": onnxruntime}


def quantization_aware_training(technique, a: Applied, cell: Cell) -> dict[str, Callable]:
    """8 bits are as near to the model as plain rounding is; it trains, and so is its file."""
    from pt_impl.kit import int8_files, saving
    from pt_impl.kit.checks.quantization_aware_training import MOST_APART
    from tests.workers import has_vnni

    def eight_bits():
        model = technique.prepare_qat(a.model(), a.x, weight_bits=8)
        # Without VNNI activations have 7 bits: a grid that is twice as coarse.
        coarse = COARSER * a.rounded(8, activations=True) * (1 if has_vnni() else 2)
        cell.near("outputs", parts(logits_of(predict(model, a.x))), a.logits, coarse)
        before = state(model)
        loss = plain_step(model.train(), sgd(model), a.loss_fn, None, a.x, a.y)
        cell.holds("the loss is not finite", torch.isfinite(loss))
        cell.holds("nothing was trained", any(map(np.any, map(np.subtract, state(model), before))))
        for _ in range(50):  # until the ranges, which follow every pass, are those of evaluation
            wanted = parts(logits_of(predict(model, a.x)))
        try:
            quantized = technique.convert_qat(model, a.x)
            int8_files.save_as_it_is(quantized, a.folder / "model.pt")
        except RuntimeError as error:
            if "amplifies all rounding" in str(error):
                raise
            raise Wrong(f"refused after it was trained: {error}") from error
        with torch.no_grad():
            found = parts(saving.load(a.folder / "model.pt")(*_flat(a.x)))
        cell.near("outputs of the file", found, wanted, MOST_APART)

    return {"8 bits": eight_bits}


def weight_quantization(technique, a: Applied, cell: Cell) -> dict[str, Callable]:
    """float32 is the model itself; integers are as near to it as plain rounding is."""
    from pt_impl.kit.quantized_files import save_quantized

    eight, four = (COARSER * a.rounded(bits) for bits in (8, 4))

    def write_int8(model, x, path):
        save_quantized(technique.apply_int8(model, x), x, path)

    def write_int4(model, x, path):
        save_quantized(technique.apply_int4(model, x), x, path)

    return {
        "int8": partial(_written, write_int8, a, cell, eight),
        "float32": partial(_written, save_quantized, a, cell),
        "int4": partial(_written, write_int4, a, cell, four),
    }


def combinations(technique, a: Applied, cell: Cell) -> dict[str, Callable]:
    """Zeros stay, and everything else trains as ever."""

    def sparse_step():
        model, plain = sparsified(a.foreign.build()), sparsified(a.foreign.build()).train()
        step = technique.make_sparse_train_step(model, sgd(model), a.loss_fn)
        masks = {p: p.detach() != 0 for p in plain.parameters() if p.ndim > 1}
        optimizer = sgd(plain)

        def wanted(x, y):
            optimizer.zero_grad()
            loss = a.loss_fn(call(plain, x), y)
            loss.backward()
            optimizer.step()
            with torch.no_grad():
                for parameter, mask in masks.items():
                    parameter.mul_(mask)
            return loss

        a.changed(sparsified).trains(cell, step, model, a.trained(wanted, plain))

    return {"make_sparse_train_step": sparse_step}


# Adaptation -------------------------------------------------------------------------------------


class Backbone(nn.Module):
    """What a model gives as one vector a sample, of the size of one value."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    def forward(self, *x, **named) -> Tensor:
        """What the model takes -> (n, width)."""
        parts = tree_leaves(logits_of(self.model(*x, **named)))
        vector = torch.cat([part.flatten(1) for part in parts], 1)
        return vector / vector.shape[1] ** 0.5


def fine_tuning(technique, a: Applied, cell: Cell) -> dict[str, Callable]:
    """A head learns as over plain features; LoRA is the model until its first step, which is B's.

    Of W + 2 B A with B = 0 the gradient of B is twice that of W, times A's transpose.
    """
    classes = torch.arange(BATCH, device=DEVICE) % CLASSES

    def learned(step: Callable, head: nn.Module, *batch) -> tuple[list, list]:
        before = state(head)
        losses = [np.array(step(*batch).detach().cpu()) for _ in range(STEPS)]
        return losses, list(map(np.subtract, state(head), before))

    def head(*, stored: bool):
        backbone, features = Backbone(a.model()), predict(Backbone(a.foreign.build()), a.x)
        ours = nn.Linear(features.shape[1], CLASSES).to(DEVICE)
        plain = copy.deepcopy(ours)
        step = partial(plain_step, plain, sgd(plain), F.cross_entropy, None)
        wanted = learned(step, plain, features, classes)
        optimizer, x = sgd(ours), a.x
        if stored:
            kept = technique.store_features(backbone, x, batch_size=3)
            cell.near("features", parts(kept), parts(features), a.rounding.of_outputs)
            step = technique.make_stored_train_step(kept, ours, optimizer, F.cross_entropy)
            x = torch.arange(BATCH, device=DEVICE)
        else:
            step = technique.make_train_step(backbone, ours, optimizer, F.cross_entropy)
        a.agrees(cell, learned(step, ours, x, classes), wanted)
        cell.holds("the backbone moved", a.unchanged())

    def lora():
        model, plain = without_dropout(a.model()), without_dropout(a.foreign.build()).train()
        technique.apply_lora(model, rank=2, alpha=4.0)
        a.predicts(cell, partial(predict, model))
        adapters = {
            name: module.parametrizations.weight[0]
            for name, module in model.named_modules()
            if nn.utils.parametrize.is_parametrized(module, "weight")
        }
        # A loss that reads its model is found by the model's weights, which LoRA freezes.
        loss_fn = cross_entropy if "loss of model" in a.foreign.traits else a.loss_fn
        loss_fn(call(plain, a.x), a.y).backward()
        gradients = {name: plain.get_parameter(f"{name}.weight").grad for name in adapters}
        wanted = [  # None: of a head that the loss does not reach
            torch.zeros_like(one.b) if grad is None else -0.01 * 2.0 * grad @ one.a.detach().T
            for one, grad in zip(adapters.values(), gradients.values(), strict=True)
        ]
        plain_step(model.train(), sgd(model), loss_fn, None, a.x, a.y)
        a.given.clear()  # it has been trained
        found = [one.b.detach().cpu().numpy() for one in adapters.values()]
        cell.near("B", found, [one.cpu().numpy() for one in wanted], a.rounding.of_updates)
        adapted = parts(predict(model, a.x))
        technique.merge_lora(model)
        cell.near("merged outputs", parts(predict(model, a.x)), adapted, a.rounding.of_outputs)
        before = dict(a.foreign.build().named_parameters())
        for name, parameter in model.named_parameters():
            if name.removesuffix(".weight") not in adapters:
                cell.holds(f"{name} moved", torch.equal(parameter, before[name]))

    return {"frozen": partial(head, stored=False), "stored": partial(head, stored=True)} | {
        "LoRA": lora
    }


# Deployment -------------------------------------------------------------------------------------


def reduced_precision(technique, a: Applied, cell: Cell) -> dict[str, Callable]:
    """float32 is the model's own prediction; bfloat16 is plain code under autocast."""

    def float32():
        a.predicts(cell, technique.make_predict(a.model(), dtype="float32"))

    def bfloat16():
        found = parts(technique.make_predict(a.model())(a.x))
        fast = torch.backends.mha.get_fastpath_enabled()
        torch.backends.mha.set_fastpath_enabled(False)  # it knows no autocast of a CPU
        try:
            with torch.autocast(DEVICE, torch.bfloat16):
                wanted = parts(predict(a.foreign.build(), a.x))
        finally:
            torch.backends.mha.set_fastpath_enabled(fast)
        cell.near("outputs", found, wanted, a.rounding.of_outputs)

    return {"float32": float32, "bfloat16": bfloat16}


def export(technique, a: Applied, cell: Cell) -> dict[str, Callable]:
    """A file in another runtime gives what the model gives, for any number of samples."""

    def written(write: Callable, load: Callable, name: str):
        path = write(a.model(), a.x, a.folder / name)
        predict = load(path, threads=1)
        for count in (BATCH, 3):
            found = predict(_arrays(rows(a.x, count)))
            wanted = [array[:count] for array in a.output]
            cell.near("outputs", parts_of(found), wanted, a.rounding.of_files)

    return {
        "ONNX": partial(written, technique.export_onnx, runtimes.load_onnx, "model.onnx"),
        "OpenVINO": partial(
            written, technique.export_openvino, runtimes.load_openvino, "model.xml"
        ),
    }


def parts_of(found) -> list[np.ndarray]:
    """The arrays that a runtime gives."""
    if isinstance(found, dict):
        return list(found.values())
    return list(found) if isinstance(found, tuple | list) else [found]


def _arrays(x):
    if isinstance(x, dict):
        return {name: part.cpu().numpy() for name, part in x.items()}
    return tuple(part.cpu().numpy() for part in x) if isinstance(x, tuple) else x.cpu().numpy()


PACKAGED = ("dict_heads", "conv1d_text", "bert", "two_towers")  # by the C++ compiler


def native_export(technique, a: Applied, cell: Cell) -> dict[str, Callable]:
    """PyTorch's own files; the compiled package of some models, since the compiler takes long."""

    def torchscript():
        path = technique.export_torchscript(a.model(), a.x, a.folder / "model.ts")
        found = technique.load_torchscript(path, threads=1)(_arrays(a.x))
        cell.near("outputs", parts_of(found), a.output, a.rounding.of_outputs)

    def package():
        path = technique.export_package(a.model(), a.x, a.folder / "model.pt2")
        found = technique.load_package(path, threads=1)(_arrays(a.x))
        cell.near("outputs", parts_of(found), a.output, a.rounding.of_outputs)

    return ({"package": package} if a.name in PACKAGED else {}) | {"torchscript": torchscript}


def frozen_inference(technique, a: Applied, cell: Cell) -> dict[str, Callable]:
    """Predictions are the model's; BatchNorm in its convolution, and compiled as constants."""

    def frozen():
        torch.compiler.reset()
        a.predicts(cell, technique.frozen_predict(a.model()))

    def fused():
        a.predicts(cell, partial(predict, technique.fuse_conv_bn(a.model())))

    return {"frozen": frozen, "fused": fused}


def serving_threads(technique, a: Applied, cell: Cell) -> dict[str, Callable]:
    """An instance answers what the model gives, in a process whose pool has the size asked for."""

    def instance():
        from tests.zoo import builds_pt

        x = _arrays(a.x)
        with technique.serve(partial(builds_pt.served, a.name), x, threads=1) as server:
            cell.near("outputs", server(x), a.output[0], a.rounding.of_outputs)
            cell.holds("its pool has one thread", server.started[0]["pools"]["intra_op"] == 1)

    return {"an instance": instance}


# Parallel ---------------------------------------------------------------------------------------

# The models for techniques that start processes or take long, or that take few kinds; those of the
# parallel ones take one array.
FEW = {
    "accuracy_aware_quantization": (
        "two_heads",
        "conv1d_text",
    ),
    "batch_size_finder": ("two_heads", "conv1d_text", "bert"),
    "frozen_inference": (
        "two_heads",
        "conv1d_text",
        "bert",
        "resnet18",
    ),
    "keras_backend": ("conv1d_text",),
    "serving_threads": (
        "conv1d_text",
        "encoder",
        "resnet18",
    ),
    "varying_lengths": (
        "lstm_language",
        "gpt2",
    ),
    "data_parallel": ("conv1d_text", "bilstm", "encoder", "eleven_heads"),
    "model_parallel": ("conv1d_text", "bilstm", "encoder"),
    "tensor_parallel": ("bilstm", "encoder"),
}


def _ordered(a: Applied) -> list[float]:
    """The losses of plain steps over the shared order of two batches, without dropout."""
    model = without_dropout(a.foreign.build()).train()
    x, y, optimizer = a.foreign.inputs(2 * BATCH), a.foreign.labels(2 * BATCH), sgd(model)
    order = batch_order(2 * BATCH, BATCH, seed=0, epoch=0)
    found = [plain_step(model, optimizer, a.loss_fn, None, x[r], y[r]) for r in order]
    return [float(loss.detach()) for loss in found]


def _launched(a: Applied, make: str, settings: dict, **devices: int) -> list[float]:
    """The losses of the processes or devices that train a model of the zoo together."""
    arrays = _arrays((a.foreign.inputs(2 * BATCH), a.foreign.labels(2 * BATCH)))
    run = parallel.Run(global_batch=BATCH, steps=STEPS, seed=0, threads=2, **devices)
    launch = parallel.find("pt_impl.kit.replicas:launch")
    make, build = f"pt_impl.parallel.{make}", f"tests.zoo.builds_pt:{a.name}"
    return list(launch(make, build, arrays, run, settings).losses)


def data_parallel(technique, a: Applied, cell: Cell) -> dict[str, Callable]:
    """Two replicas train as one does."""

    def processes():
        losses = _launched(a, "data_parallel:processes", {}, replicas=2)
        cell.near("losses", losses, _ordered(a), a.rounding.of_losses)

    return {"processes": processes}


def model_parallel(technique, a: Applied, cell: Cell) -> dict[str, Callable]:
    """Two stages train as one model does."""

    def layer_split():
        make, settings = "model_parallel:layer_split", {"cut": a.foreign.cut}
        losses = _launched(a, make, settings, replicas=1, parts=2)
        cell.near("losses", losses, _ordered(a), a.rounding.of_losses)

    return {"layer_split": layer_split}


def tensor_parallel(technique, a: Applied, cell: Cell) -> dict[str, Callable]:
    """Two halves of a pair of layers train as the whole does."""

    def halves():
        make, settings = "tensor_parallel:tensor_parallel", {"pairs": a.foreign.pairs}
        losses = _launched(a, make, settings, replicas=1, parts=2)
        cell.near("losses", losses, _ordered(a), a.rounding.of_losses)

    return {"2 shards": halves}


# What runs a cell -------------------------------------------------------------------------------

CELLS = {
    function.__name__: function
    for function in (
        *(baseline, mixed_precision, loss_scaling, compilation, gradient_accumulation),
        *(accumulated_statistics, gradient_clipping),
        *(finite_guard, activation_checkpointing, memory_format, optimizer_implementations),
        *(batch_size_finder, stacking, pruning, semi_structured_pruning, structured_pruning),
        *(sparse_inference, distillation, feature_distillation, post_training_quantization),
        *(quantization_aware_training, weight_quantization, combinations),
        *(accuracy_aware_quantization, varying_lengths, keras_backend, onednn),
        fine_tuning,
        *(reduced_precision, export, native_export, frozen_inference, serving_threads),
        *(data_parallel, model_parallel, tensor_parallel),
    )
}
_applied: dict[str, Applied] = {}


def run(technique: str, name: str) -> dict:
    """Apply a technique to a model of the zoo; return the cell of the record."""
    if name not in _applied:
        _applied.clear()  # one model at a time: the record goes by models
        _applied[name] = Applied(ZOO[name])
    applied, cell = _applied[name], Cell()
    with tempfile.TemporaryDirectory() as folder:
        applied.folder = Path(folder)
        file = module_of("pt", technique)
        for variant, try_it in CELLS[technique](file, applied, cell).items():
            applied.given = []
            cell.attempt(variant, try_it, applied.unchanged)
    return cell.result()
