"""Checkpoints: a training can be interrupted at any step, and continues as if it had not been.

    checkpoints = Checkpoints("folder", model, optimizer)
    state = checkpoints.resume() or {"epoch": 0}  # before the loop
    checkpoints.save(step, state, metric)  # within it, as often as you like

What it changes: nothing in the training. A checkpoint is one file with everything that the next
step depends on: weights, the optimizer's state, the states of random generators, and what the
caller adds, such as the position in the data. It is written under another name, flushed and
renamed, so the last good file survives. To deploy a model, or to start another training, less is
enough. The optimizer's state is two thirds of the bytes with Adam, half with momentum. Weights in
float16 halve the rest.

Its twin: `pt_impl/recipes/checkpoints.py`, which says where the frameworks differ.

When it helps and when it hurts: an interruption costs only the steps since the last file. Training
waits while a file is written. The restored state is equal bit for bit; whether the next steps are
depends on the operators. Do not resume from a file in float16: its weights are rounded.
- On a GPU, equal steps need `tf.config.experimental.enable_op_determinism()`.

Run it alone: `python -m tf_impl.recipes.checkpoints` prints bytes and seconds of each kind.

Copy with it: `tf_impl/kit/checkpoint_files.py`, `tf_impl/kit/checks/checkpoints.py`.
"""

import math
from pathlib import Path

import numpy as np
import tensorflow as tf

from tf_impl.kit.checkpoint_files import read_file, write_file, written
from tf_impl.kit.checks.checkpoints import (
    check_checkpoint,
    check_resumable,
    check_tables,
    halved,
    pairs,
    tables,
)


def save_checkpoint(
    path: Path | str,
    model: tf.keras.Model,
    optimizer: tf.keras.optimizers.Optimizer | None,
    state: dict,
    *,
    half_precision: bool = False,
) -> int:
    """Write a checkpoint to `path` in one piece and return its bytes.

    optimizer: None leaves its state and the random generator's out. state: what else a resumed run
    has to know, as JSON values ({"epoch": 3, "batch": 17}) and arrays or tensors of numbers, which
    come back as arrays; NumPy's numbers become Python's.
    half_precision: floating weights in float16. Raises ValueError for a model without variables,
    where a weight does not fit into float16, and for a state of anything else, OSError where the
    file can't be written; what stood at `path` then stays.
    """
    check_checkpoint(model)
    arrays = {f"weight {n}": _array(v) for n, v in enumerate(_state(model))}
    if half_precision:
        arrays = {name: halved(name, value) for name, value in arrays.items()}
    arrays["tables"] = tables(model)
    if optimizer is not None:
        _build(optimizer, model)
        arrays |= {f"optimizer {n}": _array(v) for n, v in enumerate(_variables(optimizer))}
        arrays["random"] = _array(tf.random.get_global_generator().state)
        for rate in _own_rate(optimizer):
            arrays["rate"] = _array(rate)
    return write_file(Path(path), state, arrays, resumable=optimizer is not None)


def load_checkpoint(
    path: Path | str,
    model: tf.keras.Model,
    optimizer: tf.keras.optimizers.Optimizer | None = None,
) -> dict:
    """Read a checkpoint into model, optimizer and random generator; return its `state`.

    With `optimizer` None only the weights are read. One of a part of the variables is built for
    them first (`optimizer.build`): here it would be for all that train. Everything is checked
    before anything is changed: raises ValueError where the file is not a complete checkpoint, is of
    another model (vocabularies and bins count) or optimizer, or has no optimizer's state though
    one is given.
    """
    head, arrays = read_file(Path(path))
    found = pairs(path, "weight", _state(model), arrays)
    check_tables(path, model, arrays)
    if optimizer is not None:
        check_resumable(path, head)
        _build(optimizer, model)
        found += pairs(path, "optimizer", _variables(optimizer), arrays)
        generator = tf.random.get_global_generator()
        found += [(generator.state, arrays["random"])]
        # Earlier versions did not write it.
        found += [(rate, arrays["rate"]) for rate in _own_rate(optimizer) if "rate" in arrays]
    for variable, value in found:
        variable.assign(tf.cast(value, variable.dtype))
    for layer in model._flatten_layers():
        getattr(layer, "finalize_state", int)()  # what `Normalization` computes from its variables
    return head["state"]


