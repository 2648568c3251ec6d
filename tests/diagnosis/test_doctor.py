"""What `twinbench doctor` says of planted facts, and of planted files in each framework."""

from __future__ import annotations

import gc
import importlib
import json
import os
import subprocess
import sys
from dataclasses import replace
from itertools import cycle
from math import inf
from types import SimpleNamespace

import numpy as np
import pytest

from bench.analysis.declared import complete
from bench.analysis.table import RATE
from bench.doctor import asking, command, gains, judges
from bench.doctor import host as hosts
from bench.doctor.host import Host
from bench.record import Metric
from shared import health, onednn
from shared.health import Batches, Denormals, Facts, Mode, NewShapes, Pools, Predicting, Products
from tests import records, workers
from tests.diagnosis.files import DENORMAL, HEALTHY, PLANTED, TRY

FRAMEWORKS = ("pt", "tf")
ALL = frozenset(("avx512_bf16", "avx512_vnni"))
HOST = Host(cores=8, physical=8, affinity=8, flags=ALL)
POOLS = Facts(pools=Pools({"intra-op": 8, "inter-op": 8}))
BATCHES = Batches(
    drawn=10,
    samples=32,
    shapes={"(8,)": 10},
    padding=None,
    to_longest=0.0,
    draw_s=1e-3,
    copy_s=1e-3,
)


def wrong(host=HOST, source="", seconds=None, **sides) -> list[str]:
    """The checks that find something wrong, with the framework of each."""
    found = judges.judged(host, sides, source, seconds or {})
    return [f"{one.check} {one.framework}".strip() for one in found if one.wrong]


# Planted facts ------------------------------------------------------------------------------------


def test_a_sound_setup_has_no_finding():
    sound = replace(POOLS, products=Products({"float32": 1e11, "bfloat16": 2e11}), batches=BATCHES)
    assert wrong(pt=sound, tf=sound) == []
    assert judges.quick(HOST) == []


@pytest.mark.parametrize(
    ("threads", "variables", "finding"),
    [
        (1, {"OMP_NUM_THREADS": "1"}, "pool too small pt"),
        (4, {"OMP_NUM_THREADS": "4"}, "pool too small pt"),
        (16, {"OMP_NUM_THREADS": "16"}, "pool too large pt"),
    ],
)
def test_a_pool_of_a_wrong_size_is_named_with_its_variable(threads, variables, finding):
    host = replace(HOST, variables=variables)
    known = Facts(pools=Pools({"intra-op": threads}, 1.0, 1e10, (7.8, 8.1)))
    assert wrong(host, pt=known, tf=POOLS) == [finding]
    (one,) = judges.judged(host, {"pt": known}, "", {})
    assert f"OMP_NUM_THREADS={threads}" in one.what
    measured = f"a matrix product runs at 10 GFLOP/s in a pool of {threads}, "
    measured += "and 7.8 to 8.1 times as fast in one of 8"
    assert one.evidence == measured
    assert "TensorFlow ignores this variable" in one.advice


@pytest.mark.parametrize(
    ("variables", "limit", "finding"),
    [
        ({"OMP_NUM_THREADS": "4,2"}, {}, ["pool too small"]),
        ({"OMP_NUM_THREADS": "16"}, {}, []),  # PyTorch stays at a thread a core
        (
            {"OMP_NUM_THREADS": "8", "TF_NUM_INTRAOP_THREADS": "2"},
            {"quota": 2.0},
            ["pool too large"],
        ),
        ({"TF_NUM_INTRAOP_THREADS": "16"}, {}, ["pool too large"]),
        ({"OMP_NUM_THREADS": "many"}, {}, []),
    ],
)
def test_variables_are_judged_before_any_framework_was_started(variables, limit, finding):
    host = replace(HOST, variables=variables, **limit)
    assert [one.check for one in judges.quick(host)] == finding


@pytest.mark.parametrize(
    ("gain", "is_shown"),
    [((1.04, 1.9), True), ((1.02, 1.9), False), ((0.7, 1.4), False), ((0.5, 0.8), False)],
)
def test_a_size_is_advised_only_where_all_turns_show_that_it_is_faster(gain, is_shown):
    """By more than 3%; under load ratios scatter, or say the opposite."""
    host = replace(HOST, variables={"OMP_NUM_THREADS": "1"})
    known = Facts(pools=Pools({"intra-op": 1}, 1.0, 1e10, gain))
    (one,) = judges.judged(host, {"pt": known}, "", {})
    assert one.wrong is is_shown
    assert ("set it to 8" in one.advice) is is_shown
    assert ("8 threads were not shown to be faster" in one.advice) is not is_shown
    assert (one.technique == "serving_threads") is is_shown


