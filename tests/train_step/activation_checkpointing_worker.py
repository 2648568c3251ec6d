"""One framework's share of the checkpointing tests, in a process of its own.

`python activation_checkpointing_worker.py pt|tf|tf_keras` runs every scenario and prints one line
of JSON: scenario -> what was found, or {"error": traceback}. `test_activation_checkpointing.py`
judges it.
"""

from __future__ import annotations

import copy
import ctypes
import functools
import gc
import random
import sys
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

import numpy as np

from shared.specs import TASKS, CNNSpec, GPTSpec, ResNetSpec
from shared.weights import init_weights
from tests import workers
from tests.workers import raised

FRAMEWORK = "pt" if sys.argv[1:] == ["pt"] else "tf"
impl = workers.implementation(FRAMEWORK, "train_step.activation_checkpointing")
kit = impl.kit
seed_everything = {
    "pt": lambda seed: import_module("torch").manual_seed(seed),
    "tf": lambda seed: import_module("tensorflow").keras.utils.set_random_seed(seed),
}[FRAMEWORK]
apply_checkpointing = impl.train_step.activation_checkpointing.apply_checkpointing
GPT = GPTSpec(vocabulary=11, sequence_length=8, width=16, heads=2, layers=2)
RESNET = ResNetSpec((8, 8, 1), 1, (4, 8), num_classes=3)
CNN = CNNSpec((8, 8, 1), ((4, 1), (8, 2)), num_classes=3)
SGD = TASKS["digits-cnn"].recipe


def batches(spec, count=3):
    random = np.random.default_rng(7)
    if isinstance(spec, GPTSpec):
        shape = (4, spec.sequence_length)
        x = [random.integers(0, spec.vocabulary, shape) for _ in range(count)]
        return kit.data.resident_batches([(codes, codes) for codes in x])
    x = [random.normal(size=(6, *spec.input_shape)).astype(np.float32) for _ in range(count)]
    return kit.data.resident_batches([(images, np.arange(6) % 3) for images in x])


def prepare(spec, blocks=None):
    """A model and its step, with `blocks` recomputed; each time with the same random numbers."""
    seed_everything(3)
    model = kit.models.build(spec, init_weights(spec, seed=1))
    trained = model if blocks is None else apply_checkpointing(model, blocks=blocks)
    optimizer = kit.training.make_optimizer(trained, SGD)
    step = kit.training.make_train_step(trained, optimizer, kit.training.cross_entropy)
    return SimpleNamespace(model=model, trained=trained, optimizer=optimizer, step=step)


@functools.cache
def trained(spec, blocks=None):
    """Losses of three steps and the weights and statistics after them, and the step."""
    prepared = prepare(spec, blocks)
    losses = [kit.runtime.to_float(prepared.step(*batch)) for batch in batches(spec)]
    weights = kit.models.export_weights(prepared.model)
    found = {"losses": losses, "weights": {n: w.ravel().tolist() for n, w in weights.items()}}
    return found, prepared.step


# Scenarios for both frameworks ----------------------------------------------------------------


def steps():
    """Plain, and every block recomputed, for each family."""
    return {
        "gpt": {"plain": trained(GPT)[0], "block*": trained(GPT, "block*")[0]},
        "resnet": {"plain": trained(RESNET)[0], "blocks": trained(RESNET, "stage*.block*")[0]},
    }


def products():
    """Matrix products of a step: plain, and with both blocks recomputed."""
    found = {}
    for name, (_, step) in (("plain", trained(GPT)), ("both", trained(GPT, "block*"))):
        ran = kit.runtime.operator_dtypes(step, *batches(GPT, 1)[0])
        found[name] = sum(ran["matmul"].values())
    return found


