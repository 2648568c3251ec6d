"""PyTorch's models and words for the tests of the kit."""

import contextlib
import re

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from pt_impl.deployment import reduced_precision
from pt_impl.kit import detection, models, runtime, training
from pt_impl.train_step import compilation
from shared.specs import TASKS, DetectorSpec, GPTSpec

DEVICE = runtime.device
runtime.device = lambda: "cpu"
ATTENTION = 2  # forward and backward, each one operator
CONVOLUTION = 2  # the same
PREDICTS = (training.make_predict, reduced_precision.make_predict, compilation.eager_predict)


def numpy(tensor):
    return tensor.detach().numpy()


def tensor(array):
    return torch.from_numpy(array)


def bfloat16(array):
    return torch.from_numpy(array).bfloat16()


def device():
    """What the kit says, and what there is."""
    return DEVICE(), "cuda" if torch.cuda.is_available() else "cpu"


def draw():
    return torch.rand(1).item()


def other_threads():
    """PyTorch sets those within operators anew."""
    assert runtime.configure(threads=3, seed=0) == {"intra_op": 3, "inter_op": 1}
    assert (torch.get_num_threads(), torch.get_num_interop_threads()) == (3, 1)
    torch.set_num_threads(1)


def tf32():
    """The last two are what torch.compile asks on a GPU; it fails where old and new disagree."""
    flags = torch.backends.cuda.matmul.fp32_precision, torch.backends.cudnn.conv.fp32_precision
    return *flags, torch.backends.cudnn.allow_tf32, torch.get_float32_matmul_precision()


# Models


def freeze_head(model):
    model.head.requires_grad_(False)


def in_training(model, x):
    return model.train()(x)


def share_dropped(model):
    """Of what the feed-forward part of a block adds."""
    block, hidden = model.train().block0, torch.randn(64, 6, 8)
    nn.init.zeros_(block.projection.weight)
    return float((block(hidden) == hidden).float().mean())


def with_weights_of_torchvision(ours, depth):
    """The logits of both models after ours was given theirs: no scale is 1 and no shift is 0."""
    import torchvision  # whose import takes longer than torch's: not where tests are collected

    theirs = getattr(torchvision.models, f"resnet{depth}")(weights=None).eval()
    for module in theirs.modules():
        if isinstance(module, nn.BatchNorm2d):
            for value in (module.weight, module.bias, module.running_mean, module.running_var):
                nn.init.uniform_(value, 0.2, 0.5)
    names = (
        (r"^stem\.(conv|bn)", r"\g<1>1"),
        (r"^stage(\d)\.block(\d)", lambda match: f"layer{int(match[1]) + 1}.{match[2]}"),
        (r"conv(\d)\.(conv|bn)", lambda match: f"{match[2]}{int(match[1]) + 1}"),
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
        return ours.eval()(x), theirs(x)


def fine_tuned_head():
    """A model whose head alone is in training mode, and its modes."""
    head = nn.Sequential(nn.Dropout(0.5), nn.Linear(64, 2))
    model = nn.Sequential(nn.Linear(4, 64), head).eval()
    head.train()
    return model, [module.training for module in model.modules()]


# Steps


def computing_in(dtype):
    return contextlib.nullcontext()


def step_in(dtype, model, optimizer, step):
    """The kit's step, or one under autocast."""
    if dtype == "float32":
        return step

    def autocast_step(x, y):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            logits = model(x)
        training.cross_entropy(logits, y).backward()
        optimizer.step()

    return autocast_step


def with_a_wide_head(model, optimizer, step):
    """A step of the model whose head computes in float64."""
    model.head = nn.Sequential(nn.Flatten(), model.head.double())
    model.head.register_forward_pre_hook(lambda module, inputs: (inputs[0].double(),))
    return training.make_train_step(model, optimizer, F.cross_entropy)


def compiled_product():
    """A step of two products, and its batch: forward, and the gradient of the weight."""
    weight = torch.randn(16, 16, dtype=torch.bfloat16, requires_grad=True)

    @torch.compile
    def product(x):  # alone: for anything beside it C++ would be compiled
        return x @ weight

    return lambda x, y: product(x).sum().backward(), torch.randn(4, 16, dtype=torch.bfloat16)


def compiled_steps(made):
    """A compiled function, and steps around a model compiled in either way."""

    def as_captured(graph, example_inputs):
        return graph

    model, optimizer, _ = made
    torch._dynamo.reset()
    yield torch.compile(lambda x, y: (x * 2).sum(), backend=as_captured, dynamic=False)
    for compiled in (torch.compile(model, backend=as_captured, dynamic=False), model):
        torch._dynamo.reset()
        model.compile(backend=as_captured, dynamic=False)
        yield training.make_train_step(compiled, optimizer, training.cross_entropy)


def loss_and_gradient(loss_fn, output, labels):
    output = torch.from_numpy(output).requires_grad_()
    loss = loss_fn(output, labels)
    loss.backward()
    return loss.item(), output.grad.numpy()


# FLOPs, by PyTorch's own counter


def _counted(call, fused=False) -> int:
    backend = SDPBackend.FLASH_ATTENTION if fused else SDPBackend.MATH
    with sdpa_kernel(backend), FlopCounterMode(display=False) as counter:
        call()
    return counter.get_total_flops()


def _batch(spec, size):
    if isinstance(spec, GPTSpec):
        return [torch.zeros(size, spec.sequence_length, dtype=torch.int64)] * 2
    height, width, channels = spec.input_shape
    detector = isinstance(spec, DetectorSpec)
    y = torch.ones(size, 1, 5) if detector else torch.zeros(size, dtype=torch.int64)
    return torch.randn(size, channels, height, width), y


def prediction_flops(spec, size):
    model, (x, _) = models.build(spec), _batch(spec, size)
    return _counted(lambda: model(x))


def saved_values(spec, size):
    """Values that autograd saves of a forward pass, but for parameters and the batch."""
    model, (x, y) = models.build(spec).train(), _batch(spec, size)
    given = {part.untyped_storage().data_ptr() for part in (x, y, *model.parameters())}
    saved = {}

    def keep(part):
        saved[part.untyped_storage().data_ptr()] = part  # it lives, so that no other has its place
        return part

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda part: part):
        training.cross_entropy(model(x), y)
    sizes = [part.untyped_storage().nbytes() for place, part in saved.items() if place not in given]
    return sum(sizes) / 4


def step_flops(spec, size, fused=False):
    model, (x, y) = models.build(spec), _batch(spec, size)
    loss = training.cross_entropy
    if isinstance(spec, DetectorSpec):
        loss = detection.make_detection_loss(spec)
    optimizer = training.make_optimizer(model, TASKS["digits-cnn"].recipe)
    step = training.make_train_step(model, optimizer, loss)
    return _counted(lambda: step(x, y), fused)
