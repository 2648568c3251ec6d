"""The train-step techniques of PyTorch on models that nobody here wrote, in a process of its own.

`python -m tests.train_step.pt_foreign_worker pt` runs every scenario and prints one
line of JSON: scenario -> what was found, or {"error": traceback}. What a technique does is held
against plain PyTorch code here, and judged in `test_pt_foreign_models.py`.
"""

from __future__ import annotations

import copy
import json
import math
from collections import UserDict
from contextlib import contextmanager
from functools import cache, partial, wraps
from unittest import mock

import torch
from torch import nn

from tests import workers
from tests.train_step import pt_foreign_models as foreign
from tests.workers import raised

NAMES = (
    "mixed_precision",
    "loss_scaling",
    "accumulated_statistics",
    "compilation",
    "gradient_accumulation",
    "gradient_clipping",
    "finite_guard",
    "activation_checkpointing",
    "memory_format",
    "optimizer_implementations",
    "stacking",
)
impl = workers.implementation(
    "pt",
    *(f"train_step.{name}" for name in NAMES),
    *("deployment.native_export", "deployment.reduced_precision"),
)
kit, train = impl.kit, impl.train_step
reduced_precision = impl.deployment.reduced_precision
STEPS, SCALE, NORM, PARTS = 2, 1024.0, 0.1, 3
MODELS = [maker.__name__ for maker in foreign.ALL]
FEW = ("tied", "keywords", "in_place")  # to be captured, which takes a second each


def optimizer_of(model):
    """Its decay would reach what has no gradient, were that zero instead of none."""
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1)


# Plain PyTorch code: how gradients come about, and what happens to them ---------------------------


def backward(model, x, y, loss_fn):
    loss = loss_fn(foreign.call(model, x), y)
    loss.backward()
    return loss


def autocast(model, x, y, loss_fn):
    with torch.autocast("cpu", torch.bfloat16):
        output = foreign.call(model, x)
    loss = loss_fn(output, y)  # the losses of the foreign models cast to float32
    loss.backward()
    return loss


