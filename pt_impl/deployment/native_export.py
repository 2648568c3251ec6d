"""Native export: the model compiled ahead of time for PyTorch's own runtimes, and in place.

What it changes: what stands between the model and its kernels. In place, `torch.compile` with
freezing makes the weights constants, folds BatchNorm into convolutions and packs kernels for the
CPU. AOTInductor compiles beforehand: its package (.pt2) holds a shared library that predicts
without the model's source. Results differ by rounding.

Its twin: `tf_impl/deployment/native_export.py`.

Where the frameworks differ and why:
- AOTInductor's package is machine code for the CPU that made it, with the weights; TensorFlow's
  SavedModel is a graph for any machine, which is optimized when it is loaded.
- Freezing knows the weights while it compiles. XLA in place gets them as arguments, so that it
  cannot fold them, and compiles for every batch size; the second size makes torch.compile open it.
- A .pt2 file would read beyond the end of a wrong shape, so it remembers here what it takes.
- Of a branch on an open size (`if x.shape[1] > 8`) a trace takes the example's side; what lies
  beyond the bounds of `torch.export` is tried. TensorFlow, whose trace sees None, tries lengths.
- TorchScript is PyTorch's old way, deprecated. TF-TRT is gone, Torch-TensorRT a package.

When it helps and when it hurts: the package helps where PyTorch is installed but must not compile:
it starts as fast as PyTorch does, and is tied to the CPU and the torch that made it. In place, each
process compiles. Where PyTorch need not be there, see `pt_impl/deployment/export.py`.

Run it alone: `python -m pt_impl.deployment.native_export` prints eager against the compiled
predictions.
Loading a package runs the native code in it: load only files that you made or trust.

Copy with it: `pt_impl/kit/signatures.py`, `shared/runtimes.py`.
"""

import copy
import json
import shutil
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from inspect import signature
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch import nn
from torch._inductor import config
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten  # there is no public one

from pt_impl.kit import signatures
from shared import runtimes

# The most that a file's outputs may be from the model's, in relative L2.
MOST_APART = {"float32": 1e-3, "bfloat16": 0.1}
_KEPT = "twinbench.json"  # under which a file keeps metadata and what it takes


def compiled_predict(model: nn.Module) -> Callable:
    """Return `predict(x) -> output` in evaluation mode, compiled in place with frozen weights.

    x: a tensor, a tuple of the model's positional arguments or a dict of its named ones. First
    calls compile; later changes of the weights are not seen. Raises ValueError for a model in
    training mode. Source: `torch._inductor.config.freezing`, which has no effect as an option of
    `torch.compile`.
    """
    if any(module.training for module in model.modules()):
        raise ValueError("the model is in training mode: call model.eval() first")
    compiled, seen = _compile(model), set()

    def predict(x):
        shapes = tuple(part.shape for part in tree_leaves(x) if isinstance(part, torch.Tensor))
        # Set where a new shape may compile: setting it takes as long as a small model does.
        freezing = nullcontext() if shapes in seen else config.patch(freezing=True)
        seen.add(shapes)
        with torch.no_grad(), freezing:
            arguments, named = signatures.call_arguments(compiled, x)
            return compiled(*arguments, **named)

    return predict


def _compile(model: nn.Module) -> Callable:
    """`torch.compile`, such that a model is compiled however many were before it.

    torch keeps 8 compilations of one piece of code, of all models of a process together, and runs
    what comes after them eagerly.
    """
    if "isolate_recompiles" in signature(torch.compile).parameters:  # torch 2.15 has it
        return torch.compile(model, isolate_recompiles=True)
    torch._dynamo.config.fail_on_recompile_limit_hit = True  # then the ninth raises
    return torch.compile(model)


