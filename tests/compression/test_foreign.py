"""Traits of others' models that the zoo has not: names, sizes, state in layers, other dtypes."""

from __future__ import annotations

import contextlib
import io
import re
import warnings

import numpy as np
import pytest

from tests import workers
from tests.compression import quick

FRAMEWORKS = ("pt", *workers.keras())
PT, TF = pytest.mark.only("pt"), pytest.mark.only("tf", "tf_keras")
KERAS_3 = pytest.mark.only("tf")


# PyTorch: files and programs ---------------------------------------------------------------------


@PT
def test_pt_inputs_by_name_are_taken_by_name_whatever_their_order(models, tmp_path):
    technique, model = models.post_training_quantization, models.Two()
    a, b = models.torch.randn(2, 2, 4)
    path = technique.keep_onnxruntime_float32(model, {"a": a, "b": b}, tmp_path / "file")
    predict = technique.load_onnxruntime(path)
    for x in ({"a": a, "b": b}, {"b": b, "a": a}):
        assert (predict(x) - model(a, b)).abs().max() < 1e-6
    with pytest.raises(ValueError, match="the file takes a, b, not a, c"):
        predict({"a": a, "c": b})


@PT
def test_pt_a_graph_within_the_graph_is_refused_in_words(models, tmp_path):
    x, torch = models.torch.randn(4, 4), models.torch
    autocast = models.Within(lambda: torch.autocast("cpu", enabled=False))
    no_grad = models.Within(torch.no_grad)
    message = "a graph of its own: autocast, no_grad or cond within forward"
    with pytest.raises(NotImplementedError, match=message):
        models.int8_files.keep_float32(autocast, x, tmp_path / "file")
    with pytest.raises(NotImplementedError, match=message):
        models.quantization_aware_training.prepare_qat(no_grad, x, weight_bits=8)


@PT
def test_pt_a_model_that_cannot_be_captured_is_refused_with_its_line_and_nothing_is_printed(
    models, tmp_path
):
    model, x, printed = models.Branching(), models.torch.randn(4, 4), io.StringIO()
    with contextlib.redirect_stderr(printed):
        with pytest.raises(
            NotImplementedError, match=r"torch.export cannot capture it: "
        ) as caught:
            models.int8_files.keep_float32(model, x, tmp_path / "file")
        with pytest.raises(NotImplementedError):
            models.export.export_onnx(model, x, tmp_path / "file")
    assert ": return x + 1 if x.sum() > 0 else x)" in str(caught.value)
    assert printed.getvalue() == ""


@PT
@quick.without_code()
def test_pt_a_program_takes_the_sizes_of_its_example_and_any_number_of_samples(models, tmp_path):
    files, qat = models.int8_files, models.quantization_aware_training
    model, x, path = models.Resized().eval(), models.by_size(2, 8), tmp_path / "file"
    prepared = qat.prepare_qat(model, x, weight_bits=8)
    files.keep_float32(model, x, path)
    files.save_as_it_is(qat.convert_qat(prepared, x), tmp_path / "qat")
    static = models.post_training_quantization.apply_static_int8(model, x)
    message = (
        "inputs must be float32 [any], float32 [any, 3, 8, 8], as those of the example,"
        " not float32 [2], float32 [2, 3, 9, 8]"
    )
    for program in (
        files.load_int8(path),
        files.load_int8(tmp_path / "qat"),
        lambda given: prepared(**given),
        lambda given: static(**given),
    ):
        with models.torch.no_grad():
            program(x)
            program(models.by_size(3, 8))
            with pytest.raises(ValueError, match=re.escape(message)):
                program(models.by_size(2, 9))


@PT
@pytest.mark.parametrize(("make", "count"), [("with_conv1d", 1), ("with_conv2d", 0)])
def test_pt_layers_that_stay_in_float32_are_named(models, make, count):
    model, x = getattr(models, make)()
    for quantize in (
        models.post_training_quantization.apply_static_int8,
        lambda *given: models.quantization_aware_training.prepare_qat(*given, weight_bits=8),
    ):
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            quantize(model, x)
        lines = {str(one.message) for one in said if "left in float32" in str(one.message)}
        assert len(lines) == count
        assert all(line.startswith("left in float32: 0.weight: ") for line in lines)


@PT
def test_pt_what_is_drawn_next_is_what_would_have_been(models, tmp_path):
    torch, (model, x) = models.torch, models.with_conv2d()
    qat, state = models.quantization_aware_training, models.torch.get_rng_state()
    prepared = qat.prepare_qat(model, x, weight_bits=8)
    models.int8_files.save_as_it_is(qat.convert_qat(prepared, x), tmp_path / "file")
    models.post_training_quantization.apply_static_int8(model, x)
    assert torch.equal(torch.get_rng_state(), state)


