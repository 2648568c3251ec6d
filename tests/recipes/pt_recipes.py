"""PyTorch's models and words for the tests of recipes."""

from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
import torchvision
from torch import nn
from torch.nn.utils import parametrizations
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from pt_impl.kit import training as training_
from pt_impl.kit.examples import deep_network  # noqa: F401 - the tests take these
from pt_impl.recipes import (  # noqa: F401
    augmentation,
    checkpoints,
    early_stopping,
    initialization,
    nonfinite,
)
from pt_impl.train_step import gradient_accumulation  # noqa: F401 - a row takes it
from tests.train_step.pt_foreign_models import Merging

WIDTH = 400


def tensor(x):
    """An array as a tensor, images in PyTorch's layout."""
    x = torch.as_tensor(np.ascontiguousarray(x))
    return x.permute(0, 3, 1, 2).contiguous() if x.ndim == 4 else x


def numpy(value):
    value = value.detach()
    return (value.float() if value.dtype == torch.bfloat16 else value).numpy()


def channels_last(images):
    """Images in NumPy, in the layout of the data sets."""
    return np.moveaxis(numpy(images), 1, -1)


def output(model, x, training=False):
    """NumPy's output for NumPy's input, images with their channels last."""
    torch.manual_seed(1)
    with torch.no_grad():
        made = model.train(training)(tensor(x))
    return channels_last(made) if made.ndim == 4 else numpy(made)


def gradient_at(function, x):
    """The value of a function of a tensor, and its gradient there."""
    x = torch.tensor(x, requires_grad=True)
    value = function(x)
    value.backward()
    return value.item(), x.grad.numpy()


def gradients(model, function):
    """The value of a function of the model, and its gradient by each parameter that trains."""
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    value = function()
    found = torch.autograd.grad(value, list(named.values()), allow_unused=True)
    found = [None if gradient is None else gradient.numpy() for gradient in found]
    return value.item(), dict(zip(named, found, strict=True))


def parameters(model):
    return {name: numpy(p).copy() for name, p in model.named_parameters()}


def state(model, optimizer=None):
    """All that training changes: also modes, gradients, and the state of random numbers."""
    tensors = [*model.state_dict().values(), torch.get_rng_state()]
    tensors += [p.grad for p in model.parameters() if p.grad is not None]
    found = [module.training for module in model.modules()]
    if optimizer is not None:
        for moments in optimizer.state_dict()["state"].values():
            tensors += [moments[name] for name in sorted(moments)]
        found += [group["lr"] for group in optimizer.param_groups]
    return [np.array(value).copy() for value in (*tensors, *found)]


def random_state():
    return torch.get_rng_state().numpy().copy()


def trained_output(model, x):
    """What it gives in training, as a tensor."""
    return model.train()(x)


def fill(model, value):
    for parameter in model.parameters():
        parameter.data.fill_(value)


def linear(kernel):
    layer = nn.Linear(*kernel.shape, bias=False)
    layer.weight.data.copy_(torch.tensor(kernel.T.copy()))
    return layer


def kernel(model):
    return model.weight.detach().numpy().T


def dense_layers(count=2):
    """Dense layers in a row, each from two to two."""
    return nn.Sequential(*(nn.Linear(2, 2) for _ in range(count)))


def layers(model):
    return list(model.children())


def train_layer(layer, trains):
    layer.requires_grad_(trains)


def sgd(model, rate=0.1):
    return torch.optim.SGD(model.parameters(), lr=rate)


def adamw(model, rate=0.1, decay=0.0):
    return torch.optim.AdamW(model.named_parameters(), lr=rate, weight_decay=decay)


def rate_of(optimizer):
    return float(optimizer.param_groups[0]["lr"])


def set_rate(optimizer, rate):
    optimizer.param_groups[0]["lr"] = rate


def still(model, optimizer, steps=1):
    """Steps without a gradient."""
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
    for _ in range(steps):
        optimizer.step()


class Language(nn.Module):
    """A tied head, a frozen layer, a token, norms and dropout: a parameter of each kind."""

    def __init__(self, dropout):
        super().__init__()
        self.embedding = nn.Embedding(50, 16)
        self.frozen = nn.Linear(16, 16).requires_grad_(False)
        self.dense = nn.Linear(16, 16)
        self.norm = nn.LayerNorm(16)
        self.drop = nn.Dropout(dropout)
        self.batch_norm = nn.BatchNorm1d(16)
        self.token = nn.Parameter(torch.ones(1, 16))
        self.head = nn.Linear(16, 50, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, codes):
        x = self.norm(self.dense(self.frozen(self.embedding(codes))).relu())
        return self.head(self.batch_norm(self.drop(x)) + self.token)


