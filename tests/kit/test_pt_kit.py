"""The PyTorch kit: what its functions do, seen from outside."""

import random
import re
import shutil
from dataclasses import replace
from types import SimpleNamespace
from typing import ClassVar

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import prune

from pt_impl.deployment import reduced_precision
from pt_impl.kit import comparing, copying, data, models, runtime, training, user_model
from pt_impl.train_step import compilation
from shared.datasets import batch_order
from shared.specs import NO_LABEL, TASKS, CNNSpec, GPTSpec, Recipe, ResNetSpec, parameter_count
from shared.weights import checksum, init_weights
from tests import workers

SPECS = {
    "cnn": CNNSpec((9, 9, 2), ((4, 1), (6, 2)), num_classes=5),
    "resnet": ResNetSpec((8, 8, 3), 2, (4, 6, 8), num_classes=5),
    "gpt": GPTSpec(vocabulary=11, sequence_length=6, width=8, heads=2, layers=2),
}
EACH = pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
SGD = Recipe("sgd", learning_rate=0.1, epochs=1, accuracy_batch_size=4)
ADAMW = replace(SGD, optimizer="adamw", learning_rate=0.01, weight_decay=0.1)
RMSPROP = replace(SGD, optimizer="rmsprop", learning_rate=0.01)


@pytest.fixture(autouse=True)
def cpu(monkeypatch):
    """One thread of the CPU, whatever the machine has and whoever else uses it."""
    monkeypatch.setattr(runtime, "device", lambda: "cpu")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def samples(spec, count=8, seed=0):
    """Canonical NumPy inputs and labels for `spec`."""
    stream = np.random.default_rng(seed)
    if isinstance(spec, GPTSpec):
        codes = stream.integers(0, spec.vocabulary, (count, spec.sequence_length + 1))
        return codes[:, :-1], codes[:, 1:]
    x = stream.normal(size=(count, *spec.input_shape)).astype(np.float32)
    return x, stream.integers(0, spec.num_classes, count)


def noisy_weights(spec):
    """Weights in which no two tensors, and no tensor and its transpose, are alike."""
    stream = np.random.default_rng(1)
    return {
        name: stream.uniform(0.1, 1.0, w.shape).astype(np.float32)
        for name, w in init_weights(spec, 0).items()
    }


# Models --------------------------------------------------------------------------------------


@EACH
def test_weights_survive_the_round_trip_bit_by_bit(spec):
    weights = noisy_weights(spec)
    model = models.build(spec)
    models.import_weights(model, weights)
    exported = models.export_weights(model)
    assert exported.keys() == weights.keys()
    assert checksum(exported) == checksum(weights)
    assert checksum(models.export_weights(models.build(spec, weights))) == checksum(weights)


@EACH
def test_exported_weights_are_copies(spec):
    model = models.build(spec, noisy_weights(spec))
    exported = models.export_weights(model)
    before = checksum(exported)
    x, y = data.to_device(*samples(spec))
    training.make_train_step(model, training.make_optimizer(model, SGD), training.cross_entropy)(
        x, y
    )
    assert checksum(exported) == before != checksum(models.export_weights(model))


@EACH
def test_importing_does_not_tie_the_model_to_the_arrays(spec):
    weights = noisy_weights(spec)
    model = models.build(spec, weights)
    before = checksum(models.export_weights(model))
    for value in weights.values():
        value[...] = 0
    assert checksum(models.export_weights(model)) == before


@EACH
@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda w: w.pop("head.kernel"), "missing head.kernel"),
        (lambda w: w.update({"tail.kernel": w["head.kernel"]}), "unknown tail.kernel"),
        (
            lambda w: w.update({"head.kernel": w["head.kernel"].T}),
            "head.kernel has shape",
        ),
    ],
    ids=["missing", "unknown", "shape"],
)
def test_weights_that_do_not_fit_are_refused_in_one_line(spec, change, said):
    model = models.build(spec)
    before = checksum(models.export_weights(model))
    weights = noisy_weights(spec)
    change(weights)
    with pytest.raises(ValueError, match=said) as caught:
        models.import_weights(model, weights)
    assert "\n" not in str(caught.value)
    assert checksum(models.export_weights(model)) == before


