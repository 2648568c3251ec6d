"""One framework's share of the distillation tests, in a process of its own.

`python distillation_worker.py pt|tf|tf_keras` runs every scenario and prints one line of JSON:
scenario -> what was found, or {"error": traceback}. `test_distillation.py` and
`test_feature_distillation.py` judge it.
"""

from __future__ import annotations

import sys
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from bench.compression import bench_distillation, bench_feature_distillation
from bench.harness.plan import Case, Work
from bench.harness.worker import Operations
from shared import datasets, teacher
from shared.specs import TASKS, CNNSpec, DatasetSpec, GPTSpec, ResNetSpec, parameter_shapes
from shared.weights import init_weights
from tests import workers
from tests.workers import raised

FRAMEWORK = "pt" if sys.argv[1:] == ["pt"] else "tf"
NAMES = ("distillation", "feature_distillation", "pruning", "structured_pruning")
impl = workers.implementation(FRAMEWORK, *(f"compression.{name}" for name in NAMES))
kit = impl.kit
logits, features = impl.compression.distillation, impl.compression.feature_distillation
pruning, structured_pruning = impl.compression.pruning, impl.compression.structured_pruning
cross_entropy = kit.training.cross_entropy

CNN = CNNSpec((8, 8, 2), ((4, 1), (6, 2)), num_classes=5)
RESNET = ResNetSpec((8, 8, 2), 1, (8, 12, 16), num_classes=5)  # the teacher of CNN
GPT = GPTSpec(vocabulary=11, sequence_length=6, width=8, heads=2, layers=1)
WIDE = replace(GPT, width=16, layers=2)  # the teacher of GPT
RECIPE = replace(TASKS["digits-cnn"].recipe, learning_rate=2.0**-5)
SETTINGS = {"temperature": 3.0, "alpha": 0.75}
# Both give 4 x 4 pixels.
LAYERS = {"pt": ("conv1", "stage1"), "tf": ("conv1.bn", "stage1.block0.relu")}[FRAMEWORK]
ACTIVATION = {"pt": "conv1", "tf": "conv1.relu"}[FRAMEWORK]  # a function without a name in PyTorch


def batches(spec, count=1, samples=8):
    """The same in every process."""
    random = np.random.default_rng(11)
    found = []
    for _ in range(count):
        if isinstance(spec, GPTSpec):
            x = random.integers(0, spec.vocabulary, (samples, spec.sequence_length))
            y = (3 * x + 1) % spec.vocabulary
        else:
            y = random.integers(0, spec.num_classes, samples)
            x = random.normal(size=(samples, *spec.input_shape)).astype(np.float32)
        found.append((x, y))
    return kit.data.resident_batches(found)


def trained_looking(spec, seed=3):
    """Weights of a teacher: opinions on every class, statistics that are not those of a batch."""
    random = np.random.default_rng(seed)
    weights = init_weights(spec, seed)
    for name, value in weights.items():
        if name.endswith(("gamma", "variance")):
            weights[name] = random.uniform(0.5, 1.5, value.shape).astype(np.float32)
        elif name.endswith(("beta", "bias", "mean")):
            weights[name] = random.normal(0.0, 0.3, value.shape).astype(np.float32)
        elif name == "head.kernel":
            weights[name] = random.normal(0.0, 1.0, value.shape).astype(np.float32)
    return weights


def build(spec, seed=1):
    return kit.models.build(spec, init_weights(spec, seed))


def guide(spec):
    return kit.models.build(spec, trained_looking(spec))


def make(student, optimizer=None, model=None):
    """The optimizer of `student`, or of the `model` that holds more than it."""
    return (
        optimizer(model or student)
        if optimizer
        else kit.training.make_optimizer(model or student, RECIPE)
    )


def with_features(student, teacher_model, x, optimizer=None, **settings):
    """The step of feature distillation, and the model that has the regressor."""
    ours, theirs = LAYERS
    taught = features.attach_regressor(
        student, teacher_model, x, student_layer=ours, teacher_layer=theirs
    )
    step = features.make_train_step(
        taught,
        teacher_model,
        make(student, optimizer, taught),
        cross_entropy,
        teacher_layer=theirs,
        **settings,
    )
    return step, taught


def run(step, stream):
    return [kit.runtime.to_float(step(*batch)) for batch in stream]


def weights(model):
    return {name: value.tolist() for name, value in kit.models.export_weights(model).items()}


def array(tensor):
    return np.array(tensor.detach() if hasattr(tensor, "detach") else tensor)


def never(*arguments):
    raise AssertionError("this must not be called")


# The loss -------------------------------------------------------------------------------------


def soft_losses():
    """Value and gradient of the soft loss in float64, and of extreme and of narrow logits."""
    random = np.random.default_rng(7)
    found = {}
    for name, shape in (("one", (5,)), ("samples", (6, 5)), ("positions", (4, 3, 5))):
        ours, theirs = (random.normal(0.0, 3.0, shape) for _ in range(2))
        found[name] = {"student": ours.tolist(), "teacher": theirs.tolist()}
        for temperature in (0.5, 1.0, 4.0):
            value, gradient = own.soft(ours, theirs, temperature)
            found[name][str(temperature)] = {"value": value, "gradient": gradient.tolist()}
    far = np.array([[400.0, 0.0, -400.0]])
    value, gradient = own.soft(far, far[:, ::-1].copy(), 1.0)
    found["extreme"] = {"value": value, "gradient": gradient.tolist()}
    found["narrow"] = own.narrow(ours, theirs)
    return found


def applied():
    """Loss and gradients of one step, which are put in the weights' place."""
    found = {}
    models = {"cnn": (CNN, RESNET), "gpt": (GPT, WIDE)}
    if sys.argv[1] == "tf_keras":
        del models["gpt"]
    for name, (spec, over) in models.items():
        (batch,), student = batches(spec), build(spec)
        step = logits.make_train_step(
            student, guide(over), make(student, own.recorder), cross_entropy, **SETTINGS
        )
        loss = kit.runtime.to_float(step(*batch))
        found[name] = {"loss": loss} | trainable(student, spec)
    return found


def trainable(model, spec):
    exported = weights(model)
    return {name: exported[name] for name in parameter_shapes(spec)}


def linear():
    """Gradients of a linear student under a linear teacher, which NumPy knows in closed form."""
    random = np.random.default_rng(5)
    x, y = random.normal(size=(7, 4)).astype(np.float32), random.integers(0, 3, 7)
    kernels = [random.normal(size=(4, 3)).astype(np.float32) for _ in range(2)]
    found = {"x": x.tolist(), "y": y.tolist(), "kernels": [k.tolist() for k in kernels]}
    for alpha in (0.0, 0.3, 1.0):
        student, over = (own.linear(kernel) for kernel in kernels)
        step = logits.make_train_step(
            student, over, own.recorder(student), cross_entropy, temperature=2.0, alpha=alpha
        )
        loss = kit.runtime.to_float(step(*kit.data.to_device(x, y)))
        found[str(alpha)] = {"loss": loss, "gradient": own.kernel(student).tolist()}
    return found


# The step -------------------------------------------------------------------------------------


