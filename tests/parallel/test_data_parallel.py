"""Data parallelism: replicas train to the weights of one process, and bad input starts none.

There are 203 samples in batches of 32, so that the seventh batch has 11, five for one replica and
six for the other. Beside the digits' CNN the runs train a model with inputs by name, a weight that
is used twice, and losses of its own.
"""

from __future__ import annotations

import functools
import re
import socket
import subprocess
import sys
import warnings
from dataclasses import fields, replace
from types import SimpleNamespace

import numpy as np
import pytest

from bench.parallel import bench_data_parallel
from shared import datasets, parallel
from shared.specs import TASKS, DatasetSpec
from tests.parallel.replicas import assert_equal_work, differences, result_of, tf_config

FRAMEWORKS = ("pt", "tf")
BAR = TASKS["digits-cnn"].parity
SAMPLES = 203
JOB = {"global_batch": 32, "steps": 10, "seed": 0}
FEW = 4  # steps, which show that two runs differ
RUN = [field.name for field in fields(parallel.Run)]
PT, TF = pytest.mark.only("pt"), pytest.mark.only("tf")
pytestmark = pytest.mark.timeout(400)


def test_a_rate_has_the_range_of_its_runs_and_not_of_the_steps_of_one():
    """Each run's steps are alike, after some that begin, and the runs are not."""
    steps = [np.array([9.0] * bench_data_parallel.WARM_STEPS + [s] * 50) for s in (0.1, 0.2, 0.4)]
    runs = [SimpleNamespace(step_s=one) for one in steps]
    rate = bench_data_parallel._rate(SimpleNamespace(batch_size=8), runs)
    assert rate == {"value": 40.0, "unit": "samples/s", "samples": [80.0, 40.0, 20.0]}


# Which samples --------------------------------------------------------------------------------


