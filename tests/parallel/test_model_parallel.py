"""Layer split, pipelines, tensor parallel and hybrid: equal work, parts that are really apart.

PyTorch's stages are processes, forks of that of its tests; TensorFlow's are four devices of one.
"""

from __future__ import annotations

import functools
import json
import multiprocessing
import os
import re
import time
from dataclasses import replace
from math import prod
from types import SimpleNamespace

import numpy as np
import pytest

from bench.harness.machine import usable_threads
from bench.probes import model_parallel
from bench.probes.model_parallel import Alone, Glance
from shared import parallel
from shared.datasets import first_batches
from shared.specs import TASKS, parameter_shapes
from tests.frameworks import apart
from tests.parallel.replicas import assert_equal_work, result_of
from tests.parallel.small_net import weights

FRAMEWORKS = ("pt", "tf")
PT, TF = pytest.mark.only("pt"), pytest.mark.only("tf")
STEPS, SEED, BATCH = 10, 3, 8
BARS = {"cnn": 1e-5, "mixed": 1e-5, "norm": 1e-5, "gpt": 1e-4}
STAGES = {  # run -> model, how many stages, variant, settings
    "split": ("cnn", 2, "layer_split", {"cut": "conv1"}),
    # The stage in the middle has no parameters.
    "three stages": ("mixed", 3, "pipeline", {"cut": "act, down", "micro_batches": 4}),
    "1f1b": ("gpt", 2, "pipeline", {"micro_batches": 4, "schedule": "1f1b"}),
    "norm": ("norm", 2, "pipeline", {"cut": "conv1", "micro_batches": 2}),
}
PARTS = {  # run -> model, how many replicas of two parts, variant, settings
    "tensor cnn": ("cnn", 1, "tensor_parallel", {"pairs": "up > down"}),
    "mixed hybrid": ("mixed", 2, "hybrid", {"pairs": "up > down"}),
    "gpt hybrid": ("gpt", 2, "hybrid", {"pairs": "block*.up > block*.down"}),
}
SHARDS = 2


@functools.cache
def dataset(name):
    """More than one epoch of it is taken. Images are NHWC."""
    random = np.random.default_rng(0)
    if name == "mixed":
        numbers = random.normal(size=(44, 6)).astype(np.float32)
        x = {"numbers": numbers, "codes": random.integers(0, 12, (44, 4))}
        return x, random.integers(0, 10, 44)
    if name == "gpt":
        codes = random.integers(0, 98, (40, 65))
        return codes[:, :-1].copy(), codes[:, 1:].copy()
    images = random.normal(size=(44, 12, 12, 3)).astype(np.float32)
    return images, random.integers(0, 10, 44)


def sizes(model):
    """Elements of each parameter."""
    if model == "cnn":
        return {name: value.size for name, value in weights(norm=False).items()}
    if model == "mixed":
        found = {"codes": 12 * 8, "numbers.kernel": 6 * 8, "numbers.bias": 8}
        found |= {"up.kernel": 8 * 16, "up.bias": 16, "down.kernel": 16 * 10, "down.bias": 10}
        return found
    shapes = parameter_shapes(TASKS["text-gpt"].model)
    return {name: prod(shape) for name, shape in shapes.items()}


