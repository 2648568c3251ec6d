"""Sparse inference: skip the zeros of pruned dense layers, with CSR matrices.

    predict = make_predict(model, min_sparsity=0.8)  # of a pruned, finalized model
    output = predict(x)

What it changes: the kernel of each dense layer with enough zeros is stored as a compressed sparse
row (CSR) matrix: the values that are not zero, their columns, and where each row begins. The
product visits only these values. Predictions are those of the dense model, up to rounding. A value
takes 8 bytes with its index, 4 in a dense kernel: below 50% zeros the sparse kernel is larger.

Its twin: `tf_impl/compression/sparse_inference.py`.

Where the frameworks differ and why:
- PyTorch: a copy of the model gets other linear layers, and MKL multiplies.
- TensorFlow: dense layers are replaced while the graph is traced, in any kind of model.
  `tf.sparse.sparse_dense_matmul` runs on one thread, so TensorFlow's CSR operators are used, which
  run on all.
- Convolutions stay dense in both: neither has sparse kernels for them.
- LiteRT can store sparse tensors in files (`export_file`). PyTorch's exporters refuse them.

When it helps and when it hurts: with few zeros it is slower, also at 50%: a dense product uses wide
vector units on contiguous data, a sparse one has to gather. Removing whole channels
(`structured_pruning.py`), or 2:4 patterns on a GPU, suit hardware better. It is for prediction
only: sparse kernels can't be trained.
- It helps on a CPU from about 80% zeros on, if layers are large.

Run it alone: `python -m pt_impl.compression.sparse_inference` compares dense with CSR at several
sparsities.

Copy with it: `pt_impl/kit/calling.py`, `pt_impl/kit/checks/sparse_inference.py`.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from pt_impl.kit.calling import call
from pt_impl.kit.checks.sparse_inference import check_sparse_inference, copied

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
    names = check_sparse_inference(model, min_sparsity)
    sparse = copied(model)
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
            return call(sparse, x)

    predict.layers = layers
    return predict


def _leave_fast_path(model: nn.Module) -> None:
    """Let PyTorch's encoders call the sparse layers in them, whose weights they would read."""
    kinds = nn.TransformerEncoder, nn.TransformerEncoderLayer
    for encoder in [module for module in model.modules() if isinstance(module, kinds)]:
        if any(isinstance(module, _SparseLinear) for module in encoder.modules()):
            # The encoder reads weights only for nested tensors, its layer only without hooks.
            encoder.use_nested_tensor = False
            encoder.register_forward_pre_hook(lambda module, inputs: None)


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
    from pt_impl.kit.demo import Demo

    demo = Demo()
    demo.batches = [(torch.randn(32, 1024),)]
    print("zeros  dense [ms]  CSR [ms]  dense [MB]  CSR [MB]")
    for sparsity in (0.5, 0.8, 0.9, 0.95):
        model = nn.Sequential(nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 1024)).eval()
        with torch.no_grad():
            for layer in (model[0], model[2]):
                size = layer.weight.abs()
                layer.weight.mul_(size > size.quantile(sparsity, interpolation="lower"))
        sparse = make_predict(model, min_sparsity=sparsity - 0.01)
        with torch.inference_mode():
            ms = demo.times({"dense": model, "sparse": sparse})
        dense_mb, sparse_mb = (sum(b) / 1e6 for b in zip(*sparse.layers.values(), strict=True))
        times = f"{ms['dense']:12.3f}{ms['sparse']:10.3f}"
        print(f"{sparsity:5}{times}{dense_mb:12.2f}{sparse_mb:10.2f}")


if __name__ == "__main__":
    main()
