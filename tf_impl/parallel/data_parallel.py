"""Data parallelism: replicas of a model, each on its part of the batch, on one machine or many.

What it changes: every replica runs forward and backward on its shard of the global batch, gradients
are summed over all of them, and each applies the same update. Shards are disjoint and complete, and
a shard counts by its samples, so n replicas train to the weights of one process with the whole
batch, also where the last batch of an epoch is smaller. `processes` is MultiWorkerMirroredStrategy,
`accumulated` exchanges gradients once in several micro-batches, `compiled` compiles forward and
backward with XLA, `one_process` is MirroredStrategy, over GPUs or logical devices of a CPU, `tpu`
TPUStrategy. `sharded` (ZeRO, FSDP) does not exist here.

BatchNorm sees each replica's shard, and the moving statistics kept are those of the first; with
`synchronised_norm` it sees the global batch, for three small exchanges a layer.

Its twin: `pt_impl/parallel/data_parallel.py`.

Where the frameworks differ and why:
- Variables are mirrored where they are made, so `apply_data_parallel` calls the function that makes
  the model within the strategy's scope. DDP goes around a model that is there.
- tf.distribute sums gradients, DDP divides the sum by the replicas; both weigh a shard's mean loss
  by its share of the samples. The graph's scheduler decides what overlaps; DDP sends buckets.
- `experimental_distribute_dataset` hands out the shards here, a sampler in each process there.
- Variables are whole on each replica: FSDP has no twin. `tpu` has never met one.
- `BatchNormalization(synchronized=True)` runs everywhere; nn.SyncBatchNorm runs on GPUs only.
- Each process opens its port of TF_CONFIG on every interface. Gloo binds to one.
- `fit` works under MirroredStrategy, and equals one device; under MultiWorkerMirroredStrategy that
  of Keras 3 fails (keras#20585), as its gradient accumulation does under both (#20582). One loop
  serves all of them here.
- Keras 3 clips a replica's gradients before they are summed, so optimizers that clip are refused.

When it helps and when it hurts: it helps where a step is long beside the exchange of gradients,
2 (n - 1) / n times their size through each link. Replicas on the cores of one CPU gain nothing.
Dropout draws other masks than one process does, in Keras 3 the same on each replica.

Run it alone: `python -m tf_impl.parallel.data_parallel` trains on one and two replicas. On many
machines: `TF_CONFIG=… python -m tf_impl.parallel.data_parallel BUILD DATA --global-batch N --steps
N --out FILE`.

Copy with it: `shared/atomic.py`, `shared/datasets.py`, `shared/parallel.py`, `shared/photos.py`,
`shared/specs.py`, `shared/weights.py`, `tf_impl/kit/data.py`, `tf_impl/kit/models.py`,
`tf_impl/kit/replicas.py`, `tf_impl/kit/runtime.py`, `tf_impl/kit/training.py`.
"""

import sys
from functools import partial
from glob import glob

import tensorflow as tf

from shared import parallel
from shared.specs import TASKS
from shared.weights import init_weights
from tf_impl.kit import models, training
from tf_impl.kit.replicas import Replica, launch, outputs, synchronise_norms, train


def apply_data_parallel(
    model,
    *,
    bucket_mb: float = 25.0,
    communication: str = "auto",
    synchronised_norm: bool = False,
):
    """Make a model that the processes of TF_CONFIG have in common, each on all of its GPUs.

    model: a function that makes the model, its optimizer and its loss, called within the scope of
    MultiWorkerMirroredStrategy; what it returns is returned. Other techniques are applied in it.
    bucket_mb: of gradients in one exchange. communication: "auto", "ring" or "nccl".

    Raises NotImplementedError for a model that is made already, and an optimizer that clips.
    """
    if isinstance(model, tf.keras.Model):
        raise NotImplementedError("variables are mirrored where they are made: give the function")
    options = tf.distribute.experimental.CommunicationOptions(
        bytes_per_pack=int(bucket_mb * 2**20), implementation=communication
    )
    strategy = tf.distribute.MultiWorkerMirroredStrategy(communication_options=options)
    with strategy.scope():
        return _made(model, synchronised_norm)


