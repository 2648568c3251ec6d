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
- tf.distribute sums gradients, DDP divides the sum by the replicas; both weigh a shard's mean loss
  by its share of the samples. The graph's scheduler decides what overlaps; DDP sends buckets.
- Variables are whole on each replica: FSDP has no twin. `tpu` has never met one.
- `BatchNormalization(synchronized=True)` runs everywhere; nn.SyncBatchNorm runs on GPUs only.
- Each process opens its port of TF_CONFIG on every interface. Gloo binds to one.
- Keras 3's `fit` and accumulation fail under these strategies (keras#20585, #20582): hence loops.

When it helps and when it hurts: it helps where a step is long beside the exchange of gradients,
2 (n - 1) / n times their size through each link. Replicas on the cores of one CPU gain nothing.

Run it alone: `python -m tf_impl.parallel.data_parallel` trains on one and two replicas. On many
machines: `TF_CONFIG=… python -m tf_impl.parallel.data_parallel BUILD DATA --global-batch N --steps
N --out FILE`.
"""

import sys
from glob import glob

import tensorflow as tf

from shared import parallel
from shared.specs import TASKS
from shared.weights import init_weights
from tf_impl.kit import models, training
from tf_impl.kit.replicas import Replica, launch, synchronise_norms, train


def train_data_parallel(
    build,
    dataset,
    *,
    replicas: int,
    global_batch: int,
    steps: int,
    seed: int,
    variant: str = "processes",
    micro_batches: int = 1,
    synchronise_each: bool = False,
    synchronised_norm: bool = False,
    bucket_mb: float = 25.0,
    communication: str = "auto",
    threads: int = 0,
    checkpoint: str = "",
    save_every: int = 0,
    timeout_s: float = 300.0,
) -> parallel.Result:
    """Train on `replicas` replicas of this machine, each on its shard of every global batch.

    build: "module:function", importable from here; each process calls it, and gets model, optimizer
    and `loss_fn(output, y)`, the mean over samples. dataset: a folder with train_x.npy and
    train_y.npy. variant: the name of a function of this file, whose settings are among the others.
    threads: of all replicas together, 0 for all cores; each has an equal part, at least one.
    checkpoint: a folder to save to every `save_every` steps and at the end (0: at the end alone); a
    run goes on from the last one there. timeout_s: how long a replica waits for others.

    Processes meet on the loopback. Raises, before anything is started, ValueError for settings that
    don't fit, and NotImplementedError for a variant that this framework or machine lacks;
    RuntimeError with what a replica said where the run fails: no process is left then.
    """
    settings = {k: v for k, v in locals().items() if k not in ("build", "dataset", "replicas")}
    parallel.find(build, variant=variant, variants=_VARIANTS)
    parallel.check(dataset, replicas, settings)
    _check_machine(replicas, settings)
    processes = 1 if variant in ("one_process", "tpu") else replicas
    settings |= {"threads": parallel.threads_each(threads, processes)}
    settings |= {"replicas": replicas // processes}
    return launch(__spec__.name, build, dataset, settings, processes=processes)


# Variants: each is called in every process, and makes what trains there ---------------------------


def processes(
    build, *, bucket_mb: float = 25.0, communication: str = "auto", synchronised_norm: bool = False
) -> Replica:
    """MultiWorkerMirroredStrategy: the processes of TF_CONFIG, each with all of its GPUs.

    bucket_mb: of gradients in one exchange. communication: "auto", "ring" or "nccl".
    """
    strategy = _multi_worker(bucket_mb, communication)
    return _mirrored(strategy, build, synchronised_norm)


def accumulated(
    build,
    *,
    micro_batches: int = 4,
    synchronise_each: bool = False,
    bucket_mb: float = 25.0,
    communication: str = "auto",
    synchronised_norm: bool = False,
) -> Replica:
    """Exchange gradients once a step, after the last of its micro-batches.

    synchronise_each: after each: the same gradient for more traffic.
    """
    strategy = _multi_worker(bucket_mb, communication)
    with strategy.scope():
        model, optimizer, loss_fn = build()
    if synchronised_norm:
        synchronise_norms(model)
    variables = model.trainable_variables

    def replica_step(x, y, samples):
        replica, count = tf.distribute.get_replica_context(), strategy.num_replicas_in_sync
        total, summed = 0.0, [tf.zeros_like(variable) for variable in variables]
        for part in range(micro_batches):
            rows = slice(part * len(x) // micro_batches, (part + 1) * len(x) // micro_batches)
            with tf.control_dependencies(summed), tf.GradientTape() as tape:  # one after another
                loss = loss_fn(model(x[rows], training=True), y[rows]) * (len(y[rows]) / samples)
            gradients = tape.gradient(loss, variables, unconnected_gradients="zero")
            if synchronise_each and part < micro_batches - 1:
                # The optimizer will sum once more.
                gradients = replica.all_reduce(tf.distribute.ReduceOp.SUM, gradients)
                gradients = [gradient / count for gradient in gradients]
            summed = [old + new for old, new in zip(summed, gradients, strict=True)]
            total += loss
        optimizer.apply_gradients(zip(summed, variables, strict=True))
        return total

    return Replica.of(strategy, model, optimizer, replica_step)


def compiled(
    build, *, bucket_mb: float = 25.0, communication: str = "auto", synchronised_norm: bool = False
) -> Replica:
    """Forward and backward as one XLA program on each replica; the exchange stays outside."""
    strategy = _multi_worker(bucket_mb, communication)
    with strategy.scope():
        model, optimizer, loss_fn = build()
    variables = model.trainable_variables

    @tf.function(jit_compile=True)
    def backward(x, y, samples):
        with tf.GradientTape() as tape:
            loss = loss_fn(model(x, training=True), y) * (len(x) / samples)
        return loss, tape.gradient(loss, variables)

    def replica_step(x, y, samples):
        loss, gradients = backward(x, y, samples)
        optimizer.apply_gradients(zip(gradients, variables, strict=True))
        return loss

    return Replica.of(strategy, model, optimizer, replica_step)


def sharded(build, *, synchronised_norm: bool = False) -> Replica:
    """Nothing here: tf.distribute has no ZeRO."""
    raise NotImplementedError(
        "tf.distribute keeps each variable whole on each replica: it has no ZeRO or FSDP"
    )


def one_process(
    build, *, replicas: int = 2, communication: str = "auto", synchronised_norm: bool = False
) -> Replica:
    """MirroredStrategy: the GPUs of one machine, or logical devices of its CPU.

    communication: "auto", "nccl", "hierarchical_copy" or "reduce_to_one_device".
    """
    kind = "GPU" if tf.config.list_physical_devices("GPU") else "CPU"
    strategy = tf.distribute.MirroredStrategy(
        [f"{kind}:{index}" for index in range(replicas)], _COPIES[communication]()
    )
    return _mirrored(strategy, build, synchronised_norm)


def tpu(build, *, replicas: int = 8, synchronised_norm: bool = False) -> Replica:
    """TPUStrategy: the cores of this machine's TPU, which have to be as many as the replicas."""
    resolver = tf.distribute.cluster_resolver.TPUClusterResolver("local")
    tf.config.experimental_connect_to_cluster(resolver)
    tf.tpu.experimental.initialize_tpu_system(resolver)  # before anything else runs
    strategy = tf.distribute.TPUStrategy(resolver)
    if strategy.num_replicas_in_sync != replicas:
        raise ValueError(f"a TPU of {strategy.num_replicas_in_sync} cores, not {replicas}")
    return _mirrored(strategy, build, synchronised_norm)