def test_pools_of_two_sizes_are_timed_in_turns(monkeypatch):
    """Another program takes half of the first three turns: the ratio of each turn is the same."""
    monkeypatch.setattr(health, "usable_threads", lambda: 8)
    asked = []

    def product_with(*, threads, size, seconds):
        asked.append(threads)
        return threads * 1e10 / (2 if len(asked) <= 6 else 1)

    kit = SimpleNamespace(product=lambda **_: 2e10, product_with=product_with)
    pools = health._pools(kit, {"intra-op": 2})
    assert pools.gain == (4.0, 4.0)
    assert asked == [8, 2] * health.TURNS


def test_variables_are_judged_where_a_framework_was_stopped_before_it_told():
    host = replace(HOST, variables={"OMP_NUM_THREADS": "1"})
    assert wrong(host, pt=Facts(), tf=Facts()) == ["pool too small pt"]


def test_threads_of_one_core_need_no_thread_each():
    host = replace(HOST, physical=4)
    assert wrong(host, pt=Facts(pools=Pools({"intra-op": 4}))) == []


@pytest.mark.parametrize("limit", [{"quota": 2.0}, {"affinity": 2}])
def test_a_pool_larger_than_the_quota_or_the_affinity_is_named(limit):
    host = replace(HOST, **limit)
    assert wrong(host, pt=POOLS, tf=POOLS) == ["pool too large pt", "pool too large tf"]
    assert hosts.words(host).startswith("2 of 8 cores (")


def test_a_quota_is_named_before_any_framework_was_started():
    host = replace(HOST, quota=2.0)
    (one,) = judges.quick(host)
    assert one.check == "quota"
    assert one.advice == "set OMP_NUM_THREADS=2 and TF_NUM_INTRAOP_THREADS=2"
    told = {"OMP_NUM_THREADS": "2", "TF_NUM_INTRAOP_THREADS": "2"}
    assert judges.quick(replace(host, variables=told)) == []


def test_a_pool_that_the_file_sets_is_named():
    known = replace(POOLS, set_by_file=Pools({"intra-op": 1}, 1.0, 1e10))
    (one,) = judges.judged(HOST, {"pt": known}, "", {})
    assert "(the file sets it)" in one.what
    assert one.advice == "torch.set_num_threads(8)"


@pytest.mark.parametrize(
    ("source", "is_wrong"), [("with torch.autocast('cpu', torch.bfloat16):", True), ("", False)]
)
def test_missing_instructions_are_wrong_where_the_file_needs_them(source, is_wrong):
    host = replace(HOST, flags=frozenset(("avx2",)))
    products = Products({"float32": 1e11, "bfloat16": 2e9})
    found = judges.judged(host, {"pt": replace(POOLS, products=products)}, source, {})
    (one,) = [one for one in found if one.check == "no instructions for bfloat16"]
    assert one.wrong is is_wrong
    assert one.evidence.endswith("speed of a bfloat16 product over float32: 0.02 in PyTorch")


def test_what_the_system_does_not_list_is_not_said_to_be_missing():
    assert judges.judged(replace(HOST, flags=None), {"pt": POOLS}, "bfloat16", {}) == []


@pytest.mark.parametrize(
    ("variables", "finding"),
    [
        ({"TORCHDYNAMO_DISABLE": "1"}, "switched off pt"),
        ({"TORCHDYNAMO_DISABLE": "0"}, None),
        ({"ONEDNN_MAX_CPU_ISA": "SSE41"}, "limited instructions"),
    ],
)
def test_variables_that_switch_something_off_are_named(variables, finding):
    assert wrong(replace(HOST, variables=variables), pt=POOLS) == ([finding] if finding else [])


OLD = replace(HOST, flags=frozenset(("avx2",)))


@pytest.mark.parametrize(
    ("host", "variable", "is_named"),
    [
        (HOST, None, False),
        (HOST, "0", True),
        (OLD, None, True),
        (OLD, "0", True),
        (OLD, "1", False),
    ],
)
def test_tensorflow_without_onednn_is_named_before_it_was_started(host, variable, is_named):
    variables = {} if variable is None else {onednn.VARIABLE: variable}
    found = judges.quick(replace(host, variables=variables))
    assert [one.check for one in found] == ["without oneDNN"] * is_named


