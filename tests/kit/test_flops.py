"""The FLOPs of a spec against each framework's own counter, exactly.

Both counters count two FLOPs a multiply-accumulate, of convolutions and matrix products.
"""

from dataclasses import replace

import pytest

from shared.specs import (
    TASKS,
    BottleneckSpec,
    CNNSpec,
    DetectorSpec,
    GPTSpec,
    ResNetSpec,
    forward_flops,
    kept_activations,
    layers,
    train_step_flops,
)
from tests import workers

FRAMEWORKS = ("pt", *workers.keras())
MODELS = "kit"
BATCH_SIZE = 3
# Of the same parts as smaller ones, and seconds long: they are counted in campaigns.
LARGE = {"text-gpt-deep", "text-gpt-dropout", "text-gpt-wide", "text-gpt-10m", "text-bert-10m"}
LARGE |= {"text-gpt-base", "text-bert-base", "photos-resnet50", "digits-resnet20", "text-gpt"}
LARGE |= {"digits-few"}  # whose model is that of digits-cnn
# Those of the tasks, and some with odd sizes, which round up where they are halved.
SPECS = {
    name: task.model for name, task in TASKS.items() if workers.campaign() or name not in LARGE
} | {
    "odd-cnn": CNNSpec((9, 13, 3), ((4, 1), (5, 2), (6, 2)), num_classes=7),
    "odd-resnet": ResNetSpec((9, 13, 3), 2, (4, 6, 10), num_classes=7),
    "odd-bottleneck": BottleneckSpec((9, 13, 3), (1, 2), (4, 6), num_classes=7),
    "odd-detector": DetectorSpec((9, 13, 3), ((4, 1), (5, 2), (5, 2)), (1, 2), (4.0,), 7),
    "odd-gpt": GPTSpec(vocabulary=11, sequence_length=7, width=12, heads=3, layers=3),
}
EACH_SPEC = pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)


@EACH_SPEC
def test_the_framework_counts_the_same_in_a_prediction(models, spec):
    assert models.prediction_flops(spec, BATCH_SIZE) == forward_flops(spec, BATCH_SIZE)


@EACH_SPEC
@pytest.mark.only("pt")
def test_the_framework_counts_the_same_in_a_step(models, spec):
    assert models.step_flops(spec, BATCH_SIZE) == train_step_flops(spec, BATCH_SIZE)


@pytest.mark.only("pt")
def test_fused_attention_recomputes_one_product_backward(models):
    """What is counted is the work asked for, not what a fused kernel computes a second time."""
    spec = TASKS["text-gpt"].model
    attention = [layer.macs for layer in layers(spec) if layer.name.endswith("attention")]
    assert len(attention) == spec.layers
    scores_again = 2 * BATCH_SIZE * sum(attention) // 2
    asked = train_step_flops(spec, BATCH_SIZE)
    assert models.step_flops(spec, BATCH_SIZE, fused=True) == asked + scores_again


# Wide enough that what is kept of a row or a channel does not count.
KEPT = ("digits-cnn", "digits-resnet20", "photos-resnet18", "photos-resnet50", "text-gpt-10m")


@pytest.mark.parametrize("task", KEPT)
@pytest.mark.only("pt")
def test_autograd_keeps_the_activations_that_are_counted(models, task):
    spec = TASKS[task].model
    assert models.saved_values(spec, 2) == pytest.approx(kept_activations(spec, 2), rel=0.05)


@EACH_SPEC
def test_flops_grow_with_the_batch(spec):
    assert forward_flops(spec, 12) == 12 * forward_flops(spec, 1)
    assert train_step_flops(spec, 12) == 12 * train_step_flops(spec, 1)


def test_a_step_costs_three_forward_passes_less_the_gradient_of_the_input():
    spec = SPECS["digits-cnn"]
    (first, *_) = layers(spec)
    assert train_step_flops(spec, 1) == 3 * forward_flops(spec, 1) - 2 * first.macs
    wider = replace(spec, convolutions=((32, 2), *spec.convolutions[1:]))
    assert layers(wider)[0].macs == 2 * first.macs


def test_resnet50_costs_what_is_known_of_it():
    """4.09 billion multiply-accumulates at 224 px for 1,000 classes, as torchvision states it."""
    spec = replace(TASKS["photos-resnet50"].model, num_classes=1000)
    assert forward_flops(spec, 1) == 2 * 4_089_184_256