def in_parts(count):
    def run(model, x, y, loss_fn):
        total = 0.0
        for index in range(count):
            rows = slice(index * foreign.SAMPLES // count, (index + 1) * foreign.SAMPLES // count)
            part = cut(x, rows), y[rows]
            share = len(part[1]) / foreign.SAMPLES
            total += backward(model, *part, lambda o, y, s=share: loss_fn(o, y) * s).detach()
        return total

    return run


def cut(x, rows):
    if isinstance(x, torch.Tensor):
        return x[rows]
    if isinstance(x, dict | UserDict):
        return {key: cut(value, rows) for key, value in x.items()}
    return type(x)(cut(value, rows) for value in x) if isinstance(x, tuple | list) else x


def clip(model):
    nn.utils.clip_grad_norm_(model.parameters(), NORM)


def clip_each(model):
    for parameter in model.parameters():
        nn.utils.clip_grad_norm_(parameter, NORM)


def trained(name, make_step, dtype=torch.float32):
    """Losses of some steps, and all parameters and buffers after them."""
    model, x, y, loss_fn = foreign.make(name)
    model = model.to(dtype)
    step = make_step(model, optimizer_of(model), loss_fn)
    torch.manual_seed(1)  # dropout
    losses = [step(x, y).item() for _ in range(STEPS)]
    return losses, [t.detach().float() for t in (*model.parameters(), *model.buffers())]


@cache
def plain(gradients=backward, change=lambda model: None):
    def make_step(model, optimizer, loss_fn):
        model.train()

        def step(x, y):
            optimizer.zero_grad()
            loss = gradients(model, x, y, loss_fn)
            change(model)
            optimizer.step()
            return loss.detach()

        return step

    return make_step


@cache
def expected_of(name, make_step):
    """What plain code gives, which is that of several techniques."""
    return trained(name, make_step)


def apart(ours, theirs):
    """The largest relative difference of a loss or a tensor; 0 means equal to the last bit."""
    found = [abs(a - b) / abs(b) for a, b in zip(ours[0], theirs[0], strict=True)]
    for a, b in zip(ours[1], theirs[1], strict=True):
        found.append(((a - b).norm() / b.norm().clamp_min(1e-12)).item())
    return max(found)


# Scenarios ------------------------------------------------------------------------------------


def eager(model, optimizer, loss_fn):
    return kit.training.make_train_step(model, optimizer, loss_fn)


def techniques():
    """name -> (the technique's step, plain code's)."""

    def set_up(maker, **settings):
        return lambda model, optimizer, loss_fn: maker(model, optimizer, loss_fn, **settings)

    def on(change):
        return lambda model, optimizer, loss_fn: eager(change(model), optimizer, loss_fn)

    mixed = train.mixed_precision.make_train_step
    accumulate = train.gradient_accumulation.make_train_step
    clipping = train.gradient_clipping
    checkpointing = train.activation_checkpointing.apply_checkpointing
    stacked = train.stacking.make_train_step
    return {
        "kit": (eager, plain()),
        "float32": (set_up(mixed, dtype="float32"), plain()),
        "bfloat16": (mixed, plain(autocast)),
        "bfloat16 clipped": (
            set_up(stacked, dtype="bfloat16", max_norm=NORM),
            plain(autocast, clip),
        ),
        "eager": (train.compilation.eager_train_step, plain()),
        "graph": (train.compilation.graph_train_step, plain()),
        "1 part": (set_up(accumulate, micro_batches=1), plain()),
        "parts": (set_up(accumulate, micro_batches=PARTS), plain(in_parts(PARTS))),
        "clip": (set_up(clipping.make_train_step, max_norm=NORM), plain(change=clip)),
        "no clip": (set_up(clipping.make_train_step, max_norm=math.inf), plain()),
        "guard": (train.finite_guard.make_train_step, plain()),
        "clip each": (
            set_up(clipping.make_per_variable_step, max_norm=NORM),
            plain(change=clip_each),
        ),
        "checkpointing": (on(lambda model: checkpointing(model, blocks="*")), plain()),
        "products": (
            on(lambda model: checkpointing(model, blocks="*", save_products=True)),
            plain(),
        ),
        "channels_last": (on(train.memory_format.apply_memory_format), plain()),
        "stacking": (stacked, plain()),
        "stacking parts": (
            set_up(stacked, micro_batches=foreign.SAMPLES),
            plain(in_parts(foreign.SAMPLES)),
        ),
        "stacking bfloat16": (set_up(stacked, dtype="bfloat16"), plain(autocast)),
    }


def matrix():
    """technique -> model -> how far apart it is from plain code, or what it raised."""
    found = {}
    for name, (ours, theirs) in techniques().items():
        torch.compiler.reset()
        found[name] = {}
        for model in FEW if name == "graph" else MODELS:
            try:
                expected = expected_of(model, theirs)
            except Exception as error:  # a kernel that this CPU lacks
                found[name][model] = {"plain": f"{type(error).__name__}: {error}"}
            else:
                found[name][model] = {}
            try:
                result = trained(model, ours)
            except Exception as error:
                found[name][model]["raised"] = f"{type(error).__name__}: {error}"
            else:
                known = "plain" not in found[name][model]
                found[name][model]["apart"] = apart(result, expected) if known else None
    return found


def half_width():
    """Steps over bfloat16 parameters against plain code; float16 ones refused."""
    found = {}
    for name, (ours, theirs) in techniques().items():
        if name in ("eager", "graph", "clip", "parts", "checkpointing"):
            torch.compiler.reset()
            rows = [
                trained("two_inputs", make_half(step), torch.bfloat16) for step in (ours, theirs)
            ]
            found[name] = apart(*rows)
    model = foreign.make("two_inputs")[0].half()
    arguments = model, optimizer_of(model), nn.MSELoss()
    for name in ("mixed_precision", "stacking"):
        found[name] = raised(getattr(train, name).make_train_step, *arguments, dtype="float16")
    return found


def make_half(make_step):
    def make(model, optimizer, loss_fn):
        step = make_step(model, optimizer, loss_fn)
        return lambda x, y: step(tuple(value.bfloat16() for value in x), y)

    return make


def rows():
    """How many rows the model saw of each part of a batch in a mapping."""
    found = {}
    for name in ("gradient_accumulation", "stacking"):
        model, x, y, loss_fn = foreign.make("keywords")
        seen = found[name] = []
        model.embedding.register_forward_hook(lambda m, args, o, seen=seen: seen.append(len(o)))
        step = getattr(train, name).make_train_step(
            model, optimizer_of(model), loss_fn, micro_batches=foreign.SAMPLES
        )
        step(x, y)
    return found


def predictions():
    """Dtypes of a half-width prediction of `nn.TransformerEncoder`, and what it must equal."""
    model, x, _, _ = foreign.make("encoder")
    predict = reduced_precision.make_predict(model, dtype="bfloat16")
    dtypes = kit.runtime.operator_dtypes(lambda x, y: predict(x), x, None)
    fused = torch.backends.mha.get_fastpath_enabled()
    ours = predict(x)
    model.eval()
    torch.backends.mha.set_fastpath_enabled(False)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        theirs = model(**x)
    torch.backends.mha.set_fastpath_enabled(True)
    found = {"fused": fused, "matmul": dtypes["matmul"], "equal": torch.equal(ours, theirs.float())}
    for name in ("keywords", "two_inputs", "pieces"):
        model, x, _, _ = foreign.make(name)
        outputs = [
            predict(x)
            for predict in (
                kit.training.make_predict(model),
                train.compilation.eager_predict(model),
                reduced_precision.make_predict(model, dtype="float32"),
            )
        ]
        with torch.no_grad():
            outputs.append(foreign.call(model.eval(), x))
        leaves = [tensors(output) for output in outputs]
        found[name] = all(
            torch.equal(a, b) for row in leaves for a, b in zip(row, leaves[-1], strict=True)
        )
    return found


def merged():
    """Modes of a model, a part of which is frozen, after a prediction, and training it."""
    baseline = workers.implementation("pt", "train_step.baseline").train_step.baseline
    makers = {
        "kit": kit.training.make_predict,
        "reduced_precision": partial(reduced_precision.make_predict, dtype="float32"),
        "compilation": train.compilation.eager_predict,
    }
    found = {}
    for name in (*makers, "baseline"):
        model = nn.Sequential(foreign.Merging(), nn.BatchNorm1d(4), foreign.Keeping())
        if name == "baseline":
            step = baseline.make_hand_written_step(model, optimizer_of(model))
            run = partial(step, y=torch.arange(3))
        else:
            run = makers[name](model)
        model[1].eval()
        run(torch.randn(3, 4))
        found[name] = [[m.training for m in model.modules()], model[0].merged]
        model(torch.randn(3, 4)).sum().backward()
    return found


def tensors(output):
    if isinstance(output, foreign.Output):
        return [output.logits, *output.hidden]
    return list(output.values() if isinstance(output, dict) else output)


def outputs():
    """The dtypes that a loss gets of a dataclass, a mapping and a tuple out of half width."""
    found = {}
    for name in ("keywords", "pieces", "two_inputs"):
        model, x, y, loss_fn = foreign.make(name)
        seen = []

        def watch(output, y, seen=seen, loss_fn=loss_fn):
            seen.append([type(output).__name__, *(str(t.dtype) for t in tensors(output))])
            return loss_fn(output, y)

        for maker in (train.mixed_precision, train.stacking):
            maker.make_train_step(model, optimizer_of(model), watch, dtype="bfloat16")(x, y)
        found[name] = seen
    found["mapping"] = []
    for kind in (Named, Linked):
        output = kind(logits=torch.ones(2, dtype=torch.bfloat16))
        cast = train.mixed_precision.to_float32(output)
        dtypes = [str(each.dtype) for each in (cast.logits, cast["logits"], output.logits)]
        found["mapping"].append([type(cast) is kind, *dtypes])
    return found


class Named(dict):
    """A dict whose entries are attributes, too."""

    def __getattr__(self, name):
        if name in self:
            return self[name]
        raise AttributeError(name)


class Linked(dict):
    """The same, as it is often written."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.__dict__ = self


def logits():
    """The kit's loss, its evaluation and the hand-written step on outputs with `.logits`."""
    model, x, y, loss_fn = foreign.make("keywords")
    loss = kit.training.cross_entropy(foreign.call(model, x), y)
    plain_loss = loss_fn(foreign.call(model, x), y)
    found = {"loss": loss.item() == plain_loss.item()}
    inputs = {name: value for name, value in x.items() if name != "scale"}
    predict = kit.training.make_predict(model)
    found["accuracy"] = kit.training.evaluate(predict, inputs, y, metric="accuracy", batch_size=3)
    hits = (model(**inputs).logits.argmax(-1) == y).double().mean()
    found["by hand"] = 100 * hits.item()
    baseline = workers.implementation("pt", "train_step.baseline").train_step.baseline
    step = baseline.make_hand_written_step(model, optimizer_of(model))
    found["hand-written"] = step(x, y).item() == plain_loss.item()
    return found


def float16():
    """Clipping under loss scaling in one step against plain code; scaling saved and resumed."""

    def by_hand(model, optimizer, loss_fn):
        scaler = torch.amp.GradScaler("cpu", init_scale=SCALE)

        def step(x, y):
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.float16):
                output = model(*x)
            loss = loss_fn(output, y)
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            clip(model)
            scaler.step(optimizer)
            scaler.update()
            return loss

        return step

    def composed(model, optimizer, loss_fn, max_norm=NORM):
        precision = train.mixed_precision.MixedPrecision(model, dtype="float16")
        scaler = train.loss_scaling.LossScaler(model, initial_scale=SCALE)
        clipper = train.gradient_clipping.GradientClipper(model, max_norm=max_norm)
        model.train()

        def step(x, y):
            optimizer.zero_grad()
            with precision.autocast():
                output = model(*x)
            loss = loss_fn(train.mixed_precision.to_float32(output), y)
            scaler.backward(loss)
            scaler.unscale(optimizer)
            clipper.clip()
            scaler.step(optimizer)
            return loss

        return step

    def ours(*arguments):
        make = train.loss_scaling.make_train_step
        return make(*arguments, initial_scale=SCALE, growth_interval=2)

    def halves(model):
        parameters = list(model.parameters())
        return [torch.optim.SGD(half, lr=0.1) for half in (parameters[::2], parameters[1::2])]

    def two_by_hand(model, _, loss_fn):
        scaler = torch.amp.GradScaler("cpu", init_scale=SCALE, growth_interval=2)
        optimizers = halves(model)

        def step(x, y):
            model.zero_grad()
            with torch.autocast("cpu", torch.float16):
                output = model(*x)
            loss = loss_fn(output, y)
            scaler.scale(loss).backward()
            for optimizer in optimizers:
                scaler.step(optimizer)
            scaler.update()
            return loss

        return step

    def two(model, _, loss_fn):
        precision = train.mixed_precision.MixedPrecision(model, dtype="float16")
        scaler = train.loss_scaling.LossScaler(model, initial_scale=SCALE, growth_interval=2)
        optimizers = halves(model)
        model.train()

        def step(x, y):
            model.zero_grad()
            with precision.autocast():
                output = model(*x)
            loss = loss_fn(train.mixed_precision.to_float32(output), y)
            scaler.backward(loss)
            scaler.step(*optimizers)
            return loss

        return step

    expected = trained("two_inputs", by_hand)
    free = trained("two_inputs", lambda *a: composed(*a, max_norm=math.inf))
    found = {
        "clipped": apart(trained("two_inputs", composed), expected),
        "not clipped": apart(free, expected),
        "free": apart(trained("two_inputs", ours), free),
        "two optimizers": apart(trained("two_inputs", two), trained("two_inputs", two_by_hand)),
    }
    stacked = train.stacking.make_train_step
    makers = {
        "loss_scaling": ours,
        "stacking": lambda *a: stacked(*a, dtype="float16", max_norm=NORM),
    }
    for name, maker in makers.items():
        model, x, y, loss_fn = foreign.make("two_inputs")
        arguments = model, optimizer_of(model), loss_fn
        step = maker(*arguments)
        for _ in range(3):
            step(x, y)
        poisoned = (x[0] * math.inf, x[1])
        step(poisoned, y)  # halves the scale
        step(x, y)
        saved = json.loads(json.dumps(step.state_dict()))
        again, fresh = maker(*arguments), maker(*arguments)
        again.load_state_dict(saved)
        scales = []
        for each in (step, again, fresh):
            each(x, y)
            scales.append(each.loss_scale())
        found[name] = scales
    found["not scaled"] = train.loss_scaling.LossScaler(model, enabled=False).state_dict()
    return found


