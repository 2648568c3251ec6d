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

Its twin: `tf_impl/recipes/checkpoints.py`.

Where the frameworks differ and why:
- PyTorch: `torch.save` writes the file, which is read with `weights_only=True`.
- TensorFlow: `tf.train.Checkpoint` and `BackupAndRestore` write several files, which can't be
  replaced at once. So NumPy writes an archive here, which is read with `allow_pickle=False`.
- PyTorch draws from global generators, one per device, which are saved. Those of Python and NumPy
  are not. In Keras 3 a layer that draws has its seed in a variable. tf_keras layers draw from
  operators' seeds, which can't be saved.
- PyTorch: pass the `state_dict()` of a gradient scaler, a schedule or an average as `state`.
  TensorFlow: the step count and the position in a schedule belong to the optimizer.

When it helps and when it hurts: an interruption costs only the steps since the last file. Training
waits while a file is written. The restored state is equal bit for bit; whether the next steps are
depends on the operators. Do not resume from a file in float16: its weights are rounded.
- On a GPU, equal steps need `torch.use_deterministic_algorithms(True)`.

Run it alone: `python -m pt_impl.recipes.checkpoints` prints bytes and seconds of each kind.

Copy with it: `pt_impl/kit/checkpoint_files.py`, `pt_impl/kit/checks/checkpoints.py`.
"""

import math
from pathlib import Path

import torch
from torch import nn

from pt_impl.kit.checkpoint_files import (
    check_readable,
    plain,
    random_states,
    read_file,
    restore_random_states,
    write_file,
    written,
)
from pt_impl.kit.checks.checkpoints import check_checkpoint, halved, with_added


def save_checkpoint(
    path: Path | str,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    state: dict,
    *,
    half_precision: bool = False,
) -> int:
    """Write a checkpoint to `path` in one piece and return its bytes.

    optimizer: None leaves its state and the random generators' out. state: what else a resumed run
    has to know, as JSON values ({"epoch": 3, "batch": 17}) and tensors; NumPy's numbers become
    Python's. half_precision: floating weights in float16. Raises ValueError where a weight does not
    fit into float16, or something could not be read again without executing code, OSError where the
    file can't be written; what stood at `path` then stays.
    """
    weights = model.state_dict()
    if half_precision:
        weights = {name: halved(name, value) for name, value in weights.items()}
    content = {"weights": weights, "state": plain(state)}
    if optimizer is not None:
        content["optimizer"] = optimizer.state_dict()
        content["optimizer"]["param_groups"] = plain(content["optimizer"]["param_groups"])
        content["random"] = random_states()
    check_readable(content)
    return write_file(Path(path), content)


def load_checkpoint(
    path: Path | str, model: nn.Module, optimizer: torch.optim.Optimizer | None = None
) -> dict:
    """Read a checkpoint into model, optimizer and random generators; return its `state`.

    With `optimizer` None only the weights are read. What schedules keep in the optimizer's groups
    may be there, here or in neither. Everything is checked before anything is changed: raises
    ValueError where the file is not a complete checkpoint, is of another model or optimizer, or
    lacks the optimizer's state though one is given.
    """
    content = read_file(Path(path))
    check_checkpoint(path, content, model, optimizer)
    if optimizer is not None:
        optimizer.load_state_dict(with_added(optimizer, content["optimizer"]))
        restore_random_states(content["random"])
    model.load_state_dict(content["weights"])
    return content["state"]


class Checkpoints:
    """A folder of checkpoints: the last `keep` ones, the best one, and one every `every` saves.

    Names are `step-00000120.pt`, `best.pt` and `periodic-00000100.pt`. The last ones are those that
    were written last: after a return to an earlier step they are the new ones. higher_is_better: of
    the metric that `save` is given. A folder that holds checkpoints is gone on with.
    """

    def __init__(
        self,
        folder: Path | str,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
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
        best = self.folder / "best.pt"
        self.best = _known(read_file(best)["state"]["metric"]) if best.exists() else None
        self.saves = 0

    def save(self, step: int, state: dict, metric: float | None = None) -> Path:
        """Write the checkpoint of a step; the best one is that of the best `metric` so far.

        A metric of NaN is never the best.
        """
        metric = None if metric is None else float(metric)
        kept = state | {"step": step, "metric": metric, "saves": self.saves + 1}
        path = self.folder / f"step-{step:08}.pt"
        save_checkpoint(path, self.model, self.optimizer, kept)
        new = _known(metric)
        if new is not None and (self.best is None or self.sign * (new - self.best) > 0):
            save_checkpoint(self.folder / "best.pt", self.model, self.optimizer, kept)
            self.best = new
        self.saves += 1
        if self.every and self.saves % self.every == 0:
            periodic = self.folder / f"periodic-{step:08}.pt"
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
        found = self.folder.glob("step-*.pt")
        return sorted(found, key=lambda path: (written(path), path.name))


def _known(metric: float | None) -> float | None:
    return None if metric is None or math.isnan(metric) else metric


def main() -> None:
    """Print what each kind of checkpoint of a small GPT takes on disk, to write and to read."""
    import tempfile
    import time

    from pt_impl.kit import training
    from pt_impl.kit.demo import Demo

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
        path = Path(folder) / "checkpoint.pt"
        for name, kept, half in kinds:
            start = time.perf_counter()
            size = save_checkpoint(path, model, kept, {}, half_precision=half)
            saved = time.perf_counter()
            load_checkpoint(path, model, kept)
            loaded = time.perf_counter()
            print(f"{name:22}{size / 1e6:8.1f}{saved - start:10.2f}{loaded - saved:10.2f}")


if __name__ == "__main__":
    main()