def language(dropout=0.5):
    torch.manual_seed(7)
    return Language(dropout)


def with_spectral_norm(outputs):
    """One whose layer writes to itself in training, behind BatchNorm."""
    dense = parametrizations.spectral_norm(nn.Linear(8, outputs))
    return nn.Sequential(nn.BatchNorm1d(8), dense)


def foreign():
    """A model of others."""
    return torchvision.models.resnet18(weights=None)


# Regularization ----------------------------------------------------------------------------------


def total(output, y=None):
    return output.sum()


def wide():
    """A layer in float64."""
    return nn.Linear(2, 1).double()


def decay_of(optimizer):
    return max(group["weight_decay"] for group in optimizer.param_groups)


def kernels_of(model):
    """How many convolutions and dense layers it has."""
    return sum(isinstance(module, (nn.Conv2d, nn.Linear)) for module in model.modules())


def computed():
    """Layers whose kernels are computed from others, and which of them decay."""
    model = nn.Sequential(
        parametrizations.spectral_norm(nn.Embedding(5, 3)),
        parametrizations.spectral_norm(nn.Conv1d(3, 4, 1)),
        parametrizations.weight_norm(nn.Linear(4, 4)),
        parametrizations.weight_norm(nn.LayerNorm(4), dim=None),
    )
    weights = ("1", "original"), ("2", "original0"), ("2", "original1")
    return model, [f"{layer}.parametrizations.weight.{name}" for layer, name in weights]


class Block(nn.Module):
    """Dropout within a branch, say, and not the last to run."""

    def __init__(self):
        super().__init__()
        self.norm = nn.Identity()
        self.dropout = nn.Dropout(0.0)

    def forward(self, x):
        return self.norm(self.dropout(x))


class Keyword(nn.Module):
    """Its head is called by keyword, and another module has a layer of its own."""

    def __init__(self):
        super().__init__()
        self.attention = nn.Linear(WIDTH, 1)
        self.tail = nn.Sequential(nn.Linear(WIDTH, WIDTH))

    def forward(self, x):
        return self.tail[0](input=x)


def identities():
    """Models whose output is their input, if nothing is dropped."""
    two = [nn.Linear(WIDTH, WIDTH) for _ in range(4)]
    models = [
        nn.Sequential(*two[:2]),
        nn.Sequential(*two[2:], nn.ReLU(), nn.Identity()),
        nn.Sequential(Block(), nn.Linear(WIDTH, WIDTH)),
        Keyword(),
    ]
    for module in nn.ModuleList(models).modules():
        if isinstance(module, nn.Linear) and module.out_features == WIDTH:
            nn.init.eye_(module.weight)
            nn.init.zeros_(module.bias)
    return models


def dropped():
    """Attention with dropout, one that is off, one of each other kind."""
    block = nn.TransformerEncoderLayer(8, 2, 8, dropout=0.1, batch_first=True)
    kinds = nn.Dropout2d, nn.AlphaDropout, nn.FeatureAlphaDropout
    return nn.Sequential(block, nn.Dropout(0.0), *[kind(0.2) for kind in kinds])


def dropout_rates(model):
    return [model[0].self_attn.dropout, *(module.p for module in model[1:])]


def adam(model):
    return torch.optim.Adam(model.parameters())


def momentum(model):
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def scheduled(model):
    """An optimizer at which a scheduler stands."""
    optimizer = adamw(model)
    torch.optim.lr_scheduler.ConstantLR(optimizer)
    return optimizer


def without_dense():
    return nn.Sequential(nn.ReLU())


def two_heads():
    return nn.ModuleDict({"classes": nn.Linear(8, 3), "boxes": nn.Linear(8, 4)})


def dropout_at_the_end_of_a_part():
    return nn.Sequential(nn.Sequential(nn.Linear(2, 2), nn.Dropout()), nn.Linear(2, 2))


# Initialization ----------------------------------------------------------------------------------


def layers_of_each_kind():
    return {
        "dense": nn.Linear(200, 300),
        "convolution": nn.Conv2d(16, 64, 3),
        "grouped": nn.Conv2d(32, 64, 3, groups=4),
        "depthwise": nn.Conv2d(96, 192, 5, groups=96),
        "transposed": nn.ConvTranspose2d(32, 48, 4, stride=2),
        "attention": nn.MultiheadAttention(64, 4, batch_first=True),
        "lstm": nn.LSTM(48, 32),
        "gru": nn.GRU(48, 32),
    }