def refusals():
    """What cannot be done, and that a step refuses before it changes anything."""
    attention, x, y, loss_fn = foreign.make("attention")
    arguments = attention, optimizer_of(attention), loss_fn
    out = "attention.out_proj"
    found = {
        "keep_fp32": raised(train.mixed_precision.make_train_step, *arguments, keep_fp32=out),
        "blocks": raised(
            train.activation_checkpointing.apply_checkpointing, attention, blocks=f"head, {out}"
        ),
        "max_norm": raised(
            train.stacking.make_train_step,
            *arguments,
            dtype="bfloat16",
            keep_fp32="head",
            max_norm=0.0,
        ),
        "norms": raised(
            train.accumulated_statistics.make_train_step, nn.SyncBatchNorm(2), None, loss_fn
        ),
    }
    found["untouched"] = "forward" not in vars(attention.head)
    packed = nn.utils.rnn.pack_sequence([torch.ones(2, 4), torch.ones(1, 4)])
    for name in ("gradient_accumulation", "stacking"):
        step = getattr(train, name).make_train_step(*arguments, micro_batches=2)
        attention.head.weight.grad = marked = torch.ones_like(attention.head.weight)
        found[name] = {
            "packed": raised(step, packed, y),
            "disagree": raised(step, {"query": x, "mask": torch.ones(5, 5)}, y),
            "scalar": raised(step, (x, torch.tensor(1.0)), y),
        }
        found[name]["kept"] = attention.head.weight.grad is marked
    for name in ("tied", "in_place"):
        model = foreign.make(name)[0]
        model.register_buffer("grid", torch.zeros(1, 1, 1, 2, 3))
        model.register_buffer("table", torch.zeros(1, 2, 3, 4))
        made = raised(train.memory_format.apply_memory_format, model)
        format_kept = model.table.is_contiguous()
        found[f"memory format {name}"] = [made, format_kept]
        model = foreign.make(name)[0]
        model.register_buffer("grid", torch.zeros(1, 1, 1, 2, 3))
        prepare = train.stacking.prepare_model
        found[f"stacking {name}"] = raised(prepare, model, memory_format="channels_last")
    return found


