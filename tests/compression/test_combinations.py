"""Zeros stay zero while what is left trains on, with rounding too, and reach the file."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from bench.compression import bench_combinations as bench
from bench.compression.bench_sparse_inference import pruned
from bench.harness.plan import Work
from bench.harness.stages import Stages
from shared.specs import TASKS, CNNSpec
from shared.weights import init_weights
from tests import workers
from tests.compression import quick, teaching

FRAMEWORKS = ("pt", "tf", "tf_keras")  # with tf_keras the benchmark's rows train
CNN = CNNSpec((8, 8, 2), ((8, 1), (12, 2)), num_classes=10)
KERNELS = ("conv0.kernel", "conv1.kernel", "head.kernel")
TASK = TASKS["digits-cnn"]
SHARE = 0.75


def start(share=SHARE):
    """Initial weights, of whose kernels the smallest are zero."""
    weights = init_weights(CNN, seed=1)
    return {name: pruned(name, value, share) for name, value in weights.items()}


def step_of(kit, model, make, **recipe):
    optimizer = kit.training.make_optimizer(model, replace(TASK.recipe, **recipe))
    return make(model, optimizer, kit.training.cross_entropy)


@pytest.fixture(scope="module")
def stream(kit):
    return teaching.batches(kit, CNN, 10, samples=16, signal=1 / 3)


# The step ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "recipe",
    [
        {"optimizer": "sgd"},
        {"optimizer": "adamw", "learning_rate": 1e-3, "weight_decay": 0.1},
        {"optimizer": "rmsprop", "learning_rate": 1e-3},
    ],
    ids=lambda recipe: recipe["optimizer"],
)
def test_zeros_of_kernels_stay_and_all_else_trains(kit, technique, stream, agrees, recipe):
    """Twins lose alike."""
    model = kit.models.build(CNN, start())
    step = step_of(kit, model, technique.make_sparse_train_step, **recipe)
    losses = teaching.losses_of(kit, step, stream)
    before, after = start(), teaching.weights_of(kit, model)
    for name in KERNELS:
        zero = before[name] == 0
        assert np.mean(zero) == pytest.approx(SHARE, abs=0.01)
        assert np.array_equal(after[name] == 0, zero), name
        assert np.mean(after[name][~zero] != before[name][~zero]) > 0.9
    assert np.any(after["conv0.bn.beta"])  # it starts at zero, and is no kernel
    if recipe["optimizer"] == "sgd":
        assert losses[-1] < losses[0]
        agrees("ten steps", {"losses": losses}, 1e-5)


def test_what_is_not_zero_moves_as_in_a_plain_step(kit, technique, stream):
    changes = []
    for make in (technique.make_sparse_train_step, kit.training.make_train_step):
        model = kit.models.build(CNN, start())
        step_of(kit, model, make, momentum=0.0)(*stream[0])
        after = teaching.weights_of(kit, model)
        changes.append({name: after[name] - start()[name] for name in KERNELS})
    for name in KERNELS:
        ours, plain = (change[name] for change in changes)
        moved = ours != 0
        assert np.allclose(ours[moved], plain[moved], rtol=1e-4, atol=1e-7)
        assert np.mean(plain != 0) > np.mean(moved) + 0.5  # which wakes the zeros


def test_what_the_loss_does_not_read_stays_as_it_is(kit, technique, models, agrees):
    """Of two heads the loss reads one."""
    random = np.random.default_rng(5)
    x, y = random.normal(size=(8, 6)).astype(np.float32), random.integers(0, 3, 8)
    before = random.normal(size=(2, 6, 3)).astype(np.float32)
    before = [pruned("head.kernel", kernel, 0.5) for kernel in before]
    model = models.Heads(before)
    optimizer = kit.training.make_optimizer(model, replace(TASK.recipe, optimizer="sgd"))

    def loss_fn(outputs, labels):
        return kit.training.cross_entropy(outputs["used"], labels)

    technique.make_sparse_train_step(model, optimizer, loss_fn)(*kit.data.to_device(x, y))
    used, unused = models.kernels(model)
    assert np.array_equal(unused, before[1])
    assert np.array_equal(used == 0, before[0] == 0)
    assert np.all((used != before[0])[before[0] != 0])
    agrees("two heads", {"used": used}, 1e-5)


def test_a_model_without_zeros_is_refused(kit, technique):
    dense = kit.models.build(CNN, start(share=0.0))
    with pytest.raises(ValueError, match="no kernel of the model has a zero to keep: prune it"):
        step_of(kit, dense, technique.make_sparse_train_step)


# Files -------------------------------------------------------------------------------------------


def test_zeros_reach_the_file_through_training_with_rounding(
    kit, technique, models, stream, tmp_path
):
    """A plain step would lose them."""
    x = stream[0][0]
    model = kit.models.build(CNN, start())

    def zeros(path):
        return list(models.file_zeros.kernel_zeros(path).values())

    whole = models.int8_files.keep_float32(model, x, tmp_path / "float")
    assert zeros(whole) == pytest.approx([SHARE] * 3, abs=0.01)
    qat = models.quantization_aware_training
    for name, make in (
        ("sparse", technique.make_sparse_train_step),
        ("plain", kit.training.make_train_step),
    ):
        prepared = qat.prepare_qat(model, x, weight_bits=8)
        teaching.losses_of(kit, step_of(kit, prepared, make), stream)
        models.int8_files.save_as_it_is(qat.convert_qat(prepared, x), tmp_path / name)
    assert min(zeros(tmp_path / "sparse")) >= SHARE - 0.01
    assert max(zeros(tmp_path / "plain")) < SHARE / 2
    assert (tmp_path / "sparse").stat().st_size < whole.stat().st_size


def test_files_that_cannot_be_read_are_refused(models, framework, tmp_path):
    read = models.file_zeros.kernel_zeros
    with pytest.raises(FileNotFoundError):
        read(tmp_path / "missing")
    (tmp_path / "text").write_text("not a model\n" * 100)
    with pytest.raises(ValueError, match="text is not a complete "):
        read(tmp_path / "text")
    if framework == "tf":
        (tmp_path / "inverse").write_bytes(models.unknown_operator())
        message = "inverse is not a complete LiteRT file: Encountered unresolved custom op"
        with pytest.raises(ValueError, match=message):
            read(tmp_path / "inverse")


# The benchmark -----------------------------------------------------------------------------------

# Each row trains for 4, 4 and 2 epochs, in this order, less what a row before it has.
STAGES = {
    "0_fp32": [4, 4, 2],
    "2_pruned_int8": [4, 2],  # after the first 4 of 0_fp32
    "2_distilled_int8": [4, 4, 2],
    "1_pruned": [2],
    "1_distilled": [],
}


@pytest.fixture(scope="module")
def rows(impl, kit, models, framework, tmp_path_factory):
    """What each row did: its epochs and targets, its file, and what proves its effect.

    All rows in PyTorch and in campaigns, else one stack and its baseline.
    """
    folder, random, rows = tmp_path_factory.mktemp("rows"), np.random.default_rng(3), {}
    every = framework == "pt" or workers.campaign()
    arrays = random.normal(size=(120, 32, 32, 1)).astype(np.float32), random.integers(0, 10, 120)
    for name, array in zip("xy", arrays, strict=True):
        np.save(folder / f"train_{name}.npy", array)
    x, y = kit.data.to_device(*arrays)
    weights = init_weights(TASK.model, seed=0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bench, "SCHEDULE", {"begin_step": 0, "end_step": 4, "frequency": 1})
        for variant in bench.TECHNIQUE.variants:
            if not every and variant.name not in ("0_fp32", "2_pruned_int8"):
                continue
            work = Work(
                TASK,
                variant.name,
                variant.settings,
                32,
                weights,
                mode="predict",
                data=str(folder),
                folder=tmp_path_factory.mktemp("row"),
            )
            row = rows[variant.name] = SimpleNamespace(work=work, epochs=[], path=None)
            prepared = bench.prepare(impl, work)
            labels = prepared.targets(x, y) if prepared.targets else y

            def fit(step, more, labels=labels, row=row):
                row.epochs.append(more)
                kit.training.fit(step, x, labels, batch_size=20, epochs=1, seed=0)

            row.targets = [tuple(t.shape) for t in labels] if prepared.targets else None
            prepared.train(Stages(impl, TASK, weights, 0, folder / "stages", fit))
            if not variant.name.startswith("1_"):  # the beginning of another row
                row.path = work.folder / "model"
                prepared.write(row.path)
            if variant.name in ("0_fp32", "2_pruned_int8"):
                with quick.without_code():
                    predict = prepared.read(row.path)
                deployed = replace(prepared, predict=predict, artifact=row.path)
                row.judge = lambda settings, work=work, deployed=deployed: bench.took_effect(
                    impl, replace(work, settings=settings), deployed, (x[:32], y[:32])
                )
    return rows


ROWS = pytest.mark.only("pt", "tf_keras")


@ROWS
def test_rows_train_no_stage_twice_and_distilled_ones_learn_from_the_teacher(rows, framework):
    assert rows.keys() == STAGES.keys() or framework == "tf"
    for name, row in rows.items():
        assert row.epochs == STAGES[name], name
        assert row.targets == ([(120,), (120, 10)] if "distilled" in name else None), name


@ROWS
def test_rows_stack_zeros_and_integers(models, rows):
    whole = rows["0_fp32"].path.stat().st_size
    for name, row in rows.items():
        if row.path:
            zeros = models.file_zeros.kernel_zeros(row.path).values()
            many = sum(share > 0.81 for share in zeros)  # the first and the head are small
            assert many == 3 if "pruned" in name else max(zeros) < 0.2, name
            assert (row.path.stat().st_size < 0.5 * whole) == ("int8" in name), name


@ROWS
def test_the_benchmark_proves_zeros_and_integers(rows):
    plain, stacked = rows["0_fp32"], rows["2_pruned_int8"]
    evidence, reason = plain.judge(plain.work.settings)
    assert (reason, evidence["operators"]) == (None, {})
    assert plain.judge(bench.PRUNED)[1] == "zeros_in_file: 0 kernels have 82%"
    assert plain.judge(bench.ROUNDED)[1] == "0 products ran on integers"
    evidence, reason = stacked.judge(stacked.work.settings)
    assert reason is None
    assert sum(evidence["operators"].values()) == 5
    assert sum(zeros > 0.81 for zeros in evidence["zeros_after_steps"].values()) == 3
