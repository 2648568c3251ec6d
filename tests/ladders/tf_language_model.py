"""Plain TensorFlow for test_language_model.py."""

import tensorflow as tf

from tf_impl.ladders import language_model


def before_anything_runs():
    """Make two devices of the CPU, for two replicas."""
    language_model._split_cpu(2)


def by_hand(model, batches):
    """Losses of AdamW at the places that have a label."""
    optimizer = tf.keras.optimizers.AdamW(1e-3, beta_2=0.99, epsilon=1e-9, weight_decay=0.01)
    cost = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    losses = []
    for x, y in batches:
        with tf.GradientTape() as tape:
            loss = cost(y[y >= 0], model(x, training=True)[y >= 0])
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        losses.append(float(loss))
    return losses


def is_fused(run, batch):
    """Whether the update has a kernel of its own."""
    graph = run.step.get_concrete_function(*batch).graph
    return "ResourceApplyAdam" in {operation.type for operation in graph.get_operations()}


def watch(model, sizes):
    """Note the batch size of each trace of the model."""
    layer = model.get_layer("ln")
    call = layer.call

    def noted(x, *rest, **named):
        sizes.append(x.shape[0])
        return call(x, *rest, **named)

    layer.call = noted


def replicas(run):
    """How many there are."""
    return run.model.distribute_strategy.num_replicas_in_sync


def gradient(cross_entropy, logits, y):
    """Of a loss to its logits."""
    given = tf.constant(logits)
    with tf.GradientTape() as tape:
        tape.watch(given)
        loss = cross_entropy(given, tf.constant(y))
    return tape.gradient(loss, given).numpy()
