"""Learning-rate finder: a range test that suggests a learning rate.

    found = find_learning_rate(model, optimizer, step, batches)
    optimizer.learning_rate = found.suggestion

What it changes: nothing. It trains for some steps while the rate rises by the same factor in each,
looks at the losses, and restores everything (Smith, 2017, "Cyclical Learning Rates for Training
Neural Networks", section 3.3). It suggests the rate at which the loss falls most steeply over the
logarithm of the rate, as fastai and Lightning do. The rate of the lowest loss is not used: it is
almost too large.

Its twin: `pt_impl/recipes/learning_rate_finder.py`, which says where the frameworks differ.

When it helps and when it hurts: it replaces a search over rates. It costs `steps` steps and a copy
of the weights. It sees only the first steps with this optimizer, batch size and weights: run it
again when they change. With momentum or Adam the loss reacts some steps late, so the curve is
shifted to higher rates: more steps help. Noise of small batches hides the slope: a longer window
helps.

Run it alone: `python -m tf_impl.recipes.learning_rate_finder` prints the curve and the rate.

Copy with it: `shared/range_test.py`, `tf_impl/kit/checks/learning_rate_finder.py`,
`tf_impl/kit/restoring.py`.
"""

from collections.abc import Callable, Iterable

import tensorflow as tf

from shared import range_test
from tf_impl.kit.checks.learning_rate_finder import check_learning_rate_finder
from tf_impl.kit.restoring import restored

Optimizer = tf.keras.optimizers.Optimizer


def find_learning_rate(
    model: tf.keras.Model,
    optimizer: Optimizer,
    step: Callable,
    batches: Iterable,
    *,
    lowest: float = 1e-6,
    highest: float = 1.0,
    steps: int = 100,
    window: int = 9,
    divergence: float = 2.0,
) -> range_test.RangeTest:
    """Train with rates from `lowest` to `highest`; put everything back; return what was found.

    step: `step(*batch) -> loss` trains the model with the optimizer. batches: begun again when they
    run out. window: losses, an odd number, over which the mean and the slope are taken. The losses
    of a diverged end are in the curve as far as they are numbers.
    All variables of model and optimizer, those that a Keras 3 optimizer trains beside the model's
    (of a loss) and the global generator come back bit for bit, also where a step fails; what else
    the step keeps (an average) does not.

    Raises ValueError for settings out of range, no batches, a schedule in the optimizer, a first
    loss that is no number, and where the loss never falls by more than its noise.
    """
    settings = {"lowest": lowest, "highest": highest, "steps": steps}
    settings |= {"window": window, "divergence": divergence}
    range_test.check_settings(**settings)
    check_learning_rate_finder(model, optimizer)
    holder = getattr(optimizer, "inner_optimizer", optimizer)  # of a LossScaleOptimizer
    if not getattr(optimizer, "built", False):
        optimizer.build(model.trainable_variables)

    def step_at(rate: float, batch) -> float:
        holder.learning_rate = rate
        return float(step(*batch))

    with restored(model, optimizer):
        return range_test.run(step_at, batches, **settings)


def main() -> None:
    """Print the curve on handwritten digits, and the suggestion."""
    from tf_impl.kit import training
    from tf_impl.kit.demo import Demo

    demo = Demo("digits-cnn", batch_size=64)
    model, optimizer, loss_fn = demo.build()
    step = training.make_train_step(model, optimizer, loss_fn)
    found = find_learning_rate(model, optimizer, step, demo.batches, highest=10.0)
    print("    rate    loss  smoothed")
    curve = zip(found.rates, found.losses, found.smoothed, strict=True)
    for rate, loss, smoothed in list(curve)[::5]:
        print(f"{rate:8.2g}{loss:8.3f}{smoothed:10.3f}")
    print(f"suggestion: {found.suggestion:.2g}")


if __name__ == "__main__":
    main()
