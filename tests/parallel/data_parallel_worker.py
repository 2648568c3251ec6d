"""Trains on replicas and on one process, for `test_data_parallel.py`: SIDE FOLDER DATA.

Writes a .npz for each run, and prints what bad input gave as JSON.
"""

from __future__ import annotations

import atexit
import functools
import importlib
import json
import multiprocessing
import os
import socket
import subprocess
import sys
import warnings
from dataclasses import dataclass, fields, replace
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np

from shared import datasets, parallel

SAMPLES = 203
JOB = {"global_batch": 32, "steps": 10, "seed": 0}
FEW = 4  # steps, which show that two runs differ


def mixed_data(folder: Path) -> Path:
    """Inputs by name, as many samples as there are digits."""
    random = np.random.default_rng(0)
    folder.mkdir()
    numbers = random.normal(size=(SAMPLES, 6)).astype(np.float32)
    x = {"numbers": numbers, "codes": random.integers(0, 12, (SAMPLES, 4))}
    parallel.save_samples(x, folder / "train_x")
    parallel.save_samples(random.integers(0, 12, SAMPLES), folder / "train_y")
    return folder


def pt_digits() -> tuple:
    """The digits CNN, in a process that notes how many threads it has."""
    import torch

    from pt_impl.kit import examples

    note_threads(torch.get_num_threads())
    return examples.digits_cnn()


def tf_digits() -> tuple:
    """The same."""
    import tensorflow as tf

    from tf_impl.kit import examples

    note_threads(tf.config.threading.get_intra_op_parallelism_threads())
    return examples.digits_cnn()


def note_threads(count: int) -> None:
    with Path(os.environ["THREADS_SEEN"]).open("a") as file:
        file.write(f"{count}\n")


def pt_mixed() -> tuple:
    """Two inputs by name, blocks in a list, a weight used twice, and an output with logits."""
    import torch
    from torch import nn

    from pt_impl.kit import training

    block_class = _pt_block_class()

    @dataclass
    class Output:
        logits: torch.Tensor

    class Mixed(nn.Module):
        def __init__(self):
            super().__init__()
            self.codes, self.numbers = nn.Embedding(12, 8), nn.Linear(6, 8)
            self.blocks = nn.ModuleList(block_class() for _ in range(3))
            self.head = nn.Linear(8, 12)
            self.head.weight = self.codes.weight

        def forward(self, numbers, codes):
            x = self.codes(codes).mean(1) + self.numbers(numbers)
            for block in self.blocks:
                x = x + block(x)
            return Output(self.head(x))

    torch.manual_seed(0)
    model = Mixed()
    return model, torch.optim.AdamW(model.parameters(), 0.01), training.cross_entropy


def _pt_block_class() -> type:
    from torch import nn

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

        def forward(self, x):
            return self.down(self.up(x).relu())

    return Block


def pt_all_dense() -> tuple:
    """PyTorch's embeddings have dense gradients."""
    return pt_mixed()


def tf_all_dense() -> tuple:
    """Without an embedding whose gradient is sparse."""
    return tf_mixed(sparse=False)


def tf_mixed(sparse: bool = True) -> tuple:
    """Two inputs by name, a weight used twice, and losses of the model's own."""
    import tensorflow as tf

    from tf_impl.kit import training

    layers, penalty = tf.keras.layers, tf.keras.regularizers.L2(0.05)

    class Mixed(tf.keras.Model):
        def __init__(self):
            super().__init__()
            self.codes = layers.Embedding(12, 8, embeddings_regularizer=penalty, name="codes")
            self.numbers = layers.Dense(8, kernel_regularizer=penalty, name="numbers")
            self.up = layers.Dense(16, "relu", name="up")
            self.down = layers.Dense(8, name="down")
            if sparse:  # its gradient is
                self.rest = layers.Embedding(12, 8, name="rest")

        def call(self, numbers, codes, training=None):
            found = self.codes(codes) + self.rest(codes) if sparse else self.codes(codes)
            x = tf.reduce_mean(found, 1) + self.numbers(numbers)
            return (x + self.down(self.up(x))) @ tf.transpose(self.codes.embeddings)

    tf.keras.utils.set_random_seed(0)
    model = Mixed()
    model(tf.zeros([1, 6]), tf.zeros([1, 4], tf.int64))
    optimizer = tf.keras.optimizers.Adam(0.01)
    optimizer.build(model.trainable_variables)
    return model, optimizer, training.cross_entropy