class Named(nn.Module):
    """Two inputs, a frozen parameter, tied weights, dropout, and a dictionary out."""

    def __init__(self):
        super().__init__()
        self.table, self.head = nn.Embedding(7, 4), nn.Linear(4, 7, bias=False)
        self.head.weight = self.table.weight
        self.norm, self.drop = nn.BatchNorm1d(4), nn.Dropout(0.5)
        self.norm.weight.requires_grad_(False)

    def forward(self, codes, shift):
        return {"logits": self.head(self.drop(self.norm(self.table(codes) + shift)))}


@pytest.mark.parametrize("given", ["nothing", "tuple", "dict"])
def test_a_copy_has_all_state_and_shares_none(given):
    model, codes, shift = Named(), torch.tensor([1, 2, 3]), torch.randn(3, 4)
    model.norm.eval()
    x = {"nothing": None, "tuple": (codes, shift), "dict": {"codes": codes, "shift": shift}}
    before = {name: value.clone() for name, value in model.state_dict().items()}
    twin = copying.copy_model(model, x[given])
    assert [m.training for m in twin.modules()] == [m.training for m in model.modules()]
    assert twin.head.weight is twin.table.weight is not model.table.weight
    assert not twin.norm.weight.requires_grad
    twin.train(False)(codes, shift)["logits"].sum().backward()
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert model.table.weight.grad is None
    with torch.no_grad():
        assert torch.equal(model.eval()(codes, shift)["logits"], twin(codes, shift)["logits"])


class Counting(nn.Linear):
    """A layer with an extra state, which is no tensor."""

    steps = 1

    def get_extra_state(self):
        return {"steps": self.steps}

    def set_extra_state(self, state):
        self.steps = state["steps"]


def test_an_extra_state_is_no_weight():
    model, other = Counting(4, 2), Counting(4, 2)
    other.steps = 5
    weights = user_model.export_weights(model)
    assert weights.keys() == {"weight", "bias"}
    user_model.import_weights(other, weights)
    assert other.steps == copying.copy_model(other).steps == 5
    assert torch.equal(other.weight, model.weight)


def test_complex_outputs_are_compared_in_both_of_their_parts():
    one, other, nan = (torch.tensor([1 + v, 2.0]) for v in (1j, 2j, 1j * float("nan")))
    assert comparing.apart(one, other) > 0.1
    assert comparing.apart(nan, nan) == comparing.apart(one, one) == 0.0


def test_what_cannot_be_copied_is_refused():
    class Hides(nn.Module):
        """Keeps what it computes with where no copy takes it."""

        scales: ClassVar[dict] = {}

        def __init__(self):
            super().__init__()
            self.scales[id(self)] = 2.0

        def forward(self, x):
            return self.scales.get(id(self), 1.0) * x

    masked = prune.random_unstructured(nn.Linear(3, 3), "weight", 0.5)
    with pytest.raises(NotImplementedError, match="Python cannot copy the model: Only Tensors"):
        copying.copy_model(masked)
    with pytest.raises(NotImplementedError, match="the copy computes something else"):
        copying.copy_model(Hides(), torch.ones(2, 2))
    with pytest.raises(ValueError, match="does not take the example input"):
        copying.copy_model(nn.Linear(3, 3), torch.ones(2, 4))


@EACH
def test_parameters_have_canonical_names_and_layouts(spec):
    model = models.build(spec)
    weights = init_weights(spec, 0)
    named = models.named_parameters(model)
    assert {id(p) for p in named.values()} == {id(p) for p in model.parameters()}
    for name, parameter in named.items():
        canonical = models.to_canonical(name, parameter.detach().numpy())
        assert canonical.shape == weights[name].shape
    assert models.parameter_count(model) == parameter_count(spec)
    assert models.parameter_count(model) == sum(p.numel() for p in model.parameters())


