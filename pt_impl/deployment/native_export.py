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
- TorchScript is PyTorch's old way, deprecated. TF-TRT is gone, Torch-TensorRT a package.

When it helps and when it hurts: the package helps where PyTorch is installed but must not compile:
it starts as fast as PyTorch does, and is tied to the CPU and the torch that made it. In place, each
process compiles. Where PyTorch need not be there, see `pt_impl/deployment/export.py`.

Run it alone: `python -m pt_impl.deployment.native_export` prints eager against the compiled
predictions.
Loading a package runs the native code in it: load only files that you made or trust.
"""

import copy
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

import torch
from torch import nn
from torch._inductor import config
from torch.utils._pytree import tree_leaves, tree_map  # torch has no public one

from pt_impl.kit import runtime
from shared import archives, runtimes

_KEPT = "twinbench.json"  # under which a file keeps metadata and what it takes


def compiled_predict(model: nn.Module) -> Callable:
    """Return `predict(x) -> output` in evaluation mode, compiled in place with frozen weights.

    x: a tensor or a tuple of the model's positional arguments. First calls compile; later changes
    of the weights are not seen. Raises ValueError for a model in training mode. Source:
    `torch._inductor.config.freezing`, which has no effect as an option of `torch.compile`.
    """
    if any(module.training for module in model.modules()):
        raise ValueError("the model is in training mode: call model.eval() first")
    compiled, seen = torch.compile(model), set()

    def predict(x):
        inputs = x if isinstance(x, tuple) else (x,)
        shapes = tuple(part.shape for part in inputs)
        # Set where a new shape may compile: setting it takes as long as a small model does.
        freezing = nullcontext() if shapes in seen else config.patch(freezing=True)
        seen.add(shapes)
        with torch.no_grad(), freezing:
            return compiled(*inputs)

    return predict


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

    example_inputs: a tensor or a tuple of the model's positional arguments. metadata: strings by
    name that the file carries. dynamic_batch: axis 0 of every input may have any size, else the
    example's; dynamic_sequence: axis 1 too. precision: "float32" (the model's own) or "bfloat16"
    for all weights and arithmetic between inputs and outputs. The model is left as it is.

    Raises ValueError for another precision, NotImplementedError with the reason where the model
    cannot be compiled, for one without a C++ compiler. Source: `aoti_compile_and_package`.
    """
    if precision not in ("float32", "bfloat16"):
        raise ValueError(f"unknown precision {precision!r}: float32 or bfloat16")
    arguments, shapes, wanted = _opened(example_inputs, dynamic_batch, dynamic_sequence)
    kept = {"metadata": metadata or {}, "inputs": wanted, "precision": precision}
    with _recording(model, "AOTInductor"):
        if precision == "bfloat16":
            model, shapes = _InBfloat16(model), (shapes,)  # of all that `*inputs` holds
        program = torch.export.export(model, arguments, dynamic_shapes=shapes)
        # Else kernels run as many threads as there are here now, whatever is asked for later.
        options = {"cpp.dynamic_threads": True, "aot_inductor.metadata": {_KEPT: json.dumps(kept)}}
        make = torch._inductor.aoti_compile_and_package
        make(program, package_path=str(path), inductor_configs=options)
    return Path(path)


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
    arguments, _, wanted = _opened(example_inputs, dynamic_batch, dynamic_sequence)
    kept = {"metadata": metadata or {}, "inputs": wanted, "precision": "float32"}
    with _recording(model, "TorchScript"):
        recorded = torch.jit.freeze(torch.jit.trace(model, arguments, strict=False))
    torch.jit.save(recorded, str(path), _extra_files={_KEPT: json.dumps(kept)})
    return Path(path)


def load_torchscript(path, *, threads: int) -> Callable:
    """Legacy: return `predict(x) -> output` of a TorchScript file, as `load_package` does."""

    def read():
        files = {_KEPT: ""}
        return torch.jit.load(str(path), _extra_files=files), files[_KEPT]

    return _loaded(path, read, threads)


def tensorrt_predict(model: nn.Module) -> Callable:
    """Return `predict(x) -> output`, compiled in place by TensorRT on an NVIDIA GPU.

    x: a tensor or a tuple of them on the GPU. Raises NotImplementedError where there is none, or no
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
            return compiled(*x) if isinstance(x, tuple) else compiled(x)

    return predict


def _loaded(path, read: Callable, threads: int) -> Callable:
    """What `read` reads as a function of NumPy arrays, which are held against what it takes."""
    runtimes.check_exists(path)
    torch.set_num_threads(threads)
    try:
        archives.check_zip(path)  # both kinds are one; PyTorch checks no sums
        program, text = read()
        kept = json.loads(text)
    except (RuntimeError, KeyError, ValueError) as error:
        raise ValueError(f"can't load {path}: {runtimes.one_line(error)}") from error
    device, inputs = runtime.device(), kept["inputs"]

    def predict(x):
        tensors = (torch.from_numpy(part).to(device) for part in runtimes.fitting(x, inputs))
        with torch.inference_mode():
            found = tuple(part.cpu().numpy() for part in tree_leaves(program(*tensors)))
        return found[0] if len(found) == 1 else found

    predict.metadata, predict.precision = kept["metadata"], kept["precision"]
    predict.threads = torch.get_num_threads()
    return predict


class _InBfloat16(nn.Module):
    """A copy of a model in bfloat16 that takes and gives float32."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = copy.deepcopy(model).bfloat16()

    def forward(self, *inputs):
        """What the model computes; integers stay integers."""
        cast = (part.bfloat16() if part.is_floating_point() else part for part in inputs)
        return tree_map(lambda part: part.float(), self.model(*cast))


def _opened(example_inputs, dynamic_batch: bool, dynamic_sequence: bool) -> tuple:
    """Positional arguments; the axes of each that are open; its name, dtype and sizes."""
    arguments = example_inputs if isinstance(example_inputs, tuple) else (example_inputs,)
    axes = [0] * dynamic_batch + [1] * dynamic_sequence
    for axis in axes:  # a size of one would become a constant
        arguments = tree_map(
            lambda part, axis=axis: torch.cat([part] * 2, axis) if part.shape[axis] == 1 else part,
            arguments,
        )
    wanted = []
    for place, tensor in enumerate(tree_leaves(arguments)):
        sizes = [None if axis in axes else size for axis, size in enumerate(tensor.shape)]
        wanted.append((f"input_{place}", str(tensor.dtype).removeprefix("torch."), sizes))
    open_axes = dict.fromkeys(axes, torch.export.Dim.DYNAMIC)
    return arguments, tree_map(lambda part: open_axes, arguments), wanted


@contextmanager
def _recording(model: nn.Module, target: str) -> Iterator[None]:
    """Evaluation mode without gradients, then modes as found; errors become refusals, one line."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        with torch.no_grad():
            yield
    except Exception as error:
        reason = runtimes.one_line(error)
        raise NotImplementedError(f"{target} can't take this model: {reason}") from error
    finally:
        for module in training:
            module.training = True


def main() -> None:
    """Print eager, frozen and packaged predictions at batch 1."""
    import tempfile
    from functools import partial
    from timeit import repeat

    from pt_impl.kit import models, training
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
