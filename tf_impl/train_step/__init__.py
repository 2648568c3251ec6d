"""The train step: less time, less memory, other memory layouts and optimizers.

One file per technique; `stacking` puts several on one step.
Read `mixed_precision` first: the shortest that has a model, a loss and a step.
"""
