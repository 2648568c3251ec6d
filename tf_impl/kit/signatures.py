"""What an exported file takes and gives: any Keras model as a function of tensors that have names.

Twin: `pt_impl/kit/signatures.py`.
Where the frameworks differ: a trace sees None for a size that is open, so that files are tried with
a shorter and a longer sequence. `torch.export` knows the bounds of each size.
"""

import inspect
from collections.abc import Callable, Iterator
from contextlib import nullcontext, suppress
from functools import cached_property

import numpy as np
import tensorflow as tf
from tensorflow.python.framework.convert_to_constants import convert_variables_to_constants_v2

from shared import runtimes

_LOOPS = {"TensorListReserve", "TensorListFromTensor"}


class Signature:
    """A model as a function of tensors one by one, which gives tensors by number.

    inputs, outputs: names, those of a dict's keys, of the model's inputs or of its `call`'s
    arguments, else input_0 or output_0, ... specs: of the inputs, with the sizes that are open.
    Outputs are known once it is traced.

    Raises ValueError for a model that is not built, and for sparse or ragged inputs.
    """

    def __init__(
        self, model: tf.keras.Model, example_inputs, *, dynamic_batch: bool, dynamic_sequence: bool
    ) -> None:
        if not model.built:
            raise ValueError("the model has no variables yet: call it once on an example input")
        parts = tf.nest.flatten(example_inputs)
        kinds = {type(part).__name__ for part in parts if tf.is_tensor(part)}
        if other := kinds & {"SparseTensor", "RaggedTensor"}:
            raise ValueError(f"inputs must be dense tensors, not {', '.join(sorted(other))}")
        self.model, self.structure = model, example_inputs
        self.example = [tf.convert_to_tensor(part) for part in parts]
        self.inputs = _input_names(model, example_inputs, len(parts))
        opened = (0, dynamic_batch), (1, dynamic_sequence)
        self.open_axes = [axis for axis, is_open in opened if is_open]
        self.specs = []
        for place, tensor in enumerate(self.example):
            sizes = [None if n in self.open_axes else size for n, size in enumerate(tensor.shape)]
            self.specs.append(tf.TensorSpec(sizes, tensor.dtype, name=f"input_{place:04}"))
        self.outputs: list[str] = []

    def trace(self, *, inlined: bool) -> Callable:
        """Return the function, traced once; NotImplementedError for a model that cannot be.

        inlined: functions within the model are written out. Keras lets XLA compile some of them,
        which files of other runtimes cannot say.
        """

        @tf.function(input_signature=self.specs, jit_compile=False)
        def predict(*parts):
            before = tf.config.functions_run_eagerly()
            tf.config.run_functions_eagerly(inlined)  # within a trace: into its graph
            try:
                # Nothing is assigned: a layer that will not drop draws a seed for its dropout.
                with getattr(tf.keras, "StatelessScope", nullcontext)():
                    named = self._named(parts)
            finally:
                tf.config.run_functions_eagerly(before)
            self.outputs = [name for name, _ in named]
            return {f"output_{place:04}": part for place, (_, part) in enumerate(named)}

        with runtimes.translating("The trace of a call"):
            predict.get_concrete_function()
        return predict

    @cached_property
    def samples(self) -> list[tuple[list, list]]:
        """Inputs of some calls, of other sizes where these are open, and what the model gave."""
        with runtimes.translating("The model"):
            found = [self._sample(self.example)]
        for given in self._other_sizes():
            with suppress(Exception):  # some models take one size, or know a longest one
                found.append(self._sample(given))
        return found

    def _other_sizes(self) -> Iterator[list[tf.Tensor]]:
        """Inputs of one sample more; of sequences, along axis 1, one shorter and twice as long."""
        if 0 in self.open_axes:
            yield [tf.concat([part, part[:1]], 0) for part in self.example]
        if 1 in self.open_axes:
            has_one = [part.shape.rank > 1 and part.shape[1] > 1 for part in self.example]
            pairs = list(zip(self.example, has_one, strict=True))
            yield [part[:, :-1] if one else part for part, one in pairs]
            yield [tf.concat([part, part], 1) if one else part for part, one in pairs]

    def _sample(self, given: list) -> tuple[list, list]:
        named = self._named(given)
        return [part.numpy() for part in given], [np.asarray(part) for _, part in named]

    def _named(self, parts) -> list[tuple[str, tf.Tensor]]:
        x = tf.nest.pack_sequence_as(self.structure, parts)
        return named_tensors(call(self.model, x))