def neutral():
    """alpha 0 beside the baseline; its teacher must not run."""
    stream = batches(CNN, 4)
    student = build(CNN)
    step = kit.training.make_train_step(student, make(student), cross_entropy)
    found = {"baseline": {"losses": run(step, stream), **weights(student)}}
    for name in ("taught", "stored"):
        student = build(CNN)
        if name == "taught":
            step = logits.make_train_step(
                student, own.refusing(), make(student), cross_entropy, alpha=0.0
            )
            given = stream
        else:
            step = logits.make_stored_train_step(student, make(student), cross_entropy, alpha=0.0)
            given = [(x, (y, y)) for x, y in stream]
        found[name] = {"losses": run(step, given), **weights(student)}
    return found


def stored():
    """Ten steps with the teacher and ten with its stored logits, of both frameworks."""
    stream = batches(CNN, 10)
    over = guide(RESNET)
    student = build(CNN)
    step = logits.make_train_step(student, over, make(student), cross_entropy, **SETTINGS)
    found = {"taught": {"losses": run(step, stream), **weights(student)}}
    whole = kit.data.to_device(*(np.concatenate([own.plain(b[i]) for b in stream]) for i in (0, 1)))
    opinions = logits.store_logits(over, whole[0], batch_size=27)  # the last one is smaller
    student = build(CNN)
    step = logits.make_stored_train_step(student, make(student), cross_entropy, **SETTINGS)
    given = [(x, (y, opinions[8 * i : 8 * i + 8])) for i, (x, y) in enumerate(stream)]
    found["stored"] = {"losses": run(step, given), **weights(student)}
    predicted = kit.training.make_predict(over)(whole[0])
    found["logits"] = {"ours": array(opinions).tolist(), "theirs": array(predicted).tolist()}
    # The same through the kit's loop, which cuts tuples of labels.
    student = build(CNN)
    step = logits.make_stored_train_step(student, make(student), cross_entropy, **SETTINGS)
    labels = (whole[1], opinions)
    last = kit.training.fit(step, whole[0], labels, batch_size=8, epochs=1, seed=4)
    student = build(CNN)
    step = logits.make_train_step(student, over, make(student), cross_entropy, **SETTINGS)
    wanted = kit.training.fit(step, *whole, batch_size=8, epochs=1, seed=4)
    found["fit"] = [last, wanted]
    return found


def left_alone():
    """The teacher after distillation of both kinds: weights, statistics, gradients, modes."""
    found = {}
    for name in ("logits", "features"):
        over, student, stream = guide(RESNET), build(CNN), batches(CNN, 3)
        own.mix_modes(over)
        before, modes = weights(over), own.modes(over)
        if name == "logits":
            step = logits.make_train_step(student, over, make(student), cross_entropy, **SETTINGS)
        else:
            step, _ = with_features(student, over, stream[0][0])
        run(step, stream)
        found[name] = {
            "weights": weights(over) == before,
            "modes": own.modes(over) == modes,
            "gradients": own.gradients(over),
            "student learned": weights(student) != weights(build(CNN)),
            "statistics moved": own.moved(student, "conv0.bn.mean"),
        }
    return found


def soft_alone():
    """A student that only hears the teacher; and one with the widespread mistake."""
    random = np.random.default_rng(2)
    x = random.normal(size=(64, 4)).astype(np.float32)
    x, y = kit.data.to_device(x, np.zeros(64, np.int64))
    kernel = random.normal(0.0, 2.0, (4, 3)).astype(np.float32)
    found = {}
    right = logits.soft_loss
    for name, loss, steps in (
        ("ours", right, 60),
        ("mistaken", own.mistaken, 3),
        ("half mistaken", own.half_mistaken, 3),
    ):
        over, student = own.linear(kernel), own.linear(np.zeros((4, 3), np.float32))
        logits.soft_loss = loss
        try:
            step = logits.make_train_step(
                student, over, own.descent(student, 1.0), never, temperature=2.0, alpha=1.0
            )
            losses = [kit.runtime.to_float(step(x, y)) for _ in range(steps)]
        finally:
            logits.soft_loss = right
        both = [array(kit.training.make_predict(m)(x)) for m in (student, over)]
        found[name] = {
            "losses": losses,
            "agreement": float((both[0].argmax(-1) == both[1].argmax(-1)).mean()),
            "kernel moved by": float(np.abs(own.kernel(student)).max()),
        }
    return found


def refusals():
    """What bad input raises, and that nothing was changed."""
    found = {}
    student, over = build(CNN), guide(RESNET)
    arguments = student, over, make(student), cross_entropy
    for name, settings in (
        ("temperature 0", {"temperature": 0.0}),
        ("temperature -1", {"temperature": -1.0}),
        ("temperature nan", {"temperature": float("nan")}),
        ("temperature inf", {"temperature": float("inf")}),
        ("alpha -0.1", {"alpha": -0.1}),
        ("alpha 1.1", {"alpha": 1.1}),
        ("alpha nan", {"alpha": float("nan")}),
    ):
        found[name] = raised(logits.make_train_step, *arguments, **settings)
        stored_arguments = student, *arguments[2:]
        found[f"stored {name}"] = raised(
            logits.make_stored_train_step, *stored_arguments, **settings
        )
    frozen = own.frozen()
    found["frozen"] = raised(
        logits.make_train_step, frozen, over, own.descent(build(CNN), 1.0), cross_entropy
    )
    # A teacher with other classes, and one that gives no tensor.
    (batch,) = batches(CNN)
    for name, other in (("classes", guide(replace(RESNET, num_classes=4))), ("dict", own.dict())):
        before, state = weights(student), own.state(arguments[2])
        step = logits.make_train_step(student, other, *arguments[2:])
        found[name] = raised(step, *batch)
        found[f"{name} unchanged"] = before == weights(student)
        found[f"{name} state"] = state == own.state(arguments[2])
    step = logits.make_stored_train_step(student, *arguments[2:])
    found["stored classes"] = raised(step, batch[0], (batch[1], own.zeros((8, 4))))
    found["unchanged"] = weights(student) == weights(build(CNN))
    step = logits.make_train_step(*arguments)
    found["goes on"] = raised(step, *batch)
    return found


# Features -------------------------------------------------------------------------------------


def feature_steps():
    """Gradients and losses of feature distillation, its neutral setting, and the regressor."""
    stream = batches(CNN, 5)
    x, y = stream[0]
    student = build(CNN)
    step, taught = with_features(student, guide(RESNET), x, own.recorder, weight=0.5)
    found = {"kernel": own.regressor(taught)["kernel"].tolist()}
    found["before"] = own.feature_error(taught, guide(RESNET), LAYERS[1], x)
    loss = kit.runtime.to_float(step(x, y))
    regressor = {n: v.tolist() for n, v in own.regressor(taught).items()}
    found["applied"] = {"loss": loss} | trainable(student, CNN) | regressor
    student = build(CNN)
    step = kit.training.make_train_step(student, make(student, own.recorder), cross_entropy)
    step(x, y)
    found["labels"] = trainable(student, CNN)
    # The features alone: labels that weigh nothing.
    for name, weight in (("losses", 0.5), ("neutral", 0.0)):
        student = build(CNN)
        step, _ = with_features(student, guide(RESNET), x, weight=weight)
        found[name] = {"losses": run(step, stream), **weights(student)}
    student = build(CNN)
    step = kit.training.make_train_step(student, make(student), cross_entropy)
    found["baseline"] = {"losses": run(step, stream), **weights(student)}
    return found