def of_a_part(model):
    """Elements that one of two shards holds: half of the pairs, all of the rest."""
    halved = (".up.kernel", ".up.bias", ".down.kernel")
    each = sizes(model).items()
    return sum(n // SHARDS if f".{name}".endswith(halved) else n for name, n in each)


# Runs -------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def train(request, framework, models, tmp_path_factory):
    """`train(kind, build, (replicas, parts), variant, settings, samples, steps)`: its result."""
    if framework == "pt":
        launch = request.getfixturevalue("forks").launch
    else:
        models.split_cpu()
        launch = models.launch_in(tmp_path_factory.mktemp("results"))

    def run(kind, build, devices, variant, settings, samples=None, steps=STEPS):
        replicas, parts = devices
        make = f"{framework}_impl.parallel.{kind}_parallel:{variant}"
        x, y = samples or dataset(build)
        threads = replicas * parts
        given = parallel.Run(replicas, BATCH, steps, parts=parts, seed=SEED, threads=threads)
        build = f"{models.__name__}:{build}"
        return launch(make, build, (models.own_layout(x), y), given, settings)

    return run


@pytest.fixture(scope="module")
def marks(tmp_path_factory):
    """Where PyTorch's optimizers leave what they were given."""
    folder = tmp_path_factory.mktemp("marks")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MARKS", str(folder))
        yield folder


@pytest.fixture(scope="module")
def canonical(models):
    """`canonical(model, result)`: with the names of both frameworks; a foreign model's by its."""

    def named(model, result):
        if model == "mixed":
            return result
        build = getattr(models, model)
        return replace(result, weights=models.canonical(build, result.weights))

    return named


@pytest.fixture(scope="module")
def ran(framework, models, train, marks, canonical):
    """`ran(name)`: a run's result, what its optimizers were given, and when it was."""

    @functools.cache
    def run(name):
        for path in marks.iterdir():
            path.unlink()
        if framework == "tf":
            models.BUILT.clear()
        kind = "model" if name in STAGES else "tensor"
        model, count, variant, settings = (STAGES | PARTS)[name]
        devices = (1, count) if kind == "model" else (count, SHARDS)
        if name == "1f1b":
            settings = settings | {"cut": models.CUT}
        begin = time.monotonic()
        result = train(kind, model, devices, variant, settings)
        return SimpleNamespace(
            result=canonical(model, result),
            marks=[json.loads(path.read_text()) for path in sorted(marks.iterdir())],
            built=[] if framework == "pt" else list(models.BUILT),
            times=[begin, *result.ended, time.monotonic()],
        )

    return run


@pytest.fixture(scope="module")
def alone(framework, kit, models, train, marks):
    """`alone(model)`: one process, one device, the whole batch, or in two parts."""

    @functools.cache
    def run(model, in_parts=False):
        if model == "mixed":
            x, y = dataset("mixed")
            stream = parallel.batches(len(y), global_batch=BATCH, seed=SEED, whole=True)
            every = [next(stream) for _ in range(STEPS)]
            return result_of(*models.plain([(parallel.take(x, rows), y[rows]) for rows in every]))
        built, optimizer, loss_fn = getattr(models, model)()
        if framework == "tf":
            optimizer.build(built.trainable_variables)
        make = kit.training.make_train_step
        if in_parts:
            make = functools.partial(models.gradient_accumulation.make_train_step, micro_batches=2)
        step = make(built, optimizer, loss_fn)
        batches = first_batches(*dataset(model), BATCH, STEPS, seed=SEED)
        losses = [float(step(*kit.data.to_device(x, y))) for x, y in batches]
        return result_of(kit.models.export_weights(built), losses)

    return run


# Equal work -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [*STAGES, *PARTS])
def test_ten_steps_end_at_the_weights_of_one_process(ran, alone, agrees, name):
    """And of both frameworks; on the clock of the caller, one step ends after another."""
    model, found = (STAGES | PARTS)[name][0], ran(name)
    # BatchNorm sees a micro-batch at a time, as in gradient accumulation.
    one = alone(model, in_parts=True) if model == "norm" else alone(model)
    assert len(one.losses) == STEPS
    assert one.losses[-1] != one.losses[0]
    assert_equal_work(found.result, one, BARS[model])
    if model == "norm":
        gammas = (result.weights["bn.gamma"] for result in (found.result, alone("norm")))
        assert apart(*gammas) > 1e-3
    assert len(found.times) == STEPS + 2
    assert found.times == sorted(found.times)
    if model != "mixed":  # Keras feeds the running variance with the biased one
        kept = {n: v for n, v in found.result.weights.items() if v.size < 700}
        kept = {n: v for n, v in kept.items() if "variance" not in n}
        agrees(name, {"losses": list(map(float, found.result.losses)), **kept}, BARS[model])


@PT
def test_pt_weights_that_are_drawn_in_each_process_are_those_of_the_seed(models, train, marks):
    """Its labels have a name, and are cut into micro-batches."""
    images, labels = dataset("cnn")
    settings, named = {"cut": "up", "micro_batches": 4}, (images, {"digit": labels})
    result = train("model", "drawn", (1, 2), "pipeline", settings, named, steps=1)
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


@PT
def test_pt_replicas_with_unequal_parts_of_a_batch_weigh_each_sample_alike(models):
    losses, gradients = models.of_unequal_replicas(SEED)
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)
    assert np.allclose(*gradients, rtol=0, atol=1e-6)


@TF
def test_tf_weight_decay_leaves_out_what_the_optimizer_was_told(models, train):
    """In stages and in parts."""
    for found in models.after_a_step_of_no_gradient():
        assert found.keys() == {"up/kernel", "up/bias", "down/kernel", "down/bias"}
        assert found["up/bias"].mean() == found["down/bias"].mean() == 1.0


# Stages and parts -------------------------------------------------------------------------------


@PT
@pytest.mark.parametrize("name", [name for name in STAGES if name != "norm"])
def test_pt_each_process_has_the_parameters_and_the_optimizer_of_its_stage_alone(ran, name):
    marks, whole = ran(name).marks, sum(sizes(STAGES[name][0]).values())
    assert len(marks) == STAGES[name][1]
    elements = [mark["elements"] for mark in marks]
    assert max(elements) < whole == sum(elements)
    assert elements.count(0) == (1 if name == "three stages" else 0)
    assert all(mark["momenta"] == mark["elements"] for mark in marks)