def own_layout(side: str, digits: Path, folder: Path) -> Path:
    """The digits as the side's model takes them."""
    if side == "tf":
        return digits
    folder.mkdir()
    x, y = datasets.load(digits, "train")
    parallel.save_samples(np.ascontiguousarray(x.transpose(0, 3, 1, 2)), folder / "train_x")
    parallel.save_samples(y, folder / "train_y")
    return folder


def canonical(side: str, result: parallel.Result) -> parallel.Result:
    """The result of a digits CNN with weights by the names that both frameworks share."""
    build = importlib.import_module(f"{side}_impl.kit.examples").digits_cnn
    models = importlib.import_module(f"{side}_impl.kit.models")
    model, _, _ = build()
    if side == "pt":
        import torch

        state = {name: torch.from_numpy(value) for name, value in result.weights.items()}
        model.load_state_dict(state)
    else:
        for name, weight in tf_weights(model).items():
            weight.assign(result.weights[name])
    return replace(result, weights=models.export_weights(model))


def tf_weights(model) -> dict:
    """Variables by their paths in the model."""
    return {weight.path.removeprefix(f"{model.name}/"): weight for weight in model.weights}


def plain(side: str, build, data: Path) -> parallel.Result:
    """The mixed model in one process, in plain code of the framework."""
    x, y = parallel.load_training(data)
    stream = parallel.batches(SAMPLES, global_batch=JOB["global_batch"], seed=0)
    batches = [next(stream) for _ in range(JOB["steps"])]
    losses, weights = {"pt": _pt_plain, "tf": _tf_plain}[side](build, x, y, batches)
    none = np.zeros(0)
    return parallel.Result(weights, np.array(losses), *[none] * 5, 0.0)


def _pt_plain(build, x, y, batches) -> tuple:
    import torch

    model, optimizer, _ = build()
    losses = []
    for rows in batches:
        own = {name: torch.from_numpy(part[rows]) for name, part in x.items()}
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(**own).logits, torch.from_numpy(y[rows]))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, {name: value.numpy() for name, value in model.state_dict().items()}


def _tf_plain(build, x, y, batches) -> tuple:
    import tensorflow as tf

    model, optimizer, _ = build()
    losses = []
    for rows in batches:
        with tf.GradientTape() as tape:
            logits = model(x["numbers"][rows], x["codes"][rows], training=True)
            loss = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)(y[rows], logits)
            loss += sum(model.losses)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        losses.append(float(loss))
    return losses, {name: weight.numpy() for name, weight in tf_weights(model).items()}


def pt_without_statistics() -> tuple:
    """Its BatchNorm has no running statistics, and normalises with the batch alone."""
    from torch import nn

    model, optimizer, loss_fn = pt_mixed()
    model.numbers.bias = None  # which the normalisation takes off again, but for rounding
    model.numbers = nn.Sequential(model.numbers, nn.BatchNorm1d(8, track_running_stats=False))
    optimizer.add_param_group({"params": list(model.numbers[1].parameters())})
    return model, optimizer, loss_fn


def pt_masks() -> tuple:
    """The gradient of a row is the dropout mask of the sample that is this row of the identity."""
    import torch
    from torch import nn

    layer = nn.Linear(2, 64, bias=False)
    nn.init.ones_(layer.weight)
    model = nn.Sequential(layer, nn.Dropout(0.5))
    return model, torch.optim.SGD(model.parameters(), 1.0), lambda output, y: output.mean()


def tf_masks() -> tuple:
    """See `pt_masks`."""
    import tensorflow as tf

    layers = tf.keras.layers
    dense = layers.Dense(64, use_bias=False, kernel_initializer="ones")
    model = tf.keras.Sequential([tf.keras.Input((2,)), dense, layers.Dropout(0.5)])
    optimizer = tf.keras.optimizers.SGD(1.0)
    optimizer.build(model.trainable_variables)
    return model, optimizer, lambda output, y: tf.reduce_mean(output)