@pytest.mark.parametrize(("with_s", "is_wrong"), [(3e-3, True), (9e-3, False), (None, True)])
def test_a_convolution_says_what_onednn_would_gain(with_s, is_wrong):
    facts = {"tf": replace(POOLS, without_onednn_s=10e-3)}
    (one,) = judges.onednn(OLD, 10e-3, with_s)
    assert one.wrong is is_wrong
    assert one.advice.startswith("set TF_ENABLE_ONEDNN_OPTS=1" if is_wrong else "nothing")
    measured = f"takes 10 ms, with oneDNN {with_s and with_s * 1e3:.3g} ms" if with_s else "not set"
    assert one.evidence.endswith(measured)
    assert one in judges.judged(OLD, facts, "", {}, with_s)
    assert wrong(OLD, tf=POOLS) == []


SHAPES = {f"({n},)": 1 for n in range(16, 26)}


@pytest.mark.parametrize(
    ("facts", "finding"),
    [
        ({"batches": replace(BATCHES, workers=9)}, "too many data workers"),
        ({"batches": replace(BATCHES, shapes=SHAPES)}, "shapes that vary"),
        ({"batches": replace(BATCHES, shapes={"(8,)": 9, "(7,)": 1})}, None),  # the last batch
        ({"batches": replace(BATCHES, padding=0.4)}, "padding"),
        ({"batches": replace(BATCHES, padding=0.1)}, None),
        ({"modes": (Mode("anomaly", 3e-3, 1e-3),)}, "anomaly pt"),
        ({"modes": (Mode("run_eagerly", 1e-3, 1e-3),)}, None),  # which costs nothing
        ({"denormals": Denormals(0.5, 0.0, 9e-3, 1e-3, "step")}, "denormal numbers pt"),
        ({"denormals": Denormals(0.5, 0.0, 1e-3, 1e-3, "step")}, None),  # which cost nothing
        ({"denormals": Denormals(0.0, 0.0, 9e-3, 1e-3, "step")}, None),  # chance
        ({"predicting": Predicting(1, 4e-2, 1e-4)}, "predict in a loop tf"),
        ({"predicting": Predicting(4096, 4e-2, 3e-2)}, None),
        (
            {"batches": replace(BATCHES, by_row=True, calls=32, draw_s=9e-3), "step_s": 1e-3},
            "loader by rows pt",
        ),
        # Its rows cost little beside the step.
        ({"batches": replace(BATCHES, by_row=True, calls=32, draw_s=9e-3), "step_s": 1.0}, None),
    ],
)
def test_a_planted_cause_is_named_and_no_other(facts, finding):
    assert wrong(pt=replace(POOLS, **facts)) == ([finding] if finding else [])


def test_what_new_shapes_take_is_said():
    known = replace(
        POOLS, batches=replace(BATCHES, shapes=SHAPES), new_shapes=NewShapes(3, 1.2, 0.03)
    )
    (one,) = judges.judged(HOST, {"tf": known}, "", {})
    assert "3 steps at new shapes take 1.2e+03 ms, at known ones 30 ms" in one.evidence


@pytest.mark.parametrize(
    ("asked", "seconds", "is_wrong"),
    [
        ("torch", {"torch": 0.3, "tensorflow": 0.1}, True),
        ("torch", {"torch": 0.1, "tensorflow": 0.1}, False),
        ("torch", {}, True),
        ("tensorflow", {}, None),
        ("", {}, None),
    ],
)
def test_another_backend_of_keras_is_named_by_what_it_costs(asked, seconds, is_wrong):
    found = list(judges.keras_backend(asked, seconds))
    assert [one.wrong for one in found] == ([] if is_wrong is None else [is_wrong])


def test_a_finding_has_the_gain_of_its_technique_from_a_record():
    batches = replace(BATCHES, by_row=True, calls=32, draw_s=9e-3)
    (one,) = judges.judged(HOST, {"pt": replace(POOLS, batches=batches)}, "", {})
    records = {"docs": gains.load(gains.DOCS)}
    gain = gains.with_gain(one, records).gain
    assert gain.startswith("PyTorch: in_memory, PyTorch ")
    assert "times the samples/s" in gain
    assert "(docs: " in gain
    assert gains.with_gain(one, {}).gain.endswith("--technique in_memory (no record)")


BEST = {"value": 30.0, "unit": "samples/s", "ci": (29.0, 31.0)}


