"""Replicas and stages in a framework's process."""

from __future__ import annotations

import functools
import json
import time
from dataclasses import replace
from types import ModuleType, SimpleNamespace

import pytest

from shared import parallel
from shared.datasets import first_batches
from tests import workers
from tests.parallel.replicas import Forks, result_of
from tests.parallel.splitting import BATCH, SEED, STEPS, dataset


@pytest.fixture(scope="module")
def impl(framework: str) -> ModuleType:
    """Not configured, since that may run an operator, before `forks` is made."""
    return workers.implementation(framework)


@pytest.fixture(scope="module")
def forks(framework: str, tmp_path_factory) -> Forks:
    """Launches runs of several processes."""
    return Forks(framework, tmp_path_factory.mktemp("runs"))


# Models that are split, in test_model_parallel and test_tensor_parallel


@pytest.fixture(scope="module")
def train_split(request, framework, models, tmp_path_factory):
    """`train_split(make, build, (replicas, parts), settings, samples, steps)`: its result."""
    if framework == "pt":
        launch = request.getfixturevalue("forks").launch
    else:
        models.split_cpu()
        launch = models.launch_in(tmp_path_factory.mktemp("results"))

    def run(make, build, devices, settings, samples=None, steps=STEPS):
        replicas, parts = devices
        x, y = samples or dataset(build)
        threads = replicas * parts
        given = parallel.Run(replicas, BATCH, steps, parts=parts, seed=SEED, threads=threads)
        make, build = f"{framework}_impl.parallel.{make}", f"{models.__name__}:{build}"
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
def ran(request, framework, models, train_split, marks):
    """`ran(name)`: a run of the file's RUNS, what its optimizers were given, and when it was.

    Weights have the names of both frameworks, those of a foreign model its own.
    """

    @functools.cache
    def run(name):
        for path in marks.iterdir():
            path.unlink()
        if framework == "tf":
            models.BUILT.clear()
        make, model, devices, settings = request.module.RUNS[name]
        begin = time.monotonic()
        result = train_split(make, model, devices, settings)
        times = [begin, *result.ended, time.monotonic()]
        if model != "mixed":
            weights = models.canonical(getattr(models, model), result.weights)
            result = replace(result, weights=weights)
        return SimpleNamespace(
            result=result,
            marks=[json.loads(path.read_text()) for path in sorted(marks.iterdir())],
            built=[] if framework == "pt" else list(models.BUILT),
            times=times,
        )

    return run


@pytest.fixture(scope="module")
def alone(framework, kit, models, train_split, marks):
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