def masks_data(folder: Path) -> Path:
    """Two samples, the rows of the identity."""
    folder.mkdir()
    parallel.save_samples(np.eye(2, dtype=np.float32), folder / "train_x")
    parallel.save_samples(np.zeros(2, np.int64), folder / "train_y")
    return folder


def fails() -> tuple:
    """What a replica of a user's own may do."""
    raise ValueError("no such thing as a model")


def alone(side: str, data: Path, folder: Path) -> None:
    """One process, the kit's own baseline step, no engine for replicas: after few steps, and all.

    Writes alone_few.npz and alone.npz.
    """
    kit = {name: importlib.import_module(f"{side}_impl.kit.{name}") for name in KIT}
    model, optimizer, loss_fn = kit["examples"].digits_cnn()
    step = kit["training"].make_train_step(model, optimizer, loss_fn)
    x, y = datasets.load(data, "train")
    losses, stream = [], parallel.batches(len(x), global_batch=JOB["global_batch"], seed=0)
    none = np.zeros(0)
    for rows in (next(stream) for _ in range(JOB["steps"])):
        losses.append(kit["runtime"].to_float(step(*kit["data"].to_device(x[rows], y[rows]))))
        if name := {FEW: "alone_few", JOB["steps"]: "alone"}.get(len(losses)):
            weights = kit["models"].export_weights(model)
            parallel.Result(weights, np.array(losses), *[none] * 5, 0.0).save(
                folder / f"{name}.npz"
            )


KIT = ("models", "training", "runtime", "data", "examples")


def runs(side: str, digits: Path, mixed: Path) -> dict[str, dict]:
    """Name -> settings of what is trained on two replicas."""
    here = "tests.parallel.data_parallel_worker"
    cnn = {"build": f"{side}_impl.kit.examples:digits_cnn", "dataset": digits}
    other_model = {"build": f"{here}:{side}_mixed", "dataset": mixed}
    micro = other_model | {"variant": "accumulated", "micro_batches": 2}
    other = {"pt": "sharded", "tf": "one_process"}[side]
    unseen = other_model | {"build": f"{here}:pt_without_statistics", "synchronised_norm": True}
    return {
        "processes": cnn | {"synchronised_norm": True},
        other: other_model | {"variant": other} | OTHER[side],
        "local_norm": cnn | {"steps": FEW},
        "accumulated": micro,
        "synchronised_each": micro
        | {"build": f"{here}:{side}_all_dense", "synchronise_each": True},
        **({"without_statistics": unseen} if side == "pt" else {}),
    }


OTHER = {"pt": {}, "tf": {"processes": 1}}
BAD = {
    "a batch that does not divide": {"global_batch": 33},
    "more replicas than threads": {"replicas": 4, "threads": 2},
    "no replica": {"replicas": 0},
    "a batch larger than the data": {"global_batch": 2048},
    "no step": {"steps": 0},
    "an unknown variant": {"variant": "ddp"},
    "micro-batches elsewhere": {"micro_batches": 2},
    "a precision elsewhere": {"precision": "bfloat16"},
    "a last batch too small": {"variant": "accumulated", "micro_batches": 16},
    "no such module": {"build": "no_such_module:build"},
    "no such function": {"build": "tests.parallel.data_parallel_worker:nothing"},
    "no such data": {"dataset": "nowhere"},
}
LACKING = {"pt": "one_process", "tf": "tpu"}  # what this machine lacks something for
CONFIGS = {
    "not JSON": "{",
    "no task": '{"cluster": {"worker": ["127.0.0.1:1"]}}',
    "not an object": "[]",
    "an index too many": '{"cluster": {"worker": ["a:1"]}, "task": {"type": "worker", "index": 1}}',
    "no port": '{"cluster": {"worker": ["a"]}, "task": {"type": "worker", "index": 0}}',
    "an address twice": (
        '{"cluster": {"worker": ["a:1", "a:1"]}, "task": {"type": "worker", "index": 0}}'
    ),
    "a parameter server": (
        '{"cluster": {"worker": ["a:1"], "ps": ["b:1"]}, "task": {"type": "worker", "index": 0}}'
    ),
}


