"""Implementations of one optimizer rule: AdamW, the ways that TensorFlow has to run an update.

What it changes: how many kernels an update takes and how often it reads and writes memory; not the
result. Keras writes AdamW as some twenty operations a tensor, most of them a pass over memory of
their own (for_loop); a kernel of TensorFlow's does all but the decay in one (fused); XLA fuses
those of a tensor to a few loops (compiled).

Its twin: `pt_impl/train_step/optimizer_implementations.py`.

Where the frameworks differ and why:
- Keras has one implementation, a loop over the variables inside a `tf.function`, and leaves fusion
  to the compiler; PyTorch brings three, as arguments of one optimizer, and can compile them too.
  foreach has no counterpart. fused is `ResourceApplyAdam`, which TensorFlow kept from the
  optimizers before Keras 3: one tensor at a time, where PyTorch's kernel takes them all, and after
  a decay of its own. A small optimizer over Keras's brings it back, for `fit` too.
- TensorFlow's executor runs the graph of the loop, and may run the updates of several tensors at
  the same time; PyTorch runs the loop from Python.
- Keras adds its epsilon before the second moment is corrected for bias, PyTorch after: with
  epsilon = eps sqrt(1 - beta2) the first update is the same, and later ones differ by a relative
  eps / sqrt(v̂) at most. Keras also computes 1 - beta2^t in float32, PyTorch in float64: for a
  beta2 of 0.999 that moves the first updates by a relative 3e-5 at most. The kernel takes 1 - beta2
  in float32 too, so that this cancels.

When it helps and when it hurts: compiled helps where the update is a visible share of a step: many
parameters and little arithmetic for each. It needs its compile time back, and nothing is left to
gain where the whole step is compiled already. fused helps there too, and compiles nothing. None
helps a step that the forward and backward pass dominate.

Run it alone: `python -m tf_impl.train_step.optimizer_implementations` prints all on 10 million
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

    The rule: w -= lr weight_decay w, then w -= lr m̂ / (sqrt(v̂) + eps), with m̂ and v̂ the moments
    of `beta1` and `beta2` corrected for bias (Loshchilov and Hutter, 2019).

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
    """Update each variable with one kernel of TensorFlow's, `ResourceApplyAdam`, after its decay.

    Arguments, rule, result and errors as in `for_loop_update`; `FusedAdamW` alone is all there is
    to copy. Raises NotImplementedError for variables that the kernel does not take.
    """
    variables = _fitting(model, gradients, learning_rate, weight_decay, beta1, beta2, eps)
    optimizer = FusedAdamW(
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


class FusedAdamW(tf.keras.optimizers.AdamW):
    """Keras's AdamW with its update of a variable in one kernel; for `fit` and custom loops.

    Everything else is Keras's: arguments, decoupled decay, schedules, clipping, saving. An
    embedding's slices are summed first.
    """

    def build(self, variables):
        """Make the moments; refuse what the kernel can't do before that."""
        if self.amsgrad:
            raise NotImplementedError("ResourceApplyAdam has no amsgrad: use Keras's AdamW")
        super().build(variables)

    def update_step(self, gradient, variable, learning_rate=None):
        """Read and write the variable and both moments once."""
        rate = self.learning_rate if learning_rate is None else learning_rate  # tf_keras, Keras 3
        dtype = variable.dtype
        step = tf.cast(tf.convert_to_tensor(self.iterations) + 1, dtype)
        places = [self._momentums, self._velocities]
        first, second = (kept[self._place(variable)] for kept in places)
        tf.raw_ops.ResourceApplyAdam(
            var=_handle(variable),
            m=_handle(first),
            v=_handle(second),
            beta1_power=tf.pow(tf.cast(self.beta_1, dtype), step),
            beta2_power=tf.pow(tf.cast(self.beta_2, dtype), step),
            lr=tf.cast(rate, dtype),
            beta1=tf.cast(self.beta_1, dtype),
            beta2=tf.cast(self.beta_2, dtype),
            epsilon=tf.cast(self.epsilon, dtype),
            grad=tf.cast(tf.convert_to_tensor(gradient), dtype),
        )

    def _place(self, variable) -> int:
        """Where Keras keeps the moments of a variable, in either flavour."""
        if hasattr(self, "_get_variable_index"):
            return self._get_variable_index(variable)
        return self._index_dict[self._var_key(variable)]


def _handle(variable):
    """What a kernel gets for a variable, of TensorFlow or of Keras 3."""
    return (variable if isinstance(variable, tf.Variable) else variable.value).handle


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
    """Print all implementations on a transformer of 10 million weights, in interleaved samples."""
    import os
    import statistics
    import time

    from shared.specs import TASKS
    from shared.weights import init_weights
    from tf_impl.kit import models, runtime

    runtime.configure(threads=os.cpu_count() or 1, seed=0)
    spec = TASKS["text-gpt-wide"].model
    updates, kept = {}, {}
    for make in (for_loop_update, fused_update, compiled_update):
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
