"""Early stopping: end a training when it no longer improves, and keep the best weights.

    stopping = EarlyStopping(model, patience=3)
    if stopping.step(validation_loss):  # after each evaluation
        break
    stopping.restore()  # after the loop

What it changes: when a training ends, and which weights are used: those of the best evaluation, bit
for bit (Prechelt, 1998, "Early Stopping - But When?").

Its twin: `pt_impl/recipes/early_stopping.py`, which says where the frameworks differ.

When it helps and when it hurts: it saves time if a model overfits. With a small validation set it
picks a lucky epoch, which looks better than it is: test on other data. A schedule that lowers the
learning rate at the end may never get there.

Run it alone: `python -m tf_impl.recipes.early_stopping` prints when a training on few digits ends.

Copy with it: nothing.
"""

import math

import numpy as np
import tensorflow as tf


class EarlyStopping:
    """Keeps the best weights of a training and says when to end it.

    patience: evaluations in a row that may be no better than the best by more than `min_delta`.
    higher_is_better: True for an accuracy, False for a loss. All variables are kept in memory, a
    copy of the model's. To resume, save `state_dict()` beside the model's.
    """

    _STATE = ("best", "best_evaluation", "evaluations", "_weights")

    def __init__(
        self,
        model: tf.keras.Model,
        *,
        patience: int = 3,
        min_delta: float = 0.0,
        higher_is_better: bool = False,
    ) -> None:
        if patience < 0 or min_delta < 0:
            raise ValueError(
                f"patience and min_delta must be 0 or more, not {patience}, {min_delta}"
            )
        self.model, self.patience, self.min_delta = model, patience, min_delta
        self.sign = 1 if higher_is_better else -1
        self.best: float | None = None
        self.best_evaluation = -1
        self.evaluations = 0
        self._weights: list[np.ndarray] | None = None

    def step(self, value: float) -> bool:
        """Look at a new figure; return whether to stop. NaN is never better."""
        value = float(value)
        better = not math.isnan(value) and (
            self.best is None or self.sign * (value - self.best) > self.min_delta
        )
        if better:
            self.best, self.best_evaluation = value, self.evaluations
            self._weights = [np.array(weight) for weight in self.model.get_weights()]
        self.evaluations += 1
        return self.evaluations - 1 - self.best_evaluation > self.patience

    def restore(self) -> float:
        """Give the model its best weights back; return the figure that they had.

        Raises ValueError where no figure was a number.
        """
        if self._weights is None or self.best is None:
            raise ValueError("there are no best weights: no figure was seen that is a number")
        self.model.set_weights(self._weights)
        return self.best

    def state_dict(self) -> dict:
        """All that a resumed training goes on from, the best weights too, for a checkpoint."""
        return {name: getattr(self, name) for name in self._STATE}

    def load_state_dict(self, state: dict) -> None:
        """Go on from what `state_dict` returned."""
        for name in self._STATE:
            setattr(self, name, state[name])


def main() -> None:
    """Print the accuracy of each epoch on few digits, and which one is kept."""
    from tf_impl.kit import training
    from tf_impl.kit.demo import Demo

    demo = Demo("digits-few")
    model, optimizer, loss_fn = demo.build()
    step = training.make_train_step(model, optimizer, loss_fn)
    stopping = EarlyStopping(model, patience=3, higher_is_better=True)
    for epoch in range(40):
        demo.fit(step)
        accuracy = demo.score(model)
        print(f"epoch {epoch + 1:2}  accuracy {accuracy:5.1f}")
        if stopping.step(accuracy):
            break
    print(f"kept: {stopping.restore():.1f}, of epoch {stopping.best_evaluation + 1}")


if __name__ == "__main__":
    main()