def forked(
    side: str,
    folder: Path,
    make: str,
    build: str,
    dataset,
    run: parallel.Run,
    settings: dict | None = None,
) -> parallel.Result:
    """What `launch` of the kit does, by forks of a process that has imported the framework.

    Importing it in each process of each run would take most of the time.
    """
    module = f"{side}_impl.kit.replicas"
    count = run.processes or run.replicas * (run.parts if side == "pt" else 1)
    threads = parallel.threads_each(run.threads, count)
    common = parallel.environment(threads)
    with parallel.training_folder(dataset) as data:
        out = folder / "result.npz"
        given = parallel.arguments(make, build, data, run, settings or {})
        given += [f"--threads={threads}", f"--out={out}"]
        places = PLACES[side](parallel.free_ports(count))
        forks = server(side)
        forks.send([(module, given, common | place) for place in places])
        codes = forks.recv()
    if any(code != 0 for code in codes):  # None: it did not end
        raise RuntimeError(f"replicas ended with {codes}: {given}")
    result = parallel.Result.load(out)
    out.unlink()
    return result


@functools.cache
def server(side: str) -> Connection:
    """Takes what the processes of a run are given, and answers with how they ended.

    It is a fork of this process, to be made before an operator runs here: from then on its threads,
    of which a fork has none, would be missed.
    """
    for name in ("kit.replicas", "parallel.data_parallel"):
        importlib.import_module(f"{side}_impl.{name}")
    ours, theirs = multiprocessing.Pipe()
    multiprocessing.get_context("fork").Process(target=serve, args=(ours, theirs)).start()
    theirs.close()
    atexit.register(ours.close)  # by which it ends
    return ours


def serve(ours: Connection, theirs: Connection) -> None:
    """Be that server."""
    ours.close()
    context = multiprocessing.get_context("fork")
    while True:
        try:
            every = theirs.recv()
        except EOFError:
            return
        started = [context.Process(target=replica, args=given) for given in every]
        for process in started:
            process.start()
        for process in started:
            process.join(120)
        theirs.send([process.exitcode for process in started])
        for process in started:
            process.kill()


def replica(module: str, given: list[str], environment: dict[str, str]) -> None:
    """Be one process of a run."""
    os.environ |= environment
    sys.argv = [module, *given]
    importlib.import_module(module).main()
    atexit._run_exitfuncs()  # a forked process would not, and its framework says goodbye there


def pt_places(ports: list[int]) -> list[dict[str, str]]:
    """What torchrun tells each process."""
    world = {"MASTER_ADDR": parallel.LOOPBACK, "MASTER_PORT": str(ports[0])}
    world |= dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), str(len(ports)))
    return [world | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(len(ports))]


def tf_places(ports: list[int]) -> list[dict[str, str]]:
    """The cluster of all processes, and which of them each is."""
    cluster = {"worker": [f"{parallel.LOOPBACK}:{port}" for port in ports]}
    if len(ports) == 1:
        return [{}]
    tasks = [{"type": "worker", "index": index} for index in range(len(ports))]
    return [{"TF_CONFIG": json.dumps({"cluster": cluster, "task": task})} for task in tasks]


PLACES = {"pt": pt_places, "tf": tf_places}


def said(call, **settings) -> list[str]:
    """The kind and words of what a call raises; no process may be started."""
    popen = subprocess.Popen
    subprocess.Popen = None
    try:
        call(**settings)
    except Exception as error:
        return [type(error).__name__, str(error)]
    finally:
        subprocess.Popen = popen
    return ["nothing", ""]


def taken_port(side: str) -> list[str]:
    """What meeting on a port that somebody listens on gives."""
    join = importlib.import_module(f"{side}_impl.kit.replicas").join
    with socket.create_server((parallel.LOOPBACK, 0)) as server:
        port = server.getsockname()[1]
        hosts = [f"{parallel.LOOPBACK}:{port}", f"{parallel.LOOPBACK}:1"]
        task = {"cluster": {"worker": hosts}, "task": {"type": "worker", "index": 0}}
        os.environ |= {
            "TF_CONFIG": json.dumps(task),
            "MASTER_PORT": str(port),
            "WORLD_SIZE": "2",
            "RANK": "0",
        }
        return [*said(join), str(port)]


