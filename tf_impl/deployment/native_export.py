"""Native export: the model as a file for TensorFlow's own runtime, and compiled in place.

What it changes: what stands between the model and its kernels. In place, XLA makes one program of
the model. A SavedModel is the traced graph with its weights in a folder, which TensorFlow, TF
Serving or TensorFlow.js load and run without the model's source. Results differ by rounding.

Its twin: `pt_impl/deployment/native_export.py`.

Where the frameworks differ and why:
- A SavedModel is a graph for any machine, which is optimized when it is loaded. AOTInductor's
  package is machine code for the CPU that made it, and holds it and the weights.
- XLA in place gets the weights as arguments, so that it cannot fold BatchNorm into them, and
  compiles for every batch size. PyTorch freezes them into constants.
- A SavedModel has a signature and refuses what does not fit; a package of PyTorch would read
  beyond its input's end.
- A branch on an open size sees None in the trace: a shorter and a longer sequence are tried.
  `torch.export` knows the bounds of the example's side, beyond which a package is tried.
- Threads are those of the process, fixed before TensorFlow's first operation.
- TorchScript is PyTorch's; here `tf.function` traces. TensorRT inside of TensorFlow (TF-TRT) is out
  of its builds since 2.18; Torch-TensorRT is a package.

When it helps and when it hurts: a SavedModel helps where TensorFlow serves: it fixes what the model
was, and needs no Python source. It is no faster than the graph that it holds, and starts as slowly
as TensorFlow does. XLA helps on a GPU and where many small operators follow each other; on a CPU
its convolutions are slower than oneDNN's. Where TensorFlow need not be there, see
`tf_impl/deployment/export.py`.

Run it alone: `python -m tf_impl.deployment.native_export` prints `tf.function` against the others.

A SavedModel's operators can read and write files: load only what you made or trust.

Copy with it: `shared/runtimes.py`, `tf_impl/kit/signatures.py`.
"""

import json
import shutil
from collections.abc import Callable
from contextlib import nullcontext, suppress
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import tensorflow as tf

from shared import runtimes
from tf_impl.kit.signatures import (
    call,
    input_names,
    named_tensors,
    refuse_state,
    tables,
    to_tensors,
)

MOST_APART = 1e-3  # the most that a folder's outputs may be from the model's, in relative L2
_KEPT = Path("assets.extra", "twinbench.json")  # where TF Serving looks for files that go along


def compiled_predict(model: tf.keras.Model) -> Callable:
    """Return `predict(x) -> output` in evaluation mode, compiled in place by XLA.

    x: what the model is called with, as in `export_package`. The first call of each shape compiles.
    Source: "Use XLA with tf.function",
    tensorflow.org/xla.
    """

    @tf.function(jit_compile=True)
    def predict(x):
        return call(model, x)

    return predict


