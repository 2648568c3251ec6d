"""Checkpoints: a training that can be interrupted at any step and goes on as if it had not been.

What it changes: nothing of the training. A checkpoint is one file with everything that the next
step depends on: weights and buffers, the optimizer's state, the states of the random generators,
and what the caller adds, such as the place in the data. It is written beside its final name,
flushed and renamed, so that whatever happens the last good file stays. `Checkpoints` keeps the
ones that were written last, the best one and periodic ones.

For deployment, or to start another training from, less is enough: without the optimizer's state
(two thirds of the bytes with Adam, half with momentum), and with weights in float16 (half of the
rest, rounded to 11 bits).

Its twin: `tf_impl/recipes/checkpoints.py`.

Where the frameworks differ and why:
- The file is `torch.save`'s, which is read with `weights_only=True`: tensors and plain containers,
  no code. TensorFlow's own checkpoints are several files, which can't be replaced at once; the twin
  writes NumPy's archive.
- PyTorch draws from global generators, one a device, whose states are saved; those of Python and
  NumPy are not. Keras 3 keeps a seed in each layer that draws, as a variable of the model.
- A gradient scaler, a schedule or an average has a `state_dict()` of its own: hand it over as
  `state`.

When it helps and when it hurts: it saves what an interruption would cost, and takes the seconds of
a write every time, in which the training waits. Bit for bit is what comes back; whether the next
steps are the same to the last bit is up to the operators: on a GPU only with
`torch.use_deterministic_algorithms(True)`. A file in float16 is not one to resume from: training
goes on from rounded weights.

Run it alone: `python -m pt_impl.recipes.checkpoints` prints bytes and seconds of each kind.

Copy with it: nothing.
"""

import io
import math
import os
import time
import zipfile
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.nn.parameter import is_lazy

VERSION = 1
# Settings that torch's schedules, and optimizers of named parameters, add to an optimizer's groups.
ADDED = {"initial_lr", "max_lr", "min_lr", "base_momentum", "max_momentum", "swa_lr", "param_names"}


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
        weights = {name: _halved(name, value) for name, value in weights.items()}
    content = {"version": VERSION, "weights": weights, "state": _plain(state)}
    content["written"] = time.time_ns()
    if optimizer is not None:
        content["optimizer"] = optimizer.state_dict()
        content["optimizer"]["param_groups"] = _plain(content["optimizer"]["param_groups"])
        content["random"] = _random_states()
    _check_readable(content)
    path = Path(path)
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with beside.open("wb") as file:
            torch.save(content, file)
            file.flush()
            os.fsync(file.fileno())  # or the name may reach the disk before the bytes
        os.replace(beside, path)
        _sync_folder(path.parent)
    except (OSError, RuntimeError) as error:  # torch.save wraps a full disk in the latter
        raise OSError(f"{path} can't be written: {_line(error)}") from error
    finally:
        beside.unlink(missing_ok=True)
    return path.stat().st_size


def load_checkpoint(
    path: Path | str, model: nn.Module, optimizer: torch.optim.Optimizer | None = None
) -> dict:
    """Read a checkpoint into model, optimizer and random generators; return its `state`.

    With `optimizer` None the weights alone are read. What schedules keep in the optimizer's groups
    may be there, here or in neither. Everything is checked before anything is
    changed: raises ValueError where the file is no whole checkpoint, is of another model or
    optimizer, or has no optimizer's state though one is given.
    """
    content = _read(Path(path))
    _check_weights(path, model, content["weights"])
    if optimizer is not None:
        if "optimizer" not in content:
            raise ValueError(f"{path} holds weights alone: it can't be resumed from")
        _check_optimizer(path, optimizer, content["optimizer"])
        groups = content["optimizer"]["param_groups"]
        for saved, group in zip(groups, optimizer.param_groups, strict=True):
            saved |= {key: group[key] for key in ADDED & (group.keys() - saved.keys())}
        optimizer.load_state_dict(content["optimizer"])
        _restore_random_states(content["random"])
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
        self.best = _known(_read(best)["state"]["metric"]) if best.exists() else None
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
        return sorted(found, key=lambda path: (_written(path), path.name))


def _written(path: Path) -> int:
    """When a checkpoint was written, in ns: a copy has another time in its folder."""
    try:
        return torch.load(path, map_location="cpu", weights_only=True, mmap=True)["written"]
    except Exception:  # of a damaged file, and of one of an earlier version
        return path.stat().st_mtime_ns


def _known(metric: float | None) -> float | None:
    return None if metric is None or math.isnan(metric) else metric