def export_package(
    model: nn.Module,
    example_inputs,
    path,
    metadata: dict | None = None,
    *,
    dynamic_batch: bool = True,
    dynamic_sequence: bool = False,
    precision: str = "float32",
) -> Path:
    """Compile the model in evaluation mode into AOTInductor's package (.pt2); return its path.

    example_inputs: a tensor, a tuple of the model's positional arguments or a dict of its named
    ones; what in them is no tensor stays as it is. metadata: strings by name that the file carries.
    dynamic_batch: axis 0 of every input may have any size, else the example's; dynamic_sequence:
    axis 1 too. Names are those of `pt_impl/deployment/export.py`. precision: "float32" (the model's
    own) or "bfloat16" for all weights and arithmetic between inputs and outputs. The model is left
    as it is.

    The package is loaded and compared with the model before it is at `path`. Raises ValueError for
    another precision, NotImplementedError with the reason where the model cannot be compiled or is
    another one in the package, for one without a C++ compiler. Source: `aoti_compile_and_package`.
    """
    if precision not in MOST_APART:
        raise ValueError(f"unknown precision {precision!r}: float32 or bfloat16")
    flat = _Flat(model, example_inputs, dynamic_batch, dynamic_sequence)
    kept = flat.kept(metadata, precision)

    def write(draft: Path) -> None:  # in evaluation mode, which a copy takes over
        recorded = _InBfloat16(flat) if precision == "bfloat16" else flat
        with signatures.quietly():
            program = torch.export.export(recorded, flat.example, dynamic_shapes=(flat.shapes,))
        flat.look_beyond(program)
        # Else kernels run as many threads as there are here now, whatever is asked for later.
        options = {"cpp.dynamic_threads": True, "aot_inductor.metadata": {_KEPT: json.dumps(kept)}}
        make = torch._inductor.aoti_compile_and_package
        make(program, package_path=str(draft), inductor_configs=options)

    return _written(path, "AOTInductor", flat, write, load_package, MOST_APART[precision])


def load_package(path, *, threads: int) -> Callable:
    """Return `predict(x) -> output` of a package, NumPy arrays (or tuples of them) in and out.

    It runs the package's native code: load only your own. threads: of all of PyTorch in this
    process. `predict.metadata`, `.threads` and `.precision` as in `shared/runtimes.py`, and errors
    too. Source: `torch._inductor.aoti_load_package`.
    """

    def read():
        package = torch._inductor.aoti_load_package(str(path))
        return package, package.get_metadata()[_KEPT]

    return _loaded(path, read, threads)


def export_torchscript(
    model: nn.Module,
    example_inputs,
    path,
    metadata: dict | None = None,
    *,
    dynamic_batch: bool = True,
    dynamic_sequence: bool = False,
) -> Path:
    """Legacy: record one call as TorchScript, freeze it, and write it to `path`.

    Arguments, result and errors as in `export_package`. Source: `torch.jit.trace`, deprecated.
    """
    flat = _Flat(model, example_inputs, dynamic_batch, dynamic_sequence)

    def write(draft: Path) -> None:
        # A trace knows no bounds; some models it takes alone.
        with suppress(Exception), signatures.quietly():
            flat.look_beyond(torch.export.export(flat, flat.example, dynamic_shapes=(flat.shapes,)))
        recorded = torch.jit.freeze(torch.jit.trace(flat.eval(), flat.example, strict=False))
        kept = json.dumps(flat.kept(metadata, "float32"))
        torch.jit.save(recorded, str(draft), _extra_files={_KEPT: kept})

    bound = MOST_APART["float32"]
    return _written(path, "TorchScript", flat, write, load_torchscript, bound)


def load_torchscript(path, *, threads: int) -> Callable:
    """Legacy: return `predict(x) -> output` of a TorchScript file, as `load_package` does."""

    def read():
        files = {_KEPT: ""}
        return torch.jit.load(str(path), _extra_files=files), files[_KEPT]

    return _loaded(path, read, threads)


def tensorrt_predict(model: nn.Module) -> Callable:
    """Return `predict(x) -> output`, compiled in place by TensorRT on an NVIDIA GPU.

    x: as in `compiled_predict`, on the GPU. Raises NotImplementedError where there is none, or no
    Torch-TensorRT of torch's minor version. Never tried: this project had no such machine.
    """
    if not torch.cuda.is_available():
        raise NotImplementedError("Torch-TensorRT needs an NVIDIA GPU; none was found")
    try:
        runtimes.package("torch_tensorrt", "torch-tensorrt")
    except ModuleNotFoundError as error:
        raise NotImplementedError(str(error)) from error
    compiled = torch.compile(model, backend="torch_tensorrt")

    def predict(x):
        with torch.no_grad():
            arguments, named = signatures.call_arguments(compiled, x)
            return compiled(*arguments, **named)

    return predict


