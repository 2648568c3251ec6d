"""PyTorch's techniques on a GPU, where what they do is not what they do on a CPU.

Skipped where there is none. What is the same on any device is held against plain code by the zoo,
on a GPU, too: `python -m tests.zoo --framework pt --device cuda`.
"""

import copy
import os
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import set_checkpoint_early_stop

from pt_impl.compression import (
    post_training_quantization,
    quantization_aware_training,
    semi_structured_pruning,
    weight_quantization,
)
from pt_impl.deployment import native_export
from pt_impl.diagnosis import memory_growth, profiling
from pt_impl.kit import data, int8_files, models, quantized_files, replicas, runtime, training
from pt_impl.parallel import data_parallel
from pt_impl.recipes import checkpoints, learning_rate_finder
from pt_impl.train_step import (
    activation_checkpointing,
    batch_size_finder,
    compilation,
    finite_guard,
    loss_scaling,
    mixed_precision,
)
from shared import parallel
from shared.specs import TASKS
from shared.utilization import watch_utilization
from shared.weights import init_weights

# Where there is one that nobody hid, and torch can't use it, they run and fail with its reason.
HIDDEN = os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1")
NO_GPU = not torch.cuda.is_available() and (HIDDEN or not Path("/proc/driver/nvidia").exists())
pytestmark = [pytest.mark.timeout(120), pytest.mark.skipif(NO_GPU, reason="needs an NVIDIA GPU")]
TASK = TASKS["digits-cnn"]


@pytest.fixture(autouse=True)
def begin():
    """float32 is float32, and random numbers begin anew."""
    runtime.configure(threads=torch.get_num_threads(), seed=0)


def batch(size=32):
    x = np.random.default_rng(0).normal(size=(size, *TASK.model.input_shape)).astype(np.float32)
    return data.to_device(x, np.arange(size) % 10)


def cnn():
    return models.build(TASK.model, init_weights(TASK.model, seed=0))


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def apart(found, wanted):
    """The relative L2 distance."""
    found, wanted = (part.detach().double().cpu() for part in (found, wanted))
    return float((found - wanted).norm() / wanted.norm())


# The kit ----------------------------------------------------------------------------------------


def test_the_device_is_named_with_its_driver():
    info = runtime.device_info()
    assert info["name"] == torch.cuda.get_device_name(0)
    assert float(info["driver"]) >= float(torch.version.cuda)
    assert int(info["memory_bytes"]) == torch.cuda.mem_get_info()[1]


def test_float32_is_float32():
    a, b = torch.randn(2, 1024, 1024, device="cuda")
    exact = a.double() @ b.double()
    assert apart(a @ b, exact) < 1e-6  # TF32 is at 3e-4
    x, w = torch.randn(8, 64, 32, 32, device="cuda"), torch.randn(64, 64, 3, 3, device="cuda")
    assert apart(F.conv2d(x, w), F.conv2d(x.double(), w.double())) < 1e-6


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("name", ["digits-cnn", "text-gpt"])
def test_evidence_tells_the_dtype_of_kernels(name, dtype):
    task = TASKS[name]
    model = models.build(task.model, init_weights(task.model, seed=0))
    step = mixed_precision.make_train_step(model, sgd(model), training.loss_of(task), dtype=dtype)
    if name == "text-gpt":
        codes = np.random.default_rng(0).integers(0, task.model.vocabulary, (4, 33))
        x, y = data.to_device(codes[:, :-1], codes[:, 1:])
    else:
        x, y = batch()
    found = runtime.operator_dtypes(step, x, y)
    kinds = ["matmul"] if name == "text-gpt" else ["convolution", "matmul"]
    assert {kind: [*counts] for kind, counts in found.items()} == {kind: [dtype] for kind in kinds}


def test_peaks_are_those_of_the_allocator():
    runtime.reset_device_peak()
    before = runtime.device_peak()["allocated"]
    kept = torch.zeros(64 << 20, dtype=torch.uint8, device="cuda")
    assert runtime.device_peak()["allocated"] - before == kept.nbytes


# Train step -------------------------------------------------------------------------------------