def apply_fsdp(
    model,
    *,
    blocks: str = "",
    precision: str = "float32",
    reshard_after_forward: bool = True,
    synchronised_norm: bool = False,
):
    """Nothing here: tf.distribute has no ZeRO."""
    raise NotImplementedError(
        "tf.distribute keeps each variable whole on each replica: it has no ZeRO or FSDP"
    )


def make_train_step(
    model, optimizer, loss_fn, *, micro_batches: int = 1, synchronise_each: bool = False
):
    """Make `step(x, y, samples) -> loss` for what was made within a strategy's scope.

    x and y are what the strategy's `experimental_distribute_dataset` gives the replicas of this
    process of a global batch, and count by their share of it; `samples` is the size of the global
    batch, once for each sample. The losses of all processes add up to the mean over the global
    batch, with the model's own losses. Gradients are exchanged after the last of the micro-batches,
    or after each if `synchronise_each`: the same for more traffic. An activity regulariser, which
    sums over samples in Keras 3, counts by the share, too, as under `fit`.
    """
    variables = model.trainable_variables

    def backward(x, y, share):
        with tf.GradientTape() as tape:
            loss = loss_fn(outputs(model, x), y)
            loss = sum((tf.cast(term, loss.dtype) for term in model.losses), loss)
            loss *= tf.cast(share, loss.dtype)
        return loss, tape.gradient(loss, variables)

    def replica_step(x, y, samples):
        size, whole = tf.shape(samples)[0], samples[0]
        total, gradients = 0.0, [None for _ in variables]
        for part in range(micro_batches):
            begin, end = part * size // micro_batches, (part + 1) * size // micro_batches
            own_x, own_y = (parallel.take(shard, slice(begin, end)) for shard in (x, y))
            before = [gradient for gradient in gradients if gradient is not None]
            with tf.control_dependencies(before):  # one micro-batch after another
                loss, own = backward(own_x, own_y, tf.cast(end - begin, whole.dtype) / whole)
            if synchronise_each and part < micro_batches - 1:
                own = _mean_over_replicas(own)
            gradients = [_sum(old, new) for old, new in zip(gradients, own, strict=True)]
            total += loss
        optimizer.apply_gradients(zip(gradients, variables, strict=True))  # sums over replicas
        return total

    return _on_replicas(model, replica_step)


# Variants: each is called in every process, and makes what trains there ---------------------------


def processes(
    build, *, bucket_mb: float = 25.0, communication: str = "auto", synchronised_norm: bool = False
) -> Replica:
    """MultiWorkerMirroredStrategy: the processes of TF_CONFIG."""
    model, optimizer, loss_fn = apply_data_parallel(
        build,
        bucket_mb=bucket_mb,
        communication=communication,
        synchronised_norm=synchronised_norm,
    )
    return _replica(model, optimizer, make_train_step(model, optimizer, loss_fn))


def accumulated(
    build,
    *,
    micro_batches: int = 4,
    synchronise_each: bool = False,
    bucket_mb: float = 25.0,
    communication: str = "auto",
    synchronised_norm: bool = False,
) -> Replica:
    """Exchange gradients once a step, after the last of its micro-batches."""
    model, optimizer, loss_fn = apply_data_parallel(
        build,
        bucket_mb=bucket_mb,
        communication=communication,
        synchronised_norm=synchronised_norm,
    )
    settings = {"micro_batches": micro_batches, "synchronise_each": synchronise_each}
    return _replica(model, optimizer, make_train_step(model, optimizer, loss_fn, **settings))


def compiled(
    build, *, bucket_mb: float = 25.0, communication: str = "auto", synchronised_norm: bool = False
) -> Replica:
    """Forward and backward as one XLA program on each replica; the exchange stays outside."""
    model, optimizer, loss_fn = apply_data_parallel(
        build, bucket_mb=bucket_mb, communication=communication
    )
    variables = model.trainable_variables

    @tf.function(jit_compile=True)
    def backward(x, y, whole):
        with tf.GradientTape() as tape:
            loss = loss_fn(outputs(model, x), y)
            share = tf.cast(tf.shape(parallel.leaves(x)[0])[0], loss.dtype) / whole
            loss = share * sum((tf.cast(term, loss.dtype) for term in model.losses), loss)
        return loss, tape.gradient(loss, variables)

    def replica_step(x, y, samples):
        loss, gradients = backward(x, y, tf.cast(samples[0], tf.float32))
        optimizer.apply_gradients(zip(gradients, variables, strict=True))
        return loss

    return _replica(model, optimizer, _on_replicas(model, replica_step))


