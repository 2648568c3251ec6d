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
- `Normalization`, `Rescaling`, `Discretization`, `CategoryEncoding` and `Masking` stay float32
  here, as what stands in their place does under autocast. They get raw data, of which bfloat16
  keeps 8 bits (the year 2026 would be 2024) and float16 nothing beyond 65,504. Keras's own policy
  rounds them, and the means; a subclassed model does so still, before its layers see them.
- `SpectralNormalization` stays float32, too, but not the layer that it wraps: it writes the kernel
  that it has normalised back, which Keras's own policy rounds in every step.
- `LossScaleOptimizer` decides inside the graph whether to skip; `GradScaler` asks the device.
- The usual way is `keras.config.set_dtype_policy` before the model is built. Here the policies
  last for one trace: any model will do, it is left as it was, and but for these six layers it
  computes the same. (`fit` traces too: call it within `policies()`, with the optimizer that `wrap`
  returns.) tf_keras settles when a variable is made whether it can be cast, so there a built model
  is refused.
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

Copy with it: nothing.
"""

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import tensorflow as tf

_POLICIES = {"bfloat16": "mixed_bfloat16", "float16": "mixed_float16", "float32": "float32"}


class MixedPrecision:
    """Dtype policies for a model's layers and, in float16, an optimizer that scales the loss.

    One object trains one model; what it does to a step of your own:

        optimizer = precision.wrap(optimizer)

        @tf.function
        def step(x, y):
            with precision.policies():
                with tf.GradientTape() as tape:
                    loss = loss_fn(to_float32(model(x, training=True)), y)
                    scaled = precision.scale(loss)
                gradients = tape.gradient(scaled, variables)
            optimizer.apply_gradients(zip(gradients, variables))  # unscales

    Args:
        model: of float32 variables. It is left as it is.
        dtype: "bfloat16", "float16" or "float32", which changes nothing.
        keep_fp32: names of layers, comma-separated, that compute in float32 with all they contain.
        initial_scale: float16 only: the loss is multiplied by a scale that starts here.
        growth_interval: the scale halves when a gradient is not finite (and no weight changes) and
            doubles after so many good steps in a row.

    Raises:
        ValueError: an unknown dtype or layer, half-width variables, a model without variables or a
            scaling that cannot work.
        NotImplementedError: Keras cannot switch the model, or the device cannot compute in `dtype`.
    """

    def __init__(
        self,
        model: tf.keras.Model,
        *,
        dtype: str = "bfloat16",
        keep_fp32: str = "",
        initial_scale: float = 65536.0,
        growth_interval: int = 2000,
    ) -> None:
        if initial_scale <= 0 or growth_interval < 1:
            raise ValueError("initial_scale must be positive and growth_interval at least 1")
        self.layer_policies = _layer_policies(model, dtype, keep_fp32)
        self.functions = [own for layer, _ in self.layer_policies for own in _functions(layer)]
        self.variables, self.dtype = model.trainable_variables, dtype
        self.initial_scale, self.growth_interval = initial_scale, growth_interval
        self.optimizer = None

    @contextmanager
    def policies(self) -> Iterator[None]:
        """Give each layer its policy until the context ends: for one trace, at no cost to the step.

        The layers look at their policy in every call, and a trace is the only call that a step
        makes. Gradients are taken inside, for recomputed layers, which run forward again.
        """
        before = [layer.dtype_policy for layer, _ in self.layer_policies]
        given = [vars(layer).get(name) for layer, name, _ in self.functions]
        try:
            for layer, policy in self.layer_policies:
                layer.dtype_policy = policy
            for layer, name, anew in self.functions:
                setattr(layer, name, anew)
            yield
        finally:
            for (layer, name, _), function in zip(self.functions, given, strict=True):
                delattr(layer, name)
                if function is not None:
                    setattr(layer, name, function)
            for (layer, _), policy in zip(self.layer_policies, before, strict=True):
                layer.dtype_policy = policy

    def wrap(self, optimizer: tf.keras.optimizers.Optimizer) -> tf.keras.optimizers.Optimizer:
        """Return the optimizer to use: in float16 one that unscales, and skips what overflows.

        It has the scale and its count of good steps in its variables: save it to resume. Raises
        ValueError for an optimizer that scales the loss already, and in float16 for a second one.
        """
        # Keras 3's loss_scale_factor unscales as well.
        if hasattr(optimizer, "inner_optimizer") or getattr(optimizer, "loss_scale_factor", None):
            raise ValueError(
                "pass the optimizer itself, without loss_scale_factor: float16 wraps it in a "
                "LossScaleOptimizer, and nothing else needs a scale"
            )
        if self.dtype == "float16" and self.optimizer is not None:
            raise ValueError(
                "float16: one optimizer holds the loss's scale, another would hold a scale of its "
                "own: give it all variables, or choose bfloat16, which needs no scale"
            )
        if self.dtype == "float16":
            # By itself, or Keras leaves some of its variables (Nadam's, Adafactor's) uncounted.
            optimizer.build(self.variables)
            optimizer = tf.keras.optimizers.LossScaleOptimizer(
                optimizer,
                initial_scale=self.initial_scale,
                dynamic_growth_steps=self.growth_interval,
            )
            # Before the trace, which would take the scale of an unbuilt optimizer for a constant.
            optimizer.build(self.variables)
        self.optimizer = optimizer
        return optimizer

    def scale(self, loss):
        """The loss to take gradients of."""
        return self.optimizer.scale_loss(loss) if self.dtype == "float16" else loss

    def gradient_scale(self):
        """How many times too large gradients are, for clipping: a scalar of the graph, or 1."""
        if self.dtype != "float16":
            return 1.0
        return tf.convert_to_tensor(self.optimizer.dynamic_scale)

    def loss_scale(self) -> float:
        """Read the scale; 1.0 without scaling."""
        return float(self.gradient_scale())


def make_train_step(
    model: tf.keras.Model,
    optimizer: tf.keras.optimizers.Optimizer,
    loss_fn: Callable,
    *,
    dtype: str = "bfloat16",
    keep_fp32: str = "",
    initial_scale: float = 65536.0,
    growth_interval: int = 2000,
) -> Callable:
    """Make the plain train step, computed in `dtype` over the model's float32 variables.

    Args:
        model, optimizer: as ever; the model has its variables.
        loss_fn: `loss_fn(output, y)` is given float32 output.
        dtype, keep_fp32, initial_scale, growth_interval: as in `MixedPrecision`.

    Returns:
        `step(x, y) -> loss`, a float32 scalar on the device, not scaled. x: a tensor or a structure
        of tensors, handed over as `fit` does: as one argument, but where the model's `call` needs
        several. `step.loss_scale()` reads the scale; `step.optimizer` is what updates the
        variables, with the scale among its own: save it to resume.

    Raises:
        As `MixedPrecision` and `MixedPrecision.wrap`.
    """
    precision = MixedPrecision(
        model,
        dtype=dtype,
        keep_fp32=keep_fp32,
        initial_scale=initial_scale,
        growth_interval=growth_interval,
    )
    optimizer = precision.wrap(optimizer)
    variables = model.trainable_variables

    @tf.function(jit_compile=False)
    def step(x, y):
        with precision.policies():
            with tf.GradientTape() as tape:
                output = to_float32(_call(model, x, training=True))
                loss = _with_own_losses(loss_fn(output, y), model)
                scaled = precision.scale(loss)
            gradients = tape.gradient(scaled, variables)
        optimizer.apply_gradients(zip(gradients, variables, strict=True))
        return loss

    step.loss_scale = precision.loss_scale
    step.optimizer = optimizer
    return step


def make_predict(
    model: tf.keras.Model, *, dtype: str = "bfloat16", keep_fp32: str = ""
) -> Callable:
    """Make `predict(x) -> output` in evaluation mode: computed in `dtype`, given as float32.

    Args, Raises: as in `make_train_step`.
    """
    precision = MixedPrecision(model, dtype=dtype, keep_fp32=keep_fp32)

    @tf.function(jit_compile=False, reduce_retracing=True)
    def predict(x):
        with precision.policies():
            output = _call(model, x, training=False)
        return to_float32(output)

    return predict


def to_float32(tree):
    """Cast the bfloat16 and float16 tensors of a tensor, tuple, list or dict to float32."""
    return tf.nest.map_structure(_leaf_to_float32, tree)


def _leaf_to_float32(leaf):
    is_half = getattr(leaf, "dtype", None) in (tf.bfloat16, tf.float16)  # None may be one of many
    return tf.cast(leaf, tf.float32) if is_half else leaf


def _layer_policies(model: tf.keras.Model, dtype: str, keep_fp32: str) -> list[tuple]:
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
    for gpu in tf.config.list_physical_devices("GPU"):
        details = tf.config.experimental.get_device_details(gpu)
        if dtype == "bfloat16" and details.get("compute_capability", (8, 0)) < (8, 0):
            raise NotImplementedError("this GPU has no bfloat16 arithmetic: choose float16")
    # Layers with an integer, float64 or quantized policy keep it, as autocast does.
    return [
        (layer, "float32" if id(layer) in kept or _must_not_round(layer) else _POLICIES[dtype])
        for layer in model._flatten_layers()
        if layer.dtype_policy.name in _POLICIES.values()
    ]


def _functions(layer) -> list[tuple]:
    """(layer, name, the same anew) of methods that are a `tf.function`.

    Its graphs are those of the policy that it was first traced with, whatever comes later.
    """
    kind, found = tf.types.experimental.PolymorphicFunction, []
    given = [{"call": vars(layer).get("call")}, *map(vars, type(layer).__mro__)]
    for name in {name for own in given for name in own if isinstance(own[name], kind)}:
        own = getattr(layer, name)
        anew = tf.function(own.python_function, jit_compile=own._jit_compile)
        anew = partial(anew)  # Keras would track the function itself
        anew.__signature__ = inspect.signature(own)
        found.append((layer, name, anew))
    return found


def _must_not_round(layer) -> bool:
    """Whether it writes weights, is for raw data, or a Sequential with one, which casts it."""
    kinds = tf.keras.layers
    if isinstance(layer, kinds.SpectralNormalization):
        return True
    kinds = (
        kinds.Normalization,
        kinds.Rescaling,
        kinds.Discretization,
        kinds.CategoryEncoding,
        kinds.Masking,
    )
    inside = layer._flatten_layers() if isinstance(layer, tf.keras.Sequential) else [layer]
    return any(isinstance(one, kinds) for one in inside)


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
    steps, losses, times = {}, {}, {"float32": [], "bfloat16": []}
    for dtype in times:
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
            times[dtype].append((time.perf_counter() - start) / len(batches))
    print(f"digits-cnn, batch {task.compute_batch}: ms a step, ratio, loss after 200 steps, ran in")
    baseline = statistics.median(times["float32"])
    for dtype, step in steps.items():
        seconds, loss = statistics.median(times[dtype]), runtime.to_float(losses[dtype])
        ran = runtime.operator_dtypes(step, *batches[0])
        print(f"{dtype:9}{seconds * 1e3:8.2f}{seconds / baseline:7.2f}{loss:9.4f}  {ran}")


if __name__ == "__main__":
    main()
