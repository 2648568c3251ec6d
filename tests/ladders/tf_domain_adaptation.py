"""Plain TensorFlow for test_domain_adaptation.py."""

import tensorflow as tf


def weights(model):
    return [weight.numpy() for weight in model.trainable_weights]


def make_step(features, head, domain_head, *, rate):
    """A step of two gradients and no reversal: the labels' less `strength` times the domains'."""
    shared, labelled, domains = (list(m.trainable_weights) for m in (features, head, domain_head))
    optimizer = tf.keras.optimizers.SGD(rate, momentum=0.9)
    labels_cost = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    domains_cost = tf.keras.losses.BinaryCrossentropy(from_logits=True)

    def step(x, y, target, strength):
        with tf.GradientTape(persistent=True) as tape:
            both = features(tf.concat([x, target], 0), training=True)
            cost = labels_cost(y, head(both[: len(x)]))
            of_source = tf.concat([tf.zeros([len(x), 1]), tf.ones([len(target), 1])], 0)
            confusion = domains_cost(of_source, domain_head(both))
        down = tape.gradient(cost, [*shared, *labelled])
        up = tape.gradient(confusion, [*shared, *domains])
        count = len(shared)
        mixed = [a - strength * b for a, b in zip(down[:count], up[:count], strict=True)]
        gradients = [*mixed, *down[count:], *up[count:]]
        optimizer.apply_gradients(zip(gradients, [*shared, *labelled, *domains], strict=True))
        return float(cost + confusion)

    return step
