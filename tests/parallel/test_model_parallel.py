"""Layer split and pipelines: equal work, stages that are really apart.

PyTorch's stages are processes, forks of that of its tests; TensorFlow's are four devices of one.
"""

from __future__ import annotations

import functools
import multiprocessing
import os
import time
from types import SimpleNamespace

import numpy as np
import pytest

from bench.harness.machine import usable_threads
from bench.probes import model_parallel
from bench.probes.model_parallel import Alone, Glance
from shared import parallel
from shared.datasets import first_batches
from shared.specs import TASKS
from tests.parallel.splitting import (
    BATCH,
    SEED,
    assert_biases_do_not_decay,
    assert_local,
    assert_refused,
    assert_work_of_one_process,
    dataset,
    sizes,
)

FRAMEWORKS = ("pt", "tf")
PT, TF = pytest.mark.only("pt"), pytest.mark.only("tf")
LAYER_SPLIT, PIPELINE = "model_parallel:layer_split", "model_parallel:pipeline"
ONE_F_ONE_B = {"cut": "block1.ln0", "micro_batches": 4, "schedule": "1f1b"}
RUNS = {  # run -> what makes the step, model, (replicas, stages), settings
    "split": (LAYER_SPLIT, "cnn", (1, 2), {"cut": "conv1"}),
    # The stage in the middle has no parameters.
    "three stages": (
        *(PIPELINE, "mixed", (1, 3)),
        {"cut": "act, down", "micro_batches": 4, "schedule": "1f1b"},
    ),
    "1f1b": (PIPELINE, "gpt", (1, 2), ONE_F_ONE_B),
    "norm": (PIPELINE, "norm", (1, 2), {"cut": "conv1", "micro_batches": 2}),  # by GPipe
}
# The three stages have the same schedule at each change.
NAMES = [pytest.param("1f1b", marks=pytest.mark.campaign) if n == "1f1b" else n for n in RUNS]

# Equal work -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_ten_steps_end_at_the_weights_of_one_process(ran, alone, agrees, name):
    assert_work_of_one_process(ran(name), RUNS[name][1], alone, agrees, name)


@PT
def test_pt_weights_that_are_drawn_in_each_process_are_those_of_the_seed(
    models, train_split, marks
):
    """Its labels have a name, and are cut into micro-batches."""
    images, labels = dataset("cnn")
    settings, named = {"cut": "up", "micro_batches": 4}, (images, {"digit": labels})
    result = train_split(PIPELINE, "drawn", (1, 2), settings, named, steps=1)
    (x, y), *_ = first_batches(images, labels, BATCH, 1, seed=SEED)
    loss, names = models.loss_of_drawn(x, y, SEED)
    assert result.losses.tolist() == pytest.approx([loss], rel=1e-5)
    assert result.weights.keys() == names


@PT
@pytest.mark.parametrize("first", ["query", "input"])
@pytest.mark.parametrize("names", [(), ("query", "input"), ("input", "query")])
def test_pt_stages_are_given_inputs_by_name_and_place_whichever_is_used_first(models, first, names):
    query, other = models.torch.randn(2, 3, 4)
    given = {"query": query, "input": other}
    named, model = {name: given[name] for name in names}, models.Two(first)
    arguments = () if names else (query, other)
    output = models.staged_output(model, named or arguments, arguments, named)
    assert (output == model(query, other)).all()


def out_of_luck():
    raise ValueError("out of luck")


@PT
def test_pt_a_process_that_fails_says_why_before_it_leaves_the_others(models):
    """Whose exchange with it fails at once, in words that say nothing of the reason."""
    run, dist = parallel.Run(1, BATCH, 1), models.torch.distributed
    make, build = "pt_impl.parallel.data_parallel:compiled", f"{__name__}:out_of_luck"
    with parallel.training_folder(dataset("cnn")) as data:
        given = parallel.options(make).parse_args(parallel.arguments(make, build, data, run, {}))
        with pytest.raises(BaseException, match="out of luck"):
            models.replicas.train(given)
    assert dist.is_initialized()
    dist.destroy_process_group()


