"""What is planted in the pairs of tests/port/models: where it acts, and why.

A row: the pair, its PLANT, the step and the layer at which the models first differ, and the key of
the cause in `bench.port.causes.CATALOGUE`. A layer is named as the PyTorch model has it, or as the
Keras model has it where only that has a layer; "" where the difference is of no layer.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

MODELS = Path(__file__).with_name("models")
PAIRS = sorted(path.stem for path in MODELS.glob("*.py"))


class Planted(NamedTuple):
    """One parameter in which a pair differs."""

    pair: str
    plant: str
    step: str
    layer: str
    cause: str


PLANTED = tuple(
    Planted(*row)
    for row in (
        ("resnet", "convolution_padding", "evaluation", "block1.conv1", "padding"),
        ("resnet", "pooling_padding", "evaluation", "pool", "padding"),
        ("resnet", "leaky_relu_slope", "evaluation", "act", "negative_slope"),
        ("resnet", "normalization_epsilon", "evaluation", "block1.bn1", "norm_epsilon"),
        ("resnet", "batchnorm_momentum", "statistics", "block1.bn1", "norm_momentum"),
        ("resnet", "running_variance", "statistics", "block1.bn1", "running_variance"),
        ("resnet", "frozen_normalization", "training", "block1.bn1", "norm_frozen"),
        ("resnet", "activation", "evaluation", "block2.act1", "activation"),
        ("resnet", "missing_residual", "evaluation", "block2.act2", "missing_residual"),
        ("resnet", "flatten_order", "evaluation", "fc", "flatten_order"),
        ("resnet", "initial_values", "weights", "block2.conv2", "initial_values"),
        ("resnet", "weight_layout", "weights", "block1.conv2", "kernel_layout"),
        ("resnet", "learning_rate", "update", "", "learning_rate"),
        ("resnet", "momentum", "steps", "", "optimizer_momentum"),
        ("resnet", "nesterov", "update", "", "optimizer_momentum"),
        ("resnet", "gradient_clipping", "update", "", "clipping"),
        ("resnet", "frozen_layer", "gradients", "block2.conv1", "frozen"),
        ("resnet", "precision", "evaluation", "fc", "float64"),
        ("unet", "average_pooling_count", "evaluation", "pool", "pool_padding_counted"),
        ("unet", "data_format", "evaluation", "squeeze", "data_format"),
        ("unet", "transposed_convolution_padding", "evaluation", "up1", "transposed_padding"),
        ("unet", "interpolation", "evaluation", "up2", "interpolation"),
        ("unet", "align_corners", "evaluation", "up2", "interpolation"),
        ("unet", "softmax_axis", "evaluation", "focus", "softmax_axis"),
        ("unet", "normalization_epsilon", "evaluation", "norm2", "norm_epsilon"),
        ("unet", "weight_layout", "weights", "gate", "kernel_layout"),
        ("unet", "dropout_kind", "dropout", "drop", "dropout_shape"),
        ("unet", "ignored_label", "loss", "", "ignored_labels"),
        ("unet", "loss_reduction", "loss", "", "loss_reduction"),
        ("unet", "denormals", "evaluation", "down", "denormals"),
        ("tagger", "mask", "evaluation", "lstm", "mask"),
        ("tagger", "gate_order", "weights", "gru", "recurrent_gates"),
        ("tagger", "gru_reset_after", "evaluation", "gru", "gru_reset"),
        ("tagger", "recurrent_bias", "weights", "lstm_0", "recurrent_bias"),
        ("tagger", "forget_gate_bias", "weights", "lstm_1", "forget_bias"),
        ("tagger", "two_biases", "update", "lstm", "recurrent_bias"),
        ("tagger", "recurrent_dropout", "dropout", "lstm", "recurrent_dropout"),
        ("tagger", "dropout_rate", "dropout", "drop", "dropout_rate"),
        ("tagger", "gradient_clipping", "update", "", "clipping"),
        ("tagger", "ignored_label", "loss", "", "ignored_labels"),
        ("tagger", "label_smoothing", "loss", "", "label_smoothing"),
        ("transformer", "gelu", "evaluation", "block1.act", "gelu"),
        ("transformer", "normalization_epsilon", "evaluation", "block2.norm1", "norm_epsilon"),
        ("transformer", "attention_scale", "evaluation", "block2.attention", "attention_scale"),
        ("transformer", "reshape_order", "evaluation", "block2.attention", "reshape_order"),
        ("transformer", "softmax_axis", "evaluation", "block2.attention", "softmax_axis"),
        ("transformer", "mask", "evaluation", "block1.attention", "mask"),
        ("transformer", "attention_mask", "evaluation", "block1.attention", "attention_mask"),
        ("transformer", "missing_residual", "evaluation", "block1.norm2", "missing_residual"),
        ("transformer", "initial_values", "weights", "positions", "initial_values"),
        ("transformer", "weight_layout", "weights", "block2.attention.value", "kernel_layout"),
        ("transformer", "label_smoothing", "loss", "", "label_smoothing"),
        ("transformer", "optimizer_epsilon", "update", "", "optimizer_epsilon"),
        ("transformer", "weight_decay", "update", "", "decay_coupled"),
        ("transformer", "bias_correction", "update", "", "bias_correction"),
        ("transformer", "learning_rate", "update", "", "learning_rate"),
        ("two_inputs", "padding_token", "gradients", "words", "padding_token"),
        ("two_inputs", "embedding_slices", "update", "words", "embedding_slices"),
        ("two_inputs", "logits", "loss", "", "loss_logits"),
        ("two_inputs", "loss_reduction", "loss", "", "loss_reduction"),
        ("two_inputs", "penalty", "loss", "", "regularisation"),
        ("two_inputs", "running_variance", "statistics", "bn", "running_variance"),
        ("two_inputs", "batchnorm_momentum", "statistics", "bn", "norm_momentum"),
        ("two_inputs", "normalization_epsilon", "evaluation", "bn", "norm_epsilon"),
        ("two_inputs", "leaky_relu_slope", "evaluation", "act1", "negative_slope"),
        ("two_inputs", "activation", "evaluation", "dense2", "activation"),
        ("two_inputs", "dropout_rate", "dropout", "drop", "dropout_rate"),
        ("two_inputs", "frozen_layer", "gradients", "dense2", "frozen"),
        ("two_inputs", "gradient_clipping", "update", "", "clipping"),
        ("two_inputs", "optimizer_epsilon", "update", "", "optimizer_epsilon"),
        ("two_inputs", "precision", "evaluation", "dense2", "float64"),
        ("two_inputs", "initial_values", "weights", "head", "initial_values"),
        ("two_inputs", "weight_layout", "weights", "dense2", "kernel_layout"),
        ("detector", "convolution_padding", "evaluation", "stage2", "padding"),
        ("detector", "activation", "evaluation", "act", "activation"),
        ("resnet", "preprocessing", "evaluation", "", "preprocessing"),
        ("detector", "preprocessing", "evaluation", "rescaling", "preprocessing"),
        ("detector", "interpolation", "evaluation", "up", "interpolation"),
        ("detector", "missing_residual", "evaluation", "smooth", "missing_residual"),
        ("detector", "reshape_order", "evaluation", "score_rows", "reshape_order"),
        ("detector", "logits", "loss", "", "loss_logits"),
        ("detector", "loss_reduction", "loss", "", "loss_reduction"),
        ("detector", "gradient_clipping", "update", "", "clipping"),
        ("detector", "learning_rate", "update", "", "learning_rate"),
        ("detector", "nesterov", "update", "", "optimizer_momentum"),
        ("detector", "initial_values", "weights", "boxes", "initial_values"),
        ("detector", "weight_layout", "weights", "lateral", "kernel_layout"),
    )
)


# Tried at each change, of each cause one row; the others in campaigns.
TRIED = tuple({row.cause: row for row in PLANTED}.values())


def write(folder: Path, pair: str, plant: str = "") -> Path:
    """The file of a pair with this planted, as a user would have it."""
    source = (MODELS / f"{pair}.py").read_text("utf-8")
    assert source.count('PLANT = ""\n') == 1
    path = folder / f"{pair}.py"
    path.write_text(source.replace('PLANT = ""\n', f'PLANT = "{plant}"\n'), encoding="utf-8")
    return path
