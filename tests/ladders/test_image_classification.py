"""Plain is what plain framework code does, and each rung has its effect on top of it."""

from __future__ import annotations

import ast
from pathlib import Path

import numpy as np
import onnx
import pytest

from bench.ladders import command
from shared import photos
from shared.specs import CNNSpec, parameter_shapes
from shared.weights import init_weights
from tests import workers
from tests.frameworks import apart

FRAMEWORKS = ("pt", "tf")
SPEC = CNNSpec((32, 32, 3), ((8, 2), (16, 2)), num_classes=6)
BATCH, SEED, DECAY = 8, 3, 0.7


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return photos.make_photos(tmp_path_factory.mktemp("photos"), images=24, size=48, seed=0)


@pytest.fixture(scope="module")
def build(kit):
    return lambda: kit.models.build(SPEC, init_weights(SPEC, seed=1))


@pytest.fixture
def training(technique, build, folder):
    """Programs with some rungs, which are closed in the end."""
    runs = []

    def begin(*rungs, **settings):
        runs.append(begun(technique, build, folder, rungs, **settings))
        return runs[-1]

    yield begin
    for run in runs:
        run.close()


def begun(technique, build, folder, rungs=(), **settings):
    usual = {"image_size": 32, "batch_size": BATCH, "seed": SEED, "average_decay": DECAY}
    return technique.Training(build, folder, rungs=rungs, **usual | settings)


@pytest.fixture(scope="module")
def batches(kit):
    """Four batches that are the same in every process."""
    random = np.random.default_rng(5)
    shape = (BATCH, 32, 32, 3)
    return kit.data.resident_batches(
        [(random.normal(size=shape).astype(np.float32), random.integers(0, 6, BATCH))
         for _ in range(4)]
    )  # fmt: skip


def weights(kit, model):
    exported = kit.models.export_weights(model)
    return {name: np.array(exported[name]) for name in parameter_shapes(SPEC)}


def steps(run, batches):
    return [float(run.step(*batch)) for batch in batches]


@pytest.fixture(scope="module")
def plain(technique, build, folder, batches):
    """Losses of the plain program: of steps, and of two epochs after them."""
    run = begun(technique, build, folder)
    losses = steps(run, batches), epochs(run)
    run.close()
    return losses


def epochs(run, count=2):
    return [float(loss) for _ in range(count) for loss in run.epoch()]


def test_the_plain_program_is_plain_framework_code(plain, impl, models, build, batches, folder):
    of_steps, of_epochs = plain
    loader = impl.input.folder.naive_loader(folder, batch_size=BATCH, seed=SEED, image_size=32)
    by_hand = models.by_hand(build(), [*batches, *(batch for _ in range(2) for batch in loader)])
    assert apart(of_steps + of_epochs, by_hand) < 1e-5
    assert len(of_epochs) == 6  # two epochs of 24 photos in batches of 8


def test_twins_agree_in_their_first_losses(plain, agrees):
    agrees("plain", {"losses": plain[0]}, 1e-5)


def test_the_pipeline_gives_the_same_batches_another_way(training, batches, plain):
    run = training("input_pipeline")
    parts = run.loader, *vars(run.loader).values()
    assert any(_module_of(part).endswith("tuned_folder") for part in parts)
    assert apart(steps(run, batches) + epochs(run), [*plain[0], *plain[1]]) < 1e-4


def _module_of(part) -> str:
    """Where a class, a function or a part of one is from."""
    part = getattr(part, "func", part)
    return getattr(part, "__module__", None) or type(part).__module__


def test_mixed_precision_computes_in_bfloat16_over_float32_weights(
    training, kit, batches, tmp_path
):
    run, (x, y) = training("mixed_precision"), batches[0]
    predict = run.deploy(tmp_path / "bf16", x)
    for called in (run.step, lambda x, y: predict(x)):
        assert set(kit.runtime.operator_dtypes(called, x, y)["convolution"]) == {"bfloat16"}
    assert {str(weight.dtype) for weight in weights(kit, run.model).values()} == {"float32"}


