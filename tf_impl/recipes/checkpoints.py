"""Checkpoints: a training that can be interrupted at any step and goes on as if it had not been.

What it changes: nothing of the training. A checkpoint is one file with everything that the next
step depends on: the model's variables, the optimizer's state, the state of the random generator,
and what the caller adds, such as the place in the data. It is written beside its final name,
flushed and renamed, so that whatever happens the last good file stays. `Checkpoints` keeps the
ones that were written last, the best one and periodic ones.

For deployment, or to start another training from, less is enough: without the optimizer's state
(two thirds of the bytes with Adam, half with momentum), and with weights in float16 (half of the
rest, rounded to 11 bits).

Its twin: `pt_impl/recipes/checkpoints.py`.

Where the frameworks differ and why:
- The file is NumPy's archive of arrays, read with `allow_pickle=False`: no code. TensorFlow's own
  `tf.train.Checkpoint` writes an index and shards, several files that can't be replaced at once,
  and `fit`'s `BackupAndRestore` a folder of them. PyTorch's is `torch.save`'s, read with
  `weights_only=True`.
- Variables are saved in the model's order and checked by shape: names need not be unique in Keras.
- A layer that draws at random holds its seed as a variable of the model in Keras 3, which is saved
  with the others; so is `tf.random`'s global generator here. PyTorch's generators are global.
- The step count and the place in a schedule are the optimizer's. There they are a scheduler's.

When it helps and when it hurts: it saves what an interruption would cost, and takes the seconds of
a write every time, in which the training waits. Bit for bit is what comes back; whether the next
steps are the same to the last bit is up to the operators: on a GPU only with
`tf.config.experimental.enable_op_determinism()`. A file in float16 is not one to resume from:
training goes on from rounded weights. `tf_keras` layers draw from the operators' own seeds, which
no checkpoint holds.

Run it alone: `python -m tf_impl.recipes.checkpoints` prints bytes and seconds of each kind.

Copy with it: nothing.
"""

import json
import math
import os
import time
from pathlib import Path

import numpy as np
import tensorflow as tf

VERSION = 1
_ARRAY = "of the archive"  # where a state has an array


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
    if not model.built:
        raise ValueError("the model has no variables yet: call it once on an example input")
    arrays = {f"weight {n}": _array(v) for n, v in enumerate(_state(model))}
    if half_precision:
        arrays = {name: _halved(name, value) for name, value in arrays.items()}
    if optimizer is not None:
        _build(optimizer, model)
        arrays |= {f"optimizer {n}": _array(v) for n, v in enumerate(_variables(optimizer))}
        arrays["random"] = _array(tf.random.get_global_generator().state)
        for rate in _own_rate(optimizer):
            arrays["rate"] = _array(rate)
    head = {"version": VERSION, "state": state, "resumable": optimizer is not None}
    head["written"] = time.time_ns()

    def kept(value):
        """What stands for a value that JSON does not know."""
        if isinstance(value, np.generic) and value.dtype.kind in "biuf":
            return value.item()
        array = np.asarray(value)
        # Objects an archive would pickle; words and dates could not be read again.
        if array.dtype.hasobject or array.dtype.kind in "USMm":
            kind = type(value).__name__
            raise ValueError(f"a state is of JSON values and arrays of numbers: {kind} is none")
        name = f"state {len(arrays)}"
        arrays[name] = array
        return {_ARRAY: name, "dtype": array.dtype.name}

    arrays["head"] = np.frombuffer(json.dumps(head, default=kept).encode(), np.uint8)
    path = Path(path)
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with beside.open("wb") as file:
            np.savez(file, **arrays)
            file.flush()
            os.fsync(file.fileno())  # or the name may reach the disk before the bytes
        os.replace(beside, path)
        _sync_folder(path.parent)
    except OSError as error:
        raise OSError(f"{path} can't be written: {_line(error)}") from error
    finally:
        beside.unlink(missing_ok=True)
    return path.stat().st_size


def load_checkpoint(
    path: Path | str,
    model: tf.keras.Model,
    optimizer: tf.keras.optimizers.Optimizer | None = None,
) -> dict:
    """Read a checkpoint into model, optimizer and random generator; return its `state`.

    With `optimizer` None the weights alone are read. One of a part of the variables is built for
    them first (`optimizer.build`): here it would be for all that train. Everything is checked
    before anything is changed: raises ValueError where the file is no whole checkpoint, is of
    another model or optimizer, or has no optimizer's state though one is given.
    """
    head, arrays = _read(Path(path))
    pairs = _pairs(path, "weight", _state(model), arrays)
    if optimizer is not None:
        if not head["resumable"]:
            raise ValueError(f"{path} holds weights alone: it can't be resumed from")
        _build(optimizer, model)
        pairs += _pairs(path, "optimizer", _variables(optimizer), arrays)
        generator = tf.random.get_global_generator()
        pairs += [(generator.state, arrays["random"])]
        # Earlier versions did not write it.
        pairs += [(rate, arrays["rate"]) for rate in _own_rate(optimizer) if "rate" in arrays]
    for variable, value in pairs:
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
        self.best = _known(_read(best)[0]["state"]["metric"]) if best.exists() else None
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
        return sorted(found, key=lambda path: (_written(path), path.name))