def optimizers():
    """Updates of foreign models by given gradients against plain AdamW, tied weights once."""
    found = {}
    for name in ("tied", "two_inputs"):
        expected, *_ = foreign.make(name)
        trainable = [p for p in expected.parameters() if p.requires_grad]
        gradients = [torch.randn_like(p) for p in trainable]
        for parameter, gradient in zip(trainable, gradients, strict=True):
            parameter.grad = gradient.clone()
        torch.optim.AdamW(trainable, lr=0.01).step()
        for kind in ("for_loop", "foreach", "fused"):
            model, *_ = foreign.make(name)
            make = getattr(train.optimizer_implementations, f"{kind}_optimizer")
            optimizer = make(model, learning_rate=0.01)
            kit.training.make_update(model, optimizer, [g.clone() for g in gradients])()
            found[f"{name} {kind}"] = max(
                ((a - b).norm() / b.norm()).item()
                for a, b in zip(model.parameters(), expected.parameters(), strict=True)
            )
    return found


def sparse():
    """Gradients of a sparse embedding: parts, clipping and the guard against plain code."""

    class Bag(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding = nn.Embedding(9, 4, sparse=True)

        def forward(self, codes):
            return self.embedding(codes).mean(1)

    codes, target = torch.randint(0, 9, (6, 3)), torch.randn(6, 4)
    found, expected = {}, None
    for name, make in {
        "plain": plain(change=clip),
        "clip": lambda *a: train.gradient_clipping.make_train_step(*a, max_norm=NORM),
        "plain guard": plain(),
        "guard": train.finite_guard.make_train_step,
        "plain parts": plain(),
        "parts": lambda *a: train.gradient_accumulation.make_train_step(*a, micro_batches=3),
    }.items():
        torch.manual_seed(0)
        model = Bag()
        step = make(model, torch.optim.SGD(model.parameters(), lr=1.0), nn.MSELoss())
        step(codes, target)
        weight = model.embedding.weight.detach()
        if name.startswith("plain"):
            expected = weight
        else:
            found[name] = ((weight - expected).norm() / expected.norm()).item()
    model.embedding.weight.data[codes[0, 0]] = math.nan
    step = train.finite_guard.make_train_step(
        model,
        torch.optim.SGD(model.parameters(), lr=1.0),
        lambda output, y: torch.nan_to_num(output).sum() + (output * 0).nan_to_num().sqrt().sum(),
    )
    found["guarded"] = raised(step, codes, target)
    return found


class Deep(nn.Module):
    """Like blocks, whose kind depends on the model: each holds `depth` layers."""

    def __init__(self, depth, blocks=3):
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(*[nn.Linear(4, 4) for _ in range(depth)], nn.Tanh())
            for _ in range(blocks)
        )

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


