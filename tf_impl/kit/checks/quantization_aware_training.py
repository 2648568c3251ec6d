"""What quantization-aware training refuses: what cannot be copied, followed or converted."""

import contextlib
import re
from collections.abc import Iterator

import numpy as np
import tensorflow as tf

from tf_impl.kit.copying import distance, output_arrays
from tf_impl.kit.tracing import check_example_inputs, input_tensors, one_line

MOST_APART = 0.1  # relative L2 of converted outputs to the model's: some values round the other way
_RANGE = re.compile(r"(input|inside|activation|output)_(min|max)(:0)?$")
_OF_TFMOT = {"Conv2D", "DepthwiseConv2D", "SeparableConv1D", "SeparableConv2D", "Dense"}


def check_quantization_aware_training(model, example_inputs, weight_bits: int) -> None:
    """Refuse other bits, inputs that the model does not take, and what tfmot can't quantize."""
    if weight_bits not in range(2, 9):
        raise ValueError(f"weight_bits must be 2 to 8, not {weight_bits!r}")
    if weight_bits == 3:
        raise NotImplementedError("LiteRT would put 3 bits on the grid of 4: take 2 or 4")
    check_example_inputs(model, example_inputs)
    if tf.keras.Model.__module__.startswith("tf_keras"):
        if not (isinstance(model, tf.keras.Sequential) or model._is_graph_network):
            raise NotImplementedError(
                "tfmot quantizes functional and Sequential models, not subclassed"
            )
        names = {type(layer).__name__ for layer in model._flatten_layers()}
        if not names & _OF_TFMOT:
            raise ValueError("the model has no convolution or dense layer to quantize")


def check_places(places: dict) -> None:
    """Refuse a Keras 3 model without a layer to round, and layers in other dtypes than float32."""
    if not any(hasattr(layer, "kernel") for layer in places):
        raise ValueError("the model has no convolution or dense layer to quantize")
    for layer in places:
        if layer.compute_dtype != "float32":
            raise NotImplementedError(
                f"{layer.name!r} computes in {layer.compute_dtype}: models of float32 are rounded"
            )


def ranges(model) -> list:
    """Return the ends of the ranges of activations; refuse a model without fake quantization."""
    found = [one for one in model.non_trainable_variables if _RANGE.search(one.name)]
    if not found:
        raise ValueError("the model has no fake quantization: it comes from prepare_qat")
    return found


@contextlib.contextmanager
def refusals(what: str) -> Iterator[None]:
    """Let what upstream raises, of many kinds, be a NotImplementedError of one line."""
    try:
        yield
    except Exception as error:
        raise NotImplementedError(f"{what}: {one_line(error)}") from error


def check_converted(content: bytes, model, example_inputs) -> None:
    """Refuse a LiteRT file that does not run, or that is not near the model."""
    with refusals("LiteRT cannot run the file"):
        found = _run(content, example_inputs)
    wanted = output_arrays(model, example_inputs)
    apart = max(map(distance, found, wanted), default=0.0)
    if not apart <= MOST_APART:
        # Where a model amplifies what rounds the other way, no other program is near it.
        more = tf.nest.map_structure(_a_thousandth_more, example_inputs)
        moved = max(map(distance, output_arrays(model, more), wanted))
        raise RuntimeError(
            f"outputs of the converted model are {apart:.0%} off those before, which move by "
            f"{moved:.0%} where inputs change by a thousandth: {_why(apart, moved)}"
        )


def _why(apart: float, moved: float) -> str:
    if moved > apart / 4:
        return "the model amplifies all rounding, as untrained ones do, so that no file is near it"
    return "LiteRT's converter makes something else of it"


def _a_thousandth_more(x: tf.Tensor) -> tf.Tensor:
    """At most a quarter of a step of 8 bits; of less the rounding of the inputs leaves nothing."""
    return x * (1 + 1e-3) if x.dtype.is_floating else x


def _run(content: bytes, inputs) -> list[np.ndarray]:
    from ai_edge_litert.interpreter import Interpreter

    interpreter = Interpreter(model_content=content)
    places = sorted(interpreter.get_input_details(), key=lambda one: one["name"])
    arrays, found = [np.asarray(part) for part in input_tensors(inputs)], []
    single = any(one["shape_signature"][0] == 1 for one in places)  # of a model with a loop
    size = 1 if single else len(arrays[0])
    for start in range(0, len(arrays[0]), size):
        for one, array in zip(places, arrays, strict=True):
            interpreter.resize_tensor_input(one["index"], [size, *array.shape[1:]])
        interpreter.allocate_tensors()
        for one, array in zip(places, arrays, strict=True):
            interpreter.set_tensor(one["index"], array[start : start + size])
        interpreter.invoke()
        found.append([interpreter.get_tensor(o["index"]) for o in interpreter.get_output_details()])
    return [np.concatenate(parts) for parts in zip(*found, strict=True)]
