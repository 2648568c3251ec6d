"""Optimizers of both frameworks written out once, with the settings in which they differ."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

KINDS = {"SGD": "sgd", "Adam": "adam", "AdamW": "adam", "RMSprop": "rmsprop", "Adagrad": "adagrad"}
NAMES = {"sgd": "SGD", "adam": "Adam", "rmsprop": "RMSprop", "adagrad": "Adagrad"}
NAMED = {  # setting -> as a group of PyTorch has it, and as an optimizer of Keras
    "epsilon": ("eps", "epsilon"),
    "momentum": ("momentum", "momentum"),
    "nesterov": ("nesterov", "nesterov"),
    "amsgrad": ("amsgrad", "amsgrad"),
    "accumulator": ("initial_accumulator_value", "initial_accumulator_value"),
}
CLIPS = {  # how -> as PyTorch has it, and as Keras
    "": ("no clipping", "no clipnorm, global_clipnorm or clipvalue"),
    "norm": ("clip_grad_norm_(parameters, {})", "global_clipnorm={}"),
    "value": ("clip_grad_value_(parameters, {})", "clipvalue={}"),
    "variable": ("clip_grad_norm_([p], {}) for each p by itself", "clipnorm={}"),
}


@dataclass(frozen=True)
class Settings:
    """Of an optimizer. Rates and decays are one for each array. clip: ("norm" of all, "variable",
    "value" or "", the bound). epsilon_first: whether epsilon is added before the root's correction
    (Adam) or under the root (others), as in Keras."""

    kind: str
    rates: tuple[float, ...]
    decays: tuple[float, ...]
    decoupled: bool = False
    betas: tuple[float, float] = (0.9, 0.999)
    epsilon: float = 1e-8
    epsilon_first: bool = False
    momentum: float = 0.0
    dampening: float = 0.0
    nesterov: bool = False
    amsgrad: bool = False
    corrected: bool = True
    accumulator: float = 0.0
    clip: tuple[str, float] = ("", 0.0)

    def written(self, name: str, *, keras: bool) -> str:
        """A setting as a framework has it."""
        value = getattr(self, name)
        if name == "clip":
            return CLIPS[value[0]][keras].format(f"{value[1]:g}")
        if name in ("rates", "decays"):
            return ", ".join(f"{v:g}" for v in dict.fromkeys(value))
        if name == "decoupled":
            return ", ".join(f"{v / 2:g}" for v in dict.fromkeys(self.decays))
        if name == "kind":
            apart = value == "adam" and self.decoupled and any(self.decays)
            return NAMES[value] + ("W" if apart else "")
        if name == "epsilon":
            return f"{value:g}"
        return f"{name}={value}"


def _as(name: str, value: Any) -> Any:
    """A value as a setting has it: a number, or whether it is so."""
    return type(getattr(Settings, name))(value or 0)


def _kind(optimizer: Any) -> str | None:
    return next((KINDS[c.__name__] for c in type(optimizer).__mro__ if c.__name__ in KINDS), None)


def of_pytorch(optimizer: Any, names: list[str], parameters: dict, clip: tuple) -> Settings | None:
    """Those of an optimizer of torch; None of a kind that is not written here."""
    kind = _kind(optimizer)
    groups = {id(p): group for group in optimizer.param_groups for p in group["params"]}
    of = [groups.get(id(parameters[name]), optimizer.param_groups[0]) for name in names]
    first = of[0]
    decoupled = any(c.__name__ == "AdamW" for c in type(optimizer).__mro__)
    values = {name: _as(name, first.get(ours)) for name, (ours, _) in NAMED.items()}
    return kind and Settings(
        kind,
        tuple(float(group["lr"]) for group in of),
        tuple(float(group.get("weight_decay", 0.0)) for group in of),
        first.get("decoupled_weight_decay", decoupled) or decoupled,
        tuple(map(float, first.get("betas", (first.get("alpha", 0.9), 0.0)))),
        dampening=float(first.get("dampening", 0.0) or 0.0),
        clip=clip,
        **values,
    )


def of_keras(optimizer: Any, variables: list) -> Settings | None:
    """Those of an optimizer of Keras; None of a kind that is not written here."""
    kind = _kind(optimizer)
    if kind is None:
        return None
    bounds = {"variable": "clipnorm", "norm": "global_clipnorm", "value": "clipvalue"}
    clips = [(how, getattr(optimizer, name, None)) for how, name in bounds.items()]
    decay = float(optimizer.weight_decay or 0.0)
    betas = (getattr(optimizer, "rho", 0.9), 0.0)
    if kind == "adam":
        betas = (optimizer.beta_1, optimizer.beta_2)
    values = {name: _as(name, getattr(optimizer, keras, 0)) for name, (_, keras) in NAMED.items()}
    return Settings(
        kind,
        (float(np.asarray(optimizer.learning_rate)),) * len(variables),
        tuple(decay if optimizer._use_weight_decay(v) else 0.0 for v in variables),
        True,
        tuple(map(float, betas)),
        epsilon_first=True,
        clip=next(((how, float(bound)) for how, bound in clips if bound), ("", 0.0)),
        **values,
    )


def run(settings: Settings, weights: list, steps: list[list], counts: list[int]) -> list:
    """The weights after steps with these gradients. counts: how often a gradient counts in the norm
    of all, such as twice for the two biases of nn.LSTM."""
    weights = [np.asarray(w, np.float64) for w in weights]
    states = [{} for _ in weights]
    for number, grads in enumerate(steps, start=1):
        grads = _clipped([np.asarray(g, np.float64) for g in grads], counts, settings.clip)
        for place, (w, g, state) in enumerate(zip(weights, grads, states, strict=True)):
            rate, decay = settings.rates[place], settings.decays[place]
            if decay and settings.decoupled:
                w = w * (1 - rate * decay)
            elif decay:
                g = g + decay * w
            weights[place] = w - rate * _direction(settings, g, state, number)
    return weights


def _clipped(grads: list, counts: list[int], clip: tuple[str, float]) -> list:
    how, bound = clip
    if how == "value":
        return [np.clip(g, -bound, bound) for g in grads]
    if how == "variable":
        return [g * min(1.0, bound / max(np.linalg.norm(g), 1e-30)) for g in grads]
    if how == "norm":
        squares = sum(n * np.vdot(g, g) for n, g in zip(counts, grads, strict=True))
        return [g * min(1.0, bound / max(float(squares) ** 0.5, 1e-30)) for g in grads]
    return grads


def _direction(s: Settings, g: np.ndarray, state: dict, number: int) -> np.ndarray:
    if s.kind == "sgd":
        return _momentum(s, g, state)
    if s.kind == "adam":
        return _adam(s, g, state, number)
    if s.kind == "rmsprop":
        v = s.betas[0] * state.get("v", 0.0) + (1 - s.betas[0]) * g**2
    else:
        v = state.get("v", s.accumulator) + g**2
    state["v"] = v
    root = np.sqrt(v + s.epsilon) if s.epsilon_first else np.sqrt(v) + s.epsilon
    return _momentum(replace(s, nesterov=False), g / root, state) if s.momentum else g / root


def _momentum(s: Settings, g: np.ndarray, state: dict) -> np.ndarray:
    if not s.momentum:
        return g
    kept = state.get("m")
    state["m"] = g if kept is None else s.momentum * kept + (1 - s.dampening) * g
    return g + s.momentum * state["m"] if s.nesterov else state["m"]


def _adam(s: Settings, g: np.ndarray, state: dict, number: int) -> np.ndarray:
    one, two = s.betas
    state["m"] = one * state.get("m", 0.0) + (1 - one) * g
    state["v"] = two * state.get("v", 0.0) + (1 - two) * g**2
    v = state["v"]
    if s.amsgrad:
        v = state["most"] = np.maximum(state.get("most", 0.0), v)
    corrections = (1 - one**number, 1 - two**number) if s.corrected else (1.0, 1.0)
    root = corrections[1] ** 0.5
    epsilon = s.epsilon if s.epsilon_first else s.epsilon * root
    return (root / corrections[0]) * state["m"] / (np.sqrt(v) + epsilon)