def warned(side: str) -> list[str]:
    """What is said where others than the run's hosts can reach what listens on every interface."""
    replicas = importlib.import_module(f"{side}_impl.kit.replicas")
    reach, parallel.others_reach = parallel.others_reach, lambda host: ["eth7"]
    with warnings.catch_warnings(record=True) as found, socket.create_server(("", 0)) as server:
        warnings.simplefilter("always")
        if side == "pt":
            port = server.getsockname()[1]
            for rank in (0, 1):  # the first host's torchrun has opened it
                replicas._warn_of_torchrun(rank, parallel.LOOPBACK, port)
            replicas._warn_of_torchrun(0, parallel.LOOPBACK, parallel.free_ports(1)[0])
        else:
            port, other = parallel.free_ports(2)
            hosts = [f"{parallel.LOOPBACK}:{each}" for each in (port, other)]
            task = {"cluster": {"worker": hosts}, "task": {"type": "worker", "index": 0}}
            os.environ["TF_CONFIG"] = json.dumps(task)
            said(replicas.join, timeout_s=0.2)
    parallel.others_reach = reach
    own = [str(each.message) for each in found if "eth7" in str(each.message)]
    return [*own, str(port)]


def configs() -> dict[str, list[str]]:
    """What each malformed TF_CONFIG gives."""
    join = importlib.import_module("tf_impl.kit.replicas").join
    found = {}
    for name, text in CONFIGS.items():
        os.environ["TF_CONFIG"] = text
        found[name] = said(join)
    return found


# What one process can tell ------------------------------------------------------------------------


def whole() -> dict[str, list]:
    """FSDP2's shares of a model that are whole while a layer runs, and in which dtype it runs."""
    import torch
    from torch.distributed.tensor import DTensor

    from pt_impl.kit import replicas
    from pt_impl.kit.calling import call
    from pt_impl.parallel.data_parallel import apply_fsdp

    def share(model):
        every = [*model.parameters()]
        plain = sum(own.numel() for own in every if not isinstance(own, DTensor))
        return plain / sum(own.numel() for own in every)

    replicas.join()
    x = {"numbers": torch.ones(2, 6), "codes": torch.zeros(2, 4, dtype=torch.int64)}
    found = {}
    for name, settings in FSDP.items():
        model, _, loss_fn = pt_mixed()
        seen = []
        for block in model.blocks:
            for layer in (block.up, block.down):
                layer.register_forward_hook(
                    lambda layer, *_, model=model, seen=seen: seen.append(
                        [share(model), str(layer.weight.dtype)]
                    )
                )
        apply_fsdp(model, **settings)
        loss_fn(call(model, x), torch.zeros(2, dtype=torch.int64)).backward()
        kinds = {str(own.dtype) for own in model.parameters()}
        found[name] = {"seen": seen, "kept": sorted(kinds)}
    model = pt_mixed()[0]
    model.temperature = torch.nn.Parameter(torch.ones([]))
    words = {
        "a scalar": said(apply_fsdp, model=model),
        "no block": said(apply_fsdp, model=model, blocks="blocks.*, layers.*"),
        "no precision": said(apply_fsdp, model=pt_mixed()[0], precision="float16"),
    }
    words |= {"modes": modes(), "half-width statistics": half_width_statistics()}
    words |= {"weights of a loss": weights_of_a_loss(), "kept weights": kept_weights()}
    words["a norm with an activation"] = norm_with_an_activation()
    words["losses with None"] = losses_with_none()
    torch.distributed.destroy_process_group()
    return {"whole": found, **words}


def losses_with_none() -> list[float]:
    """Losses of micro-batches of a dict, without a None in it and with one at its head."""
    import torch
    from torch import nn

    from pt_impl.parallel import data_parallel

    class Optional(nn.Linear):
        def forward(self, x, mask=None):
            return super().forward(x)

    found, numbers = [], torch.arange(12.0).reshape(4, 3)
    for x in ({"x": numbers}, {"mask": None, "x": numbers}):
        torch.manual_seed(0)
        model = data_parallel.apply_data_parallel(Optional(3, 2))
        given = model, torch.optim.SGD(model.parameters(), 0.1), nn.functional.mse_loss
        step = data_parallel.make_train_step(*given, micro_batches=2)
        ((batch, samples),) = data_parallel.distribute(model, [(x, torch.zeros(4, 2))])
        found.append(float(step(*batch, samples)))
    return found