def holder(layers):
    return nn.ModuleDict(layers)


def matrices(name, layer):
    """(kernel, matrices of (inputs, outputs)) written out apart from the technique."""
    if name in ("lstm", "gru"):
        gates = 4 if name == "lstm" else 3
        found = {
            f"{name} input": [gate.T for gate in layer.weight_ih_l0.chunk(gates)],
            f"{name} recurrent": [gate.T for gate in layer.weight_hh_l0.chunk(gates)],
        }
    elif name == "attention":
        query, key, value = layer.in_proj_weight.chunk(3)
        found = {"query": [query.T], "key": [key.T], "value": [value.T]}
        found["out"] = [layer.out_proj.weight.T]
    elif name == "transposed":
        found = {name: [layer.weight.permute(0, 2, 3, 1).flatten(0, 2)]}
    else:
        groups = layer.weight.chunk(getattr(layer, "groups", 1))
        found = {name: [group.flatten(1).T for group in groups]}
    return {kind: [numpy(matrix) for matrix in found[kind]] for kind in found}


def biases(name, layer):
    found = [numpy(p).ravel() for key, p in layer.named_parameters() if "bias" in key]
    return np.concatenate(found)


def freeze_first_kernel(network):
    """Of a deep network; returns it."""
    return network.layers[0].weight.requires_grad_(False)


def foreign_models():
    """Torchvision's networks and PyTorch's own transformer."""
    small = {"num_layers": 2, "num_heads": 2, "hidden_dim": 32, "mlp_dim": 64}
    block = nn.TransformerEncoderLayer(32, 2, 64, batch_first=True)
    vit = torchvision.models.VisionTransformer(32, 16, **small)
    return [foreign(), vit, nn.TransformerEncoder(block, 2)]


def without_parameters():
    return nn.Sequential(nn.LazyLinear(3))


def normed():
    return nn.Sequential(parametrizations.weight_norm(nn.Linear(3, 3)))


# Gradient health ---------------------------------------------------------------------------------


def write_kernels(network, kernels):
    """Of a deep network; its biases are zero."""
    for layer, values in zip([*network.layers, network.head], kernels, strict=True):
        layer.weight.data.copy_(torch.tensor(values.T))
        layer.bias.data.zero_()


def ending_in(name):
    """Two layers, the last one of this name."""
    model = nn.Sequential()
    model.add_module("first", nn.Linear(3, 3))
    model.add_module(name, nn.Linear(3, 4))
    return model


def behind(model, wrap):
    """A model that wraps what another gives."""
    outer = nn.Sequential(model)
    outer.forward = lambda x: wrap(model(x))
    return outer


# Averaging ---------------------------------------------------------------------------------------


def dense_of(dtype):
    """A layer in this precision."""
    return nn.Linear(1, 1).to(getattr(torch, dtype))


def kept(average):
    return average.state_dict()


def take(average, kept):
    average.load_state_dict(kept)


def modes_of_norms(model):
    return [(m.training, m.momentum) for m in model.modules() if hasattr(m, "momentum")]


def mean_of(norm):
    return norm.running_mean.numpy()


def first_convolution(model, x):
    """What it makes of a batch: NumPy, (pixels, channels)."""
    module = next(m for m in model.modules() if isinstance(m, nn.Conv2d))
    return numpy(module(x)).swapaxes(0, 1).reshape(module.out_channels, -1).T


def two_norms(x):
    return nn.Sequential(nn.BatchNorm1d(3), nn.BatchNorm1d(3))


class Siamese(nn.Module):
    """One BatchNorm of the sum of two inputs, or of one after the other."""

    def __init__(self, shared):
        super().__init__()
        self.norm, self.shared = nn.BatchNorm1d(3), shared

    def forward(self, left, right):
        if self.shared:
            return self.norm(left) - self.norm(right + 5)
        return self.norm(left + right)


def call(model, pair):
    """PyTorch's have their parameters already."""


class TwoDomains(nn.Module):
    """A BatchNorm for each of two domains."""

    def __init__(self):
        super().__init__()
        self.other = Merging()
        self.norms = nn.ModuleList(nn.BatchNorm1d(3) for _ in range(2))

    def forward(self, x, domain=0):
        return self.norms[domain](x)


