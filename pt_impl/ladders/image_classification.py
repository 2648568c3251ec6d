"""Image classification: a whole training, from photos on disk to a model in use, rung by rung.

What it changes: the program that a tutorial ends with (photos decoded by the process that trains,
an eager float32 step, the last weights, predictions by the model itself) gets one more technique at
each rung, on top of those before:

1. input_pipeline: photos are decoded in other processes, into a ring of shared batches.
2. mixed_precision: forward passes and predictions compute in bfloat16, over float32 weights.
3. memory_format: the channels of a pixel lie together. Before this rung, batches are converted to
   channels first, so that earlier rungs gain nothing from it.
4. accumulation: a batch in two micro-batches, each normalised by itself.
5. compiled: forward and backward pass, loss and update by `torch.compile`.
6. averaged_weights: an exponential average of the weights is used in the end, with BatchNorm's
   statistics computed for it.
7. pruned: whole channels are removed from the trained network, which trains on, with all of the
   above.
8. int8: ONNX Runtime predicts with a static int8 file.

Its twin: `tf_impl/ladders/image_classification.py`.

Where the frameworks differ and why:
- PyTorch's plain program waits for every photo, since a DataLoader has no workers by default.
  tf.data decodes while the step trains.
- channels_last is TensorFlow's default, so that rung changes nothing there.
- Compilation: PyTorch compiles two regions, with Python between them. In TensorFlow XLA compiles
  the whole step.
- Predictions before the last rung are eager in PyTorch and one graph in TensorFlow.
- PyTorch's tuned pipeline reuses its batches, so they are copied before they are kept. In
  TensorFlow they may be kept.

When it helps and when it hurts: see the files of the techniques, which this one imports.
Accumulation saves memory and costs time. An average costs a pass over the weights per step. Not
every rung helps on every machine: leave out those that don't. The order is that of `stacking.py`.
Pruning and int8 come last, since training has to be over.

Run it alone: `python -m pt_impl.ladders.image_classification` trains ResNet-18 plain and with all
rungs except compilation, on photos that it writes first.
"""

from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pt_impl.compression.post_training_quantization import (
    load_onnxruntime,
    quantize_onnxruntime_int8,
)
from pt_impl.compression.structured_pruning import remove_channels
from pt_impl.deployment.reduced_precision import make_predict
from pt_impl.input.folder import naive_loader
from pt_impl.input.tuned_folder import tuned_loader
from pt_impl.recipes import averaging
from pt_impl.recipes.checkpoints import save_checkpoint
from pt_impl.train_step.memory_format import convert_batch
from pt_impl.train_step.stacking import make_train_step, prepare_model

RUNGS = (
    "input_pipeline",
    "mixed_precision",
    "memory_format",
    "accumulation",
    "compiled",
    "averaged_weights",
    "pruned",
    "int8",
)