def refusals():
    """What bad names raise, and whether the model is as before."""
    prepared = prepare(GPT)
    found = {
        name: raised(apply_checkpointing, prepared.model, blocks=blocks)
        for name, blocks in (("unknown", "block0, blok1"), ("pattern", "stage*"))
    }
    loss = kit.runtime.to_float(prepared.step(*batches(GPT, 1)[0]))
    found["unchanged"] = loss == trained(GPT)[0]["losses"][0]
    twice = apply_checkpointing(prepared.model, blocks="block0")
    found["twice"] = raised(apply_checkpointing, twice, blocks="block0, block1")
    return found


def peak(run):
    """Peak resident bytes of `run` above the present, or None where it can't be read."""
    status, clear = Path("/proc/self/status"), Path("/proc/self/clear_refs")
    if not status.exists():
        return None
    gc.collect()
    clear.write_text("5")

    def read(key):
        return int(status.read_text().split(f"{key}:")[1].split()[0]) * 1024

    before = read("VmRSS")
    run()
    return read("VmHWM") - before


# Scenarios of one framework, on models that are not ours --------------------------------------


class PyTorch:
    def __init__(self):
        import torch

        self.torch = torch

    def gradients(self, model, x, blocks, seed=0):
        """Gradients by name of a step with dropout, and the loss."""
        torch = self.torch
        model = copy.deepcopy(model)
        if blocks is not None:
            apply_checkpointing(model, blocks=blocks)
        torch.manual_seed(seed)
        model.train()
        output = model(*x)
        loss = sum(value.square().sum() for value in torch.utils._pytree.tree_leaves(output))
        loss.backward()
        found = {name: p.grad.ravel().tolist() for name, p in model.named_parameters()}
        statistics = {name: b.ravel().tolist() for name, b in model.named_buffers()}
        return {"loss": loss.item(), "gradients": found, "statistics": statistics}

    def two_inputs(self):
        """A custom forward with two inputs, keywords and a dict, dropout and BatchNorm inside."""
        torch, nn = self.torch, self.torch.nn

        class Block(nn.Module):
            def __init__(self):
                super().__init__()
                self.inner = nn.Linear(8, 8)
                self.norm = nn.BatchNorm1d(8)
                self.dropout = nn.Dropout(0.5)

            def forward(self, a, *, debug):
                a = self.dropout(torch.tanh(self.norm(self.inner(a) + debug)))
                return {"a": a, "sum": (a + debug).tanh()}

        class Two(nn.Module):
            def __init__(self):
                super().__init__()
                self.blocks = nn.ModuleList(Block() for _ in range(3))

            def forward(self, a, b):
                for block in self.blocks:
                    output = block(a, debug=b)
                    a, b = output["a"] + a, output["sum"]
                return {"out": (a, b)}

        torch.manual_seed(1)
        model, x = Two(), (torch.randn(6, 8), torch.randn(6, 8))
        found = {str(blocks): self.gradients(model, x, blocks) for blocks in (None, "blocks.*")}
        found["other_masks"] = self.gradients(model, x, "blocks.*", seed=1)
        found["container"] = raised(apply_checkpointing, model, blocks="blocks")
        return found

    def buffers(self):
        """Layers that read the buffers that they change, run backward twice; a frozen one."""
        torch, nn = self.torch, self.torch.nn
        found = {}
        for name, blocks in (("plain", ""), ("recomputed", "*")):
            torch.manual_seed(0)
            spectral = nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4))
            model = nn.Sequential(
                nn.Sequential(spectral, nn.BatchNorm1d(4, momentum=None), nn.Tanh()),
                nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Tanh()),
            )
            model[1][1].running_mean.fill_(0.5)
            model[1][1].eval()
            apply_checkpointing(model, blocks=blocks)
            x = torch.randn(5, 4)
            for _ in range(2):
                loss = model(x).square().sum()
                loss.backward(retain_graph=True)
                loss.backward()
            found[name] = {n: b.ravel().tolist() for n, b in model.named_buffers()}
            found[name] |= {n: p.grad.ravel().tolist() for n, p in model.named_parameters()}
        return found

    def numbers(self):
        """Gradients of blocks that draw numbers not only from torch, and the number drawn next."""
        torch, nn = self.torch, self.torch.nn
        own = torch.Generator()
        draws = {
            "python": random.random,
            "numpy": np.random.random,
            "own": lambda: torch.rand((), generator=own).item(),
        }

        class Noisy(nn.Linear):
            def forward(self, x):
                return (super().forward(x) * self.draw()).tanh()

        found = {}
        for source, draw in draws.items():
            for name, blocks in (("plain", ""), ("recomputed", "*")):
                kit.runtime.set_seed(0)
                own.manual_seed(0)
                model = nn.Sequential(*[Noisy(4, 4) for _ in range(3)])
                for block in model:
                    block.draw, block.generator = draw, own
                apply_checkpointing(model, blocks=blocks)(torch.ones(5, 4)).sum().backward()
                row = [p.grad.ravel().tolist() for p in model.parameters()]
                found[f"{source} {name}"] = [*row, [draw()]]
        return found

    def held(self):
        """Bytes of copies between the passes, of blocks with a mask and statistics; gradients.

        A buffer that is changed through `.data`, which no version counts, is a statistic too.
        """
        torch, nn = self.torch, self.torch.nn

        class Block(nn.Module):
            def __init__(self):
                super().__init__()
                self.inner, self.norm = nn.Linear(8, 8), nn.BatchNorm1d(8)
                self.register_buffer("mask", torch.ones(1, 1, 256, 256).tril())
                self.register_buffer("mean", torch.zeros(8))

            def forward(self, x):
                x = self.norm(self.inner(x)) * self.mask[0, 0, 8, :8] - self.mean
                self.mean.data.lerp_(x.detach().mean(0), 0.1)
                return torch.tanh(x)

        found = {}
        for name, blocks in (("plain", ""), ("recomputed", "*")):
            torch.manual_seed(0)
            model = apply_checkpointing(nn.Sequential(*[Block() for _ in range(4)]), blocks=blocks)
            own = {t.untyped_storage().data_ptr() for t in (*model.parameters(), *model.buffers())}
            for _ in range(2):
                loss = model(torch.randn(6, 8)).square().sum()
                gc.collect()
                found[f"{name} bytes"] = self.others(own)
                loss.backward()
            found[name] = [
                tensor.ravel().tolist()
                for tensor in (*model.buffers(), *(p.grad for p in model.parameters()))
            ]
        found["mask"] = model[0].mask.numel() * 4
        return found

    def others(self, own):
        """Bytes of all tensors that Python holds, but for storages in `own`."""
        tensors = [t for t in gc.get_objects() if issubclass(type(t), self.torch.Tensor)]
        sizes = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
        return sum(size for pointer, size in sizes.items() if pointer not in own)

    def selected(self):
        """FLOPs, gradients and elementwise work of a step that keeps products."""
        torch, nn = self.torch, self.torch.nn
        from torch.utils.flop_counter import FlopCounterMode

        found = {}
        for name in ("plain", "recomputed", "products"):
            torch.manual_seed(0)
            parts = [nn.Linear(8, 16), nn.Tanh(), nn.Dropout(0.3), nn.Linear(16, 8), nn.Tanh()]
            model = nn.Sequential(*[nn.Sequential(*copy.deepcopy(parts)) for _ in range(2)])
            if name != "plain":
                apply_checkpointing(model, blocks="*", save_products=name == "products")
            torch.manual_seed(1)
            with FlopCounterMode(display=False) as flops:
                loss = model(torch.randn(4, 8)).square().sum()
                with torch.profiler.profile() as profile:
                    loss.backward()
            events = {event.key: event.count for event in profile.key_averages()}
            found[name] = {
                "flops": flops.get_total_flops(),
                "tanh": events.get("aten::tanh", 0),
                "gradients": [p.grad.ravel().tolist() for p in model.parameters()],
            }
        return found

    def own_inputs(self):
        """Blocks that change their input, blocks on the host, and what stays as it was."""
        torch, nn = self.torch, self.torch.nn
        found = {}
        for name, first, settings in (
            ("in place", nn.SiLU(inplace=True), {}),
            ("on the host", nn.SiLU(), {"offload": True}),
        ):
            model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(first, nn.Linear(4, 4)))
            apply_checkpointing(model, blocks="1", **settings)
            found[name] = raised(model, torch.ones(2, 4))
            with torch.no_grad():
                found[f"{name}, evaluated"] = raised(model, torch.ones(2, 4))
        return found

    def penalty(self):
        """A gradient penalty of a critic under spectral norm: of the plain model, and in a block.

        And what is said of a block whose weight a hook of torch's old spectral norm makes.
        """
        torch, nn, found = self.torch, self.torch.nn, {}
        x = torch.linspace(-1.0, 1.0, 24).reshape(6, 4)
        for name, blocks in (("plain", ""), ("block", "1")):
            torch.manual_seed(0)
            normed = nn.utils.parametrizations.spectral_norm(nn.Linear(8, 8))
            critic = nn.Sequential(
                nn.Linear(4, 8), nn.Sequential(nn.Tanh(), normed, nn.Tanh()), nn.Linear(8, 1)
            )
            apply_checkpointing(critic, blocks=blocks)
            mixed = x.clone().requires_grad_()
            (slope,) = torch.autograd.grad(critic(mixed).sum(), mixed, create_graph=True)
            (critic(x).mean() + (slope.norm(dim=1) - 1.0).square().mean()).backward()
            found[name] = [p.grad.tolist() for p in critic.parameters()]
        hooked = nn.Sequential(nn.utils.spectral_norm(nn.Linear(4, 4)))
        return found | {"hooked": raised(apply_checkpointing, hooked, blocks="0")}

    def products_in_place(self):
        """What blocks raise that write into products, some unseen by torch; run backward twice."""
        torch, nn = self.torch, self.torch.nn

        class Added(nn.Linear):
            def forward(self, x):
                y = super().forward(x)
                y += x
                return y.tanh()

        blocks = {
            "gru": nn.GRU(4, 4),
            "silu": nn.Sequential(nn.Linear(4, 4), nn.SiLU(inplace=True)),
            "added": Added(4, 4),
            "relu": nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True)),
            "tanh": nn.Sequential(nn.Linear(4, 4), nn.Tanh()),
        }
        x, found = torch.ones(2, 3, 4, requires_grad=True), {}
        for name, block in blocks.items():
            model = apply_checkpointing(nn.ModuleList([block]), blocks="0", save_products=True)
            found[name] = raised(model[0], x)
        loss = model[0](x).square().sum()
        loss.backward(retain_graph=True)
        return found | {"twice": raised(loss.backward)}

    def copies(self):
        """A copy computes with its own weights; names and types stay; evaluation is untouched."""
        torch, nn = self.torch, self.torch.nn
        model = nn.Sequential(nn.Sequential(nn.Linear(4, 4), nn.Tanh()), nn.Linear(4, 1))
        before = list(model.state_dict()), [type(m).__name__ for m in model.modules()]
        x = torch.randn(3, 4)
        plain = model(x)
        apply_checkpointing(model, blocks="0")
        twin = copy.deepcopy(model)
        with torch.no_grad():
            for parameter in twin.parameters():
                parameter.zero_()
            kept = torch.equal(model(x), plain)
        return {
            "same_names": before
            == (list(model.state_dict()), [type(m).__name__ for m in model.modules()]),
            "own_weights": kept and twin(x).abs().sum().item() == 0.0,
            "copied": raised(apply_checkpointing, twin, blocks="0"),
        }

    def compiled(self):
        """Under torch.compile: gradients of a block with dropout off, and with BatchNorm inside."""
        torch, nn = self.torch, self.torch.nn
        found = {}
        for name, inner in (("norm", nn.LayerNorm), ("batch_norm", nn.BatchNorm1d)):
            rows = []
            for compiled in (False, True):
                torch.manual_seed(0)
                block = nn.Sequential(nn.Linear(4, 4), inner(4), nn.Tanh(), nn.Linear(4, 4))
                model = apply_checkpointing(nn.Sequential(block, nn.Linear(4, 2)), blocks="0")
                run = torch.compile(model, backend="aot_eager") if compiled else model
                run(torch.randn(5, 4)).square().sum().backward()
                row = [p.grad.ravel().tolist() for p in model.parameters()]
                rows.append(row + [b.ravel().tolist() for b in model.buffers()])
            found[name] = rows
        return found

    def flops(self):
        """FLOPs forward and backward of a step, plain and recomputed."""
        from torch.utils.flop_counter import FlopCounterMode

        found = {}
        for name, blocks in (("plain", None), ("block*", "block*"), ("block1", "block1")):
            prepared = prepare(GPT, blocks)
            x, y = batches(GPT, 1)[0]
            with FlopCounterMode(display=False) as forward:
                loss = kit.training.cross_entropy(prepared.model(x), y)
            with FlopCounterMode(display=False) as backward:
                loss.backward()
            found[name] = [forward.get_total_flops(), backward.get_total_flops()]
        return found

    def memory(self):
        """Peak of a step of a deep, narrow net on many samples, plain and recomputed."""
        torch, nn = self.torch, self.torch.nn
        found = {}
        for name, blocks in (("recomputed", "*.block"), ("plain", "")):
            layers = [self.deep_block(nn) for _ in range(12)]
            model = apply_checkpointing(nn.Sequential(*layers), blocks=blocks)
            x = torch.randn(10_000, 32)
            model(x[:8]).sum().backward()
            found[name] = peak(lambda model=model, x=x: model(x).sum().backward())
        return found

    @staticmethod
    def deep_block(nn):
        parts = [nn.Linear(32, 64), nn.Tanh(), nn.Dropout(0.1), nn.Linear(64, 32), nn.Tanh()]
        outer = nn.Sequential()
        outer.add_module("block", nn.Sequential(*parts))
        return outer


