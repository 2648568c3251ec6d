"""Trains on replicas and on one process, for `test_data_parallel.py`: SIDE FOLDER DATA.

Writes a .npz for each run, and prints what bad input gave as JSON.
"""

from __future__ import annotations

import importlib
import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np

from shared import datasets, parallel

JOB = {"global_batch": 32, "steps": 10, "seed": 0}


def pt_dense() -> tuple:
    """A model that is not the suite's, without BatchNorm."""
    import torch
    from torch import nn

    from pt_impl.kit import training

    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(1024, 16), nn.ReLU(), nn.Linear(16, 10))
    return model, torch.optim.SGD(model.parameters(), 0.02, 0.9), training.cross_entropy


def tf_dense() -> tuple:
    """A model that is not the suite's, without BatchNorm."""
    import tensorflow as tf

    from tf_impl.kit import training

    layers = tf.keras.layers
    tf.keras.utils.set_random_seed(0)
    model = tf.keras.Sequential(
        [
            tf.keras.Input((32, 32, 1)),
            layers.Flatten(),
            layers.Dense(16, "relu"),
            layers.Dense(10),
        ]
    )
    optimizer = tf.keras.optimizers.SGD(0.02, 0.9)
    optimizer.build(model.trainable_variables)
    return model, optimizer, training.cross_entropy


def fails() -> tuple:
    """What a replica of a user's own may do."""
    raise ValueError("no such thing as a model")


def alone(side: str, build, data: Path) -> parallel.Result:
    """One process, the kit's own baseline step, no engine for replicas."""
    kit = {name: importlib.import_module(f"{side}_impl.kit.{name}") for name in KIT}
    model, optimizer, loss_fn = build()
    step = kit["training"].make_train_step(model, optimizer, loss_fn)
    x, y = datasets.load(data, "train")
    losses, stream = [], parallel.batches(len(x), global_batch=JOB["global_batch"], seed=0)
    for rows in (next(stream) for _ in range(JOB["steps"])):
        losses.append(kit["runtime"].to_float(step(*kit["data"].to_device(x[rows], y[rows]))))
    none = np.zeros(0)
    weights = kit["models"].export_weights(model)
    return parallel.Result(weights, np.array(losses), none, none, none, none, 0.0)


KIT = ("models", "training", "runtime", "data")


def runs(side: str) -> dict[str, dict]:
    """Name -> settings of what is trained on two replicas."""
    module, here = f"{side}_impl.parallel.data_parallel", "tests.parallel.data_parallel_worker"
    cnn, dense = {"build": f"{module}:digits_cnn"}, {"build": f"{here}:{side}_dense"}
    micro = dense | {"variant": "accumulated", "micro_batches": 2}
    other = {"pt": "sharded", "tf": "one_process"}[side]
    return {
        "processes": cnn | {"synchronised_norm": True},
        other: cnn | {"synchronised_norm": True, "variant": other},
        "local_norm": cnn,
        "accumulated": micro,
        "synchronised_each": micro | {"synchronise_each": True},
    }


BAD = {
    "a batch that does not divide": {"global_batch": 33},
    "more replicas than threads": {"replicas": 4, "threads": 2},
    "no replica": {"replicas": 0},
    "a batch larger than the data": {"global_batch": 2048},
    "no step": {"steps": 0},
    "an unknown variant": {"variant": "ddp"},
    "micro-batches elsewhere": {"micro_batches": 2},
    "a last batch too small": {"variant": "accumulated", "micro_batches": 16},
    "no such module": {"build": "no_such_module:build"},
    "no such function": {"build": "tests.parallel.data_parallel_worker:nothing"},
    "no such data": {"dataset": "nowhere"},
    "an unknown communication": {"communication": "pigeon"},
    "nccl without a GPU": {"communication": "nccl"},
}
LACKING = {
    "pt": {"one_process": {"variant": "one_process"}, "tpu": {"variant": "tpu"}},
    "tf": {"sharded": {"variant": "sharded"}, "tpu": {"variant": "tpu"}},
}
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


def configs() -> dict[str, list[str]]:
    """What each malformed TF_CONFIG gives."""
    join = importlib.import_module("tf_impl.kit.replicas").join
    found = {}
    for name, text in CONFIGS.items():
        os.environ["TF_CONFIG"] = text
        found[name] = said(join)
    return found


def main() -> None:
    side, folder, data = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3])
    train = importlib.import_module(f"{side}_impl.parallel.data_parallel").train_data_parallel
    module = importlib.import_module(f"{side}_impl.parallel.data_parallel")
    for name, settings in runs(side).items():
        settings = dict(settings)
        train(settings.pop("build"), data, replicas=2, **JOB, **settings).save(
            folder / f"{name}.npz"
        )
    half = {"replicas": 2, "checkpoint": str(folder / "saved"), "save_every": 3}
    dense = f"tests.parallel.data_parallel_worker:{side}_dense"
    train(dense, data, **JOB | {"steps": 4}, **half)
    train(dense, data, **JOB, **half).save(folder / "resumed.npz")
    words = {
        name: said(train, **{"build": dense, "dataset": data, "replicas": 2, **JOB, **settings})
        for name, settings in (BAD | LACKING[side]).items()
    }
    try:
        train("tests.parallel.data_parallel_worker:fails", data, replicas=2, **JOB)
    except Exception as error:
        words["a replica that fails"] = [type(error).__name__, str(error)]
    alone(side, module.digits_cnn, data).save(folder / "alone.npz")
    alone(side, globals()[f"{side}_dense"], data).save(folder / "alone_dense.npz")
    words["a port in use"] = taken_port(side)
    if side == "tf":
        words |= configs()
    print(json.dumps(words))


if __name__ == "__main__":
    main()
