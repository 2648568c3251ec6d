"""TensorFlow: what techniques make of models with the traits of test_models_of_others.py."""

from __future__ import annotations

from unittest import mock

import numpy as np
import tensorflow as tf

from tf_impl.compression import post_training_quantization
from tf_impl.compression.pruning import apply_pruning
from tf_impl.compression.quantization_aware_training import prepare_qat
from tf_impl.deployment import export, native_export
from tf_impl.kit import int8_files, quantized_files, user_model
from tf_impl.kit.checks import memory_format as memory_checks
from tf_impl.parallel import data_parallel
from tf_impl.parallel.tensor_parallel import Split
from tf_impl.recipes.checkpoints import load_checkpoint, save_checkpoint
from tf_impl.train_step import compilation, stacking
from tf_impl.train_step.activation_checkpointing import apply_checkpointing
from tf_impl.train_step.memory_format import apply_memory_format

keras, layers = tf.keras, tf.keras.layers


# State that is assigned and then read ------------------------------------------------------------


class Centre(layers.Layer):
    """Subtracts a moving mean, as the head of DINO does."""

    def build(self, shape):
        settings = {"initializer": "zeros", "trainable": False, "name": "mean"}
        self.mean = self.add_weight(shape=(shape[-1],), **settings)

    def call(self, x, training=None):
        if training:
            self.mean.assign(0.9 * self.mean + 0.1 * tf.reduce_mean(x, 0))
        return tf.tanh(x - self.mean)


def numbers(*shape: int) -> tf.Tensor:
    return tf.constant(np.random.default_rng(0).normal(size=shape) + 1, tf.float32)


def centred() -> keras.Model:
    keras.utils.set_random_seed(0)
    first, last = layers.Dense(4), layers.Dense(1)
    return keras.Sequential([keras.Input((4,)), first, Centre(name="block"), last])


def flat(tensors) -> np.ndarray:
    return np.concatenate([np.ravel(tensor) for tensor in tensors])


def gradients(model) -> np.ndarray:
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean(tf.square(model(numbers(8, 4), training=True)))
    return flat(tape.gradient(loss, model.trainable_variables))


def gradients_of_a_recomputed_layer_that_assigns_its_state(folder):
    return gradients(apply_checkpointing(centred(), blocks="block")), gradients(centred())


def gradients_of_stateless_calls(folder):
    """As tensor parallelism calls a model."""
    model = centred()
    trained = [tf.identity(v.value) for v in model.trainable_variables]
    state = [tf.identity(v.value) for v in model.non_trainable_variables]
    with tf.GradientTape() as tape:
        tape.watch(trained)
        output, changed, _ = Split(model, trained, state).outputs(numbers(8, 4))
        loss = tf.reduce_mean(tf.square(output))
    found, wanted = flat(tape.gradient(loss, trained)), gradients(model)
    return [*found, *flat(changed)], [*wanted, *flat(model.non_trainable_variables)]


def recomputed_spectral_normalization(folder):
    normalised = layers.SpectralNormalization(layers.Dense(4), name="block")
    model = keras.Sequential([keras.Input((4,)), layers.Dense(4), normalised, layers.Dense(1)])
    apply_checkpointing(model, blocks="block")


class Clipped(layers.Dense):
    """Keeps its weight within bounds, as a critic's."""

    def call(self, x):
        self.kernel.assign(tf.clip_by_value(self.kernel, -0.1, 0.1))
        return super().call(x)


def recomputed_layer_that_clips_its_weight(folder):
    clipped = Clipped(4, name="block")
    model = keras.Sequential([keras.Input((4,)), layers.Dense(4), clipped, layers.Dense(1)])
    gradients(apply_checkpointing(model, blocks="block"))


# Vocabularies and bins ---------------------------------------------------------------------------


def looked_up(words=("a", "b"), bins=(0.0, 1.0)) -> keras.Model:
    text, number = keras.Input((1,), dtype="string"), keras.Input((1,))
    codes = [layers.StringLookup(vocabulary=list(words), name="lookup")(text)]
    codes += [layers.Discretization(bin_boundaries=list(bins))(number)]
    vectors = [layers.Flatten()(layers.Embedding(4, 2)(code)) for code in codes]
    output = layers.Dense(2, name="head")(layers.Concatenate()(vectors))
    return keras.Model([text, number], output)


def loaded(folder, **other) -> tuple:
    keras.utils.set_random_seed(0)
    model, another = looked_up(), looked_up(**other)
    save_checkpoint(folder / "file.npz", model, None, {})
    load_checkpoint(folder / "file.npz", another)
    return flat(another.get_weights()), flat(model.get_weights())


def checkpoint_of_the_same_vocabulary(folder):
    return loaded(folder)


def checkpoint_of_another_vocabulary(folder):
    loaded(folder, words=("b", "a"))