def epoch(size, *, seed=0, epoch=0, batch=32):
    each = -(-size // batch)
    stream = parallel.batches(size, global_batch=batch, seed=seed, begin=epoch * each)
    return [next(stream) for _ in range(each)]


def test_an_epoch_has_every_sample_once_and_its_last_batch_is_smaller_or_left_out():
    batches = epoch(SAMPLES)
    assert [len(rows) for rows in batches] == [32] * 6 + [11]
    assert sorted(np.concatenate(batches)) == list(range(SAMPLES))
    whole = parallel.batches(SAMPLES, global_batch=32, seed=0, begin=5, whole=True)
    second = epoch(SAMPLES, epoch=1)
    for rows, expected in zip(
        whole, [batches[5], *second[:6], epoch(SAMPLES, epoch=2)[0]], strict=False
    ):
        assert np.array_equal(rows, expected)


def test_each_epoch_and_seed_has_an_order_of_its_own_that_is_that_of_other_techniques():
    first = np.concatenate(epoch(SAMPLES))
    assert np.array_equal(first, np.concatenate(epoch(SAMPLES)))
    assert not np.array_equal(first, np.concatenate(epoch(SAMPLES, epoch=1)))
    assert not np.array_equal(first, np.concatenate(epoch(SAMPLES, seed=1)))
    shared = list(datasets.batch_order(SAMPLES, 32, seed=0, epoch=1))
    for rows, other in zip(epoch(SAMPLES, epoch=1), shared, strict=False):
        assert np.array_equal(rows, other)


def test_a_run_that_goes_on_sees_what_it_would_have_seen():
    whole = parallel.batches(SAMPLES, global_batch=32, seed=0)
    expected = [next(whole) for _ in range(20)]
    for begin in (1, 6, 7, 8, 15):
        later = parallel.batches(SAMPLES, global_batch=32, seed=0, begin=begin)
        for rows in expected[begin:]:
            assert np.array_equal(next(later), rows)


@pytest.mark.parametrize(
    "samples",
    [
        np.arange(6).reshape(3, 2),
        tuple(np.full((3, 2), number) for number in range(11)),
        {"a": np.ones(3), "b": np.zeros((3, 1))},
    ],
)
def test_samples_of_any_structure_are_read_as_they_were_written(samples, tmp_path):
    parallel.save_samples(samples, tmp_path / "train_x")
    found = parallel.load_samples(tmp_path / "train_x")
    assert isinstance(found, type(samples))
    assert parallel.size(found) == 3
    if isinstance(samples, dict):
        assert list(found) == list(samples)
    for own, part in zip(parallel.leaves(found), parallel.leaves(samples), strict=True):
        assert np.array_equal(own, part)


# Equal work -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def digits(tmp_path_factory):
    """Images, channels last, and labels."""
    spec = DatasetSpec("tiny", "digits", train_size=SAMPLES, test_size=100)
    return datasets.load(datasets.materialise(spec, tmp_path_factory.mktemp("data")), "train")


@pytest.fixture(scope="module")
def data(models, digits):
    """Name -> samples: digits, inputs by name, and the rows of the identity."""
    random = np.random.default_rng(0)
    numbers = random.normal(size=(SAMPLES, 6)).astype(np.float32)
    named = {"numbers": numbers, "codes": random.integers(0, 12, (SAMPLES, 4))}
    return {
        "digits": (models.own_layout(digits[0]), digits[1]),
        "mixed": (named, random.integers(0, 12, SAMPLES)),
        "identity": (np.eye(8, dtype=np.float32), np.zeros(8, np.int64)),
    }


@pytest.fixture(scope="module")
def train(framework, models, forks, data):
    """`train(build, samples, variant, **settings)`: the result of two replicas, by forks."""

    def run(build, samples, variant="processes", launch=forks.launch, **settings):
        settings = {"replicas": 2} | JOB | settings
        given = parallel.Run(**{name: settings.pop(name) for name in RUN if name in settings})
        build = build if ":" in build else f"{models.__name__}:{build}"
        make = f"{framework}_impl.parallel.data_parallel:{variant}"
        return launch(make, build, data.get(samples, samples), given, settings)

    return run


@pytest.fixture(scope="module")
def launched(impl, train, models, tmp_path_factory):
    """The digits CNN in processes that are launched as users launch them, with two threads."""
    seen = tmp_path_factory.mktemp("threads") / "seen"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("THREADS_SEEN", str(seen))
        settings = {"synchronised_norm": True, "threads": 2}
        result = train("digits", "digits", launch=models.replicas.launch, **settings)
    assert seen.read_text().split() == ["1", "1"]
    return replace(result, weights=models.canonical(result.weights))


@pytest.fixture(scope="module")
def trained(models, train):
    """`trained(name)`: the result of a run on two replicas."""
    micro = {"variant": "accumulated", "micro_batches": 2}
    runs = {
        "other": models.OTHER,
        "accumulated": micro,
        "synchronised_each": micro | {"synchronise_each": True},
        "without_statistics": {"synchronised_norm": True},
    }
    builds = {"synchronised_each": "all_dense", "without_statistics": "without_statistics"}

    @functools.cache
    def run(name):
        return train(builds.get(name, "mixed"), "mixed", **runs[name])

    return run


@pytest.fixture(scope="module")
def plain(models, data):
    """`plain(build)`: the result of plain code in one process."""

    @functools.cache
    def run(build):
        stream = parallel.batches(SAMPLES, global_batch=JOB["global_batch"], seed=0)
        batches = [next(stream) for _ in range(JOB["steps"])]
        return result_of(*models.plain(getattr(models, build), *data["mixed"], batches))

    return run


def alone(kit, models, digits, steps):
    """The digits CNN by the kit's own baseline step, in one process."""
    model, optimizer, loss_fn = models.examples.digits_cnn()
    step, losses = kit.training.make_train_step(model, optimizer, loss_fn), []
    stream = parallel.batches(SAMPLES, global_batch=JOB["global_batch"], seed=0)
    for _ in range(steps):
        rows = next(stream)
        batch = kit.data.to_device(*(part[rows] for part in digits))
        losses.append(kit.runtime.to_float(step(*batch)))
    return result_of(kit.models.export_weights(model), losses)


def assert_seen(result):
    """Every sample is trained on as often as its epochs say."""
    expected = np.zeros(SAMPLES, np.int64)
    stream = parallel.batches(SAMPLES, global_batch=JOB["global_batch"], seed=JOB["seed"])
    for _ in range(JOB["steps"]):
        expected[next(stream)] += 1
    assert np.array_equal(result.seen, expected)


def test_two_replicas_train_to_the_weights_of_one_process(
    forks, kit, models, digits, launched, agrees
):
    """Both frameworks to the same; memory is that of each process."""
    assert_equal_work(launched, alone(kit, models, digits, JOB["steps"]), BAR)
    assert_seen(launched)
    assert len(launched.peak_bytes) == len(launched.import_bytes) == 2
    if sys.platform == "linux":
        assert (launched.peak_bytes > launched.import_bytes).all()
        assert (launched.import_bytes > 50e6).all()
    # Keras 3 keeps the biased variance of a batch, PyTorch the unbiased one.
    kept = {n: v for n, v in launched.weights.items() if v.size < 2000 and "variance" not in n}
    agrees("two replicas", {"losses": launched.losses.tolist(), **kept}, BAR)


def test_without_synchronised_norm_batchnorm_is_another_function(
    framework, kit, models, train, digits
):
    """TensorFlow's replicas are of one process here, which is traced once."""
    replicas = models.OTHER if framework == "tf" else {}
    local = train(f"{models.examples.__name__}:digits_cnn", "digits", steps=FEW, **replicas)
    local = replace(local, weights=models.canonical(local.weights))
    assert max(differences(alone(kit, models, digits, FEW), local).values()) > 100 * BAR


@pytest.mark.parametrize(
    "name",
    [
        *("other", "accumulated", "synchronised_each"),
        pytest.param("without_statistics", marks=PT),
    ],
)
def test_any_model_trains_to_the_weights_of_plain_code(trained, plain, name):
    builds = {"synchronised_each": "all_dense", "without_statistics": "without_statistics"}
    found = trained(name)
    assert_equal_work(found, plain(builds.get(name, "mixed")), BAR)
    assert len(found.losses) == len(found.step_s) == JOB["steps"]
    if name in ("other", "accumulated"):
        assert_seen(found)


def test_masks_of_dropout_differ_in_pytorch_and_come_back_with_a_resumed_run(
    framework, train, tmp_path
):
    """With momenta and the order of an epoch: the last of four steps is taken again, alone."""
    saved = tmp_path / "saved"
    settings = {"global_batch": 2, "steps": 4, "checkpoint": str(saved), "save_every": 3}
    whole = train("masks", "identity", **settings)
    (kernel,) = whole.weights.values()
    first = next(parallel.batches(8, global_batch=2, seed=JOB["seed"]))
    one, other = (kernel.T if framework == "pt" else kernel)[first] < 1
    assert 10 < one.sum() < 54
    assert (one != other).any() == (framework == "pt")
    forget_the_last(saved)
    resumed = train("masks", "identity", **settings)
    assert len(resumed.step_s) == 1
    assert np.array_equal(resumed.losses, whole.losses)
    assert max(differences(whole, resumed).values()) == 0.0


def forget_the_last(saved):
    """As if the checkpoint of step 4 had not been written."""
    if (latest := saved / "checkpoint").exists():  # TensorFlow's list of checkpoints
        text = latest.read_text()
        latest.write_text(
            text.replace('model_checkpoint_path: "step-4"', 'model_checkpoint_path: "step-3"', 1)
        )
        assert latest.read_text() != text
    else:
        max(saved.glob("step-*.pt")).unlink()


# Bad input ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"global_batch": 33}, "32 or 34"),
        ({"replicas": 4, "threads": 2}, "one each"),
        ({"replicas": 0}, "replicas must be an integer of at least 1"),
        ({"global_batch": 2048}, f"2048 from {SAMPLES} samples"),
        ({"steps": 0}, "steps must be"),
        ({"variant": "ddp"}, "no function 'ddp'"),
        ({"micro_batches": 2}, "no setting 'micro_batches': bucket_mb"),
        ({"precision": "bfloat16"}, "no setting 'precision': bucket_mb"),
        ({"variant": "accumulated", "micro_batches": 16}, "another global batch"),
        ({"build": "no_such_module:build"}, "no_such_module"),
        ({"build": "tests.parallel.replicas:nothing"}, "no function 'nothing'"),
        ({"samples": "nowhere"}, "nowhere"),
    ],
)
def test_bad_input_is_one_clear_error_before_anything_starts(
    models, train, monkeypatch, settings, message
):
    monkeypatch.setattr(subprocess, "Popen", None)
    given = {"build": "mixed", "samples": "mixed", "launch": models.replicas.launch} | settings
    with pytest.raises((ValueError, FileNotFoundError), match=re.escape(message)) as raised:
        train(**given)
    assert "\n" not in str(raised.value)