@PT
def test_pt_the_one_slope_of_all_channels_stays(models):
    model, x = models.one_slope()
    smaller = models.structured_pruning.remove_channels(model, x, share=0.25)
    assert (smaller[0].out_channels, smaller[1].weight.numel()) == (3, 1)


@PT
def test_pt_a_file_that_can_not_be_read_again_leaves_nothing(models, tmp_path, monkeypatch):
    linear, x = models.torch.nn.Linear, models.torch.randn(2, 32)
    monkeypatch.setattr(models.saving, "load", lambda *_, **__: linear(1, 1))
    with pytest.raises(RuntimeError):
        models.quantized_files.save_quantized(linear(32, 32), x, tmp_path / "file")
    assert list(tmp_path.iterdir()) == []


@PT
@pytest.mark.parametrize("make", ["of_numbers", "of_codes"])
def test_pt_bfloat16_is_refused_with_its_reason(models, tmp_path, make):
    """NumPy lacks it."""
    for write in (models.export.export_onnx, models.native_export.export_torchscript):
        with pytest.raises(NotImplementedError, match="BFloat16"):
            write(*getattr(models, make)(), tmp_path / "file")


@PT
def test_pt_a_file_for_the_cpu_predicts_there_whatever_else_the_machine_has(
    models, tmp_path, monkeypatch
):
    torch, technique = models.torch, models.native_export
    model, x = torch.nn.Linear(4, 2).eval(), torch.randn(2, 4)
    path = technique.export_torchscript(model, x, tmp_path / "file")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    outputs = technique.load_torchscript(path, threads=1)(x.numpy())
    assert np.abs(outputs - model(x).detach().numpy()).max() < 1e-6


# PyTorch: training -------------------------------------------------------------------------------


@PT
@pytest.mark.parametrize("way", ["logits", "features", "copy", "onnx", "torchscript"])
def test_pt_a_pass_puts_modes_back_as_layers_change_them(models, way, tmp_path):
    """One merges weights to predict, and has to take them apart again; a frozen one stays so."""
    model, other = models.merging(), models.merging()
    x, bad = models.torch.randn(3, 4), models.torch.randn(3, 5)
    step = models.distillation.make_train_step(
        model, other, models.torch.optim.SGD(model.parameters(), 0.1), None, alpha=1.0
    )
    model[1].eval(), other[1].eval()
    if way == "logits":
        step(x, None)
    elif way == "features":
        layers = {"student_layer": "0", "teacher_layer": "0"}
        models.feature_distillation.attach_regressor(model, other, x, **layers)
    elif way == "copy":
        models.copying.copy_model(model, x)
    else:
        write = models.export.export_onnx
        write = models.native_export.export_torchscript if way == "torchscript" else write
        with pytest.raises((ValueError, NotImplementedError)):
            write(model, bad, tmp_path / "file")
    assert [models.merged(one) for one in (model, other)] == [([True, True, False], False)] * 2


@PT
@pytest.mark.parametrize("how", ["pruned", "2:4"])
def test_pt_a_weight_is_masked_for_whoever_reads_it(models, how):
    source, x = models.Reads(), models.torch.randn(4, 8)
    model, update, finalize = models.halved(source, how)
    models.trained(model, update, x)
    evaluated, before = model.eval()(x), model.train()(x)
    names = [name.replace("_orig", "") for name, _ in model.named_parameters()]
    final = finalize(model)
    # As a saved optimizer knows parameters.
    assert names == list(final.state_dict()) == list(source.state_dict())
    assert models.torch.equal(final(x), before)
    assert models.torch.equal(final.eval()(x), evaluated)
    assert (final.read.weight == 0).float().mean() == 0.5
    assert len(final._forward_pre_hooks) == 0


@PT
@pytest.mark.parametrize("alpha", [0.0, 0.5])
def test_pt_a_loss_gets_what_the_student_gives_and_not_its_logits_alone(models, alpha):
    student, teacher, torch = models.Wrapped(4, 3), models.Wrapped(4, 3), models.torch
    given = []
    models.distillation.make_train_step(
        student,
        teacher,
        torch.optim.SGD(student.parameters(), 0.1),
        lambda output, y: given.append(output.more) or output.logits.sum(),
        alpha=alpha,
    )(torch.randn(5, 4), torch.arange(5) % 3)
    assert len(given) == 1


# TensorFlow --------------------------------------------------------------------------------------


@TF
@pytest.mark.parametrize("make", ["nested", "texts", "scaled"])
def test_tf_a_smaller_copy_has_the_state_of_layers_within_layers(models, make):
    model, x = getattr(models, make)()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        whole, half = (
            models.structured_pruning.remove_channels(model, x, share=share) for share in (0.0, 0.5)
        )
    assert np.abs(np.array(whole(x)) - np.array(model(x))).max() < 1e-5
    # The same channels gone, by hand.
    gone = np.argsort(np.abs(model.get_layer("hidden").get_weights()[0]).sum(0))[:4]
    kernel, bias = model.layers[-1].get_weights()
    kernel[gone] = 0.0
    model.layers[-1].set_weights([kernel, bias])
    assert np.abs(np.array(half(x)) - np.array(model(x))).max() < 1e-5


