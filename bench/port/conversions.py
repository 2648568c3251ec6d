"""A weight of PyTorch in the layout of Keras. `copy_weights.py` gets copies of these functions."""

from __future__ import annotations

import numpy as np


def same(weight, shape):
    """A bias, a table of embeddings, a scale."""
    return weight.reshape(shape)


def dense(weight, shape):
    """(out, in) -> (in, out), and with heads of attention (in, heads, size)."""
    return weight.T.reshape(shape)


def packed(weight, part, shape):
    """One of query, key and value, which nn.MultiheadAttention holds in one array."""
    return np.split(weight, 3)[part].T.reshape(shape)


def convolution(weight, shape):
    """(out, in, ...) -> (..., in, out); of a transposed one (in, out, ...) -> (..., out, in)."""
    return np.moveaxis(weight, (0, 1), (-1, -2)).reshape(shape)


def depthwise(weight, shape):
    """(channels * multiplier, 1, ...) -> (..., channels, multiplier)."""
    channels, multiplier = shape[-2:]
    split = weight.reshape(channels, multiplier, *weight.shape[2:])
    return np.moveaxis(split, (0, 1), (-2, -1))


def recurrent(weight, shape):
    """(4 * hidden, in) -> (in, 4 * hidden): the gates of nn.LSTM have Keras's order."""
    return weight.T.reshape(shape)


def summed(bias_ih, bias_hh, shape):
    """The two biases of nn.LSTM, of which Keras has the sum."""
    return (bias_ih + bias_hh).reshape(shape)


def gated(weight, shape):
    """Reset, update, new of nn.GRU -> update, reset, new of Keras's."""
    reset, update, new = np.split(weight, 3)
    return np.concatenate([update, reset, new]).T.reshape(shape)


def stacked(bias_ih, bias_hh, shape):
    """The two biases of nn.GRU, with gates in Keras's order; their sum where it has one."""
    both = np.stack([gated(bias, -1) for bias in (bias_ih, bias_hh)])
    return (both if len(shape) == 2 else both.sum(0)).reshape(shape)
