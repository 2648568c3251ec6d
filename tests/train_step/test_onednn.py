"""oneDNN computes where it is asked for and nowhere else, with the same results."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest

from bench.harness.plan import Work
from bench.train_step import bench_onednn as bench_file
from shared.onednn import VARIABLE, is_default
from shared.specs import TASKS, CNNSpec
from shared.weights import init_weights
from tests.frameworks import apart

FRAMEWORKS = ("pt", "tf")
PT, TF = pytest.mark.only("pt"), pytest.mark.only("tf")
CNN = CNNSpec((8, 8, 16), ((16, 1), (32, 2)), num_classes=3)
TASK = replace(TASKS["digits-cnn"], model=CNN)


@pytest.fixture
def batch(kit):
    random = np.random.default_rng(3)
    images = random.normal(size=(6, *CNN.input_shape)).astype(np.float32)
    return kit.data.to_device(images, random.integers(0, 3, 6))


def work_of(variant, **settings):
    return Work(TASK, variant, settings, 6, init_weights(CNN, seed=1))


def losses(kit, step, batch):
    return [kit.runtime.to_float(step(*batch)) for _ in range(5)]


def test_what_computes_changes_no_loss(impl, kit, technique, batch, agrees):
    """In TensorFlow of this process's library, which is the one that there is."""
    plain = losses(kit, bench_file.prepare(impl, work_of("default")).step, batch)
    step = bench_file.prepare(impl, work_of("default")).step
    enabled = kit.runtime.onednn() if impl.__name__ == "tf_impl" else False
    switched = losses(kit, technique.with_onednn(step, enabled=enabled), batch)
    assert apart(switched, plain) < 1e-5
    assert switched[-1] < 0.99 * switched[0]
    agrees("five steps", {"losses": switched}, 1e-4)


@PT
def test_no_operator_of_onednn_runs_without_it_and_the_setting_returns(impl, kit, technique, batch):
    step = bench_file.prepare(impl, work_of("default")).step
    count = importlib.import_module("pt_impl.kit.operators").onednn_operators
    assert count(lambda: step(*batch)) >= 2  # one for each convolution
    without = technique.with_onednn(step, enabled=False)
    assert count(lambda: without(*batch)) == 0
    assert kit.runtime.onednn()
    with pytest.raises(TypeError):
        without()
    assert kit.runtime.onednn()


@PT
def test_the_benchmark_sees_an_operator_that_should_not_be(impl, batch):
    work = work_of("without_onednn", enabled=False)
    row = bench_file.prepare(impl, work)
    assert bench_file.took_effect(impl, work, row, batch) == ({"onednn_operators": 0}, None)
    plain = bench_file.prepare(impl, work_of("default"))
    _, reason = bench_file.took_effect(impl, work, plain, batch)
    assert reason.endswith("operators of oneDNN ran")


@TF
def test_another_state_than_this_process_has_is_refused(kit, technique):
    here = kit.runtime.onednn()
    assert technique.with_onednn(len, enabled=here) is len
    with pytest.raises(ValueError, match=f"set {VARIABLE}={not here:d} before it is imported"):
        technique.with_onednn(len, enabled=not here)


PROGRAM = """
import numpy as np
import tensorflow as tf
from tf_impl.kit import operators, runtime
from tf_impl.train_step.onednn import with_onednn

kernel = tf.constant(np.random.default_rng(0).normal(size=(3, 3, 16, 16)), tf.float32)
convolve = tf.function(lambda x: tf.nn.relu(tf.nn.conv2d(x, kernel, 1, "SAME")))
call = with_onednn(convolve, enabled={enabled})
x = tf.constant(np.random.default_rng(1).normal(size=(4, 8, 8, 16)), tf.float32)
print(runtime.onednn(), operators.onednn_operators(lambda: call(x)), float(tf.norm(call(x))))
"""


def told(enabled, variables):
    environment = {name: value for name, value in os.environ.items() if name != VARIABLE}
    command = [sys.executable, "-c", PROGRAM.format(enabled=enabled)]
    given = {"env": environment | variables, "capture_output": True, "text": True, "check": True}
    on, operators, norm = subprocess.run(command, **given).stdout.split()
    return on == "True", int(operators), float(norm)


def test_the_variable_decides_which_library_computes_in_tensorflow():
    pytest.importorskip("tensorflow", exc_type=ImportError)
    on, operators, norm = told(True, {VARIABLE: "1"})
    assert (on, operators > 0) == (True, True)
    off, none, same = told(False, {VARIABLE: "0"})
    assert (off, none) == (False, 0)
    assert same == pytest.approx(norm, rel=1e-5)
    # Without the variable TensorFlow's rule is the one that `is_default` has written down.
    default, *_ = told(is_default(), {})
    assert default is is_default()


@pytest.mark.parametrize(
    ("words", "on"),
    [
        ("flags : fpu avx2 avx512f", False),
        ("flags : fpu avx2 avx512f avx512_vnni", True),
        ("flags : fpu avx2 avx_vnni", True),
        ("CPU implementer : 0x41\nCPU part : 0xd40", True),
        ("CPU implementer : 0x41\nCPU part : 0xd0c", False),
    ],
)
def test_the_processor_decides_where_no_variable_does(tmp_path, words, on):
    (tmp_path / "cpuinfo").write_text(words)
    assert is_default(tmp_path / "cpuinfo") is on


def test_a_row_that_would_be_the_baseline_says_so(impl, technique):
    default = impl.__name__ == "pt_impl" or is_default()
    state = "on" if default else "off"
    with pytest.raises(NotImplementedError, match=f"has oneDNN {state} by default"):
        bench_file.prepare(impl, work_of("row", enabled=default))