def test_what_a_machine_lacks_is_said(technique, models):
    with pytest.raises(NotImplementedError, match=r"GPU|TPU"):
        getattr(technique, models.LACKING)(build=None)


def fails():
    """What a replica of a user's own may do."""
    raise ValueError("no such thing as a model")


def test_what_is_wrong_is_what_a_replica_says(train):
    """`launch` raises what a process says: test_hanging.py."""
    with pytest.raises(RuntimeError, match=r"replica failed: no such thing as a model\s*$"):
        train(f"{__name__}:fails", "digits", replicas=1)


def test_a_port_in_use_is_named(models, monkeypatch):
    with socket.create_server((parallel.LOOPBACK, 0)) as server:
        port = server.getsockname()[1]
        hosts = [f"{parallel.LOOPBACK}:{number}" for number in (port, 1)]
        world = {"MASTER_PORT": str(port), "WORLD_SIZE": "2", "RANK": "0"}
        for name, value in ({"TF_CONFIG": tf_config(hosts)} | world).items():
            monkeypatch.setenv(name, value)
        with pytest.raises(ValueError, match=f"port {port} of {parallel.LOOPBACK} is in use"):
            models.replicas.join()


def test_who_can_reach_what_listens_everywhere_is_said(framework, models, monkeypatch):
    monkeypatch.setattr(parallel, "others_reach", lambda host: ["eth7"])
    port, other = parallel.free_ports(2)
    with socket.create_server(("", 0)) as server, warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        if framework == "pt":
            port = server.getsockname()[1]
        models.warn(monkeypatch, port, other)
    (warning,) = [str(each.message) for each in found if "eth7" in str(each.message)]
    assert f"port {port} of every interface, eth7 among them" in warning
    assert "firewall" in warning