def export_package(
    model: tf.keras.Model,
    example_inputs,
    path,
    metadata: dict | None = None,
    *,
    dynamic_batch: bool = True,
    dynamic_sequence: bool = False,
    precision: str = "float32",
) -> Path:
    """Write the model in evaluation mode as a SavedModel, a folder, and return its path.

    example_inputs: what the model is called with, as `fit` hands it over: a tensor, or a tuple,
    list or dict of them; a tuple is unpacked where `call` takes several arguments. metadata:
    strings by name that the folder carries. dynamic_batch: axis 0 of every input may have any size,
    else the example's; dynamic_sequence: axis 1 too. Names are those of
    `tf_impl/deployment/export.py`. precision: "float32" (the model's own). The model is left as it
    is, and compared with the folder before that is at `path`.

    Raises ValueError for a model without variables and another precision; NotImplementedError for
    "bfloat16", which is the model's to have (`tf_impl/train_step/mixed_precision.py`).
    Source: `tf.saved_model.save`.
    """
    if precision not in ("float32", "bfloat16"):
        raise ValueError(f"unknown precision {precision!r}: float32 or bfloat16")
    if precision == "bfloat16":
        raise NotImplementedError("a SavedModel computes as its model does: cast that before")
    if not model.built:
        raise ValueError("the model has no variables yet: call it once on an example input")
    if hasattr(tf.keras, "StatelessScope"):  # tf_keras's states are variables as all others
        refuse_state(model)
    if not Path(path).parent.is_dir():
        raise FileNotFoundError(f"no folder {Path(path).parent}")
    if Path(path).exists() and not Path(path, "saved_model.pb").is_file():
        raise FileExistsError(f"{path} is there and no SavedModel: name another folder")
    example_inputs = to_tensors(example_inputs)
    dynamic = (dynamic_batch, dynamic_sequence)
    open_axes = [axis for axis, is_open in enumerate(dynamic) if is_open]
    predict, outputs = _traced(model, example_inputs, open_axes)
    inputs = input_names(model, example_inputs, len(tf.nest.flatten(example_inputs)))
    names = {"inputs": inputs, "outputs": outputs}
    with TemporaryDirectory(dir=Path(path).parent) as folder:
        draft = Path(folder, "draft")
        _save(model, predict, draft)
        kept = draft / _KEPT
        kept.parent.mkdir(exist_ok=True)
        kept.write_text(json.dumps({"metadata": metadata or {}} | names), encoding="utf-8")
        _check(draft, model, example_inputs, open_axes)
        if Path(path).is_dir():
            shutil.rmtree(path)
        shutil.move(draft, path)
    return Path(path)


def _traced(model, example_inputs, open_axes: list[int]) -> tuple[Callable, list[str]]:
    """The model as one function from tensors to tensors by number, and what these are called."""
    signature = []
    for place, tensor in enumerate(tf.nest.flatten(example_inputs)):
        sizes = [None if axis in open_axes else size for axis, size in enumerate(tensor.shape)]
        signature.append(tf.TensorSpec(sizes, tensor.dtype, name=f"input_{place}"))
    outputs: list[str] = []

    @tf.function(input_signature=signature, jit_compile=False)
    def predict(*parts):
        # Nothing is assigned: a layer that will not drop draws a seed for its dropout all the same.
        with getattr(tf.keras, "StatelessScope", nullcontext)():
            named = named_tensors(call(model, tf.nest.pack_sequence_as(example_inputs, parts)))
        outputs[:] = [name for name, _ in named]
        return {f"output_{place}": part for place, (_, part) in enumerate(named)}

    try:
        predict.get_concrete_function()
    except Exception as error:
        reason = runtimes.one_line(error)
        raise NotImplementedError(f"the model can't be traced with this: {reason}") from error
    return predict, outputs


def _save(model, predict, draft: Path) -> None:
    """Write a traced function, its variables and its tables, such as those of `StringLookup`."""
    module = tf.Module()  # not the model, for which Keras would trace functions of its own
    module.predict, module.weights = predict, predict.get_concrete_function().variables
    module.tables = tables(model)
    try:
        tf.saved_model.save(module, str(draft), signatures={"serving_default": predict})
    except Exception as error:  # of what a model holds that no file can
        reason = runtimes.one_line(error)
        raise NotImplementedError(f"TensorFlow can't save this model: {reason}") from error


def _check(draft: Path, model, example_inputs, open_axes: list[int]) -> None:
    """Refuse a folder in which the model is another one."""

    def sample(given: list) -> tuple[list, list]:
        own = named_tensors(call(model, tf.nest.pack_sequence_as(example_inputs, given)))
        return [part.numpy() for part in given], [np.asarray(part) for _, part in own]

    tensors = tf.nest.flatten(example_inputs)
    try:
        predict, names = _read(draft)
        samples = [sample(tensors)]
        for given in _other_lengths(tensors) if 1 in open_axes else ():
            with suppress(Exception):  # some models take one length, or know a longest one
                samples.append(sample(given))
        predict = runtimes.predictor(*names, predict)
        runtimes.check_same(predict, samples, bound=MOST_APART)
    except Exception as error:
        reason = runtimes.one_line(error)
        raise NotImplementedError(
            f"the file does not give what the model gives: {reason}"
        ) from error