def test_float16_skips_a_step_whose_gradients_overflow():
    model = cnn()
    step = loss_scaling.make_train_step(
        model, sgd(model), training.cross_entropy, initial_scale=2.0**40
    )
    before, (x, y) = copy.deepcopy(model.state_dict()), batch()
    step(x, y)
    parameters = dict(model.named_parameters())
    assert all(torch.equal(parameters[name], before[name]) for name in parameters)
    assert step.loss_scale() == 2.0**39
    for _ in range(40):
        loss = step(x, y)
    plain = cnn()
    plain_step, losses = training.make_train_step(plain, sgd(plain), training.cross_entropy), []
    for _ in range(41):
        losses.append(plain_step(x, y).item())
    assert step.loss_scale() < 2.0**39
    assert loss.item() < losses[0] / 2


class Recurrent(nn.Module):
    """An LSTM in a block, and what came out of it each time that it ran."""

    def __init__(self):
        super().__init__()
        self.block = Block()
        self.head = nn.Linear(16, 10)

    def forward(self, x):
        return self.head(self.block(x).mean(1))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm, self.seen = nn.LSTM(8, 16, 2, batch_first=True, dropout=0.5), []

    def forward(self, x):
        x, _ = self.lstm(x)
        self.seen.append(x.detach().clone())
        return x


def test_recurrent_dropout_is_the_same_when_a_block_runs_again():
    model = Recurrent().cuda().train()
    x, y = torch.randn(4, 5, 8, device="cuda"), torch.arange(4, device="cuda")
    F.cross_entropy(model(x), y).backward()  # its masks have a state from here on
    activation_checkpointing.apply_checkpointing(model, blocks="block")
    model.block.seen.clear()
    for _ in range(3):
        with set_checkpoint_early_stop(False):  # else it stops before what is looked at
            loss = F.cross_entropy(model(x), y)
        loss.backward()
    seen = model.block.seen
    assert all(map(torch.equal, seen[::2], seen[1::2]))
    assert not torch.equal(seen[0], seen[2])  # another step draws others


def test_offloaded_inputs_are_on_the_host_until_they_are_needed():
    def peak(**settings):
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Sequential(nn.Linear(512, 512), nn.Tanh()) for _ in range(8)))
        model = activation_checkpointing.apply_checkpointing(model.cuda(), blocks="*", **settings)
        x = torch.randn(16384, 512, device="cuda")
        torch.cuda.reset_peak_memory_stats()
        model(x).square().mean().backward()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated(), [p.grad for p in model.parameters()]

    (kept, plain), (offloaded, found) = peak(), peak(offload=True)
    assert all(apart(f, p) < 1e-5 for f, p in zip(found, plain, strict=True))
    assert kept - offloaded > 4 * 16384 * 512 * 4  # of the inputs of eight blocks


def test_cuda_graphs_predict_what_the_model_does():
    model, (x, _) = cnn().eval(), batch()
    wanted = model(x)
    predict = compilation.compiled_predict(model, mode="reduce-overhead")
    for _ in range(4):  # recorded at the second call
        found = predict(x).clone()
    assert apart(found, wanted) < 1e-5
    other = torch.randn_like(x)
    assert apart(predict(other).clone(), model(other)) < 1e-5


def test_the_guard_holds_a_step_that_is_not_finite():
    model, (x, y) = cnn(), batch()
    step = finite_guard.make_train_step(model, sgd(model), training.cross_entropy)
    step(x, y)
    before = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(FloatingPointError, match="of input x are not finite"):
        step(torch.full_like(x, torch.nan), y)
    assert all(map(torch.equal, model.parameters(), before))


def test_the_batch_size_finder_keeps_to_a_budget_of_the_gpu():
    found = batch_size_finder.find_batch_size(
        "pt_impl.kit.training:digits_cnn", budget_bytes=512 << 20, maximum=1 << 20
    )
    assert found.limit == "budget"
    assert 256 << 20 < found.peak_bytes <= 512 << 20