TASK = '"task": {"type": "worker", "index": 0}'


@TF
@pytest.mark.parametrize(
    "text",
    [
        "{",
        '{"cluster": {"worker": ["127.0.0.1:1"]}}',
        "[]",
        '{"cluster": {"worker": ["a:1"]}, "task": {"type": "worker", "index": 1}}',
        f'{{"cluster": {{"worker": ["a"]}}, {TASK}}}',
        f'{{"cluster": {{"worker": ["a:1", "a:1"]}}, {TASK}}}',
        f'{{"cluster": {{"worker": ["a:1"], "ps": ["b:1"]}}, {TASK}}}',
    ],
    ids=["not JSON", "no task", "no object", "no such index", "no port", "twice", "a server"],
)
def test_tf_a_malformed_tf_config_is_one_clear_error(models, monkeypatch, text):
    """That says what would be right."""
    monkeypatch.setenv("TF_CONFIG", text)
    with pytest.raises(ValueError, match=f"^TF_CONFIG.*{re.escape(TASK)}"):
        models.replicas.join()


# What one process can tell --------------------------------------------------------------------


@TF
def test_tf_what_would_differ_from_one_process_is_refused(technique, models):
    scaled = "a scaled loss: Keras 3 looks for overflow on each replica"
    overwrite = {"use_ema": True, "ema_overwrite_frequency": 2}
    for build, message in (
        (models.sgd(global_clipnorm=1.0), "global_clipnorm: Keras 3 does this on each replica"),
        (models.sgd(**overwrite), "ema_overwrite_frequency: Keras 3 overwrites only outside"),
        (models.sgd(loss_scale_factor=2.0), scaled),
        (models.scaling(), scaled),
    ):
        with pytest.raises(NotImplementedError, match=f"^{message}"):
            technique.one_process(build, replicas=1)
    with pytest.raises(NotImplementedError):
        technique.apply_data_parallel(models.mixed()[0])


