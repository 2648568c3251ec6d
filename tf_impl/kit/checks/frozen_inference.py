"""What frozen inference needs of TensorFlow that is not public: variables that become constants."""

from collections.abc import Callable

import tensorflow as tf
from tensorflow.python.framework.convert_to_constants import convert_variables_to_constants_v2

from tf_impl.kit.tracing import input_tensors, one_line


def freeze(program) -> Callable:
    """Return a traced function with its variables as constants: tensors -> the model's output.

    Raises NotImplementedError for what cannot be made constant, such as a table of words.
    """
    concrete = program.get_concrete_function()
    try:
        frozen = convert_variables_to_constants_v2(concrete, lower_control_flow=False)
    except Exception as error:  # of many kinds
        words = f"TensorFlow cannot make constants of its variables: {one_line(error)}"
        raise NotImplementedError(words) from error
    structure = concrete.structured_outputs

    def run(x):
        return tf.nest.pack_sequence_as(structure, tf.nest.flatten(frozen(*input_tensors(x))))

    run.graph = frozen.graph
    return run
