"""Data parallelism: replicas train to the weights of one process, and bad input starts none.

The runs are those of `data_parallel_worker.py`, one process a side: 203 samples in batches of 32,
so that the seventh batch has 11, five for one replica and six for the other. Beside the digits'
CNN they train a model with inputs by name, a weight that is used twice, and losses of its own.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import psutil
import pytest

from bench.parallel import bench_data_parallel
from shared import datasets, parallel
from shared.specs import TASKS, DatasetSpec
from tests import workers
from tests.parallel.data_parallel_worker import BAD, CONFIGS, JOB, SAMPLES

ROOT = Path(__file__).resolve().parents[2]
BAR = TASKS["digits-cnn"].parity
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


def test_each_epoch_and_seed_has_an_order_of_its_own_that_is_repeatable():
    first = np.concatenate(epoch(SAMPLES))
    assert np.array_equal(first, np.concatenate(epoch(SAMPLES)))
    assert not np.array_equal(first, np.concatenate(epoch(SAMPLES, epoch=1)))
    assert not np.array_equal(first, np.concatenate(epoch(SAMPLES, seed=1)))


def test_the_order_is_that_of_the_other_techniques():
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
def data(tmp_path_factory) -> Path:
    spec = DatasetSpec("tiny", "digits", train_size=SAMPLES, test_size=100)
    return datasets.materialise(spec, tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="module", params=["pt", "tf"])
def side(request) -> str:
    return request.param


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, Path]:
    """Where each side's worker leaves its results."""
    return {name: tmp_path_factory.mktemp(name) for name in ("pt", "tf")}


@pytest.fixture(scope="module")
def evidence(folders, data) -> dict[str, workers.Scenarios]:
    """What each worker was told for bad input; its results are in its folder."""
    return workers.run("parallel.data_parallel_worker", folders, lambda name: [folders[name], data])


@pytest.fixture
def result(evidence, folders, side):
    return lambda name, of=side: parallel.Result.load(folders[of] / f"{name}.npz")


@pytest.fixture
def words(evidence, side) -> dict:
    return evidence[side]


OTHER = {"pt": "sharded", "tf": "one_process"}


def differences(one, other) -> dict[str, float]:
    """Relative L2 distance of each tensor."""
    assert one.weights.keys() == other.weights.keys()
    return {
        name: float(np.linalg.norm(value - other.weights[name]) / np.linalg.norm(value))
        for name, value in one.weights.items()
    }


@pytest.fixture(scope="module")
def legacy(data, tmp_path_factory):
    given = [tmp_path_factory.mktemp("legacy"), data]
    found = workers.run("parallel.legacy_keras_worker", ("tf_keras",), lambda name: given)
    return found["tf_keras"]


def test_replicas_of_legacy_keras_normalise_over_the_global_batch(legacy):
    assert legacy["apart"] < BAR


def test_masks_of_legacy_keras_go_from_stage_to_stage(legacy):
    one, staged = legacy["masked"]
    assert one[1] < one[0]
    np.testing.assert_allclose(staged, one, rtol=BAR)


def test_two_replicas_train_to_the_weights_of_one_process(result):
    one, two = result("alone"), result("processes")
    np.testing.assert_allclose(two.losses, one.losses, rtol=BAR)
    assert max(differences(one, two).values()) < BAR


def test_without_synchronised_norm_batchnorm_is_another_function(result):
    assert max(differences(result("alone_few"), result("local_norm")).values()) > 100 * BAR


@pytest.mark.parametrize("name", ["other", "accumulated", "synchronised_each", "resumed"])
def test_any_model_trains_to_the_weights_of_plain_code(side, result, name):
    one = result("plain_all_dense" if name == "synchronised_each" else "plain_mixed")
    two = result(OTHER[side] if name == "other" else name)
    np.testing.assert_allclose(two.losses, one.losses, rtol=BAR)
    assert max(differences(one, two).values()) < BAR


def test_pt_synchronised_norm_without_running_statistics_sees_the_global_batch(folders):
    one, two = (
        parallel.Result.load(folders["pt"] / f"{name}.npz")
        for name in ("plain_without_statistics", "without_statistics")
    )
    np.testing.assert_allclose(two.losses, one.losses, rtol=BAR)
    assert max(differences(one, two).values()) < BAR


@pytest.fixture(scope="module")
def mirrored():
    return workers.run("parallel.mirrored_fit", ("tf",))["tf"]