def sharded(
    build,
    *,
    blocks: str = "",
    precision: str = "float32",
    reshard_after_forward: bool = True,
    synchronised_norm: bool = False,
) -> Replica:
    """Nothing here: see `apply_fsdp`."""
    return apply_fsdp(build)


def one_process(
    build, *, replicas: int = 2, communication: str = "auto", synchronised_norm: bool = False
) -> Replica:
    """MirroredStrategy: the GPUs of one machine, or logical devices of its CPU.

    communication: "auto", "nccl", "hierarchical_copy" or "reduce_to_one_device".
    """
    kind = "GPU" if tf.config.list_physical_devices("GPU") else "CPU"
    devices = [f"{kind}:{index}" for index in range(replicas)]
    strategy = tf.distribute.MirroredStrategy(devices, _COPIES[communication]())
    with strategy.scope():
        model, optimizer, loss_fn = _made(build, synchronised_norm)
    return _replica(model, optimizer, make_train_step(model, optimizer, loss_fn))


def tpu(build, *, replicas: int = 8, synchronised_norm: bool = False) -> Replica:
    """TPUStrategy: the cores of this machine's TPU, which have to be as many as the replicas."""
    resolver = tf.distribute.cluster_resolver.TPUClusterResolver("local")
    tf.config.experimental_connect_to_cluster(resolver)
    tf.tpu.experimental.initialize_tpu_system(resolver)  # before anything else runs
    strategy = tf.distribute.TPUStrategy(resolver)
    if strategy.num_replicas_in_sync != replicas:
        raise ValueError(f"a TPU of {strategy.num_replicas_in_sync} cores, not {replicas}")
    with strategy.scope():
        model, optimizer, loss_fn = _made(build, synchronised_norm)
    return _replica(model, optimizer, make_train_step(model, optimizer, loss_fn))


_COPIES = {
    "auto": lambda: None,
    "nccl": tf.distribute.NcclAllReduce,
    "hierarchical_copy": tf.distribute.HierarchicalCopyAllReduce,
    "reduce_to_one_device": tf.distribute.ReductionToOneDevice,
}
_VARIANTS = {f.__name__: f for f in (processes, accumulated, compiled, sharded, one_process, tpu)}


def _made(build, synchronised_norm: bool) -> tuple:
    """Model, optimizer and loss function, made within the scope of a strategy."""
    model, optimizer, loss_fn = build()
    if hasattr(tf.keras, "StatelessScope"):  # Keras 3
        for name in ("clipnorm", "global_clipnorm", "clipvalue", "gradient_accumulation_steps"):
            if getattr(optimizer, name, None):
                raise NotImplementedError(
                    f"{name}: Keras 3 does this on each replica, before gradients are summed"
                )
    if synchronised_norm:
        synchronise_norms(model)
    return model, optimizer, loss_fn


def _distribute(strategy, dataset):
    """Give each replica its part of each global batch, and each process what its replicas need.

    AutoShardPolicy.DATA: all processes read the whole dataset, in the same order, and keep their
    parts of each batch. FILE, which AUTO tries first, would give them other files, of other sizes.
    """
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.DATA
    return strategy.experimental_distribute_dataset(dataset.with_options(options))


def _replica(model, optimizer, step) -> Replica:
    return Replica(model, optimizer, step, partial(_distribute, model.distribute_strategy))


def _on_replicas(model, replica_step):
    """Let `replica_step` run on each replica of this process, and add up what they return."""
    strategy = model.distribute_strategy

    @tf.function(jit_compile=False, reduce_retracing=True)
    def step(x, y, samples):
        losses = strategy.run(replica_step, args=(x, y, samples))
        return tf.add_n(strategy.experimental_local_results(losses))

    return step


def _mean_over_replicas(gradients: list) -> list:
    """What the optimizer, which will sum it over the replicas, makes the sum of."""
    replica = tf.distribute.get_replica_context()
    reached = [own for own in gradients if own is not None]
    if any(isinstance(own, tf.IndexedSlices) for own in reached):
        raise NotImplementedError("synchronise_each: sparse gradients would count several times")
    means = iter(replica.all_reduce(tf.distribute.ReduceOp.MEAN, reached))
    return [None if own is None else next(means) for own in gradients]