_COPIES = {
    "auto": lambda: None,
    "nccl": tf.distribute.NcclAllReduce,
    "hierarchical_copy": tf.distribute.HierarchicalCopyAllReduce,
    "reduce_to_one_device": tf.distribute.ReductionToOneDevice,
}
_VARIANTS = {f.__name__: f for f in (processes, accumulated, compiled, sharded, one_process, tpu)}


def _mirrored(strategy, build, synchronised_norm: bool) -> Replica:
    """What `processes`, `one_process` and `tpu` do within their strategy."""
    with strategy.scope():
        model, optimizer, loss_fn = build()
    if synchronised_norm:
        synchronise_norms(model)
    variables = model.trainable_variables

    def replica_step(x, y, samples):
        with tf.GradientTape() as tape:
            loss = loss_fn(model(x, training=True), y) * (len(x) / samples)
        gradients = tape.gradient(loss, variables)
        optimizer.apply_gradients(zip(gradients, variables, strict=True))  # sums over replicas
        return loss

    return Replica.of(strategy, model, optimizer, replica_step)


def _multi_worker(bucket_mb: float, communication: str) -> tf.distribute.Strategy:
    options = tf.distribute.experimental.CommunicationOptions(
        bytes_per_pack=int(bucket_mb * 2**20), implementation=communication
    )
    return tf.distribute.MultiWorkerMirroredStrategy(communication_options=options)


def _check_machine(replicas: int, settings: dict) -> None:
    """Raise what no replica has to be started for."""
    variant, gpus = settings["variant"], len(tf.config.list_physical_devices("GPU"))
    if variant == "sharded":
        sharded(None)
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
        _check_machine(1, vars(options))
        train(_VARIANTS, options)


if __name__ == "__main__":
    main()