def features_alone():
    """Whether the features alone are learned: the error, and the weights that it reaches."""
    x, y = batches(CNN, samples=32)[0]
    student, over = build(CNN), guide(RESNET)
    taught = features.attach_regressor(
        student, over, x, student_layer=LAYERS[0], teacher_layer=LAYERS[1]
    )
    before = weights(student)
    step = features.make_train_step(
        taught, over, own.descent(taught, 0.05), own.nothing, teacher_layer=LAYERS[1]
    )
    losses = [kit.runtime.to_float(step(x, y)) for _ in range(60)]
    after = weights(student)
    return {"losses": losses, "moved": [n for n in parameter_shapes(CNN) if before[n] != after[n]]}


def composed():
    """Losses of students that pruning made, drawn to the teacher's features."""
    stream, found = batches(CNN, 5), {}
    kinds = {
        "smaller": lambda model: structured_pruning.remove_channels(model, stream[0][0], share=0.5)
    }
    kinds["masked"] = masked
    for name, kind in kinds.items():
        source = build(CNN)
        student = kind(source)
        step, taught = with_features(student, guide(RESNET), stream[0][0])
        behind = {"student_layer": ACTIVATION, "teacher_layer": LAYERS[1]}
        found[name] = {
            "losses": run(step, stream),
            "behind": raised(
                features.attach_regressor, student, guide(RESNET), stream[0][0], **behind
            ),
            "inputs": own.regressor(taught)["kernel"].shape[0],
            "source kept": weights(source) == weights(build(CNN)),
        }
    return found


def masked(model):
    """Half of all kernels are zero, without masks that would keep them so."""
    settings = {"final_sparsity": 0.5, "begin_step": 0, "end_step": 1, "frequency": 1}
    model, update = pruning.apply_pruning(model, **settings)
    update(1)
    optimizer = kit.training.make_optimizer(model, replace(RECIPE, learning_rate=0.0))
    kit.training.make_train_step(model, optimizer, cross_entropy)(*batches(CNN)[0])
    return pruning.finalize_pruning(model)


def two_outputs():
    """Losses of a student that gives a dictionary, of which the loss takes both entries."""
    student, over = own.forked(3), own.forked(6)
    x, y = kit.data.to_device(LEFT, TARGET)
    layers = {"student_layer": "hidden", "teacher_layer": "hidden"}
    taught = features.attach_regressor(student, over, x, **layers)

    def loss_fn(output, labels):
        return cross_entropy(output["classes"], labels) + (output["size"] ** 2)[0, 0]

    step = features.make_train_step(
        taught, over, own.descent(taught, 0.01), loss_fn, teacher_layer="hidden"
    )
    return [kit.runtime.to_float(step(x, y)) for _ in range(20)]


def structures():
    """Several outputs, inputs by name, and teachers that give probabilities."""
    x, y = kit.data.to_device(LEFT, TARGET)
    student, over = own.forked(3), own.forked(6)
    stored = logits.store_logits(over, x, batch_size=4)
    wanted = own.predicted(over, x)
    step = logits.make_train_step(student, over, own.descent(student, 0.1), never, alpha=1.0)
    same = own.forked(3)
    from_store = logits.make_stored_train_step(same, own.descent(same, 0.1), never, alpha=1.0)
    (first, *_), (again, *_) = (
        [kit.runtime.to_float(one(x, target)) for _ in range(2)]
        for one, target in ((step, y), (from_store, (y, stored)))
    )
    ours, theirs = own.predicted(own.forked(3), x), wanted
    found = {
        "stored": {name: array(value).tolist() for name, value in stored.items()},
        "wanted": {name: array(value).tolist() for name, value in wanted.items()},
        "losses": [first, again],
        "soft": sum(
            kit.runtime.to_float(logits.soft_loss(ours[n], theirs[n], temperature=4.0))
            for n in ours
        ),
    }
    plain, soft = own.ending(None), own.ending("softmax")
    before = weights_of(plain)
    for name, pair in {"teacher": (plain, soft), "student": (soft, plain)}.items():
        step = logits.make_train_step(*pair, own.descent(pair[0], 0.1), cross_entropy)
        found[f"probabilities of the {name}"] = raised(step, x, y)
    stored = logits.store_logits(soft, x)
    step = logits.make_stored_train_step(plain, own.descent(plain, 0.1), cross_entropy)
    found["stored probabilities"] = raised(step, x, (y, stored))
    found["unchanged"] = before == weights_of(plain)
    for name, make_one in (("one class", own.one_class), ("no axis of classes", own.flat)):
        pair = make_one(), make_one()
        step = logits.make_train_step(*pair, own.descent(pair[0], 0.1), never, alpha=1.0)
        found[name] = raised(step, x, y)
    return found | own.by_name() | classes_second(x) | named_logits(x, y)


def classes_second(x):
    """Models that give (n, classes, h, w), and labels that show it."""
    student, over = own.pixels(0), own.pixels(1)
    _, y = kit.data.to_device(LEFT, np.zeros((len(LEFT), 2, 2), np.int64))
    step = logits.make_train_step(student, over, own.descent(student, 0.1), never, alpha=1.0)
    found = {"classes elsewhere": raised(step, x, y)}
    pair = own.two_maps(0), own.two_maps(1)
    for what, labels in (("all", y), ("each", {"aux": y, "out": y})):
        step = logits.make_train_step(*pair, own.descent(pair[0], 0.1), never, alpha=1.0)
        found[f"classes elsewhere of {what}"] = raised(step, x, labels)
    last = [np.moveaxis(array(own.predicted(model, x)), 1, -1) for model in (student, over)]
    found["soft of the last axis"], _ = own.soft(*last, 4.0)
    step = logits.make_train_step(
        student, over, own.descent(student, 0.1), never, alpha=1.0, class_axis=1
    )
    return found | {"soft of the second axis": kit.runtime.to_float(step(x, y))}


def named_logits(x, y):
    """A dict with "logits" beside what is none."""
    student, over = own.forked(3, "logits"), own.forked(3, "logits")
    wanted = own.predicted(over, x)["logits"]
    stored = logits.store_logits(over, x, batch_size=4)
    step = logits.make_train_step(student, over, own.descent(student, 0.1), never, alpha=1.0)
    found = {"named logits": float(abs(array(stored) - array(wanted)).max())}
    return found | {"same named logits": kit.runtime.to_float(step(x, y))}


def weights_of(model):
    state = model.state_dict().values() if FRAMEWORK == "pt" else model.get_weights()
    return [array(value).tolist() for value in state]


