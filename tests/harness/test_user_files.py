"""A user's file in a worker: what is wrong is one line that says what to do."""

import os
import re
from types import SimpleNamespace

import numpy as np
import pytest

from bench import user_task
from bench.harness import user_model
from bench.harness.processes import TIMED_OUT, Failed
from bench.harness.worker import Operations
from shared import user_model as files
from shared.user_model import BadFile, NoFigure
from tests import workers
from tests.harness.user_files import BAD, BAD_TF, EXPORTED, HEAD

SAID = {
    "raises": "in {maker} RuntimeError: no weights",
    "one_thing": "{maker}() has to return (model, loss_fn)",
    "no_model": "{maker}() returns a int as its model",
    "loss_class": "returns the class ",
    "loss_takes_other": "the batch does not fit loss_fn(output, y): ",
    "loss_not_scalar": "loss_fn gives no scalar but of shape (8,): return the mean over the batch",
    "loss_nan": "the loss of the first batch is nan: look at the data and the model",
    "loss_detached": "the loss depends on no parameter",
    "wrong_width": "the batch does not fit model: RuntimeError",
    "float64": "x is float64: give float32",
    "wrong_size": "its first axis must have the 8 samples of the batch",
    "other_numbers": "returns different numbers each time: draw them from np.random.default_rng",
    "no_size": "batch has size=None: its first argument is the batch size",
    "random": "the model draws random numbers in evaluation mode",
    "too_large": "a step at batch 8 does not fit into memory",
    "closure": "(its step needs a closure): give one that takes the gradients",
    "bfloat16": "a batch has dtype torch.bfloat16, which NumPy lacks: use float32",
    "late_weights": "2 weights of the model appear only in training",
    "diverges": "choose a smaller learning rate",
    "targets_first": "loss_fn takes y_true first, but is called as loss_fn(output, y)",
    "all_targets": "every output against every target: the output has shape (8, 1), y has (8,)",
    "frozen": "the model has no parameter that is trained",
    "other_s_optimizer": "the optimizer has no parameter of the model",
    "command_line": "in pytorch IndexError",
    "ends": "in pytorch SystemExit: 2 (it ends the program: arguments, which it has none of here",
    "evaluate_fails": "in evaluate IndexError",
    "same_numbers": "batch returns the same numbers for every seed",
    "fraction": "margin = 0.01 if this is a fraction",
}
OTHERS = ("diverges", "evaluate_fails", "fraction", "same_numbers")
MAKERS = {"pt": "pytorch", "tf": "tensorflow"}


@pytest.fixture(scope="module")
def checked():
    return workers.run("harness.user_files", ("pt", "tf"))


@pytest.mark.parametrize(
    ("side", "name"), [*(("pt", n) for n in (*BAD, *OTHERS)), *(("tf", n) for n in BAD_TF)]
)
def test_a_bad_file_is_one_line_and_leaves_nothing(checked, side, name):
    found = checked[side][name]
    assert SAID[name].format(maker=MAKERS[side]) in found["bad"]
    assert "\n" not in found["bad"]
    assert found["written"] == []


def test_the_line_of_the_file_at_which_a_batch_does_not_fit_is_said(checked):
    said = checked["pt"]["loss_takes_other"]["bad"]
    assert re.search(r"\.py:\d+: the batch does not fit loss_fn\(output, y\): ", said), said


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("not_transposed", "in copy_weights ValueError"),
        ("leaves_one_out", "it misses a weight or transposes one wrongly"),
        ("other_outputs", "outputs have different shapes: (8, 3) in PyTorch, (8, 8) in TensorFlow"),
    ],
)
def test_weights_that_are_not_copied_are_one_line(checked, name, said):
    found = checked["pt"]["pairs"]
    assert found["copies"] is None
    assert found["shuffled"] is None
    assert said in found[name]
    assert "\n" not in found[name]


def test_a_step_that_takes_the_memory_of_others_is_ended(tmp_path, monkeypatch):
    path = tmp_path / "large.py"
    large = "nn.Sequential(nn.Linear(6, 8), nn.Flatten(0), nn.Linear(64, 2**24), nn.ReLU())"
    path.write_text(f"""{HEAD}
def pytorch():
    from torch import nn
    return {large}, lambda output, y: output.square().mean()
""")
    monkeypatch.setattr(user_task.machine, "free_memory", lambda: 2**30)  # of 4 for the weights
    with pytest.raises(BadFile, match=r"large\.py: .* more than the 1\.0 GB of free memory"):
        user_task.prepare(str(path), tmp_path / "results", {}, set(), lambda said: None)
    assert list((tmp_path / "results" / "data").iterdir()) == []


