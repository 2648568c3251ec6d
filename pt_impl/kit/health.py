"""PyTorch's facts for `twinbench doctor`: pools, products, modes, denormal numbers.

Twin: `tf_impl/kit/health.py`.
Where the frameworks differ: a pool can be resized while PyTorch runs, not in TensorFlow. PyTorch
computes with denormal numbers unless it is told to flush them, TensorFlow flushes them.
"""

import gc
import sys
import warnings
from collections.abc import Callable, Iterator
from time import perf_counter

import numpy as np
import torch
from torch import nn

from pt_impl.kit import calling, runtime, training, user_model
from shared import health
from shared.health import Denormals, Mode, Predicting, Subject
from shared.user_model import RECIPE, BadFile, made_of, pair


def version() -> str:
    """Of torch."""
    return torch.__version__


def pools() -> dict[str, int]:
    """Threads by pool."""
    return {"intra-op": torch.get_num_threads(), "inter-op": torch.get_num_interop_threads()}


def product(*, dtype: str, size: int, seconds: float) -> float:
    """FLOP/s of a product."""
    return runtime.matmul_flops(size=size, dtype=dtype, seconds=seconds)


def product_with(*, threads: int, size: int, seconds: float) -> float | None:
    """FLOP/s of float32 products over so many seconds with so many threads, pauses included."""
    before, a = torch.get_num_threads(), torch.randn(size, size)
    torch.set_num_threads(threads)
    try:
        out, count = a @ a, 0
        start = perf_counter()
        while (passed := perf_counter() - start) < seconds:
            torch.mm(a, a, out=out)
            count += 1
        return 2 * size**3 * count / passed
    finally:
        torch.set_num_threads(before)


def without_onednn() -> float | None:
    """Nothing: PyTorch switches oneDNN off nowhere by itself."""
    return None


def subject(module) -> Subject:
    """What a file trains. Raises BadFile where it has nothing of PyTorch."""
    if hasattr(module, "make"):
        step, batches = made_of(module)
        return Subject(_models(), step, lambda: batches)
    model, loss, *optimizer = module.pytorch()
    keras = _keras_json(model)
    if not isinstance(model, nn.Module):
        name = type(model).__module__.partition(".")[0]
        raise BadFile(
            f"pytorch() gives a model of {name}, not of PyTorch: give it as tensorflow(), or set "
            "KERAS_BACKEND=torch to have Keras compute with PyTorch"
        )
    device = runtime.device()
    model.to(device)
    make = optimizer[0] if optimizer else training.make_optimizer(model, RECIPE)
    step = training.make_train_step(model, make, loss)
    batches = health.batches_of(module, "pt")
    return Subject([model], step, batches, on_device, keras)


def on_device(batch) -> tuple:
    """x and y of a batch of a file for `try`."""
    return user_model.to_device(*pair(batch, "batches"))


def _keras_json(model) -> str:
    """The architecture of a model of Keras that runs on PyTorch; "" for any other model."""
    keras = sys.modules.get("keras")
    if keras is None or not isinstance(model, keras.Model):
        return ""
    return model.to_json()


def _models() -> list[nn.Module]:
    """The models that are alive, without those that are a part of another."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of lazy modules that are only looked at
        every = [one for one in gc.get_objects() if isinstance(one, nn.Module)]
    parts = {id(part) for one in every for part in one.children()}
    return [one for one in every if id(one) not in parts and any(True for _ in one.parameters())]


def denormals(given: Subject, arguments) -> Denormals:
    """Denormal numbers in weights and in what layers give, and what a step takes with them."""
    parameters = (p.detach().cpu() for model in given.models for p in model.parameters())
    weights = health.denormal_share(p.numpy() for p in parameters if p.dtype == torch.float32)
    saved = [{k: v.clone() for k, v in model.state_dict().items()} for model in given.models]
    outputs: list[np.ndarray] = []

    def note(_module, _inputs, output) -> None:
        for tensor in calling.tensors(output):
            if tensor.dtype == torch.float32:
                outputs.append(tensor.detach().cpu().numpy().copy())

    leaves = (m for model in given.models for m in model.modules() if not list(m.children()))
    hooks = [leaf.register_forward_hook(note) for leaf in leaves]
    try:
        given.step(*arguments)
    finally:
        for hook in hooks:
            hook.remove()
    share = health.denormal_share(outputs)
    if not weights and not share:
        return Denormals(weights, share, 0.0, 0.0, "step")

    def step(flush: bool) -> Callable:
        def timed() -> None:
            for model, state in zip(given.models, saved, strict=True):
                model.load_state_dict(state)
            torch.set_flush_denormal(flush)
            given.step(*arguments)

        return timed

    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # where threads wait for one another, times say little
    try:
        with_s, without_s = health.in_turns(step(False), step(True))
    finally:
        torch.set_flush_denormal(False)
        torch.set_num_threads(threads)
    return Denormals(weights, share, with_s, without_s, "step")


def modes(given: Subject, arguments) -> Iterator[Mode]:
    """Settings of the file that make its steps slow."""
    if torch.is_anomaly_enabled():

        def step(anomaly: bool) -> Callable:
            def timed() -> None:
                with warnings.catch_warnings(), torch.autograd.set_detect_anomaly(anomaly):
                    warnings.simplefilter("ignore")
                    given.step(*arguments)

            return timed

        yield Mode("anomaly", *health.in_turns(step(True), step(False)))


def predicting(given: Subject, arguments, in_a_loop: bool) -> Predicting | None:
    """Nothing: `predict` is a method of Keras."""
    return None


def rows_by_python(loader) -> str:
    """Nothing: what a loader calls is seen as it is drawn from."""
    return ""


if __name__ == "__main__":
    health.run(sys.modules[__name__], __doc__)
