"""TensorFlow's models and words for the tests of the kit."""

import contextlib
from functools import partial

import numpy as np
import pytest
import tensorflow as tf

from shared.specs import GPTSpec
from tf_impl.compression import combinations, distillation, feature_distillation
from tf_impl.kit import detection, models, runtime, training  # noqa: F401 - tests use it

keras, layers = tf.keras, tf.keras.layers

ATTENTION = 6  # two products, and two gradients of each
CONVOLUTION = 3  # and two gradients


def numpy(tensor):
    return np.array(tensor)


def tensor(array):
    return tf.constant(array)


def bfloat16(array):
    return tf.constant(array, tf.bfloat16)


def device():
    """What the kit says, and what there is."""
    return runtime.device(), "GPU:0" if tf.config.list_physical_devices("GPU") else "CPU:0"


def draw():
    return float(tf.random.uniform(()))


def other_threads():
    """TensorFlow refuses others, once it runs."""
    with pytest.raises(RuntimeError) as caught:
        runtime.configure(threads=2, seed=0)
    assert "\n" not in str(caught.value)


# Models


def freeze_head(model):
    model.get_layer("head").trainable = False


def in_training(model, x):
    return model(x, training=True)


def share_dropped(model):
    """Of the shares of attention: of equal values an output is the sum of those that were kept."""
    attention = models.SelfAttention.from_config(models.SelfAttention(1, 0.5).get_config())
    kept = np.array(attention(tf.ones((64, 8, 3 * 4)), training=True))
    return float((kept[:, 0] == 0).mean())


# Steps


@contextlib.contextmanager
def computing_in(dtype):
    policy = {"float32": "float32", "bfloat16": "mixed_bfloat16"}[dtype]
    keras.mixed_precision.set_global_policy(policy)
    yield
    keras.mixed_precision.set_global_policy("float32")


def step_in(dtype, model, optimizer, step):
    return step


def by_xla(step):
    return tf.function(step.python_function, jit_compile=True)


@contextlib.contextmanager
def rewritten():
    """Grappler makes bfloat16 operators of a graph that says float32."""
    option = {"auto_mixed_precision_onednn_bfloat16": True}
    tf.config.optimizer.set_experimental_options(option)
    yield
    tf.config.optimizer.set_experimental_options(dict.fromkeys(option, False))


def compiled_steps(made):
    yield made[2]


# Losses of a model's own


def _model_with(strength):
    """Its hidden kernel, which has zeros, weighs `strength` times its squares."""
    keras.utils.set_random_seed(0)
    penalty = keras.regularizers.L2(strength) if strength else None
    inputs = keras.Input((9, 9, 2))
    hidden = layers.Dense(3, kernel_regularizer=penalty, name="hidden")(layers.Flatten()(inputs))
    model = keras.Model(inputs, layers.Dense(5)(hidden))
    kernel, bias = model.get_layer("hidden").get_weights()
    model.get_layer("hidden").set_weights([kernel * (kernel > 0), bias])
    return model


def kernel_of(strength):
    return _model_with(strength).get_layer("hidden").get_weights()[0]


def with_losses(name, x, y, strength):
    """Loss and kernel after a step, by a technique that adds nothing to the plain step.

    That of compression keeps zeros.
    """
    model, optimizer, layer = _model_with(strength), keras.optimizers.SGD(0.1), "hidden"
    optimizer.build(model.trainable_variables)

    def features(model, _, loss_fn):
        taught = feature_distillation.attach_regressor(
            model, model, x, student_layer=layer, teacher_layer=layer
        )
        fresh = keras.optimizers.SGD(0.1)
        return feature_distillation.make_train_step(
            taught, model, fresh, loss_fn, teacher_layer=layer, weight=0.0
        )

    steps = {
        "baseline": training.make_train_step,
        "sparse": combinations.make_sparse_train_step,
        "features": features,
        "stored": partial(distillation.make_stored_train_step, alpha=0.0),
        "teacher": lambda *given: distillation.make_train_step(given[0], *given, alpha=0.0),
    }
    step = steps[name](model, optimizer, training.cross_entropy)
    loss = float(step(x, (y, y) if name == "stored" else y))
    return loss, model.get_layer(layer).get_weights()[0]


def loss_and_gradient(loss_fn, output, labels):
    output = tf.Variable(output)
    with tf.GradientTape() as tape:
        loss = loss_fn(output, labels)
    return float(loss), np.array(tape.gradient(loss, output))


# FLOPs, by TensorFlow's own counter


def _operators(node):
    yield node.name, node.float_ops
    for child in node.children:
        yield from _operators(child)


def prediction_flops(spec, size):
    profiler, model = tf.compat.v1.profiler, models.build(spec)
    options = profiler.ProfileOptionBuilder(profiler.ProfileOptionBuilder.float_operation())
    if isinstance(spec, GPTSpec):
        shape, dtype = (spec.sequence_length,), tf.int64
    else:
        shape, dtype = spec.input_shape, tf.float32
    predict = tf.function(lambda x: model(x, training=False))
    graph = predict.get_concrete_function(tf.TensorSpec((size, *shape), dtype)).graph
    settings = {"options": options.with_empty_output().build(), "cmd": "op"}
    operators = dict(_operators(profiler.profile(graph, **settings)))
    return sum(operators.get(name, 0) for name in ("Conv2D", "MatMul", "BatchMatMulV2"))