def _written(path: Path) -> int:
    """When a checkpoint was written, in ns: a copy has another time in its folder."""
    try:
        with np.load(path, allow_pickle=False) as archive:
            return json.loads(archive["head"].tobytes())["written"]
    except Exception:  # of a damaged file, and of one of an earlier version
        return path.stat().st_mtime_ns


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


def _halved(name: str, value: np.ndarray) -> np.ndarray:
    if value.dtype not in (np.float32, np.float64):
        return value
    with np.errstate(over="ignore"):
        half = value.astype(np.float16)
    if np.isfinite(half).all() != np.isfinite(value).all():
        raise ValueError(f"{name} has values beyond float16's 65504: leave half_precision out")
    return half


def _read(path: Path) -> tuple[dict, dict[str, np.ndarray]]:
    """The head and the arrays of a checkpoint. No code is executed."""
    try:
        with np.load(path, allow_pickle=False) as archive:  # checks each member's CRC
            arrays = {name: archive[name] for name in archive.files}

        def whole_value(found: dict):
            if _ARRAY not in found:
                return found
            # NumPy writes the bytes of a dtype that it does not know, such as bfloat16.
            return arrays[found[_ARRAY]].view(tf.as_dtype(found["dtype"]).as_numpy_dtype)

        head = json.loads(arrays.pop("head").tobytes(), object_hook=whole_value)
        whole = head["version"] == VERSION and {"state", "resumable"} <= head.keys()
    except FileNotFoundError:
        raise ValueError(f"there is no {path}") from None
    except Exception as error:  # whatever a foreign or damaged file makes of zip and NumPy
        reason = f"{path} is no checkpoint, or is cut off or damaged: {_line(error)}"
        raise ValueError(reason) from error
    if not whole:
        raise ValueError(f"{path} is no checkpoint of version {VERSION}")
    return head, arrays


def _pairs(path, kind: str, variables: list, arrays: dict[str, np.ndarray]) -> list[tuple]:
    """Each variable with its value, or ValueError where they are not of the same things."""
    saved = [name for name in arrays if name.startswith(f"{kind} ")]
    other = "model" if kind == "weight" else "optimizer"
    if len(saved) != len(variables):
        raise ValueError(
            f"{path} is of another {other}: {len(saved)} variables there, {len(variables)} here"
        )
    pairs = [(variable, arrays[f"{kind} {n}"]) for n, variable in enumerate(variables)]
    # NumPy writes the bytes of a dtype that it does not know, such as bfloat16.
    pairs = [(v, a.view(_numpy_dtype(v)) if a.dtype.kind == "V" else a) for v, a in pairs]
    for variable, value in pairs:
        if tuple(variable.shape) != value.shape:
            raise ValueError(
                f"{path} is of another {other}: {variable.name} is {value.shape} there, "
                f"{tuple(variable.shape)} here"
            )
    return pairs


def _numpy_dtype(variable) -> np.dtype:
    return np.dtype(tf.as_dtype(variable.dtype).as_numpy_dtype)


def _sync_folder(folder: Path) -> None:
    if os.name == "posix":
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def _line(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:160]}"


def main() -> None:
    """Print what each kind of checkpoint of a small GPT takes on disk, to write and to read."""
    import tempfile

    from shared.specs import TASKS
    from shared.weights import init_weights
    from tf_impl.kit import models, training

    task = TASKS["text-gpt-wide"]
    model = models.build(task.model, init_weights(task.model, seed=0))
    optimizer = training.make_optimizer(model, task.recipe)
    print(f"{'kind':22}{'MB':>8}{'save, s':>10}{'load, s':>10}")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "checkpoint.npz"
        for name, kept, half in (
            ("to resume", optimizer, False),
            ("weights", None, False),
            ("weights in float16", None, True),
        ):
            start = time.perf_counter()
            size = save_checkpoint(path, model, kept, {}, half_precision=half)
            saved = time.perf_counter()
            load_checkpoint(path, model, kept)
            loaded = time.perf_counter()
            print(f"{name:22}{size / 1e6:8.1f}{saved - start:10.2f}{loaded - saved:10.2f}")


if __name__ == "__main__":
    main()
