"""Kernels have the variance of the papers, and what is left is named."""

from __future__ import annotations

import functools
import math

import numpy as np
import pytest

from tests import workers
from tests.recipes.samples import same

FRAMEWORKS = ("pt", *workers.keras())
MODELS = "recipes"
# What meets in one output, and what one input goes into, by the shapes of the layers.
FANS = {
    "dense": (200, 300),
    "convolution": (16 * 9, 64 * 9),
    "grouped": (8 * 9, 16 * 9),
    "depthwise": (25, 2 * 25),
    "transposed": (32 * 16 / 4, 48 * 16),
    **dict.fromkeys(("query", "key", "value", "out"), (64, 64)),
    **dict.fromkeys(("lstm input", "gru input"), (48, 32)),
}
RECURRENT = ("lstm recurrent", "gru recurrent")
RECTIFIED = ("dense", "convolution", "grouped", "depthwise", "transposed")


@pytest.fixture(scope="module")
def drawn(technique, models):
    """`drawn(scheme)`: the matrices (inputs, outputs) of each kernel, by name."""

    @functools.cache
    def draw(scheme, **settings):
        layers = models.layers_of_each_kind()
        technique.apply_initialization(models.holder(layers), scheme=scheme, seed=1, **settings)
        kernels = [models.matrices(name, layer) for name, layer in layers.items()]
        return {kernel: parts for one in kernels for kernel, parts in one.items()}

    return draw


def values(matrices):
    return np.concatenate([matrix.ravel() for matrix in matrices])


def assert_drawn(matrices, variance, kurtosis):
    """Mean and variance are within five standard deviations of their estimates."""
    drawn = values(matrices)
    assert abs(drawn.mean()) < 5 * math.sqrt(variance / drawn.size)
    assert abs(drawn.var() / variance - 1) < 5 * math.sqrt((kurtosis - 1) / drawn.size) < 0.3


@pytest.mark.parametrize("scheme", ["he_normal", "he_uniform", "glorot_normal", "glorot_uniform"])
def test_kernels_have_the_variance_of_the_paper(drawn, scheme):
    found = drawn(scheme)
    assert found.keys() == {*FANS, *RECURRENT}
    for kernel, (fan_in, fan_out) in FANS.items():
        he = scheme.startswith("he") and kernel in RECTIFIED
        variance = 2 / fan_in if he else 2 / (fan_in + fan_out)
        normal, limit = scheme.endswith("normal"), math.sqrt(3 * variance)
        assert_drawn(found[kernel], variance, 3.0 if normal else 1.8)
        largest = abs(values(found[kernel])).max()
        assert (largest > 1.2 * limit) if normal else (largest <= limit * (1 + 1e-6))
    for kernel in RECURRENT:  # orthogonal in every scheme
        assert values(found[kernel]).var() == pytest.approx(1 / 32, rel=1e-2)


def test_defaults_are_each_framework_s_own_and_differ(framework, drawn):
    for kernel in ("dense", "convolution", "grouped", "depthwise", "lstm input", "query"):
        fan_in, fan_out = FANS[kernel]
        if framework == "pt":  # recurrent ones by their units, attention's three at once
            own = {"lstm input": 1 / (3 * 32), "query": 2 / (64 + 3 * 64)}
            variance = own.get(kernel, 1 / (3 * fan_in))
        else:  # Glorot's, with the fans that it reads off the shape
            own = {
                "grouped": 2 / (fan_in + 4 * fan_out),
                "depthwise": 2 / (96 * 25 + 2 * 25),
                "lstm input": 2 / (48 + 4 * 32),
                "query": 2 / (64 * 4 + 64 * 16),
            }
            variance = own.get(kernel, 2 / (fan_in + fan_out))
        assert_drawn(drawn("default")[kernel], variance, 1.8)


def test_a_gain_is_a_factor(drawn):
    ratio = values(drawn("he_normal", gain=3.0)["dense"]).var()
    assert ratio / values(drawn("he_normal")["dense"]).var() == pytest.approx(9, rel=0.1)


def test_orthogonal_matrices_keep_lengths(drawn):
    for matrices in drawn("orthogonal").values():
        for m in matrices:
            wide = m if m.shape[0] >= m.shape[1] else m.T
            assert np.allclose(wide.T @ wide, np.eye(wide.shape[1]), atol=1e-5)


