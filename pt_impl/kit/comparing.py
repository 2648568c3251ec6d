"""How far two models' outputs are apart.

Twin: `tf_impl/kit/comparing.py`.
Where the frameworks differ: outputs of Keras may be texts, too.
"""

import math

import torch
from torch import Tensor


def apart(ours, theirs) -> float:
    """Return the largest relative L2 difference of an output of `ours` to its one of `theirs`.

    Outputs are tensors, or tuples, lists and dicts of them, which some runtimes return as a tuple.
    inf where their number, a shape or what is finite differs.
    """
    ours, theirs = _leaves(ours), _leaves(theirs)
    if [part.shape for part in ours] != [part.shape for part in theirs]:
        return math.inf
    return max((_distance(*pair) for pair in zip(ours, theirs, strict=True)), default=0.0)


def _distance(ours: Tensor, theirs: Tensor) -> float:
    """Relative L2; what is not a finite number has to be the same in both."""
    ours, theirs = (v.to(torch.promote_types(v.dtype, torch.float64)) for v in (ours, theirs))
    finite = theirs.isfinite()
    same = torch.equal(ours.isfinite(), finite)
    if not same or not torch.allclose(ours[~finite], theirs[~finite], equal_nan=True):
        return math.inf
    difference = (ours[finite] - theirs[finite]).norm().item()
    return difference / (theirs[finite].norm().item() or 1.0)


def _leaves(output) -> list[Tensor]:
    if isinstance(output, dict):
        output = list(output.values())
    if isinstance(output, (tuple, list)):
        return [leaf for part in output for leaf in _leaves(part)]
    return [output]
