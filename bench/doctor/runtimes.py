"""How many threads ONNX Runtime and OpenVINO start by default, in a session of a small model.


    python -m bench.doctor.runtimes

Prints one line of JSON for each that is installed.
"""

from __future__ import annotations

import json
import os

from shared.health import MARK


def main() -> None:
    """Make a session of each, and count."""
    for ask in (_onnxruntime, _openvino):
        try:
            print(f"{MARK}{json.dumps(ask())}", flush=True)
        except ImportError:  # it is not installed
            continue


def _model() -> bytes:
    from onnx import TensorProto, helper

    ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [1, 8]) for name in "xy"]
    graph = helper.make_graph([helper.make_node("Relu", ["x"], ["y"])], "one", ends[:1], ends[1:])
    opset = helper.make_opsetid("", 17)
    return helper.make_model(graph, opset_imports=[opset], ir_version=8).SerializeToString()


def _onnxruntime() -> dict[str, int]:
    """The caller's thread computes, too."""
    import onnxruntime

    before = len(os.listdir("/proc/self/task"))
    session = onnxruntime.InferenceSession(_model(), providers=["CPUExecutionProvider"])
    after = len(os.listdir("/proc/self/task"))
    del session
    return {"ONNX Runtime": after - before + 1}


def _openvino() -> dict[str, int]:
    import openvino

    core = openvino.Core()
    compiled = core.compile_model(core.read_model(_model()), "CPU")
    return {"OpenVINO": int(compiled.get_property("INFERENCE_NUM_THREADS"))}


if __name__ == "__main__":
    main()
