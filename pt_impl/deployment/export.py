"""Export: the model as a file that a runtime without PyTorch loads and runs.

What it changes: who runs the model. Its operators and weights are written to a file, which ONNX
Runtime or OpenVINO optimize for the machine and run, with neither PyTorch nor the model's source
there (`shared/runtimes.py` loads it). The mathematics stays; results differ by rounding.

Its twin: `tf_impl/deployment/export.py`.

Where the frameworks differ and why:
- PyTorch has to record a graph first: `torch.export` follows one call of the model, which
  `torch.onnx.export` translates with onnxscript. TensorFlow has its graph, and tf2onnx translates
  it; an operator that ONNX lacks it writes into the file all the same, for a checker to find.
- Images go in as in the framework: NCHW here, NHWC there. ONNX's operators know NCHW alone, so that
  TensorFlow's files begin with a transposition; LiteRT's know NHWC alone.
- PyTorch's exporter writes LayerNormalization and Gelu as such, tf2onnx their parts. ONNX Runtime
  puts the GELU together again; Keras 3's normalisation it does not recognise.
- int8 comes from ONNX Runtime's tool on both sides, over each one's own file; OpenVINO takes that
  file. LiteRT's int8 is TensorFlow's own converter's.
- A size of one in the example becomes a constant in `torch.export`; TensorFlow is told which sizes
  are open, whatever the example.
- Of a branch on an open size (`if x.shape[1] > 8`) `torch.export` takes the example's side, with
  its bounds, beyond which the file is held against the model, too. TensorFlow's trace sees None
  there and knows no bounds: a shorter and a longer sequence are tried.
- TensorFlow writes LiteRT files itself. PyTorch's way there is a package of its own, litert-torch,
  which is not among those that this project is tested with.

When it helps and when it hurts: it helps a program that only predicts, which starts at once and
takes a fraction of the memory, and small models, whose time in a framework is mostly the
framework's. Training stays behind, and so does what the format cannot say: branches on values,
operators that it lacks. Check an export against its model on real data before it is used.

Run it alone: `python -m pt_impl.deployment.export` prints how far the files' predictions are from
the model's, and how long they take.

Copy with it: `pt_impl/kit/signatures.py`, `shared/onnx_quantization.py`, `shared/runtimes.py`.
"""

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten  # torch has no public one

from pt_impl.kit import signatures
from shared import runtimes

# The most that a file's outputs may be from the model's, in relative L2: kernels round otherwise,
# and what int8 loses is the user's to judge, unless little is left.
MOST_APART = {"float32": 1e-3, "int8": 0.5}


def export_onnx(
    model: nn.Module,
    example_inputs,
    path,
    metadata: dict | None = None,
    *,
    dynamic_batch: bool = True,
    dynamic_sequence: bool = False,
    precision: str = "float32",
) -> Path:
    """Write the model in evaluation mode as one ONNX file and return its path.

    example_inputs: a tensor, a tuple of the model's positional arguments or a dict of its named
    ones, on its device; what in them is no tensor stays as it is. metadata: strings by name that
    the file carries. dynamic_batch: axis 0 of every input may have any size, else the example's;
    dynamic_sequence: axis 1 too. Inputs keep the names of the model's arguments, outputs those of
    a dict or dataclass, else output_0, output_1, ... in their order. precision: "float32", or
    "int8" of weights and activations, whose ranges are those that the example inputs give: a few
    hundred real samples, on the CPU. The model is left as it is.

    ONNX Runtime loads the file and gives what the model gives, to `MOST_APART`, before it is at
    `path`. Raises ValueError for another precision, NotImplementedError with the reason where the
    model cannot be translated, has nothing to quantize or is another one in the file, and
    ModuleNotFoundError that names a missing package. Above 2 GiB protobuf refuses one file.
    Sources: `torch.onnx.export(dynamo=True)`, which by itself puts weights into a second file;
    `onnxruntime.quantization.quantize_static`.
    """
    _check_precision(precision)
    for name in ("onnx", "onnxscript", "onnxruntime"):
        runtimes.package(name, name)
    batches = _calibration(example_inputs, precision, dynamic_batch)
    flat = _Flat(model, example_inputs, dynamic_batch, dynamic_sequence)
    with _evaluating(model), _refusing("ONNX"):
        program = torch.onnx.export(
            flat,
            flat.example,
            dynamo=True,
            dynamic_shapes=flat.shapes,
            input_names=flat.inputs,
            output_names=flat.outputs,
            verbose=False,
        )
    flat.look_beyond(program.exported_program)
    program.model.metadata_props.update(metadata or {})
    with _written(path) as draft:
        program.save(str(draft), external_data=False)
        _check(runtimes.load_onnx, draft, flat, "float32")
        if batches is not None:
            from shared import onnx_quantization

            onnx_quantization.replace(draft, batches)
            _check(runtimes.load_onnx, draft, flat, "int8")
    return Path(path)