def test_frozen_parameters_are_not_counted():
    model = models.build(SPECS["cnn"])
    model.head.requires_grad_(False)
    assert models.parameter_count(model) == parameter_count(SPECS["cnn"]) - 6 * 5 - 5


def test_canonical_layouts_mean_what_they_say():
    """A kernel with one entry, at a place that no mistaken layout has."""
    spec = CNNSpec((5, 5, 2), ((3, 1),), num_classes=4)
    weights = {name: np.zeros_like(w) for name, w in init_weights(spec, 0).items()}
    weights["conv0.kernel"][0, 2, 1, 2] = 7.0  # row 0, column 2, from channel 1 to filter 2
    weights["head.kernel"][2, 3] = 5.0
    model = models.build(spec, weights)
    assert model.conv0.conv.weight[2, 1, 0, 2] == 7.0
    assert model.head.weight[3, 2] == 5.0


def test_qkv_columns_are_q_k_v_each_head_by_head():
    """Attention from the canonical weights by hand, in NumPy."""
    spec = SPECS["gpt"]
    weights = noisy_weights(spec)
    block = models.build(spec, weights).block0
    x = np.random.default_rng(2).normal(size=(6, 8)).astype(np.float32)
    heads = []
    for head in range(2):
        q, k, v = (
            x @ weights["block0.qkv.kernel"][:, part * 8 + head * 4 : part * 8 + head * 4 + 4]
            for part in range(3)
        )
        scores = np.where(np.tri(6, dtype=bool), q @ k.T / 2.0, -np.inf)
        shares = np.exp(scores - scores.max(1, keepdims=True))
        heads.append(shares / shares.sum(1, keepdims=True) @ v)
    expected = np.concatenate(heads, 1) @ weights["block0.projection.kernel"]
    with torch.no_grad():
        got = block.attend(torch.from_numpy(x)[None])[0].numpy()
    np.testing.assert_allclose(got, expected, rtol=1e-4)


def test_gpt_drops_in_training_alone():
    spec = SPECS["gpt"]
    weights = noisy_weights(spec)
    plain, model = models.build(spec, weights), models.build(replace(spec, dropout=0.5), weights)
    x, _ = data.to_device(*samples(spec))
    assert torch.equal(training.make_predict(model)(x), training.make_predict(plain)(x))
    assert not torch.equal(model.train()(x), model(x))
    # Of what the attention adds, and of what the feed-forward block adds, half is zero.
    block, hidden = model.block0, torch.randn(64, 6, 8)
    nn.init.zeros_(block.projection.weight)
    added = block(hidden) - hidden
    assert 0.4 < (added == 0).float().mean() < 0.6


def test_batchnorm_takes_momentum_and_epsilon_from_the_spec():
    spec = replace(SPECS["cnn"], bn_momentum=0.25, bn_eps=0.5)
    model = models.build(spec, init_weights(spec, 0))
    x, _ = data.to_device(*samples(spec))
    with torch.no_grad():
        y = model.train().conv0.conv(x)
        normalised = model.conv0.bn(y)
    mean = y.mean((0, 2, 3))
    torch.testing.assert_close(model.conv0.bn.running_mean, 0.25 * mean)
    expected = (y - mean[:, None, None]) / (y.var((0, 2, 3), False)[:, None, None] + 0.5).sqrt()
    torch.testing.assert_close(normalised, expected)


def test_resnet20_has_twenty_layers():
    model = models.build(TASKS["digits-resnet20"].model)
    layers = [m for m in model.modules() if isinstance(m, nn.Conv2d | nn.Linear)]
    shortcuts = [m for m in layers if getattr(m, "kernel_size", None) == (1, 1)]
    assert len(layers) - len(shortcuts) == 20
    assert len(shortcuts) == 2


