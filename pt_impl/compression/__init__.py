"""Smaller models: pruning, quantization, distillation, and what they really gain.

`combinations` puts several on one model.
Read `pruning` and `distillation` first, then `post_training_quantization`.
"""