def behind_dropout(x):
    """A model, its norm, and the mean of what that is given without dropout."""
    norm = nn.BatchNorm1d(8)
    return nn.Sequential(nn.Dropout(0.5), norm), norm, x.mean((0, 2)).numpy()


def of_weight_norm():
    """What Python cannot copy."""
    return nn.utils.weight_norm(nn.Linear(2, 2))


# Checkpoints -------------------------------------------------------------------------------------


def with_dropout(seed, width):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(8, width), nn.Dropout(0.5), nn.Linear(width, 4))


def low_precision(seed):
    """A layer in bfloat16."""
    torch.manual_seed(seed)
    return nn.Linear(3, 4, dtype=torch.bfloat16)


def save_pickle(path):
    """One that would run code."""
    torch.save({"version": 1, "weights": Path("x"), "state": {}}, path)


def one_cycle(optimizer):
    settings = {"total_steps": 9, "cycle_momentum": False}
    return torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, **settings)


# Schedules ---------------------------------------------------------------------------------------


LAST_STEP = 19


def weight():
    """Of zero, in float64."""
    return nn.Parameter(torch.zeros(1, dtype=torch.float64))


def sgd_of(weights, rate):
    return torch.optim.SGD(weights, lr=rate)


def moved(weight, optimizer, schedule):
    """How far a step with a gradient of one moves a weight."""
    before = weight.item()
    weight.grad = torch.ones_like(weight)
    optimizer.step()
    if schedule.last_epoch < LAST_STEP:
        schedule.step()
    return before - weight.item()


def progress(optimizer, schedule):
    """What goes into a checkpoint."""
    return optimizer.state_dict(), schedule.state_dict()


def resume_at(optimizer, schedule, state):
    optimizer.load_state_dict(state[0])
    schedule.load_state_dict(state[1])


# Learning-rate finder ----------------------------------------------------------------------------

DROPOUT = 0.5


def with_batch_norm(kernels, dropout):
    torch.manual_seed(3)
    first, last = nn.Linear(8, 16), nn.Linear(16, 4)
    for layer, values in zip((first, last), kernels, strict=True):
        layer.weight.data.copy_(torch.tensor(values.T))
        layer.bias.data.zero_()
    norm = nn.BatchNorm1d(16, eps=1e-3)
    return nn.Sequential(first, norm, nn.ReLU(), nn.Dropout(dropout), last)


def step_of_own_loss(model):
    """(layer, optimizer, step) of a loss with a layer of its own, which the optimizer trains."""
    scale = nn.Linear(4, 4)
    optimizer = torch.optim.SGD([*model.parameters(), *scale.parameters()], lr=0.01)

    def loss(outputs, y):
        return training_.cross_entropy(scale(outputs), y)

    return scale, optimizer, training_.make_train_step(model, optimizer, loss)


# Loss checks -------------------------------------------------------------------------------------

cross_entropy = nn.CrossEntropyLoss()


def classifier(outputs, form, kind="softmax"):
    torch.manual_seed(0)
    sigmoid = kind == "sigmoid"
    ends = {
        "logits": nn.Identity(),
        "probabilities": nn.Sigmoid() if sigmoid else nn.Softmax(-1),
        "log-probabilities": nn.LogSoftmax(-1),
    }
    return nn.Sequential(nn.Flatten(), nn.Dropout(), nn.Linear(64, outputs), ends[form])


def clipped(p, y):
    """PyTorch's own check of the range would raise before anything can be said."""
    return F.binary_cross_entropy(p.clamp(0, 1), y)


def loss_over(kind, takes):
    if kind == "sigmoid":
        return {"logits": nn.BCEWithLogitsLoss(), "probabilities": clipped}[takes]
    return {
        "logits": nn.CrossEntropyLoss(label_smoothing=0.1),
        "probabilities": lambda p, y: F.nll_loss(torch.log(p), y),
        "log-probabilities": nn.NLLLoss(),
    }[takes]


def mean(value):
    return value.mean()


def column(y):
    return y[:, None]


class AsType(nn.Sequential):
    def forward(self, x):
        return super().forward(x.bfloat16())


def in_bfloat16(model):
    return AsType(model.bfloat16())