@pytest.mark.parametrize("depth", [18, 50])
def test_the_large_resnets_are_the_standard_ones(depth):
    """With its weights, torchvision's (ResNet-50: v1.5) gives the same logits."""
    import torchvision  # whose import takes longer than torch's: not where tests are collected

    spec = replace(TASKS[f"photos-resnet{depth}"].model, num_classes=1000)
    torch.manual_seed(0)
    theirs = getattr(torchvision.models, f"resnet{depth}")(weights=None).eval()
    for module in theirs.modules():
        if isinstance(module, nn.BatchNorm2d):  # no scale is 1 and no shift is 0
            for tensor in (module.weight, module.bias, module.running_mean, module.running_var):
                nn.init.uniform_(tensor, 0.2, 0.5)
    ours = models.build(spec).eval()
    names = (
        (r"^stem\.(conv|bn)", r"\g<1>1"),
        (r"^stage(\d)\.block(\d)", lambda found: f"layer{int(found[1]) + 1}.{found[2]}"),
        (r"conv(\d)\.(conv|bn)", lambda found: f"{found[2]}{int(found[1]) + 1}"),
        (r"shortcut\.conv", "downsample.0"),
        (r"shortcut\.bn", "downsample.1"),
        (r"^head", "fc"),
    )
    given, state = theirs.state_dict(), {}
    for name in ours.state_dict():
        known = name
        for pattern, replacement in names:
            known = re.sub(pattern, replacement, known)
        state[name] = given.pop(known)
    assert not given
    ours.load_state_dict(state)
    x = torch.randn(2, 3, 96, 64)
    with torch.no_grad():
        torch.testing.assert_close(ours(x), theirs(x), rtol=1e-4, atol=1e-4)


# Data ----------------------------------------------------------------------------------------


def test_images_become_contiguous_nchw_copies():
    x, y = samples(SPECS["cnn"])
    x.flags.writeable = False
    tensor, labels = data.to_device(x, y)
    assert tensor.shape == (8, 2, 9, 9)
    assert tensor.is_contiguous()
    assert tensor.dtype == torch.float32
    assert labels.dtype == torch.int64
    assert tensor[3, 1, 4, 5] == x[3, 4, 5, 1]
    tensor.zero_()
    assert x.any()


def test_codes_stay_as_they_are():
    x, y = samples(SPECS["gpt"])
    for tensor, array in zip(data.to_device(x, y), (x, y), strict=True):
        assert tensor.dtype == torch.int64
        assert np.array_equal(tensor.numpy(), array)


def test_resident_batches_are_in_order():
    batches = [samples(SPECS["cnn"], count=3, seed=seed) for seed in range(4)]
    for (x, y), (array, labels) in zip(data.resident_batches(batches), batches, strict=True):
        assert np.array_equal(x.numpy().transpose(0, 2, 3, 1), array)
        assert np.array_equal(y.numpy(), labels)


def test_fit_follows_the_shared_batch_order():
    x, y = data.to_device(np.arange(23.0, dtype=np.float32), np.arange(23))
    seen = []

    def step(rows, labels):
        assert torch.equal(rows, labels.float())
        seen.append(labels.tolist())
        return labels.float().mean()

    last = training.fit(step, x, y, batch_size=5, epochs=3, seed=11)
    expected = [
        rows.tolist() for epoch in range(3) for rows in batch_order(23, 5, seed=11, epoch=epoch)
    ]
    assert seen == expected
    assert last == pytest.approx(np.mean(expected[-1]))


def test_fit_refuses_to_train_on_nothing():
    x, y = data.to_device(np.zeros(3, np.float32), np.zeros(3))
    with pytest.raises(ValueError, match=r"no batch of 4 in 2 epochs of 3 samples"):
        training.fit(lambda x, y: x, x, y, batch_size=4, epochs=2, seed=0)


# Training ------------------------------------------------------------------------------------


