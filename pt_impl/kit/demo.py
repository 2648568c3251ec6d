"""What `main` of a technique file shows: a task of the suite with its data, timed and evaluated.

Twin: `tf_impl/kit/demo.py`.
"""

from types import SimpleNamespace

from pt_impl.kit import data, models, runtime, training
from shared import demo


class Demo(demo.Demo):
    """`shared.demo.Demo` with PyTorch."""

    kit = SimpleNamespace(data=data, models=models, runtime=runtime, training=training)