def test_memory_format_moves_the_channels_and_nothing_else(
    training, build, models, batches, framework, plain
):
    run = training("memory_format")
    assert apart(steps(run, batches[:1]), plain[0][:1]) < 1e-5
    assert models.is_channels_last(run.model, batches[0][0])
    # It is the default of TensorFlow.
    assert models.is_channels_last(build(), batches[0][0]) == (framework == "tf")


def test_accumulation_takes_the_batch_in_halves(training, models, build, batches, plain):
    (x, y), half = batches[0], BATCH // 2
    (whole,) = steps(training("accumulation"), batches[:1])
    halves = [models.by_hand(build(), [(x[p], y[p])]) for p in (slice(half), slice(half, None))]
    assert apart(whole, float(np.mean(halves))) < 1e-5
    assert apart(whole, plain[0][0]) > 1e-4  # BatchNorm sees halves


def test_compiled_steps_are_compiled_and_the_same(training, kit, batches, framework, plain):
    with workers.without_inductor():
        run = training("compiled")
        assert apart(steps(run, batches), plain[0]) < 1e-4
    assert kit.runtime.trace_count(run.step)
    assert framework == "pt" or run.step._jit_compile


def test_the_average_is_that_of_numpy_and_is_used(training, kit, batches):
    run, seen = training("averaged_weights"), []
    for _ in run.epoch():
        seen.append(weights(kit, run.model))
    before = {name: np.array(v) for name, v in kit.models.export_weights(run.model).items()}
    assert list(run.finish(batches[0][0])) == []
    used, after = weights(kit, run.model), kit.models.export_weights(run.model)
    for name, average in seen[0].items():
        for each in seen[1:]:
            average = DECAY * average + (1 - DECAY) * each[name]
        assert np.allclose(used[name], average, rtol=1e-5, atol=1e-6)
    assert not np.allclose(used["head.kernel"], seen[-1]["head.kernel"], atol=1e-6)
    statistics = [name for name in after if name.endswith((".mean", ".variance"))]
    assert any(not np.array_equal(before[name], np.array(after[name])) for name in statistics)


def test_pruning_leaves_a_smaller_network_that_trains_on(training, kit, batches, tmp_path):
    run, (x, _) = (
        training("averaged_weights", "pruned", pruned_epochs=2, pruned_share=0.5),
        batches[0],
    )
    epochs(run, 1)
    before = kit.models.parameter_count(run.model)
    losses = [float(loss) for loss in run.finish(x)]
    assert kit.models.parameter_count(run.model) < 0.5 * before
    assert len(losses) == 6  # two epochs
    assert np.isfinite(losses).all()
    assert run.average is not None  # what is below stays
    assert np.asarray(run.deploy(tmp_path / "pruned", x)(x)).shape == (8, 6)


def test_int8_is_what_is_deployed(training, kit, batches, tmp_path):
    (x, _), run = batches[0], training("int8")
    epochs(run, 3)
    list(run.finish(x))
    deployed, trained = run.deploy(tmp_path / "int8.onnx", x), kit.training.make_predict(run.model)
    assert 0 < apart(np.asarray(deployed(x)), np.asarray(trained(x))) < 0.2
    tensors = onnx.load(tmp_path / "int8.onnx").graph.initializer
    # Two convolutions and the head.
    assert sum(tensor.data_type == onnx.TensorProto.INT8 for tensor in tensors) >= 3


def test_a_rung_that_is_none_is_refused_with_the_names_of_those_that_are(training):
    with pytest.raises(ValueError, match=r"'faster'.*input_pipeline"):
        training("faster")


@pytest.mark.parametrize("side", ["pt", "tf"])
@pytest.mark.parametrize("name", command.LADDERS)
def test_rungs_of_a_ladder_are_those_of_its_program(side, name):
    ladder = command.find(name)
    path = Path(__file__).parents[2] / f"{side}_impl/ladders/{ladder.program}.py"
    (names,) = [
        ast.literal_eval(node.value)
        for node in ast.parse(path.read_text("utf-8")).body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "RUNGS"
    ]
    assert tuple(rung.name for rung in ladder.rungs) == names
