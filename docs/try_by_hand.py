"""Time a model's train step with and without a technique, by hand.

    python docs/try_by_hand.py docs/try_models/resnet18.py bfloat16

Plain framework code to check what `twinbench try` says. It uses nothing of the suite except the
model's file. Each step runs in a new process, one after the other; the order alternates between
pairs. A process takes ten untimed steps, and its time is the median of those that follow. Prints
the ratio over pairs as JSON.
"""

from __future__ import annotations

import json
import runpy
import subprocess
import sys
import time
from collections.abc import Callable
from statistics import median

import numpy as np
from scipy import stats

PAIRS, WARM, STEPS = 6, 10, 30


def pytorch(own: dict, technique: str) -> Callable[[], None]:
    """One train step: "plain", "bfloat16", "torch.compile"."""
    import torch

    model, loss_fn = own["pytorch"]()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.01)
    x, y = (torch.as_tensor(array) for array in own["batch"]())

    def forward(x, y):
        return loss_fn(model(x), y)

    if technique == "torch.compile":
        forward = torch.compile(forward)

    def step():
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=technique == "bfloat16"):
            loss = forward(x, y)
        loss.backward()
        optimizer.step()

    return step


def tensorflow(own: dict, technique: str) -> Callable[[], None]:
    """One train step: "plain", a tf.function, or "XLA"."""
    import tensorflow as tf

    model, loss_fn = own["tensorflow"]()
    x, y = (tf.constant(array) for array in own["batch"]())
    model(x)  # a subclassed one has no variables before
    optimizer = tf.keras.optimizers.AdamW(1e-3, weight_decay=0.01)
    optimizer.build(model.trainable_variables)

    @tf.function(jit_compile=technique == "XLA")
    def step(x, y):
        with tf.GradientTape() as tape:
            loss = loss_fn(y, model(x, training=True))
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return loss

    return lambda: step(x, y).numpy()


def seconds(path: str, technique: str) -> float:
    """Of a step, in this process."""
    own = runpy.run_path(path)
    step = (pytorch if "pytorch" in own else tensorflow)(own, technique)
    for _ in range(WARM):
        step()
    taken = []
    for _ in range(STEPS):
        began = time.perf_counter()
        step()
        taken.append(time.perf_counter() - began)
    return median(taken)


def measure(path: str, technique: str) -> dict:
    """The plain step's seconds, and the technique's as a ratio to them with its 95% interval."""
    plain, changed = [], []
    for pair in range(PAIRS):
        turns = [("plain", plain), (technique, changed)]
        for name, taken in turns if pair % 2 else reversed(turns):
            command = [sys.executable, __file__, "--here", path, name]
            done = subprocess.run(command, capture_output=True, text=True, check=True)
            taken.append(float(done.stdout.split()[-1]))
    logs = np.log(changed) - np.log(plain)
    half = stats.t.ppf(0.975, PAIRS - 1) * logs.std(ddof=1) / np.sqrt(PAIRS)
    low, ratio, high = np.exp([logs.mean() - half, logs.mean(), logs.mean() + half])
    found = {"ratio": ratio, "ci": [low, high], "plain_s": median(plain)}
    return found | {"pairs": PAIRS, "steps": STEPS}


if __name__ == "__main__":
    if sys.argv[1] == "--here":
        print(seconds(*sys.argv[2:]))
    else:
        print(json.dumps(measure(*sys.argv[1:])))
