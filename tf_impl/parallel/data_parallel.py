"""Data parallelism: replicas of a model, each on its part of the batch, on one machine or many.

What it changes: every replica runs forward and backward on its shard of the global batch, gradients
are summed over all of them, and each applies the same update. Shards are disjoint and complete, and
a shard counts by its samples, so n replicas train to the weights of one process with the whole
batch, also where the last batch of an epoch is smaller. `processes` is MultiWorkerMirroredStrategy,
`accumulated` exchanges gradients once in several micro-batches, `compiled` compiles forward and
backward with XLA, `one_process` is MirroredStrategy, over GPUs or logical devices of a CPU, `tpu`
TPUStrategy.

BatchNorm sees each replica's shard, and the moving statistics kept are those of the first; with
`synchronised_norm` it sees the global batch, for three small exchanges a layer.

A loss has to be a mean over samples. One with class weights, or over the labels that are no padding
(`ignore_class`), is not: shards with few of them weigh more, and the weights end elsewhere. Let
`loss_fn` divide the sum by the samples instead.

Its twin: `pt_impl/parallel/data_parallel.py`.

Where the frameworks differ and why:
- Variables are mirrored where they are made, so `apply_data_parallel` calls the function that makes
  the model within the strategy's scope. DDP goes around a model that is there.
- tf.distribute sums gradients, DDP divides the sum by the replicas; both weigh a shard's mean loss
  by its share of the samples. The graph's scheduler decides what overlaps; DDP sends buckets.
- `experimental_distribute_dataset` hands out the shards here, a sampler in each process there.
- Variables are whole on each replica: FSDP has no twin. `tpu` has never met one.
- `BatchNormalization(synchronized=True)` runs everywhere; nn.SyncBatchNorm runs on GPUs only.
- Each process opens its port of TF_CONFIG on every interface, gloo binds to one. On one machine
  `launch` gives the processes a network of their own.
- `fit` works under MirroredStrategy, and equals one device; under MultiWorkerMirroredStrategy that
  of Keras 3 fails (keras#20585), as its gradient accumulation does under both (#20582). One loop
  serves all of them here.
- Keras 3 clips a replica's gradients, and looks for overflow in them, before they are summed, so
  optimizers that clip and LossScaleOptimizer are refused.

When it helps and when it hurts: it helps where a step is long beside the exchange of gradients,
2 (n - 1) / n times their size through each link. Replicas on the cores of one CPU gain nothing.
Dropout draws other masks than one process does, in Keras 3 the same on each replica.

Run it alone: `python -m tf_impl.parallel.data_parallel` trains on one and two replicas. Its
functions are called in each process of `TF_CONFIG`: `tf_impl/kit/replicas.py` starts them here, and
says how on many machines.

Copy with it: `tf_impl/kit/calling.py`, `tf_impl/kit/collectives.py`.
"""

from glob import glob

import tensorflow as tf

from tf_impl.kit.calling import call_arguments
from tf_impl.kit.collectives import synchronise_norms


def apply_data_parallel(
    model,
    *,
    bucket_mb: float = 25.0,
    communication: str = "auto",
    synchronised_norm: bool = False,
):
    """Make a model that the processes of TF_CONFIG have in common, each on all of its GPUs.

    Args:
        model: a function that makes the model, its optimizer and its loss; it is called within the
            scope of MultiWorkerMirroredStrategy, in which other techniques are applied, too.
        bucket_mb: of gradients in one exchange.
        communication: "auto", "ring" or "nccl".
        synchronised_norm: let BatchNormalization see the global batch.

    Returns what the function does.
    Raises NotImplementedError for a model that is made already, and an optimizer that clips or
    scales the loss.
    """
    if isinstance(model, tf.keras.Model):
        raise NotImplementedError("variables are mirrored where they are made: give the function")
    options = tf.distribute.experimental.CommunicationOptions(
        bytes_per_pack=int(bucket_mb * 2**20), implementation=communication
    )
    strategy = tf.distribute.MultiWorkerMirroredStrategy(communication_options=options)
    with strategy.scope():
        return _made(model, synchronised_norm)


def distribute(model, batches):
    """Give each replica its shard of each global batch, and the samples of the whole.

    batches: a tf.data.Dataset of structures of tensors with samples along their first axis, or of
    None. Its elements become (element, samples): beside each sample the size of its global batch.

    AutoShardPolicy.DATA: all processes read the whole dataset, in the same order, and keep their
    parts of each batch. FILE, which AUTO tries first, would give them other files, of other sizes.
    """

    def with_size(*batch):
        first = next(part for part in tf.nest.flatten(batch) if part is not None)
        samples = tf.shape(first)[:1]
        return batch, tf.repeat(samples, samples[0])

    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.DATA
    batches = batches.map(with_size).with_options(options)
    return model.distribute_strategy.experimental_distribute_dataset(batches)