def test_an_unknown_optimizer_is_refused():
    with pytest.raises(ValueError, match="unknown optimizer 'lion'"):
        training.make_optimizer(nn.Linear(2, 2), replace(SGD, optimizer="lion"))


@pytest.mark.parametrize("shape", [(6,), (6, 4)], ids=["classes", "sequences"])
def test_cross_entropy_is_the_mean_over_all_positions(shape):
    stream = np.random.default_rng(4)
    logits = stream.normal(size=(*shape, 5)).astype(np.float32)
    labels = stream.integers(0, 5, shape)
    chances = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    expected = -np.log(np.take_along_axis(chances, labels[..., None], -1)).mean()
    loss = training.cross_entropy(torch.from_numpy(logits), torch.from_numpy(labels))
    assert loss.item() == pytest.approx(expected, rel=1e-6)


def test_cross_entropy_of_bfloat16_logits_is_computed_in_float32():
    logits = torch.randn(64, 10).bfloat16()
    labels = torch.arange(64) % 10
    loss = training.cross_entropy(logits, labels)
    assert loss.dtype == torch.float32
    assert loss == F.cross_entropy(logits.float(), labels)
    assert loss != F.cross_entropy(logits, labels).float()


def test_predict_runs_in_evaluation_mode():
    spec = SPECS["cnn"]
    model = models.build(spec, noisy_weights(spec)).train()
    x, _ = data.to_device(*samples(spec))
    before = checksum(models.export_weights(model))
    whole = training.make_predict(model)(x)
    assert checksum(models.export_weights(model)) == before
    assert not whole.requires_grad
    # The statistics of the batch play no part: each sample alone gives the same.
    alone = torch.cat([training.make_predict(model)(one[None]) for one in x])
    torch.testing.assert_close(whole, alone)
    torch.testing.assert_close(whole, model.eval()(x), rtol=0, atol=0)


def test_predict_leaves_modes_as_found():
    model = models.build(SPECS["resnet"])
    predict = training.make_predict(model)
    x, _ = data.to_device(*samples(SPECS["resnet"]))
    for mode in (True, False):
        model.train(mode)
        predict(x)
        assert {m.training for m in model.modules()} == {mode}
    model.train().stem.bn.eval()  # a frozen BatchNorm
    modes = [m.training for m in model.modules()]
    predict(x)
    assert [m.training for m in model.modules()] == modes
    with pytest.raises(RuntimeError):
        predict(x[:, :1])
    assert [m.training for m in model.modules()] == modes


@pytest.mark.parametrize(
    "make_predict",
    [training.make_predict, reduced_precision.make_predict, compilation.eager_predict],
)
def test_a_head_that_trains_predicts_without_dropout_too(make_predict):
    """As in fine-tuning: all else is in evaluation mode already."""
    head = nn.Sequential(nn.Dropout(0.5), nn.Linear(64, 2))
    model = nn.Sequential(nn.Linear(4, 64), head).eval()
    head.train()
    predict, x = make_predict(model), torch.ones(3, 4)
    assert torch.equal(predict(x), predict(x))
    assert [m.training for m in (model, model[0], *head.modules())] == [False] * 2 + [True] * 3


def test_a_step_after_predict_trains_batchnorm():
    spec = SPECS["cnn"]
    model = models.build(spec, init_weights(spec, 0))
    step = training.make_train_step(
        model, training.make_optimizer(model, SGD), training.cross_entropy
    )
    x, y = data.to_device(*samples(spec))
    training.make_predict(model)(x)
    step(x, y)
    assert models.export_weights(model)["conv0.bn.mean"].any()


