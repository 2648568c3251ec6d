"""Keras 3 on each backend: its own step and prediction, beside the framework's native ones."""

from __future__ import annotations

from bench.harness.helpers import kit_module, plain
from bench.harness.plan import Prepared, Price, Technique, Variant, Work, Workload
from shared.layer_search import distance
from shared.user_model import arrays

# The backend's name in the record: the top of the module that a weight's type comes from.
BACKENDS = {"pt_impl": "torch", "tf_impl": "tensorflow"}
SAME = 1e-4  # relative L2 of predictions: kernels round otherwise
_COMPILED = {"settings": {"compiled": True}, "title": "Keras 3, jit_compile=True"}

TECHNIQUE = Technique(
    family="train_step",
    name="keras_backend",
    effort="ordinary",
    title="Keras 3 on PyTorch and on TensorFlow",
    remedies=("overhead",),
    user_model="give the model as keras(): every row is measured on both backends",
    variants=(
        Variant("native", role="baseline", title="the framework without Keras", program="plain"),
        Variant("keras", title="Keras 3 as it comes"),
        # It compiles for so long that it comes with the full effort alone.
        Variant(
            "keras_compiled", frameworks=("pt",), requires="compiler", effort="full", **_COMPILED
        ),
        Variant("keras_compiled", frameworks=("tf",), price=Price(compiled=True), **_COMPILED),
    ),
    workloads=(
        Workload("digits-cnn", "compute"),
        Workload("photos-resnet18", "compute"),
        Workload("digits-cnn", "compute", mode="predict"),
        Workload("photos-resnet18", "single", mode="predict"),
    ),
    differs_by_design=(
        "By default Keras is eager on PyTorch, and a graph (tf.function) on TensorFlow; on a GPU "
        "Keras compiles that with XLA without being asked.",
        "Native is PyTorch's eager step on nn.Modules, and on TensorFlow one tf.function on a "
        "Keras model: there both rows have Keras's layers, and only its trainer is added.",
        "jit_compile=True is torch.compile of Keras's step in PyTorch, and XLA in TensorFlow.",
    ),
    notes=(
        "PyTorch / TensorFlow of the row keras is backend over backend; a row over its baseline "
        "is Keras over native.",
        "A step is train_on_batch, a prediction predict_on_batch: Keras reads the loss on the "
        "host after each step, and returns NumPy arrays.",
        "PyTorch's keras_compiled is measured only with --effort full: torch.compile makes many "
        "graphs of Keras's Python, some of them again and again, which takes long.",
        "Images are NHWC for Keras on both backends. In PyTorch they are a view of the suite's "
        "NCHW images, whose layout the first convolution changes.",
        "Keras 3 has JAX as a third backend; it is not measured.",
    ),
)


def prepare(impl, work: Work) -> Prepared:
    """The native row, or the same weights in a Keras model that Keras trains and asks."""
    if work.variant == "native":
        return plain(impl, work)
    kit = kit_module(impl, "keras_models")
    technique = impl.train_step.keras_backend
    model = kit.build(work.task.model, work.weights)
    optimizer = kit.make_optimizer(model, work.task.recipe)
    technique.compile_keras(model, optimizer, kit.cross_entropy(), **work.settings)
    step, predict = technique.make_train_step(model), technique.make_predict(model)
    return Prepared(
        lambda x, y: step(kit.images(x), y),
        lambda x: predict(kit.images(x)),
        model,
        kit.state_of(optimizer),
    )


def took_effect(impl, work: Work, prepared: Prepared, batch) -> tuple[dict, str | None]:
    """Weights are the backend's, graphs ran as the row says, and predictions are the native ones.

    The predictions are compared before the step is called, which changes the weights.
    """
    if work.variant == "native":
        return {}, None
    kit = kit_module(impl, "keras_models")
    x, y = batch
    wanted, given = (
        arrays(predict(x)) for predict in (plain(impl, work).predict, _fresh(impl, work))
    )
    evidence = {"apart": distance(given, wanted)}
    if work.mode == "predict":
        evidence |= kit.ran(prepared.model, prepared.predict, x)
    else:
        evidence |= kit.ran(prepared.model, prepared.step, x, y)
    return evidence, _fault(impl, work, evidence)


def _fresh(impl, work: Work):
    """Keras's predictions from the initial weights."""
    return prepare(impl, work).predict


def _fault(impl, work: Work, evidence: dict) -> str | None:
    """What of the evidence is not what the row says."""
    backend, graphs = BACKENDS[impl.__name__], evidence["graphs"]
    if evidence["backend"] != backend:
        return f"its weights are {evidence['backend']}'s, not {backend}'s"
    if not evidence["apart"] < SAME:
        return "its predictions are others than those of the native model"
    if "compiled" in work.settings:
        return None if evidence["compiled"] else "nothing compiled ran"
    if evidence["compiled"] or (graphs > 0) != (backend == "tensorflow"):
        return f"{graphs} graphs ran, {evidence['compiled']} of them compiled"
    return None