def export_openvino(
    model: nn.Module,
    example_inputs,
    path,
    metadata: dict | None = None,
    *,
    dynamic_batch: bool = True,
    dynamic_sequence: bool = False,
    precision: str = "float32",
) -> Path:
    """Write the model in evaluation mode for OpenVINO: `path` (.xml), weights in a .bin beside it.

    Arguments, result and errors as in `export_onnx`; int8 goes through such a file. Weights in
    float32 stay so; in which precision they are used is said when the model is loaded.
    Source: `openvino.convert_model`.
    """
    _check_precision(precision)
    openvino = runtimes.openvino_package()
    _calibration(example_inputs, precision, dynamic_batch)
    flat = _Flat(model, example_inputs, dynamic_batch, dynamic_sequence)
    if precision == "float32":
        converted = _for_openvino(flat)
    else:
        with TemporaryDirectory() as folder:
            opened = {"dynamic_batch": dynamic_batch, "dynamic_sequence": dynamic_sequence}
            file = Path(folder, "model.onnx")
            export_onnx(model, example_inputs, file, **opened, precision=precision)
            converted = openvino.convert_model(str(file))
    for name, value in (metadata or {}).items():
        converted.set_rt_info(value, ["metadata", name])
    with _written(path) as draft:
        openvino.save_model(converted, str(draft), compress_to_fp16=False)  # which is the default
        _check(runtimes.load_openvino, draft, flat, precision)
    return Path(path)


def _for_openvino(flat: "_Flat"):
    openvino = runtimes.openvino_package()
    with _evaluating(flat.model), torch.no_grad(), _refusing("OpenVINO"):
        program = torch.export.export(flat, flat.example, dynamic_shapes=flat.shapes)
        converted = openvino.convert_model(program)
    flat.look_beyond(program)
    for given, name, tensor in zip(converted.inputs, flat.inputs, flat.example, strict=True):
        open_axes = flat.open_axes(tensor)  # the conversion opens every size
        sizes = [-1 if axis in open_axes else size for axis, size in enumerate(tensor.shape)]
        given.get_node().set_partial_shape(openvino.PartialShape(sizes))
        given.get_tensor().set_names({name})
    for given, name in zip(converted.outputs, flat.outputs, strict=True):
        given.get_tensor().set_names({name})
    converted.validate_nodes_and_infer_types()
    return converted


class _Flat(nn.Module):
    """A model as a function of tensors one by one, whose outputs are a tuple of tensors.

    example: the tensors that it is recorded with. inputs, outputs: their names. shapes: the axes of
    each whose size is open. samples: inputs of some calls and what the model made of them; beyond:
    the same, of sizes at which its code may branch.
    """

    def __init__(self, model: nn.Module, example_inputs, batch: bool, sequence: bool):
        super().__init__()
        self.model = model
        self.axes = [axis for axis, is_open in enumerate((batch, sequence)) if is_open]
        parts, self.structure = tree_flatten(example_inputs)
        self.fixed = [None if isinstance(part, Tensor) else part for part in parts]
        self.places = [place for place, part in enumerate(parts) if isinstance(part, Tensor)]
        tensors = [parts[place] for place in self.places]
        if not tensors or not all(tensor.ndim for tensor in tensors):
            raise ValueError("the model's inputs are tensors with the samples along the first axis")
        self.example = tuple(map(self._at_least_two, tensors))
        open_sizes = [dict.fromkeys(self.open_axes(t), torch.export.Dim.DYNAMIC) for t in tensors]
        self.shapes = (tuple(open_sizes),)  # of all that `*tensors` holds
        names = signatures.input_names(model, example_inputs, len(parts))
        self.inputs = [names[place] for place in self.places]
        others = tuple(torch.cat([tensor, tensor[:1]]) for tensor in self.example)
        self.outputs: list[str] = []
        self.samples = [self._sample(inputs) for inputs in (self.example, others)[: 1 + batch]]
        self.beyond: list[tuple[list, list]] = []
        if sequence:
            with suppress(NotImplementedError):  # some models take one length
                self.samples.append(self._sample(tuple(map(_of_another_length, self.example))))

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """What the model gives."""
        return tuple(tensor for _, tensor in self._named(*tensors))

    def _named(self, *tensors: Tensor) -> list[tuple[str, Tensor]]:
        parts = list(self.fixed)
        for place, tensor in zip(self.places, tensors, strict=True):
            parts[place] = tensor
        x = tree_unflatten(parts, self.structure)
        arguments, named = signatures.call_arguments(self.model, x)
        return signatures.named_tensors(self.model(*arguments, **named))

    def open_axes(self, tensor: Tensor) -> list[int]:
        """The axes of a tensor whose size is open."""
        return [axis for axis in self.axes if axis < tensor.ndim]

    def _at_least_two(self, tensor: Tensor) -> Tensor:
        for axis in self.open_axes(tensor):  # a size of one would become a constant
            tensor = torch.cat([tensor] * 2, axis) if tensor.shape[axis] == 1 else tensor
        return tensor

    def _sample(self, inputs: tuple[Tensor, ...]) -> tuple[list, list]:
        with _evaluating(self.model), torch.no_grad(), _refusing("The model"):
            named = self._named(*inputs)
            given = [part.cpu().numpy() for part in inputs]  # which refuses bfloat16
            found = [part.cpu().numpy() for _, part in named]
        self.outputs = self.outputs or [name for name, _ in named]
        return given, found

    def look_beyond(self, program: torch.export.ExportedProgram) -> None:
        """Call the model with sizes beyond a program's bounds, where it takes them."""
        for inputs in signatures.beyond_bounds(program, self.example):
            with suppress(NotImplementedError):
                self.beyond.append(self._sample(tuple(inputs)))


