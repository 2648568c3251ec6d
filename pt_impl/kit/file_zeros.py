"""The zeros in a file of a compressed model: evidence that they are still there.

Twin: `tf_impl/kit/file_zeros.py`.
Where the frameworks differ: a file is the names and tensors of a graph here, and a LiteRT file
there, whose kernels are what its products multiply by.
"""

from pt_impl.kit import saving


def kernel_zeros(path) -> dict[str, float]:
    """Return the share of zeros of each kernel in a file of `kit/int8_files.py`.

    Kernels are its tensors of two axes or more, float32 or int8, in the file's order and under the
    names that they have there. Raises FileNotFoundError, and ValueError for a file that is damaged
    or something else. Executes no code of the file.
    """
    tensors = saving.load(path).named_buffers()
    return {name: (t == 0).float().mean().item() for name, t in tensors if t.ndim > 1}
