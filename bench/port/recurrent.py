"""Recurrent layers written out, step by step, with what Keras's may have and PyTorch's have not."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.utils import rnn

FUNCTIONS = {
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "relu": torch.relu,
    "hard_sigmoid": lambda x: F.relu6(x + 3) / 6,
    "linear": lambda x: x,
    "silu": F.silu,
    "gelu": F.gelu,
    "softsign": F.softsign,
    "elu": F.elu,
}


@dataclass(frozen=True)
class Settings:
    """Of a recurrent layer: the functions of its output and gates, and where a GRU resets."""

    kind: str = ""
    activation: str = "tanh"
    gates: str = "sigmoid"
    reset_after: bool = True

    def __eq__(self, other: object) -> bool:
        """Whether they compute the same; the kind is not asked."""
        return isinstance(other, Settings) and self._key() == other._key()

    def __hash__(self) -> int:
        return hash(self._key())

    def _key(self) -> tuple:
        return self.activation, self.gates, self.reset_after

    def __str__(self) -> str:
        reset = "" if self.reset_after else ", reset_after=False"
        return f"activation='{self.activation}', recurrent_activation='{self.gates}'{reset}"


def run(kind: str, args: tuple, settings: Settings, mask: Tensor | None = None) -> tuple:
    """The outputs and the last outputs of a layer, with the arguments of `torch.lstm` and others.

    mask: (batch, time), False where a step is skipped: state and output stay, as in Keras.
    """
    x, _, weights, biases, layers, _, _, both, first = args[:9]
    x = x if first else x.transpose(0, 1)
    ways, count, last = 1 + both, 4 if biases else 2, []
    for layer in range(layers):
        outs = []
        for way in range(ways):
            place = (layer * ways + way) * count
            given = weights[place : place + count]
            given = given if biases else [*given, *(given[0].new_zeros(len(given[0])),) * 2]
            outs.append(_direction(kind, x, given, settings, mask, backwards=bool(way)))
            last.append(outs[-1][:, 0 if way else -1])
        x = torch.cat(outs, -1)
    return (x if first else x.transpose(0, 1)), torch.stack(last)


def is_packed(args: tuple) -> bool:
    """Whether arguments of `torch.lstm` and others are those of packed sequences."""
    return isinstance(args[3], (list, tuple))


def run_packed(kind: str, args: tuple, settings: Settings) -> tuple[Tensor, Tensor]:
    """As `run`, with the arguments of `torch.lstm` for packed sequences."""
    data, sizes, *rest = args[:9]
    x, lengths = rnn.pad_packed_sequence(rnn.PackedSequence(data, sizes), batch_first=True)
    mask = torch.arange(x.shape[1])[None] < lengths[:, None]
    out, last = run(kind, (x, *rest, True), settings, mask)
    return rnn.pack_padded_sequence(out, lengths, batch_first=True).data, last


def _direction(kind, x, weights, settings, mask, *, backwards: bool) -> Tensor:
    size = weights[1].shape[1]
    h = c = x.new_zeros(len(x), size)
    steps, outs = range(x.shape[1]), {}
    for step in reversed(steps) if backwards else steps:
        new_h, new_c = _step(kind, x[:, step], h, c, weights, settings)
        if mask is not None:
            kept = mask[:, step, None]
            new_h, new_c = torch.where(kept, new_h, h), torch.where(kept, new_c, c)
        h, c = new_h, new_c
        outs[step] = h
    return torch.stack([outs[step] for step in steps], 1)


def _step(kind, x, h, c, weights, settings) -> tuple[Tensor, Tensor]:
    w, u, b, d = weights
    activation, gate = FUNCTIONS[settings.activation], FUNCTIONS[settings.gates]
    if kind == "lstm":
        i, f, g, o = (x @ w.T + b + h @ u.T + d).chunk(4, -1)
        c = gate(f) * c + gate(i) * activation(g)
        return gate(o) * activation(c), c
    if kind == "rnn":
        return activation(x @ w.T + b + h @ u.T + d), c
    inputs = (x @ w.T + b).chunk(3, -1)
    if settings.reset_after:
        states = (h @ u.T + d).chunk(3, -1)
        reset, update = gate(inputs[0] + states[0]), gate(inputs[1] + states[1])
        new = activation(inputs[2] + reset * states[2])
    else:
        (ur, uz, un), (dr, dz, dn) = u.chunk(3), d.chunk(3)
        reset = gate(inputs[0] + h @ ur.T + dr)
        update = gate(inputs[1] + h @ uz.T + dz)
        new = activation(inputs[2] + (reset * h) @ un.T + dn)
    return (1 - update) * new + update * h, c
