"""Train steps of one's own: plain, with a technique by hand, with its piece."""

import tensorflow as tf


def plain(model, optimizer, loss_fn):
    variables = model.trainable_variables

    @tf.function
    def step(x, y):
        with tf.GradientTape() as tape:
            loss = loss_fn(y, model(x, training=True))
        gradients = tape.gradient(loss, variables)
        optimizer.apply_gradients(zip(gradients, variables, strict=True))
        return loss

    return step


def mixed_precision_by_hand(model, optimizer, loss_fn):
    for layer in model.layers:
        layer.dtype_policy = tf.keras.mixed_precision.Policy("mixed_bfloat16")
    variables = model.trainable_variables

    @tf.function
    def step(x, y):
        with tf.GradientTape() as tape:
            loss = loss_fn(y, tf.cast(model(x, training=True), tf.float32))
        gradients = tape.gradient(loss, variables)
        optimizer.apply_gradients(zip(gradients, variables, strict=True))
        return loss

    return step


def mixed_precision_with_piece(model, optimizer, loss_fn):
    from tf_impl.train_step.mixed_precision import MixedPrecision, to_float32

    precision = MixedPrecision(model)
    variables = model.trainable_variables

    @tf.function
    def step(x, y):
        with precision.policies():
            with tf.GradientTape() as tape:
                loss = loss_fn(y, to_float32(model(x, training=True)))
            gradients = tape.gradient(loss, variables)
        optimizer.apply_gradients(zip(gradients, variables, strict=True))
        return loss

    return step


def loss_scaling_by_hand(model, optimizer, loss_fn):
    for layer in model.layers:
        layer.dtype_policy = tf.keras.mixed_precision.Policy("mixed_float16")
    optimizer = tf.keras.optimizers.LossScaleOptimizer(optimizer)
    variables = model.trainable_variables
    optimizer.build(variables)

    @tf.function
    def step(x, y):
        with tf.GradientTape() as tape:
            loss = loss_fn(y, tf.cast(model(x, training=True), tf.float32))
            scaled = optimizer.scale_loss(loss)
        gradients = tape.gradient(scaled, variables)
        optimizer.apply_gradients(zip(gradients, variables, strict=True))
        return loss

    return step


def loss_scaling_with_piece(model, optimizer, loss_fn):
    from tf_impl.train_step.loss_scaling import LossScaler

    for layer in model.layers:
        layer.dtype_policy = tf.keras.mixed_precision.Policy("mixed_float16")
    scaler = LossScaler(model)
    optimizer = scaler.wrap(optimizer)
    variables = model.trainable_variables

    @tf.function
    def step(x, y):
        with tf.GradientTape() as tape:
            loss = loss_fn(y, tf.cast(model(x, training=True), tf.float32))
            scaled = scaler.scale(loss)
        gradients = tape.gradient(scaled, variables)
        optimizer.apply_gradients(zip(gradients, variables, strict=True))
        return loss

    return step


def gradient_accumulation_by_hand(model, optimizer, loss_fn):
    variables = model.trainable_variables

    @tf.function
    def step(x, y):
        total, sums = 0.0, [tf.zeros_like(variable) for variable in variables]
        size = tf.shape(x)[0]
        for part in range(4):
            begin, end = part * size // 4, (part + 1) * size // 4
            with tf.control_dependencies(sums):
                with tf.GradientTape() as tape:
                    loss = loss_fn(y[begin:end], model(x[begin:end], training=True))
                    loss *= tf.cast(end - begin, tf.float32) / tf.cast(size, tf.float32)
                gradients = tape.gradient(loss, variables)
                sums = [a + b for a, b in zip(sums, gradients, strict=True)]
                total += loss
        optimizer.apply_gradients(zip(sums, variables, strict=True))
        return total

    return step


def gradient_accumulation_with_piece(model, optimizer, loss_fn):
    from tf_impl.train_step.gradient_accumulation import GradientAccumulator

    accumulator = GradientAccumulator(model, micro_batches=4)
    variables = model.trainable_variables

    def gradients_of(x, y, share):
        with tf.GradientTape() as tape:
            loss = loss_fn(y, model(x, training=True)) * share
        return loss, tape.gradient(loss, variables)

    @tf.function
    def step(x, y):
        loss, gradients = accumulator.run(gradients_of, x, y)
        optimizer.apply_gradients(zip(gradients, variables, strict=True))
        return loss

    return step


def gradient_clipping_by_hand(model, optimizer, loss_fn):
    variables = model.trainable_variables

    @tf.function
    def step(x, y):
        with tf.GradientTape() as tape:
            loss = loss_fn(y, model(x, training=True))
        gradients = tape.gradient(loss, variables)
        gradients, _ = tf.clip_by_global_norm(gradients, 0.1)
        optimizer.apply_gradients(zip(gradients, variables, strict=True))
        return loss

    return step


def gradient_clipping_with_piece(model, optimizer, loss_fn):
    from tf_impl.train_step.gradient_clipping import GradientClipper

    clipper = GradientClipper(model, max_norm=0.1)
    variables = model.trainable_variables

    @tf.function
    def step(x, y):
        with tf.GradientTape() as tape:
            loss = loss_fn(y, model(x, training=True))
        gradients = clipper.clip(tape.gradient(loss, variables))
        optimizer.apply_gradients(zip(gradients, variables, strict=True))
        return loss

    return step


def train(make) -> list[float]:
    """Three losses of a step, and the weights after them."""
    tf.keras.utils.set_random_seed(0)
    layers, loss_fn = tf.keras.layers, tf.keras.losses.SparseCategoricalCrossentropy(True)
    model = tf.keras.Sequential([layers.Dense(16, activation="relu"), layers.Dense(3)])
    model.build((None, 6))
    optimizer = tf.keras.optimizers.SGD(0.1)
    optimizer.build(model.trainable_variables)
    step = make(model, optimizer, loss_fn)
    x, y = tf.random.normal((10, 6)), tf.random.uniform((10,), 0, 3, tf.int64)
    losses = [float(step(x, y)) for _ in range(3)]
    return losses + [float(value) for kernel in model.get_weights() for value in kernel.flat]
