"""What `main` of a technique file shows: a task of the suite with its data, timed and evaluated.

Twin: `pt_impl/kit/demo.py`.
"""

from types import SimpleNamespace

from shared import demo
from tf_impl.kit import data, models, runtime, training


class Demo(demo.Demo):
    """`shared.demo.Demo` with TensorFlow."""

    kit = SimpleNamespace(data=data, models=models, runtime=runtime, training=training)
