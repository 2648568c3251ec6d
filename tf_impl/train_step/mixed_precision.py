"""Mixed precision: half-width arithmetic over float32 master weights.

What it changes: while the step is traced, each layer has the dtype policy "mixed_bfloat16" or
"mixed_float16", so that convolutions and matrix products read and write that dtype, and their
gradients follow. Variables, their gradients, the optimizer's state and the loss stay float32.
float16 holds 6e-8 to 65,504 only, so the loss is scaled up before the gradients are taken and they
are scaled down after; a step whose gradients overflow is skipped and halves the scale. bfloat16
has float32's range: no scaling.

Its twin: `pt_impl/train_step/mixed_precision.py`.

Where the frameworks differ and why:
- Keras decides per layer while the graph is traced, autocast per operator while it runs. A Keras
  layer casts what it gets and gives, so a residual stream is bfloat16; under autocast bfloat16
  plus float32 is float32, and a stream that starts as float32 (an embedding) stays so.
- Keras casts a weight at every use, an embedding as a whole; autocast casts once per forward pass
  and gathers from the float32 embedding.
- BatchNorm and LayerNorm keep float32 variables and statistics on both sides. Keras casts what
  they get to float32 and back, and so gains nothing in them (Keras 3 builds them of many small
  operators); PyTorch's CPU kernels read bfloat16 and add up in float32.
- `LossScaleOptimizer` decides inside the graph whether to skip; `GradScaler` asks the device.
- The usual way is `keras.config.set_dtype_policy` before the model is built. Here the policies
  last for one trace: any model will do, it is left as it was, and it computes the same. tf_keras
  settles when a variable is made whether it can be cast, so there a built model is refused.
- TensorFlow's graph optimizer can do it instead, for the whole process and by its own choice of
  operators: `tf.config.optimizer.set_experimental_options` with
  {"auto_mixed_precision_onednn_bfloat16": True} (CPU) or {"auto_mixed_precision": True} (float16
  on a GPU).

When it helps and when it hurts: it helps large convolutions and matrix products on hardware with
such units (CUDA: float16 since Volta, bfloat16 since Ampere; CPUs: AVX512-BF16, AMX) and halves
the memory of activations. It hurts small steps, which pay for the casts, and CPUs that emulate the
dtype (most do for float16: for tests only). bfloat16 has 8 significant bits: keep layers that add
up small differences in float32 (`keep_fp32`).

Run it alone: `python -m tf_impl.train_step.mixed_precision` prints float32 against bfloat16.
"""

import inspect
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import tensorflow as tf

_POLICIES = {"bfloat16": "mixed_bfloat16", "float16": "mixed_float16", "float32": "float32"}


def make_train_step(
    model: tf.keras.Model,
    optimizer: tf.keras.optimizers.Optimizer,
    loss_fn: Callable,
    *,
    dtype: str = "bfloat16",
    keep_fp32: str = "",
    initial_scale: float = 65536.0,
    growth_interval: int = 2000,
    max_norm: float = math.inf,
) -> Callable:
    """Return `step(x, y) -> loss` that computes in `dtype` over the model's float32 variables.

    x: a tensor or a structure of tensors, handed over as `fit` does: as one argument, but where the
    model's `call` needs several. loss: float32 scalar on the device, not scaled. `loss_fn(output,
    y)` gets float32 output. dtype: "bfloat16", "float16" or "float32" (the plain step). keep_fp32:
    names of layers, comma-separated, that compute in float32 with all they contain. The model
    itself is left as it is. float16 only: the loss is multiplied by a scale that starts at
    `initial_scale`, halves when a gradient is not finite (and no weight changes) and doubles after
    `growth_interval` good steps in a row; `step.loss_scale()` reads it (1.0 without scaling).
    `step.optimizer` is what updates the weights, with the scale in its variables: save it to
    resume. max_norm: gradients are clipped by their global L2 norm, which is that of the unscaled
    ones; infinity does not clip.

    Raises ValueError for an unknown dtype or layer, half-width variables, a model without
    variables or a scaling that cannot work; NotImplementedError where Keras cannot switch the model
    or the device cannot compute in `dtype`.
    """
    policies = _policies(model, dtype, keep_fp32)
    _check_scaling(optimizer, initial_scale, growth_interval, max_norm)
    variables = model.trainable_variables
    if dtype == "float16":
        optimizer = tf.keras.optimizers.LossScaleOptimizer(
            optimizer, initial_scale=initial_scale, dynamic_growth_steps=growth_interval
        )
        # Before the trace, which would take the scale of an unbuilt optimizer for a constant.
        optimizer.build(variables)

    @tf.function(jit_compile=False)
    def step(x, y):
        # The gradients are inside, for recomputed layers, which run forward again.
        with _applied(policies):
            with tf.GradientTape() as tape:
                output = _to_float32(_call(model, x, training=True))
                loss = _with_own_losses(loss_fn(output, y), model)
                objective = optimizer.scale_loss(loss) if dtype == "float16" else loss
            gradients = tape.gradient(objective, variables)
        if max_norm < math.inf:
            scale = tf.convert_to_tensor(optimizer.dynamic_scale) if dtype == "float16" else 1.0
            gradients = _clip(gradients, max_norm * scale)
        # A LossScaleOptimizer unscales first, and skips the update if a gradient is not finite.
        optimizer.apply_gradients(zip(gradients, variables, strict=True))
        return loss

    step.loss_scale = lambda: float(optimizer.dynamic_scale) if dtype == "float16" else 1.0
    step.optimizer = optimizer
    return step