def make_train_step(
    model, optimizer, loss_fn, *, micro_batches: int = 1, synchronise_each: bool = False
):
    """Make `step(x, y, samples) -> loss` for what was made within a strategy's scope.

    x, y and samples are the shards that `distribute` gives the replicas of this process, which
    count by their share of the global batch; the losses of all processes add up to the mean over
    it, with the model's own losses. An activity regulariser, whose sum Keras divides by the samples
    of a shard, counts by the share, too, as under `fit`.

    Args:
        loss_fn: `loss_fn(output, y)`, the mean over samples.
        micro_batches: parts of a shard, one after another; gradients are exchanged with the last.
        synchronise_each: exchange them with each part: the same for more traffic.

    The step raises tf.errors.InvalidArgumentError for shards of fewer samples than micro-batches.
    """
    variables = model.trainable_variables

    def replica_step(x, y, samples):
        size, whole = tf.shape(samples)[0], samples[0]
        # The mean over a micro-batch without samples is no number, and stays in BatchNorm.
        few = f"too few samples of a replica for {micro_batches} micro-batches"
        with tf.control_dependencies([tf.debugging.assert_greater_equal(size, micro_batches, few)]):
            size = tf.identity(size)
        total, gradients = 0.0, [None for _ in variables]
        for part in range(micro_batches):
            rows = slice(part * size // micro_batches, (part + 1) * size // micro_batches)
            own_x, own_y = tf.nest.map_structure(
                lambda shard, rows=rows: None if shard is None else shard[rows], (x, y)
            )
            share = tf.cast(rows.stop - rows.start, tf.float64) / tf.cast(whole, tf.float64)
            before = [gradient for gradient in gradients if gradient is not None]
            with tf.control_dependencies(before):  # one micro-batch after another
                loss, own = _backward(model, loss_fn, own_x, own_y, share)
            if synchronise_each and part < micro_batches - 1:
                own = _mean_over_replicas(own)
            gradients = [_sum(old, new) for old, new in zip(gradients, own, strict=True)]
            total += loss
        optimizer.apply_gradients(zip(gradients, variables, strict=True))  # sums over replicas
        return total

    return _on_replicas(model, replica_step)


# Variants: each is called in every process, and returns model, optimizer and step ----------------


def processes(
    build, *, bucket_mb: float = 25.0, communication: str = "auto", synchronised_norm: bool = False
) -> tuple:
    """MultiWorkerMirroredStrategy: the processes of TF_CONFIG."""
    model, optimizer, loss_fn = apply_data_parallel(
        build,
        bucket_mb=bucket_mb,
        communication=communication,
        synchronised_norm=synchronised_norm,
    )
    return model, optimizer, make_train_step(model, optimizer, loss_fn)


def accumulated(
    build,
    *,
    micro_batches: int = 4,
    synchronise_each: bool = False,
    synchronised_norm: bool = False,
) -> tuple:
    """Exchange gradients once a step, after the last of its micro-batches."""
    model, optimizer, loss_fn = apply_data_parallel(build, synchronised_norm=synchronised_norm)
    step = make_train_step(
        model,
        optimizer,
        loss_fn,
        micro_batches=micro_batches,
        synchronise_each=synchronise_each,
    )
    return model, optimizer, step


def compiled(build) -> tuple:
    """Forward and backward as one XLA program on each replica; the exchange stays outside."""
    model, optimizer, loss_fn = apply_data_parallel(build)

    @tf.function(jit_compile=True)
    def backward(x, y, share):
        return _backward(model, loss_fn, x, y, share)

    def replica_step(x, y, samples):
        share = tf.cast(tf.shape(samples)[0], tf.float64) / tf.cast(samples[0], tf.float64)
        loss, gradients = backward(x, y, share)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return loss

    return model, optimizer, _on_replicas(model, replica_step)


def one_process(build, *, replicas: int = 2, communication: str = "auto") -> tuple:
    """MirroredStrategy: the GPUs of one machine, or logical devices of its CPU.

    communication: "auto", "nccl", "hierarchical_copy" or "reduce_to_one_device".
    """
    ways = {
        "auto": None,
        "nccl": tf.distribute.NcclAllReduce(),
        "hierarchical_copy": tf.distribute.HierarchicalCopyAllReduce(),
        "reduce_to_one_device": tf.distribute.ReductionToOneDevice(),
    }
    if communication not in ways:
        raise ValueError(f"unknown communication {communication!r}: {', '.join(ways)}")
    kind = "GPU" if tf.config.list_physical_devices("GPU") else "CPU"
    devices = [f"{kind}:{index}" for index in range(replicas)]
    strategy = tf.distribute.MirroredStrategy(devices, ways[communication])
    with strategy.scope():
        model, optimizer, loss_fn = _made(build)
    return model, optimizer, make_train_step(model, optimizer, loss_fn)


def tpu(build, *, replicas: int = 8) -> tuple:
    """TPUStrategy: the cores of this machine's TPU, which have to be as many as the replicas.

    Raises NotImplementedError where there is no TPU.
    """
    if not glob("/dev/accel*") + glob("/dev/vfio/[0-9]*"):
        raise NotImplementedError("TPUStrategy needs a TPU, and this machine has none")
    resolver = tf.distribute.cluster_resolver.TPUClusterResolver("local")
    tf.config.experimental_connect_to_cluster(resolver)
    tf.tpu.experimental.initialize_tpu_system(resolver)  # before anything else runs
    strategy = tf.distribute.TPUStrategy(resolver)
    if strategy.num_replicas_in_sync != replicas:
        raise ValueError(f"a TPU of {strategy.num_replicas_in_sync} cores, not {replicas}")
    with strategy.scope():
        model, optimizer, loss_fn = _made(build)
    return model, optimizer, make_train_step(model, optimizer, loss_fn)


# Parts ------------------------------------------------------------------------------------------


def _made(build, synchronised_norm: bool = False) -> tuple:
    """Model, optimizer and loss function, made within the scope of a strategy."""
    model, optimizer, loss_fn = build()
    if not hasattr(optimizer, "build"):
        raise NotImplementedError(
            "a legacy optimizer: take the one of its name in keras.optimizers"
        )
    if hasattr(tf.keras, "StatelessScope"):  # Keras 3
        for name in ("clipnorm", "global_clipnorm", "clipvalue", "gradient_accumulation_steps"):
            if getattr(optimizer, name, None):
                raise NotImplementedError(
                    f"{name}: Keras 3 does this on each replica, before gradients are summed"
                )
        if optimizer.use_ema and optimizer.ema_overwrite_frequency:
            raise NotImplementedError(
                "ema_overwrite_frequency: Keras 3 overwrites outside of replicas alone: let"
                " finalize_variable_values do it after training"
            )
        scales = isinstance(optimizer, tf.keras.mixed_precision.LossScaleOptimizer)
        if scales or getattr(optimizer, "loss_scale_factor", None):
            raise NotImplementedError(
                "a scaled loss: Keras 3 looks for overflow on each replica, before gradients "
                "are summed: train in bfloat16, which needs no scale"
            )
    if synchronised_norm:
        synchronise_norms(model)
    # Its state is made here: what a step's graph makes can't be copied from replica to replica.
    optimizer.build(model.trainable_variables)
    return model, optimizer, loss_fn


def _backward(model, loss_fn, x, y, share) -> tuple:
    """Loss and gradients of a part of the global batch, which count by its share."""
    arguments, named = call_arguments(model, x)
    with tf.GradientTape() as tape:
        loss = loss_fn(model(*arguments, **named, training=True), y)
        loss = sum((tf.cast(term, loss.dtype) for term in model.losses), loss)
        loss *= tf.cast(share, loss.dtype)
    return loss, tape.gradient(loss, model.trainable_variables)


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


def main() -> None:
    """Train the digits CNN on one and two replicas; print rates, losses and their distance."""
    import tempfile
    from pathlib import Path
    from statistics import median

    from shared import datasets, parallel
    from shared.specs import TASKS
    from tf_impl.kit import replicas

    with tempfile.TemporaryDirectory() as folder:
        folder = datasets.materialise(TASKS["digits-cnn"].dataset, Path(folder))
        digits = tuple(map(tf.constant, datasets.load(folder, "train")))
    make, build = f"{__spec__.name}:processes", "tf_impl.kit.examples:digits_cnn"
    results = []
    print("replicas  samples/s  last loss")
    for count in (1, 2):
        run = parallel.Run(replicas=count, global_batch=64, steps=50)
        results.append(replicas.launch(make, build, digits, run, {"synchronised_norm": True}))
        rate = 64 / median(results[-1].step_s)
        print(f"{count:8}{rate:11.0f}{results[-1].losses[-1]:11.4f}")
    print(f"largest relative distance of a weight tensor: {parallel.distance(*results):.1e}")


if __name__ == "__main__":
    main()
