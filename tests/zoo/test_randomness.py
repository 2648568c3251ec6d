"""Layers that draw in training: dropout that works in place, and stochastic depth.

Techniques that copy, trace or repeat such a model draw, from the same seed, what plain code draws,
and nothing in evaluation; what they can't do so they refuse.

What brings torchvision or the compiler along is imported in tests, of which one process runs each:
all processes collect this file, and it would take them three seconds each.
"""

from __future__ import annotations

import copy
from functools import partial

import pytest
import torch
from torch import Tensor, nn

from pt_impl.compression.structured_pruning import remove_channels
from pt_impl.kit import comparing, saving
from pt_impl.train_step.activation_checkpointing import apply_checkpointing
from pt_impl.train_step.compilation import compiled_train_step, graph_train_step

CLASSES = 5
EXACT = 1e-6  # the same operators in the same order
ROUNDED = 0.05  # 8 bits for weights and for what layers give


class InPlace(nn.Module):
    """Activations and dropout in place, of channels and of single values."""

    def __init__(self):
        super().__init__()
        self.block = nn.Sequential(
            nn.Conv2d(3, 16, 3, padding=1), nn.Hardswish(inplace=True), nn.Dropout2d(0.5, True)
        )
        self.head = nn.Sequential(
            nn.Linear(16, 32), nn.SiLU(inplace=True), nn.Dropout(0.5, True), nn.Linear(32, CLASSES)
        )

    def forward(self, x: Tensor) -> Tensor:
        """(n, 3, h, w) -> (n, classes)."""
        return self.head(self.block(x).mean((2, 3)))