@pytest.mark.parametrize("kind", ["Accumulated", "Taught"])
def test_tf_fit_under_mirrored_strategy_equals_fit_on_one_device(mirrored, kind):
    one, two = mirrored[kind]
    assert (one["replicas"], two["replicas"]) == (1, 2)
    for what in ("losses", "weights"):
        np.testing.assert_allclose(two[what], one[what], rtol=BAR, atol=1e-6)
    assert two["losses"][-1] < two["losses"][0]


def test_tf_shards_of_fewer_samples_than_micro_batches_change_nothing(mirrored):
    assert "too few samples of a replica for 2 micro-batches" in mirrored["too few"]["said"]
    assert mirrored["too few"]["kept"]


def test_tf_an_argument_that_is_none_goes_to_every_replica_and_micro_batch(mirrored):
    without, with_none = mirrored["losses with None"]
    assert with_none == without > 0


def test_tf_a_share_of_double_precision_is_of_double_precision(mirrored):
    *replicas, one = map(np.array, mirrored["double precision"])
    for found in replicas:
        np.testing.assert_allclose(found, one, rtol=1e-13)


def test_both_frameworks_train_to_the_same_weights(evidence, folders):
    pt, tf = (parallel.Result.load(folders[side] / "processes.npz") for side in evidence)
    np.testing.assert_allclose(pt.losses, tf.losses, rtol=BAR)
    found = differences(pt, tf)
    # Keras 3 keeps the biased variance of a batch, PyTorch the unbiased one.
    assert max(v for name, v in found.items() if not name.endswith(".variance")) < BAR
    assert max(found.values()) < 1e-2


@pytest.mark.parametrize("name", ["processes", "other", "accumulated"])
def test_every_sample_is_trained_on_as_often_as_its_epochs_say(side, result, name):
    seen = result(OTHER[side] if name == "other" else name).seen
    expected = np.zeros(SAMPLES, np.int64)
    stream = parallel.batches(SAMPLES, global_batch=JOB["global_batch"], seed=JOB["seed"])
    for _ in range(JOB["steps"]):
        expected[next(stream)] += 1
    assert np.array_equal(seen, expected)


def test_a_resumed_run_trains_on_the_remaining_steps_alone(result):
    resumed = result("resumed")
    assert len(resumed.step_s) == JOB["steps"] - 4
    assert len(resumed.losses) == JOB["steps"]


def test_processes_that_are_launched_share_the_threads(words):
    assert words["threads"] == ["1", "1"]


def test_memory_is_that_of_each_process(result):
    found = result("processes")
    assert len(found.peak_bytes) == len(found.import_bytes) == 2
    if sys.platform == "linux":
        assert (found.peak_bytes > found.import_bytes).all()
        assert (found.import_bytes > 50e6).all()


def test_replicas_draw_other_dropout_masks_in_pytorch_and_equal_ones_in_keras(side, words):
    first, second = np.array(words["masks"])
    assert 10 < first.sum() < 54
    assert (first != second).any() == (side == "pt")


def test_a_resumed_run_draws_the_dropout_masks_of_an_undisturbed_one(result):
    whole, resumed = result("masks"), result("masks_resumed")
    assert len(resumed.step_s) == 2
    assert max(differences(whole, resumed).values()) == 0.0


# Shards ---------------------------------------------------------------------------------------


@pytest.fixture
def shares(evidence):
    """Of the mixed model: what is whole while each layer of the blocks runs, and in which dtype."""
    return lambda name: evidence["pt"]["whole"][name]


def test_a_block_of_fsdp_is_whole_only_while_it_runs(shares):
    """Beside it are the weights outside of blocks, of which one is used at both ends."""
    outside = 12 * 8 + 12 + 6 * 8 + 8
    block = 8 * 16 + 16 + 16 * 8 + 8
    total = outside + 3 * block
    found = [share for share, _ in shares("found")["seen"]]
    assert found == pytest.approx([(outside + block) / total] * 6)
    named = [share for share, _ in shares("named")["seen"]]
    others = (outside + 2 * block) / total  # what is in no block is whole all the time
    assert named == pytest.approx([others, others, 1, 1, others, others])
    assert shares("kept")["seen"][-1][0] == 1


def test_fsdp_computes_in_the_precision_and_keeps_float32(shares):
    assert {dtype for _, dtype in shares("found")["seen"]} == {"torch.float32"}
    assert {dtype for _, dtype in shares("half")["seen"]} == {"torch.bfloat16"}
    assert shares("half")["kept"] == ["torch.float32"]


def test_pt_a_model_that_was_loaded_in_evaluation_mode_trains(evidence):
    found = evidence["pt"]["modes"]
    assert found.keys() == {"data", "sharded", "tensor"}
    assert all(all(modes) and len(modes) > 5 for modes in found.values())


