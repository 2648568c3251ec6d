"""The TensorFlow runtime: threads, seeds, devices, memory, and what really ran."""

import time
from collections import Counter
from collections.abc import Callable

import numpy as np
import tensorflow as tf


def configure(*, threads: int, seed: int) -> dict[str, int]:
    """Set thread counts and seeds, before any operation ran; return the thread counts read back.

    On a GPU, float32 means float32 (no TF32) and memory grows with need. Raises RuntimeError
    where TensorFlow runs already with other threads, and where Keras has another backend.
    """
    if getattr(tf.keras.backend, "backend", lambda: "tensorflow")() != "tensorflow":
        raise RuntimeError("Keras runs on another backend: set KERAS_BACKEND=tensorflow")
    threading = tf.config.threading
    threading.set_intra_op_parallelism_threads(threads)
    threading.set_inter_op_parallelism_threads(threads)
    tf.config.experimental.enable_tensor_float_32_execution(False)
    for gpu in tf.config.list_physical_devices("GPU"):
        tf.config.experimental.set_memory_growth(gpu, True)
    tf.keras.utils.set_random_seed(seed)
    return {
        "intra_op": threading.get_intra_op_parallelism_threads(),
        "inter_op": threading.get_inter_op_parallelism_threads(),
    }


def versions() -> dict[str, str]:
    """Versions of tensorflow and of the Keras flavour in use ("keras" or "tf_keras")."""
    flavour = tf.keras.Model.__module__.split(".")[0]
    return {"tensorflow": tf.__version__, flavour: tf.keras.__version__, "numpy": np.__version__}


def device() -> str:
    """Device on which models and data live: the first GPU, else the CPU."""
    return "GPU:0" if tf.config.list_physical_devices("GPU") else "CPU:0"


def to_float(loss: tf.Tensor) -> float:
    """Read a scalar on the host, which waits for it."""
    return float(loss)