def test_twins_are_given_the_same_of_batches_that_are_shuffled(checked):
    assert checked["tf"]["batches"]["twin"]


@pytest.mark.parametrize("side", ["pt", "tf"])
def test_a_file_s_own_threads_are_not_measured(checked, side):
    assert checked[side]["threads"]["threads"] == 1  # as they were asked for


@pytest.mark.parametrize("side", ["pt", "tf"])
def test_a_sound_file_is_known(checked, side):
    found = checked[side]["plain"]
    assert found["batch_size"] == 8
    count = sum(a * (b[0] if b else 1) for _, (a, *b) in found["parameters"])
    assert count == 6 * 8 + 8 + 8 * 3 + 3
    assert found["scatter"] < 1e-5
    assert found["step_s"] > 0
    assert not found["has_optimizer"]
    assert found["shapes"] == [[8, 6], [8]]


@pytest.mark.parametrize(("side", "name"), [("pt", "training_step"), ("tf", "train_step")])
def test_a_step_that_a_model_brings_is_known(checked, side, name):
    assert checked[side]["own_step"]["own_step"] == name
    assert checked[side]["plain"]["own_step"] is None


@pytest.mark.parametrize("side", ["pt", "tf"])
@pytest.mark.parametrize("name", ["dropout", "seeded"])
def test_dropout_scatters_the_losses_and_is_no_fault(checked, side, name):
    assert checked[side][name]["scatter"] > 0.01


@pytest.mark.parametrize("side", ["pt", "tf"])
def test_inputs_and_outputs_may_be_structures(checked, side):
    assert checked[side]["dict_inputs"]["shapes"] == [[8, 6], [8, 4], [8]]
    assert checked[side]["dict_inputs"]["has_optimizer"]
    assert checked[side]["two_outputs"]["batch_size"] == 8


def test_outputs_with_logits_are_known(checked):
    assert checked["pt"]["logits"]["has_logits"]
    assert not checked["pt"]["plain"]["has_logits"]


@pytest.mark.parametrize(
    ("side", "name"),
    [("pt", name) for name in EXPORTED] + [("tf", name) for name in EXPORTED[:-1]],
)
def test_a_file_of_structures_is_exported_and_does_the_same_work(checked, side, name):
    found = checked[side][name]["rows"]
    assert found["not_applied"] is None
    assert found["checked"] == 80  # the samples of all prepared batches
    exported, in_place = found["losses"]
    assert exported == pytest.approx(in_place, rel=1e-5)
    assert in_place > 0


@pytest.mark.parametrize("side", ["pt", "tf"])
def test_a_trial_of_a_larger_batch_has_its_samples(checked, side):
    found = checked[side]["dict_inputs"]["rows"]
    assert found["of_20"] == [[20, 6], [20, 4], [20]]
    assert found["loss_of_20"] > 0
    assert found["most"] == [80, 8]  # the file's own batch is never too large
    repeated = checked[side]["batches"]["rows"]  # which the file can't draw
    assert repeated["of_20"] == [[20, 6], [20]]
    assert repeated["loss_of_20"] > 0


def test_pt_what_a_file_brings_itself_is_no_fault_of_a_row(checked):
    """It is in float64, in channels_last, and its optimizer is fused."""
    assert checked["pt"]["as_it_is"]["untouched"] == [None, None, None]


@pytest.mark.parametrize("side", ["pt", "tf"])
def test_a_batch_of_too_few_samples_is_not_accumulated(checked, side):
    said = checked[side]["plain"]["rows"]["too_few"]
    assert said == "NotImplementedError: a batch of 2 can't be cut into 4 parts"


@pytest.mark.parametrize("side", ["pt", "tf"])
def test_the_file_s_own_batches_are_taken(checked, side):
    assert checked[side]["batches"]["batch_size"] == 16
    assert checked[side]["batches"]["shapes"] == [[16, 6], [16]]


@pytest.mark.parametrize(("at_fault", "without_a_figure"), [("evaluate", True), ("model", False)])
def test_whose_fault_it_is_that_there_is_no_figure(at_fault, without_a_figure):
    def predict(x):
        if at_fault == "model":
            raise RuntimeError("of another shape")
        return x

    def evaluate(predict):
        predict(np.zeros((2, 3), np.float32))
        raise KeyError("labels")

    module = SimpleNamespace(evaluate=evaluate, __file__="mine.py")
    kit = SimpleNamespace(to_device=lambda x, y: (x, y))
    with pytest.raises(BadFile, match="in evaluate") as raised:
        user_model._evaluated(module, kit, predict, "pt")
    assert isinstance(raised.value, NoFigure) is without_a_figure


