import os
import time

import numpy as np

WORK = np.random.default_rng(0).normal(size=20_000)


def make_train_step(model, optimizer, loss_fn, *, share=1.0):
    """Arithmetic in one thread, `share` of the usual, and a loss of weights and batch.

    The loss makes the certificate mean something; it does not depend on `share`.
    """
    work = WORK[: int(share * len(WORK))]

    def step(x, y):
        np.sin(work)
        head = np.abs(model.weights["head.kernel"]).mean()
        return float(np.mean(x) + np.mean(y) + head)

    return step


def make_predict(model):
    def predict(x):
        return model

    return predict


def make_optimizer(model, recipe):
    return None


def cross_entropy(logits, labels):
    return float(np.mean(logits) + np.mean(labels))


def fit(step, x, y, *, batch_size, epochs, seed):
    print("trains from now on")
    time.sleep(float(os.environ.get("FAKE_FIT_S", 0)))
    return step(x[:4], y[:4])


def loss_of(task):
    return cross_entropy


def evaluate_task(predict, x, y, task, *, batch_size, metric=""):
    """About 95, a little different for each seed's weights, less what the model has lost."""
    model = predict(x)
    noise = float(np.abs(model.weights["head.kernel"]).sum()) % 1.0
    return 95.0 + noise - model.points_lost