@pytest.mark.parametrize(
    ("facts", "host", "technique", "variant"),
    [
        ({}, {"quota": 2.0}, "serving_threads", "quota_sized"),
        ({"batches": replace(BATCHES, shapes=SHAPES)}, {}, "varying_lengths", "packed"),
        ({"batches": replace(BATCHES, padding=0.4)}, {}, "varying_lengths", "packed"),
    ],
)
def test_a_finding_names_the_technique_that_serves_it(facts, host, technique, variant):
    """With the gain over what its row is compared with; where no record has it, how to measure."""
    (one, *_) = judges.judged(replace(HOST, **host), {"pt": replace(POOLS, **facts)}, "", {})
    assert one.technique == technique
    usual = records.case("base", technique=technique, metrics={RATE: Metric(**BEST)})
    slow = usual.but(
        id="slow",
        variant="quota_ignored",
        role="variant",
        metrics={RATE: Metric(value=10.0, unit="samples/s", ci=(9.0, 11.0))},
    )
    if variant == "packed":  # it is compared with the baseline
        usual = usual.but(metrics=slow.metrics)
    best = slow.but(id="best", variant=variant, metrics={RATE: Metric(**BEST)})
    run = records.record([usual, slow, complete(best)])
    gain = gains.with_gain(one, {"docs": run}).gain
    assert f"{technique}, PyTorch " in gain
    assert "3.00 times the samples/s (" in gain
    assert "accuracy not measured" in gain
    unmeasured = gains.with_gain(one, {"docs": records.record()}).gain
    assert unmeasured.startswith(f"{technique} was not measured; measure it with pytest bench/")


def test_nothing_found_is_one_line():
    (line,) = command.text(HOST, [], {"PyTorch": {"intra-op": 8}}, [], 9.4)
    assert line == "Nothing found (8 cores; threads: PyTorch 8; 9 s)"


# Batches ------------------------------------------------------------------------------------------

RANDOM = np.random.default_rng(0)
TOKENS = RANDOM.integers(1, 100, (8, 40))
LENGTHS = np.arange(5, 45, 5)[:, None]
PADDED = np.where(np.arange(40) < LENGTHS, TOKENS, 0)
SHARE = 1 - LENGTHS.mean() / 40


@pytest.mark.parametrize(
    ("batch", "share"),
    [
        ((PADDED, TOKENS), SHARE),
        ((PADDED[:, ::-1], TOKENS), SHARE),  # on the left
        ((TOKENS, np.where(PADDED == 0, -100, TOKENS)), SHARE),
        (({"ids": TOKENS, "attention_mask": PADDED != 0}, TOKENS), SHARE),
        ((RANDOM.random((8, 40, 3)).astype("f4") * (PADDED != 0)[..., None], LENGTHS), SHARE),
        ((TOKENS, TOKENS), None),
        ((np.eye(10, dtype=int), np.arange(10)), None),  # one-hot is no padding
        ((RANDOM.random((8, 3, 32, 32)), np.arange(8)), None),
    ],
)
def test_padding_is_seen_in_values_masks_and_targets(batch, share):
    assert health.padding(batch) == (None if share is None else pytest.approx(share))


def test_denormal_numbers_are_counted_without_arithmetic():
    array = np.array([0.0, 1.0, 1e-39, -1e-44], np.float32)
    assert health.denormal_share([array]) == 0.5
    assert health.denormal_share([array.astype(np.float64)]) == 0.0


# Files in each framework --------------------------------------------------------------------------


@pytest.fixture
def facts(framework, impl, tmp_path, capsys, monkeypatch):
    """`facts(text)`: what a process tells of a file, where a pool of another size is faster."""
    kit = importlib.import_module(f"{impl.__name__}.kit.health")
    rates = cycle((2e10, 1e10))
    monkeypatch.setattr(kit, "product_with", lambda **_: next(rates))
    threads = kit.pools()["intra-op"]

    def tell(text: str) -> Facts:
        gc.collect()  # models of the tests before
        path = tmp_path / "planted.py"
        path.write_text(text)
        capsys.readouterr()
        health.tell_of_file(kit, str(path), kit.pools())
        told = asking.decoded(capsys.readouterr().out)
        assert told.skipped == {}
        return told

    yield tell
    if framework == "pt":
        torch = importlib.import_module("torch")
        torch.set_num_threads(threads)
        torch.autograd.set_detect_anomaly(False)


def _of(cause: str):
    """A cause, and the frameworks that it is planted in."""
    sides = [side for side in FRAMEWORKS if (side, cause) in PLANTED]
    return pytest.param(cause, marks=pytest.mark.only(*sides))


