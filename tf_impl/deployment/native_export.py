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
"""

import json
from collections.abc import Callable
from pathlib import Path

import tensorflow as tf

from shared import runtimes

_KEPT = Path("assets.extra", "twinbench.json")  # where TF Serving looks for files that go along


def compiled_predict(model: tf.keras.Model) -> Callable:
    """Return `predict(x) -> output` in evaluation mode, compiled in place by XLA.

    x: a tensor or a tuple of the model's positional arguments; anything else (a list) is handed
    over as it is. The first call of each shape compiles. Source: "Use XLA with tf.function",
    tensorflow.org/xla.
    """

    @tf.function(jit_compile=True)
    def predict(x):
        return model(*x, training=False) if isinstance(x, tuple) else model(x, training=False)

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

    example_inputs: a tensor or a tuple of the model's positional arguments; anything else (a list)
    is handed over as it is. metadata: strings by name that the folder carries. dynamic_batch: axis
    0 of every input may have any size, else the example's; dynamic_sequence: axis 1 too. precision:
    "float32" (the model's own). The model is left as it is.

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
    open_axes = [0] * dynamic_batch + [1] * dynamic_sequence
    signature = []
    for place, tensor in enumerate(tf.nest.flatten(example_inputs)):
        sizes = [None if axis in open_axes else size for axis, size in enumerate(tensor.shape)]
        signature.append(tf.TensorSpec(sizes, tensor.dtype, name=f"input_{place}"))

    @tf.function(input_signature=signature, jit_compile=False)
    def predict(*parts):
        x = tf.nest.pack_sequence_as(example_inputs, parts)
        found = model(*x, training=False) if isinstance(x, tuple) else model(x, training=False)
        return {f"output_{n}": part for n, part in enumerate(tf.nest.flatten(found))}

    module = tf.Module()  # not the model, for which Keras would trace functions of its own
    module.predict, module.weights = predict, predict.get_concrete_function().variables
    tf.saved_model.save(module, str(path), signatures={"serving_default": predict})
    kept = Path(path) / _KEPT
    kept.parent.mkdir(exist_ok=True)
    kept.write_text(json.dumps(metadata or {}), encoding="utf-8")
    return Path(path)


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
        loaded = tf.saved_model.load(str(path))
        serve = loaded.signatures["serving_default"]
        metadata = json.loads((Path(path) / _KEPT).read_text("utf-8"))
    except Exception as error:  # OSError, IndexError and others, by what is damaged
        raise ValueError(f"can't load {path}: {runtimes.one_line(error)}") from error
    specs = serve.structured_input_signature[1]
    names = sorted(specs, key=lambda name: int(name.rpartition("_")[2]))
    wanted = [(name, specs[name].dtype.name, list(specs[name].shape)) for name in names]

    def predict(x):
        arrays = runtimes.fitting(x, wanted)
        outputs = loaded.predict(*(tf.constant(array) for array in arrays))
        parts = tuple(outputs[f"output_{n}"].numpy() for n in range(len(outputs)))
        return parts[0] if len(parts) == 1 else parts

    predict.metadata, predict.threads, predict.precision = metadata, found, "float32"
    predict.package = loaded  # whose variables live as long as it does
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


def export_torchscript(
    model: tf.keras.Model,
    example_inputs,
    path,
    metadata: dict | None = None,
    *,
    dynamic_batch: bool = True,
    dynamic_sequence: bool = False,
) -> Path:
    """Refuse: raises NotImplementedError."""
    raise NotImplementedError("TorchScript is PyTorch's: TensorFlow writes SavedModels")


def load_torchscript(path, *, threads: int) -> Callable:
    """Refuse: raises NotImplementedError."""
    raise NotImplementedError("TorchScript is PyTorch's: TensorFlow loads SavedModels")


def tensorrt_predict(model: tf.keras.Model) -> Callable:
    """Refuse: raises NotImplementedError."""
    raise NotImplementedError(
        "TF-TRT is gone: TensorFlow is built without TensorRT since 2.18. Use export_onnx and "
        "load_tensorrt of shared/runtimes.py"
    )


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
            given, taken = (x if place < 2 else x.numpy()), []
            for _ in range(200):
                start = time.perf_counter()
                predict(given)
                taken.append(time.perf_counter() - start)
            print(f"{name:12} {1e6 * statistics.median(taken):5.0f} µs")


if __name__ == "__main__":
    main()