def weights_of_a_loss() -> dict[str, list[str]]:
    """What is said of an optimizer that trains a loss's own parameter beside the model."""
    import torch
    from torch import nn

    from pt_impl.parallel import data_parallel, model_parallel, tensor_parallel

    def weighted():
        model, scale = nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 2)), nn.Parameter(torch.ones(1))
        optimizer = torch.optim.SGD([*model.parameters(), scale], 0.1)
        return model, optimizer, lambda output, y: nn.functional.mse_loss(output * scale, y)

    x = torch.ones(2, 6)
    step = data_parallel.processes(weighted)[2]
    settings = {"build": weighted, "x": x, "cut": "1", "micro_batches": 1}
    return {
        "processes": said(step, x=x, y=torch.zeros(2, 2), samples=2),
        "sharded": said(data_parallel.sharded, build=weighted),
        "pipeline": said(model_parallel.pipeline, **settings),
        "tensor": said(tensor_parallel.hybrid, build=weighted, pairs="0 > 1"),
    }


def kept_weights() -> dict[str, str]:
    """Name and dtype of the weights of a model in bfloat16 that has an extra state."""
    import torch

    from pt_impl.kit import replicas

    class Counting(torch.nn.Linear):
        def get_extra_state(self):
            return {"steps": 1}

    model = Counting(2, 2, bias=False).bfloat16()
    return {name: str(value.dtype) for name, value in replicas._weights(model).items()}


def norm_with_an_activation() -> list:
    """What is said of a BatchNorm that does more, and whether its neighbour is as before."""
    from torch import nn

    from pt_impl.kit.checks.data_parallel import synchronise_norms

    class NormAct(nn.BatchNorm1d):  # as in timm
        def forward(self, x):
            return super().forward(x).relu()

    model = nn.Sequential(nn.BatchNorm1d(3), NormAct(3))
    return [*said(synchronise_norms, model=model), "forward" in vars(model[0])]


def modes() -> dict[str, list[bool]]:
    """In which mode a model trains that is built in evaluation mode, as one that was loaded is."""
    from torch.distributed.device_mesh import init_device_mesh

    from pt_impl.parallel import data_parallel, tensor_parallel

    def built():
        model, optimizer, loss_fn = pt_mixed()
        return model.eval(), optimizer, loss_fn

    models = {
        "data": data_parallel.processes(built)[0],
        "sharded": data_parallel.sharded(built)[0],
        "tensor": built()[0],
    }
    mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=("data", "model"))
    tensor_parallel.make_train_step(models["tensor"], None, None, mesh)
    return {name: [module.training for module in model.modules()] for name, model in models.items()}


def half_width_statistics() -> dict[str, list]:
    """A BatchNorm of the global batch on bfloat16 inputs: dtype, and what is off PyTorch's own."""
    import torch
    from torch import nn

    from pt_impl.kit.checks.data_parallel import synchronise_norms

    x = torch.randn(64, 3, generator=torch.Generator().manual_seed(0)).bfloat16() * 3 + 20
    plain, synchronised = nn.BatchNorm1d(3), nn.BatchNorm1d(3)
    synchronise_norms(synchronised)
    wanted, output = plain(x), synchronised(x)
    apart = [float((wanted - output).abs().max())]
    apart += [
        float((getattr(plain, name) - getattr(synchronised, name)).abs().max())
        for name in ("running_mean", "running_var")
    ]
    return {"dtype": str(output.dtype), "apart": apart}


FSDP = {
    "found": {},
    "named": {"blocks": "blocks.1"},
    "kept": {"reshard_after_forward": False},
    "half": {"precision": "bfloat16"},
}


