"""What an instance of a test serves: importable, since it is sent to a process."""

from __future__ import annotations

import importlib
import os


def make_product(framework):
    """x @ x in a framework."""
    if framework == "pt":
        torch = importlib.import_module("torch")
        return lambda x: (torch.from_numpy(x) @ torch.from_numpy(x)).numpy()
    tf = importlib.import_module("tensorflow")
    return lambda x: tf.matmul(x, x).numpy()


def write_product(path, size):
    """An ONNX file of x @ x, for x of (size, size)."""
    from onnx import TensorProto, helper, save

    x, y = (helper.make_tensor_value_info(n, TensorProto.FLOAT, [size, size]) for n in "xy")
    graph = helper.make_graph([helper.make_node("MatMul", ["x", "x"], ["y"])], "g", [x], [y])
    opset = [helper.make_opsetid("", 17)]
    save(helper.make_model(graph, opset_imports=opset, ir_version=9), path)
    return path


def failing(setting):
    raise ValueError("no such model")


def ending(setting):
    os._exit(3)


def ending_later(setting):
    """Ends at the third call, the first after it was ready."""
    calls = []

    def predict(x):
        calls.append(x)
        if len(calls) == 3:
            os._exit(3)

    return predict
