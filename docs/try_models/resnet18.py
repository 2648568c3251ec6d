"""ResNet-18 of torchvision and the same network in Keras, from equal weights.

twinbench try docs/try_models/resnet18.py
"""

import numpy as np


def pytorch():
    import torch.nn.functional as F
    from torchvision.models import resnet18

    return resnet18(num_classes=10), F.cross_entropy


def tensorflow():
    """Layers have the names of torchvision's modules, by which weights are copied."""
    import tensorflow as tf
    from tensorflow.keras import layers

    def convolution(x, name, filters, kernel, strides=1):
        if kernel > 1:
            x = layers.ZeroPadding2D(kernel // 2)(x)
        return layers.Conv2D(filters, kernel, strides, use_bias=False, name=name)(x)

    def norm(x, name):
        return layers.BatchNormalization(momentum=0.9, epsilon=1e-5, name=name)(x)

    def block(x, name, filters, strides):
        y = convolution(x, f"{name}.conv1", filters, 3, strides)
        y = layers.ReLU()(norm(y, f"{name}.bn1"))
        y = norm(convolution(y, f"{name}.conv2", filters, 3), f"{name}.bn2")
        if strides > 1:
            x = convolution(x, f"{name}.downsample.0", filters, 1, strides)
            x = norm(x, f"{name}.downsample.1")
        return layers.ReLU()(layers.Add()([x, y]))

    inputs = tf.keras.Input((64, 64, 3))
    x = layers.ReLU()(norm(convolution(inputs, "conv1", 64, 7, 2), "bn1"))
    x = layers.MaxPooling2D(3, 2)(layers.ZeroPadding2D(1)(x))  # after ReLU a zero is no maximum
    for stage, filters in enumerate((64, 128, 256, 512), start=1):
        x = block(x, f"layer{stage}.0", filters, 1 if stage == 1 else 2)
        x = block(x, f"layer{stage}.1", filters, 1)
    outputs = layers.Dense(10, name="fc")(layers.GlobalAveragePooling2D()(x))
    loss = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    return tf.keras.Model(inputs, outputs), loss


def batch(size=16, seed=0, framework="pytorch"):
    random = np.random.default_rng(seed)
    x = random.standard_normal((size, 64, 64, 3), dtype=np.float32)
    y = random.integers(0, 10, size)
    return (x.transpose(0, 3, 1, 2) if framework == "pytorch" else x), y


def copy_weights(pytorch_model, tensorflow_model):
    for layer in tensorflow_model.layers:
        if not layer.weights:
            continue
        module = pytorch_model.get_submodule(layer.name)
        tensors = [tensor.numpy() for tensor in module.state_dict().values() if tensor.ndim]
        if tensors[0].ndim == 4:  # (out, in, height, width) -> (height, width, in, out)
            tensors = [tensors[0].transpose(2, 3, 1, 0)]
        elif tensors[0].ndim == 2:  # (out, in) -> (in, out)
            tensors[0] = tensors[0].T
        layer.set_weights(tensors)
