"""Fine-tuning: a trained model learns new data, and most of its weights stay fixed.

    stored = store_features(backbone, images)  # once
    step = make_stored_train_step(stored, head, optimizer, loss_fn)  # step(rows, labels)

    apply_lora(model, rank=8, alpha=16.0)  # then any train step, over what still has gradients
    merge_lora(model)  # the same predictions, without adapters

What it changes: what is trained.
- Frozen backbone: only the head learns, from the features of the trained backbone in evaluation
  mode. There is no backward pass through the backbone.
- Stored features: without random augmentation the features of an image are the same in every epoch,
  so they are computed once.
- LoRA (Hu et al., 2021, arXiv:2106.09685): a dense layer's weight W becomes W + alpha / rank B A.
  W is frozen; A (rank, inputs) is random, B (outputs, rank) zero at first.

Its twin: `tf_impl/adaptation/fine_tuning.py`.

Where the frameworks differ and why:
- PyTorch: freezing and evaluation mode are separate. With `requires_grad_(False)`, BatchNorm still
  updates its running statistics, and dropout stays active, until `eval()`.
- TensorFlow: `trainable = False` also puts BatchNorm into evaluation mode. Dropout needs
  `training=False` in the call, which is set here.
- PyTorch: `model.train()` puts the backbone back into training mode. So the step sets evaluation
  mode in each call. A Keras model gets its mode in the call.
- LoRA: PyTorch has none, so it is a parametrization here, and `weight` is the sum. Keras 3's Dense
  has `enable_lora`; tf_keras has none. Both compute the sum in each call.
- `enable_lora` freezes only the kernel: the rest is frozen here, too.

When it helps and when it hurts: a frozen backbone helps if labels are few and the new data is like
the old. Stored features make an epoch almost free. Both hurt if the features do not suit the new
data: then train everything, or use LoRA. LoRA saves the optimizer's state and the gradients of the
weights, but no activations and little time.

Run it alone: `python -m pt_impl.adaptation.fine_tuning` prints time and accuracy of each.

Copy with it: `pt_impl/kit/calling.py`, `pt_impl/kit/checks/fine_tuning.py`.
"""

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from pt_impl.kit.calling import call, concatenate, infer, rows, tensors
from pt_impl.kit.checks import fine_tuning as checks


def make_train_step(
    features: nn.Module, head: nn.Module, optimizer: torch.optim.Optimizer, loss_fn: Callable
) -> Callable:
    """Return `step(x, y) -> loss`: one update of the head; the backbone is frozen.

    Args:
        features: the backbone, x -> features; run in evaluation mode, and left in its mode.
        head: features -> output; put into training mode.
        optimizer: of the head's parameters.
        loss_fn: `loss_fn(output, y)` returns the mean over the batch.

    Raises ValueError for a head without trainable parameters.
    """
    checks.check_fine_tuning(head)
    learn = _make_head_step(head, optimizer, loss_fn)
    return lambda x, y: learn(infer(features, x), y)


def store_features(features: nn.Module, x, *, batch_size: int = 256):
    """Return the features of all samples of x, computed `batch_size` at a time.

    x: one input of the backbone, a tuple of its arguments or a dict of its keywords, with the
    samples along the first axis. The backbone runs in evaluation mode, and keeps its mode.
    """
    samples = max(len(tensor) for tensor in tensors(x) if tensor.ndim)
    starts = range(0, samples, batch_size)
    return concatenate([infer(features, rows(x, start, start + batch_size)) for start in starts])


def make_stored_train_step(
    stored: Tensor, head: nn.Module, optimizer: torch.optim.Optimizer, loss_fn: Callable
) -> Callable:
    """Return `step(rows, y) -> loss`: `make_train_step` over features of `store_features`.

    rows: the numbers of the batch's samples, int64 (n,).
    """
    checks.check_fine_tuning(head)
    learn = _make_head_step(head, optimizer, loss_fn)
    return lambda rows, y: learn(stored[rows], y)


def _make_head_step(head: nn.Module, optimizer, loss_fn: Callable) -> Callable:
    head.train()

    def learn(inputs, y):
        optimizer.zero_grad(set_to_none=True)
        loss = loss_fn(call(head, inputs), y)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return learn


class LowRank(nn.Module):
    """weight (outputs, inputs) -> weight + scale B A: a parametrization of a linear layer.

    Args:
        a: (rank, inputs).
        outputs: rows of the weight.
        scale: alpha / rank.
    """

    def __init__(self, a: Tensor, outputs: int, scale: float) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(a), nn.Parameter(a.new_zeros(outputs, len(a)))
        self.scale = scale

    def forward(self, weight: Tensor) -> Tensor:
        """Add the product of the two factors."""
        return weight + self.scale * (self.b @ self.a)


def apply_lora(model: nn.Module, *, rank: int = 8, alpha: float = 16.0, seed: int = 0) -> nn.Module:
    """Freeze the model and give each of its `nn.Linear` layers adapters; return the model.

    The model predicts what it predicted until a step has changed B. Make the optimizer afterwards.
    Biases are frozen, too. Subclasses of `nn.Linear`, and weights that two modules share, get no
    adapters.

    Args:
        rank: of the product, 1 or more.
        alpha: the product is scaled by alpha / rank.
        seed: of A, uniform within 1 / sqrt(inputs), drawn by NumPy layer by layer.

    Raises ValueError for settings out of range, for a model without such layers, and for weights
    that are parametrized already.
    """
    checks.check_lora(model, rank, alpha)
    random = np.random.default_rng(seed)
    model.requires_grad_(False)
    for layer in checks.dense_layers(model):
        bound = layer.in_features**-0.5
        a = random.uniform(-bound, bound, (layer.in_features, rank)).T  # as Keras has it
        adapter = LowRank(layer.weight.new_tensor(a.copy()), layer.out_features, alpha / rank)
        adapter.train(layer.training)
        parametrize.register_parametrization(layer, "weight", adapter)
    return model


def merge_lora(model: nn.Module) -> nn.Module:
    """Add the adapters to the weights and take them away; return the model, which stays frozen."""
    for layer in list(model.modules()):
        adapters = getattr(getattr(layer, "parametrizations", None), "weight", ())
        if any(isinstance(adapter, LowRank) for adapter in adapters):
            parametrize.remove_parametrizations(layer, "weight", leave_parametrized=True)
    return model


def main() -> None:
    """Print time and bits a character of a GPT that goes from text to text in swapped case."""
    from pt_impl.kit import models, training
    from pt_impl.kit.demo import Demo
    from shared.datasets import SWAPPED

    demo, table = Demo("text-gpt"), torch.tensor(SWAPPED)
    before, optimizer, loss_fn = demo.build()
    demo.fit(training.make_train_step(before, optimizer, loss_fn))
    demo.train, demo.test = ([table[part] for part in split] for split in (demo.train, demo.test))

    def optimizer_of(part):
        return training.make_optimizer(part, demo.task.recipe)

    def everything(model):
        return training.make_train_step(model, optimizer_of(model), loss_fn)

    def head_alone(model):
        features, head = models.split_head(model)
        return make_train_step(features, head, optimizer_of(head), loss_fn)

    print("trained       ms a step  bits a character")
    for name, make in {
        "all": everything,
        "LoRA": lambda model: everything(apply_lora(model)),
        "head": head_alone,
    }.items():
        model = demo.build()[0]
        model.load_state_dict(before.state_dict())
        ms = demo.fit(make(model))
        print(f"{name:14}{ms:9.2f}{demo.score(model):18.2f}")


if __name__ == "__main__":
    main()