def feature_refusals():
    """What bad input raises."""
    (batch,) = batches(CNN)
    student, over = build(CNN), guide(RESNET)
    ours, theirs = LAYERS
    wrong = {"pt": ("conv7", "conv0"), "tf": ("conv7", "conv0.bn")}[FRAMEWORK]
    found = {}
    before = weights(student)
    for name, layers in (
        ("unknown", (wrong[0], theirs)),
        ("unknown to the teacher", (ours, wrong[0])),
        ("other pixels", (wrong[1], theirs)),
        ("other axes", ("head", theirs)),
    ):
        found[name] = raised(
            features.attach_regressor,
            *(student, over, batch[0]),
            student_layer=layers[0],
            teacher_layer=layers[1],
        )
    for weight in (-1.0, float("nan"), float("inf")):
        found[f"weight {weight}"] = raised(with_features, student, over, batch[0], weight=weight)
    taught = features.attach_regressor(
        student, over, batch[0], student_layer=ours, teacher_layer=theirs
    )
    found["lacking"] = own.lacking(student, taught, over, batch)
    found["unchanged"] = before == weights(student)
    own.freeze(student)
    found["frozen"] = raised(with_features, student, over, batch[0])
    return found


# The benchmarks -------------------------------------------------------------------------------


SMALL = ResNetSpec((32, 32, 1), 1, (4, 6, 8), num_classes=10)
DEEP = replace(SMALL, blocks_per_stage=3)  # with the layers that the benchmark names


class SmallTeacher:
    """Lets the benchmarks load a small teacher inside."""

    def __init__(self, spec=SMALL):
        self.spec, self.weights = spec, teacher.Teacher(trained_looking(spec), 0.0)

    def __enter__(self):
        self.kept = teacher.TASK, teacher.load
        teacher.TASK, teacher.load = replace(teacher.TASK, model=self.spec), lambda: self.weights

    def __exit__(self, *error):
        teacher.TASK, teacher.load = self.kept


def benchmarks():
    """The evidence of variants, and what it says of a loss that teaches nothing."""
    found = {}
    task = TASKS["digits-student"]
    images = np.random.default_rng(3).normal(size=(6, *task.model.input_shape))
    right = logits.soft_loss
    labels = np.arange(6)

    def judge(module, name):
        (variant,) = [v for v in module.TECHNIQUE.variants if v.name == name]
        work = Work(task, name, variant.settings, 6, init_weights(task.model, 1))
        x, y = kit.data.to_device(images.astype(np.float32), labels)
        prepared = module.prepare(impl, work)
        batch = (x, prepared.targets(x, y)) if prepared.targets else (x, y)
        return module.took_effect(impl, work, prepared, batch)

    # A Keras model takes a second to trace: there the variants that differ between the frameworks.
    every = FRAMEWORK == "pt"
    with SmallTeacher(DEEP):
        for name in ("alone", "features", "neutral") if every else ("features",):
            found[f"features {name}"] = judge(bench_feature_distillation, name)
    with SmallTeacher():
        for name in ("alone", "stored", "taught", "neutral") if every else ("stored",):
            found[f"logits {name}"] = judge(bench_distillation, name)
        try:
            logits.soft_loss = own.mistaken
            found["mistaken"] = judge(bench_distillation, "stored")
            if every:
                logits.soft_loss = own.labels_again(labels)
                found["labels again"] = judge(bench_distillation, "stored")
        finally:
            logits.soft_loss = right
    return found


def harness():
    """A worker trains with stored logits as with a teacher, which it asks once for all seeds."""
    small = DatasetSpec("small-digits", "digits", train_size=96, test_size=64)
    task, store = TASKS["digits-student"], logits.store_logits
    recipe = replace(task.recipe, accuracy_batch_size=32)
    TASKS["digits-student"] = replace(task, dataset=small, recipe=recipe)
    variants = {v.name: v for v in bench_distillation.TECHNIQUE.variants}
    workload = bench_distillation.TECHNIQUE.workloads[0]
    asked, found = [], {}

    def counted(*arguments, **settings):
        asked.append(1)
        return store(*arguments, **settings)

    logits.store_logits = counted
    try:
        with tempfile.TemporaryDirectory() as folder, SmallTeacher():
            data = str(datasets.materialise(small, Path(folder)))
            for name in ("stored", "taught"):
                module, variant = bench_distillation.__name__, variants[name]
                case = Case(
                    "compression", "distillation", module, FRAMEWORK, None, variant, workload
                )
                worker = Operations()
                worker.impl, worker.kit = impl, kit
                seeds = (0, 1) if name == "stored" else (0,)
                stages = f"{folder}/stages {name}"
                asking = {"stages": stages, "prove": False}
                trained = [worker._op_train(case.message(), data, s, **asking) for s in seeds]
                found[name] = {"trained": [answer["value"] for answer in trained]}
                found[name]["asked"] = len(asked)
                worker._op_build(case.message(), data, 0)
                first = worker._op_first_call()["loss"]
                found[name]["losses"] = [first, *worker._op_next_steps()["losses"]]
    finally:
        TASKS["digits-student"], logits.store_logits = task, store
    return found


def recorded():
    """The file's teacher: some of its logits, and in PyTorch its accuracy on the test split."""
    model = kit.models.build(teacher.TASK.model, teacher.load().weights)
    predict = kit.training.make_predict(model)
    images = np.random.default_rng(8).normal(size=(20, *teacher.TASK.model.input_shape))
    x, _ = kit.data.to_device(images.astype(np.float32), np.zeros(20, np.int64))
    found = {"logits": array(predict(x)).tolist()}
    if FRAMEWORK == "pt":
        with tempfile.TemporaryDirectory() as folder:
            data = datasets.materialise(teacher.TASK.dataset, Path(folder))
            test = kit.data.to_device(*datasets.load(data, "test"))
        found["accuracy"] = kit.training.evaluate(
            predict, *test, metric=teacher.TASK.metric, batch_size=256
        )
    return found


# What differs between the frameworks ----------------------------------------------------------

random = np.random.default_rng(3)
LEFT, RIGHT = (random.normal(size=(9, 4)).astype(np.float32) for _ in range(2))
TARGET = np.array([0, 1, 2, 0, 1, 2, 0, 1, 2])