@pytest.mark.parametrize("cause", [*map(_of, sorted({cause for _, cause in PLANTED}))])
def test_a_planted_cause_in_a_file_is_named(facts, framework, cause):
    text, finding = PLANTED[framework, cause]
    found = judges.judged(HOST, {framework: facts(text)}, text, {})
    assert finding in [one.check for one in found if one.wrong]
    assert all(one.evidence for one in found)


@pytest.mark.parametrize("of", ["diagnose", "try"])
def test_a_healthy_file_has_no_finding(facts, framework, of):
    text = HEALTHY[framework] if of == "diagnose" else TRY
    assert judges.judged(HOST, {framework: facts(text)}, text, {}) == []


def test_denormal_weights_are_counted_and_timed(facts, framework):
    """Not every processor is slower with them, so that what they cost is planted above."""
    known = facts(DENORMAL[framework]).denormals
    assert known.weights > 0.5
    assert min(known.with_s, known.without_s) > 0
    (one,) = judges.denormals(framework, known)
    assert one.check == "denormal numbers"
    assert ("TensorFlow flushes them" in one.advice) is (framework == "tf")


# Processes ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("side", ["pt", "tf"])
def test_omp_num_threads_sizes_pytorch_s_pool_and_not_tensorflow_s(side):
    cores = len(os.sched_getaffinity(0))
    clean = {k: v for k, v in os.environ.items() if not k.endswith("_THREADS")}
    clean |= asking.QUIET | {"OMP_NUM_THREADS": "1"}
    code = f"from {side}_impl.kit import health; print(health.pools()['intra-op'])"
    given = {"capture_output": True, "text": True, "check": True, "cwd": workers.ROOT}
    done = subprocess.run([sys.executable, "-c", code], env=clean, **given)
    assert int(done.stdout.split()[-1]) == (1 if side == "pt" else cores)


@pytest.fixture
def forked(monkeypatch):
    """Frameworks are asked by a fork of what has imported them; other runtimes are not asked."""

    def run(words, variables, seconds, given=""):
        side = words[2].partition("_")[0]
        if side not in FRAMEWORKS:
            return 0, "", ""
        done = workers.parent(side).run(*words[2:])
        return done.returncode, done.stdout, done.stderr

    monkeypatch.setattr(asking, "_run", run)
    monkeypatch.setattr(command.hosts, "here", lambda: HOST)


def test_the_command_names_what_a_file_does_wrong(forked, tmp_path, capsys):
    path = tmp_path / "mine.py"
    path.write_text(PLANTED["pt", "rows"][0])
    assert command.main([str(path), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert "loader by rows" in [one["check"] for one in told["findings"]]
    assert [one for one in told["remarks"] if "Other programs" not in one] == []


def test_a_framework_that_is_not_installed_is_one_line_and_the_rest_goes_on(monkeypatch, capsys):
    def run(words, variables, seconds, given=""):
        if words[2].startswith("pt"):
            return 1, "", "ModuleNotFoundError: No module named 'torch'"
        if words[2].startswith("bench"):
            return 0, "", ""
        return 0, f"{health.MARK}{json.dumps({'version': '2'})}\n", ""

    monkeypatch.setattr(asking, "_run", run)
    monkeypatch.setattr(command.hosts, "here", lambda: HOST)
    assert command.main([]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("Nothing found (8 cores; ")
    assert lines[1].startswith("PyTorch is not installed: it is not checked")


def test_a_process_that_takes_too_long_is_stopped_and_what_it_told_is_kept():
    line = f"{health.MARK}{json.dumps({'version': '2'})}"
    code = f"print({line!r}, flush=True); import time; time.sleep(600)"
    status, out, _ = asking._run([sys.executable, "-c", code], dict(os.environ), 3.0)
    assert status is None
    assert asking.decoded(out).version == "2"


@pytest.mark.parametrize("text", ["x = 1\n", "def make(:\n"])
def test_a_file_of_nothing_is_one_line(text, tmp_path, capsys):
    path = tmp_path / "mine.py"
    path.write_text(text)
    assert command.main([str(path)]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_what_no_process_needs_is_said_before_try_and_diagnose(monkeypatch, capsys):
    monkeypatch.setattr(hosts, "here", lambda: replace(HOST, quota=inf))
    command.warn()
    assert capsys.readouterr() == ("", "")
    monkeypatch.setattr(hosts, "here", lambda: replace(HOST, variables={"OMP_NUM_THREADS": "1"}))
    command.warn()
    assert "1 of 8 threads (OMP_NUM_THREADS=1)" in capsys.readouterr().err