def _of_another_length(tensor: Tensor) -> Tensor:
    """Shorter by one, since some models know a longest sequence."""
    if tensor.ndim < 2:
        return tensor
    size = tensor.shape[1]
    rows = torch.arange(size - 1 if size > 2 else size + 1, device=tensor.device) % size
    return tensor.index_select(1, rows)


def _check_precision(precision: str) -> None:
    if precision not in MOST_APART:
        raise ValueError(f"unknown precision {precision!r}: float32 or int8")


def _calibration(example_inputs, precision: str, dynamic_batch: bool) -> Iterator | None:
    """For int8, the example inputs in batches, as arrays: ValueError where they are none."""
    if precision != "int8":
        return None
    tensors = [part for part in tree_flatten(example_inputs)[0] if isinstance(part, Tensor)]
    arrays = [tensor.cpu().numpy() for tensor in tensors]
    return runtimes.calibration_batches(
        arrays, size=32 if dynamic_batch or not arrays else max(len(arrays[0]), 1)
    )


@contextmanager
def _written(path) -> Iterator[Path]:
    """A file to write; it and what lies beside it go to `path` if nothing is raised."""
    path = Path(path)
    if not path.parent.is_dir():
        raise FileNotFoundError(f"no folder {path.parent}")
    with TemporaryDirectory(dir=path.parent) as folder:
        draft = Path(folder, path.name)
        yield draft
        for file in Path(folder).iterdir():
            shutil.move(file, path.with_name(file.name))


def _check(load: Callable, path: Path, flat: _Flat, precision: str) -> None:
    """Refuse a file that its runtime does not load, or in which the model is another one."""
    try:
        predict = load(path, threads=1)
        # One batch is enough where the rest of the mathematics has been compared.
        samples = flat.samples[:1] if precision == "int8" else flat.samples
        runtimes.check_same(predict, samples, bound=MOST_APART[precision])
    except Exception as error:
        reason = runtimes.one_line(error).replace(str(path), "it")
        raise NotImplementedError(
            f"the file does not give what the model gives: {reason}"
        ) from error
    for given, found in flat.beyond if precision == "float32" else ():
        try:
            runtimes.check_same(predict, [(given, found)], bound=MOST_APART[precision])
        except Exception as error:
            shapes = ", ".join(str(part.shape) for part in given)
            raise NotImplementedError(
                "the model branches on a size that is open: a file gives something else at "
                f"{shapes}"
            ) from error


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """Evaluation mode, then every module's mode as found."""
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes.items():
            if module.training != mode:
                module.train(mode)  # some do more in it, as LoRA does


@contextmanager
def _refusing(target: str) -> Iterator[None]:
    """Turn an error of a translation into NotImplementedError with its reason on one line."""
    try:
        with signatures.quietly():
            yield
    except NotImplementedError:
        raise
    except Exception as error:  # of many classes, from several packages
        text = str(error)
        for heading in ("## Exception summary", "Summary:"):  # of torch.onnx, of OpenVINO
            text = text.partition(heading)[2] or text
        reason = runtimes.one_line(RuntimeError(text)) if text else type(error).__name__
        raise NotImplementedError(f"{target} can't take this: {reason}") from error


def main() -> None:
    """Export the digits CNN and print its files' differences and their time at batch 1."""
    import statistics
    import tempfile
    import time

    import numpy as np

    from pt_impl.kit import models, runtime, training
    from shared.specs import TASKS
    from shared.weights import init_weights

    threads = runtime.configure(threads=torch.get_num_threads(), seed=0)["intra_op"]
    spec = TASKS["digits-cnn"].model
    model = models.build(spec, init_weights(spec, seed=0)).cpu().eval()  # the files' device
    one, many = torch.randn(1, 1, 32, 32), torch.randn(64, 1, 32, 32)
    with tempfile.TemporaryDirectory() as folder:
        onnx = export_onnx(model, one, Path(folder, "model.onnx"))
        openvino = export_openvino(model, one, Path(folder, "model.xml"))
        predicts = {
            "PyTorch": training.make_predict(model),
            "ONNX Runtime": runtimes.load_onnx(onnx, threads=threads),
            "OpenVINO": runtimes.load_openvino(openvino, threads=threads),
        }
        expected = predicts["PyTorch"](many).numpy()
        for name, predict in predicts.items():
            apart = abs(expected - np.asarray(predict(many))).max()
            times = []
            for _ in range(200):
                start = time.perf_counter()
                predict(one)
                times.append(time.perf_counter() - start)
            print(f"{name:13} differs by {apart:.0e}, {1e6 * statistics.median(times):5.0f} µs")


if __name__ == "__main__":
    main()