@TF
def test_tf_layers_that_are_frozen_within_a_layer_stay_frozen(models, flavour):
    model = models.frozen_within(variables=flavour == "tf")
    smaller = models.structured_pruning.remove_channels(model, models.X, share=0.5)
    assert models.trainable(smaller) == models.trainable(model)
    assert not all(models.trainable(model))


@TF
def test_tf_an_export_deletes_no_folder_of_others(models, tmp_path):
    other, export = tmp_path / "other", models.native_export.export_package
    other.mkdir()
    (other / "kept").touch()
    with pytest.raises(FileExistsError):
        export(models.pair(), models.X, other)
    assert (other / "kept").exists()
    for _ in range(2):  # the second one to its own
        export(models.pair(), models.X, tmp_path / "own")


@KERAS_3
@pytest.mark.parametrize(
    "maker", ["plain", "graph", "blocks", "parts", "logits", "stored", "features", "sparse"]
)
def test_keras_3_a_loss_scaler_changes_no_update(models, maker):
    alike = maker in ("graph", "blocks", "parts")  # they train as the plain one does
    alone = models.stepped("plain" if alike else maker, scaled=False)
    scaled, before = models.stepped(maker, scaled=True), models.pair().get_weights()
    moved = max(np.abs(a - b).max() for a, b in zip(before, alone, strict=True))
    assert moved > 1e-3
    for ours, theirs in zip(scaled, alone, strict=True):
        assert np.abs(ours - theirs).max() < 1e-5 * max(moved, 1.0)


@KERAS_3
@pytest.mark.parametrize("how", ["pruned", "2:4"])
@pytest.mark.parametrize("calls", [False, True])
def test_keras_3_a_kernel_is_masked_for_whoever_reads_it(models, how, calls):
    """It is read and its layer not called, or beside a call of it."""
    model, update, finalize = models.halved(models.reading(calls), how)
    models.trained(model, update, models.ROWS)
    before, final = np.array(model(models.ROWS)), finalize(model)
    kernel = final.layers[0].read.kernel
    assert np.array_equal(np.array(final(models.ROWS)), before)
    assert np.mean(np.array(kernel) == 0) == 0.5
    # Of what is left: the model's own constraint.
    assert np.allclose(np.linalg.norm(np.array(kernel), axis=0), 1.0, atol=1e-5)
    assert type(kernel.constraint).__name__ == "UnitNorm"


@KERAS_3
def test_keras_3_a_layer_that_is_a_graph_of_its_own_is_changed_within(models):
    plain, products = models.changed_within(models.Block)
    decorated, its_products = models.changed_within(models.Decorated)
    assert its_products == products > 0
    for ours, theirs in zip(decorated, plain, strict=True):
        assert np.allclose(ours, theirs, atol=1e-6)


@KERAS_3
def test_keras_3_masks_and_features_compute_in_half_width(kit, models):
    batch = kit.data.to_device(models.X, models.Y)
    student, update, finalize = models.halved(models.pair(policy="mixed_bfloat16"), "pruned")
    step = models.MAKERS["plain"](student, models.keras.optimizers.SGD(0.1))
    losses = []
    for number in (1, 2, 3):
        update(number)
        losses.append(float(step(*batch)))
    assert np.isfinite(losses).all()
    assert np.mean(np.array(finalize(student).get_layer("features").kernel) == 0) == 0.5
    student, teacher = (models.pair(width, "mixed_bfloat16") for width in (4, 6))
    step = models.with_features(student, models.keras.optimizers.SGD(0.1), teacher)
    losses = [float(step(*batch)) for _ in range(3)]
    assert losses[-1] < losses[0]


@KERAS_3
def test_keras_3_adapters_stay_what_they_are_in_a_copy_and_are_not_pruned(models):
    model, more = models.adapted(), models.adapted_and_more()
    copy = models.copying.copy_model(model, models.X)
    assert all(np.array_equal(a, b) for a, b in zip(copy.weights, model.weights, strict=True))
    ours, theirs = ([v.name for v in one.trainable_variables] for one in (copy, model))
    assert ours == theirs
    message = "^'adapted' makes its kernel of others .LoRA, integers.$"
    for how in ("pruned", "2:4"):
        with pytest.raises(NotImplementedError, match=message):
            models.halved(model, how)
    with pytest.warns(UserWarning, match="LoRA.*left whole|left whole.*LoRA"):
        smaller = models.structured_pruning.remove_channels(more, models.X, share=0.5)
    assert [smaller.get_layer(name).units for name in ("adapted", "more")] == [8, 3]