@TF
def test_tf_weight_decay_leaves_out_what_the_optimizer_was_told(technique, models, train_split):
    x = models.tensor(np.ones((4, 6), np.float32))
    (first, second), _, step = technique.layer_split(models.undecayed, x, cut="down")
    step(x, x, 4)
    assert_biases_do_not_decay(first.arrays() | second.arrays())


# Stages -----------------------------------------------------------------------------------------


@PT
@pytest.mark.parametrize("name", NAMES[:-1])
def test_pt_each_process_has_the_parameters_and_the_optimizer_of_its_stage_alone(ran, name):
    marks, whole = ran(name).marks, sum(sizes(RUNS[name][1]).values())
    assert len(marks) == RUNS[name][2][1]
    elements = [mark["elements"] for mark in marks]
    assert max(elements) < whole == sum(elements)
    assert elements.count(0) == (1 if name == "three stages" else 0)
    assert all(mark["momenta"] == mark["elements"] for mark in marks)


@PT
def test_pt_processes_use_the_loopback_interface_alone_and_share_the_threads(ran):
    assert_local(ran("split").marks)


@TF
@pytest.mark.parametrize("name", NAMES[:-1])
def test_tf_each_device_has_the_variables_and_the_optimizer_of_its_stage_alone(ran, name):
    built = ran(name).built
    assert len(built) == RUNS[name][2][1]
    for place, stage in enumerate(built):
        devices = {device.rpartition("/")[2] for pair in stage["devices"] for device in pair}
        without = name == "three stages" and place == 1
        assert devices == (set() if without else {f"device:CPU:{place}"})
    whole = sum(sizes(RUNS[name][1]).values())
    assert sum(sum(stage["elements"]) for stage in built) == whole


@TF
def test_tf_a_stage_keeps_the_micro_batches_of_its_schedule(models, train_split):
    """In GPipe all go forward before one goes back, in 1F1B no more than there are stages left."""
    kept = {}
    for schedule in ("gpipe", "1f1b"):
        models.PASSED.clear()
        settings = {"cut": "conv1", "micro_batches": 8, "schedule": schedule}
        train_split(PIPELINE, "marked", (1, 2), settings, dataset("cnn"), steps=1)
        for stage in ("first", "second"):
            steps = [1 if way == "forward" else -1 for n, way in models.PASSED if n == stage]
            kept[schedule, stage] = np.cumsum(steps).tolist()
            assert len(steps) == 2 * 8
            assert sum(steps) == 0
    assert kept["gpipe", "second"] == [*range(1, 9), *range(7, -1, -1)]
    assert max(kept["gpipe", "first"]) == 8
    assert max(kept["1f1b", "first"]) <= 2
    assert max(kept["1f1b", "second"]) == 1


# Errors -----------------------------------------------------------------------------------------

NO_CUT = "cut: there is no "
STAGE_REFUSALS = [
    ({"batch": 6}, "4 micro_batches do not divide a batch of 6"),
    ({"micro_batches": 0}, "0 micro_batches do not divide a batch of 8"),
    ({"schedule": "zigzag"}, "schedule must be gpipe or 1f1b, not 'zigzag'"),
    (
        {"schedule": "1f1b", "micro_batches": 2, "cut": "conv1, up"},
        "1f1b with 3 stages needs 3 micro_batches or more",
    ),
    ({"cut": "conv9"}, NO_CUT),
    ({"cut": ""}, NO_CUT),
    ({"cut": "conv0"}, "cut: "),
    ({"cut": "conv1, conv1"}, "cut: "),
]


def test_stages_that_do_not_fit_get_one_clear_line(technique, models, train_split):
    cases = [(models.cnn, *case) for case in STAGE_REFUSALS] + models.STAGE_REFUSALS
    for build, changes, message in cases:
        settings = {"cut": "conv1", "micro_batches": 4, "batch": BATCH} | changes
        samples = "gpt" if changes.get("cut") == "block1" else "cnn"
        x = models.own_layout(dataset(samples)[0])[: settings.pop("batch")]
        pipeline = functools.partial(technique.pipeline, build, models.tensor(x))
        assert_refused(pipeline, message, **settings)


