"""Implementations of one optimizer rule: AdamW, the ways that TensorFlow has to run an update.

What it changes: how many kernels an update takes and how often it reads and writes memory; not the
result. Keras writes AdamW as some twenty operations a tensor, most of them a pass over memory of
their own (for_loop); XLA fuses those of a tensor to a few loops (compiled).

Its twin: `pt_impl/train_step/optimizer_implementations.py`.

Where the frameworks differ and why:
- Keras has one implementation, a loop over the variables inside a `tf.function`, and leaves fusion
  to the compiler; PyTorch brings three, as arguments of one optimizer, and can compile them too.
  foreach and fused have no counterpart: TensorFlow's fused kernel `ResourceApplyAdam` belongs to
  the optimizers before Keras 3, updates one tensor, and knows no weight decay.
- TensorFlow's executor runs the graph of the loop, and may run the updates of several tensors at
  the same time; PyTorch runs the loop from Python.
- Keras adds its epsilon before the second moment is corrected for bias, PyTorch after: with
  epsilon = eps sqrt(1 - beta2) the first update is the same, and later ones differ by a relative
  eps / sqrt(v̂) at most. Keras also computes 1 - beta2^t in float32, PyTorch in float64: for a
  beta2 of 0.999 that moves the first updates by a relative 1e-5 at most.

When it helps and when it hurts: compiled helps where the update is a visible share of a step: many
parameters and little arithmetic for each. It needs its compile time back, and nothing is left to
gain where the whole step is compiled already. None helps a step that the forward and backward pass
dominate.

Run it alone: `python -m tf_impl.train_step.optimizer_implementations` prints both on 10 million
weights.
"""

import math
import re
from collections import Counter
from collections.abc import Callable, Sequence

import tensorflow as tf
from tensorflow.python.eager import context

Update = tuple[tf.keras.optimizers.Optimizer, Callable[[], None]]


def for_loop_update(
    model: tf.keras.Model,
    gradients: Sequence,
    *,
    learning_rate: float,
    weight_decay: float = 0.01,
    beta1: float = 0.9,
    beta2: float = 0.999,
    eps: float = 1e-8,
) -> Update:
    """Update one variable after the other, operation by operation, in one graph: Keras's own.

    Returns (optimizer, update); `update()` applies to the trainable variables of `model` what
    `gradients` hold then. gradients: one dense tensor, or `tf.Variable` that is read anew at every
    update, for each of `model.trainable_variables`, of its shape and dtype. In training they come
    from a tape in the same graph, and `optimizer.apply_gradients` alone is all there is to copy.

    The rule: w -= lr weight_decay w, then w -= lr m̂ / (sqrt(v̂) + eps), with m̂ and v̂ the moments of
    `beta1` and `beta2` corrected for bias (Loshchilov and Hutter, 2019).

    Raises ValueError for gradients that do not fit and for settings out of range, before anything
    is changed.
    """
    variables = _fitting(model, gradients, learning_rate, weight_decay, beta1, beta2, eps)
    optimizer = tf.keras.optimizers.AdamW(
        learning_rate=float(learning_rate),
        weight_decay=weight_decay,
        beta_1=beta1,
        beta_2=beta2,
        epsilon=eps * math.sqrt(1.0 - beta2),
        amsgrad=False,
    )
    optimizer.jit_compile = False  # tf_keras would compile each variable's update on a GPU
    optimizer.build(variables)

    @tf.function(jit_compile=False)
    def update():
        now = [tf.convert_to_tensor(gradient) for gradient in gradients]
        optimizer.apply_gradients(zip(now, variables, strict=True))

    return optimizer, update


def foreach_update(
    model: tf.keras.Model,
    gradients: Sequence,
    *,
    learning_rate: float,
    weight_decay: float = 0.01,
    beta1: float = 0.9,
    beta2: float = 0.999,
    eps: float = 1e-8,
) -> Update:
    """Refuse: TensorFlow has no operations over lists of tensors. Raises NotImplementedError."""
    raise NotImplementedError(
        "TensorFlow has no operations over lists of tensors: Keras updates variable by variable"
    )


def fused_update(
    model: tf.keras.Model,
    gradients: Sequence,
    *,
    learning_rate: float,
    weight_decay: float = 0.01,
    beta1: float = 0.9,
    beta2: float = 0.999,
    eps: float = 1e-8,
) -> Update:
    """Refuse: Keras has no fused kernel. Raises NotImplementedError."""
    raise NotImplementedError(
        "Keras has no fused optimizer: it leaves fusion to XLA (compiled), and TensorFlow's kernel"
        " ResourceApplyAdam has no weight decay"
    )