# Compression and deployment ---------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_two_of_four_are_multiplied_alone(dtype):
    model = nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 128)).cuda()
    pruned = semi_structured_pruning.finalize_two_to_four(
        semi_structured_pruning.apply_two_to_four(model)
    ).to(dtype)
    x = torch.randn(64, 256, device="cuda", dtype=dtype)
    packed = semi_structured_pruning.compress_two_to_four(pruned)
    with torch.no_grad():
        assert apart(packed(x), pruned(x)) < 1e-2
        assert apart(torch.compile(packed)(x), pruned(x)) < 1e-2
    for layer in (packed[0], packed[2]):
        assert isinstance(layer.weight, torch.sparse.SparseSemiStructuredTensor)


def _write_static_int8(model, x, path):
    quantized = post_training_quantization.apply_static_int8(model, x)
    return int8_files.save_int8(quantized, model, x, path)


def _write_int8_weights(model, x, path):
    return quantized_files.save_quantized(weight_quantization.apply_int8(model, x), x, path)


@pytest.mark.parametrize(
    ("write", "load"),
    [
        (_write_static_int8, int8_files.load_int8),
        (_write_int8_weights, quantized_files.load_quantized),
        (int8_files.keep_float32, int8_files.load_int8),
    ],
    ids=["static int8", "int8 weights", "float32"],
)
def test_files_of_a_model_on_a_gpu_are_for_a_cpu(write, load, tmp_path):
    model, (x, _) = cnn().eval(), batch()
    predict = load(write(model, x, tmp_path / "file"))
    assert apart(predict(x.cpu()), model(x)) < 0.1
    with pytest.raises(ValueError, match=r"inputs are on cuda:0, and the file's weights on cpu"):
        predict(x)


