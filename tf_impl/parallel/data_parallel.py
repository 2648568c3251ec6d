"""Data parallelism: replicas of a model, each with a part of the batch, on one machine or many.

    model, optimizer, loss_fn = apply_data_parallel(build)  # in each process of TF_CONFIG
    step = make_train_step(model, optimizer, loss_fn)
    for (x, y), samples in distribute(model, dataset):
        loss = step(x, y, samples)

What it changes: every replica runs the forward and backward pass on its part of the global batch,
gradients are summed over all, and each applies the same update. Parts are weighted by their
samples, so n replicas give the weights of one process with the whole batch, even if the last batch
is smaller. BatchNorm sees each replica's part, unless `synchronised_norm`. Dropout draws other
masks. The loss has to be a mean over samples. With class weights, or a mean without padding
(`ignore_index`, in Keras `ignore_class`), parts with few labels weigh more. Then let `loss_fn`
divide the sum by the number of samples.

Its twin: `pt_impl/parallel/data_parallel.py`, which says where the frameworks differ.

When it helps and when it hurts: it helps if a step takes long compared with the exchange of
gradients: 2 (n - 1) / n times their size through each replica's link. Replicas on the cores of one
CPU gain nothing.

Run it alone: `python -m tf_impl.parallel.data_parallel` trains on one and two replicas.
`tf_impl/kit/replicas.py` starts the processes, and says how on many machines. Each opens its port
of TF_CONFIG on every interface; there, gloo binds to one.

Copy with it: `tf_impl/kit/calling.py`, `tf_impl/kit/checks/data_parallel.py`.
"""

import tensorflow as tf

from tf_impl.kit.calling import add_own_losses, call, layers, rows
from tf_impl.kit.checks.data_parallel import (
    check_communication,
    check_compiled,
    check_cores,
    check_data_parallel,
    check_dense,
    check_optimizer,
    check_tpu,
)


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
        synchronised_norm: let BatchNormalization see the global batch, for three small exchanges a
            layer. Else the moving statistics kept are those of the first replica.

    Returns what the function does.
    Raises NotImplementedError for a model that is made already, and an optimizer that clips or
    scales the loss.
    """
    check_data_parallel(model)
    options = tf.distribute.experimental.CommunicationOptions(
        bytes_per_pack=int(bucket_mb * 2**20), implementation=communication
    )
    strategy = tf.distribute.MultiWorkerMirroredStrategy(communication_options=options)
    with strategy.scope():
        return _set_up(model, synchronised_norm)


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
            ends = [place * size // micro_batches for place in (part, part + 1)]
            part_x, part_y = rows((x, y), *ends)
            before = [gradient for gradient in gradients if gradient is not None]
            with tf.control_dependencies(before):  # one micro-batch after another
                loss, own = _backward(model, loss_fn, part_x, part_y, (ends[1] - ends[0]) / whole)
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
    settings = {"micro_batches": micro_batches, "synchronise_each": synchronise_each}
    return model, optimizer, make_train_step(model, optimizer, loss_fn, **settings)


def compiled(build) -> tuple:
    """Forward and backward as one XLA program on each replica; the exchange stays outside.

    NotImplementedError is for a layer that looks up or hashes words.
    """
    model, optimizer, loss_fn = apply_data_parallel(build)
    check_compiled(model)

    @tf.function(jit_compile=True)
    def backward(x, y, share):
        return _backward(model, loss_fn, x, y, share)

    def replica_step(x, y, samples):
        loss, gradients = backward(x, y, tf.shape(samples)[0] / samples[0])
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
    check_communication(communication, ways)
    kind = "GPU" if tf.config.list_physical_devices("GPU") else "CPU"
    devices = [f"{kind}:{index}" for index in range(replicas)]
    strategy = tf.distribute.MirroredStrategy(devices, ways[communication])
    with strategy.scope():
        model, optimizer, loss_fn = _set_up(build)
    return model, optimizer, make_train_step(model, optimizer, loss_fn)


def tpu(build, *, replicas: int = 8) -> tuple:
    """TPUStrategy: the cores of this machine's TPU, which have to be as many as the replicas.

    It has never met one.

    Raises NotImplementedError where there is no TPU.
    """
    check_tpu()
    resolver = tf.distribute.cluster_resolver.TPUClusterResolver("local")
    tf.config.experimental_connect_to_cluster(resolver)
    tf.tpu.experimental.initialize_tpu_system(resolver)  # before anything else runs
    strategy = tf.distribute.TPUStrategy(resolver)
    check_cores(strategy.num_replicas_in_sync, replicas)
    with strategy.scope():
        model, optimizer, loss_fn = _set_up(build)
    return model, optimizer, make_train_step(model, optimizer, loss_fn)


# Parts ------------------------------------------------------------------------------------------


def _set_up(build, synchronised_norm: bool = False) -> tuple:
    """Model, optimizer and loss function, made within the scope of a strategy."""
    model, optimizer, loss_fn = build()
    check_optimizer(optimizer)
    if synchronised_norm:
        _synchronise_norms(model)
    # Its state is made here: what a step's graph makes can't be copied from replica to replica.
    optimizer.build(model.trainable_variables)
    return model, optimizer, loss_fn


def _synchronise_norms(model) -> None:
    for layer in layers(model):
        if isinstance(layer, tf.keras.layers.BatchNormalization):
            layer.synchronized = True
            if getattr(layer, "fused", False):  # tf_keras: a kernel that knows only its own batch
                layer.fused = False


def _backward(model, loss_fn, x, y, share) -> tuple:
    """Loss and gradients of a part of the global batch, which count by its share."""
    with tf.GradientTape() as tape:
        loss = add_own_losses(loss_fn(call(model, x, training=True), y), model)
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
    check_dense(reached)
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
    from statistics import median

    from shared import parallel
    from tf_impl.kit import replicas
    from tf_impl.kit.demo import Demo

    make, build = f"{__spec__.name}:processes", "tf_impl.kit.examples:digits_cnn"
    digits, settings, results = Demo("digits-cnn").train, {"synchronised_norm": True}, []
    print("replicas  samples/s  last loss")
    for count in (1, 2):
        run = parallel.Run(replicas=count, global_batch=64, steps=50)
        results.append(replicas.launch(make, build, digits, run, settings))
        rate = 64 / median(results[-1].step_s)
        print(f"{count:8}{rate:11.0f}{results[-1].losses[-1]:11.4f}")
    print(f"largest relative distance of a weight tensor: {parallel.distance(*results):.1e}")


if __name__ == "__main__":
    main()
