"""What post-training quantization refuses: what LiteRT can't follow, and files that are far off."""

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import tensorflow as tf
from tensorflow.python.framework.convert_to_constants import convert_variables_to_constants_v2

from tf_impl.kit.tracing import check_example_inputs, one_line, outputs

COARSEST = 16  # step of the scores of a softmax: 255 of them are 4,000, which no score is
_HANDS_ON = {"PAD", "PADV2", "MAX_POOL_2D", "AVERAGE_POOL_2D", "MEAN", "RESHAPE", "TRANSPOSE"}
_SCALES = {"ADD", "SUB", "MUL", "DIV"}  # LiteRT's names


def check_post_training_quantization(model, calibration, activation_bits: int = 8) -> None:
    """Refuse other bits, and calibration data that is empty, not finite or not the model's."""
    if activation_bits not in (8, 16):
        raise ValueError(f"activation_bits must be 8 or 16, not {activation_bits!r}")
    check_example_inputs(model, calibration)


def check_loops(function) -> None:
    """Refuse to calibrate a graph with a loop: the converter crashes."""
    if any(node.type in ("While", "StatelessWhile") for node in function.graph.get_operations()):
        raise NotImplementedError(
            "LiteRT's converter cannot calibrate inside of a loop, such as that of an LSTM: "
            "apply_dynamic_int8 can, or unroll=True takes the loop away"
        )


def frozen(program) -> tuple:
    """Return a traced function as a GraphDef with its weights as constants, its inputs and outputs.

    tf2onnx takes constants that a function captures for inputs of the file.
    """
    concrete = program.get_concrete_function()
    with refusals("TensorFlow cannot make constants of its variables"):
        found = convert_variables_to_constants_v2(concrete, lower_control_flow=False)
    names = [[tensor.name for tensor in each] for each in (found.inputs, found.outputs)]
    return found.graph.as_graph_def(add_shapes=True), *names


@contextlib.contextmanager
def refusals(what: str) -> Iterator[None]:
    """Let what upstream raises, of many kinds, be a NotImplementedError of one line."""
    try:
        yield
    except Exception as error:
        raise NotImplementedError(f"{what}: {one_line(error)}") from error


def check_quantized(content: bytes) -> None:
    """Refuse a file without int8 weights, and one with a mask on the grid of attention's scores."""
    interpreter = _interpreter(content)
    operators = interpreter._get_ops_details()  # there is no public list
    kinds = [kind for one in operators for kind in one["operand_types"][1:2]]
    if np.dtype("int8") not in map(np.dtype, kinds):
        raise NotImplementedError("the model has no layer that LiteRT's converter quantizes")
    steps = {one["index"]: one["quantization"][0] for one in interpreter.get_tensor_details()}
    for operator in operators:
        step = steps[operator["inputs"][0]] if operator["op_name"] == "SOFTMAX" else 0.0
        if step > COARSEST:
            raise NotImplementedError(
                f"LiteRT would put attention's scores on a grid of {step:.2g} with the -1e9 of "
                "their mask, where all are one: take apply_dynamic_int8"
            )


def scaling_operators(content: bytes) -> list[str]:
    """Return names of the operators that scale and shift an input, column by column, before all
    else.

    LiteRT puts an input on one grid before `Normalization` brings its columns to one size, and so
    loses the narrow ones.
    """
    interpreter = _interpreter(content)
    tensors = {one["index"]: one for one in interpreter.get_tensor_details()}
    operators = interpreter._get_ops_details()
    made = {place for one in operators for place in one["outputs"]}
    scaled = {one["index"] for one in interpreter.get_input_details()}
    variable, names, by_column = made | scaled, [], False
    for one in operators:
        given = {*one["inputs"]} - {-1}  # which stands for a bias that is not there
        constants = [tensors[place] for place in given - variable]
        if not scaled & given or len(constants) + 1 != len(given):
            continue
        if one["op_name"] in _SCALES:
            names += [tensors[place]["name"] for place in one["outputs"]]
            by_column |= any(np.prod(constant["shape"]) > 1 for constant in constants)
        if one["op_name"] in _SCALES | {"QUANTIZE"}:
            scaled.update(one["outputs"])
    return names if by_column else []