@pytest.mark.parametrize("batch_size", [1, 7, 20, 64])
@pytest.mark.parametrize("share", [1.0, 0.4])
def test_metrics_against_numpy(batch_size, share):
    """Over the places that have a label."""
    stream = np.random.default_rng(5)
    logits = stream.normal(size=(20, 6, 5)).astype(np.float32)
    labels = stream.integers(0, 5, (20, 6))
    asked = stream.random((20, 6)) < share
    logits_of = dict(enumerate(torch.from_numpy(logits)))

    def predict(rows):
        assert 0 < len(rows) <= batch_size
        return torch.stack([logits_of[int(row)] for row in rows])

    x, y = torch.arange(20), torch.from_numpy(np.where(asked, labels, NO_LABEL))
    chances = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    bits = -np.log2(np.take_along_axis(chances, labels[..., None], -1))[asked].mean()
    accuracy = 100 * (logits.argmax(-1) == labels)[asked].mean()
    settings = {"batch_size": batch_size}
    found = training.evaluate(predict, x, y, metric="bits_per_character", **settings)
    assert found == pytest.approx(bits, rel=1e-6)
    assert training.evaluate(predict, x, y, metric="accuracy", **settings) == pytest.approx(
        accuracy
    )
    loss = training.masked_cross_entropy(torch.from_numpy(logits), y)
    assert float(loss) == pytest.approx(bits * np.log(2), rel=1e-6)


def test_an_unknown_metric_is_refused():
    y = torch.zeros(2, dtype=torch.int64)
    with pytest.raises(ValueError, match="unknown metric 'f1'"):
        training.evaluate(lambda x: x, y, y, metric="f1", batch_size=2)


# Runtime -------------------------------------------------------------------------------------


def test_configure_sets_threads_and_reads_them_back():
    """In a process of its own: those between operators are set once."""
    found = workers.run("kit.pt_threads_worker", ("pt",))["pt"]
    assert found["first"] == found["torch"] == {"intra_op": 3, "inter_op": 3}
    assert found["later"] == found["torch later"] == {"intra_op": 1, "inter_op": 3}


def test_configure_seeds_every_generator():
    threads = torch.get_num_threads()

    def drawn(seed):
        runtime.configure(threads=threads, seed=seed)
        return random.random(), np.random.rand(), torch.rand(1).item()

    assert drawn(1) == drawn(1)
    assert all(a != b for a, b in zip(drawn(1), drawn(2), strict=True))


def test_float32_means_float32():
    runtime.configure(threads=torch.get_num_threads(), seed=0)
    assert torch.backends.cuda.matmul.fp32_precision == "ieee"
    assert torch.backends.cudnn.conv.fp32_precision == "ieee"
    # What torch.compile asks on a GPU; it fails where old and new flags disagree.
    assert torch.backends.cudnn.allow_tf32 is False
    assert torch.get_float32_matmul_precision() == "highest"


def test_versions_and_device(monkeypatch):
    monkeypatch.undo()
    assert runtime.versions()["torch"] == torch.__version__
    assert all(isinstance(version, str) for version in runtime.versions().values())
    assert runtime.device() == ("cuda" if torch.cuda.is_available() else "cpu")
    assert runtime.device_info()["name"]
    runtime.synchronize()
    runtime.reset_device_peak()
    assert (runtime.device_peak() is None) == (runtime.device() == "cpu")


@pytest.mark.parametrize(
    ("recipe", "slots"),
    [(SGD, 1), (ADAMW, 2), (RMSPROP, 1)],
    ids=lambda v: getattr(v, "optimizer", ""),
)
def test_state_bytes(recipe, slots):
    spec = SPECS["cnn"]
    model = models.build(spec)
    optimizer = training.make_optimizer(model, recipe)
    size = 4 * parameter_count(spec)
    assert runtime.state_bytes(model, optimizer) == {
        "parameters": size,
        "gradients": 0,
        "optimizer": 0,
    }
    step = training.make_train_step(model, optimizer, training.cross_entropy)
    step(*data.to_device(*samples(spec)))
    found = runtime.state_bytes(model, optimizer)
    assert found["parameters"] == found["gradients"] == size
    # Adam also counts its steps, in a scalar a tensor.
    counters = 0 if recipe is SGD else 4 * len(list(model.parameters()))
    assert found["optimizer"] == slots * size + counters


