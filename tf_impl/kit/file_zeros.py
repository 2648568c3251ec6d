"""The zeros in a file of a compressed model: evidence that they are still there.

Twin: `pt_impl/kit/file_zeros.py`.
Where the frameworks differ: a LiteRT file has operators, and its kernels are what its products
multiply by. There a file is the names and tensors of a graph.
"""

from pathlib import Path

import numpy as np

_PRODUCTS = ("CONV_2D", "DEPTHWISE_CONV_2D", "FULLY_CONNECTED")


def kernel_zeros(path) -> dict[str, float]:
    """Return the share of zeros of each kernel in a file of `kit/int8_files.py`.

    Kernels are what its products multiply by, float32 or int8, in the file's order and under the
    names that they have there. Raises FileNotFoundError, and ValueError for a file that is damaged
    or something else. Executes no code of the file.
    """
    from ai_edge_litert.interpreter import Interpreter, OpResolverType

    content = Path(path).read_bytes()
    try:
        # As it is in the file: XNNPACK would keep a copy in another order.
        plain = OpResolverType.BUILTIN_WITHOUT_DEFAULT_DELEGATES
        interpreter = Interpreter(model_content=content, experimental_op_resolver_type=plain)
        interpreter.allocate_tensors()
    except (ValueError, RuntimeError) as error:
        what = " ".join(str(error).split())
        raise ValueError(f"{path} is not a complete LiteRT file: {what}") from error
    products = [op for op in interpreter._get_ops_details() if op["op_name"] in _PRODUCTS]
    names = {tensor["index"]: tensor["name"] for tensor in interpreter.get_tensor_details()}
    kernels = (op["inputs"][1] for op in products)
    return {names[k]: float(np.mean(interpreter.get_tensor(k) == 0)) for k in kernels}