def checkpoint_of_other_bins(folder):
    loaded(folder, bins=(0.0, 2.0))


WORDS = tf.constant([["a"], ["c"]]), tf.constant([[0.5], [2.0]])


def loss_of(output, y):
    return tf.reduce_mean(tf.square(output - y))


def compiled_block_behind_a_lookup(folder):
    keras.utils.set_random_seed(0)
    model = looked_up()
    wanted = model(WORDS)
    return compilation.compiled_predict(model, blocks="head")(WORDS), wanted


def compiled_lookup(folder):
    compilation.compiled_train_step(looked_up(), keras.optimizers.SGD(), loss_of)


def prediction_of_a_lookup_by_xla(folder):
    native_export.compiled_predict(looked_up())


def compiled_stack_with_a_lookup(folder):
    stacking.make_train_step(looked_up(), keras.optimizers.SGD(), loss_of, compiled=True)


def compiled_replicas_of_a_lookup(folder):
    with mock.patch.object(data_parallel, "apply_data_parallel", lambda build: build()):
        data_parallel.compiled(lambda: (looked_up(), keras.optimizers.SGD(), loss_of))


def try_of_a_loss_that_reads_its_model(folder):
    def made():
        model = keras.Sequential([keras.Input((3,)), layers.Dense(1)])
        return model, lambda output, y: loss_of(output, y) + tf.norm(model.weights[0])

    own = user_model.UserModel(made)
    user_model.check(own, own.build(), (numbers(4, 3), numbers(4, 1)))


# Others ------------------------------------------------------------------------------------------


def activity_regularizer_of_a_pruned_layer(folder):
    keras.utils.set_random_seed(0)
    wide = layers.Dense(8, "relu", activity_regularizer="l2")
    model, x = keras.Sequential([layers.InputLayer((8,)), wide, layers.Dense(2)]), numbers(4, 8)
    settings = {"final_sparsity": 0.0, "begin_step": 1, "end_step": 2, "frequency": 1}
    pruned, update = apply_pruning(model, **settings)
    update(1)
    own = [sum(map(float, each.losses)) for each in (pruned, model) if each(x, training=True) >= 0]
    return own[0], own[1]


class CTC(layers.Layer):
    """Adds CTC's loss, whose loop TensorFlow cannot freeze."""

    def call(self, labels, logits):
        count = tf.shape(logits)[0]
        sizes = tf.fill((count,), 4), tf.fill((count,), 16)
        self.add_loss(tf.reduce_mean(keras.ops.ctc_loss(labels, logits, *sizes)))
        return logits


def spoken() -> tuple:
    x, labels = keras.Input((16, 8), name="x"), keras.Input((4,), dtype="int32", name="labels")
    model = keras.Model({"x": x, "labels": labels}, CTC()(labels, layers.Dense(6)(x)))
    return model, {"x": tf.zeros((2, 16, 8)), "labels": tf.ones((2, 4), tf.int32)}


def onnxruntime_of_ctc(folder):
    post_training_quantization.keep_onnxruntime_float32(*spoken(), folder / "file")


def litert_of_ctc(folder):
    int8_files.keep_float32(*spoken(), folder / "file")


def static_int8_of_ctc(folder):
    post_training_quantization.apply_static_int8(*spoken())


def graph_of_ctc(folder):
    quantized_files.save_quantized(*spoken(), folder / "file")


def channels_first_of_conv_lstm(folder):
    image, kinds = keras.Input((4, 8, 8, 2)), (layers.ConvLSTM2D(4, 3), layers.Conv2D(4, 3))
    model = keras.Sequential([image, *kinds, layers.GlobalAveragePooling2D()])
    with mock.patch.object(memory_checks, "try_convolution"):  # as on a GPU
        apply_memory_format(model, memory_format="channels_first")


def doubles() -> tuple:
    x = keras.Input((8,), dtype="float64")
    return keras.Model(x, layers.Dense(6, dtype="float64")(x)), tf.zeros((4, 8), tf.float64)


def litert_of_float64(folder):
    export.export_litert(*doubles(), folder / "model.tflite")


def litert_file_of_float64(folder):
    int8_files.keep_float32(*doubles(), folder / "file")


def dynamic_int8_of_float64(folder):
    post_training_quantization.apply_dynamic_int8(*doubles())


def quantization_aware_siamese_model(folder):
    image = keras.Input((8, 8, 1))
    tower = keras.Model(image, layers.Dense(4)(layers.Flatten()(layers.Conv2D(4, 3)(image))))
    pair = keras.Input((8, 8, 1)), keras.Input((8, 8, 1))
    apart = layers.Subtract()([tower(one) for one in pair])
    model = keras.Model(list(pair), layers.Dense(1, "sigmoid")(apart))
    prepare_qat(model, (numbers(8, 8, 8, 1), numbers(8, 8, 8, 1)), weight_bits=8)
