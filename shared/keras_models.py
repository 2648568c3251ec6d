"""The image models of the suite in Keras, whichever Keras is given, and their canonical names.

`keras` is a module: Keras 3 on any backend, `tf.keras` or tf_keras. Neither framework is imported
here. Images are NHWC. Layers carry the canonical names, and Keras stores weights in the canonical
layout, so nothing has to be mapped.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import numpy as np

from shared.specs import (
    EXPANSION,
    BottleneckSpec,
    CNNSpec,
    DetectorSpec,
    ModelSpec,
    ResNetSpec,
    residual_blocks,
)

# Keras's name of a weight -> the canonical one, where they differ.
_CANONICAL = {"embeddings": "embedding", "moving_mean": "mean", "moving_variance": "variance"}
_DASH = "-"  # for the dots in names of layers on PyTorch, whose parameters take none


def build(keras: ModuleType, spec: ModelSpec) -> Any:
    """The functional model of an image spec with Keras's own initial weights.

    Images go in as float32 (n, height, width, channels). Logits come out as (n, classes); of a
    detector comes (n, places, classes + 4), see `tf_impl.kit.models.build`.
    """
    network = _Network(keras, spec)
    makers = {CNNSpec: network.cnn, ResNetSpec: network.resnet}
    makers |= {BottleneckSpec: network.bottleneck_resnet, DetectorSpec: network.detector}
    return makers[type(spec)]()


def named_variables(model: Any) -> dict[str, Any]:
    """Canonical name -> variable of a Keras model, trained or not."""
    named = {}
    for layer in model.layers:
        for variable in layer.weights:
            kind = variable.name.split("/")[-1].split(":")[0]
            if kind.startswith("lora_"):
                continue  # adapters: they are of no model of the suite, and end in the kernel
            named[f"{layer.name.replace(_DASH, '.')}.{_CANONICAL.get(kind, kind)}"] = variable
    return named


def is_keras(model: Any) -> bool:
    """Whether a model is one of Keras 3; it is not imported for that."""
    keras = sys.modules.get("keras")
    return hasattr(keras, "Layer") and isinstance(model, keras.Layer)


def import_weights(model: Any, weights: dict[str, np.ndarray]) -> None:
    """Copy canonical `weights` into a Keras model.

    Raises ValueError, before anything is changed, where a name is missing or unknown or a shape
    differs.
    """
    variables = named_variables(model)
    if problem := _mismatch(variables, weights):
        raise ValueError(f"the weights do not fit the model: {problem}")
    for name, variable in variables.items():
        variable.assign(weights[name])


def _mismatch(variables: dict[str, Any], weights: dict[str, np.ndarray]) -> str | None:
    """Say what keeps `weights` from fitting, or None."""
    if missing := sorted(variables.keys() - weights.keys()):
        return f"missing {', '.join(missing)}"
    if unknown := sorted(weights.keys() - variables.keys()):
        return f"unknown {', '.join(unknown)}"
    for name, variable in variables.items():
        wanted = tuple(variable.shape)
        if weights[name].shape != wanted:
            return f"{name} has shape {weights[name].shape}, not {wanted}"
    return None


def export_weights(model: Any) -> dict[str, np.ndarray]:
    """Canonical name -> float32 array of every parameter and running statistic, copied."""
    named = named_variables(model)
    return {name: np.array(variable, dtype=np.float32) for name, variable in named.items()}


class _Network:
    """Makes the layers of one model, on the backend of the Keras that is given."""

    def __init__(self, keras: ModuleType, spec: ModelSpec) -> None:
        self.keras, self.spec = keras, spec
        self.on_torch = hasattr(keras, "config") and keras.config.backend() == "torch"

    def layer(self, kind: str, *given: Any, name: str, **settings: Any) -> Any:
        """A layer of this class and canonical name."""
        name = name.replace(".", _DASH) if self.on_torch else name
        return getattr(self.keras.layers, kind)(*given, name=name, **settings)

    def convolution(
        self,
        x: Any,
        name: str,
        filters: int,
        *,
        stride: int = 1,
        kernel: int = 3,
        relu: bool = True,
        batch_norm: bool = True,
    ) -> Any:
        """Convolution, BatchNorm or a bias, and (if `relu`) ReLU.

        Half of the kernel is padded on each side.
        """
        padding = "same"
        if stride > 1:
            padding = "valid"
            if kernel > 1:
                # SAME would pad an even image less at the top and left. The last row and column of
                # the padding are never read there, so leave them out.
                half = kernel // 2
                edges = [(half, half - 1 + size % 2) for size in x.shape[1:3]]
                x = self.layer("ZeroPadding2D", edges, name=f"{name}.pad")(x)
        shape = {"strides": stride, "padding": padding, "use_bias": not batch_norm}
        x = self.layer("Conv2D", filters, kernel, name=name, **shape)(x)
        if batch_norm:
            settings = {"momentum": 1 - self.spec.bn_momentum, "epsilon": self.spec.bn_eps}
            x = self.layer("BatchNormalization", name=f"{name}.bn", **settings)(x)
        return self.layer("ReLU", name=f"{name}.relu")(x) if relu else x

    def classifier(self, inputs: Any, x: Any) -> Any:
        """Average over the pixels, then a dense head."""
        x = self.layer("GlobalAveragePooling2D", name="pool")(x)
        return self.keras.Model(inputs, self.layer("Dense", self.spec.num_classes, name="head")(x))

    def images(self) -> Any:
        """The input."""
        return self.keras.Input(self.spec.input_shape, name="images")

    def cnn(self) -> Any:
        """Convolutions, one after another."""
        x = inputs = self.images()
        for index, (filters, stride) in enumerate(self.spec.convolutions):
            settings = {"stride": stride, "batch_norm": self.spec.batch_norm}
            x = self.convolution(x, f"conv{index}", filters, **settings)
        return self.classifier(inputs, x)

    def detector(self) -> Any:
        """Each level through the shared head, then side by side."""
        answers = self.spec.num_classes + 4
        head = self.layer("Conv2D", answers, 3, padding="same", name="head")
        x = inputs = self.images()
        levels = []
        for index, (filters, stride) in enumerate(self.spec.convolutions):
            x = self.convolution(x, f"conv{index}", filters, stride=stride)
            if index in self.spec.levels:
                shape = (x.shape[1] * x.shape[2], answers)
                levels.append(self.layer("Reshape", shape, name=f"level{len(levels)}")(head(x)))
        joined = self.layer("Concatenate", axis=1, name="levels")(levels)
        return self.keras.Model(inputs, joined)

    def resnet(self) -> Any:
        """Stages of residual blocks."""
        spec, inputs = self.spec, self.images()
        if spec.large_stem:
            x = self.large_stem(inputs)
        else:
            x = self.convolution(inputs, "stem", spec.widths[0])
        for stage, width in enumerate(spec.widths):
            for block in range(spec.blocks_per_stage):
                stride = 2 if stage > 0 and block == 0 else 1
                x = self.residual(x, f"stage{stage}.block{block}", width, stride)
        return self.classifier(inputs, x)

    def large_stem(self, inputs: Any) -> Any:
        """A 7x7 convolution and a 3x3 maximum, each of stride 2."""
        x = self.convolution(inputs, "stem", self.spec.widths[0], stride=2, kernel=7)
        # After a ReLU zeros are no more than any value, as PyTorch's padding of minus infinity.
        edges = [(1, size % 2) for size in x.shape[1:3]]
        x = self.layer("ZeroPadding2D", edges, name="maximum.pad")(x)
        return self.layer("MaxPooling2D", 3, strides=2, name="maximum")(x)

    def residual(self, x: Any, name: str, width: int, stride: int) -> Any:
        """Two convolutions beside a shortcut, which is a 1x1 projection where the width changes."""
        shortcut = self.shortcut(x, name, width, stride)
        x = self.convolution(x, f"{name}.conv0", width, stride=stride)
        x = self.convolution(x, f"{name}.conv1", width, relu=False)
        return self.added(x, shortcut, name)

    def shortcut(self, x: Any, name: str, width: int, stride: int) -> Any:
        """The input of a block, projected where the width changes."""
        if x.shape[-1] == width:
            return x
        settings = {"stride": stride, "kernel": 1, "relu": False}
        return self.convolution(x, f"{name}.shortcut", width, **settings)

    def added(self, x: Any, shortcut: Any, name: str) -> Any:
        """The end of a block."""
        x = self.layer("Add", name=f"{name}.add")([x, shortcut])
        return self.layer("ReLU", name=f"{name}.relu")(x)

    def bottleneck_resnet(self) -> Any:
        """Stages of blocks of 1x1, 3x3 (with the stride) and 1x1 convolutions."""
        inputs = self.images()
        x = self.large_stem(inputs)
        for name, _, width, stride in residual_blocks(self.spec):
            shortcut = self.shortcut(x, name, EXPANSION * width, stride)
            x = self.convolution(x, f"{name}.conv0", width, kernel=1)
            x = self.convolution(x, f"{name}.conv1", width, stride=stride)
            x = self.convolution(x, f"{name}.conv2", EXPANSION * width, kernel=1, relu=False)
            x = self.added(x, shortcut, name)
        return self.classifier(inputs, x)