class Checkpoints:
    """A folder of checkpoints: the last `keep` ones, the best one, and one every `every` saves.

    Names are `step-00000120.npz`, `best.npz` and `periodic-00000100.npz`. The last ones are those
    that were written last: after a return to an earlier step they are the new ones.
    higher_is_better: of the metric that `save` is given. A folder that holds checkpoints is gone on
    with.
    """

    def __init__(
        self,
        folder: Path | str,
        model: tf.keras.Model,
        optimizer: tf.keras.optimizers.Optimizer,
        *,
        keep: int = 2,
        every: int = 0,
        higher_is_better: bool = False,
    ) -> None:
        if keep < 1 or every < 0:
            raise ValueError(f"keep is 1 or more, every 0 or more, not keep={keep}, every={every}")
        self.folder, self.model, self.optimizer = Path(folder), model, optimizer
        self.keep, self.every, self.sign = keep, every, 1 if higher_is_better else -1
        self.folder.mkdir(parents=True, exist_ok=True)
        best = self.folder / "best.npz"
        self.best = _known(read_file(best)[0]["state"]["metric"]) if best.exists() else None
        self.saves = 0

    def save(self, step: int, state: dict, metric: float | None = None) -> Path:
        """Write the checkpoint of a step; the best one is that of the best `metric` so far.

        A metric of NaN is never the best.
        """
        metric = None if metric is None else float(metric)
        kept = state | {"step": step, "metric": metric, "saves": self.saves + 1}
        path = self.folder / f"step-{step:08}.npz"
        save_checkpoint(path, self.model, self.optimizer, kept)
        new = _known(metric)
        if new is not None and (self.best is None or self.sign * (new - self.best) > 0):
            save_checkpoint(self.folder / "best.npz", self.model, self.optimizer, kept)
            self.best = new
        self.saves += 1
        if self.every and self.saves % self.every == 0:
            periodic = self.folder / f"periodic-{step:08}.npz"
            save_checkpoint(periodic, self.model, self.optimizer, kept)
        for old in self._last()[: -self.keep]:
            old.unlink()
        return path

    def resume(self) -> dict | None:
        """Load the last checkpoint that is whole and return its state; None where there is none.

        The state has "step", "metric" and the number of "saves" so far, which `every` counts on.
        Raises ValueError where there are some and none of them can be read.
        """
        reasons = []
        for path in reversed(self._last()):
            try:
                state = load_checkpoint(path, self.model, self.optimizer)
            except ValueError as error:
                reasons.append(str(error))
                continue
            self.saves = state.get("saves", 0)  # earlier versions did not write it
            return state
        if reasons:
            raise ValueError(f"no checkpoint can be read: {'; '.join(reasons)}")
        return None

    def _last(self) -> list[Path]:
        found = self.folder.glob("step-*.npz")
        return sorted(found, key=lambda path: (written(path), path.name))


def _known(metric: float | None) -> float | None:
    return None if metric is None or math.isnan(metric) else metric


def _build(optimizer, model: tf.keras.Model) -> None:
    """Make the optimizer's state, where it has none before its first step."""
    if not getattr(optimizer, "built", False):  # a LossScaleOptimizer would make another scale
        optimizer.build(model.trainable_variables)


def _state(model: tf.keras.Model) -> list:
    """All that a model's outputs depend on: its variables, and masks of a pruning in Keras 3."""
    calls = [vars(layer).get("call") for layer in model._flatten_layers()]
    return _variables(model) + [call.mask for call in calls if hasattr(call, "mask")]


def _variables(owner) -> list:
    """All variables of a model or an optimizer: a property in Keras 3, a method in tf_keras."""
    return list(owner.variables() if callable(owner.variables) else owner.variables)


def _own_rate(optimizer) -> list:
    """The rate of tf_keras, a variable that it doesn't count among the optimizer's."""
    held = getattr(getattr(optimizer, "inner_optimizer", optimizer), "_learning_rate", None)
    counted = any(variable is held for variable in _variables(optimizer))
    return [held] if isinstance(held, tf.Variable) and not counted else []


def _array(variable) -> np.ndarray:
    return np.asarray(tf.convert_to_tensor(variable))


def main() -> None:
    """Print what each kind of checkpoint of a small GPT takes on disk, to write and to read."""
    import tempfile
    import time

    from tf_impl.kit import training
    from tf_impl.kit.demo import Demo

    demo = Demo("text-gpt-wide", batch_size=2)
    model, optimizer, loss_fn = demo.build()
    training.make_train_step(model, optimizer, loss_fn)(*demo.batches[0])  # a state to save
    print(f"{'kind':22}{'MB':>8}{'save, s':>10}{'load, s':>10}")
    kinds = (
        ("to resume", optimizer, False),
        ("weights", None, False),
        ("weights in float16", None, True),
    )
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "checkpoint.npz"
        for name, kept, half in kinds:
            start = time.perf_counter()
            size = save_checkpoint(path, model, kept, {}, half_precision=half)
            saved = time.perf_counter()
            load_checkpoint(path, model, kept)
            loaded = time.perf_counter()
            print(f"{name:22}{size / 1e6:8.1f}{saved - start:10.2f}{loaded - saved:10.2f}")


if __name__ == "__main__":
    main()