@PT
@pytest.mark.parametrize("name", PARTS)
def test_pt_a_process_holds_half_of_each_pair_which_replicas_share(ran, name):
    """FSDP2 shards each parameter by its first axis, which may be odd."""
    marks, (model, replicas, *_) = ran(name).marks, PARTS[name]
    elements, part = [mark["elements"] for mark in marks], of_a_part(model)
    assert len(elements) == replicas * SHARDS
    assert sum(elements) == SHARDS * part
    assert elements == [part] * 2 if replicas == 1 else max(elements) < 0.7 * part
    assert all(mark["momenta"] == mark["elements"] for mark in marks)


@PT
def test_pt_processes_use_the_loopback_interface_alone_and_share_the_threads(ran):
    for mark in ran("split").marks + ran("mixed hybrid").marks:
        # A socket of both versions of IP shows the loopback of the fourth as mapped.
        assert set(mark["addresses"]) <= {"127.0.0.1", "::ffff:127.0.0.1"}
        assert mark["addresses"]
        assert mark["threads"] == 1


@PT
def test_pt_replicas_share_each_block_of_a_pair_by_itself(models):
    model, blocks = models.gpt()[0], TASKS["text-gpt"].model.layers
    every = [f"block{number}" for number in range(blocks)]
    for pairs, wanted in (
        ("block*.up > block*.down", every),
        ("block1.up > block1.down", ["block1"]),
    ):
        plan = models.tensor_parallel.plan_pairs(model, pairs=pairs)
        found = models.tensor_parallel._blocks(model, plan)
        assert [name for name, module in model.named_modules() if module in found] == wanted


@TF
@pytest.mark.parametrize("name", [name for name in STAGES if name != "norm"])
def test_tf_each_device_has_the_variables_and_the_optimizer_of_its_stage_alone(ran, name):
    built = ran(name).built
    assert len(built) == STAGES[name][1]
    for place, stage in enumerate(built):
        devices = {device.rpartition("/")[2] for pair in stage["devices"] for device in pair}
        without = name == "three stages" and place == 1
        assert devices == (set() if without else {f"device:CPU:{place}"})
    whole = sum(sizes(STAGES[name][0]).values())
    assert sum(sum(stage["elements"]) for stage in built) == whole


@TF
@pytest.mark.parametrize("name", PARTS)
def test_tf_a_device_holds_half_of_each_pair_and_of_its_momenta(ran, name):
    (built,), (model, replicas, *_) = ran(name).built, PARTS[name]
    assert all(len(set(devices)) == replicas * SHARDS for devices in built["devices"])
    each = [sum(parts) for parts in zip(*built["elements"], strict=True)]
    assert each == [of_a_part(model)] * replicas * SHARDS
    assert built["momenta"] == built["elements"]


@TF
def test_tf_a_stage_keeps_the_micro_batches_of_its_schedule(models, train):
    """In GPipe all go forward before one goes back, in 1F1B no more than there are stages left."""
    kept = {}
    for schedule in ("gpipe", "1f1b"):
        models.PASSED.clear()
        settings = {"cut": "conv1", "micro_batches": 8, "schedule": schedule}
        train("model", "marked", (1, 2), "pipeline", settings, dataset("cnn"), steps=1)
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
PART_REFUSALS = [
    ({"shards": 3}, "pairs: up > down: (16, 16) do not go into 3 shards"),
    ({"shards": 1}, "pairs: up > down: (16, 16) do not go into 1 shards"),
    ({"pairs": "nothing > down"}, "pairs: 'nothing > down' matches [[], ['down']]: "),
    ({"pairs": "up"}, "pairs: 'up' matches [['up']]: "),
    ({"pairs": "up, down > down"}, "pairs: 'up' matches [['up']]: "),
    ({"pairs": "down > up"}, "pairs: down > up: (10, 8) do not go into 2 shards"),
    ({"pairs": "conv0 > conv1"}, "pairs: conv0 is a Conv2"),
]


def assert_refused(call, message, **settings):
    words = f"^{re.escape(message)}"
    with pytest.raises((ValueError, NotImplementedError), match=words) as raised:
        call(**settings)
    assert "\n" not in str(raised.value)


def test_stages_that_do_not_fit_get_one_clear_line(models, train):
    cases = [(models.cnn, *case) for case in STAGE_REFUSALS] + models.STAGE_REFUSALS
    for build, changes, message in cases:
        settings = {"cut": "conv1", "micro_batches": 4, "batch": BATCH} | changes
        samples = "gpt" if changes.get("cut") == "block1" else "cnn"
        x = models.own_layout(dataset(samples)[0])[: settings.pop("batch")]
        pipeline = functools.partial(models.model_parallel.pipeline, build, models.tensor(x))
        assert_refused(pipeline, message, **settings)


def test_parts_that_do_not_fit_get_one_clear_line(models, train):
    cases = [(models.cnn, *case) for case in PART_REFUSALS] + models.PART_REFUSALS
    for build, changes, message in cases:
        split = functools.partial(models.tensor_parallel.tensor_parallel, build)
        assert_refused(split, message, **{"pairs": "up > down"} | changes)


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
