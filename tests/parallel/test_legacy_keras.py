"""Replicas and stages of legacy Keras, against one device."""

from __future__ import annotations

import numpy as np
import pytest

from shared import parallel
from shared.specs import TASKS

FRAMEWORKS = ("tf_keras",)
BAR = TASKS["digits-cnn"].parity


def normalised():
    """A small model whose BatchNorm is of images, as that of Keras's fused kernel."""
    import tensorflow as tf

    from tf_impl.kit import training

    tf.keras.utils.set_random_seed(0)
    layers = tf.keras.layers
    parts = [tf.keras.Input((6, 6, 2)), layers.Conv2D(4, 3, use_bias=False)]
    parts += [layers.BatchNormalization(), layers.ReLU(), layers.GlobalAveragePooling2D()]
    model = tf.keras.Sequential([*parts, layers.Dense(3)])
    return model, tf.keras.optimizers.SGD(0.1), training.cross_entropy


@pytest.mark.timeout(400)
def test_replicas_normalise_over_the_global_batch(forks):
    """Synchronised on one, too: the fused kernel, which that leaves, keeps another variance."""
    random = np.random.default_rng(0)
    data = random.normal(size=(64, 6, 6, 2)).astype(np.float32), random.integers(0, 3, 64)
    make, build = "tf_impl.parallel.data_parallel:processes", f"{__name__}:normalised"
    one, two = (
        forks.launch(
            make,
            build,
            data,
            parallel.Run(replicas=count, global_batch=16, steps=4),
            {"synchronised_norm": True},
        )
        for count in (1, 2)
    )
    assert one.losses[-1] != one.losses[0]
    assert parallel.distance(one, two) < BAR


def test_masks_go_from_stage_to_stage(forks, kit):
    """Losses of codes of which the last are padding, on one device and in two stages."""
    import tensorflow as tf

    from tf_impl.parallel import model_parallel

    layers = tf.keras.layers
    cpu = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)

    def build():
        tf.keras.utils.set_random_seed(0)
        parts = [tf.keras.Input((6,), dtype="int64"), layers.Embedding(9, 4, mask_zero=True)]
        model = tf.keras.Sequential([*parts, layers.Dense(4, name="mid"), layers.SimpleRNN(3)])
        return model, tf.keras.optimizers.SGD(0.5), kit.training.cross_entropy

    x, y = tf.constant([[1, 2, 3, 0, 0, 0], [4, 5, 0, 0, 0, 0]], tf.int64), tf.constant([0, 2])
    _, _, staged = model_parallel.layer_split(build, x, cut="mid")
    plain = kit.training.make_train_step(*build())
    one, two = ([float(step(x, y, *more)) for _ in "ab"] for step, *more in ((plain,), (staged, 2)))
    assert one[1] < one[0]
    np.testing.assert_allclose(two, one, rtol=BAR)