def squeezing(y):
    """(model, loss, data) of a probability a sample, several in integers, and a mask."""
    one, several = (classifier(outputs, "probabilities", "sigmoid") for outputs in (1, 5))
    mask = nn.Sequential(nn.Conv2d(3, 1, 1), nn.Sigmoid())
    random = np.random.default_rng(0)
    images, masks = random.uniform(0, 1, (2, 4, 7, 3)), random.integers(0, 2, (2, 4, 7))
    return [
        (one, lambda p, y: clipped(p.squeeze(), y), {"y": (y % 2).astype(np.float32)}),
        (
            several,
            lambda p, y: F.binary_cross_entropy(p, y.float()),
            {"y": np.repeat(y[:, None] % 2, 5, 1)},
        ),
        (
            mask,
            lambda p, y: F.binary_cross_entropy(p.squeeze(1), y.float()),
            {"x": images.astype(np.float32), "y": masks.astype(np.float32)},
        ),
    ]


class Wrapped(nn.Module):
    """Probabilities in a dict, of an image by name."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, image):
        return {"logits": self.model(image).softmax(-1)}


def losses_of_outputs():
    return [lambda o, y: cross_entropy(o.logits, y), lambda o, y: cross_entropy(o["logits"], y)]


def of_two_outputs():
    return nn.Sequential(nn.Flatten(), nn.LSTM(64, 4))


def foreign_classifiers():
    """(model, what is said of it)."""
    resnet = torchvision.models.resnet18(num_classes=4)
    twice = nn.Sequential(resnet, nn.Softmax(1))
    return [(resnet, "nothing found"), (twice, "a softmax twice")]


def exact_losses():
    """(loss over logits, classes)."""
    return [(F.cross_entropy, 10), (F.binary_cross_entropy_with_logits, 1)]


def losses_over_probabilities():
    """(loss, classes, margin up to which the gradient is kept, margin from which it is lost)."""
    return [
        (lambda z, y: F.nll_loss(z.softmax(-1).log(), y), 10, 80, 90),
        (lambda z, y: F.binary_cross_entropy(z.sigmoid(), y), 1, 15, 17),
    ]


# Where NaN begins --------------------------------------------------------------------------------


def with_norm(*middle):
    torch.manual_seed(0)
    first, last = nn.Linear(64, 8), nn.Linear(8, 4)
    return nn.Sequential(nn.Flatten(), first, nn.BatchNorm1d(8), *middle, nn.Dropout(), last)


class Root(nn.Module):
    """Its gradient at 0 is not finite; 0 * inf is NaN."""

    def forward(self, x):
        return torch.sqrt(x - x)


class Log(nn.Module):
    def forward(self, x):
        return torch.log(x - x)


def broken():
    """(model, what is said of it)."""
    in_weight = with_norm()
    in_weight[1].weight.data[0, 0] = torch.nan
    layer = "not finite: batch 7: output of layer 3: 64 infinite of 64 values"
    scripted = torch.jit.trace(nn.Sequential(nn.Linear(8, 8), Log()), torch.zeros(1, 8))
    return [
        (in_weight, "not finite: batch 7: parameter 1.weight: 1 NaN of 512 values"),
        (with_norm(Log()), layer),
        (with_norm(scripted), layer),  # which takes no hook
        (with_norm(Root()), "not finite: batch 7: gradient of 2.bias"),
    ]


def broken_foreign():
    model = torchvision.models.resnet18(num_classes=4)
    model.layer2[0].conv1.weight.data[0, 0, 0, 0] = torch.nan
    return model, "parameter layer2.0.conv1.weight: 1 NaN of"


def has_no_hooks(model):
    from torch.nn.modules.module import _global_forward_hooks

    return not _global_forward_hooks and not any(m._forward_hooks for m in model.modules())


class Counting(nn.Linear):
    """Of an extra state, and a buffer that is not saved."""

    def __init__(self):
        super().__init__(4, 2)
        self.register_buffer("calls", torch.zeros(()), persistent=False)

    def forward(self, x):
        self.calls += 1
        return super().forward(x)

    def get_extra_state(self):
        return {"scale": 2}

    def set_extra_state(self, state):
        pass


# Data checks -------------------------------------------------------------------------------------


def half(x):
    return tensor(x).bfloat16()


class Stream(IterableDataset):
    def __init__(self, *parts):
        self.parts = parts

    def __iter__(self):
        return zip(*(torch.as_tensor(part).split(8) for part in self.parts), strict=True)


def datasets(x, y):
    """(dataset, how many batches it has)."""
    samples = TensorDataset(torch.as_tensor(x), torch.as_tensor(y))
    return [(samples, 1), (DataLoader(samples, batch_size=16), 4), (Stream(x, y), 8)]
