"""The FLOPs of a spec against each framework's own counter, exactly.

Both counters count two FLOPs a multiply-accumulate, of convolutions and matrix products.
"""

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from pt_impl.kit import detection, models, runtime, training
from shared.specs import (
    TASKS,
    BottleneckSpec,
    CNNSpec,
    DetectorSpec,
    GPTSpec,
    ResNetSpec,
    forward_flops,
    layers,
    train_step_flops,
)

ROOT = Path(__file__).resolve().parents[2]
BATCH_SIZE = 3
FLAVOURS = {"keras3": "0", "tf_keras": "1"}  # TF_USE_LEGACY_KERAS
# Those of the tasks, and some with odd sizes, which round up where they are halved.
SPECS = {name: task.model for name, task in TASKS.items()} | {
    "odd-cnn": CNNSpec((9, 13, 3), ((4, 1), (5, 2), (6, 2)), num_classes=7),
    "odd-resnet": ResNetSpec((9, 13, 3), 2, (4, 6, 10), num_classes=7),
    "odd-bottleneck": BottleneckSpec((9, 13, 3), (1, 2), (4, 6), num_classes=7),
    "odd-detector": DetectorSpec((9, 13, 3), ((4, 1), (5, 2), (5, 2)), (1, 2), (4.0,), 7),
    "odd-gpt": GPTSpec(vocabulary=11, sequence_length=7, width=12, heads=3, layers=3),
}
EACH_SPEC = pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)

TENSORFLOW_COUNTS = """
import json, sys
import tensorflow as tf
from shared.specs import BottleneckSpec, CNNSpec, DetectorSpec, GPTSpec, ResNetSpec
from tf_impl.kit import models

profiler = tf.compat.v1.profiler
options = profiler.ProfileOptionBuilder(profiler.ProfileOptionBuilder.float_operation())
options = options.with_empty_output().build()

def operators(node):
    yield node.name, node.float_ops
    for child in node.children:
        yield from operators(child)

counts = {}
for name, spec in eval(sys.argv[2]).items():
    model = models.build(spec)
    gpt = isinstance(spec, GPTSpec)
    shape = (spec.sequence_length,) if gpt else spec.input_shape
    x = tf.TensorSpec((int(sys.argv[1]), *shape), tf.int64 if gpt else tf.float32)
    graph = tf.function(lambda x: model(x, training=False)).get_concrete_function(x).graph
    counts[name] = dict(operators(profiler.profile(graph, options=options, cmd="op")))
print(json.dumps(counts))
"""


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
    spec = SPECS["text-gpt"]
    attention = [layer.macs for layer in layers(spec) if layer.name.endswith("attention")]
    assert len(attention) == spec.layers
    scores_again = 2 * BATCH_SIZE * sum(attention) // 2
    assert pytorch_flops(spec, SDPBackend.FLASH_ATTENTION) == [
        forward_flops(spec, BATCH_SIZE),
        train_step_flops(spec, BATCH_SIZE) + scores_again,
    ]


def count(legacy_keras):
    counted = subprocess.run(
        [sys.executable, "-c", TENSORFLOW_COUNTS, str(BATCH_SIZE), repr(SPECS)],
        cwd=ROOT,
        env=os.environ | {"TF_USE_LEGACY_KERAS": legacy_keras, "TF_CPP_MIN_LOG_LEVEL": "3"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert counted.returncode == 0, counted.stderr[-2000:]
    return json.loads(counted.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def every_count():
    """What both flavours of Keras counted, each in a process of its own, at the same time."""
    with ThreadPoolExecutor() as pool:
        return dict(zip(FLAVOURS, pool.map(count, FLAVOURS.values()), strict=True))


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
    spec = replace(SPECS["photos-resnet50"], num_classes=1000)
    assert forward_flops(spec, 1) == 2 * 4_089_184_256
