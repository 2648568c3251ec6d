"""PyTorch: what techniques make of modules with the traits of test_models_of_others.py."""

from __future__ import annotations

import copy
import sys
import types
from unittest import mock

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from pt_impl.compression import (
    post_training_quantization,
    pruning,
    structured_pruning,
    weight_quantization,
)
from pt_impl.deployment import export
from pt_impl.kit import averages, int8_files, quantized_files, training, user_model
from pt_impl.kit.checks.data_parallel import synchronise_norms
from pt_impl.recipes import gradient_health, loss_checks, nonfinite, regularization
from pt_impl.train_step import accumulated_statistics
from pt_impl.train_step.activation_checkpointing import apply_checkpointing
from shared import runtimes

cross_entropy = nn.functional.cross_entropy


class Centred(nn.Module):
    """Changes its input in place, so that a second call on it gives something else."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(32, 32)

    def forward(self, x):
        return self.head(x.sub_(0.4).mul_(2.0))


def images(count: int = 8) -> Tensor:
    return torch.rand(count, 32, generator=torch.Generator().manual_seed(0))


def made(kind: type[nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return kind().eval()


def file_of_inputs_changed_in_place(folder):
    model, x = made(Centred), images()
    path = export.export_onnx(model, x, folder / "model.onnx")
    found = runtimes.load_onnx(path, threads=1)(x.numpy())
    return [*found, *x], [*model(images()).detach(), *images()]


def calibration_data_that_the_model_changes(folder):
    model, x = made(Centred), images(64)
    quantized = post_training_quantization.apply_dynamic_int8(model, x)
    int8_files.save_int8(quantized, model, x, folder / "file")  # which compares
    return x, images(64)


def rounded_weights_of_inputs_changed_in_place(folder):
    model, x = made(Centred), images()
    quantized_files.save_quantized(weight_quantization.apply_int8(model, x), x, folder / "file")
    return x, images()


class Clamped(nn.Module):
    """Changes its input in place, and gives the same of what it leaves."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(32, 2)

    def forward(self, x):
        return self.head(x.clamp_(0.2, 0.8))


def two_predictions_of_a_model_that_clamps_its_input(folder):
    return user_model.repeatable(made(Clamped), images()), 0.0


def try_of_inputs_changed_in_place(folder):
    user_model.repeatable(made(Centred), images())


def with_penalty() -> tuple:
    model = nn.Linear(3, 1)
    return model, lambda output, y: (output - y).square().mean() + model.weight.square().sum()


def penalties_of_the_model_that_is_trained(folder):
    own = user_model.UserModel(with_penalty)
    model = own.build()
    step = training.make_train_step(model, torch.optim.SGD(model.parameters(), 0.1), own.loss)
    own.build()  # as a row's proof does
    wanted = 0.8 * model.weight.detach()
    step(torch.zeros(4, 3), torch.zeros(4, 1))
    return model.weight.detach(), wanted


def penalty_of_another_model(folder):
    own = user_model.UserModel(with_penalty)
    own.loss(copy.deepcopy(own.build())(torch.zeros(4, 3)), torch.zeros(4, 1))


def graph_of_a_loss(make):
    own = user_model.UserModel(make)
    model, x, y = own.build(), torch.ones(4, 3), torch.zeros(4, 1)
    graph = torch.compile(lambda x, y: own.loss(model(x), y), fullgraph=True, backend="eager")
    return graph(x, y).detach(), own.loss(model(x), y).detach()


def one_graph_with_a_penalty(folder):
    return graph_of_a_loss(with_penalty)


def one_graph_with_a_plain_loss(folder):
    return graph_of_a_loss(lambda: (nn.Linear(3, 1), nn.functional.mse_loss))


class Balanced(nn.Linear):
    """Leaves what its loss reads, which a file of it does not."""

    def forward(self, x):
        output = super().forward(x)
        self.balance = output.sum()
        return output


def with_balance() -> tuple:
    model = Balanced(3, 1)
    return model, lambda output, y: (output - y).square().mean() + model.balance


def loss_of_a_prediction_by_a_file_of_a_model_whose_loss_reads_it(folder):
    own = user_model.UserModel(with_balance)
    own.build()
    output = torch.full((4, 1), 3.0)  # as a file gives it
    return own.prediction_loss(output, torch.zeros(4, 1)), 9.0


def keras_model_of_pytorch(folder):
    class Layer(nn.Module):
        """As Keras's are on its backend PyTorch."""

    backend = types.SimpleNamespace(backend=lambda: "torch")
    keras = types.SimpleNamespace(Layer=Layer, config=backend)
    with mock.patch.dict(sys.modules, keras=keras):
        user_model.UserModel(lambda: (nn.Sequential(Layer()), nn.functional.mse_loss)).build()


# TorchScript within a model ----------------------------------------------------------------------