# What is measured -------------------------------------------------------------------------------


def test_figures_are_those_between_the_end_of_the_first_step_and_of_the_last():
    ended = [10.0, 12.0, 14.0]
    glances = [
        Glance(9.0, 50.0, [900, 900], 7_000),
        Glance(9.9, 51.0, [100, 100], 8_000),
        Glance(11.9, 53.0, [300, 400], 8_600),
        Glance(13.9, 55.0, [500, 100], 9_200),
        Glance(14.1, 60.0, [900, 900], 99_000),
    ]
    found = model_parallel.figures(glances, ended, batch_size=8)
    values = {name: metric["value"] for name, metric in found.items()}
    idle = 100 * max(0.0, 1 - 4.0 / (4.0 * usable_threads()))
    assert values.pop("cores_idle") == pytest.approx(idle)
    assert values == {
        "samples_per_s": 4.0,
        "memory_each": 500,
        "memory_all": 700,
        "sent_bytes": 600.0,
    }


def test_steps_that_nobody_saw_are_an_error():
    with pytest.raises(RuntimeError, match="3 steps took too little time to be looked at"):
        model_parallel.figures([Glance(9.0, 1.0, [1], None)], [10.0, 10.01, 10.02], batch_size=8)


def test_processes_that_are_started_are_looked_at_in_place_of_this_one():
    with model_parallel.watched() as glances:
        child = multiprocessing.get_context("spawn").Process(target=time.sleep, args=(60,))
        child.start()
        deadline = time.monotonic() + 30
        started = []
        while not started and time.monotonic() < deadline:
            time.sleep(0.05)
            started = [each for each in glances if each.resident and each.cpu_s < own_cpu_s()]
        child.kill()
        child.join()
    assert started
    assert all(len(each.resident) == 1 for each in started)


def own_cpu_s() -> float:
    times = os.times()
    return times.user + times.system


@pytest.mark.parametrize(("cores", "threads"), [(6, 6), (1, 2)])
def test_stages_share_the_threads_that_one_process_has(monkeypatch, cores, threads):
    """Which a container's quota cuts, whatever cores there are; one each at least."""
    ran = []

    def launch(make, build, data, run, settings):
        ran.append(run)
        raise RuntimeError("seen")

    data = SimpleNamespace(to_device=lambda *arrays: arrays)
    impl = SimpleNamespace(__name__="impl", kit=SimpleNamespace(data=data))
    monkeypatch.setattr(model_parallel, "usable_threads", lambda: cores)
    monkeypatch.setattr(model_parallel.parallel, "find", lambda name: launch)
    batches, devices = [(np.ones(4), np.ones(4))], {"replicas": 1, "parts": 2}
    with pytest.raises(RuntimeError, match="seen"):
        model_parallel.measure(impl, SimpleNamespace(batch_size=4), batches, "a:b", devices=devices)
    assert ran[0].threads == threads


OFF = 1 + 2 * TASKS["text-gpt"].parity


@pytest.mark.parametrize(
    ("wrong", "off", "said"),
    [
        ("the losses", OFF, "2.0e"),
        ("head.kernel", OFF, "2.0e"),
        ("the losses", np.nan, "nan"),
        ("head.bias", np.nan, "nan"),
    ],
)
def test_a_case_that_does_other_work_fails(wrong, off, said):
    models = SimpleNamespace(to_canonical=lambda name, array: array)
    impl = SimpleNamespace(kit=SimpleNamespace(models=models))
    work = SimpleNamespace(task=TASKS["text-gpt"])
    names = ("head.kernel", "head.bias")
    wanted = Alone({name: np.ones(4) for name in names}, [2.0, 1.0], [0.0, 1.0])
    model_parallel.check(impl, work, wanted, wanted)
    weights = {name: np.ones(4) * (off if wrong == name else 1) for name in names}
    losses = [2.0, off if wrong == "the losses" else 1.0]
    said = f"not the work of one process: {wrong} differ by {said}"
    with pytest.raises(RuntimeError, match=said):
        model_parallel.check(impl, work, Alone(weights, losses, [0.0, 1.0]), wanted)
