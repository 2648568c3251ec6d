"""Native export: the model as a file for TensorFlow's runtime, and compiled in place.

    path = export_package(model, example_inputs, "model")  # a folder
    predict = load_package(path, threads=1)  # arrays in and out, any number of samples

What it changes: what runs between the model and its kernels. In place, XLA makes one program of the
model. A SavedModel is the traced graph with its weights in a folder. TensorFlow, TF Serving or
TensorFlow.js run it without the model's source. Results differ by rounding.

Its twin: `pt_impl/deployment/native_export.py`, which says where the frameworks differ.

When it helps and when it hurts: if the framework need not be installed, use `deployment/export.py`.
- A SavedModel is for serving with TensorFlow: it fixes the model, and needs no Python source.
- It is as fast as its graph, and starts as slowly as TensorFlow.
- XLA helps on a GPU and with many small operators in sequence. On a CPU its convolutions are slower
  than oneDNN's.

Run it alone: `python -m tf_impl.deployment.native_export` compares `tf.function` with the others.

Copy with it: `shared/runtimes.py`, `tf_impl/kit/checks/native_export.py`,
`tf_impl/kit/signatures.py`.
"""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import tensorflow as tf

from shared import runtimes
from tf_impl.kit.checks.native_export import check_compiled, check_native_export
from tf_impl.kit.signatures import Signature, call, tables

MOST_APART = 1e-3  # the most that a folder's outputs may be from the model's, in relative L2
_ABOUT = Path("assets.extra", "twinbench.json")  # where TF Serving looks for files that go along


def compiled_predict(model: tf.keras.Model) -> Callable:
    """Return `predict(x) -> output` in evaluation mode, compiled in place by XLA.

    x: what the model is called with, as in `export_package`. The first call of each shape compiles.
    NotImplementedError is for a layer that looks up or hashes words. Source: "Use XLA with
    tf.function", tensorflow.org/xla.
    """
    check_compiled(model)

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
    check_native_export(model, path, precision)
    sizes = {"dynamic_batch": dynamic_batch, "dynamic_sequence": dynamic_sequence}
    signature = Signature(model, example_inputs, **sizes)
    module = tf.Module()  # not the model, for which Keras would trace its own functions
    module.predict = signature.trace(inlined=False)
    module.weights = module.predict.get_concrete_function().variables
    module.tables = tables(model)  # such as those of `StringLookup`
    names = {"inputs": signature.inputs, "outputs": signature.outputs}
    with runtimes.draft(path) as draft:
        with runtimes.translating("TensorFlow's saving"):  # what a model holds that no file can
            saved = {"serving_default": module.predict}
            tf.saved_model.save(module, str(draft), signatures=saved)
        (draft / _ABOUT).parent.mkdir(exist_ok=True)
        (draft / _ABOUT).write_text(json.dumps({"metadata": metadata or {}} | names), "utf-8")
        runtimes.check_file(_read, draft, signature.samples, bound=MOST_APART)
        if Path(path).is_dir():  # another SavedModel
            shutil.rmtree(path)
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
        return _read(Path(path), threads=found)
    except Exception as error:  # OSError, IndexError and others, by what is damaged
        raise ValueError(f"can't load {path}: {runtimes.one_line(error)}") from error


def _read(path: Path, *, threads: int) -> Callable:
    """A folder's function from arrays to arrays, which are checked before."""
    loaded = tf.saved_model.load(str(path))
    about = json.loads((path / _ABOUT).read_text("utf-8"))
    _, specs = loaded.signatures["serving_default"].structured_input_signature
    wanted = [
        (name, specs[key].dtype.name, list(specs[key].shape))
        for name, key in zip(about["inputs"], sorted(specs), strict=True)
    ]

    def run(arrays):
        outputs = loaded.predict(*(tf.constant(array) for array in arrays))
        return [outputs[key].numpy() for key in sorted(outputs)]

    predict = runtimes.predictor(wanted, about["outputs"], run)
    predict.package = loaded  # whose variables live as long as it does
    predict.metadata, predict.threads, predict.precision = about["metadata"], threads, "float32"
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
    from tempfile import TemporaryDirectory

    from tf_impl.kit.demo import Demo
    from tf_impl.kit.training import make_predict

    demo = Demo(batch_size=1)
    model, x = demo.build()[0], demo.batches[0][0]
    threads = tf.config.threading.get_intra_op_parallelism_threads()
    graph, compiled = make_predict(model), compiled_predict(model)
    with TemporaryDirectory() as folder:
        saved = load_package(export_package(model, x, Path(folder, "model")), threads=threads)
        calls = {
            "tf.function": lambda x, y: graph(x),
            "XLA": lambda x, y: compiled(x),
            "SavedModel": lambda x, y: saved(x.numpy()),
        }
        for name, milliseconds in demo.times(calls).items():
            print(f"{name:12}{1e3 * milliseconds:6.0f} µs")


if __name__ == "__main__":
    main()