def steps_of(spec):
    """The baseline step, and one under bfloat16 autocast, of one model."""
    model = models.build(spec, init_weights(spec, 0))
    optimizer = training.make_optimizer(model, SGD)

    def autocast_step(x, y):
        optimizer.zero_grad()
        with torch.autocast(x.device.type, torch.bfloat16):
            logits = model(x)
        loss = training.cross_entropy(logits, y)
        loss.backward()
        optimizer.step()
        return loss

    return training.make_train_step(model, optimizer, training.cross_entropy), autocast_step


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        # Forward and backward of each convolution; forward and two products for the head.
        ("cnn", {"convolution": 2 * 2, "matmul": 3}),
        ("resnet", {"convolution": 2 * (1 + 6 * 2 + 2), "matmul": 3}),
        # A block: four dense layers of three products, attention forward and backward.
        ("gpt", {"matmul": 2 * (4 * 3 + 2) + 3}),
    ],
)
def test_operator_dtypes(name, expected):
    x, y = data.to_device(*samples(SPECS[name]))
    for step, dtype in zip(steps_of(SPECS[name]), ("float32", "bfloat16"), strict=True):
        assert runtime.operator_dtypes(step, x, y) == {
            kind: {dtype: count} for kind, count in expected.items()
        }


def test_operator_dtypes_tells_one_layer_from_the_others():
    spec = SPECS["cnn"]
    model = models.build(spec)
    model.head = nn.Sequential(nn.Flatten(), model.head.double())
    model.head.register_forward_pre_hook(lambda module, args: (args[0].double(),))
    optimizer = training.make_optimizer(model, SGD)
    step = training.make_train_step(model, optimizer, F.cross_entropy)
    assert runtime.operator_dtypes(step, *data.to_device(*samples(spec))) == {
        "convolution": {"float32": 4},
        "matmul": {"float64": 3},
    }


def test_an_operator_that_another_calls_is_not_counted_again():
    def event(name, *children):
        return SimpleNamespace(name=name, children=children)

    product = event("aten::mm", event("aten::empty"))
    events = [event("aten::linear", event("aten::convolution", product)), event("step", product)]
    assert [e.name for e in runtime._topmost(events)] == ["aten::convolution", "aten::mm"]


def test_operators_are_seen_without_autograd():
    predict = training.make_predict(models.build(SPECS["cnn"]))
    x, y = data.to_device(*samples(SPECS["cnn"]))
    assert runtime.operator_dtypes(lambda x, y: predict(x), x, y) == {
        "convolution": {"float32": 2},
        "matmul": {"float32": 1},
    }
    assert runtime.operator_dtypes(lambda x, y: x + 1, x, y) == {}


def counting_backend(graph, example_inputs):
    """A compiler that compiles nothing: the graph as it was captured."""
    return graph


def test_trace_count():
    x, y = data.to_device(*samples(SPECS["cnn"]))
    model = models.build(SPECS["cnn"])
    eager = training.make_train_step(
        model, training.make_optimizer(model, SGD), training.cross_entropy
    )
    eager(x, y)
    assert runtime.trace_count(eager) is None

    torch._dynamo.reset()
    compiled = torch.compile(lambda x, y: (x * 2).sum(), backend=counting_backend, dynamic=False)
    before = runtime.trace_count(compiled)
    compiled(x, y)
    assert runtime.trace_count(compiled) == before + 1
    compiled(x, y)
    assert runtime.trace_count(compiled) == before + 1
    compiled(x[:3], y[:3])  # another shape
    assert runtime.trace_count(compiled) == before + 2
    assert runtime.trace_count(eager) is None


