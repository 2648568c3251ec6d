"""Tensor parallelism: parts of the same layers on several devices; with replicas, a hybrid.

    mesh = init_device_mesh("cuda", (2, 2), mesh_dim_names=("data", "model"))
    apply_tensor_parallel(model, mesh, plan_pairs(model, pairs="block*.up > block*.down"))
    step = make_train_step(model, optimizer, loss_fn, mesh)

What it changes: each device computes a part of each pair of dense layers. The first of a pair is
split by its outputs, the second by its inputs, and the pair ends with one sum over all devices. The
backward pass has another sum (Megatron-LM, Shoeybi et al., 2019). In the hybrid each of several
replicas is split like this, and gets a part of the batch. Losses and weights are those of one
device with the whole batch.

Its twin: `tf_impl/parallel/tensor_parallel.py`.

Where the frameworks differ and why:
- PyTorch has one process per part, and a plan that names modules (`parallelize_module`).
- TensorFlow has one process with a device per part. Variables have a layout (DTensor), and the
  compiler decides what is sent. Keras 3's distribution works only with JAX, so models are called
  without their variables (`stateless_call`).
- The hybrid shards parameters, gradients and optimizer state over the replicas in PyTorch (FSDP2).
  In TensorFlow they are whole in each replica.
- In the hybrid PyTorch's BatchNorm sees a replica's part of the batch, and one replica's running
  statistics are kept. TensorFlow's sees the whole batch.

When it helps and when it hurts: it helps if layers are wide and links are very fast: each pair
costs two sums of activations per step, during which all devices wait. Every device computes the
other layers in full. Dropout draws other masks.

Run it alone: `python -m pt_impl.parallel.tensor_parallel` prints one process against two and four.
Its functions are called in each of several processes: `pt_impl/kit/replicas.py` starts them.

Copy with it: `pt_impl/kit/calling.py`, `pt_impl/kit/checks/tensor_parallel.py`, `shared/pairs.py`.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from pt_impl.kit.calling import call, rows
from pt_impl.kit.checks.tensor_parallel import check_layer, check_optimizer, check_tensor_parallel
from shared.pairs import check_pair, match_pairs


def apply_tensor_parallel(model, mesh, plan):
    """Split layers over the dimension "model" of a mesh of devices, in place, and return the model.

    Make the optimizer afterwards, with `foreach=False`: such kernels refuse whole tensors beside
    parts. Where "data", the mesh's other dimension, is larger than 1, replicas share what is left:
    FSDP2, a group for each block that holds one pair.

    Args:
        plan: name of a layer -> "outputs" or "inputs", by which it is split, as of `plan_pairs`.
    """
    styles = {"outputs": ColwiseParallel, "inputs": RowwiseParallel}
    layers = {name: styles[split]() for name, split in plan.items()}
    parallelize_module(model, mesh["model"], layers)
    if mesh["data"].size() > 1:
        for block in [*_blocks(model, plan), model]:
            fully_shard(block, mesh=mesh["data"])
    return model


def plan_pairs(model, *, pairs: str, shards: int = 2):
    """Return a plan that splits pairs of layers: the first by outputs, the second by inputs.

    Args:
        pairs: "first > second", separated by commas: names of `nn.Linear`, or patterns with *, ?
            and [] whose matches are paired in order. What lies between a pair works element by
            element.
        shards: devices that share each pair.

    Raises ValueError for names that are not there and sizes that do not divide, NotImplementedError
    for layers that can't be split.
    """
    check_tensor_parallel(model)
    modules, plan = dict(model.named_modules()), {}
    for first, second in match_pairs(pairs, [name for name in modules if name]):
        for name in (first, second):
            check_layer(name, modules[name])
        sizes = modules[first].out_features, modules[second].in_features
        check_pair(first, second, sizes, shards)
        plan |= {first: "outputs", second: "inputs"}
    return plan


def make_train_step(model, optimizer, loss_fn, mesh):
    """Make `step(x, y, samples) -> loss`, which takes the batch of all replicas, each its part.

    The losses of all processes add up to the mean over the batch.
    """
    replicas, replica = mesh["data"].size(), mesh["data"].get_local_rank()
    model.train()

    def step(x, y, samples):
        start, stop = (place * samples // replicas for place in (replica, replica + 1))
        own_x, own_y = rows((x, y), start, stop)
        optimizer.zero_grad(set_to_none=True)
        share = (stop - start) * replicas / samples  # 1 where all have as many
        loss = loss_fn(call(model, own_x), own_y) * share
        loss.backward()  # FSDP2 takes the mean over the replicas
        optimizer.step()
        return loss.detach() / mesh.size()  # all shards of a replica have the same

    return step


# Variants: each is called in every process, and returns model, optimizer and step ----------------


def tensor_parallel(build, *, pairs: str, shards: int = 2) -> tuple:
    """Pairs of dense layers split over all processes: a hybrid of one replica."""
    return hybrid(build, pairs=pairs, shards=shards)


def hybrid(build, *, pairs: str, shards: int = 2) -> tuple:
    """Replicas of the model on their parts of each batch, each split over `shards` processes.

    There are as many replicas as `shards` go into all processes. pairs: as in `plan_pairs`.
    """
    model, optimizer, loss_fn = build()
    plan = plan_pairs(model, pairs=pairs, shards=shards)
    groups = check_optimizer(model, optimizer)
    device = next(model.parameters()).device.type
    shape = (dist.get_world_size() // shards, shards)
    mesh = init_device_mesh(device, shape, mesh_dim_names=("data", "model"))
    apply_tensor_parallel(model, mesh, plan)
    parts = dict(model.named_parameters())  # other objects, unknown to the optimizer yet
    for group, names in zip(optimizer.param_groups, groups, strict=True):
        group["params"] = [parts[name] for name in names]
        group["foreach"] = False
    return model, optimizer, make_train_step(model, optimizer, loss_fn, mesh)


def _blocks(model: nn.Module, plan: dict[str, str]) -> list[nn.Module]:
    """For each pair the largest module that holds it and no layer of another pair."""
    named, layers = dict(model.named_modules()), list(plan)
    blocks = []
    for pair in zip(layers[::2], layers[1::2], strict=True):
        holding = [
            name
            for name in named
            if name and {layer for layer in layers if layer.startswith(f"{name}.")} == set(pair)
        ]
        blocks += holding[:1]  # outer modules come first
    return [named[name] for name in blocks if not isinstance(named[name], nn.ModuleList)]


def main() -> None:
    """Print steps of one process, of two with parts of each block, and of four."""
    from statistics import median

    from pt_impl.kit import replicas
    from shared.parallel import Run

    codes, here = torch.randint(98, (80, 64)), __spec__.name
    build, pairs = "pt_impl.kit.examples:text_gpt_wide", {"pairs": "block*.up > block*.down"}
    print("text-gpt-wide, batch 8: ms a step, last loss")
    for name, make, count, parts, settings in (
        ("one process", "pt_impl.parallel.data_parallel:processes", 1, 1, {}),
        ("tensor parallel", f"{here}:tensor_parallel", 1, 2, pairs),
        ("hybrid", f"{here}:hybrid", 2, 2, pairs),
    ):
        run = Run(replicas=count, parts=parts, global_batch=8, steps=10)
        result = replicas.launch(make, build, (codes, codes), run, settings)
        print(f"{name:16}{1e3 * median(result.step_s):8.1f}{result.losses[-1]:9.4f}")


if __name__ == "__main__":
    main()
