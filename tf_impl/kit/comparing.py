"""How far two models' outputs are apart.

Twin: `pt_impl/kit/comparing.py`.
Where the frameworks differ: outputs of Keras may be texts, too.
"""

import math

import numpy as np
import tensorflow as tf

from tf_impl.kit.copying import distance


def apart(ours, theirs) -> float:
    """Return the largest relative L2 difference of an output of `ours` to its one of `theirs`.

    Outputs are tensors, or tuples, lists and dicts of them, which some runtimes return as a tuple.
    inf where their number, a shape or what is finite differs.
    """
    ours = [np.asarray(part) for part in tf.nest.flatten(ours)]
    theirs = [np.asarray(part) for part in tf.nest.flatten(theirs)]
    if [part.shape for part in ours] != [part.shape for part in theirs]:
        return math.inf
    return max((distance(*pair) for pair in zip(ours, theirs, strict=True)), default=0.0)
