"""Where NaN begins: the batch, and the first non-finite input, parameter, layer or gradient.

    step = make_checked_step(step, model, loss_fn)  # raises FloatingPointError and says where
    print(find_nonfinite(model, loss_fn, x, y))  # or, of one batch that is at hand

What it changes: nothing. `find_nonfinite` runs one batch forward and back, and names what is NaN or
infinite first, in the order of cause: the inputs, the weights, the layers as they finish, the loss,
the gradients from the loss back. `make_checked_step` checks the loss and the weights after every
step. If a step ruined them, it restores the previous weights and finds the cause.

Its twin: `tf_impl/recipes/nonfinite.py`.

Where the frameworks differ and why:
- PyTorch: hooks see each layer's output.
- TensorFlow: a Keras layer has no hooks, so its `call` is wrapped while the batch runs eagerly.
  Values within a layer's `tf.function` are not seen.
- `torch.autograd.detect_anomaly` names the operator whose backward pass gives NaN,
  `tf.debugging.enable_check_numerics` the one whose forward pass does. Neither checks the inputs
  first.

When it helps and when it hurts: use it after a loss became NaN, in a second run. A checked step
copies all weights and waits for the device, so don't use it in every run.

Run it alone: `python -m pt_impl.recipes.nonfinite` prints a checked step's cost and message.

Copy with it: `pt_impl/kit/calling.py`, `pt_impl/kit/values.py`, `shared/findings.py`.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook

from pt_impl.kit.calling import call, unchanged
from pt_impl.kit.values import check_checkpoints, nonfinite, values_of
from shared.findings import Report, leaves


def find_nonfinite(
    model: nn.Module, loss: Callable, x, y, *, batch: int = 0, strict: bool = False
) -> Report:
    """Run one batch forward and back; if loss or gradients are not finite, name what is so first.

    The model runs in its mode; weights, buffers, gradients and the random state are left as they
    were.

    Args:
        model, x: a tuple is the model's arguments, a mapping its keywords, all else its one input.
        loss: `loss(output, y)`.
        batch: its number, for the report.
        strict: raise ValueError with the report, if anything was found.

    Raises NotImplementedError for a reentrant checkpoint in the model.
    """
    trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    with _watched(model) as layers, unchanged(model), torch.enable_grad():
        value = loss(call(model, x), y).mean()
        check_checkpoints(value)
        wanted = [parameter for _, parameter in trained]
        gradients = torch.autograd.grad(value, wanted, allow_unused=True) if wanted else ()
    value = value.item()
    ends = [("loss", "" if math.isfinite(value) else f"it is {value:g}")]
    for (name, _), gradient in reversed(list(zip(trained, gradients, strict=True))):
        ends.append((f"gradient of {name}", "" if gradient is None else nonfinite(gradient)))

    report = Report(f"batch {batch}")
    if any(text for _, text in ends):
        state = [*leaves(x, "x"), *leaves(y, "y")]
        state += [(f"parameter {name}", each) for name, each in model.named_parameters()]
        state += [(f"buffer {name}", each) for name, each in model.named_buffers()]
        causes = [(name, nonfinite(values_of(leaf))) for name, leaf in state]
        place, text = next(each for each in (*causes, *layers, *ends) if each[1])
        report.add("not finite", f"batch {batch}: {place}", text)
    if strict:
        report.raise_if_found()
    return report


@contextmanager
def _watched(model: nn.Module) -> Iterator[list[tuple[str, str]]]:
    """Yield a list that gets (layer, what is wrong) of each output that is not finite.

    By one hook for all modules: scripted ones take no hook, and are called with this one.
    """
    names, found = {module: name or "model" for name, module in model.named_modules()}, []

    def look(module, inputs, output) -> None:
        for _, leaf in leaves(output, "") if module in names else ():
            if text := nonfinite(values_of(leaf)):
                found.append((f"output of layer {names[module]}", text))

    hook = register_module_forward_hook(look)
    try:
        yield found
    finally:
        hook.remove()


def make_checked_step(step: Callable, model: nn.Module, loss: Callable) -> Callable:
    """Return `step(x, y) -> loss` that raises FloatingPointError where NaN or infinity begins.

    The model then has the weights and buffers of before the step; the optimizer has not.

    Args:
        step: any `step(x, y)` that returns its loss. What saves and resumes the scaler of a
            mixed-precision step is passed on.
        model, loss: what the step trains; see `find_nonfinite`.
    """
    numbers = count()

    def checked(x, y):
        number = next(numbers)
        state = [*model.parameters(), *model.buffers()]
        before = [tensor.detach().clone() for tensor in state]
        value = step(x, y)
        figure = value.item() if isinstance(value, Tensor) else value
        if math.isfinite(figure) and all(torch.isfinite(p).all() for p in model.parameters()):
            return value
        with torch.no_grad():
            state = [*model.parameters(), *model.buffers()]  # of now: a buffer may be another
            for tensor, kept in zip(state, before, strict=True):
                tensor.copy_(kept)
        report = find_nonfinite(model, loss, x, y, batch=number)
        if not report.findings:
            text = "the step is not finite, but its loss and gradients are when run again"
            report.add("not finite", f"batch {number}: step", text)
        raise FloatingPointError(str(report.findings[0]))

    for name in {"loss_scale", "state_dict", "load_state_dict"} & set(dir(step)):
        setattr(checked, name, getattr(step, name))
    return checked


def main() -> None:
    """Print what a checked step costs, and what it says of a batch with NaN."""
    from pt_impl.kit import training
    from pt_impl.kit.demo import Demo

    demo = Demo("digits-cnn")
    model, optimizer, loss_fn = demo.build()
    step = training.make_train_step(model, optimizer, loss_fn)
    checked = make_checked_step(step, model, loss_fn)
    for name, ms in demo.times({"plain": step, "checked": checked}).items():
        print(f"{name:8}{ms:8.2f} ms a step")
    x, y = demo.batches[0]
    try:
        checked(x * math.nan, y)
    except FloatingPointError as error:
        print(error)


if __name__ == "__main__":
    main()