def make_predict(
    model: tf.keras.Model, *, dtype: str = "bfloat16", keep_fp32: str = ""
) -> Callable:
    """Return `predict(x) -> output` in evaluation mode: computed in `dtype`, given as float32.

    x, dtype, keep_fp32 and errors as in `make_train_step`.
    """
    policies = _policies(model, dtype, keep_fp32)

    @tf.function(jit_compile=False, reduce_retracing=True)
    def predict(x):
        with _applied(policies):
            output = _call(model, x, training=False)
        return _to_float32(output)

    return predict


def _check_scaling(optimizer, initial_scale: float, growth_interval: int, max_norm: float) -> None:
    if initial_scale <= 0 or growth_interval < 1:
        raise ValueError("initial_scale must be positive and growth_interval at least 1")
    if not max_norm > 0:
        raise ValueError(f"max_norm must be above 0 (inf does not clip), not {max_norm!r}")
    if hasattr(optimizer, "inner_optimizer"):
        raise ValueError("pass the optimizer itself: float16 wraps it in a LossScaleOptimizer")


def _clip(gradients: list, max_norm) -> list:
    """Scale all gradients to a global L2 norm of `max_norm` at most."""
    # An embedding's slices have the norm of their sum.
    slices = tf.IndexedSlices
    dense = [tf.convert_to_tensor(g) if isinstance(g, slices) else g for g in gradients]
    norm = tf.linalg.global_norm(dense)
    return tf.clip_by_global_norm(gradients, max_norm, use_norm=norm)[0]


def _policies(model: tf.keras.Model, dtype: str, keep_fp32: str) -> list[tuple]:
    """Check the settings against model and device; return (layer, policy to trace it with)."""
    if dtype not in _POLICIES:
        raise ValueError(f"unknown dtype {dtype!r}: choose one of {', '.join(_POLICIES)}")
    if not model.built:
        raise ValueError("the model has no variables yet: call it once on an example input")
    kept = {id(layer) for layer in _find_layers(model, keep_fp32)}
    if dtype == "float32":
        return []
    if type(model).dtype_policy.fset is None:
        raise NotImplementedError(
            "tf_keras cannot switch a built model: use Keras 3, or build the model after"
            f" tf_keras.mixed_precision.set_global_policy({_POLICIES[dtype]!r})"
        )
    for variable in model.trainable_variables:
        if variable.dtype in ("bfloat16", "float16"):
            raise ValueError(f"master weights are float32, but {variable.path} is {variable.dtype}")
    for gpu in tf.config.list_physical_devices("GPU") if dtype == "bfloat16" else ():
        details = tf.config.experimental.get_device_details(gpu)
        if details.get("compute_capability", (8, 0)) < (8, 0):
            raise NotImplementedError("this GPU has no bfloat16 arithmetic: choose float16")
    # Layers with an integer, float64 or quantized policy keep it, as autocast does.
    return [
        (layer, "float32" if id(layer) in kept else _POLICIES[dtype])
        for layer in model._flatten_layers()
        if layer.dtype_policy.name in _POLICIES.values()
    ]


