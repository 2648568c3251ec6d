"""What the tutorials' step refuses: outputs that its one loss, cross-entropy, does not take."""

from torch import nn

from pt_impl.kit.calling import infer


def check_baseline(model: nn.Module, loss_fn: nn.Module, x, y) -> None:
    """Raise ValueError unless the loss takes what the model gives: in evaluation mode."""
    output = infer(model, x)
    try:
        loss_fn(getattr(output, "logits", output), y)
    except (AttributeError, IndexError, RuntimeError, TypeError, ValueError) as error:
        raise ValueError(
            "the tutorials' step has one loss, cross-entropy of logits (n, classes): "
            f"it can't take what the model gives ({error})"
        ) from error
