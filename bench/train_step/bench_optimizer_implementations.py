"""Implementations of AdamW: the unit of work is one update of 10 million weights, and no more."""

from __future__ import annotations

from itertools import count

import numpy as np

from bench.harness.helpers import kit_module
from bench.harness.plan import Prepared, Price, Technique, Variant, Work, Workload, row

# What one update must run, and what it must not: from operators of `update_operators`.
MARKS = {
    ("pt_impl", "for_loop"): ("addcdiv_", ("_foreach_addcdiv_", "_fused_adamw_", "compiled")),
    ("pt_impl", "foreach"): ("_foreach_addcdiv_", ("addcdiv_", "_fused_adamw_", "compiled")),
    ("pt_impl", "fused"): ("_fused_adamw_", ("addcdiv_", "_foreach_addcdiv_", "compiled")),
    ("pt_impl", "compiled"): ("compiled", ("addcdiv_", "_foreach_addcdiv_", "_fused_adamw_")),
    ("tf_impl", "for_loop"): ("AssignSubVariableOp", ("ResourceApplyAdam", "compiled")),
    ("tf_impl", "fused"): ("ResourceApplyAdam", ("compiled",)),
    ("tf_impl", "compiled"): ("compiled", ("AssignSubVariableOp", "ResourceApplyAdam")),
}

UNSUPPORTED = {
    "tf": {
        "foreach_optimizer": "TensorFlow has no operations over lists of tensors: Keras updates "
        "variable by variable",
        "fused_sgd": "Keras has no fused SGD: in a compiled step XLA fuses the update already",
    }
}

TECHNIQUE = Technique(
    family="train_step",
    name="optimizer_implementations",
    title="Implementations of AdamW: fused, foreach, compiled",
    remedies=("overhead", "memory bandwidth"),
    user_model="it measures an update, not a step; stacking has `fused`",
    variants=(
        Variant("for_loop", role="baseline", title="a loop over tensors"),
        Variant("compiled", frameworks=("tf",), title="XLA", price=Price(compiled=True)),
        Variant("fused", title="fused kernels"),
        # Only PyTorch's compiler needs a C++ compiler.
        row("compiled", "torch.compile", "ordinary", frameworks=("pt",), requires="compiler"),
        Variant("foreach", effort="ordinary", title="foreach: lists of tensors"),
    ),
    workloads=(
        Workload("text-gpt-wide", "small"),
        Workload("digits-resnet20", "small", effort="full"),
        Workload("digits-cnn", "small", effort="full"),
    ),
    differs_by_design=(
        "PyTorch calls for_loop, foreach and fused from Python, once per list of tensors; "
        "TensorFlow runs one graph.",
        "fused is one kernel for all tensors in PyTorch, and one per tensor in TensorFlow "
        "(ResourceApplyAdam, after the decay).",
        "compiled is torch.compile of the step of PyTorch's default implementation, and XLA "
        "(jit_compile=True) over Keras's update.",
    ),
    notes=(
        "A step here is one update on unchanging gradients, without forward and backward pass. "
        "The batch size means nothing, and the compared loss is a single weight.",
        "TensorFlow has no foreach: its row is UNSUPPORTED.",
        "AdamW runs with learning rate 0.001 and weight decay 0.01, whatever the task's recipe is.",
    ),
)


class Weight:
    """One weight as it is when it is read, so that reading takes no time of the step."""

    def __init__(self, parameter):
        # The first element is the first in every layout.
        self.parameter, self.index = parameter, (0,) * len(parameter.shape)

    def __float__(self):
        return float(self.parameter[self.index])

    item = __float__  # what PyTorch's tensors have


def prepare(impl, work: Work) -> Prepared:
    """One update a step; the step's "loss" is a weight, each time of another parameter."""
    recipe, name = work.task.recipe, f"{work.variant}_optimizer"
    lacking = UNSUPPORTED.get(impl.__name__.removesuffix("_impl"), {})
    if name in lacking:
        raise NotImplementedError(lacking[name])
    model = impl.kit.models.build(work.task.model, work.weights)
    make_optimizer = getattr(impl.train_step.optimizer_implementations, name)
    optimizer = make_optimizer(
        model,
        learning_rate=1e-3,
        weight_decay=0.01,
        beta1=recipe.beta1,
        beta2=recipe.beta2,
        eps=recipe.eps,
    )
    update = impl.kit.training.make_update(model, optimizer, given_gradients(impl, work))
    named = impl.kit.models.named_parameters(model)
    weights, steps = [Weight(named[name]) for name in sorted(named)], count()

    def step(x, y):
        update()
        return weights[next(steps) % len(weights)]

    step.update = update
    return Prepared(step, impl.kit.training.make_predict(model), model, optimizer)


def given_gradients(impl, work: Work) -> list:
    """The same random gradients in both frameworks, in the order of the model's parameters.

    They travel as the weights of a second model, which brings them to the framework's layout.
    """
    random = np.random.default_rng(0)
    drawn = {
        name: random.normal(0.0, 0.01, weight.shape).astype(np.float32)
        for name, weight in sorted(work.weights.items())
    }
    carrier = impl.kit.models.build(work.task.model, drawn)
    if impl.__name__ == "pt_impl":
        return [parameter.detach() for parameter in carrier.parameters()]
    return [variable + 0.0 for variable in carrier.trainable_variables]


def took_effect(impl, work: Work, prepared: Prepared, batch) -> tuple[dict, str | None]:
    """The update ran the operators of its implementation, and none of another's."""
    operators = kit_module(impl, "operators")
    ran = operators.update_operators(prepared.step.update)
    wanted, others = MARKS[impl.__name__, work.variant]
    seen = [name for name in others if name in ran]
    reason = None
    if wanted not in ran or seen:
        reason = f"ran {', '.join(seen) or 'other operators'}, not {wanted} alone"
    return {"operators": ran}, reason