class TensorFlow:
    def __init__(self):
        import tensorflow as tf

        self.tf = tf

    def gradients(self, make, x, blocks, steps=2):
        """Gradients, losses, statistics and seeds of two steps in a graph; `make` builds alike."""
        tf = self.tf
        tf.keras.utils.set_random_seed(0)
        model = make()
        model(x)
        run = blocks(model) if callable(blocks) else apply_checkpointing(model, blocks=blocks)

        @tf.function
        def step():
            with tf.GradientTape() as tape:
                outputs = tf.nest.flatten(run(x, training=True))
                loss = tf.add_n([tf.reduce_sum(tf.square(value)) for value in outputs])
            return loss, tape.gradient(loss, model.trainable_variables)

        found = {}
        for index in range(steps):
            loss, gradients = step()
            found[f"loss{index}"] = [float(loss)]
            tensors = [tf.convert_to_tensor(gradient) for gradient in gradients]
            found[f"gradients{index}"] = [tensor.numpy().ravel().tolist() for tensor in tensors]
        found["state"] = [np.ravel(v).tolist() for v in model.non_trainable_variables]
        return found

    def compare(self, make, x, *blocks):
        found = {str(block): self.gradients(make, x, block) for block in blocks}
        return {"plain": self.gradients(make, x, "")} | found

    def images(self):
        return self.tf.random.stateless_normal((6, 8), (1, 2))

    def functional(self):
        """A flat functional model with dropout, BatchNorm, raw additions and two outputs."""
        keras, layers = self.tf.keras, self.tf.keras.layers

        def make():
            x = inputs = keras.Input((8,), name="x")
            for index in range(3):
                inside = layers.Dense(8, activation="tanh", name=f"b{index}_in")(x)
                inside = layers.BatchNormalization(name=f"b{index}_norm")(inside)
                x = x + layers.Dropout(0.5, name=f"b{index}_drop")(inside)
                x = layers.Dense(8, name=f"b{index}_out")(x)
            return keras.Model({"x": inputs}, {"out": x, "last": layers.Dense(2, name="last")(x)})

        found = self.compare(make, {"x": self.images()}, "b?", "last, b1")
        found["naive"] = self.gradients(make, {"x": self.images()}, self.naive)
        return found

    def naive(self, model):
        """What `tf.recompute_grad` does to a block with dropout: the trap."""
        tf = self.tf
        drop = model.get_layer("b1_drop")
        drop.call = lambda x, training, call=drop.call: tf.recompute_grad(
            lambda x: call(x, training=training)
        )(x)
        return model

    def attention(self):
        """Layers with dropout inside, GaussianNoise, a mask made inside and one from outside."""
        keras, layers = self.tf.keras, self.tf.keras.layers

        def make():
            codes = keras.Input((6,), dtype="int32")
            x = layers.Embedding(5, 8, mask_zero=True, name="codes")(codes)
            for index in range(2):
                y = layers.MultiHeadAttention(2, 4, dropout=0.3, name=f"b{index}.mha")(x, x)
                y = layers.GaussianNoise(0.2, name=f"b{index}.noise")(y)
                x = layers.Add(name=f"b{index}.add")([x, y])
            x = layers.GRU(4, dropout=0.2, name="memory")(layers.Masking(name="mask")(x))
            return keras.Model(codes, x)

        codes = np.array([[1, 2, 3, 0, 0, 0], [4, 1, 2, 3, 4, 0]])
        return self.compare(make, self.tf.constant(codes), "b*, memory")

    def subclassed(self):
        """A subclassed model whose block has no `training` argument, keywords and a tuple."""
        keras, layers = self.tf.keras, self.tf.keras.layers

        class Block(layers.Layer):
            def __init__(self, **kwargs):
                super().__init__(**kwargs)
                self.dense = layers.Dense(8, activation="tanh", name="inner")
                self.norm = layers.BatchNormalization()
                self.dropout = layers.Dropout(0.5)

            def build(self, shape):
                self.dense.build(shape)
                self.norm.build(shape)

            def call(self, x, bias=None):
                x = self.dropout(self.norm(self.dense(x))) + bias
                return x, x * 2

        class Net(keras.Model):
            def __init__(self):
                super().__init__()
                self.parts = [Block(name=f"block{i}") for i in range(3)]

            def call(self, x):
                y = x
                for part in self.parts:
                    x, y = part(x, bias=y)
                return x, y

        found = self.compare(Net, self.images(), "block*", "inner")
        found["unbuilt"] = raised(apply_checkpointing, Net(), blocks="block0")
        return found

    def nested(self):
        """A Sequential model with groups, and sub-models as blocks, one of them frozen."""
        keras, layers = self.tf.keras, self.tf.keras.layers

        def sequential():
            parts = [
                (
                    layers.Dense(8, activation="tanh", name=f"{i}.in"),
                    layers.Dropout(0.5, name=f"{i}.d"),
                )
                for i in "ab"
            ]
            return keras.Sequential([keras.Input((8,)), *sum(parts, ())])

        def submodels():
            x = inputs = keras.Input((8,))
            for index in range(2):
                inner = keras.Sequential(
                    [
                        layers.Dense(8, activation="tanh"),
                        layers.BatchNormalization(),
                        layers.Dropout(0.5),
                    ],
                    name=f"part_{index}",
                )
                x = inner(x)
                inner.trainable = index > 0
            return keras.Model(inputs, x)

        found = {"sequential": self.compare(sequential, self.images(), "a, b", "a.in")}
        found["submodels"] = self.compare(submodels, self.images(), "part_*")
        return found

    def fit(self):
        """Keras's own training loop, and a half-width policy put on afterwards."""
        tf = self.tf
        mixed = import_module("tf_impl.train_step.mixed_precision")
        found = {}
        for blocks in ("", "conv*"):
            model = kit.models.build(CNN, init_weights(CNN, seed=1))
            run = apply_checkpointing(model, blocks=blocks)
            x, y = batches(CNN, 1)[0]
            run.compile("sgd", tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True))
            losses = run.fit(x, y, epochs=2, batch_size=6, verbose=0).history["loss"]
            step = mixed.make_train_step(
                run, tf.keras.optimizers.SGD(0.1), kit.training.cross_entropy
            )
            found[blocks] = losses + [float(step(x, y)) for _ in range(3)]
        return found

    def refused(self):
        """Blocks that can't be run twice, refused when they are traced."""
        tf = self.tf
        keras, layers = tf.keras, tf.keras.layers

        class Own(layers.Layer):
            def call(self, x):
                return {
                    "loss": lambda: self.add_loss(tf.reduce_sum(x)) or x,
                    "draw": lambda: tf.nn.dropout(x, 0.5),
                    "global": lambda: keras.random.dropout(x, 0.5),
                    "complex": lambda: tf.signal.fft(tf.cast(x, tf.complex64)),
                }[self.name]()

        found = {}
        keras.random.uniform((1,))  # makes the global generator, outside a graph
        for name in ("loss", "draw", "global", "complex"):
            model = keras.Sequential([keras.Input((8,)), layers.Dense(8), Own(name=name)])
            found[name] = raised(self.gradients, lambda model=model: model, self.images(), name)
        inputs = keras.Input((8,), dtype="int32")
        codes = keras.Model(inputs, layers.Embedding(3, 2, name="codes")(inputs))
        x = tf.zeros((2, 8), "int32")
        found["no_float"] = raised(self.gradients, lambda: codes, x, "codes")
        x = inputs = keras.Input((8,))
        for name in ("a.0", "b.0", "a.1", "b.1"):
            x = layers.Dense(8, name=name)(x)
        model = keras.Model(inputs, x)
        found["overlap"] = raised(apply_checkpointing, model, blocks="a, b")
        model = keras.Sequential([keras.Input((8,)), layers.Dense(8, name="block")])
        apply_checkpointing(model, blocks="block")
        x = tf.ones((2, 8))
        with tf.GradientTape() as tape:
            with tf.GradientTape() as inner:
                inner.watch(x)
                output = model(x, training=True)
            slope = inner.gradient(output, x)
        found["penalty"] = raised(tape.gradient, slope, model.trainable_variables)
        return found


def tf_keras_refusal():
    """tf_keras: refused with the model as before, and the neutral setting works."""
    prepared = prepare(CNN)
    return {
        "refused": raised(apply_checkpointing, prepared.model, blocks="conv*"),
        "neutral": trained(CNN, "")[0] == trained(CNN)[0],
    }


def main() -> None:
    kit.runtime.configure(threads=1, seed=0)
    if FRAMEWORK == "pt" and sys.platform == "linux":
        # Resident memory is what is alive: freed blocks of 64 KiB and more go back at once.
        ctypes.CDLL(None).mallopt(-3, 65536)  # M_MMAP_THRESHOLD
    if sys.argv[1] == "tf_keras":
        scenarios = [tf_keras_refusal]
    else:
        helpers = ("gradients", "compare", "images", "naive", "deep_block", "others")
        names = [n for n in vars(type(own)) if not n.startswith("_") and n not in helpers]
        scenarios = [steps, products, refusals, *(getattr(own, name) for name in names)]
    workers.report(scenarios)


own = PyTorch() if FRAMEWORK == "pt" else TensorFlow()
if __name__ == "__main__":
    main()