@pytest.mark.parametrize(
    "compile_model",
    [
        lambda model: torch.compile(model, backend=counting_backend),
        lambda model: model.compile(backend=counting_backend) or model,
    ],
    ids=["torch.compile", "module.compile"],
)
def test_a_step_around_a_compiled_model_counts_as_compiled(compile_model):
    torch._dynamo.reset()
    x, y = data.to_device(*samples(SPECS["cnn"]))
    model = compile_model(models.build(SPECS["cnn"]))
    step = training.make_train_step(
        model, training.make_optimizer(model, SGD), training.cross_entropy
    )
    before = runtime.trace_count(step)
    step(x, y)
    assert runtime.trace_count(step) > before


def test_operators_are_seen_below_the_compiler():
    if shutil.which("c++") is None:
        pytest.skip("torch.compile needs a C++ compiler")
    weight = torch.randn(16, 16, dtype=torch.bfloat16, requires_grad=True)

    @torch.compile
    def product(x):  # alone: for anything beside it C++ would be compiled
        return x @ weight

    def step(x, y):
        product(x).sum().backward()

    # Forward, and the gradient of the weight; x needs none.
    x = torch.randn(4, 16, dtype=torch.bfloat16)
    assert runtime.operator_dtypes(step, x, x) == {"matmul": {"bfloat16": 2}}
    assert runtime.trace_count(step) >= 1


def test_matmul_flops_divides_the_work_by_the_best_time(monkeypatch):
    ticks = iter([0.0, 1.0, 5.0, 6.0, 6.5, 7.0, 9.0, 20.0])  # products of 4, 0.5 and 2 seconds
    monkeypatch.setattr(runtime, "perf_counter", lambda: next(ticks))
    assert runtime.matmul_flops(size=10, dtype="float32", seconds=15) == 2 * 10**3 / 0.5


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_matmul_flops_multiplies_in_its_dtype(dtype):
    def measure(x, y):
        runtime.matmul_flops(size=32, dtype=dtype, seconds=0.0)

    found = runtime.operator_dtypes(measure, None, None)
    assert found.keys() == {"matmul"}
    assert found["matmul"].keys() == {dtype}


def fine_tuned(**settings):
    """A file's model of which two layers of three are trained, at rates of their own."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 2))
    groups = [{"params": model[2].parameters(), "lr": 0.2}, {"params": model[1].parameters()}]
    return model, F.cross_entropy, torch.optim.SGD(groups, lr=0.1, **settings)


def updated(own, make_optimizer):
    """The weights after two steps of a file's model, from the same weights each time."""
    torch.manual_seed(0)
    model = own.build(None)
    step = training.make_train_step(model, make_optimizer(model, SGD), own.loss)
    x, y = torch.randn(8, 4), torch.arange(8) % 2
    for _ in range(2):
        step(x, y)
    return model.state_dict()


@pytest.mark.parametrize("foreach", [None, True])
def test_a_file_s_optimizer_trains_the_same_fused(foreach):
    own = user_model.UserModel(lambda: fine_tuned(momentum=0.9, foreach=foreach))
    usual, fused = updated(own, own.optimizer), updated(own, own.fused_optimizer)
    assert usual.keys() == fused.keys()
    for name, weight in usual.items():
        torch.testing.assert_close(weight, fused[name])
    with torch.profiler.profile() as seen:
        updated(own, own.fused_optimizer)
    assert any("_fused_sgd" in event.key for event in seen.key_averages())


def test_a_file_s_optimizer_is_made_again_for_a_copy():
    own = user_model.UserModel(fine_tuned)
    copied = copying.copy_model(own.build(None))
    head, body = own.optimizer(copied, SGD).param_groups
    assert [id(p) for p in head["params"]] == [id(p) for p in copied[2].parameters()]
    assert [id(p) for p in body["params"]] == [id(p) for p in copied[1].parameters()]
    assert (head["lr"], body["lr"]) == (0.2, 0.1)
    with pytest.raises(NotImplementedError, match="has parameters that the model has not"):
        own.optimizer(nn.Linear(4, 2), SGD)
