"""What compilation refuses: names of no layer, and what would be lost at a program's border."""

from collections.abc import Iterator
from contextlib import contextmanager
from fnmatch import fnmatchcase
from operator import attrgetter

import tensorflow as tf

_functions = attrgetter("library.function")  # of a GraphDef


def check_compilation(model: tf.keras.Model) -> None:
    """Raise ValueError for a model without variables."""
    if not model.built:
        raise ValueError("the model has no variables yet: call it once on an example input")


def check_xla(*models: tf.keras.layers.Layer) -> None:
    """Raise NotImplementedError for layers of models that look up or hash words.

    XLA has no such kernels: it fails in the first call, and `TextVectorization` ends the process.
    """
    table = tf.saved_model.experimental.TrackableResource
    words = tf.keras.layers.TextVectorization, tf.keras.layers.Hashing
    for layer in [part for model in models for part in model._flatten_layers()]:
        if isinstance(layer, words) or any(isinstance(v, table) for v in vars(layer).values()):
            raise NotImplementedError(
                f"XLA has no kernel for what {layer.name!r} looks up or hashes: do it in the input"
                " pipeline"
            )


def check_optimizer(optimizer) -> None:
    """Raise NotImplementedError for a legacy optimizer of tf_keras, which cannot be built."""
    if not hasattr(optimizer, "build"):
        raise NotImplementedError(
            "a legacy optimizer: take the one of its name in keras.optimizers"
        )


def check_blocks(model: tf.keras.Model, blocks: str) -> list:
    """Return the layers that `blocks` names, but for those inside another of them.

    Raises ValueError for names that no layer has.
    """
    layers = list(dict.fromkeys(model._flatten_layers(include_self=False)))
    chosen = []
    for pattern in filter(None, map(str.strip, blocks.split(","))):
        own = [layer for layer in layers if fnmatchcase(layer.name, pattern)]
        if not own:
            known = ", ".join(layer.name for layer in layers)
            raise ValueError(f"blocks: the model has no layer {pattern!r}; it has {known}")
        chosen += own
    inside = {id(part) for one in chosen for part in one._flatten_layers(include_self=False)}
    return [layer for layer in dict.fromkeys(chosen) if id(layer) not in inside]


@contextmanager
def check_losses(layer) -> Iterator[None]:
    """Raise NotImplementedError where a layer adds a loss inside, which would stay in a program."""
    known = _count_losses(layer)
    yield
    if _count_losses(layer) > known:
        raise NotImplementedError(f"{layer.name!r} adds a loss, which XLA's program would keep")


def check_masks(layer, outputs) -> None:
    """Raise NotImplementedError for outputs with a Keras mask, which would stay in a program."""
    if any(getattr(v, "_keras_mask", None) is not None for v in tf.nest.flatten(outputs)):
        raise NotImplementedError(f"{layer.name!r} gives a mask, which XLA's program would keep")


def check_borders(graph: tf.Graph) -> None:
    """Refuse a forward program that hands a loop's list of values on to the backward program.

    XLA keeps such lists inside of a program only, and says so when the program first runs.
    """
    for function in _functions(graph.as_graph_def()):
        outputs = function.signature.output_arg
        if function.attr["_XlaMustCompile"].b and tf.variant in [arg.type for arg in outputs]:
            error = NotImplementedError(
                "the model has a loop (an LSTM or GRU that is not unrolled), and XLA cannot hand"
                " what it kept on to the backward program: compile the whole step, unroll it,"
                " or name other blocks"
            )
            error.ag_pass_through = True  # else AutoGraph wraps the line in a page more
            raise error


def _count_losses(layer) -> int:
    return sum(len(part._losses) for part in layer._flatten_layers())
