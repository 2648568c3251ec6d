"""Files with weights of 8 or 4 bits predict what rounded weights do, and are small."""

from __future__ import annotations

import functools
import os
import pickle
import re
import warnings
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from bench.compression import bench_weight_quantization as bench
from bench.harness.plan import Work
from shared.specs import TASKS, GPTSpec
from shared.weights import init_weights
from tests.compression import quick, teaching
from tests.flipped import flipped
from tests.frameworks import apart

FRAMEWORKS = ("pt", "tf")
MODELS = "quantization"
PT, TF = (pytest.mark.only(name) for name in FRAMEWORKS)
SPEC = GPTSpec(vocabulary=64, sequence_length=8, width=64, heads=4, layers=1)
WEIGHTS = sum((64 * 192, 64 * 64, 64 * 256, 256 * 64, 64 * 64))  # of its kernels
CODES = np.random.default_rng(7).integers(0, 64, (6, 8))
KERNEL = np.random.default_rng(7).normal(size=(64, 48)).astype(np.float32)
GROUP = 32


def start():
    return {name: 2 * value for name, value in init_weights(SPEC, seed=1).items()}


def write(technique, models, bits, model, x, path):
    """The file of the model with weights of so many bits."""
    rounded = model if bits == 32 else getattr(technique, f"apply_int{bits}")(model, x)
    return models.quantized_files.save_quantized(rounded, x, path)


@pytest.fixture(scope="module")
def gpt(kit, models):
    """A transformer, its inputs and its logits."""
    model, codes = kit.models.build(SPEC, start()), models.tensor(CODES)
    return model, codes, models.numpy(kit.training.make_predict(model)(codes))


@pytest.fixture(scope="module")
def files(technique, models, gpt, tmp_path_factory):
    """`files(bits)`: a file of the transformer, its reader, what it predicts and holds."""

    @functools.cache
    def make(bits):
        model, codes, _ = gpt
        path = tmp_path_factory.mktemp("files") / str(bits)
        write(technique, models, bits, model, codes[:1], path)
        with quick.without_code():  # layers of each width are compiled below
            predict = models.quantized_files.load_quantized(path)
            logits = models.numpy(predict(codes))
        held = models.integers.tensor_bytes(path)
        return SimpleNamespace(path=path, predict=predict, logits=logits, held=held)

    return make


@pytest.fixture(scope="module")
def kernels(technique, models, tmp_path_factory):
    """`kernels(bits)`: a file of a dense layer, and its kernel: what it makes of an identity."""

    @functools.cache
    def make(bits):
        path = tmp_path_factory.mktemp("kernels") / "file"
        identity = models.tensor(np.eye(64, dtype=np.float32))
        write(technique, models, bits, models.dense(KERNEL), identity, path)
        return path, models.numpy(models.quantized_files.load_quantized(path)(identity))

    return make


# What is rounded ---------------------------------------------------------------------------------


def test_int8_rounds_each_output_to_its_own_scale(kernels, framework):
    """As a NumPy oracle does; Keras's largest level is 127, torchao's half a step above.

    There the largest weight of an output lies half-way between two levels, and may go to either.
    """
    rounded, most = kernels(8)[1], np.abs(KERNEL).max(0)
    step = most / (127.5 if framework == "pt" else 127)
    oracle = np.clip(np.round(KERNEL / step), -128, 127) * step
    other = np.abs(rounded - oracle) > 1e-5
    assert np.all(np.abs(KERNEL)[other] == np.broadcast_to(most, (64, 48))[other])
    assert np.all(np.abs(rounded - KERNEL) <= 0.501 * step)
    assert np.sum(other) <= 48
    assert apart(oracle, KERNEL) > 1e-3


def test_int4_has_sixteen_levels_in_each_group_of_inputs(kernels):
    rounded = kernels(4)[1]
    for first in range(0, len(KERNEL), GROUP):
        group, whole = rounded[first : first + GROUP], KERNEL[first : first + GROUP]
        assert max(len(np.unique(np.round(column, 4))) for column in group.T) <= 16
        step = (whole.max(0) - whole.min(0)) / 15
        assert np.all(np.abs(group - whole) <= 1.05 * step)
    assert 0.02 < apart(rounded, KERNEL) < 0.15


# Files -------------------------------------------------------------------------------------------