@contextmanager
def captured_alone():
    """`torch.compile` without its compiler; gives a list that grows with each captured graph."""
    ours, graphs = torch.compile, []

    def note(graph, inputs):
        graphs.append(graph)
        return graph.forward

    @wraps(ours)
    def capture(function, *, mode=None, backend=None, **settings):
        return ours(function, backend=note, **settings)

    torch.compile = capture
    try:
        yield graphs
    finally:
        torch.compile = ours


def ninth():
    """Graphs that each of three models made, all of other depths, where torch keeps two.

    By default it keeps eight, and the ninth takes longer to come.
    """
    compilation, stacked = train.compilation, train.stacking.make_train_step
    makers = {
        "graph": compilation.graph_train_step,
        "compiled": compilation.compiled_train_step,
        "fullgraph": compilation.fullgraph_train_step,
        "model": compilation.compiled_model_train_step,
        "blocks": lambda *a: compilation.compiled_model_train_step(*a, blocks="blocks.*"),
        "predict": lambda model, *_: one_argument(compilation.compiled_predict(model)),
        "stacking": lambda *a: stacked(*a, compiled=True),
        "update": lambda model, *_: one_argument(compiled_update(model)),
        "in place": lambda model, *_: one_argument(
            impl.deployment.native_export.compiled_predict(model.eval())
        ),
    }
    found = {}
    for name, maker in makers.items():
        torch.compiler.reset()
        found[name] = []
        for depth in range(1, 4):
            model = Deep(depth, blocks=1)
            few = torch._dynamo.config.patch(recompile_limit=2)
            with captured_alone() as graphs, few:
                step = maker(model, torch.optim.SGD(model.parameters()), nn.MSELoss())
                step(torch.randn(5, 4), torch.randn(5, 4))
            found[name].append(len(graphs))
    return found


