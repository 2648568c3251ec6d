"""Native export: the model compiled ahead of time for PyTorch's runtime, and in place.

    path = export_package(model, example_inputs, "model.pt2")
    predict = load_package(path, threads=1)  # arrays in and out, any number of samples

What it changes: what calls the kernels. In place, `torch.compile` with freezing makes the weights
constants, folds BatchNorm into convolutions and packs kernels for the CPU. AOTInductor compiles
ahead of time: its package (.pt2) holds a shared library that predicts without the model's source.
Results differ by rounding.

Its twin: `tf_impl/deployment/native_export.py`.

Where the frameworks differ and why:
- PyTorch: AOTInductor's package is machine code for the CPU that made it, and holds the weights.
- TensorFlow: a SavedModel is a graph for any machine, and is optimized when it is loaded.
- In place, PyTorch freezes the weights into constants. XLA gets them as arguments, so it can't fold
  BatchNorm.
- XLA compiles for every batch size. At a second batch size, `torch.compile` makes it dynamic.
- TensorFlow's number of threads is fixed before the first operation of the process.
- TorchScript, PyTorch's older way, is deprecated. TensorFlow's builds have no TensorRT since 2.18;
  Torch-TensorRT is a separate package.

When it helps and when it hurts: if the framework need not be installed, use `deployment/export.py`.
- The package helps if PyTorch is installed but must not compile. It starts as fast as PyTorch, and
  works only with the CPU and the torch version that made it.
- In place, each process has to compile.

Run it alone: `python -m pt_impl.deployment.native_export` compares eager predictions with the
others.

Copy with it: `pt_impl/kit/checks/native_export.py`, `pt_impl/kit/signatures.py`,
`shared/runtimes.py`.
"""

import copy
import json
import zipfile
from collections.abc import Callable
from contextlib import nullcontext, suppress
from inspect import signature as signature_of
from pathlib import Path

import torch
from torch import nn

from pt_impl.kit.checks.native_export import check_evaluating, check_native_export, check_tensorrt
from pt_impl.kit.signatures import Signature, call, recording, tensors_of
from shared import runtimes

# The most that a file's outputs may be from the model's, in relative L2.
MOST_APART = {"float32": 1e-3, "bfloat16": 0.1}
_ABOUT = "twinbench.json"  # the entry of a file with its metadata and inputs


def compiled_predict(model: nn.Module) -> Callable:
    """Return `predict(x) -> output` in evaluation mode, compiled in place with frozen weights.

    x: a tensor, a tuple of the model's positional arguments or a dict of its named ones. First
    calls compile; later changes of the weights are not seen. Raises ValueError for a model in
    training mode. Source: `torch._inductor.config.freezing`, which has no effect as an option of
    `torch.compile`.
    """
    check_evaluating(model)
    compiled, seen = _compile(model), set()

    def predict(x):
        shapes = tuple(part.shape for part in tensors_of(x))
        # Set where a new shape may compile: setting it takes as long as a small model does.
        freezing = nullcontext() if shapes in seen else torch._inductor.config.patch(freezing=True)
        seen.add(shapes)
        with torch.no_grad(), freezing:
            return call(compiled, x)

    return predict


def _compile(model: nn.Module) -> Callable:
    """`torch.compile`, such that a model is compiled however many were before it.

    torch keeps 8 compilations of one piece of code, of all models of a process together, and runs
    what comes after them eagerly.
    """
    if "isolate_recompiles" in signature_of(torch.compile).parameters:  # torch 2.15 has it
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
    check_native_export(precision)
    sizes = {"dynamic_batch": dynamic_batch, "dynamic_sequence": dynamic_sequence}
    signature = Signature(model, example_inputs, **sizes)
    with runtimes.draft(path) as draft:
        with recording(model, "AOTInductor"):  # in evaluation mode, which a copy takes over
            recorded = _InBfloat16(signature) if precision == "bfloat16" else signature
            program = signature.program(recorded)
        signature.look_beyond(program)
        about = _describe(signature, metadata, precision)
        # Else kernels run as many threads as there are here now, whatever is asked for later.
        options = {"cpp.dynamic_threads": True, "aot_inductor.metadata": {_ABOUT: about}}
        with recording(model, "AOTInductor"):
            make = torch._inductor.aoti_compile_and_package
            make(program, package_path=str(draft), inductor_configs=options)
        _check(load_package, draft, signature, precision)
    return Path(path)