class Training:
    """A training of a model on a folder of photos, with the rungs that are asked for.

    build: gives the model, whose logits are (n, classes). photos: a folder with a sub-folder of
    JPEG files a class. rungs: of `RUNGS`, in any order; none is the plain program. average_decay:
    of averaged_weights. pruned_share, pruned_epochs: of the channels that go, and how long the
    network trains on without them.

    Raises ValueError for another rung, and as the techniques do.
    """

    def __init__(
        self,
        build: Callable,
        photos,
        *,
        rungs: tuple = (),
        image_size: int = 64,
        batch_size: int = 16,
        learning_rate: float = 0.02,
        momentum: float = 0.9,
        seed: int = 0,
        average_decay: float = 0.9,
        pruned_share: float = 0.3,
        pruned_epochs: int = 1,
    ) -> None:
        if unknown := [rung for rung in rungs if rung not in RUNGS]:
            raise ValueError(f"rungs has {unknown[0]!r}; choose of {', '.join(RUNGS)}")
        self.rungs, self.average_decay = rungs, average_decay
        self.learning_rate, self.momentum = learning_rate, momentum
        self.pruned_share, self.pruned_epochs = pruned_share, pruned_epochs
        self.dtype = "bfloat16" if "mixed_precision" in rungs else "float32"
        self.format = "channels_last" if "memory_format" in rungs else "channels_first"
        make_loader = tuned_loader if "input_pipeline" in rungs else naive_loader
        self.loader = make_loader(photos, batch_size=batch_size, seed=seed, image_size=image_size)
        self._train(build())

    def _train(self, model: nn.Module) -> None:
        """Make optimizer, step and average for a model."""
        self.model = prepare_model(model, memory_format=self.format)
        optimizer = torch.optim.SGD(model.parameters(), self.learning_rate, self.momentum)
        self.step = make_train_step(
            self.model,
            optimizer,
            F.cross_entropy,
            memory_format=self.format,
            dtype=self.dtype,
            micro_batches=2 if "accumulation" in self.rungs else 1,
            compiled="compiled" in self.rungs,
        )
        self.average = None
        if "averaged_weights" in self.rungs:
            self.average = averaging.make_exponential_average(model, decay=self.average_decay)
            self.step = averaging.make_averaging_step(self.step, model, self.average)

    def epoch(self) -> Iterator[Tensor]:
        """Train for the next epoch; yields the loss of each step."""
        for x, y in self.loader:
            yield self.step(x, y)

    def finish(self, calibration: Tensor) -> Iterator[Tensor]:
        """Do what follows the last epoch; yields the losses of the epochs that this takes.

        calibration: photos of the training, (n, channels, height, width).
        """
        self._use_average()
        if "pruned" in self.rungs:
            self._train(remove_channels(self.model, calibration[:2], share=self.pruned_share))
            for _ in range(self.pruned_epochs):
                yield from self.epoch()
            self._use_average()

    def _use_average(self) -> None:
        if self.average is None:
            return
        averaging.apply_average(self.model, self.average)
        # Copies: a batch of the pipeline is valid until the next but one.
        batches = [convert_batch(x.clone(), memory_format=self.format) for x, _ in self.loader]
        averaging.update_statistics(self.model, batches)

    def deploy(self, path, calibration: Tensor) -> Callable[[Tensor], Tensor]:
        """Write what is deployed to `path`; return `predict(x) -> logits` of the deployed model."""
        self.model.eval()
        if "int8" in self.rungs:
            quantize_onnxruntime_int8(self.model.cpu(), calibration.cpu(), path)
            run = load_onnxruntime(path)
            return lambda x: run(x.cpu()).to(x.device)
        save_checkpoint(path, self.model, None, {})
        predict = make_predict(self.model, dtype=self.dtype)
        return lambda x: predict(convert_batch(x, memory_format=self.format))

    def close(self) -> None:
        """End the processes that decode photos."""
        self.loader = None


def main() -> None:
    """Print seconds an epoch and accuracy, plain and with the rungs that need no compiler."""
    import tempfile
    import time
    from pathlib import Path

    from pt_impl.kit import data, models, training
    from shared import datasets, photos
    from shared.specs import TASKS
    from shared.weights import init_weights

    task, weights = TASKS["photos-resnet18"], init_weights(TASKS["photos-resnet18"].model, seed=0)
    with tempfile.TemporaryDirectory() as name:
        folder = photos.make_photos(Path(name), images=192, size=96, seed=0)
        arrays = datasets.materialise(task.dataset, Path(name))
        calibration, _ = data.to_device(*datasets.load(arrays, "train"))
        test = data.to_device(*datasets.load(arrays, "test"))
        for rungs in ((), tuple(rung for rung in RUNGS if rung != "compiled")):
            program = Training(lambda: models.build(task.model, weights), folder, rungs=rungs)
            start = time.perf_counter()
            for _ in range(3):
                last = [float(loss) for loss in program.epoch()]
            seconds = (time.perf_counter() - start) / 3
            last += [float(loss) for loss in program.finish(calibration[:64])]
            predict = program.deploy(Path(name) / "deployed", calibration[:64])
            accuracy = training.evaluate(predict, *test, metric="accuracy", batch_size=64)
            said = f"{seconds:.1f} s an epoch, last loss {last[-1]:.3f}, accuracy {accuracy:.1f} %"
            print(f"{', '.join(rungs) or 'plain'}: {said}")
            program.close()


if __name__ == "__main__":
    main()
