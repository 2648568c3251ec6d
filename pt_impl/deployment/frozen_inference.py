"""Frozen inference: a model that only predicts, with its weights as constants.

    fused = fuse_conv_bn(model)  # no compiler
    predict = frozen_predict(model)  # torch.compile, constants folded
    save_cache("compiled.bin")  # after the first calls; elsewhere, before them: load_cache

What it changes: what each call computes. If weights never change, everything that depends only on
them is computed once. BatchNorm in evaluation mode is one multiplication and addition per channel,
which the convolution before it can do: its kernel is scaled, its bias shifted.
- The compiler also packs kernels in the layout that matrix products read.

Its twin: `tf_impl/deployment/frozen_inference.py`.

Where the frameworks differ and why:
- PyTorch: `freezing` is an option of TorchInductor, off by default. Without a compiler, `torch.fx`
  folds BatchNorm.
- TensorFlow: variables become constants, and grappler does the rest. It can't fold only BatchNorm.
- TorchInductor's compiled files can be saved, and loaded on another machine of the same kind. XLA
  has no such call, only a folder, which `TF_XLA_FLAGS=--tf_xla_persistent_cache_directory=...`
  names before the first program.
- PyTorch can compile repeated blocks once (`apply_compile(blocks=...)` of `compilation.py`),
  TensorFlow compiles each.

When it helps and when it hurts: it helps convolutions with BatchNorm, and small models, whose
operators have more overhead than arithmetic. If weights change later, predictions are still those
of the weights at the first call.
- At first torch.compile takes seconds to minutes. A saved cache avoids most of that.

Run it alone: `python -m pt_impl.deployment.frozen_inference` prints time and first call of each.

Copy with it: `pt_impl/kit/calling.py`, `pt_impl/kit/checks/frozen_inference.py`.
"""

import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn
from torch.fx.experimental import optimization

from pt_impl.kit.calling import call
from pt_impl.kit.checks import frozen_inference as checks


def fuse_conv_bn(model: nn.Module) -> nn.Module:
    """Return a copy in evaluation mode in which convolutions have taken in their BatchNorm.

    Those that are followed by nothing else; linear layers, too. The model is left as it is.

    Raises NotImplementedError for a model that torch.fx cannot trace, and for one that calls such a
    layer twice. Source: `torch.fx.experimental.optimization.fuse`.
    """
    checks.check_fusion(model)
    return optimization.fuse(checks.check_copy(model))


def frozen_predict(model: nn.Module) -> Callable:
    """Return `predict(x) -> output` of the model as it is now, compiled with weights as constants.

    x: a tuple of the model's positional arguments, a mapping of its keywords, or its one argument.
    Each new shape compiles anew. The model is left as it is; what it learns later is not seen.

    Raises NotImplementedError for a model that cannot be copied.
    Source: `torch.compile` with TorchInductor's option `freezing`.
    """
    compiled = torch.compile(checks.check_copy(model), dynamic=False, options={"freezing": True})

    def predict(x):
        with torch.no_grad():  # with gradients nothing is frozen
            return call(compiled, x)

    return predict


def save_cache(path) -> Path:
    """Write what this process has compiled so far to a file for `load_cache`; return its path.

    Raises RuntimeError where nothing was compiled. Source: `torch.compiler.save_cache_artifacts`.
    """
    artifacts = torch.compiler.save_cache_artifacts()
    if artifacts is None:
        raise RuntimeError("nothing was compiled: call the predictions once before")
    Path(path).write_bytes(artifacts[0])
    return Path(path)


def load_cache(path) -> int:
    """Fill the caches of torch.compile from a file of `save_cache`; return how many parts it had.

    For the same torch, kind of processor and model: anything else compiles as ever. The file holds
    code that will run, so load none but your own.
    Raises ValueError for a file that is no such cache.
    Source: `torch.compiler.load_cache_artifacts`.
    """
    found = torch.compiler.load_cache_artifacts(Path(path).read_bytes())
    if found is None:
        raise ValueError(f"{path} is no cache of torch.compile")
    return sum(len(parts) for parts in found.artifacts.values())


def main() -> None:
    """Print the first call and the time of predictions of a CNN: plain, fused and frozen."""
    from pt_impl.kit.demo import Demo
    from pt_impl.kit.training import make_predict

    demo = Demo("digits-cnn", batch_size=8)
    model, x = demo.build()[0], demo.batches[0][0]
    ways = {
        "plain": make_predict(model),
        "fused": make_predict(fuse_conv_bn(model)),
        "frozen": frozen_predict(model),
    }
    first = {}
    for name, predict in ways.items():
        start = time.perf_counter()
        predict(x)
        first[name] = time.perf_counter() - start
    calls = {name: lambda x, y, run=run: run(x) for name, run in ways.items()}
    print("           first call, s  ms a batch of 8")
    for name, ms in demo.times(calls).items():
        print(f"{name:11}{first[name]:13.3f}{ms:17.3f}")


if __name__ == "__main__":
    main()