class PyTorch:
    def __init__(self):
        import torch

        self.torch = torch

    def recorder(self, model):
        """An optimizer that puts the gradient in the parameter's place."""

        class Recorder(self.torch.optim.SGD):
            def step(self):
                for group in self.param_groups:
                    for parameter in group["params"]:
                        if parameter.grad is not None:
                            parameter.data.copy_(parameter.grad)

        return Recorder(model.parameters(), lr=1.0)

    def descent(self, model, rate):
        return self.torch.optim.SGD(model.parameters(), lr=rate)

    def soft(self, ours, theirs, temperature):
        torch = self.torch
        student = torch.from_numpy(ours).requires_grad_()
        loss = logits.soft_loss(student, torch.from_numpy(theirs), temperature=temperature)
        loss.backward()
        return loss.item(), student.grad.numpy()

    def narrow(self, ours, theirs):
        pair = [self.torch.from_numpy(v).bfloat16() for v in (ours, theirs)]
        loss = logits.soft_loss(*pair, temperature=1.0)
        wide = logits.soft_loss(*(v.double() for v in pair), temperature=1.0)
        return {"dtype": str(loss.dtype), "loss": loss.item(), "wide": wide.item()}

    def mistaken(self, ours, theirs, *, temperature, class_axis):
        """Keras's KLDivergence()(log_softmax, log_softmax), in PyTorch's words."""
        return self.clipped(*(self.torch.log_softmax(v / temperature, -1) for v in (theirs, ours)))

    def half_mistaken(self, ours, theirs, *, temperature, class_axis):
        """The same with the teacher's probabilities."""
        p = self.torch.softmax(theirs / temperature, -1)
        return self.clipped(p, self.torch.log_softmax(ours / temperature, -1))

    def clipped(self, p, q):
        p, q = p.clip(1e-7, 1.0), q.clip(1e-7, 1.0)
        return (p * (p / q).log()).sum(-1).mean()

    def labels_again(self, labels):
        labels = self.torch.from_numpy(labels)
        return lambda ours, theirs, *, temperature, class_axis: cross_entropy(ours, labels)

    def nothing(self, output, labels):
        return 0.0 * output.sum()

    def linear(self, kernel):
        layer = self.torch.nn.Linear(*kernel.shape, bias=False)
        layer.weight.data.copy_(self.torch.from_numpy(kernel.T.copy()))
        return layer

    def one_class(self):
        return self.torch.nn.Linear(4, 1)

    def flat(self):
        return self.torch.nn.Sequential(self.one_class(), self.torch.nn.Flatten(0))

    def kernel(self, model):
        return model.weight.detach().numpy().T

    def regressor(self, taught):
        layer = taught.regressor
        return {
            "kernel": layer.weight.detach().numpy()[..., 0, 0].T,
            "bias": layer.bias.detach().numpy(),
        }

    def feature_error(self, taught, over, layer, x):
        """The mean squared error as written out by hand."""
        torch = self.torch
        with torch.no_grad():
            seen = []
            hook = over.get_submodule(layer).register_forward_hook(lambda *c: seen.append(c[-1]))
            over.eval()(x)
            hook.remove()
            _, ours = taught.train()(x)
            return (ours - seen[0]).square().mean().item()

    def plain(self, tensor):
        """Back to NumPy, in the layout of the data sets."""
        values = tensor.numpy()
        return values.transpose(0, 2, 3, 1) if values.ndim == 4 else values

    def refusing(self):
        class Refusing(self.torch.nn.Module):
            forward = never

        return Refusing()

    def dict(self):
        class Dictionary(self.torch.nn.Module):
            def forward(self, x):
                return {"all": x}

        return Dictionary()

    def zeros(self, shape):
        return self.torch.zeros(shape)

    def frozen(self):
        return self.torch.nn.Linear(2, 2).requires_grad_(False)

    def freeze(self, model):
        model.requires_grad_(False)

    def lacking(self, student, taught, over, batch):
        return raised(
            features.make_train_step,
            *(taught, over, make(student), cross_entropy),
            teacher_layer=LAYERS[1],
        )

    def state(self, optimizer):
        return sum(v.abs().sum().item() for s in optimizer.state.values() for v in s.values())

    def mix_modes(self, model):
        """A root in evaluation mode over a BatchNorm in training mode, and the reverse."""
        model.eval()
        model.stem.train()
        model.stage1.train()
        model.stage1.block0.conv0.bn.eval()

    def modes(self, model):
        return [module.training for module in model.modules()]

    def gradients(self, model):
        return sum(parameter.grad is not None for parameter in model.parameters())

    def moved(self, model, name):
        fresh = weights(build(CNN))
        return weights(model)[name] != fresh[name]

    def teach(self):
        """The worker's half of `twinbench teacher`, with a small teacher."""
        small = DatasetSpec("small-digits", "digits", train_size=96, test_size=64)
        name, load = teacher.TASK.name, teacher.load
        task = TASKS[name]
        recipe = replace(task.recipe, accuracy_batch_size=32, epochs=1)
        workload = replace(bench_distillation.TECHNIQUE.workloads[0], task=name)
        variant = bench_distillation.TECHNIQUE.variants[0]
        case = Case(
            "train_step",
            "baseline",
            "bench.train_step.bench_baseline",
            "pt",
            None,
            variant,
            workload,
        )
        TASKS[name] = replace(task, model=SMALL, dataset=small, recipe=recipe)
        try:
            with tempfile.TemporaryDirectory() as folder, SmallTeacher():
                data = str(datasets.materialise(small, Path(folder)))
                worker, path = Operations(), Path(folder) / "teacher.npz"
                worker.impl, worker.kit = impl, kit
                answer = worker._op_teach(
                    case.message(), data, 0, [(0.05, 1), (0.005, 1)], str(path)
                )
                written = load(path)
                x, y = kit.data.to_device(*datasets.load(Path(data), "test"))
                predict = kit.training.make_predict(kit.models.build(SMALL, written.weights))
                again = kit.training.evaluate(predict, x, y, metric="accuracy", batch_size=64)
        finally:
            TASKS[name] = task
        start = init_weights(SMALL, 0)
        return {
            "accuracy": [answer["value"], written.accuracy, again],
            "learned": [
                not np.array_equal(written.weights[n], start[n])
                for n in ("head.kernel", "stem.bn.mean")
            ],
        }

    def pixels(self, seed):
        nn = self.torch.nn
        self.torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(4, 12), nn.Unflatten(1, (3, 2, 2)))

    def two_maps(self, seed):
        class Maps(self.torch.nn.Sequential):
            def forward(self, x):
                return {"out": super().forward(x), "aux": super().forward(x)}

        return Maps(*self.pixels(seed))

    def forked(self, width, classes="classes"):
        nn = self.torch.nn

        class Forked(nn.Module):
            def __init__(self):
                super().__init__()
                torch.manual_seed(0)
                self.hidden = nn.Linear(4, width)
                self.classes, self.size = nn.Linear(width, 3), nn.Linear(width, 1)

            def forward(self, x):
                x = self.hidden(x)
                return {classes: self.classes(x), "size": self.size(x)}

        torch = self.torch
        return Forked()

    def predicted(self, model, x):
        with self.torch.no_grad():
            return model(x)

    def ending(self, activation):
        nn = self.torch.nn
        self.torch.manual_seed(1)
        return nn.Sequential(nn.Linear(4, 3), *([nn.Softmax(-1)] if activation else []))

    def by_name(self):
        """Inputs by name and logits in an output; which layers of the teacher run in a step."""
        torch, nn = self.torch, self.torch.nn

        @dataclass
        class Output:
            logits: torch.Tensor
            hidden: torch.Tensor

        class Named(nn.Module):
            def __init__(self, width):
                super().__init__()
                torch.manual_seed(width)
                self.body, self.act = nn.Linear(4, width), nn.ReLU(inplace=True)
                self.head, self.ran = nn.Linear(width, 3), 0

            def forward(self, *, left, right):
                hidden = self.body(left + right)
                x = self.act(hidden)
                self.ran += 1
                return Output(self.head(x), hidden)

        x = {"left": torch.from_numpy(LEFT), "right": torch.from_numpy(RIGHT)}
        y, found = torch.from_numpy(TARGET), {}
        student, over = Named(3), Named(6)
        step = logits.make_train_step(student, over, self.descent(student, 0.1), cross_entropy)
        found["by name"] = [step(x, y).item() for _ in range(20)]
        found["stored by name"] = list(logits.store_logits(over, x, batch_size=4).shape)
        student, over = Named(3), Named(6)
        between = {"student_layer": "body", "teacher_layer": "body"}
        taught = features.attach_regressor(student, over, x, **between)
        with torch.no_grad():
            at_first = taught.regressor(student.body(x["left"] + x["right"]))
            at_first = nn.functional.mse_loss(at_first, over.body(x["left"] + x["right"]))

        def nothing(output, y):
            return 0.0 * output.logits.sum()

        step = features.make_train_step(
            taught, over, self.descent(taught, 0.1), nothing, teacher_layer="body"
        )
        over.ran, found["feature losses"], found["ran"] = 0, [at_first.item()], []
        for _ in range(3):
            found["feature losses"].append(step(x, y).item())
            found["ran"].append(over.ran)
        return found

    def foreign(self):
        """A custom forward of two inputs, taught by another one, by logits and by features."""
        torch = self.torch
        nn = torch.nn

        class Two(nn.Module):
            def __init__(self, width):
                super().__init__()
                self.left, self.right = nn.Linear(4, width), nn.Linear(4, width)
                self.norm, self.head = nn.BatchNorm1d(width), nn.Linear(width, 3)
                torch.manual_seed(0)
                for parameter in self.parameters():
                    nn.init.normal_(parameter)

            def forward(self, a, b, offset=None):
                return self.head(torch.tanh(self.norm(self.left(a) + self.right(b))))

        x = torch.from_numpy(LEFT), torch.from_numpy(RIGHT)
        y = torch.from_numpy(TARGET)
        found = {}
        student, over = Two(3), Two(6)
        step = logits.make_train_step(student, over, self.descent(student, 0.1), cross_entropy)
        found["logits"] = [step(x, y).item() for _ in range(20)]
        found["stored"] = logits.store_logits(over, x, batch_size=4).tolist()
        named = {"offset": None, "a": x[0], "b": x[1]}
        found["stored without"] = found["stored"]
        found["stored with None"] = logits.store_logits(over, named, batch_size=4).tolist()
        with torch.no_grad():
            found["predicted"] = over.eval()(*x).tolist()
        student = Two(3)
        taught = features.attach_regressor(
            student, over, x, student_layer="norm", teacher_layer="norm"
        )
        step = features.make_train_step(
            taught, over, self.descent(taught, 0.1), cross_entropy, teacher_layer="norm"
        )
        found["features"] = [step(x, y).item() for _ in range(20)]
        found["hooks"] = sum(len(m._forward_hooks) for m in [*over.modules(), *taught.modules()])
        series = torch.ones(2, 4, 9)
        taught = features.attach_regressor(
            *(nn.Sequential(nn.Conv1d(4, 3, 1)), nn.Sequential(nn.Conv1d(4, 6, 1)), series),
            student_layer="0",
            teacher_layer="0",
        )
        found["series"] = list(taught(series)[1].shape)
        # Of as many channels each: the regressor's kernel tells which axis it takes for theirs.
        images, found["images"] = torch.ones(2, 4, 4, 5), {}

        class Sum(nn.Sequential):
            def forward(self, x):
                return x + super().forward(x)

        within = nn.Sequential(nn.Linear(5, 5), nn.Dropout())
        layers = {"rows": within, "sum": Sum(nn.LayerNorm(5)), "maps": nn.Conv2d(4, 4, 1)}
        for name, layer in layers.items():
            model = nn.Sequential(layer)
            taught = features.attach_regressor(
                *(model, model, images), student_layer="0", teacher_layer="0"
            )
            found["images"][name] = list(taught.regressor.weight.shape)
        # A teacher that changes its input in place.
        over, given = nn.Sequential(nn.ReLU(True), nn.Linear(4, 3)), (0 - x[0]).clamp(max=-1)
        student = nn.Linear(4, 3)
        logits.make_train_step(student, over, self.descent(student, 0.1), cross_entropy)(given, y)
        logits.store_logits(over, given)
        features.attach_regressor(over, over, given, student_layer="1", teacher_layer="1")
        found["changed"] = (given > -1).sum().item()
        # A layer that runs twice has no one output.
        twice = nn.Sequential(linear := nn.Linear(4, 4), nn.Tanh(), linear)
        found["twice"] = raised(
            features.attach_regressor,
            *(twice, twice, x[0]),
            student_layer="0",
            teacher_layer="1",
        )
        recurrent = nn.GRU(4, 4)
        found["a tuple"] = raised(
            features.attach_regressor,
            *(recurrent, nn.Sequential(recurrent), x[0]),
            student_layer="",
            teacher_layer="0",
        )
        return found


