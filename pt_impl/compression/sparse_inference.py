"""Sparse inference: predict with the zeros of pruned dense layers left out, as CSR matrices.

What it changes: the kernel of each `nn.Linear` with enough zeros is stored as a compressed sparse
row (CSR) matrix: the values that are not zero, their columns, and where each row begins. The
product visits these values alone. Predictions are those of the dense model, up to rounding. A value
costs 8 bytes with its index, 4 when dense: below 50% of zeros the sparse kernel is the larger one.

Its twin: `tf_impl/compression/sparse_inference.py`.

Where the frameworks differ and why:
- Here a copy of the model gets other modules in place of its linear layers, and MKL multiplies.
  There the model is left alone and its dense layers compute otherwise while the graph is traced,
  through TensorFlow's CSR operators, which have no Keras layer.
- `to_sparse_csr` makes 64-bit indices, which MKL would convert to 32 bits in each call: they are
  made 32-bit here, once. TensorFlow's are.
- For convolutions neither framework has sparse kernels: they stay dense on both sides.
- Files with sparse tensors are LiteRT's: `export_file` is there alone. PyTorch's exporters refuse
  them.

When it helps and when it hurts: on a CPU, from about 80% of zeros on, where layers are large; a
dense product uses wide vector units on data in order, a sparse one gathers, so at 50% of zeros it
is the slower one. It is the price of zeros anywhere: whole channels gone (structured pruning) or
2:4 patterns on a GPU suit hardware better. It is for prediction: kernels do not train.

Run it alone: `python -m pt_impl.compression.sparse_inference` prints dense against CSR at several
sparsities.
"""

import copy
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.utils import prune

_HOOKS = [name for name in vars(nn.Module()) if name.startswith("_forward_")]


def make_predict(model: nn.Module, *, min_sparsity: float = 0.7) -> Callable:
    """Return `predict(x) -> output` in evaluation mode, over sparse kernels of linear layers.

    x: a tensor, a tuple of the model's positional arguments or a dict of the named ones; anything
    else is handed over as it is. min_sparsity: share of zeros from which on a layer becomes sparse,
    above 0 and at most 1.
    `predict.layers` maps the name of each such layer to (bytes of the dense kernel, bytes of the
    sparse one). The model is left as it is; sparse kernels are copies, so make them after training.

    Layers are `nn.Linear` exactly, with their hooks: a subclass may read its weight by itself, as
    that of `nn.MultiheadAttention` does. Dense stays what makes its weight anew in each call, such
    as `weight_norm`. `nn.TransformerEncoder` runs without its fast path, which does:
    at positions of padding it gives values where that gives zeros.

    Raises ValueError for another min_sparsity, a model with pruning masks and where no linear layer
    has so many zeros; NotImplementedError for kernels that are not float32 or float64, which MKL
    does not multiply, and for a model that Python cannot copy.
    Source: `torch.sparse_csr_tensor` (beta in PyTorch).
    """
    if not 0.0 < min_sparsity <= 1.0:
        raise ValueError(f"min_sparsity must be above 0 and at most 1, not {min_sparsity!r}")
    if prune.is_pruned(model):
        raise ValueError("the model has pruning masks: finalize it first")
    names = [
        name
        for name, module in model.named_modules()
        if type(module) is nn.Linear
        and isinstance(module.weight, nn.Parameter)  # and no tensor that a hook computes
        and _zeros(module.weight) >= min_sparsity
    ]
    if not names:
        raise ValueError(f"no linear layer of the model has {min_sparsity:.0%} of zeros: prune it")
    for name in names:
        if (dtype := model.get_submodule(name).weight.dtype) not in (torch.float32, torch.float64):
            raise NotImplementedError(f"{name}.weight is {dtype}: MKL multiplies float32, float64")
    sparse = _copy(model).eval()
    made = {dense: _SparseLinear(dense).eval() for dense in map(sparse.get_submodule, names)}
    layers = {
        name: (dense.weight.nbytes, module.kernel_bytes())
        for name, (dense, module) in zip(names, made.items(), strict=True)
    }
    # Under every name, since a layer may have several.
    for name, module in list(sparse.named_modules(remove_duplicate=False)):
        if name and module in made:
            parent, _, own = name.rpartition(".")
            setattr(sparse.get_submodule(parent), own, made[module])
    sparse = made.get(sparse, sparse)
    _leave_fast_path(sparse)

    def predict(x):
        with torch.inference_mode():
            if isinstance(x, dict):
                return sparse(**x)
            return sparse(*x) if isinstance(x, tuple) else sparse(x)

    predict.layers = layers
    return predict