def _sum(old, new):
    """Of two gradients, of which those of embeddings stay sparse."""
    if old is None or new is None:
        return old if new is None else new
    if isinstance(old, tf.IndexedSlices) and isinstance(new, tf.IndexedSlices):
        values = tf.concat([old.values, new.values], 0)
        indices = tf.concat([old.indices, new.indices], 0)
        return tf.IndexedSlices(values, indices, new.dense_shape)
    return tf.convert_to_tensor(old) + tf.convert_to_tensor(new)


# Programs -----------------------------------------------------------------------------------------


def train_data_parallel(
    build,
    dataset,
    run,
    *,
    variant: str = "processes",
    micro_batches: int = 1,
    synchronise_each: bool = False,
    synchronised_norm: bool = False,
    bucket_mb: float = 25.0,
    communication: str = "auto",
    blocks: str = "",
    precision: str = "float32",
    reshard_after_forward: bool = True,
) -> parallel.Result:
    """Train on replicas of this machine, each on its shard of every global batch.

    build: "module:function", importable from here; each process calls it, and gets model, optimizer
    and `loss_fn(output, y)`, the mean over samples. dataset: a folder with train_x and train_y, as
    `shared.parallel.save_samples` writes arrays, tuples and dicts. run: a `shared.parallel.Run`.
    variant: the name of a function of this file, whose settings are among the others.

    Processes meet on the loopback, but TensorFlow's servers listen on every interface.
    Raises, before anything is started, ValueError for settings that don't fit, and
    NotImplementedError for a variant that this framework or machine lacks; RuntimeError with what a
    replica said where the run fails (NotImplementedError where it refused): no process is left
    then.
    """
    chosen = {
        "variant": variant,
        "micro_batches": micro_batches,
        "synchronise_each": synchronise_each,
        "synchronised_norm": synchronised_norm,
        "bucket_mb": bucket_mb,
        "communication": communication,
        "blocks": blocks,
        "precision": precision,
        "reshard_after_forward": reshard_after_forward,
    }
    parallel.find(build)
    parallel.check_chosen(chosen, _VARIANTS)
    parallel.check(dataset, run.replicas, vars(run) | chosen)
    _check_machine(run.replicas, chosen)
    processes = 1 if variant in ("one_process", "tpu") else run.replicas
    return launch(__spec__.name, build, dataset, vars(run) | chosen, processes=processes)


def _check_machine(replicas: int, settings: dict) -> None:
    """Raise what no replica has to be started for."""
    variant, gpus = settings["variant"], len(tf.config.list_physical_devices("GPU"))
    if variant == "sharded":
        apply_fsdp(None)
    if variant == "tpu" and not glob("/dev/accel*") + glob("/dev/vfio/[0-9]*"):
        raise NotImplementedError("TPUStrategy needs a TPU, and this machine has none")
    if variant == "compiled" and settings["synchronised_norm"]:
        raise NotImplementedError(f"{variant}: BatchNorm can't be synchronised there")
    given, known = settings["communication"], ("auto", "ring", "nccl")
    known = {"one_process": tuple(_COPIES), "tpu": known[:1]}.get(variant, known)
    parallel.check_devices(replicas, given, known=known, gpus=gpus, variant=variant)


def digits_cnn() -> tuple:
    """Return model, optimizer and loss of the digits CNN, its weights from seed 0."""
    task = TASKS["digits-cnn"]
    model = models.build(task.model, init_weights(task.model, seed=0))
    return model, training.make_optimizer(model, task.recipe), training.cross_entropy


def main() -> None:
    """Be one process of a run, or without options train the digits CNN on one and two replicas."""
    if not sys.argv[1:]:
        return parallel.demonstrate(train_data_parallel, f"{__spec__.name}:digits_cnn")
    options = parallel.options(__spec__.name).parse_args()
    with parallel.one_line_errors():
        parallel.check_chosen({"variant": options.variant}, _VARIANTS)
        _check_machine(1, vars(options))
        train(_VARIANTS, options)


if __name__ == "__main__":
    main()