def freeze(function: Callable):
    """Return a traced function with constants in place of all that it reads."""
    with runtimes.translating("The trace of a call"):
        traced = function.get_concrete_function()
        return convert_variables_to_constants_v2(traced, lower_control_flow=False)


def refuse_for_runtimes(signature: Signature) -> None:
    """Refuse what runtimes other than TensorFlow lack: texts, tables, and state between calls."""
    layers = signature.model._flatten_layers()
    recurrent = [layer for layer in layers if isinstance(layer, tf.keras.layers.RNN)]
    if names := [layer.name for layer in recurrent if layer.stateful]:
        raise NotImplementedError(
            f"{', '.join(names)} would lose the state that it keeps from call to call: make the"
            " model with stateful=False"
        )
    if not signature.example or not all(part.shape.rank for part in signature.example):
        raise ValueError("the model's inputs are tensors with the samples along the first axis")
    if texts := sum(part.dtype == tf.string for part in signature.example):
        raise NotImplementedError(
            f"{texts} of the model's inputs are texts, which the runtimes' vectorization lacks: "
            "export the model behind it, and give it codes"
        )
    if tables(signature.model):
        raise NotImplementedError(
            "the model looks values up in tables, which the runtimes lack: export the model behind"
            " its lookups, and give it codes"
        )


def refuse_loops(frozen, *, is_open: bool, in_int8: bool) -> None:
    """Refuse what LiteRT cannot do with a loop over time in a frozen function."""
    if _LOOPS.isdisjoint(node.op for node in frozen.graph.as_graph_def().node):
        return
    if is_open:
        raise NotImplementedError(
            "LiteRT's loops over time (LSTM, GRU) take fixed sizes alone: dynamic_batch=False"
        )
    if in_int8:  # its calibration of one ends the process
        raise NotImplementedError("LiteRT's loops over time (LSTM, GRU) can't be in int8")


def tables(model: tf.keras.Model) -> list:
    """Return what layers look values up in, as `StringLookup` and `IntegerLookup` do."""
    kind = tf.saved_model.experimental.TrackableResource
    parts = [part for layer in model._flatten_layers() for part in vars(layer).values()]
    return [part for part in parts if isinstance(part, kind)]


def call(model: tf.keras.Model, x):
    """Return what the model gives in evaluation mode for x, handed over as `fit` hands it over."""
    taken = _input_arguments(model)
    needed = sum(2 if one.kind is one.VAR_POSITIONAL else one.default is one.empty for one in taken)
    if isinstance(x, dict) and len(taken) > 1 and x.keys() <= {one.name for one in taken}:
        output = model(**x, training=False)
    else:
        several = isinstance(x, tuple | list) and needed > 1
        output = model(*(x if several else (x,)), training=False)
    return getattr(output, "logits", output)


def _input_arguments(model: tf.keras.Model) -> list[inspect.Parameter]:
    return [
        argument
        for argument in inspect.signature(model.call).parameters.values()
        if argument.name not in ("training", "mask") and argument.kind is not argument.VAR_KEYWORD
    ]


def _input_names(model: tf.keras.Model, inputs, count: int) -> list[str]:
    """What the inputs are called: by a dict, by the model or by its `call`."""
    if isinstance(inputs, dict) and len(inputs) == count:
        return sorted(inputs)  # the order of `tf.nest`
    own = [tensor.name.split(":")[0] for tensor in getattr(model, "inputs", None) or []]
    made_up = any(name.startswith("keras_tensor") for name in own)  # by Keras, anew in a process
    if len(own) == count and not made_up:
        return own
    named = [argument.name for argument in _input_arguments(model)]
    if len(named) == count and not own:
        return named
    return [f"input_{place}" for place in range(count)]


def named_tensors(output, name: str = "") -> list[tuple[str, tf.Tensor]]:
    """Return the tensors of an output, each with the name of its place in a dict or tuple."""
    if isinstance(output, dict):
        inside = {f"{name}.{key}" if name else str(key): part for key, part in output.items()}
    elif isinstance(output, tuple | list):
        inside = {f"{name or 'output'}_{place}": part for place, part in enumerate(output)}
    elif tf.is_tensor(output):
        return [(name or "output", output)]
    else:
        raise NotImplementedError(f"a file's outputs are tensors, not {type(output).__name__}")
    named = (named_tensors(part, key) for key, part in inside.items() if part is not None)
    return [pair for each in named for pair in each]
