"""Language model: pre-training of a GPT or a BERT, from characters on disk to a model in use.

What it changes: the program that a tutorial ends with (one float32 graph a step and Keras's AdamW,
one device) gets one more technique at each rung, on top of those before:

1. mixed_precision: forward passes and predictions compute in bfloat16, over float32 weights.
2. fused_optimizer: one kernel updates a variable.
3. checkpointing: each transformer block is recomputed in the backward pass.
4. accumulation: a batch in two micro-batches.
5. data_parallel: replicas with a share of the cores, and of each batch; gradients are summed.

Its twin: `pt_impl/ladders/language_model.py`, which says where the frameworks differ.

When it helps and when it hurts: see the files of the techniques, which this one imports. Replicas
on one CPU share its cores. They gain only if one process does not use all cores, and each needs a
copy of everything. Checkpointing and accumulation save memory and cost time.

Run it alone: `python -m tf_impl.ladders.language_model` trains a small GPT plain and with all
rungs; with `text-bert` after it, a small BERT.
"""

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import tensorflow as tf

from tf_impl.deployment.reduced_precision import make_predict
from tf_impl.parallel import data_parallel
from tf_impl.recipes.checkpoints import save_checkpoint
from tf_impl.train_step.mixed_precision import MixedPrecision
from tf_impl.train_step.optimizer_implementations import for_loop_optimizer, fused_optimizer
from tf_impl.train_step.stacking import make_train_step, prepare_model

RUNGS = ("mixed_precision", "fused_optimizer", "checkpointing", "accumulation", "data_parallel")


class Training:
    """A pre-training on a folder of character codes, with the rungs that are asked for.

    build: gives the model, whose logits are (n, t, vocabulary); with data_parallel it is called
    within the scope of a strategy. folder: has train_x.npy and train_y.npy, int64 (rows, t). A
    label of -100 is none: a BERT has labels only where characters are hidden, in each row as many,
    since shares of a batch weigh alike. rungs: of `RUNGS`, in any order; none is the plain program.
    sequences: the first rows, which make an epoch; 0 are all. replicas: of data_parallel; a batch
    has to be a multiple of them.

    Raises ValueError for another rung and for such a batch, RuntimeError where TensorFlow runs
    already with fewer devices than replicas, and as the techniques do.
    """

    def __init__(
        self,
        build: Callable,
        folder,
        *,
        rungs: tuple = (),
        sequences: int = 0,
        batch_size: int = 4,
        learning_rate: float = 1e-3,
        weight_decay: float = 0.01,
        beta2: float = 0.99,
        seed: int = 0,
        replicas: int = 2,
    ) -> None:
        if unknown := [rung for rung in rungs if rung not in RUNGS]:
            raise ValueError(f"rungs has {unknown[0]!r}; choose of {', '.join(RUNGS)}")
        self.rungs, self.batch_size, self.seed, self.epochs = rungs, batch_size, seed, 0
        self.x, self.y = (
            np.load(Path(folder) / f"train_{part}.npy", mmap_mode="r")[: sequences or None]
            for part in "xy"
        )
        self.dtype = "bfloat16" if "mixed_precision" in rungs else "float32"
        micro_batches = 2 if "accumulation" in rungs else 1
        settings = {"learning_rate": learning_rate, "weight_decay": weight_decay, "beta2": beta2}

        def make():
            recomputed = "block*" if "checkpointing" in rungs else ""
            model = prepare_model(build(), recomputed=recomputed)
            make_optimizer = fused_optimizer if "fused_optimizer" in rungs else for_loop_optimizer
            return model, make_optimizer(model, **settings), _cross_entropy

        if "data_parallel" in rungs:
            if batch_size % replicas:
                raise ValueError(f"a batch of {batch_size} is no multiple of {replicas} replicas")
            self.model, self.step = _on_replicas(make, replicas, self.dtype, micro_batches)
            return
        self.model, optimizer, loss_fn = make()
        self.step = make_train_step(
            self.model, optimizer, loss_fn, dtype=self.dtype, micro_batches=micro_batches
        )

    def epoch(self) -> Iterator[tf.Tensor]:
        """Train for the next epoch; yields the loss of each step."""
        order = np.random.default_rng([self.seed, self.epochs]).permutation(len(self.x))
        self.epochs += 1
        for first in range(0, len(order) - self.batch_size + 1, self.batch_size):
            rows = np.sort(order[first : first + self.batch_size])
            yield self.step(tf.constant(self.x[rows]), tf.constant(self.y[rows]))

    def finish(self, calibration: tf.Tensor) -> Iterator[tf.Tensor]:
        """Nothing follows the last epoch."""
        return iter(())

    def deploy(self, path, calibration: tf.Tensor) -> Callable[[tf.Tensor], tf.Tensor]:
        """Write the weights to `path`; return `predict(x) -> logits`."""
        save_checkpoint(path, self.model, None, {})
        return make_predict(self.model, dtype=self.dtype)

    def close(self) -> None:
        """Nothing was started."""