@pytest.mark.parametrize("found", [None, (0.9, 0.1), "90%"])
def test_what_is_no_figure_is_said(found):
    module = SimpleNamespace(evaluate=lambda predict: found, __file__="mine.py")
    said = f"evaluate returns a {type(found).__name__}: return a number"
    with pytest.raises(BadFile, match=said):
        user_model._evaluated(module, None, None, "pt")


@pytest.mark.parametrize(("value", "said"), [(-0.3, "which is no percent"), (0.3, "a fraction")])
def test_a_figure_that_is_no_percent_has_a_margin_of_its_own(value, said):
    with pytest.raises(BadFile, match=f"{said}.* margin = "):
        user_model._check_margin(SimpleNamespace(), value)
    user_model._check_margin(SimpleNamespace(margin=0.01), value)
    user_model._check_margin(SimpleNamespace(), 30.0)


@pytest.mark.parametrize(("size", "said"), [(1, 12.5), (8, None)])
def test_a_loss_of_the_whole_batch_alone_fails_no_prediction_of_one_sample(size, said):
    def loss(output, y):
        raise ValueError("8 labels are needed")

    bench = Operations()
    bench.work, bench.impl = SimpleNamespace(mode="predict", batch_size=size), SimpleNamespace()
    bench.impl.about = {"batch_size": 8}
    data = SimpleNamespace(to_device=lambda x, y: (x, y))
    bench.kit = SimpleNamespace(training=SimpleNamespace(prediction_loss=loss), data=data)
    output = np.array([[3.0, 4.0]], np.float32)
    if said:
        assert bench._loss(output, np.zeros(8)) == said
    else:
        with pytest.raises(ValueError, match="8 labels"):
            bench._loss(output, np.zeros(8))


@pytest.mark.parametrize("draws", ["fewer", "none"])
def test_a_batch_of_more_samples_than_the_file_has_is_filled(tmp_path, draws):
    x, y = np.arange(24.0).reshape(8, 3), np.arange(8)

    def batch(size, seed):
        if draws == "none" and size > 8:
            raise ValueError("cannot take a larger sample than population")
        return x[:size], y[:size]

    files.save_batches(tmp_path, [(x, y)] * files.BATCHES)
    module = SimpleNamespace(batch=batch, __file__="mine.py")
    side = SimpleNamespace(module=module, name="pt", folder=tmp_path, about={"batch_size": 8})
    for size in (4, 20, 100):
        drawn = user_model.Side.of_size(side, size)
        assert [len(part) for part in drawn] == [size, size]
        assert (drawn[0][-1] == x[(size - 1) % 8]).all()


def test_batches_in_a_fixed_order_are_another_training_for_each_seed():
    module, about = SimpleNamespace(batches=None), {"train_steps": 4}
    side = SimpleNamespace(module=module, stream=[0, 1, 2], about=about)
    assert list(user_model.Side.drawn(side, 0)) == [0, 1, 2, 0]
    assert list(user_model.Side.drawn(side, 2)) == [2, 0, 1, 2]


def test_slow_steps_end_a_run_of_the_check(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(user_model.time, "perf_counter", lambda: now[0])

    def losses(step_s):
        def step(x):
            now[0] += step_s
            return x

        return user_model._losses(step, [(float(place),) for place in range(10)], float)

    assert losses(1.0) == ([float(place) for place in range(10)], 1.0)
    assert losses(6.0) == ([0.0, 1.0, 2.0, 3.0, 4.0], 6.0)
    assert losses(60.0) == ([0.0, 1.0, 2.0], 60.0)


def test_a_check_that_takes_too_long_says_what_to_do(monkeypatch, tmp_path):
    def ask(timeout, op, **given):
        raise Failed(TIMED_OUT.format(op, timeout))

    worker = SimpleNamespace(ask=ask, peer=SimpleNamespace(pid=os.getpid()), stop=lambda kill: 0)
    limits = SimpleNamespace(request=300)
    processes = SimpleNamespace(execute=lambda key, name: worker, limits=limits, logs=tmp_path)
    monkeypatch.setattr(user_task, "configure", lambda *given, **more: None)
    file = SimpleNamespace(path=tmp_path / "slow.py")
    with pytest.raises(BadFile, match=r"slow\.py: timeout: .* give batch a smaller default size"):
        user_task._ask(processes, file, "pt", "check", tmp_path)


def test_a_figure_of_the_file_s_own_is_taken(checked):
    assert checked["pt"]["evaluates"]["evaluates"]
    assert checked["pt"]["evaluates"]["margin"] == 0.5
    assert not checked["pt"]["plain"]["evaluates"]