def test_he_doubles_the_mean_square_whatever_the_convolution(technique, models):
    """Of inputs of variance one, away from the borders."""
    layers, random = models.layers_of_each_kind(), np.random.default_rng(0)
    technique.apply_initialization(models.holder(layers), scheme="he_normal", seed=1)
    channels = {"convolution": 16, "grouped": 32, "depthwise": 96, "transposed": 32}
    for kind in RECTIFIED:
        shape = (500, 200) if kind == "dense" else (8, 20, 20, channels[kind])
        made = models.output(layers[kind], random.normal(size=shape).astype(np.float32))
        inside = made if kind == "dense" else made[:, 4:-4, 4:-4]
        assert np.square(inside).mean() == pytest.approx(2.0, rel=0.06), kind


def test_biases_are_zero_but_for_the_forget_gate(technique, models, framework):
    layers = models.layers_of_each_kind()
    technique.apply_initialization(models.holder(layers), scheme="glorot_uniform", seed=1)
    for name, layer in layers.items():
        biases = models.biases(name, layer)
        assert biases.size
        if name == "lstm":
            assert biases[:128].tolist() == [0] * 32 + [1] * 32 + [0] * 64
            biases = biases[128:]
        assert not biases.any()
    technique.apply_initialization(models.holder(layers), scheme="default", seed=1)
    biases = models.biases("dense", layers["dense"])
    assert len(np.unique(biases)) > 100 if framework == "pt" else not biases.any()


@pytest.mark.parametrize("scheme", ["he_normal", "default"])
def test_a_seed_decides_and_the_global_random_state_stays(technique, models, scheme):
    found = []
    for seed in (1, 1, 2):
        model = models.deep_network(layers=3, width=16)
        before = models.random_state()
        technique.apply_initialization(model, scheme=scheme, seed=seed)
        assert np.array_equal(before, models.random_state())
        found.append(list(models.parameters(model).values()))
    assert same(found[0], found[1])
    assert not same(found[0], found[2])


@pytest.mark.parametrize("scheme", ["he_normal", "default"])
def test_what_is_left_stays_and_is_named(technique, models, scheme):
    model = models.language()
    before = models.parameters(model)
    report = technique.apply_initialization(model, scheme=scheme, seed=3)
    after = models.parameters(model)
    layers = {name: name.replace("/", ".").split(".")[-2:][0] for name in before}
    words = {"embedding": "embedding", "frozen": "frozen", "dense": scheme, "norm": "Norm"}
    assert words.keys() <= set(layers.values())
    for name, layer in layers.items():
        bias = layer == "dense" and "bias" in name and scheme != "default"
        assert ("zeros" if bias else words.get(layer, "left")) in report[name]
        stays = report[name].startswith("left")
        if stays or (layer == "dense" and not bias and "bias" not in name):
            assert np.array_equal(before[name], after[name]) == stays


def test_models_of_others_are_drawn_whole(technique, models):
    for model in models.foreign_models():
        report = technique.apply_initialization(model, scheme="he_normal")
        assert sum(said in ("he_normal", "glorot_normal") for said in report.values()) > 1
        left = {name: said for name, said in report.items() if said.startswith("left")}
        known = ("Norm", "VisionTransformer", "Encoder")  # a class token, positions
        assert all(any(kind in said for kind in known) for said in left.values()), left


@pytest.mark.only("pt", "tf")
def test_a_kernel_that_is_frozen_by_itself_stays(technique, models):
    model = models.deep_network(layers=1, width=4)
    kernel = models.freeze_first_kernel(model)
    before = models.numpy(kernel).copy()
    report = technique.apply_initialization(model)
    assert list(report.values()) == ["left: frozen", "zeros", "he_normal", "zeros"]
    assert np.array_equal(before, models.numpy(kernel))


@pytest.mark.parametrize(
    ("model", "settings", "message"),
    [
        ("without_parameters", {}, "parameters yet|variables yet"),
        ("normed", {}, "computed"),
        ("language", {"scheme": "xavier"}, "he_normal"),
        ("language", {"gain": 0.0}, "gain above 0"),
        ("language", {"scheme": "default", "gain": 2.0}, "1 with default"),
    ],
)
def test_a_refusal_says_why(technique, models, model, settings, message):
    with pytest.raises((ValueError, NotImplementedError), match=message):
        technique.apply_initialization(getattr(models, model)(), **settings)
