"""PyTorch's slow steps, taken once or left out in tests that are not about them."""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Iterator
from unittest import mock

from tests import workers


@contextlib.contextmanager
def without_code() -> Iterator[None]:
    """`torch.compile` as ever with frozen weights, but what would become C++ code runs as it is.

    Kernels over integers are oneDNN's all the same: it is TorchInductor that puts them into the
    graph. Nothing changes where torch is not imported, and in campaigns.
    """
    torch = sys.modules.get("torch")
    if not torch or workers.campaign():
        yield
        return
    from torch._functorch import config as functorch
    from torch._inductor.compile_fx import compile_fx

    def backend(graph, inputs):
        with functorch.patch(enable_autograd_cache=False):  # one that is warm skips `as_it_is`
            return compile_fx(graph, inputs, inner_compile=as_it_is)

    with mock.patch.object(torch, "compile", functools.partial(torch.compile, backend=backend)):
        yield


def as_it_is(graph, inputs, **options):
    """In the place of `compile_fx_inner`, which would generate code for the graph."""
    from torch._functorch.aot_autograd import make_boxed_func

    return make_boxed_func(graph.forward)


def capture_patterns_once() -> None:
    """From now on torchao captures the patterns that it looks for once, not in each preparation."""
    from torchao.quantization.pt2e import qat_utils

    for name in ("conv_bn_pattern", "qat_conv_bn_pattern", "qat_conv_bn_pattern_no_conv_bias"):
        make = functools.cache(getattr(qat_utils, f"_get_{name}"))
        setattr(qat_utils, f"_get_{name}", make)
    capture, captured = qat_utils._get_aten_graph_module_for_pattern, {}

    def once(pattern, example_inputs, is_cuda=False, **settings):
        if settings:  # of conversion, whose patterns are made anew
            return capture(pattern, example_inputs, is_cuda, **settings)
        if pattern not in captured:
            captured[pattern] = capture(pattern, example_inputs, is_cuda)
        return captured[pattern]

    qat_utils._get_aten_graph_module_for_pattern = once