def _loaded(path, read: Callable, threads: int) -> Callable:
    """What `read` reads as a function of NumPy arrays, which are held against what it takes."""
    runtimes.check_exists(path)
    torch.set_num_threads(threads)
    try:
        with zipfile.ZipFile(path) as archive:  # both kinds are one; PyTorch checks no sums
            if damaged := archive.testzip():
                raise ValueError(f"{damaged} in it is damaged")
        program, text = read()
        kept = json.loads(text)
    except Exception as error:  # damage may raise anything in zipfile
        raise ValueError(f"can't load {path}: {runtimes.one_line(error)}") from error

    def run(arrays):
        tensors = (torch.from_numpy(part).to(kept["device"]) for part in arrays)
        with torch.inference_mode():
            return [part.cpu().numpy() for part in tree_leaves(program(*tensors))]

    predict = runtimes.predictor(kept["inputs"], kept["outputs"], run)
    predict.metadata, predict.precision = kept["metadata"], kept["precision"]
    predict.threads = torch.get_num_threads()
    return predict


class _Flat(nn.Module):
    """A model as a function of tensors one by one, whose outputs are a tuple of tensors.

    example: the tensors that it is recorded with. inputs: name, dtype and sizes of each. outputs:
    their names. shapes: the axes of each input whose size is open. samples: inputs of some calls,
    of other sizes where these are open, and what the model made of them; beyond: the same, of sizes
    at which its code may branch.
    """

    def __init__(self, model: nn.Module, example_inputs, batch: bool, sequence: bool):
        super().__init__()
        self.model = model
        axes = [axis for axis, is_open in enumerate((batch, sequence)) if is_open]
        parts, self.structure = tree_flatten(example_inputs)
        self.fixed = [None if isinstance(part, torch.Tensor) else part for part in parts]
        self.places = [n for n, part in enumerate(parts) if isinstance(part, torch.Tensor)]
        tensors = [parts[place] for place in self.places]
        if not tensors or not all(tensor.ndim for tensor in tensors):
            raise ValueError("the model's inputs are tensors with the samples along the first axis")
        names = signatures.input_names(model, example_inputs, len(parts))
        self.inputs, self.shapes, example, others = [], (), [], []
        for place, tensor in zip(self.places, tensors, strict=True):
            own = [axis for axis in axes if axis < tensor.ndim]
            for axis in own:  # a size of one would become a constant
                tensor = torch.cat([tensor] * 2, axis) if tensor.shape[axis] == 1 else tensor
            sizes = [None if axis in own else size for axis, size in enumerate(tensor.shape)]
            dtype = str(tensor.dtype).removeprefix("torch.")
            self.inputs.append((names[place], dtype, sizes))
            self.shapes += (dict.fromkeys(own, torch.export.Dim.DYNAMIC),)
            example.append(tensor)
            others.append(_resized(tensor, own))
        self.example, self.outputs = tuple(example), []
        with _recording(model, "A file"):
            self.samples = [self._sample(example)]
        # A trace takes `len(x)` for a constant, and loops as often as the example did.
        with suppress(NotImplementedError), _recording(model, "Other sizes"):
            self.samples += [self._sample(others)] if axes else []  # some models take one size
        self.beyond: list[tuple[list, list]] = []

    def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """What the model gives."""
        return tuple(part for _, part in self._named(*tensors))

    def look_beyond(self, program: torch.export.ExportedProgram) -> None:
        """Call the model with sizes beyond a program's bounds, where it takes them."""
        for inputs in signatures.beyond_bounds(program, self.example):
            with suppress(NotImplementedError), _recording(self.model, "Other sizes"):
                self.beyond.append(self._sample(inputs))

    def kept(self, metadata: dict | None, precision: str) -> dict:
        """What a file says of itself."""
        names = {"inputs": self.inputs, "outputs": self.outputs}
        own = {"precision": precision, "device": self.example[0].device.type}
        return {"metadata": metadata or {}} | own | names

    def _sample(self, inputs) -> tuple[list, list]:
        named = self._named(*inputs)
        self.outputs = self.outputs or [name for name, _ in named]
        tensors = inputs, [part for _, part in named]
        given, found = ([part.cpu().numpy() for part in each] for each in tensors)
        return given, found

    def _named(self, *tensors: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
        parts = list(self.fixed)
        for place, tensor in zip(self.places, tensors, strict=True):
            parts[place] = tensor
        arguments, named = signatures.call_arguments(
            self.model, tree_unflatten(parts, self.structure)
        )
        return signatures.named_tensors(self.model(*arguments, **named))


def _resized(tensor: torch.Tensor, axes: list[int]) -> torch.Tensor:
    """One sample more; a sequence shorter by one, since some models know a longest one."""
    for axis in axes:
        size = tensor.shape[axis]
        length = size - 1 if axis and size > 2 else size + 1
        rows = torch.arange(length, device=tensor.device) % size
        tensor = tensor.index_select(axis, rows)
    return tensor


class _InBfloat16(nn.Module):
    """A copy of a flat model in bfloat16 that takes and gives float32."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = copy.deepcopy(model).bfloat16()

    def forward(self, *inputs):
        """What the model computes; integers stay integers."""
        cast = (part.bfloat16() if part.is_floating_point() else part for part in inputs)
        found = self.model(*cast)
        return tuple(part.float() if part.is_floating_point() else part for part in found)


def _written(path, target: str, flat: _Flat, write: Callable, load: Callable, bound: float) -> Path:
    """Write a draft, load it, compare it with the model, and only then have it at `path`."""
    path = Path(path)
    if not path.parent.is_dir():
        raise FileNotFoundError(f"no folder {path.parent}")
    with TemporaryDirectory(dir=path.parent) as folder:
        draft = Path(folder, path.name)
        with _recording(flat.model, target):
            write(draft)
        try:
            predict = load(draft, threads=torch.get_num_threads())
            runtimes.check_same(predict, flat.samples, bound=bound)
        except Exception as error:
            reason = runtimes.one_line(error).replace(str(draft), "it")
            raise NotImplementedError(
                f"the file does not give what the model gives: {reason}"
            ) from error
        for given, found in flat.beyond:
            try:
                runtimes.check_same(predict, [(given, found)], bound=bound)
            except Exception as error:
                shapes = ", ".join(str(part.shape) for part in given)
                raise NotImplementedError(
                    "the model branches on a size that is open: a file gives something else at "
                    f"{shapes}"
                ) from error
        shutil.move(draft, path)
    return path


@contextmanager
def _recording(model: nn.Module, target: str) -> Iterator[None]:
    """Evaluation mode without gradients, then modes as found; errors become refusals, one line."""
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        with torch.no_grad():
            yield
    except NotImplementedError:
        raise
    except Exception as error:
        reason = runtimes.one_line(error)
        raise NotImplementedError(f"{target} can't take this model: {reason}") from error
    finally:
        for module, mode in modes.items():
            if module.training != mode:
                module.train(mode)  # some do more in it, as LoRA does


def main() -> None:
    """Print eager, frozen and packaged predictions at batch 1."""
    import tempfile
    from functools import partial
    from timeit import repeat

    from pt_impl.kit import models, runtime, training
    from shared.specs import TASKS

    model, threads = models.build(TASKS["digits-cnn"].model).eval(), torch.get_num_threads()
    x = torch.randn(1, 1, 32, 32).to(runtime.device())
    with tempfile.TemporaryDirectory() as folder:
        package = load_package(export_package(model, x, f"{folder}/model.pt2"), threads=threads)
    predicts = {"eager": training.make_predict(model), "compiled in place": compiled_predict(model)}
    for name, predict in (predicts | {"AOTInductor": lambda x: package(x.cpu())}).items():
        predict(x)
        print(f"{name:18} {1e4 * min(repeat(partial(predict, x), number=100, repeat=5)):5.0f} µs")


if __name__ == "__main__":
    main()