def test_pt_an_argument_that_is_none_goes_to_every_replica_and_micro_batch(evidence):
    without, with_none = evidence["pt"]["losses with None"]
    assert with_none == without > 0


def test_pt_statistics_of_half_width_inputs_are_those_of_float32(evidence):
    found = evidence["pt"]["half-width statistics"]
    output, mean, variance = found["apart"]
    assert found["dtype"] == "torch.bfloat16"
    assert output <= 2**-5  # of numbers of 2 to 4 a last digit, at most, and one more
    assert mean < 1e-4
    assert variance < 1e-3


@pytest.mark.parametrize("way", ["processes", "sharded", "pipeline", "tensor"])
def test_pt_a_loss_with_parameters_of_its_own_is_refused(evidence, way):
    """Replicas would train them apart."""
    kind, words = evidence["pt"]["weights of a loss"][way]
    assert kind == "NotImplementedError"
    assert words.startswith("the optimizer has parameters that the model has not, such as a loss's")


def test_pt_weights_are_those_that_numpy_has_without_extra_states(evidence):
    assert evidence["pt"]["kept weights"] == {"weight": "float32"}


def test_pt_a_norm_that_does_more_is_not_synchronised(evidence):
    """Its activation would be lost."""
    kind, words, changed = evidence["pt"]["a norm with an activation"]
    assert kind == "NotImplementedError"
    assert words.startswith("1 is a NormAct: what it does beside BatchNorm")
    assert not changed


def test_what_cannot_be_sharded_is_refused_before_anything_changes(evidence):
    words = evidence["pt"]
    assert words["a scalar"] == [
        "NotImplementedError",
        "temperature is a scalar: FSDP2 shards the first axis",
    ]
    assert words["no block"][0] == words["no precision"][0] == "ValueError"
    assert "no module is named 'layers.*'" in words["no block"][1]


def test_what_would_differ_from_one_process_is_refused(evidence):
    words = evidence["tf"]
    assert words["clipping"][0] == words["made already"][0] == "NotImplementedError"
    assert words["clipping"][1].startswith("global_clipnorm: Keras 3 does this on each replica")
    assert words["overwriting"][1].startswith("ema_overwrite_frequency: Keras 3 overwrites outside")
    for name in ("scaling", "a constant scale"):
        assert words[name][0] == "NotImplementedError"
        assert words[name][1].startswith(
            "a scaled loss: Keras 3 looks for overflow on each replica"
        )


# Bad input ------------------------------------------------------------------------------------