def _other_lengths(tensors: list[tf.Tensor]) -> list[list[tf.Tensor]]:
    """Inputs whose sequences, along axis 1, are one shorter, and twice as long."""
    has_some = [tensor.shape.rank > 1 and tensor.shape[1] > 1 for tensor in tensors]
    pairs = list(zip(tensors, has_some, strict=True))
    shorter = [tensor[:, :-1] if some else tensor for tensor, some in pairs]
    return [shorter, [tf.concat([tensor, tensor], 1) if some else tensor for tensor, some in pairs]]


def _read(path: Path) -> tuple[Callable, tuple]:
    """A folder's function from arrays to arrays, and what is known of its inputs and outputs."""
    loaded = tf.saved_model.load(str(path))
    kept = json.loads((path / _KEPT).read_text("utf-8"))
    specs = loaded.signatures["serving_default"].structured_input_signature[1]
    specs = [specs[f"input_{place}"] for place in range(len(specs))]
    wanted = [
        (name, spec.dtype.name, list(spec.shape))
        for name, spec in zip(kept["inputs"], specs, strict=True)
    ]

    def run(arrays):
        outputs = loaded.predict(*(tf.constant(array) for array in arrays))
        return [outputs[f"output_{place}"].numpy() for place in range(len(outputs))]

    run.metadata, run.package = kept["metadata"], loaded  # whose variables live as long as it does
    return run, (wanted, kept["outputs"])


def load_package(path, *, threads: int) -> Callable:
    """Return `predict(x) -> output` of a SavedModel, NumPy arrays (or tuples of them) in and out.

    Its operators can read and write files: load only your own. threads: of all of TensorFlow in
    this process; RuntimeError where it runs already with another number. `predict.metadata`,
    `.threads` and `.precision` as in `shared/runtimes.py`, and errors too.
    Source: `tf.saved_model.load`.
    """
    if not Path(path).is_dir():
        raise FileNotFoundError(f"no folder {path}")
    found = _set_threads(threads)
    try:
        run, names = _read(Path(path))
    except Exception as error:  # OSError, IndexError and others, by what is damaged
        raise ValueError(f"can't load {path}: {runtimes.one_line(error)}") from error
    predict = runtimes.predictor(*names, run)
    predict.metadata, predict.threads, predict.precision = run.metadata, found, "float32"
    return predict


def _set_threads(threads: int) -> int:
    """Set the process's threads, or find that they are so already; what is read back."""
    threading = tf.config.threading
    if threading.get_intra_op_parallelism_threads() != threads:
        try:
            threading.set_intra_op_parallelism_threads(threads)
            threading.set_inter_op_parallelism_threads(threads)
        except RuntimeError as error:
            running = threading.get_intra_op_parallelism_threads() or "its own number of"
            raise RuntimeError(f"TensorFlow runs already with {running} threads") from error
    return threading.get_intra_op_parallelism_threads()


def main() -> None:
    """Print the graph in place, XLA and the SavedModel at batch 1."""
    import os
    import statistics
    import tempfile
    import time

    from shared.specs import TASKS
    from tf_impl.kit import models, runtime, training

    threads = runtime.configure(threads=os.cpu_count() or 1, seed=0)["intra_op"]
    model = models.build(TASKS["digits-cnn"].model)
    x = tf.random.normal((1, 32, 32, 1))
    predicts = {"tf.function": training.make_predict(model), "XLA": compiled_predict(model)}
    with tempfile.TemporaryDirectory() as folder:
        package = export_package(model, x, f"{folder}/model")
        predicts["SavedModel"] = load_package(package, threads=threads)
        for place, (name, predict) in enumerate(predicts.items()):
            given, times = (x if place < 2 else x.numpy()), []
            for _ in range(200):
                start = time.perf_counter()
                predict(given)
                times.append(time.perf_counter() - start)
            print(f"{name:12} {1e6 * statistics.median(times):5.0f} µs")


if __name__ == "__main__":
    main()