def refused() -> dict[str, list[str]]:
    """What can't be equal to one process."""
    import tensorflow as tf

    from tf_impl.parallel import data_parallel

    def clipping():
        model, _, loss_fn = tf_mixed()
        return model, tf.keras.optimizers.SGD(0.1, global_clipnorm=1.0), loss_fn

    def scaling():
        model, optimizer, loss_fn = tf_mixed()
        return model, tf.keras.mixed_precision.LossScaleOptimizer(optimizer), loss_fn

    def constant():
        model, _, loss_fn = tf_mixed()
        return model, tf.keras.optimizers.SGD(0.1, loss_scale_factor=2.0), loss_fn

    def overwriting():
        model, _, loss_fn = tf_mixed()
        settings = {"use_ema": True, "ema_overwrite_frequency": 2}
        return model, tf.keras.optimizers.SGD(0.1, **settings), loss_fn

    made = tf_mixed()[0]
    return {
        "overwriting": said(data_parallel.one_process, build=overwriting, replicas=1),
        "clipping": said(data_parallel.one_process, build=clipping, replicas=1),
        "scaling": said(data_parallel.one_process, build=scaling, replicas=1),
        "a constant scale": said(data_parallel.one_process, build=constant, replicas=1),
        "made already": said(data_parallel.apply_data_parallel, model=made),
    }


def main() -> None:
    side, folder = sys.argv[1], Path(sys.argv[2])
    server(side)
    module = importlib.import_module(f"{side}_impl.parallel.data_parallel")
    launch = importlib.import_module(f"{side}_impl.kit.replicas").launch
    mixed, here = mixed_data(folder / "mixed"), "tests.parallel.data_parallel_worker"
    digits = own_layout(side, Path(sys.argv[3]), folder / "digits")

    fork = partial(forked, side, folder)

    def train(build, dataset, variant="processes", start=fork, **settings):
        own = {"replicas": 2} | JOB | settings
        run = parallel.Run(**{name: own.pop(name) for name in RUN if name in own})
        return start(f"{module.__name__}:{variant}", build, dataset, run, own)

    own_runs = runs(side, digits, mixed)
    os.environ["THREADS_SEEN"] = str(folder / "threads")
    counted = {"build": f"{here}:{side}_digits", "threads": 2}
    started = train(**own_runs.pop("processes") | counted, start=launch)
    canonical(side, started).save(folder / "processes.npz")
    other = {"build": f"{here}:{side}_mixed", "dataset": mixed}
    for name, settings in own_runs.items():
        result = train(**settings)
        (canonical(side, result) if name == "local_norm" else result).save(folder / f"{name}.npz")
    half = {"checkpoint": str(folder / "saved"), "save_every": 3}
    train(**other, steps=4, **half)
    train(**other, **half).save(folder / "resumed.npz")
    two = masks_data(folder / "two")
    masked = {"build": f"{here}:{side}_masks", "dataset": two, "global_batch": 2}
    train(**masked, steps=3).save(folder / "masks.npz")
    saved = {"checkpoint": str(folder / "masks"), "save_every": 1}
    masks = train(**masked, steps=1, **saved)
    train(**masked, steps=3, **saved).save(folder / "masks_resumed.npz")
    words = {
        name: said(train, **other | {"dataset": digits, "start": launch} | settings)
        for name, settings in BAD.items()
    }
    words["threads"] = (folder / "threads").read_text().split()
    words["lacking"] = said(getattr(module, LACKING[side]), build=None)
    (kernel,) = masks.weights.values()
    words["masks"] = [(part < 1).tolist() for part in kernel.reshape(2, 64)]
    try:
        train(f"{here}:fails", digits, start=launch, replicas=1)
    except Exception as error:
        words["a replica that fails"] = [type(error).__name__, str(error)]
    alone(side, Path(sys.argv[3]), folder)
    names = ["mixed", "all_dense", *(["without_statistics"] if side == "pt" else [])]
    for name in names:
        plain(side, globals()[f"{side}_{name}"], mixed).save(folder / f"plain_{name}.npz")
    words |= whole() if side == "pt" else refused()
    words["a port in use"] = taken_port(side)
    if side == "tf":
        words |= configs()
    words["a server that others reach"] = warned(side)
    print(json.dumps(words))


RUN = [field.name for field in fields(parallel.Run)]


if __name__ == "__main__":
    main()