RIGHT = {
    "a batch that does not divide": "32 or 34",
    "more replicas than threads": "one each",
    "no replica": "replicas must be an integer of at least 1",
    "a batch larger than the data": f"2048 from {SAMPLES} samples",
    "no step": "steps must be",
    "an unknown variant": "no function 'ddp'",
    "micro-batches elsewhere": "no setting 'micro_batches': bucket_mb",
    "a precision elsewhere": "no setting 'precision': bucket_mb",
    "a last batch too small": "another global batch",
    "no such module": "no_such_module",
    "no such function": "no function 'nothing'",
    "no such data": "nowhere",
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_one_clear_error_before_anything_starts(words, name):
    kind, text = words[name]
    assert kind in ("ValueError", "FileNotFoundError")
    assert RIGHT[name] in text
    assert "\n" not in text


def test_what_a_machine_lacks_is_said(words):
    kind, text = words["lacking"]
    assert kind == "NotImplementedError"
    assert "GPU" in text or "TPU" in text


def test_what_a_replica_said_is_what_is_raised(words):
    kind, text = words["a replica that fails"]
    assert (kind, text) == ("RuntimeError", "no such thing as a model")


def test_a_port_in_use_is_named(words):
    kind, text, port = words["a port in use"]
    assert kind == "ValueError"
    assert f"port {port} of {parallel.LOOPBACK} is in use" in text


def test_who_can_reach_what_listens_everywhere_is_said(words):
    warning, port = words["a server that others reach"]
    assert f"port {port} of every interface, eth7 among them" in warning
    assert "firewall" in warning


@pytest.mark.parametrize("name", CONFIGS)
def test_a_malformed_tf_config_is_one_clear_error(evidence, name):
    kind, text = evidence["tf"][name]
    assert kind == "ValueError"
    assert text.startswith("TF_CONFIG")
    assert '"task": {"type": "worker", "index": 0}' in text  # what would be right
    assert "\n" not in text


# Processes ------------------------------------------------------------------------------------

# A process that has a child, says both numbers, and never ends.
PARENT = """
import subprocess, sys, os, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
with open(sys.argv[1], "a") as file:
    file.write(f"{os.getpid()} {child.pid}\\n")
time.sleep(600)
"""


def until(condition, *, seconds=30.0):
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if found := condition():
            return found
        time.sleep(0.02)
    raise AssertionError(f"not within {seconds} seconds")


def numbers(path: Path, lines: int) -> list[int]:
    text = path.read_text() if path.exists() else ""
    return [int(word) for word in text.split()] if text.count("\n") == lines else []


def gone(found: list[int]) -> bool:
    def ended(number):
        with contextlib.suppress(psutil.NoSuchProcess):
            return psutil.Process(number).status() == psutil.STATUS_ZOMBIE
        return True

    return all(ended(number) for number in found)


def test_when_one_process_fails_the_others_and_their_children_end(tmp_path):
    path = tmp_path / "numbers"
    written = f"os.path.exists({str(path)!r}) and os.path.getsize({str(path)!r})"
    wait = f"import os, time\nend = time.monotonic() + 60\nwhile not ({written}):\n"
    wait += "    if time.monotonic() > end: raise SystemExit('replica failed: the other is late')\n"
    failing = f"{wait}    time.sleep(.01)\nraise SystemExit('replica failed: out of luck')"
    commands = [[sys.executable, "-c", PARENT, str(path)], [sys.executable, "-c", failing]]
    with pytest.raises(RuntimeError, match=r"^out of luck$"):
        parallel.run([(command, dict(os.environ)) for command in commands])
    assert until(lambda: gone(until(lambda: numbers(path, 1))))


def test_of_two_that_fail_the_first_says_why(tmp_path):
    path = tmp_path / "said"
    cause = "import sys, time\nprint('replica failed: out of luck', file=sys.stderr, flush=True)\n"
    cause += f"open({str(path)!r}, 'w').close()\ntime.sleep(60)\nraise SystemExit(1)"
    follows = (
        f"import os, time\nend = time.monotonic() + 60\nwhile not os.path.exists({str(path)!r})"
    )
    follows += " and time.monotonic() < end: time.sleep(.01)\n"
    follows += "time.sleep(.05)\nraise SystemExit('replica failed: the other is gone')"
    commands = [[sys.executable, "-c", text] for text in (follows, cause)]
    with pytest.raises(RuntimeError, match=r"^out of luck$"):
        parallel.run([(command, dict(os.environ)) for command in commands])


def test_ctrl_c_ends_all_processes(tmp_path):
    path = tmp_path / "numbers"
    text = (
        "import os, sys\nfrom shared import parallel\n"
        f"command = [sys.executable, '-c', {PARENT!r}, {str(path)!r}]\n"
        "parallel.run([(command, dict(os.environ))] * 2)"
    )
    launcher = subprocess.Popen(
        [sys.executable, "-c", text], cwd=ROOT, stderr=subprocess.DEVNULL, start_new_session=True
    )
    try:
        found = until(lambda: numbers(path, 2))
        # pytest may itself run with the signal ignored, which children inherit.
        launcher.send_signal(signal.SIGINT)
        launcher.wait(30)
        assert until(lambda: gone(found))
    finally:
        launcher.kill()
        launcher.wait()


def test_a_launcher_that_is_killed_takes_its_processes_along(tmp_path):
    path = tmp_path / "numbers"
    replica = (
        "import os, sys, time\nfrom shared import parallel\nparallel.end_with_launcher()\n"
        "open(sys.argv[1], 'a').write(f'{os.getpid()}\\n')\ntime.sleep(600)"
    )
    text = (
        "import os, sys\nfrom shared import parallel\n"
        f"command = [sys.executable, '-c', {replica!r}, {str(path)!r}]\n"
        "parallel.run([(command, dict(os.environ))] * 2)"
    )
    launcher = subprocess.Popen([sys.executable, "-c", text], cwd=ROOT, start_new_session=True)
    try:
        found = until(lambda: numbers(path, 2))
    finally:
        launcher.kill()
        launcher.wait()
    assert until(lambda: gone(found))


def test_what_a_process_refuses_is_refused():
    refusing = "raise SystemExit('replica failed: NotImplementedError: not with this')"
    with pytest.raises(NotImplementedError, match=r"^not with this$"):
        parallel.run([([sys.executable, "-c", refusing], dict(os.environ))])


def test_a_process_that_ends_without_a_word_is_named(tmp_path):
    with pytest.raises(RuntimeError, match="status 3"):
        parallel.run([([sys.executable, "-c", "raise SystemExit(3)"], dict(os.environ))])


def test_free_ports_differ_and_are_free():
    ports = parallel.free_ports(8)
    assert len(set(ports)) == 8
    assert all(parallel.checked_port(parallel.LOOPBACK, port) == port for port in ports)