class Around(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        inside = nn.Sequential(nn.Linear(32, 16), nn.BatchNorm1d(16), nn.Dropout(0.5))
        self.inside, self.after = torch.jit.script(inside), nn.Linear(16, 16)

    def forward(self, x):
        return self.after(self.inside(x))


class Scripted(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(Around(), nn.Linear(16, 4))


def sizes(tensors) -> list[float]:
    return sorted(float(tensor.double().norm()) for tensor in tensors)


def gradients(model: nn.Module) -> list[float]:
    """Their norms after one step."""
    torch.manual_seed(1)
    cross_entropy(model.train()(images()), torch.arange(8) % 4).backward()
    return sizes(parameter.grad for parameter in model.parameters())


def pruned_model_around_torchscript(folder):
    settings = {"final_sparsity": 0.0, "begin_step": 0, "end_step": 1, "frequency": 1}
    model, _ = pruning.apply_pruning(made(Scripted), **settings)
    return gradients(model), gradients(made(Scripted))


def fewer_channels_beside_torchscript(folder):
    smaller = structured_pruning.remove_channels(made(Scripted), images(), share=0.5)
    leaves = [parameter.is_leaf for parameter in smaller.parameters()]
    return [smaller[0].after.out_features, *leaves], [8] + 8 * [True]


def recomputed_block_around_torchscript(folder):
    plain, recomputed = made(Scripted), apply_checkpointing(made(Scripted), blocks="0")
    wanted, found = gradients(plain), gradients(recomputed)
    return found + sizes(recomputed.buffers()), wanted + sizes(plain.buffers())


def decay_of_embeddings_within_torchscript(folder):
    model = nn.Sequential(torch.jit.script(nn.Embedding(5, 4)), torch.jit.script(nn.Linear(4, 4)))
    return [name == "1.weight" for name in regularization.decayed_parameters(model)], [True]


def onnx_of_torchscript(folder):
    export.export_onnx(made(Scripted), images(), folder / "model.onnx")


def one_update_of_scripted_statistics(folder):
    accumulated_statistics.AccumulatedStatistics(made(Scripted))


def fresh_scripted_statistics(folder):
    with averages.fresh_statistics(made(Scripted)):
        pass


def replicas_of_scripted_norms(folder):
    synchronise_norms(made(Scripted))


def recomputed_torchscript(folder):
    apply_checkpointing(made(Scripted), blocks="0.inside")


def rate_of_scripted_dropout(folder):
    regularization.set_dropout_rate(made(Scripted), rate=0.1)


# Others ------------------------------------------------------------------------------------------


def bags() -> tuple:
    torch.manual_seed(0)
    parts = nn.EmbeddingBag(500, 64), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 4)
    return nn.Sequential(*parts).eval(), torch.randint(500, (16, 30))


def file_of_embedding_bags(folder):
    model, x = bags()
    path = int8_files.keep_float32(model, x, folder / "file")
    return int8_files.load_int8(path)(x), model(x).detach()


def int8_file(folder, model, x):
    quantized = post_training_quantization.apply_static_int8(model, x)
    path = int8_files.save_int8(quantized, model, x, folder / "file")
    return int8_files.load_int8(path)(x), model(x).detach()


def int8_file_of_embedding_bags(folder):
    return int8_file(folder, *bags())


def under(norm) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(norm(nn.Linear(32, 32)), nn.ReLU(), nn.Linear(32, 4)).eval()


def int8_file_of_spectral_norm(folder):
    return int8_file(folder, under(nn.utils.parametrizations.spectral_norm), images())


def int8_file_of_weight_norm(folder):
    return int8_file(folder, under(nn.utils.parametrizations.weight_norm), images())


def file_of_spectral_norm(folder):
    model, x = under(nn.utils.parametrizations.spectral_norm), images()
    path = quantized_files.save_quantized(model, x, folder / "file")
    return quantized_files.load_quantized(path)(x), model(x).detach()


class Lengths(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(32, 2)

    def forward(self, x):
        return self.head(x) + torch.ones(len(x), 2)


def openvino_of_a_forward_that_asks_for_len(folder):
    model = made(Lengths)
    path = export.export_openvino(model, images(), folder / "model.xml")
    found = runtimes.load_openvino(path, threads=1)(images(5).numpy())
    return found, model(images(5)).detach()


class Heads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.a, self.b = nn.Linear(32, 16), nn.Linear(16, 4), nn.Linear(16, 3)

    def forward(self, x, task="a"):
        hidden = torch.relu(self.trunk(x))
        return self.a(hidden) if task == "a" else self.b(hidden)


def channels_that_a_second_head_reads(folder):
    structured_pruning.remove_channels(made(Heads), images(), share=0.5)


class Reentrant(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(32, 8), nn.Linear(8, 4)

    def forward(self, x):
        return self.last(checkpoint(self.first, x.clone().requires_grad_(), use_reentrant=True))


def gradient_norms_of_a_reentrant_checkpoint(folder):
    labels = torch.arange(8) % 4
    gradient_health.gradient_norms(made(Reentrant), cross_entropy, images(), labels)


def nonfinite_of_a_reentrant_checkpoint(folder):
    nonfinite.find_nonfinite(made(Reentrant), cross_entropy, images(), torch.arange(8) % 4)


class WithLoss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(32, 4)

    def forward(self, x):
        return {"logits": self.head(x), "loss": self.head(x).mean()}


def check_of_a_loss_of_the_model(folder):
    loss_checks.check_loss(made(WithLoss), lambda output, y: output["loss"], images(), None)


class Orthogonal(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(32, 4)

    def forward(self, x):
        return torch.linalg.qr(self.head(x).unsqueeze(-1) @ x.unsqueeze(1))[0]


def onnxruntime_of_qr(folder):
    model = made(Orthogonal)
    post_training_quantization.keep_onnxruntime_float32(model, images(), folder / "file")