def _cross_entropy(logits: tf.Tensor, labels: tf.Tensor) -> tf.Tensor:
    """The mean over all labels but those of -100."""
    logits = tf.cast(logits, tf.float32)
    losses = tf.nn.sparse_softmax_cross_entropy_with_logits(tf.maximum(labels, 0), logits)
    counted = tf.cast(labels >= 0, tf.float32)
    return tf.reduce_sum(losses * counted) / tf.reduce_sum(counted)


def _on_replicas(make: Callable, replicas: int, dtype: str, micro_batches: int) -> tuple:
    """The model, mirrored on replicas, and `step(x, y) -> loss` of the whole batch."""
    _split_cpu(replicas)
    model, optimizer, _ = data_parallel.one_process(make, replicas=replicas)
    on_shards = data_parallel.make_train_step(
        model, optimizer, _cross_entropy, micro_batches=micro_batches
    )
    precision, strategy = MixedPrecision(model, dtype=dtype), model.distribute_strategy

    def shards(whole):
        def own(context):
            share, replica = len(whole) // replicas, context.replica_id_in_sync_group
            return whole[replica * share : (replica + 1) * share]

        return strategy.experimental_distribute_values_from_function(own)

    def step(x, y):
        if len(x) % replicas:
            raise ValueError(f"a batch of {len(x)} makes no equal shares for the replicas")
        samples = tf.repeat(len(x), len(x))
        with precision.policies():
            return on_shards(shards(x), shards(y), shards(samples))

    return model, step


def _split_cpu(replicas: int) -> None:
    """Make as many devices of the CPU, where there is no GPU and there are not as many yet."""
    if tf.config.list_physical_devices("GPU"):
        return
    (cpu,) = tf.config.list_physical_devices("CPU")
    there = tf.config.get_logical_device_configuration(cpu) or []
    if len(there) < replicas:
        devices = [tf.config.LogicalDeviceConfiguration()] * replicas
        tf.config.set_logical_device_configuration(cpu, devices)


def main() -> None:
    """Print seconds an epoch and bits per character of a small model, plain and with all rungs."""
    import sys
    import tempfile
    import time
    from functools import partial

    from shared import datasets
    from shared.specs import TASKS
    from shared.weights import init_weights
    from tf_impl.kit import data, models, training

    _split_cpu(2)
    task = TASKS[sys.argv[1] if sys.argv[1:] else "text-gpt"]
    build = partial(models.build, task.model, init_weights(task.model, seed=0))
    with tempfile.TemporaryDirectory() as name:
        folder = datasets.materialise(task.dataset, Path(name))
        test = data.to_device(*datasets.load(folder, "test"))
        for rungs in ((), RUNGS):
            program = Training(build, folder, rungs=rungs, sequences=1024, batch_size=8)
            start = time.perf_counter()
            for _ in range(2):
                losses = [float(loss) for loss in program.epoch()]
            seconds = (time.perf_counter() - start) / 2
            predict = program.deploy(Path(name) / "deployed", test[0][:1])
            bits = training.evaluate(predict, *test, metric="bits_per_character", batch_size=64)
            said = f"{seconds:.1f} s an epoch, last loss {losses[-1]:.3f}, {bits:.2f} bits"
            print(f"{', '.join(rungs) or 'plain'}: {said} a character")


if __name__ == "__main__":
    main()
