"""The FLOPs of a spec against each framework's own counter, exactly.

Both counters count two FLOPs a multiply-accumulate, of convolutions and matrix products.
"""

from dataclasses import replace

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from pt_impl.kit import detection, models, runtime, training
from shared.specs import (
    TASKS,
    DetectorSpec,
    GPTSpec,
    forward_flops,
    layers,
    train_step_flops,
)
from tests import workers
from tests.kit.flops_worker import BATCH_SIZE, SPECS

FLAVOURS = ("keras3", "tf_keras") if workers.campaign() else ("keras3",)
EACH_SPEC = pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)


@pytest.fixture(autouse=True)
def cpu(monkeypatch):
    """Whatever the machine has, PyTorch's model is on the CPU."""
    monkeypatch.setattr(runtime, "device", lambda: "cpu")


def pytorch_flops(spec, backend=SDPBackend.MATH):
    """What PyTorch counts in a prediction and in a train step."""
    model, loss = models.build(spec), training.cross_entropy
    if isinstance(spec, GPTSpec):
        x = y = torch.zeros(BATCH_SIZE, spec.sequence_length, dtype=torch.int64)
    else:
        height, width, channels = spec.input_shape
        x = torch.randn(BATCH_SIZE, channels, height, width)
        y = torch.zeros(BATCH_SIZE, dtype=torch.int64)
    if isinstance(spec, DetectorSpec):
        loss, y = detection.make_detection_loss(spec), torch.ones(BATCH_SIZE, 1, 5)
    optimizer = training.make_optimizer(model, TASKS["digits-cnn"].recipe)
    step = training.make_train_step(model, optimizer, loss)
    counted = []
    for call in (lambda: model(x), lambda: step(x, y)):
        with sdpa_kernel(backend), FlopCounterMode(display=False) as counter:
            call()
        counted.append(counter.get_total_flops())
    return counted


@EACH_SPEC
def test_pytorch_counts_the_same(spec):
    assert pytorch_flops(spec) == [
        forward_flops(spec, BATCH_SIZE),
        train_step_flops(spec, BATCH_SIZE),
    ]


def test_fused_attention_recomputes_one_product_backward():
    """What is counted is the work asked for, not what a fused kernel computes a second time."""
    spec = TASKS["text-gpt"].model
    attention = [layer.macs for layer in layers(spec) if layer.name.endswith("attention")]
    assert len(attention) == spec.layers
    scores_again = 2 * BATCH_SIZE * sum(attention) // 2
    assert pytorch_flops(spec, SDPBackend.FLASH_ATTENTION) == [
        forward_flops(spec, BATCH_SIZE),
        train_step_flops(spec, BATCH_SIZE) + scores_again,
    ]


@pytest.fixture(scope="module")
def every_count():
    """What both flavours of Keras counted."""
    return workers.run("kit.flops_worker", FLAVOURS)


@pytest.fixture(params=FLAVOURS)
def tensorflow_counts(request, every_count):
    """Spec -> operator -> FLOPs of a prediction."""
    return every_count[request.param]


def test_tensorflow_counts_the_same(tensorflow_counts):
    products = ("Conv2D", "MatMul", "BatchMatMulV2")
    counted = {
        name: sum(flops for operator, flops in operators.items() if operator in products)
        for name, operators in tensorflow_counts.items()
    }
    assert counted == {name: forward_flops(spec, BATCH_SIZE) for name, spec in SPECS.items()}


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