def _plain(value):
    """The same with Python's numbers in the place of NumPy's, which no reader may load."""
    if isinstance(value, dict):
        return {_plain(key): _plain(each) for key, each in value.items()}
    if type(value) in (list, tuple):  # no reader may make other kinds
        return type(value)(map(_plain, value))
    return value.item() if isinstance(value, np.generic) else value


def _check_readable(content: dict) -> None:
    """Raise for what could be written and not be read; tensors can, and are left out."""
    weights = content["weights"].items()
    rest = {name: value for name, value in weights if not isinstance(value, torch.Tensor)}
    groups = content.get("optimizer", {}).get("param_groups")
    written = io.BytesIO()
    try:
        torch.save([content["state"], groups, rest], written)
        written.seek(0)
        torch.load(written, weights_only=True)
    except Exception as error:  # whatever pickle makes of an object
        reason = f"a checkpoint holds numbers, text, tensors and containers alone: {_line(error)}"
        raise ValueError(reason) from error


def _halved(name: str, value):
    if not isinstance(value, torch.Tensor) or not value.is_floating_point():
        return value
    half = value.to(torch.float16)
    if half.isfinite().all() != value.isfinite().all():
        raise ValueError(f"{name} has values beyond float16's 65504: leave half_precision out")
    return half


def _random_states() -> dict:
    """The states of the generators of the CPU and of each CUDA device."""
    return {"cpu": torch.get_rng_state(), "cuda": torch.cuda.get_rng_state_all()}


def _restore_random_states(states: dict) -> None:
    torch.set_rng_state(states["cpu"])
    if len(states["cuda"]) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all(states["cuda"])


def _read(path: Path) -> dict:
    """What a checkpoint holds, on the CPU. No code is executed."""
    try:
        with zipfile.ZipFile(path) as archive:
            damaged = archive.testzip()
        if damaged:
            raise zipfile.BadZipFile(f"{damaged} is not what was written")
        content = torch.load(path, map_location="cpu", weights_only=True)
        whole = content["version"] == VERSION and {"weights", "state"} <= content.keys()
    except FileNotFoundError:
        raise ValueError(f"there is no {path}") from None
    except Exception as error:  # whatever a foreign or damaged file makes of zip and pickle
        reason = f"{path} is no checkpoint, or is cut off or damaged: {_line(error)}"
        raise ValueError(reason) from error
    if not whole:
        raise ValueError(f"{path} is no checkpoint of version {VERSION}")
    return content


def _check_weights(path, model: nn.Module, weights: dict) -> None:
    ours, theirs = (
        {name: _shape(value) for name, value in each.items()}
        for each in (model.state_dict(), weights)
    )
    for name in ours.keys() & theirs.keys():
        if ours[name] is None:
            ours[name] = theirs[name]
    for name in ours | theirs:
        if ours.get(name) != theirs.get(name):
            raise ValueError(
                f"{path} is of another model: {name} is {theirs.get(name, 'missing')} there, "
                f"{ours.get(name, 'missing')} here"
            )


def _shape(value) -> tuple | None:
    """None of a lazy layer that was not called yet; a module's extra state may be anything."""
    if is_lazy(value):
        return None
    return tuple(getattr(value, "shape", ()))


def _check_optimizer(path, optimizer: torch.optim.Optimizer, saved: dict) -> None:
    ours = [len(group["params"]) for group in optimizer.param_groups]
    theirs = [len(group["params"]) for group in saved["param_groups"]]
    keys = [set(group) - ADDED for group in optimizer.param_groups]
    same = keys == [set(group) - ADDED for group in saved["param_groups"]]
    if ours != theirs or not same:
        raise ValueError(f"{path} is of another optimizer: its groups or their settings differ")


def _sync_folder(folder: Path) -> None:
    if os.name == "posix":
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def _line(error: Exception) -> str:
    # What torch.load says before it is advice to load without the check.
    text = str(error).rpartition("WeightsUnpickler error: ")[2]
    return f"{type(error).__name__}: {' '.join(text.split())[:160]}"


def main() -> None:
    """Print what each kind of checkpoint of a small GPT takes on disk, to write and to read."""
    import tempfile

    from pt_impl.kit import models, training
    from shared.specs import TASKS
    from shared.weights import init_weights

    task = TASKS["text-gpt-wide"]
    model = models.build(task.model, init_weights(task.model, seed=0))
    optimizer = training.make_optimizer(model, task.recipe)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    print(f"{'kind':22}{'MB':>8}{'save, s':>10}{'load, s':>10}")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "checkpoint.pt"
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
