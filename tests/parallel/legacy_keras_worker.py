"""Replicas and stages of tf_keras, against one device: `python -m ... tf_keras FOLDER DIGITS`."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from shared import parallel
from tests.parallel.data_parallel_worker import forked

MAKE, BUILD = "tf_impl.parallel.data_parallel:processes", "tf_impl.kit.examples:digits_cnn"


def masked() -> list[list[float]]:
    """Losses of codes of which the last are padding, on one device and in two stages."""
    import tensorflow as tf

    from tf_impl.kit import training
    from tf_impl.parallel import model_parallel

    cpu = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)

    def build():
        tf.keras.utils.set_random_seed(0)
        net = [tf.keras.Input((6,), dtype="int64"), tf.keras.layers.Embedding(9, 4, mask_zero=True)]
        net += [tf.keras.layers.Dense(4, name="mid"), tf.keras.layers.LSTM(3)]
        return tf.keras.Sequential(net), tf.keras.optimizers.SGD(0.5), training.cross_entropy

    x, y = tf.constant([[1, 2, 3, 0, 0, 0], [4, 5, 0, 0, 0, 0]], tf.int64), tf.constant([0, 2])
    _, _, staged = model_parallel.layer_split(build, x, cut="mid")
    plain = training.make_train_step(*build())
    return [[float(step(x, y, *more)) for _ in "ab"] for step, *more in ((plain,), (staged, 2))]


def main(folder: Path, digits: Path) -> None:
    def train(count: int) -> parallel.Result:
        run = parallel.Run(replicas=count, global_batch=32, steps=4)
        return forked("tf", folder, MAKE, BUILD, digits, run, {"synchronised_norm": True})

    # Synchronised, too: the fused kernel, which that leaves, keeps another variance, n / (n - 1).
    apart = parallel.distance(train(1), train(2))
    print(json.dumps({"apart": apart, "masked": masked()}))


if __name__ == "__main__":
    main(*map(Path, sys.argv[2:]))
