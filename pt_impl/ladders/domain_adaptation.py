"""Domain adaptation: adversarial training (DANN), from arrays on disk to a model in use.

What it changes: the program that a tutorial ends with (samples standardised and shifted one at a
time by the process that trains, an eager float32 step of features, head and domain head) gets one
more technique at each rung, on top of those before:

1. input_pipeline: both domains are standardised once, and shifted a batch at a time.
2. mixed_precision: forward passes and predictions compute in bfloat16, over float32 weights.
3. clipping: gradients are clipped at a norm of 0.5, as is usual for adversarial losses.
4. compiled: forward pass, loss and update by `torch.compile`.

Its twin: `tf_impl/ladders/domain_adaptation.py`.

Where the frameworks differ and why:
- Compilation: PyTorch compiles two regions, with Python between them. In TensorFlow XLA compiles
  the whole step.
- Predictions are eager in PyTorch and one graph in TensorFlow.

When it helps and when it hurts: see the files of the techniques, which this one imports. Step and
pipeline process two domains, so techniques that speed them up count twice.

Run it alone: `python -m pt_impl.ladders.domain_adaptation` trains on digits over photos, plain and
with all rungs except compilation.
"""

import math
from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pt_impl.adaptation.adversarial import AdversarialModel, adversarial_loss, make_domain_head
from pt_impl.deployment.reduced_precision import make_predict
from pt_impl.input.in_memory import memory_cached_loader, naive_loader
from pt_impl.recipes.checkpoints import save_checkpoint
from pt_impl.train_step.stacking import make_train_step

RUNGS = ("input_pipeline", "mixed_precision", "clipping", "compiled")


class Training:
    """A training on labelled images of one domain and images of another, with some of the rungs.

    build: gives features and head, x -> features -> logits; the head is an nn.Linear. source,
    target: folders with train_x.npy, float32 (n, height, width, channels), and train_y.npy, int64;
    labels of the target are never looked at. steps: over which the reversal's strength rises, those
    of the whole training. rungs: of `RUNGS`, in any order; none is the plain program. max_norm: of
    clipping.

    Raises ValueError for another rung, and as the techniques do.
    """

    def __init__(
        self,
        build: Callable,
        source,
        target,
        *,
        steps: int,
        rungs: tuple = (),
        batch_size: int = 64,
        learning_rate: float = 0.02,
        momentum: float = 0.9,
        seed: int = 0,
        max_norm: float = 0.5,
    ) -> None:
        if unknown := [rung for rung in rungs if rung not in RUNGS]:
            raise ValueError(f"rungs has {unknown[0]!r}; choose of {', '.join(RUNGS)}")
        make_loader = memory_cached_loader if "input_pipeline" in rungs else naive_loader
        self.source = make_loader(source, batch_size=batch_size, seed=seed)
        self.target = make_loader(target, batch_size=batch_size, seed=seed + 1)
        self.dtype = "bfloat16" if "mixed_precision" in rungs else "float32"
        features, head = build()
        self.model = nn.Sequential(features, head)
        domain_head = make_domain_head(width=head.in_features)
        adversary = AdversarialModel(features, head, domain_head, steps=steps)
        self.adapt = make_train_step(
            adversary,
            torch.optim.SGD(adversary.parameters(), learning_rate, momentum),
            adversarial_loss(F.cross_entropy),
            dtype=self.dtype,
            max_norm=max_norm if "clipping" in rungs else math.inf,
            compiled="compiled" in rungs,
        )

    def step(self, x: Tensor, y: Tensor) -> Tensor:
        """Train on a batch x of both domains: the source, whose labels are y, then the target."""
        return self.adapt((x[: len(y)], x[len(y) :]), y)

    def epoch(self) -> Iterator[Tensor]:
        """Train for the next epoch, that of the smaller domain; yields the loss of each step."""
        for (x, y), (target, _) in zip(self.source, self.target, strict=False):
            count = min(len(x), len(target))
            yield self.adapt((x[:count], target[:count]), y[:count])

    def finish(self, calibration: Tensor) -> Iterator[Tensor]:
        """Nothing follows the last epoch."""
        return iter(())

    def deploy(self, path, calibration: Tensor) -> Callable[[Tensor], Tensor]:
        """Write the weights to `path`; return `predict(x) -> logits`."""
        save_checkpoint(path, self.model, None, {})
        return make_predict(self.model, dtype=self.dtype)

    def close(self) -> None:
        """Nothing was started."""


def main() -> None:
    """Print seconds an epoch and accuracy on the target, plain and with all but the compiler."""
    import tempfile
    import time
    from pathlib import Path

    from pt_impl.kit import data, models, training
    from shared import datasets
    from shared.specs import TASKS
    from shared.weights import init_weights

    task, epochs = TASKS["digits-to-photos"], 6
    weights = init_weights(task.model, seed=0)
    with tempfile.TemporaryDirectory() as name:
        source, target, test = datasets.domain_folders(task.dataset, Path(name))
        test = data.to_device(*test)
        for rungs in ((), tuple(rung for rung in RUNGS if rung != "compiled")):
            program = Training(
                lambda: models.split_head(models.build(task.model, weights)),
                source,
                target,
                steps=epochs * (task.dataset.train_size // 64),
                rungs=rungs,
            )
            start = time.perf_counter()
            for _ in range(epochs):
                losses = [float(loss) for loss in program.epoch()]
            seconds = (time.perf_counter() - start) / epochs
            predict = program.deploy(Path(name) / "deployed", test[0][:1])
            accuracy = training.evaluate(predict, *test, metric="accuracy", batch_size=600)
            said = (
                f"{seconds:.1f} s an epoch, last loss {losses[-1]:.3f}, accuracy {accuracy:.1f} %"
            )
            print(f"{', '.join(rungs) or 'plain'}: {said}")


if __name__ == "__main__":
    main()