def load_package(path, *, threads: int) -> Callable:
    """Return `predict(x) -> output` of a package, NumPy arrays (or tuples of them) in and out.

    It runs the package's native code: load only your own. threads: of all of PyTorch in this
    process. `predict.metadata`, `.threads` and `.precision` as in `shared/runtimes.py`, and errors
    too. Source: `torch._inductor.aoti_load_package`.
    """

    def read():
        package = torch._inductor.aoti_load_package(str(path))
        return package, package.get_metadata()[_ABOUT]

    return _load(path, read, threads)


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
    sizes = {"dynamic_batch": dynamic_batch, "dynamic_sequence": dynamic_sequence}
    signature = Signature(model, example_inputs, **sizes)
    with suppress(NotImplementedError), recording(model, "torch.export"):
        # A trace knows no bounds; it takes some models that export does not.
        signature.look_beyond(signature.program())
    with runtimes.draft(path) as draft:
        with recording(model, "TorchScript"):
            traced = torch.jit.trace(signature, signature.example, strict=False)
            about = {_ABOUT: _describe(signature, metadata, "float32")}
            torch.jit.save(torch.jit.freeze(traced), str(draft), _extra_files=about)
        _check(load_torchscript, draft, signature, "float32")
    return Path(path)


def load_torchscript(path, *, threads: int) -> Callable:
    """Legacy: return `predict(x) -> output` of a TorchScript file, as `load_package` does."""

    def read():
        files = {_ABOUT: ""}
        return torch.jit.load(str(path), _extra_files=files), files[_ABOUT]

    return _load(path, read, threads)


def tensorrt_predict(model: nn.Module) -> Callable:
    """Return `predict(x) -> output`, compiled in place by TensorRT on an NVIDIA GPU.

    x: as in `compiled_predict`, on the GPU. Raises NotImplementedError where there is none, or no
    Torch-TensorRT of torch's minor version. Never tried: this project had no such machine.
    """
    check_tensorrt()
    import torch_tensorrt  # noqa: F401 (it registers the backend)

    compiled = torch.compile(model, backend="torch_tensorrt")

    def predict(x):
        with torch.no_grad():
            return call(compiled, x)

    return predict


class _InBfloat16(nn.Module):
    """A copy of a model in bfloat16 that takes and gives float32."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = copy.deepcopy(model).bfloat16()

    def forward(self, *inputs):
        """What the model computes; integers stay integers."""
        cast = (part.bfloat16() if part.is_floating_point() else part for part in inputs)
        found = self.model(*cast)
        return tuple(part.float() if part.is_floating_point() else part for part in found)


def _describe(signature: Signature, metadata: dict | None, precision: str) -> str:
    """What a file says of itself: a package would read beyond the end of a wrong shape."""
    wanted = []
    for place, part in enumerate(signature.example):
        sizes = [None if n in signature.open_axes[place] else s for n, s in enumerate(part.shape)]
        wanted.append((signature.inputs[place], str(part.dtype).removeprefix("torch."), sizes))
    about = {"inputs": wanted, "outputs": signature.outputs, "metadata": metadata or {}}
    device = signature.example[0].device.type
    return json.dumps(about | {"precision": precision, "device": device})


def _check(load: Callable, draft: Path, signature: Signature, precision: str) -> None:
    """Refuse a file in which the model is another one."""

    def read(path, *, threads: int):  # threads are those of the whole process: they stay
        return load(path, threads=torch.get_num_threads())

    samples, bound = signature.samples, MOST_APART[precision]
    runtimes.check_file(read, draft, samples, bound=bound, beyond=signature.beyond)


def _load(path, read: Callable, threads: int) -> Callable:
    """What `read` reads as a function of NumPy arrays, which are checked before."""
    runtimes.check_exists(path)
    torch.set_num_threads(threads)
    try:
        with zipfile.ZipFile(path) as archive:  # both kinds are one; PyTorch checks no sums
            if damaged := archive.testzip():
                raise ValueError(f"{damaged} in it is damaged")
        program, text = read()
        about = json.loads(text)
    except Exception as error:  # damage may raise anything in zipfile
        raise ValueError(f"can't load {path}: {runtimes.one_line(error)}") from error

    def run(arrays):
        tensors = (torch.from_numpy(part).to(about["device"]) for part in arrays)
        with torch.inference_mode():
            return [part.cpu().numpy() for part in program(*tensors)]

    predict = runtimes.predictor(about["inputs"], about["outputs"], run)
    predict.metadata, predict.precision = about["metadata"], about["precision"]
    predict.threads = torch.get_num_threads()
    return predict


def main() -> None:
    """Print eager, frozen and packaged predictions at batch 1."""
    from tempfile import TemporaryDirectory

    from pt_impl.kit.demo import Demo
    from pt_impl.kit.training import make_predict

    demo = Demo(batch_size=1)
    model, x = demo.build()[0].eval(), demo.batches[0][0]
    with TemporaryDirectory() as folder:
        path = export_package(model, x, Path(folder, "model.pt2"))
        package = load_package(path, threads=torch.get_num_threads())
    eager, compiled = make_predict(model), compiled_predict(model)
    calls = {
        "eager": lambda x, y: eager(x),
        "compiled in place": lambda x, y: compiled(x),
        "AOTInductor": lambda x, y: package(x.cpu()),
    }
    for name, milliseconds in demo.times(calls).items():
        print(f"{name:18}{1e3 * milliseconds:6.0f} µs")


if __name__ == "__main__":
    main()