def _find_layers(model: tf.keras.Model, names: str) -> list:
    """Return the named layers, what they contain, and layers whose name goes on with a dot."""
    # `model.layers` ends at the first level: what custom layers contain is listed only here.
    layers = list(model._flatten_layers(include_self=False))
    found = []
    for name in filter(None, (part.strip() for part in names.split(","))):
        own = [layer for layer in layers if f"{layer.name}.".startswith(f"{name}.")]
        if not own:
            known = ", ".join(layer.name for layer in layers)
            raise ValueError(f"keep_fp32: the model has no layer {name!r}; it has {known}")
        found += [inside for layer in own for inside in layer._flatten_layers()]
    return found


@contextmanager
def _applied(policies: list[tuple]) -> Iterator[None]:
    """Give each layer its policy until the context ends: for one trace, at no cost to the step.

    The layers look at their policy in every call, and a trace is the only call that a step makes.
    """
    before = [layer.dtype_policy for layer, _ in policies]
    try:
        for layer, policy in policies:
            layer.dtype_policy = policy
        yield
    finally:
        for (layer, _), policy in zip(policies, before, strict=True):
            layer.dtype_policy = policy


def _to_float32(tree):
    """Cast the bfloat16 and float16 tensors of a tensor, tuple, list or dict to float32."""
    half = (tf.bfloat16, tf.float16)
    return tf.nest.map_structure(lambda v: tf.cast(v, tf.float32) if v.dtype in half else v, tree)


def _call(model, x, training: bool):
    """Call `model` as `fit` does: x is one argument, but where `call` needs several."""
    inputs = inspect.signature(model.call).parameters.values()
    inputs = [p for p in inputs if p.name not in ("training", "mask") and p.kind != p.VAR_KEYWORD]
    if isinstance(x, dict) and len(inputs) > 1 and x.keys() <= {p.name for p in inputs}:
        return model(**x, training=training)
    needed = sum(2 if p.kind == p.VAR_POSITIONAL else p.default is p.empty for p in inputs)
    if isinstance(x, tuple | list) and needed > 1:
        return model(*x, training=training)
    return model(x, training=training)


def _with_own_losses(loss, model):
    """Add the model's own losses (of regularisers, of `add_loss`) as `fit` does, in float32."""
    loss = tf.cast(loss, tf.float32) if loss.dtype.size < 4 else loss
    return sum((tf.cast(term, loss.dtype) for term in model.losses), loss)


def main() -> None:
    """Print float32 against bfloat16 on the digits CNN, in interleaved samples."""
    import os
    import statistics
    import tempfile
    import time
    from pathlib import Path

    from shared import datasets
    from shared.specs import TASKS
    from shared.weights import init_weights
    from tf_impl.kit import data, models, runtime, training

    runtime.configure(threads=os.cpu_count() or 1, seed=0)
    task = TASKS["digits-cnn"]
    with tempfile.TemporaryDirectory() as folder:
        x, y = datasets.load(datasets.materialise(task.dataset, Path(folder)), "train")
        batches = datasets.first_batches(x, y, task.compute_batch, 10, seed=0)
    batches = data.resident_batches(batches)
    steps, losses, taken = {}, {}, {"float32": [], "bfloat16": []}
    for dtype in taken:
        model = models.build(task.model, init_weights(task.model, seed=0))
        make = training.make_train_step if dtype == "float32" else make_train_step
        optimizer = training.make_optimizer(model, task.recipe)
        steps[dtype] = make(model, optimizer, training.cross_entropy)
    for _ in range(20):
        for dtype, step in steps.items():
            start = time.perf_counter()
            for batch in batches:
                losses[dtype] = step(*batch)
            runtime.synchronize()
            taken[dtype].append((time.perf_counter() - start) / len(batches))
    print(f"digits-cnn, batch {task.compute_batch}: ms a step, ratio, loss after 200 steps, ran in")
    baseline = statistics.median(taken["float32"])
    for dtype, step in steps.items():
        seconds, loss = statistics.median(taken[dtype]), runtime.to_float(losses[dtype])
        ran = runtime.operator_dtypes(step, *batches[0])
        print(f"{dtype:9}{seconds * 1e3:8.2f}{seconds / baseline:7.2f}{loss:9.4f}  {ran}")


if __name__ == "__main__":
    main()
