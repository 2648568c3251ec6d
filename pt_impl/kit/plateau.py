"""A repair of `ReduceLROnPlateau`, for losses below zero.

Symptom, in torch 2.15 and before: with `threshold_mode="rel"` a loss has to be below
`best * (1 - threshold)`. Of a best loss below zero that is above it, so that every loss that is a
little worse counts as better, and the rate is never reduced. To go when torch takes the share of
the size of the best loss, `best - threshold * abs(best)`.
"""

import math

from torch.optim.lr_scheduler import ReduceLROnPlateau


class ReductionOnPlateau(ReduceLROnPlateau):
    """As `ReduceLROnPlateau`, with a relative threshold that is right for losses of any sign."""

    def step(self, metrics, epoch=None) -> None:
        """Look at a new loss."""
        self.threshold = math.copysign(self.threshold, self.best)
        super().step(metrics, epoch)