@pytest.fixture(scope="module")
def world(models):
    """A group of this process alone."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("MASTER_PORT", "WORLD_SIZE", "RANK", "TF_CONFIG"):
            patch.delenv(name, raising=False)
        models.replicas.join()
    yield
    models.torch.distributed.destroy_process_group()


@PT
def test_pt_a_block_of_fsdp_is_whole_only_while_it_runs_in_the_precision(technique, models, world):
    """Beside it are the weights outside of blocks, of which one is used at both ends."""
    outside, block = 12 * 8 + 12 + 6 * 8 + 8, 8 * 16 + 16 + 16 * 8 + 8
    total, torch = outside + 3 * block, models.torch
    shares, dtypes, kept = models.while_blocks_run(technique.apply_fsdp)
    assert shares == pytest.approx([(outside + block) / total] * 6)
    assert dtypes == kept == {torch.float32}
    shares, *_ = models.while_blocks_run(technique.apply_fsdp, blocks="blocks.1")
    others = (outside + 2 * block) / total  # what is in no block is whole all the time
    assert shares == pytest.approx([others, others, 1, 1, others, others])
    shares, *_ = models.while_blocks_run(technique.apply_fsdp, reshard_after_forward=False)
    assert shares[-1] == 1
    _, dtypes, kept = models.while_blocks_run(technique.apply_fsdp, precision="bfloat16")
    assert (dtypes, kept) == ({torch.bfloat16}, {torch.float32})


@PT
def test_pt_what_cannot_be_sharded_is_refused_before_anything_changes(technique, models, world):
    model = models.mixed()[0]
    model.temperature = models.nn.Parameter(models.torch.ones([]))
    scalar = "^temperature is a scalar: FSDP2 shards the first axis$"
    with pytest.raises(NotImplementedError, match=scalar):
        technique.apply_fsdp(model)
    with pytest.raises(ValueError, match=r"no module is named 'layers\.\*'"):
        technique.apply_fsdp(model, blocks="blocks.*, layers.*")
    with pytest.raises(ValueError, match="float16"):
        technique.apply_fsdp(models.mixed()[0], precision="float16")


@PT
def test_pt_a_model_that_was_loaded_in_evaluation_mode_trains(technique, models, world):
    from torch.distributed.device_mesh import init_device_mesh

    from pt_impl.parallel import tensor_parallel

    def loaded():
        model, *rest = models.mixed()
        return model.eval(), *rest

    mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=("data", "model"))
    parts = loaded()[0]
    tensor_parallel.make_train_step(parts, None, None, mesh)
    for model in (technique.processes(loaded)[0], technique.sharded(loaded)[0], parts):
        assert all(module.training for module in model.modules())


@PT
def test_pt_an_argument_that_is_none_goes_to_every_replica_and_micro_batch(
    technique, models, world
):
    without, with_none = models.losses_with_none(technique)
    assert with_none == without > 0


@PT
def test_pt_statistics_of_half_width_inputs_are_those_of_float32(models, world):
    from pt_impl.kit.checks.data_parallel import synchronise_norms

    torch = models.torch
    x = torch.randn(64, 3, generator=torch.Generator().manual_seed(0)).bfloat16() * 3 + 20
    plain, synchronised = models.nn.BatchNorm1d(3), models.nn.BatchNorm1d(3)
    synchronise_norms(synchronised)
    wanted, output = plain(x), synchronised(x)
    assert output.dtype == torch.bfloat16
    # Of numbers of 2 to 4 a last digit, at most, and one more.
    assert (wanted - output).abs().max() <= 2**-5
    assert torch.allclose(plain.running_mean, synchronised.running_mean, rtol=0, atol=1e-4)
    assert torch.allclose(plain.running_var, synchronised.running_var, rtol=0, atol=1e-3)


@PT
def test_pt_a_loss_with_parameters_of_its_own_is_refused(technique, models, world):
    """Replicas would train them apart."""
    from pt_impl.parallel import model_parallel, tensor_parallel

    build, x, y = models.weighted, models.torch.ones(2, 6), models.torch.zeros(2, 2)
    step = technique.processes(build)[2]
    for call in (
        lambda: step(x, y, samples=2),
        lambda: technique.sharded(build),
        lambda: model_parallel.pipeline(build, x=x, cut="1", micro_batches=1),
        lambda: tensor_parallel.hybrid(build, pairs="0 > 1"),
    ):
        words = "^the optimizer has parameters that the model has not, such as a loss's"
        with pytest.raises(NotImplementedError, match=words):
            call()


@PT
def test_pt_weights_are_those_that_numpy_has_without_extra_states(models):
    found = models.replicas._weights(models.Counting(2, 2, bias=False).bfloat16())
    assert {name: str(value.dtype) for name, value in found.items()} == {"weight": "float32"}


@PT
def test_pt_a_norm_that_does_more_is_not_synchronised(models):
    """Its activation would be lost."""
    from pt_impl.kit.checks.data_parallel import synchronise_norms

    model = models.nn.Sequential(models.nn.BatchNorm1d(3), models.NormAct(3))
    with pytest.raises(
        NotImplementedError, match=r"^1 is a NormAct: what it does beside BatchNorm"
    ):
        synchronise_norms(model)
    assert "forward" not in vars(model[0])