def test_files_predict_what_the_model_does_as_far_as_their_bits_go(
    kit, technique, models, gpt, files, agrees
):
    model, codes, wanted = gpt
    whole, eight, four = (apart(files(bits).logits, wanted) for bits in (32, 8, 4))
    assert whole < 1e-5 < eight < 0.02 < four < 0.3
    in_memory = models.evaluate(technique.apply_int8(model, codes[:1]), codes)
    assert apart(models.numpy(in_memory), files(8).logits) < 1e-5
    assert teaching.farthest(teaching.weights_of(kit, model), start()) == 0
    agrees("float32", {"logits": files(32).logits}, 1e-4)
    agrees("int8", {"logits": files(8).logits}, 0.02)


@pytest.mark.parametrize("bits", [8, 4])
def test_files_shrink_and_hold_the_kernels_as_integers(files, bits):
    """Scales and zero points come on top."""
    whole, narrow = files(32), files(bits)
    integers = narrow.held.get("int8", 0) + narrow.held.get("uint8", 0)
    assert WEIGHTS * bits // 8 <= integers < 1.15 * WEIGHTS * bits // 8
    assert whole.held["float32"] - narrow.held["float32"] > 0.7 * 4 * WEIGHTS
    assert narrow.path.stat().st_size < 0.55 * whole.path.stat().st_size
    assert not {"int8", "uint8"} & whole.held.keys()


@PT
def test_pytorch_multiplies_4_bit_weights_with_a_kernel_for_them(models, gpt, files):
    ran = models.integers.integer_operators(files(4).predict, files(4).path, gpt[1])
    assert sum(ran.values()) == 5
    assert all("int4pack" in name for name in ran)


@pytest.mark.parametrize(("bits", "size"), [(32, 256), (8, 256), (4, 256), (8, 48), (8, 64)])
def test_a_call_reads_integers_and_not_floats_that_were_made_of_them(
    technique, models, framework, tmp_path, bits, size
):
    """A compiler that folds the conversion of a constant has float weights when it predicts.

    TensorFlow's does so with small kernels.
    """
    kernel = np.random.default_rng(7).normal(size=(size, size)).astype(np.float32)
    x = models.tensor(np.ones((3, size), np.float32))
    path = write(technique, models, bits, models.dense(kernel), x, tmp_path / "file")
    folded = bits == 32 or (size < 256 and framework == "tf")
    weights = 0 if folded else size * size * bits // 8
    for rows in (3, 1):
        read = sum(models.integers.integer_bytes_read(path, x[:rows]).values())
        assert weights <= read <= 1.1 * weights


def test_a_file_takes_the_sizes_of_its_example_and_any_number_of_samples(
    technique, models, tmp_path
):
    x = np.ones((2, 3, 64), np.float32)
    model = models.dense(KERNEL, (None,))
    path = write(technique, models, 32, model, models.tensor(x), tmp_path / "file")
    with quick.without_code():
        predict = models.quantized_files.load_quantized(path)
        assert predict(models.tensor(x[[0, 0, 0]])).shape[0] == 3
        message = (
            "inputs must be float32 [any, 3, 64], as those of the example, not float32 [2, 4, 64]"
        )
        with pytest.raises(ValueError, match=re.escape(message)):
            predict(models.tensor(x[:, [0, 0, 0, 0]]))


