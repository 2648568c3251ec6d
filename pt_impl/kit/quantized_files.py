"""Files of quantized models: written if they predict the same, and read to predict compiled.

Twin: `tf_impl/kit/quantized_files.py`.
Where the frameworks differ: what is read is compiled by TorchInductor, for each shape; TensorFlow
runs its graph as it is.
"""

import copy
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, fx, nn
from torch._inductor import config as inductor
from torch.utils._pytree import tree_map  # torch has no public one
from torchao.utils import unwrap_tensor_subclass

from pt_impl.kit import saving
from pt_impl.kit.checks.example_inputs import check_example_inputs
from pt_impl.kit.comparing import apart
from pt_impl.kit.tracing import check_sizes, input_tensors, outputs, trace

SAME = 1e-4  # relative L2: the outputs of a file to those of the model that was written


def save_quantized(model: nn.Module, inputs, path) -> Path:
    """Write a model, in float or with torchao's weights, as a file that predicts the same on a CPU.

    inputs: one sample or more: a tensor, a tuple of the model's positional arguments or a dict of
    those by name, tensors all; samples along the first axis. The file takes any number of samples
    of these sizes. The model is left as it is.

    Returns the path. Raises, and writes nothing, ValueError for inputs that the model does not
    take; NotImplementedError for a model that torch.export cannot capture; RuntimeError where the
    file, read again, gives something else.
    """
    check_example_inputs(model, inputs)
    model, inputs = copy.deepcopy(model).cpu().eval(), tree_map(Tensor.cpu, inputs)
    with torch.no_grad():
        wanted = outputs(model, tree_map(Tensor.clone, inputs))  # it may change them in place
    unwrap_tensor_subclass(model)  # a file holds plain tensors
    part = saving.save(trace(model, inputs), f"{path}.part")
    try:
        with torch.no_grad():
            off = apart(outputs(saving.load(part), inputs), wanted)
        if not off <= SAME:
            raise RuntimeError(f"outputs of the file are {off:.2%} off the model's")
        return part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def load_quantized(path, *, threads: int = 0) -> Callable:
    """Return `predict(x) -> output` over a file of `kit/saving.py`, compiled, on the CPU.

    x: any number of samples, of the sizes of the example. The first call for a shape compiles,
    which needs a C++ compiler. `predict.threads` is PyTorch's number of threads.
    threads: 0 leaves that number; another one is set for the whole process, which has one pool.

    Raises FileNotFoundError, and ValueError for a file that is damaged or something else, before
    anything of it runs, and in a call for other sizes.
    """
    if threads:
        torch.set_num_threads(threads)
    program, known = saving.load(path), set()
    integer_kernels = _rounds_activations(program)
    # Integer convolutions are compiled wrongly for a size that varies: TorchInductor 2.15 expects
    # another memory layout than oneDNN returns.
    how = {"dynamic": False, "fullgraph": True} if integer_kernels else {}
    compiled = torch.compile(program, **how)
    # Integer kernels need frozen weights. Without such kernels frozen int8 weights would be made
    # floats once, and kept so.
    freezing = integer_kernels or all(one.dtype is not torch.int8 for one in program.buffers())

    def predict(x):
        shapes = tuple((part.shape, part.device) for part in input_tensors(x))
        with torch.inference_mode():
            if shapes in known:
                return outputs(compiled, x)
            check_sizes(program, x)
            with inductor.patch(freezing=freezing):  # is read while a shape is traced and compiled
                output = outputs(compiled, x)
        known.add(shapes)
        return output

    predict.threads = torch.get_num_threads()
    return predict


def _rounds_activations(program: fx.GraphModule) -> bool:
    """Whether it has operators of PT2E quantization, which oneDNN's integer kernels take over."""
    return any(str(node.target).startswith("quantized_decomposed") for node in program.graph.nodes)
