"""What parallel techniques build in each process: a function for each model, by its name.

`first_losses` is a step of two devices with a technique's functions alone, without the kit, and
`plain` a step of one device without any technique.
"""

import importlib
from collections.abc import Callable
from functools import partial

import tensorflow as tf

from tests.zoo.cells_tf import BATCH, plain_step, sgd, without_dropout
from tests.zoo.tf import ZOO, loss_of

MODEL = "encoder"


def __getattr__(name: str) -> Callable:
    if name not in ZOO:
        raise AttributeError(name)

    def build() -> tuple:
        model = without_dropout(ZOO[name].build())
        return model, sgd(), loss_of(ZOO[name])

    return build


def plain() -> tuple[Callable, tuple]:
    """A plain train step of the model, a graph, and its batch."""
    step = tf.function(partial(plain_step, *__getattr__(MODEL)()))
    return step, (ZOO[MODEL].inputs(BATCH), ZOO[MODEL].labels(BATCH))


def first_losses(technique: str, module: str) -> tuple[float, float]:
    """The loss of a first step of two devices with a technique, and of a plain one."""
    technique_file, build = importlib.import_module(module), __getattr__(MODEL)
    model, _, loss_fn = build()
    x, y, samples = ZOO[MODEL].inputs(BATCH), ZOO[MODEL].labels(BATCH), BATCH
    alone = tf.add_n([loss_fn(model(x, training=True), y), *model.losses])
    if technique == "data_parallel":
        model, _, step = technique_file.one_process(build, replicas=2)
        batches = tf.data.Dataset.from_tensors((x, y))
        (((x, y), samples),) = technique_file.distribute(model, batches)
    elif technique == "model_parallel":
        _, _, step = technique_file.layer_split(build, x, cut=ZOO[MODEL].cut)
    else:
        _, _, step = technique_file.tensor_parallel(build, pairs=ZOO[MODEL].pairs)
    return float(step(x, y, samples)), float(alone)


def served(name: str) -> Callable:
    """What an instance of a server predicts with: arrays in and out."""
    model = ZOO[name].build()
    graph = tf.function(partial(model, training=False), jit_compile=False)
    return lambda x: graph(tf.constant(x)).numpy()