def _copy(model: nn.Module) -> nn.Module:
    try:
        return copy.deepcopy(model)
    except Exception as error:  # of `weight_norm` after a pass with gradients: a computed tensor
        line = " ".join(str(error).split())
        raise NotImplementedError(f"Python cannot copy the model: {line}") from error


def _leave_fast_path(model: nn.Module) -> None:
    """Let PyTorch's encoders call the sparse layers in them, whose weights they would read."""
    kinds = nn.TransformerEncoder, nn.TransformerEncoderLayer
    for encoder in [module for module in model.modules() if isinstance(module, kinds)]:
        if any(isinstance(module, _SparseLinear) for module in encoder.modules()):
            # The encoder reads weights for nested tensors alone, its layer without hooks alone.
            encoder.use_nested_tensor = False
            encoder.register_forward_pre_hook(lambda module, inputs: None)


def _zeros(kernel: Tensor) -> float:
    return 1.0 - kernel.count_nonzero().item() / kernel.numel()


class _SparseLinear(nn.Module):
    """A linear layer over a CSR kernel: (..., in) -> (..., out).

    Its attributes have the names of `nn.Linear`: models ask a layer for `weight.dtype`.
    """

    def __init__(self, dense: nn.Linear):
        super().__init__()
        kernel = dense.weight.detach().to_sparse_csr()
        rows, columns = kernel.crow_indices().int(), kernel.col_indices().int()
        self.out_features, self.in_features = kernel.shape
        self.weight = torch.sparse_csr_tensor(
            rows, columns, kernel.values(), kernel.shape, check_invariants=False
        )
        self.bias = None if dense.bias is None else dense.bias.detach().clone()
        for hooks in _HOOKS:
            setattr(self, hooks, getattr(dense, hooks))

    def kernel_bytes(self) -> int:
        """Bytes of values and indices."""
        weight = self.weight
        parts = weight.values(), weight.col_indices(), weight.crow_indices()
        return sum(part.nbytes for part in parts)

    def forward(self, x: Tensor) -> Tensor:
        """The sparse matrix comes first: MKL has no product with a sparse one on the right."""
        rows = x.reshape(-1, x.shape[-1])
        product = (self.weight @ rows.T).T
        if self.bias is not None:
            product = product + self.bias
        return product.reshape(*x.shape[:-1], self.out_features)


def main() -> None:
    """Print dense layers of 1,024 units against CSR at several shares of zeros, interleaved."""
    import statistics
    import time

    from pt_impl.kit import runtime

    torch.manual_seed(0)
    x = torch.randn(32, 1024)
    print("zeros  dense [ms]  CSR [ms]  dense [MB]  CSR [MB]")
    for sparsity in (0.5, 0.8, 0.9, 0.95):
        model = nn.Sequential(nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 1024)).eval()
        with torch.no_grad():
            for layer in (model[0], model[2]):
                size = layer.weight.abs()
                layer.weight.mul_(size > size.quantile(sparsity, interpolation="lower"))
        sparse = make_predict(model, min_sparsity=sparsity - 0.01)
        with torch.inference_mode():
            times = {model: [], sparse: []}
            for _ in range(100):
                for predict, own in times.items():
                    start = time.perf_counter()
                    predict(x)
                    runtime.synchronize()
                    own.append((time.perf_counter() - start) * 1e3)
        dense_ms, sparse_ms = (statistics.median(own[10:]) for own in times.values())
        dense_mb, sparse_mb = (sum(b) / 1e6 for b in zip(*sparse.layers.values(), strict=True))
        print(f"{sparsity:5}{dense_ms:12.3f}{sparse_ms:10.3f}{dense_mb:12.2f}{sparse_mb:10.2f}")


if __name__ == "__main__":
    main()