class TensorFlow:
    def __init__(self):
        import tensorflow as tf

        self.tf = tf

    def recorder(self, model):
        """An optimizer that puts the gradient in the variable's place."""

        class Recorder(self.tf.keras.optimizers.SGD):
            def update_step(self, gradient, variable, learning_rate=None):
                variable.assign(gradient)

        optimizer = Recorder(1.0)
        optimizer.jit_compile = False
        optimizer.build(model.trainable_variables)
        return optimizer

    def descent(self, model, rate):
        return self.tf.keras.optimizers.SGD(rate)

    def soft(self, ours, theirs, temperature):
        tf = self.tf
        student = tf.constant(ours)
        with tf.GradientTape() as tape:
            tape.watch(student)
            loss = logits.soft_loss(student, tf.constant(theirs), temperature=temperature)
        return float(loss), np.array(tape.gradient(loss, student))

    def narrow(self, ours, theirs):
        tf = self.tf
        pair = [tf.cast(v, tf.bfloat16) for v in (ours, theirs)]
        loss = logits.soft_loss(*pair, temperature=1.0)
        wide = logits.soft_loss(*(tf.cast(v, tf.float64) for v in pair), temperature=1.0)
        return {"dtype": loss.dtype.name, "loss": float(loss), "wide": float(wide)}

    def mistaken(self, ours, theirs, *, temperature, class_axis):
        """As some tutorials write it."""
        tf = self.tf
        divergence = tf.keras.losses.KLDivergence()
        return divergence(
            tf.nn.log_softmax(theirs / temperature), tf.nn.log_softmax(ours / temperature)
        )

    def half_mistaken(self, ours, theirs, *, temperature, class_axis):
        """The same with the teacher's probabilities."""
        tf = self.tf
        divergence = tf.keras.losses.KLDivergence()
        return divergence(
            tf.nn.softmax(theirs / temperature), tf.nn.log_softmax(ours / temperature)
        )

    def nothing(self, output, labels):
        return 0.0 * self.tf.reduce_sum(output)

    def linear(self, kernel):
        keras = self.tf.keras
        layer = keras.layers.Dense(kernel.shape[1], use_bias=False)
        model = keras.Sequential([keras.Input((kernel.shape[0],)), layer])
        model.set_weights([kernel])
        return model

    def one_class(self):
        return self.linear(np.ones((4, 1), np.float32))

    def flat(self):
        keras = self.tf.keras
        return keras.Sequential([self.one_class(), keras.layers.Reshape(())])

    def kernel(self, model):
        return model.get_weights()[0]

    def regressor(self, taught):
        kernel, bias = taught.get_layer("regressor").get_weights()
        return {"kernel": kernel, "bias": bias}

    def feature_error(self, taught, over, layer, x):
        """The mean squared error as written out by hand."""
        reader = self.tf.keras.Model(over.inputs, over.get_layer(layer).output)
        statistics = [np.array(v) for v in taught.non_trainable_variables]
        _, ours = taught(x, training=True)
        for variable, value in zip(taught.non_trainable_variables, statistics, strict=True):
            variable.assign(value)
        return float(np.square(np.array(ours) - np.array(reader(x, training=False))).mean())

    def plain(self, tensor):
        return np.array(tensor)

    def refusing(self):
        class Refusing(self.tf.keras.Model):
            call = never

        model = Refusing()
        model.built = True
        return model

    def dict(self):
        tf = self.tf

        class Dictionary(tf.keras.Model):
            def call(self, x, training=False):
                return {"all": x}

        model = Dictionary()
        model(tf.zeros((1, 8, 8, 2)))
        return model

    def zeros(self, shape):
        return self.tf.zeros(shape)

    def frozen(self):
        keras = self.tf.keras
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(2)])
        model.trainable = False
        return model

    def freeze(self, model):
        model.trainable = False

    def lacking(self, student, taught, over, batch):
        step = features.make_train_step(
            taught, over, make(student), cross_entropy, teacher_layer=LAYERS[1]
        )
        return raised(step, *batch)

    def state(self, optimizer):
        variables = optimizer.variables
        variables = variables() if callable(variables) else variables
        return float(sum(np.abs(np.array(v, dtype=np.float64)).sum() for v in variables))

    def mix_modes(self, model):
        """Keras has no mode that is kept; what is kept is whether a layer may be trained."""
        model.get_layer("stage1.block0.conv0").trainable = False

    def modes(self, model):
        return [layer.trainable for layer in model.layers]

    def gradients(self, model):
        return 0

    def moved(self, model, name):
        return weights(model)[name] != weights(build(CNN))[name]

    def pixels(self, seed):
        keras, layers = self.tf.keras, self.tf.keras.layers
        keras.utils.set_random_seed(seed)
        given = [keras.Input((4,)), layers.Dense(12), layers.Reshape((3, 2, 2))]
        return keras.Sequential(given)

    def two_maps(self, seed):
        x, model = self.tf.keras.Input((4,)), self.pixels(seed)
        return self.tf.keras.Model(x, {"out": model(x), "aux": model(x)})

    def forked(self, width, classes="classes"):
        keras, layers = self.tf.keras, self.tf.keras.layers
        keras.utils.set_random_seed(0)
        x = keras.Input((4,))
        hidden = layers.Dense(width, name="hidden")(x)
        return keras.Model(x, {classes: layers.Dense(3)(hidden), "size": layers.Dense(1)(hidden)})

    def predicted(self, model, x):
        return model(x, training=False)

    def ending(self, activation):
        keras = self.tf.keras
        keras.utils.set_random_seed(1)
        layers = [keras.Input((4,)), keras.layers.Dense(3)]
        return keras.Sequential(layers + [keras.layers.Activation(activation)] * bool(activation))

    def by_name(self):
        """A functional model of two inputs, fed by tuples, as `tf.data` has them, and by names."""
        keras, layers = self.tf.keras, self.tf.keras.layers

        def two(width, named):
            keras.utils.set_random_seed(width)
            left, right = keras.Input((4,), name="left"), keras.Input((4,), name="right")
            x = layers.Dense(width, name="body")(layers.Add()([left, right]))
            inputs = {"left": left, "right": right} if named else [left, right]
            return keras.Model(inputs, layers.Dense(3)(layers.ReLU()(x)))

        found, y = {}, TARGET
        for named, x in ((False, (LEFT, RIGHT)), (True, {"left": LEFT, "right": RIGHT})):
            student, over = two(3, named), two(6, named)
            step = logits.make_train_step(student, over, self.descent(student, 0.1), cross_entropy)
            found["by name" if named else "in a tuple"] = [float(step(x, y)) for _ in range(20)]
            found["stored by name"] = logits.store_logits(over, x, batch_size=4).shape.as_list()
            between = {"student_layer": "body", "teacher_layer": "body"}
            taught = features.attach_regressor(student, over, x, **between)
            step = features.make_train_step(
                taught, over, self.descent(taught, 0.1), cross_entropy, teacher_layer="body"
            )
            found["feature losses"] = [float(step(x, y)) for _ in range(3)]
        return found

    def two(self, width):
        """A functional model with a list of inputs."""
        keras, layers = self.tf.keras, self.tf.keras.layers
        keras.utils.set_random_seed(0)
        a, b = keras.Input((4,)), keras.Input((4,))
        both = layers.Add()([layers.Dense(width)(a), layers.Dense(width)(b)])
        inside = layers.BatchNormalization(name="norm")(both)
        return keras.Model([a, b], layers.Dense(3)(layers.Activation("tanh")(inside)))

    def in_fit(self):
        """A student with a loss of its own in Keras's `fit`, against the step: two batches."""
        keras, layers = self.tf.keras, self.tf.keras.layers
        x, y = kit.data.to_device(LEFT, TARGET)
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)

        class Taught(logits.DistilledTraining, keras.Model):
            pass

        def student(kind):
            keras.utils.set_random_seed(0)
            inputs = keras.Input((4,))
            hidden = layers.Dense(6, "tanh", kernel_regularizer=keras.regularizers.L2(0.1))
            return kind(inputs, layers.Dense(3)(hidden(inputs)))

        found, over = {}, student(keras.Model)
        over.set_weights([-3 * weight for weight in over.get_weights()])
        for alpha in (0.0, 0.75, 1.0):
            settings = {"temperature": 3.0, "alpha": alpha}
            plain, taught = student(keras.Model), student(Taught)
            step = logits.make_train_step(
                plain, over, self.descent(plain, 0.1), cross_entropy, **settings
            )
            losses = run(step, [(x, y)] * 2)
            taught.learn_from(over, **settings)
            taught.compile(self.descent(taught, 0.1), loss)
            history = taught.fit(x, y, batch_size=len(x), epochs=2, shuffle=False, verbose=0)
            found[str(alpha)] = {
                "losses": [losses, history.history["loss"]],
                "weights": [
                    [array(weight).tolist() for weight in model.get_weights()]
                    for model in (plain, taught)
                ],
            }
        weighted = {}
        for name, weights in (("none", 0.0), ("all", 1.0), ("first half", None)):
            taught = student(Taught)
            taught.learn_from(over, temperature=3.0, alpha=0.75)
            taught.compile(self.descent(taught, 0.1), loss)
            half = len(x) // 2
            own = np.full(len(x), 0.0 if weights is None else weights)
            own[:half] = 1.0 if weights is None else weights
            shown = taught.fit(x, y, batch_size=len(x), sample_weight=own, verbose=0)
            weighted[name] = shown.history["loss"][0] - float(sum(student(Taught).losses))
        taught = student(Taught)
        taught.learn_from(over, temperature=3.0, alpha=0.75)
        taught.compile(self.descent(taught, 0.1), loss)
        shown = taught.fit(x[:half], y[:half], batch_size=half, verbose=0)
        alone_loss = shown.history["loss"][0] - float(sum(student(Taught).losses))
        found["weighted"] = weighted | {"half alone": alone_loss * half / len(x)}
        evaluated = taught.evaluate(x, y, batch_size=len(x), verbose=0)
        wanted = float(cross_entropy(taught(x), y) + sum(taught.losses))
        alone = student(Taught)
        alone.compile("sgd", loss)
        refused = raised(alone.fit, x, y, verbose=0)
        return found | {"evaluated": [evaluated, wanted], "alone": refused}

    def seeds(self):
        """Seeds of an LSTM's dropout, which Keras 3 moves on in evaluation mode, too, after a step.

        By the kind of step: whether the teacher's stay, and the student's are those of a plain one.
        """
        keras, layers = self.tf.keras, self.tf.keras.layers
        x, y = kit.data.to_device(LEFT[:, :, None], TARGET)
        names = {"student_layer": "read", "teacher_layer": "read"}

        class Taught(logits.DistilledTraining, keras.Model):
            pass

        def network(kind=keras.Model):
            keras.utils.set_random_seed(0)
            inputs = keras.Input((4, 1))
            read = layers.LSTM(2, dropout=0.5, name="read")(inputs)
            return kind(inputs, layers.Dense(3)(read))

        def seeds(model):
            return [array(v).tolist() for v in model.variables if "seed" in v.path]

        def taught(student, over):
            step = logits.make_train_step(student, over, self.descent(student, 0.1), cross_entropy)
            step(x, y)

        def stored(student, over):
            rows = logits.store_logits(over, x, batch_size=4)
            step = logits.make_stored_train_step(student, self.descent(student, 0.1), cross_entropy)
            step(x, (y, rows))

        def fitted(student, over):
            student.learn_from(over)
            student.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
            student.fit(x, y, batch_size=len(x), verbose=0)

        def followed(student, over):
            both = features.attach_regressor(student, over, x, **names)
            optimizer = self.descent(both, 0.1)
            features.make_train_step(both, over, optimizer, cross_entropy, teacher_layer="read")(
                x, y
            )

        plain, found = network(), {}
        kit.training.make_train_step(plain, self.descent(plain, 0.1), cross_entropy)(x, y)
        for do in (taught, stored, fitted, followed):
            student, over = network(Taught), network()
            before = seeds(over)
            do(student, over)
            found[do.__name__] = [
                len(before),
                seeds(over) == before,
                seeds(student) == seeds(plain),
            ]
        return found

    def foreign(self):
        """Functional models with a list of inputs; subclassed ones with two arguments."""
        tf = self.tf
        keras, layers = tf.keras, tf.keras.layers

        class Two(keras.Model):
            def __init__(self, width):
                super().__init__()
                self.left, self.right = layers.Dense(width), layers.Dense(width)
                self.norm = layers.BatchNormalization(name="norm")
                self.top = layers.Dense(3)

            def call(self, a, b, offset=None, training=False):
                inside = self.norm(self.left(a) + self.right(b), training=training)
                return self.top(tf.tanh(inside))

        pair, y = [tf.constant(LEFT), tf.constant(RIGHT)], tf.constant(TARGET)
        found = {}
        student, over = self.two(3), self.two(6)
        step = logits.make_train_step(student, over, self.descent(student, 0.1), cross_entropy)
        found["logits"] = [float(step(pair, y)) for _ in range(20)]
        found["stored"] = np.array(logits.store_logits(over, pair, batch_size=4)).tolist()
        found["predicted"] = np.array(over(pair, training=False)).tolist()
        student = self.two(3)
        taught = features.attach_regressor(
            student, over, pair, student_layer="norm", teacher_layer="norm"
        )
        step = features.make_train_step(
            taught, over, self.descent(taught, 0.1), cross_entropy, teacher_layer="norm"
        )
        found["features"] = [float(step(pair, y)) for _ in range(20)]
        x, linear = keras.Input((4,)), layers.Dense(4, name="0")
        twice = keras.Model(x, linear(layers.Activation("tanh", name="1")(linear(x))))
        found["twice"] = raised(
            features.attach_regressor,
            *(twice, twice, pair[0]),
            student_layer="0",
            teacher_layer="1",
        )
        # Subclassed, with a tuple of arguments.
        keras.utils.set_random_seed(0)
        unbuilt, subclassed, above = Two(3), Two(3), Two(6)
        x = tuple(pair)
        for model in (subclassed, above):
            model(*x)
        named = {"offset": None, "a": x[0], "b": x[1]}
        for name, given in (("with None", named), ("without", x)):
            stored = logits.store_logits(above, given, batch_size=4)
            found[f"stored {name}"] = np.array(stored).tolist()
        step = logits.make_train_step(
            subclassed, above, self.descent(subclassed, 0.1), cross_entropy
        )
        found["subclassed"] = [float(step(x, y)) for _ in range(20)]
        before = subclassed.get_weights()
        for name, models in (("student", (subclassed, over)), ("teacher", (student, above))):
            found[f"subclassed {name}"] = raised(
                features.attach_regressor,
                *(*models, pair),
                student_layer="norm",
                teacher_layer="norm",
            )
        after = subclassed.get_weights()
        found["unchanged"] = all(map(np.array_equal, before, after))
        optimizer = self.descent(student, 0.1)
        found["unbuilt student"] = raised(
            logits.make_train_step, unbuilt, over, optimizer, cross_entropy
        )
        found["unbuilt teacher"] = raised(
            logits.make_train_step, student, unbuilt, optimizer, cross_entropy
        )
        found["unbuilt features"] = raised(
            features.attach_regressor,
            *(keras.Sequential([layers.Dense(2, name="norm")]), over, pair),
            student_layer="norm",
            teacher_layer="norm",
        )
        return found


def main() -> None:
    kit.runtime.configure(threads=1, seed=0)
    scenarios = [applied, stored, left_alone, feature_steps, composed, two_outputs, structures]
    scenarios += [own.foreign]
    if sys.argv[1] != "tf_keras":  # where the code is the same in both flavours of Keras
        scenarios += [soft_losses, linear, neutral, soft_alone, refusals]
        scenarios += [features_alone, feature_refusals, benchmarks, recorded]
    if sys.argv[1] == "pt":
        scenarios += [harness, own.teach]
    if sys.argv[1] == "tf":
        scenarios += [own.in_fit, own.seeds]
    workers.report(scenarios)


own = PyTorch() if FRAMEWORK == "pt" else TensorFlow()
if __name__ == "__main__":
    main()