class Language(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.lstm = nn.Embedding(9, 16), nn.LSTM(16, 16, batch_first=True)
        self.head = nn.Linear(16, 9)

    def forward(self, codes):
        return self.head(self.lstm(self.table(codes))[0])


def test_what_a_gpu_trained_with_rounding_is_exported_for_a_cpu(tmp_path):
    torch.manual_seed(0)
    model, codes = Language().cuda(), torch.arange(32, device="cuda").reshape(4, 8) % 9
    rounded = quantization_aware_training.prepare_qat(model, codes, weight_bits=8)
    optimizer = torch.optim.SGD(rounded.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        F.cross_entropy(rounded(codes).flatten(0, 1), codes.flatten()).backward()
        optimizer.step()
    quantized = quantization_aware_training.convert_qat(rounded, codes)
    predict = int8_files.load_int8(int8_files.save_as_it_is(quantized, tmp_path / "file"))
    assert apart(predict(codes.cpu()), rounded.eval()(codes)) < 0.05


def test_a_package_of_a_model_on_a_gpu_runs_there(tmp_path):
    model, (x, _) = cnn().eval(), batch(4)
    path = native_export.export_package(model, x, tmp_path / "model.pt2")
    predict = native_export.load_package(path, threads=1)
    wanted = model(x).detach().cpu().numpy()
    np.testing.assert_allclose(predict(x.cpu().numpy()), wanted, rtol=1e-4, atol=1e-5)


# Recipes ----------------------------------------------------------------------------------------


class Dropped(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(16, 64), nn.Linear(64, 10)

    def forward(self, x):
        return self.head(F.dropout(self.body(x), 0.5, self.training))


def dropped():
    torch.manual_seed(0)
    model = Dropped().cuda()
    x, y = torch.randn(32, 16, device="cuda"), torch.arange(32, device="cuda") % 10
    optimizer = sgd(model)
    return model, optimizer, training.make_train_step(model, optimizer, F.cross_entropy), (x, y)


def test_a_resumed_run_draws_the_masks_of_one_that_was_not_ended(tmp_path):
    model, optimizer, step, given = dropped()
    checkpoints.save_checkpoint(tmp_path / "one.pt", model, optimizer, {"step": 0})
    wanted = [step(*given).item() for _ in range(3)]
    model, optimizer, step, given = dropped()
    torch.cuda.manual_seed(9)
    checkpoints.load_checkpoint(tmp_path / "one.pt", model, optimizer)
    assert [step(*given).item() for _ in range(3)] == wanted


def test_the_range_test_puts_the_gpus_random_numbers_back():
    model, optimizer, step, given = dropped()
    before = torch.cuda.get_rng_state()
    learning_rate_finder.find_learning_rate(model, optimizer, step, [given], steps=40)
    assert torch.equal(torch.cuda.get_rng_state(), before)


# Parallel ---------------------------------------------------------------------------------------


def built():
    model = nn.Linear(8, 4)
    for parameter in model.parameters():
        nn.init.constant_(parameter, 0.1)
    return model.cuda(), torch.optim.SGD(model.parameters(), lr=0.1), F.cross_entropy


def launched(count):
    x, y = torch.randn(99, 8, device="cuda"), torch.arange(99, device="cuda") % 4
    run = parallel.Run(replicas=count, global_batch=99, steps=2, seed=0, threads=1)
    make = "pt_impl.parallel.data_parallel:processes"
    return replicas.launch(make, "tests.test_gpu:built", (x, y), run)


def test_a_replica_trains_on_tensors_of_a_gpu():
    torch.manual_seed(0)
    found = launched(1).losses
    torch.manual_seed(0)
    x, y = torch.randn(99, 8, device="cuda"), torch.arange(99, device="cuda") % 4
    (model, optimizer, loss_fn), wanted = built(), []
    for _ in range(2):  # of all samples, in whichever order
        optimizer.zero_grad()
        loss = loss_fn(model(x), y)
        loss.backward()
        optimizer.step()
        wanted.append(loss.item())
    np.testing.assert_allclose(found, wanted, rtol=1e-5)


def test_more_replicas_than_gpus_are_refused():
    with pytest.raises(NotImplementedError, match=r"99 processes need a GPU each, and this"):
        launched(99)
    with pytest.raises(NotImplementedError, match="a GPU a replica: 99"):
        data_parallel.one_process(built, replicas=99)


def test_one_process_trains_as_the_plain_model_does():
    x, y = torch.randn(16, 8, device="cuda"), torch.arange(16, device="cuda") % 4
    model, _, step = data_parallel.one_process(built, replicas=1)
    plain, optimizer, _ = built()
    loss = F.cross_entropy(plain(x), y)
    loss.backward()
    optimizer.step()
    assert apart(step(x, y, 16), loss) < 1e-6
    assert apart(model.weight, plain.weight) < 1e-6


# Diagnosis --------------------------------------------------------------------------------------


def test_a_profile_has_the_time_of_kernels(tmp_path):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2048, 2048), nn.ReLU(), nn.Linear(2048, 2048)).cuda()
    x = torch.randn(4096, 2048, device="cuda")
    step = training.make_train_step(model, sgd(model), F.mse_loss)
    found = profiling.profile_steps(step, [(x, x)], steps=10, folder=str(tmp_path))
    assert "cuda" in (tmp_path / "trace.json").read_text().lower()
    products = [one for one in found.operators if one.flops]
    assert sum(one.flops for one in products) == pytest.approx(5 * 2 * 4096 * 2048**2, rel=0.01)
    assert 0.3 < sum(one.share for one in products) <= 1
    assert all(0.1 < one.of_peak <= 1.2 for one in products)
    assert max(size for _, size in found.memory) > x.nbytes


def test_memory_that_a_step_keeps_on_the_gpu_is_a_leak():
    kept, x = [], torch.zeros(1 << 20, device="cuda")
    leak = memory_growth.watch_memory(lambda x: kept.append(x + 1), [(x,)], rounds=20)
    steady = memory_growth.watch_memory(lambda x: x + 1, [(x,)], rounds=20)
    assert (leak.verdict, steady.verdict) == ("leak", "steady")
    assert leak.per_round == pytest.approx(x.nbytes, rel=0.01)


def test_a_busy_gpu_is_seen_to_be_busy():
    a = torch.randn(8192, 8192, device="cuda")
    with watch_utilization(interval=0.1) as used:
        for _ in range(150):
            a @ a
        torch.cuda.synchronize()
    assert max(gpu.most for gpu in used.gpus) > 0.5
    assert max(gpu.most_bytes for gpu in used.gpus) > a.nbytes