def one_argument(function):
    return lambda x, y: function(x)


def compiled_update(model):
    gradients = [torch.ones_like(parameter) for parameter in model.parameters()]
    optimizer = train.optimizer_implementations.compiled_optimizer(model, learning_rate=0.1)
    update = kit.training.make_update(model, optimizer, gradients)
    return lambda x: update()


def regions():
    """Graphs of a step with a model's blocks compiled, of few and of many; what it trains to."""
    make, found = train.compilation.compiled_model_train_step, {}
    for count in (2, 8):
        torch.compiler.reset()
        rows = []
        for compiled in (False, True):
            torch.manual_seed(0)
            model = Deep(2, blocks=count)
            arguments = model, optimizer_of(model), nn.MSELoss()
            with captured_alone() as graphs:
                settings = {"blocks": "blocks.*"} if compiled else {}
                step = (make if compiled else eager)(*arguments, **settings)
            x, y = torch.randn(5, 4), torch.randn(5, 4)
            losses = [step(x, y).item() for _ in range(STEPS)]
            rows.append((losses, [p.detach() for p in model.parameters()]))
        found[str(count)] = {"graphs": len(graphs), "apart": apart(rows[1], rows[0])}
    torch.compiler.reset()
    unlike = nn.Sequential(*[Deep(depth, blocks=1) for depth in range(1, 6)])
    few = torch._dynamo.config.patch(recompile_limit=2)
    with captured_alone() as graphs, few:
        train.compilation.apply_compile(unlike, blocks="?")(torch.randn(5, 4))
    found["unlike"] = len(graphs)
    copied = copy.deepcopy(model)
    found["compiled"] = [m.blocks[0]._compiled_call_impl is not None for m in (model, copied)]
    found["unknown"] = raised(make, *arguments, blocks="blocks.0, layer*")
    found["kept"] = all(m._compiled_call_impl is None for m in copied.modules())
    return found


def compiled():
    """The whole ladder on keywords and a dataclass, against itself uncompiled.

    It is traced and differentiated as ever, and runs PyTorch's own kernels.
    """
    settings = {"dtype": "bfloat16", "micro_batches": foreign.SAMPLES}
    traced = partial(torch.compile, backend="aot_eager")
    with mock.patch.object(torch, "compile", traced):
        made = [
            trained(
                "keywords",
                lambda *arguments, c=compiled: train.stacking.make_train_step(
                    *arguments, compiled=c, **settings
                ),
            )
            for compiled in (True, False)
        ]
    return apart(*made)


def main() -> None:
    kit.runtime.configure(threads=1, seed=0)
    scenarios = [matrix, half_width, rows, predictions, merged, outputs, logits, float16]
    scenarios += [refusals, optimizers, sparse, ninth, regions, compiled]
    workers.report(scenarios)


if __name__ == "__main__":
    main()