class Deep(nn.Module):
    """Residual branches, each of which a sample goes through or not; `drop` makes what decides."""

    def __init__(self, drop, blocks: int = 2):
        super().__init__()
        self.stem = nn.Conv2d(3, 16, 3, padding=1)
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.Conv2d(16, 24, 3, padding=1),
                nn.SiLU(inplace=True),
                nn.Conv2d(24, 16, 1),
                drop(),
            )
            for _ in range(blocks)
        )
        self.head = nn.Linear(16, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        """(n, 3, h, w) -> (n, classes)."""
        x = self.stem(x)
        for block in self.blocks:
            x = x + block(x)
        return self.head(torch.relu(x).mean((2, 3)))


class Floored(nn.Module):
    """Stochastic depth by rounding down, as older code has it."""

    def forward(self, x: Tensor) -> Tensor:
        """(n, ...) -> (n, ...)."""
        if not self.training:
            return x
        kept = 0.5 + torch.rand((x.shape[0],) + (1,) * (x.ndim - 1), device=x.device)
        return x.div(0.5) * kept.floor_()


class TwoSided(nn.Module):
    """Another output in training, as of models with auxiliary classifiers."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor):
        """(n, 8) -> (n, 8), in training a pair of them."""
        x = self.first(x)
        return (self.second(x), x) if self.training else self.second(x)


def stochastic_depth() -> nn.Module:
    from torchvision.ops import StochasticDepth

    return StochasticDepth(0.5, "row")


MODELS = {"in place": InPlace, "stochastic depth": partial(Deep, stochastic_depth)}
BLOCKS = {"in place": "block,head", "stochastic depth": "blocks.*"}


def build(name: str) -> nn.Module:
    torch.manual_seed(3)
    return MODELS[name]()


def images(samples: int = 32) -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(1)
    x = torch.randn(samples, 3, 8, 8, generator=random)
    return x, torch.randint(0, CLASSES, (samples,), generator=random)


def evaluated(model: nn.Module, x: Tensor) -> Tensor:
    with torch.no_grad():
        return copy.deepcopy(model).eval()(x)


def in_training(model: nn.Module, x: Tensor, seed: int = 7) -> Tensor:
    model = copy.deepcopy(model).train()
    torch.manual_seed(seed)
    with torch.no_grad():
        return model(x)


def trained(model: nn.Module, make_step) -> Tensor:
    """Three losses and all weights after them, as one vector."""
    x, y = images()
    step = make_step(model, torch.optim.SGD(model.parameters(), lr=0.1), nn.CrossEntropyLoss())
    torch.manual_seed(7)
    losses = [step(x, y).reshape(1) for _ in range(3)]
    return torch.cat([*losses, *(p.detach().flatten() for p in model.parameters())])


def plain(model, optimizer, loss_fn):
    model.train()

    def step(x, y):
        optimizer.zero_grad()
        loss = loss_fn(model(x), y)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def apart(found: Tensor, wanted: Tensor) -> float:
    return comparing.apart(found, wanted)


@pytest.mark.parametrize("name", MODELS)
def test_the_models_draw_enough_to_be_noticed(name):
    model, (x, _) = build(name), images()
    assert apart(in_training(model, x, seed=8), in_training(model, x)) > 0.2
    assert apart(evaluated(model, x), in_training(model, x)) > 0.2


# Activation checkpointing -----------------------------------------------------------------------


@pytest.mark.parametrize("name", MODELS)
def test_a_block_that_runs_again_draws_the_same(name):
    model = build(name)
    wanted = trained(copy.deepcopy(model), plain)
    apply_checkpointing(model, blocks=BLOCKS[name])
    counted = []
    first = next(module for module in model.modules() if isinstance(module, nn.SiLU))
    first.register_forward_hook(lambda *_: counted.append(1))
    assert apart(trained(model, plain), wanted) < EXACT
    assert len(counted) == 2 * 3  # forward, and again, in each step


def test_a_block_that_begins_with_dropout_in_place_is_refused():
    """As torchvision's classifiers do: what the second run would read has been dropped from."""
    model = nn.Sequential(nn.Linear(8, 8), nn.Sequential(nn.Dropout(0.5, True), nn.Linear(8, 2)))
    apply_checkpointing(model, blocks="1")
    with pytest.raises(NotImplementedError, match="block '1' changes its input in place"):
        model(torch.ones(4, 8))


# Quantization -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MODELS)
def test_quantized_training_drops_what_plain_training_drops_and_evaluation_nothing(name, tmp_path):
    from pt_impl.compression import quantization_aware_training as qat

    model, (x, _) = build(name), images()
    prepared = qat.prepare_qat(model, x, weight_bits=8)
    assert apart(evaluated(prepared, x), evaluated(model, x)) < ROUNDED
    path = saving.save(qat.convert_qat(prepared, x), tmp_path / "file")
    assert apart(saving.load(path)(x), evaluated(model, x)) < ROUNDED
    with torch.no_grad():
        for _ in range(300):  # ranges come to those of training, where what stays is doubled
            prepared(x)
    assert apart(in_training(prepared, x), in_training(model, x)) < ROUNDED
    assert apart(in_training(prepared, x, seed=8), in_training(model, x)) > 0.2


@pytest.mark.parametrize("make", [partial(Deep, Floored), TwoSided])
def test_qat_refuses_what_it_could_not_switch_off(make):
    from pt_impl.compression import quantization_aware_training as qat

    model = make()
    x = images()[0] if isinstance(model, Deep) else torch.randn(8, 8)
    with pytest.raises(NotImplementedError) as refused:
        qat.prepare_qat(model, x, weight_bits=8)
    said = str(refused.value)
    assert said.startswith("what the model does in training alone (`if self.training`) would stay")
    assert "\n" not in said
    assert ("aten.rand" in said) == isinstance(model, Deep)


@pytest.mark.parametrize("name", MODELS)
def test_quantized_after_training_it_drops_nothing(name):
    from pt_impl.compression import post_training_quantization as ptq

    model, (x, _) = build(name).train(), images()
    found = ptq.apply_static_int8(model, x)
    assert apart(found(x), evaluated(model, x)) < ROUNDED
    assert torch.equal(found(x), found(x))
    assert model.training


# Structured pruning -----------------------------------------------------------------------------


def strongest(*kernels: Tensor) -> Tensor:
    """The half of the channels with the largest L1 norm over all kernels that make them."""
    norms = sum(kernel.detach().double().abs().flatten(1).sum(1) for kernel in kernels)
    return norms.argsort(descending=True, stable=True)[: len(norms) // 2].sort().values


def cut(layer: nn.Module, makes=None, reads=None) -> None:
    weight, bias = layer.weight.data, layer.bias.data
    if reads is not None:
        weight = weight[:, reads]
    if makes is not None:
        weight, bias = weight[makes], bias[makes]
    layer.weight, layer.bias = nn.Parameter(weight), nn.Parameter(bias)


def halved(name: str) -> nn.Module:
    """The same network with half of its channels, cut by hand."""
    model = build(name)
    if name == "in place":
        first, hidden, last = model.block[0], model.head[0], model.head[3]
        kept, inside = strongest(first.weight), strongest(hidden.weight)
        cut(first, makes=kept)
        cut(hidden, makes=inside, reads=kept)
        cut(last, reads=inside)
        return model
    makers = [model.stem, *(block[2] for block in model.blocks)]  # of what is added up
    kept = strongest(*(layer.weight for layer in makers))
    cut(model.stem, makes=kept)
    for block in model.blocks:
        inside = strongest(block[0].weight)
        cut(block[0], makes=inside, reads=kept)
        cut(block[2], makes=kept, reads=inside)
    cut(model.head, reads=kept)
    return model


@pytest.mark.parametrize("name", MODELS)
def test_the_smaller_model_drops_as_one_that_was_cut_by_hand(name):
    (x, _), wanted = images(), halved(name)
    found = remove_channels(build(name), x, share=0.5)
    assert sum(p.numel() for p in found.parameters()) == sum(p.numel() for p in wanted.parameters())
    assert apart(evaluated(found, x), evaluated(wanted, x)) < EXACT
    assert apart(in_training(found, x), in_training(wanted, x)) < EXACT
    assert apart(trained(found, plain), trained(wanted, plain)) < EXACT


# Compilation ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MODELS)
def test_a_captured_step_draws_as_the_plain_one(name):
    torch.compiler.reset()
    wanted = trained(build(name), plain)
    assert apart(trained(build(name), graph_train_step), wanted) < 1e-5


@pytest.mark.campaign
def test_a_compiled_step_draws_as_the_plain_one_where_it_is_asked_for():
    """By itself TorchInductor has numbers of its own. One block, since each has its kernels."""
    from torch._inductor import config as inductor

    torch.compiler.reset()
    torch.manual_seed(3)
    model = Deep(stochastic_depth, blocks=1)
    wanted = trained(copy.deepcopy(model), plain)
    with inductor.patch(fallback_random=True):
        found = trained(model, compiled_train_step)
    assert apart(found, wanted) < 1e-5
