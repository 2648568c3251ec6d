"""Which layers to keep in float where a model in integers loses too much: a greedy search.

Neither framework nor runtime is known here: layers have numbers, and somebody makes the model.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class LayerSearch:
    """What a search has seen.

    `names`: of the layers. `alone`: the error with one layer in integers and the others in float,
    layer by layer; none where integers are good enough. `tried`: pairs of layers kept in
    float and the error then, from none on. `kept`: the last of these, numbers of layers.
    """

    names: tuple[str, ...]
    alone: tuple[float, ...]
    tried: tuple[tuple[tuple[int, ...], float], ...]

    @property
    def kept(self) -> tuple[int, ...]:
        """The layers that stay in float."""
        return self.tried[-1][0]

    def as_json(self) -> dict:
        """The evidence, by names."""
        return {
            "error_of_one_layer": dict(zip(self.names, self.alone, strict=False)),
            "kept_in_float": [self.names[number] for number in self.kept],
            "errors": [error for _, error in self.tried],
        }


def find_layers_to_keep(
    names: Sequence[str], error_of: Callable[[tuple[int, ...]], float], *, most: float
) -> LayerSearch:
    """Keep the layer in float that costs most by itself, then the next, until the error is small.

    error_of: the error of the model with these layers in float and the others in integers; less is
    better. It is asked once for each layer, and once for each number of layers kept. most: the
    error that is allowed. With one layer left in integers the search ends whatever the error is.
    """
    every = tuple(range(len(names)))
    tried = [((), error_of(()))]
    if tried[0][1] <= most or len(names) < 2:
        return LayerSearch(tuple(names), (), tuple(tried))
    alone = [error_of(tuple(other for other in every if other != number)) for number in every]
    order = sorted(every, key=lambda number: -alone[number])
    while tried[-1][1] > most and len(tried) < len(names):
        kept = tuple(sorted(order[: len(tried)]))
        tried.append((kept, error_of(kept)))
    return LayerSearch(tuple(names), tuple(alone), tuple(tried))


def distance(output, wanted) -> float:
    """The relative L2 distance of predictions from what is wanted: an error for a search."""
    found, known = np.asarray(output, float), np.asarray(wanted, float)
    return float(np.linalg.norm(found - known) / (np.linalg.norm(known) or 1.0))


def plant_outlier(
    weights: dict[str, np.ndarray], *, layer: str, reader: str, factor: float = 256.0
) -> dict[str, np.ndarray]:
    """Make the first channel of a layer `factor` times larger, and its reader divide by it.

    layer: a convolution with BatchNorm and ReLU, by its canonical name; reader: the only one that
    reads it. In float the model gives the same, of a power of two bit for bit; one grid for the
    whole tensor has no room left for its other channels.
    """
    planted = {name: array.copy() for name, array in weights.items()}
    for part in ("gamma", "beta"):
        planted[f"{layer}.bn.{part}"][0] *= factor
    planted[f"{reader}.kernel"][:, :, 0] /= factor
    return planted