class Bomb:
    """Makes a folder when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def test_damaged_and_foreign_files_get_one_clear_line_and_run_nothing(models, kernels, tmp_path):
    whole, mark = kernels(8)[0].read_bytes(), tmp_path / "mark"
    contents = {f"first {share}%": whole[: len(whole) * share // 100] for share in (0, 30, 99)}
    contents |= {"text": b"no model\n" * 99, "bomb": pickle.dumps(Bomb(mark))}
    contents |= models.programs(mark) | {"a bit inside of the weights": flipped(whole)}
    for name, content in contents.items():
        (tmp_path / "damaged").write_bytes(content)
        with pytest.raises(ValueError, match="/damaged is not a complete program file: ") as caught:
            models.quantized_files.load_quantized(tmp_path / "damaged")
        assert "\n" not in str(caught.value), name
        assert not mark.exists(), name
    with pytest.raises(FileNotFoundError):
        models.quantized_files.load_quantized(tmp_path / "none")


# Traits of models that the zoo has not -----------------------------------------------------------


@PT
def test_pt_only_layers_that_are_called_are_rounded(technique, models, tmp_path):
    path = write(technique, models, 8, *models.encoder(), tmp_path / "file")
    zero_points = 32 + 64
    assert models.integers.tensor_bytes(path)["int8"] == 2 * 32 * 64 + zero_points


@PT
def test_pt_weights_that_are_computed_are_not_rounded(technique, models):
    x = models.tensor(np.ones((2, 4), np.float32))
    quantized = technique.apply_int8(models.normed(), x)
    assert [type(layer.weight) is not type(x) for layer in quantized] == [False, True]


@TF
@pytest.mark.parametrize(("kind", "integers"), [("beside", ["called"]), ("within", ["inside"])])
def test_tf_layers_that_time_distributed_wraps_stay_float32_and_are_named(
    technique, models, kind, integers
):
    """A model within calls its layers, which are rounded."""
    model, x = models.distributed(kind), models.tensor(ROWS)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always", UserWarning)
        rounded = technique.apply_int8(model, x)
    assert models.in_integers(rounded) == integers
    assert 0 < apart(models.numpy(rounded(x)), models.numpy(model(x))) < 0.02
    lines = sorted({str(one.message) for one in said})
    assert len(lines) == (kind == "beside")
    assert all(line.startswith("left in float32: wrapped: TimeDistributed") for line in lines)


# Bad input ---------------------------------------------------------------------------------------

X = np.ones((2, 48), np.float32)
NARROW, ROWS = np.ones((48, 4), np.float32), np.ones((4, 3, 16), np.float32)


def refused(bits, make, x=X, change=lambda part: part):
    """A call that writes the model that the helpers make of a name."""

    def call(technique, models, path):
        model = models.dense(NARROW) if make == "dense" else getattr(models, make)()
        write(technique, models, bits, change(model), change(models.tensor(x)), path)

    return call


REFUSALS = [
    (refused(8, "nothing", np.ones((2, 16, 16, 1), np.float32)), "the model has no "),
    (refused(8, "dense", X[:0]), "inputs must have samples"),
    (refused(8, "dense", X[:, :7]), "the model takes no samples of float32 [7]: "),
    pytest.param(
        refused(4, "dense"), "no linear layer with multiples of 32 inputs and 16 outputs", marks=PT
    ),
    pytest.param(
        refused(8, "dense", change=lambda part: part.double()),
        "torchao rounds no weights of float64",
        marks=PT,
    ),
    pytest.param(refused(8, "not_rebuilt"), "Keras cannot rebuild the model", marks=TF),
    pytest.param(
        lambda t, m, path: t.apply_int8(m.distributed("alone"), m.tensor(ROWS)),
        "the model has no dense layer outside of TimeDistributed",
        marks=TF,
    ),
]


@pytest.mark.parametrize(("call", "message"), REFUSALS)
def test_a_refusal_says_why_and_writes_nothing(technique, models, tmp_path, call, message):
    with pytest.raises((ValueError, NotImplementedError), match=re.escape(message)) as caught:
        call(technique, models, tmp_path / "file")
    assert "\n" not in str(caught.value)
    assert list(tmp_path.iterdir()) == []


# The benchmark -----------------------------------------------------------------------------------


def test_the_benchmark_sees_weights_that_were_folded(impl, kit, models, tmp_path, monkeypatch):
    codes, wide = CODES[[0] * 8], replace(SPEC, width=192, heads=4)
    for name in ("x", "y"):
        np.save(tmp_path / f"train_{name}.npy", codes)
    work = Work(
        replace(TASKS["text-gpt"], model=wide),
        "int8_weights",
        {"apply": "apply_int8"},
        8,
        init_weights(wide, seed=1),
        mode="predict",
        data=str(tmp_path),
        folder=tmp_path,
    )
    prepared, path = bench.prepare(impl, work), tmp_path / "int8_weights"
    prepared.write(path)
    with quick.without_code():
        deployed = replace(prepared, predict=prepared.read(path), artifact=path)
    batch = kit.data.to_device(codes, codes)
    evidence, reason = bench.took_effect(impl, work, deployed, batch)
    assert reason is None
    assert evidence["integer_bytes_read"]["int8"] > 0
    monkeypatch.setattr(models.integers, "integer_bytes_read", lambda *_: {})
    _, reason = bench.took_effect(impl, work, deployed, batch)
    assert reason.startswith("a call reads {} bytes of integers, not ")
