"""Kernels have the variance of the papers, and what is left is named."""

from __future__ import annotations

import math

import numpy as np
import pytest

from tests import workers

# What meets in one output, and what one input goes into, by the shapes of the scenarios.
FANS = {
    "dense": (200, 300),
    "convolution": (16 * 9, 64 * 9),
    "grouped": (8 * 9, 16 * 9),
    "depthwise": (25, 2 * 25),
    "transposed": (32 * 16 / 4, 48 * 16),
    "query": (64, 64),
    "key": (64, 64),
    "value": (64, 64),
    "out": (64, 64),
    "lstm input": (48, 32),
    "gru input": (48, 32),
}
NOT_RECTIFIED = {"query", "key", "value", "out", "lstm input", "gru input"}


def expected(scheme: str, kernel: str) -> float:
    fan_in, fan_out = FANS[kernel]
    if scheme.startswith("he") and kernel not in NOT_RECTIFIED:
        return 2 / fan_in
    return 2 / (fan_in + fan_out)


def agrees(found: dict, variance: float, kurtosis: float) -> bool:
    """Mean and variance within five standard deviations of their estimates."""
    count = found["count"]
    off = abs(found["variance"] / variance - 1)
    return (
        abs(found["mean"]) < 5 * math.sqrt(variance / count)
        and off < 5 * math.sqrt((kurtosis - 1) / count) < 0.3
    )


@pytest.mark.parametrize("kernel", list(FANS))
@pytest.mark.parametrize("scheme", ["he_normal", "he_uniform", "glorot_normal", "glorot_uniform"])
def test_kernels_have_the_variance_of_the_paper(every, scheme, kernel):
    found = every["initialization drawn"][scheme][kernel]
    variance = expected(scheme, kernel)
    normal = scheme.endswith("normal")
    assert agrees(found, variance, 3.0 if normal else 1.8)
    limit = math.sqrt(3 * variance)
    assert (found["largest"] > 1.2 * limit) if normal else (found["largest"] <= limit * (1 + 1e-6))


@pytest.mark.parametrize(
    "kernel", ["dense", "convolution", "grouped", "depthwise", "lstm input", "query"]
)
def test_defaults_are_each_framework_s_own_and_differ(evidence, kernel):
    fan_in, fan_out = FANS[kernel]
    # PyTorch: 1 / (3 fan_in), recurrent ones 1 / (3 units), attention Glorot's of three at once.
    ours = {"lstm input": 1 / (3 * 32), "query": 2 / (64 + 3 * 64)}.get(kernel, 1 / (3 * fan_in))
    # Keras: Glorot's, with the fans that it reads off the shape.
    groups = {"grouped": 4}.get(kernel, 1)
    theirs = {
        "depthwise": 2 / (96 * 25 + 2 * 25),
        "lstm input": 2 / (48 + 4 * 32),
        "query": 2 / (64 * 4 + 64 * 16),
    }.get(kernel, 2 / (fan_in + groups * fan_out))
    assert agrees(evidence["pt"]["initialization drawn"]["default"][kernel], ours, 1.8)
    for flavour in workers.keras():
        assert agrees(evidence[flavour]["initialization drawn"]["default"][kernel], theirs, 1.8)


def test_a_gain_is_a_factor(every):
    found = every["initialization drawn"]
    assert found["gain of 3"] / found["he_normal"]["dense"]["variance"] == pytest.approx(9, rel=0.1)


def test_orthogonal_matrices_keep_lengths(every):
    found = every["initialization kept_length"]
    assert {"lstm recurrent", "gru recurrent", *FANS} == found.keys()
    assert max(found.values()) < 1e-5


def test_recurrent_kernels_are_orthogonal_in_every_scheme(every):
    for scheme, found in every["initialization drawn"].items():
        if scheme not in ("default", "gain of 3"):
            for kernel in ("lstm recurrent", "gru recurrent"):
                assert found[kernel]["variance"] == pytest.approx(1 / 32, rel=1e-2)


def test_he_doubles_the_mean_square_whatever_the_convolution(every):
    for kernel, found in every["initialization passed_on"].items():
        assert found == pytest.approx(2.0, rel=0.06), kernel


def test_biases_are_zero_but_for_the_forget_gate(every):
    for name, values in every["initialization biased"]["glorot_uniform"].items():
        values = np.array(values)
        if name == "lstm":
            assert values[:128].tolist() == [0] * 32 + [1] * 32 + [0] * 64
            assert not values[128:].any()
        else:
            assert len(values)
            assert not values.any()


def test_default_biases_differ(evidence):
    assert len(set(evidence["pt"]["initialization biased"]["default"]["dense"])) > 100
    for flavour in workers.keras():
        assert not any(evidence[flavour]["initialization biased"]["default"]["dense"])


def test_a_seed_decides(every):
    found = every["initialization seeds"]
    for one, same, other in (
        ("one", "again", "other"),
        ("default", "default again", "default, other"),
    ):
        assert found[one] == found[same]
        assert found[one] != found[other]


@pytest.mark.parametrize("scheme", ["he_normal", "default"])
def test_what_is_left_stays_and_is_named(every, scheme):
    found = every["initialization left"][scheme]
    report, changed = found["report"], found["changed"]
    assert report.keys() == changed.keys()
    words = {"embedding": "embedding", "frozen": "frozen", "dense": scheme, "norm": "Norm"}
    for part, word in words.items():
        names = [name for name in report if name.replace("/", ".").split(".")[-2].startswith(part)]
        assert names
        for name in names:
            bias = part == "dense" and "bias" in name and scheme != "default"
            assert ("zeros" if bias else word) in report[name]
    for name, said in report.items():
        if said.startswith("left"):
            assert not changed[name]
        elif said == scheme and "bias" not in name:
            assert changed[name]
    assert sum(changed.values()) >= 1


def test_models_of_others_are_drawn_whole(every):
    for report in every["initialization foreign_models"].values():
        assert sum(said in ("he_normal", "glorot_normal") for said in report.values()) > 1
        for name, said in report.items():
            left = ("Norm", "VisionTransformer", "Encoder")  # a class token, positions
            assert not said.startswith("left") or any(kind in said for kind in left), (name, said)


@pytest.mark.parametrize("framework", ["pt", "tf"])
def test_a_kernel_that_is_frozen_by_itself_stays(evidence, framework):
    found = evidence[framework]["initialization frozen_kernel"]
    assert found["said"] == "left: frozen"
    assert found["stayed"]
    assert found["others"] == ["zeros", "he_normal", "zeros"]


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("no parameters yet", "ValueError"),
        ("computed", "NotImplementedError"),
        ("scheme", "he_normal"),
        ("gain", "gain above 0"),
        ("gain of the default", "1 with default"),
    ],
)
def test_what_can_not_be_drawn_is_said(every, case, words):
    assert words in (every["initialization refusals"][case] or "")
