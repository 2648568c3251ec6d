"""How far two models' outputs are apart.

Twin: `pt_impl/kit/comparing.py`.
Where the frameworks differ: outputs of Keras may be texts, too.
"""

import math

import numpy as np
import tensorflow as tf


def apart(ours, theirs) -> float:
    """Return the largest relative L2 difference of an output of `ours` to its one of `theirs`.

    Outputs are tensors, or tuples, lists and dicts of them, which some runtimes return as a tuple.
    inf where their number, a shape or what is finite differs.
    """
    ours = [np.asarray(part) for part in tf.nest.flatten(ours)]
    theirs = [np.asarray(part) for part in tf.nest.flatten(theirs)]
    if [part.shape for part in ours] != [part.shape for part in theirs]:
        return math.inf
    return max((_distance(*pair) for pair in zip(ours, theirs, strict=True)), default=0.0)


def _distance(ours: np.ndarray, theirs: np.ndarray) -> float:
    """Relative L2; what is not a finite number has to be the same in both."""
    if theirs.dtype.kind in "OSU":  # texts
        return 0.0 if np.array_equal(ours, theirs) else math.inf
    ours, theirs = ours.astype(np.float64), theirs.astype(np.float64)
    finite = np.isfinite(theirs)
    same = np.array_equal(np.isfinite(ours), finite)
    if not same or not np.array_equal(ours[~finite], theirs[~finite], equal_nan=True):
        return math.inf
    difference = np.linalg.norm(ours[finite] - theirs[finite])
    return float(difference / (np.linalg.norm(theirs[finite]) or 1.0))