def layer_operators(content: bytes) -> list[str]:
    """Return the names of what a file's convolutions and products with weights give, in order."""
    interpreter = _interpreter(content)
    tensors = {one["index"]: one["name"] for one in interpreter.get_tensor_details()}
    kinds = ("CONV_2D", "DEPTHWISE_CONV_2D", "TRANSPOSE_CONV", "FULLY_CONNECTED")
    operators = [one for one in interpreter._get_ops_details() if one["op_name"] in kinds]
    return [tensors[one["outputs"][0]] for one in operators]


def with_feeding(content: bytes, names: list[str]) -> list[str]:
    """Return names of layers, and of the operators without weights that only hand them their input.

    Padding would else put the input of a layer in float on the grid that it is kept from.
    """
    interpreter = _interpreter(content)
    tensors = {one["index"]: one["name"] for one in interpreter.get_tensor_details()}
    made = {place: one for one in interpreter._get_ops_details() for place in one["outputs"]}
    every = []
    for name in names:
        place = next(place for place in made if tensors[place] == name)
        every.append(name)
        while (one := made.get(made[place]["inputs"][0])) and one["op_name"] in _HANDS_ON:
            place = one["outputs"][0]
            every.append(tensors[place])
    return every


def _interpreter(content: bytes):
    from ai_edge_litert.interpreter import Interpreter

    return Interpreter(model_content=content)


def keep_if_near(part: Path, path, load: Callable, model, x, most: float) -> Path:
    """Give the file `part` its name if it predicts what the model does, nearly; else remove it.

    most: relative L2, on the first 32 samples of x.
    """
    few = tf.nest.map_structure(lambda tensor: tensor[:32], x)
    try:
        with refusals("the runtime cannot run the file"):
            found, wanted = load(part)(few), outputs(model, few)
        if not (apart := _apart(found, wanted)) <= most:
            rounded = tf.nest.map_structure(_to_8_bits, few)  # some models amplify all rounding
            moved = _apart(outputs(model, rounded), wanted)
            raise RuntimeError(
                f"outputs of the file are {apart:.2%} off the model's, which move by "
                f"{moved:.2%} where its inputs alone have 8 bits"
            )
        return part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def _to_8_bits(x: tf.Tensor) -> tf.Tensor:
    if not x.dtype.is_floating:
        return x
    span = tf.maximum(tf.reduce_max(x), 0) - tf.minimum(tf.reduce_min(x), 0)
    scale = tf.maximum(span, 1e-12) / 255
    return tf.round(x / scale) * scale


def _apart(ours, theirs) -> float:
    """The largest relative L2 difference of an output; inf where a shape or an infinity differs."""
    ours, theirs = (list(map(np.asarray, tf.nest.flatten(side))) for side in (ours, theirs))
    if [part.shape for part in ours] != [part.shape for part in theirs]:
        return float("inf")
    return max(map(_distance, ours, theirs), default=0.0)


def _distance(ours: np.ndarray, theirs: np.ndarray) -> float:
    if theirs.dtype.kind in "OSU":  # texts
        return 0.0 if np.array_equal(ours, theirs) else float("inf")
    ours, theirs = ours.astype(np.float64), theirs.astype(np.float64)
    finite = np.isfinite(theirs)
    same = np.array_equal(np.isfinite(ours), finite)
    if not same or not np.array_equal(ours[~finite], theirs[~finite], equal_nan=True):
        return float("inf")
    difference = np.linalg.norm(ours[finite] - theirs[finite])
    return float(difference / (np.linalg.norm(theirs[finite]) or 1.0))