def compiled_update(
    model: tf.keras.Model,
    gradients: Sequence,
    *,
    learning_rate: float,
    weight_decay: float = 0.01,
    beta1: float = 0.9,
    beta2: float = 0.999,
    eps: float = 1e-8,
) -> Update:
    """Let XLA fuse the operations of Keras's update; the first update compiles.

    Arguments, rule, result and errors as in `for_loop_update`. The learning rate is a variable:
    another one needs no new program.
    """
    variables = _fitting(model, gradients, learning_rate, weight_decay, beta1, beta2, eps)
    optimizer = tf.keras.optimizers.AdamW(
        learning_rate=float(learning_rate),
        weight_decay=weight_decay,
        beta_1=beta1,
        beta_2=beta2,
        epsilon=eps * math.sqrt(1.0 - beta2),
        amsgrad=False,
    )
    optimizer.jit_compile = False  # the function around it is compiled as a whole
    optimizer.build(variables)

    @tf.function(jit_compile=True)
    def update():
        now = [tf.convert_to_tensor(gradient) for gradient in gradients]
        optimizer.apply_gradients(zip(now, variables, strict=True))

    return optimizer, update


def update_operators(update: Callable) -> dict[str, int]:
    """Count the operators of one update, by name; the loops that XLA fused count as "compiled".

    Returns for example {"AssignSubVariableOp": 70, "Mul": 140}: what stands in the graph that was
    executed, after grappler rewrote it, or {"compiled": 40} for the optimized program of XLA. Calls
    the update twice, since the first call may trace.
    """
    update()
    if update.get_concrete_function().function_def.attr["_XlaMustCompile"].b:
        program = update.experimental_get_compiler_ir()(stage="optimized_hlo")
        return {"compiled": len(re.findall(r" fusion\(", program))}
    runtime = context.context()
    # The runtime hands out a graph when it instantiates it, so the call has to do that again.
    runtime.clear_kernel_cache()
    runtime.enable_graph_collection()
    try:
        update()
        graphs = runtime.export_run_metadata().function_graphs
    finally:
        runtime.disable_graph_collection()
    nodes = [node for graph in graphs for part in graph.partition_graphs for node in part.node]
    plumbing = ("Const", "NoOp", "_Arg", "_Retval", "Identity", "ReadVariableOp")
    return dict(Counter(node.op for node in nodes if node.op not in plumbing))


def _fitting(model, gradients, learning_rate, weight_decay, beta1, beta2, eps) -> list:
    """The trainable variables; raises ValueError where gradients or settings do not fit."""
    variables = model.trainable_variables
    if len(variables) != len(gradients):
        raise ValueError(f"{len(gradients)} gradients for {len(variables)} trainable parameters")
    for index, (v, g) in enumerate(zip(variables, gradients, strict=True)):
        sparse = isinstance(g, tf.IndexedSlices)
        fits = tuple(v.shape) == tuple(g.shape) and tf.as_dtype(v.dtype) == tf.as_dtype(g.dtype)
        if sparse or not fits:
            raise ValueError(
                f"gradient {index} is {tuple(g.shape)}, {tf.as_dtype(g.dtype).name},"
                f" {'sparse' if sparse else 'dense'}: its parameter takes {tuple(v.shape)},"
                f" {tf.as_dtype(v.dtype).name}, dense"
            )
    if min(learning_rate, weight_decay, eps) < 0 or not (0 <= beta1 < 1 and 0 <= beta2 < 1):
        raise ValueError(
            "learning_rate, weight_decay and eps must be at least 0, beta1 and beta2 in [0, 1)"
        )
    return variables


def main() -> None:
    """Print both implementations on a transformer of 10 million weights, in interleaved samples."""
    import os
    import statistics
    import time

    from shared.specs import TASKS
    from shared.weights import init_weights
    from tf_impl.kit import models, runtime

    runtime.configure(threads=os.cpu_count() or 1, seed=0)
    spec = TASKS["text-gpt-wide"].model
    updates, kept = {}, {}
    for make in (for_loop_update, compiled_update):
        model = models.build(spec, init_weights(spec, seed=0))
        gradients = [tf.fill(v.shape, 0.01) for v in model.trainable_variables]
        name = make.__name__.removesuffix("_update")
        kept[name], updates[name] = make(model, gradients, learning_rate=1e-3)
        updates[name]()
    taken = {name: [] for name in updates}
    for _ in range(20):
        for name, update in updates.items():
            start = time.perf_counter()
            for _ in range(5):
                update()
            runtime.synchronize()
            taken[name].append((time.perf_counter() - start) / 5)
    print(f"AdamW, {models.parameter_count(model):,} weights: ms an update, ratio, operators")
    for name, times in taken.items():
        seconds, first = statistics.median(times), statistics.median(taken["for_loop"])
        operators = sum(update_operators(updates[name]).values())
        print(f"{name:9}{seconds * 1e3:8.2f}{seconds / first:7.2f}  {operators}")


if __name__ == "__main__":
    main()
