"""Traits of models that nobody here wrote: each works rightly, or is refused with the true reason.

pt_models_of_others.py and tf_models_of_others.py hold a function for each: what a technique makes
of such a model.
"""

from __future__ import annotations

import numpy as np
import pytest

from tests import workers

FRAMEWORKS = ("pt", *workers.keras())
TOLERANCE, IN_INT8 = {"rtol": 1e-4, "atol": 1e-5}, {"atol": 0.03}


def rows(side: str, *names: str) -> list:
    return [pytest.param(*row, marks=pytest.mark.only(*side.split())) for row in names]


# What it makes, and what is right ----------------------------------------------------------------

RIGHT = rows(
    "pt",
    ["file_of_inputs_changed_in_place"],
    ["calibration_data_that_the_model_changes"],
    ["rounded_weights_of_inputs_changed_in_place"],
    ["two_predictions_of_a_model_that_clamps_its_input"],
    ["penalties_of_the_model_that_is_trained"],
    ["one_graph_with_a_penalty"],
    ["one_graph_with_a_plain_loss"],
    ["loss_of_a_prediction_by_a_file_of_a_model_whose_loss_reads_it"],
    ["pruned_model_around_torchscript"],
    ["fewer_channels_beside_torchscript"],
    ["recomputed_block_around_torchscript"],
    ["decay_of_embeddings_within_torchscript"],
    ["file_of_embedding_bags"],
    ["int8_file_of_embedding_bags"],
    ["file_of_spectral_norm"],
    ["int8_file_of_spectral_norm"],
    ["int8_file_of_weight_norm"],
    ["openvino_of_a_forward_that_asks_for_len"],
)
RIGHT += rows(
    "tf",
    ["gradients_of_a_recomputed_layer_that_assigns_its_state"],
    ["gradients_of_stateless_calls"],
)
RIGHT += rows(
    "tf tf_keras",
    ["checkpoint_of_the_same_vocabulary"],
    ["compiled_block_behind_a_lookup"],
)
RIGHT += rows("tf_keras", ["activity_regularizer_of_a_pruned_layer"])


@pytest.mark.parametrize("trait", RIGHT)
def test_works(models, tmp_path, trait):
    found, wanted = getattr(models, trait)(tmp_path)
    tolerance = IN_INT8 if trait.startswith("int8_") else TOLERANCE
    np.testing.assert_allclose(found, wanted, **tolerance)


# What is refused, and why ------------------------------------------------------------------------

REFUSED = rows(
    "pt",
    ["try_of_inputs_changed_in_place", "in place"],
    ["keras_model_of_pytorch", r"^this is a Keras model on PyTorch: give it as tensorflow\(\)"],
    ["penalty_of_another_model", "reads the model that it was made with"],
    ["one_update_of_scripted_statistics", "TorchScript, whose momentum is a constant"],
    ["fresh_scripted_statistics", "TorchScript, whose momentum is a constant"],
    ["replicas_of_scripted_norms", "TorchScript, which takes no other forward"],
    ["onnx_of_torchscript", "^torch.export cannot follow TorchScript within the model$"],
    ["recomputed_torchscript", "TorchScript, which takes no other forward"],
    ["rate_of_scripted_dropout", "TorchScript, of which its rate is a constant"],
    ["channels_that_a_second_head_reads", "which the example does not run, may read them"],
    ["gradient_norms_of_a_reentrant_checkpoint", "reentrant"],
    ["nonfinite_of_a_reentrant_checkpoint", "reentrant"],
    ["check_of_a_loss_of_the_model", "reads more of the model's output than logits"],
    ["onnxruntime_of_qr", "^torch.onnx cannot export it: <class [^\x1b]*linalg_qr"],
)
REFUSED += rows(
    "tf",
    ["recomputed_spectral_normalization", "'block' writes to the weight it wraps"],
    ["recomputed_layer_that_clips_its_weight", "'block' writes to the weight .*kernel in its"],
    ["onnxruntime_of_ctc", "cannot make constants of its variables: .* definitions differ.$"],
    ["litert_of_ctc", "LiteRT's converter refuses it: .* definitions differ.$"],
    ["static_int8_of_ctc", "cannot calibrate inside of a loop"],
    ["graph_of_ctc", "makes no constants of its variables: .* definitions differ.$"],
    ["channels_first_of_conv_lstm", "makes images of 5-D sequences"],
    ["litert_of_float64", "no operator for MatMul, BiasAdd in float64"],
    ["litert_file_of_float64", "no operator for MatMul, BiasAdd in float64"],
    ["dynamic_int8_of_float64", "no operator for MatMul, BiasAdd in float64"],
    ["quantization_aware_siamese_model", "^(?!.*comes from prepare_qat)"],
)
REFUSED += rows(
    "tf tf_keras",
    ["checkpoint_of_another_vocabulary", "other words or bins there"],
    ["checkpoint_of_other_bins", "other words or bins there"],
    ["try_of_a_loss_that_reads_its_model", "reads the model's weights by itself"],
    ["compiled_lookup", "looks up or hashes"],
    ["prediction_of_a_lookup_by_xla", "looks up or hashes"],
    ["compiled_stack_with_a_lookup", "looks up or hashes"],
    ["compiled_replicas_of_a_lookup", "looks up or hashes"],
)


@pytest.mark.parametrize(("trait", "reason"), REFUSED)
def test_is_refused(models, tmp_path, trait, reason):
    with pytest.raises((NotImplementedError, ValueError), match=reason):
        getattr(models, trait)(tmp_path)
