"""Activation checkpointing: recompute the inside of blocks in the backward pass, not store it.

What it changes: a named block keeps its inputs alone for the backward pass. What it computed on
the way to its output is freed, and computed once more when the gradient gets there, with the seeds
and statistics of the first time. Losses, gradients, dropout masks and running statistics are those
of the plain model. Of n like blocks, n inputs and one inside are alive at most, not n insides, for
one more forward pass (Chen et al., 2016, "Training Deep Nets with Sublinear Memory Cost").

Its twin: `pt_impl/train_step/activation_checkpointing.py`.

Where the frameworks differ and why:
- A functional Keras model is flat, so a block may be a group of layers whose names begin alike;
  groups become sub-models of a new model over the same layers. A block that is one layer, in a
  model of any kind, has its `call` replaced in place, as the twin replaces `forward`.
- `tf.recompute_grad` alone runs a block's side effects twice: dropout draws other masks (wrong
  gradients), BatchNorm updates its statistics again. Here the second run happens in a
  `keras.StatelessScope` with the state that the first one found: the statistics, and the seeds,
  which Keras keeps in variables and gives to `stateless_dropout`. PyTorch has a generator instead,
  and puts it back.
- `keras.RematScope` recomputes each layer by itself, so a flat block keeps every layer's input; it
  draws masks anew, and fails in graphs for layers that take `training` (keras#21207).
- TensorFlow's graph optimizer prunes a block's last product from the second run, since no gradient
  needs it; PyTorch stops the second run there.

When it helps and when it hurts: it helps where activations outweigh parameters, gradients and the
optimizer's state: deep models, long sequences, large batches. It costs up to a third of a step's
arithmetic. Small blocks save nothing, since each keeps its input; one block around everything
saves nothing either, since its inside is all alive when it runs again. The executor runs what is
ready in an order of its own, so the peak differs between processes: measure yours.

Run it alone: `python -m tf_impl.train_step.activation_checkpointing` prints baseline against
technique.
"""

import re
from fnmatch import fnmatchcase
from functools import partial

import tensorflow as tf

_ADVICE = "anew in the second run: use keras.random with a SeedGenerator of its layer"


def apply_checkpointing(
    model: tf.keras.Model, *, blocks: str, save_products: bool = False, offload: bool = False
) -> tf.keras.Model:
    """Have the blocks of `model` recomputed in the backward pass; return the model to train.

    blocks: comma-separated names, or patterns with *, ? and [] ("block*", "stage*.block?"). A name
    is that of a layer at any depth or, in a functional or Sequential model, of a group: the layers
    whose names go on with a dot or underscore (not those that Keras numbers, as in dense_1), with
    what lies between them. What lies within another chosen block is recomputed with it. "" chooses
    none. A block takes any arguments, one of them floating-point, and returns any tensors. With
    groups the result is a new functional model, not compiled, that shares its layers with `model`;
    without, it is `model`, changed. Either trains in `fit`, too. Saving keeps no recomputation.

    Raises ValueError, before anything is changed, for unknown names, blocks that overlap or are
    recomputed already and a model without variables; NotImplementedError in tf_keras, for
    save_products and offload, which TensorFlow has no means for, and, when the model is traced, for
    a block that adds a loss, draws random numbers without a Keras seed generator of its own or
    changes variables of others. Source: `tf.recompute_grad`.
    """
    if save_products:
        raise NotImplementedError(
            "tf.recompute_grad recomputes all of a block: it can't keep the products of its inside"
        )
    if offload:
        raise NotImplementedError("TensorFlow keeps what a block needs on the device alone")
    if not model.built:
        raise ValueError("the model has no variables yet: call it once on an example input")
    if blocks.strip(", ") and not hasattr(tf.keras, "StatelessScope"):
        raise NotImplementedError("tf_keras would draw other dropout masks again: use Keras 3")
    layers, groups = _find_blocks(model, blocks)
    for layer in layers:
        if getattr(layer.call, "func", None) is _run_twice:
            raise ValueError(f"blocks: {layer.name!r} is recomputed already")
    model, submodels = _with_submodels(model, groups) if groups else (model, [])
    for layer in layers + submodels:
        layer.call = partial(_run_twice, layer, layer.call)
    return model


def _find_blocks(model: tf.keras.Model, blocks: str) -> tuple[list, dict[str, list]]:
    """The single layers and the groups of `blocks`, but for those inside another of them."""
    flat = hasattr(getattr(model, "_functional", model), "operations")
    top, nested = {}, {}
    for layer in dict.fromkeys(model._flatten_layers(include_self=False)):
        if isinstance(layer, tf.keras.layers.InputLayer):
            continue
        if not flat or layer not in model.layers:
            nested.setdefault(layer.name, []).append(layer)
            continue
        for end in re.finditer("[._]|$", layer.name):
            if not re.fullmatch(r"_\d+", layer.name[end.start() :]):  # Keras's numbers: dense_1
                top.setdefault(layer.name[: end.start()], []).append(layer)
    known, inside = nested | top, {}
    for pattern in filter(None, map(str.strip, blocks.split(","))):
        names = [name for name in known if fnmatchcase(name, pattern)]
        if not names:
            listed = ", ".join(known)
            raise ValueError(f"blocks: the model has no block {pattern!r}; it has {listed}")
        for name in names:
            inside[name] = {id(p) for layer in known[name] for p in layer._flatten_layers()}
    layers, groups, covered = [], {}, set()
    for name in sorted(inside, key=lambda name: -len(inside[name])):
        if not inside[name] <= covered:
            covered |= inside[name]
            if name in top and len(top[name]) > 1:
                groups[name] = top[name]
            else:
                layers += known[name]
    return layers, groups


def _with_submodels(model: tf.keras.Model, groups: dict[str, list]) -> tuple:
    """Rebuild a functional model with a sub-model for each group; return it and the sub-models."""
    function = getattr(model, "_functional", model)
    levels = function._nodes_by_depth
    nodes = [n for depth in sorted(levels, reverse=True) for n in levels[depth] if not n.is_input]
    owner: dict = {}
    for name, layers in groups.items():
        for node in _between(nodes, layers):
            if owner.setdefault(node, name) != name:
                raise ValueError(f"blocks: {name!r} and {owner[node]!r} overlap")
    waiting = [(n.input_tensors, n.outputs, n) for n in nodes if n not in owner]
    submodels = []
    for name in groups:
        inner = [node for node in nodes if owner.get(node) == name]
        outer = [node for node in nodes if owner.get(node) != name]
        made = {id(tensor): tensor for node in inner for tensor in node.outputs}
        used = {id(tensor): tensor for node in inner for tensor in node.input_tensors}
        wanted = {id(t) for n in outer for t in n.input_tensors} | set(map(id, function.outputs))
        entering = [tensor for key, tensor in used.items() if key not in made]
        leaving = [tensor for key, tensor in made.items() if key in wanted]
        submodels.append(tf.keras.Model(entering, leaving, name=name))
        waiting.append((entering, leaving, submodels[-1]))
    tensors = {id(tensor): tensor for tensor in function.inputs}  # the old model's -> the new one's
    while waiting:
        ready = [unit for unit in waiting if all(id(tensor) in tensors for tensor in unit[0])]
        if not ready:
            raise ValueError(f"blocks: {', '.join(groups)} feed one another in a circle")
        for entering, leaving, unit in ready:
            if unit in submodels:
                result = unit([tensors[id(tensor)] for tensor in entering])
            else:
                args, kwargs = unit.arguments.fill_in(tensors)
                result = unit.operation(*args, **kwargs)
            tensors |= dict(zip(map(id, leaving), tf.nest.flatten(result), strict=True))
        waiting = [unit for unit in waiting if unit not in ready]
    outputs = tf.nest.map_structure(lambda tensor: tensors[id(tensor)], function.output)
    return tf.keras.Model(function.input, outputs, name=model.name), submodels


def _between(nodes: list, layers: list) -> list:
    """The calls of `layers`, and those on a way from one to another, such as an addition."""
    after = {node for node in nodes if node.operation in layers}
    before = set(after)
    for node in nodes:
        if not after.isdisjoint(node.parent_nodes):
            after.add(node)
    for node in reversed(nodes):
        if node in before:
            before.update(node.parent_nodes)
    return [node for node in nodes if node in after & before]


def _run_twice(layer, forward, /, *args, **kwargs):
    """Run `forward` now and, when the gradient gets here, Layer.__call__ around it.

    Around it, because autocast and `training` reach what is inside from there.
    """
    inputs = tf.nest.flatten((args, kwargs))
    where = [index for index, value in enumerate(inputs) if _is_float(value)]
    if not where:
        raise ValueError(f"{layer.name!r} has no floating-point input: it can't be recomputed")
    context = layer._get_call_context()
    modes = {name: context.get_value(name) for name in layer._call_context_args}
    state = layer.non_trainable_variables  # with the seeds
    found = [tf.identity(variable.value) for variable in state]
    first = []

    def run(*tensors):
        now = list(inputs)
        for index, tensor in zip(where, tensors, strict=True):
            now[index] = _masked_like(inputs[index], tensor)
        args_now, kwargs_now = tf.nest.pack_sequence_as((args, kwargs), now)
        # Seeds wait for the inputs, which in the second run wait for the gradient: otherwise the
        # masks of all blocks would be drawn, and kept, ahead of time.
        if not first:
            with tf.control_dependencies(tensors):
                first.append(_checked(layer, lambda: forward(*args_now, **kwargs_now)))
            return list(filter(_is_float, tf.nest.flatten(first[0])))
        with tf.control_dependencies(tensors):
            values = [tf.identity(value) for value in found]
        twice, layer.call = layer.call, forward
        try:
            with tf.keras.StatelessScope(list(zip(state, values, strict=True))) as scope:
                outputs = layer(*args_now, **(modes | kwargs_now))
        finally:
            layer.call = twice
        if scope.state_mapping.keys() - set(map(id, state)):
            raise NotImplementedError(f"{layer.name!r} changes state of others, {_ADVICE}")
        return list(filter(_is_float, tf.nest.flatten(outputs)))

    results = iter(tf.recompute_grad(run)(*(inputs[index] for index in where)))
    flat = tf.nest.flatten(first[0])
    flat = [_masked_like(value, next(results)) if _is_float(value) else value for value in flat]
    return tf.nest.pack_sequence_as(first[0], flat)


def _checked(layer, run):
    """Run, and refuse what the second run would get wrong."""
    graph = tf.compat.v1.get_default_graph()
    before = len(graph.get_operations())
    losses = [part._losses for part in layer._flatten_layers()]
    known = sum(map(len, losses))
    outputs = run()
    if sum(map(len, losses)) > known:
        raise NotImplementedError(f"{layer.name!r} adds a loss, which no gradient would get out of")
    for operation in graph.get_operations()[before:]:
        if operation.op_def.is_stateful and re.search("Random|Rng|Multinomial", operation.type):
            raise NotImplementedError(f"{layer.name!r} draws with {operation.type}, {_ADVICE}")
    return outputs


def _is_float(value) -> bool:
    return tf.is_tensor(value) and tf.as_dtype(value.dtype).is_floating


def _masked_like(source, tensor):
    """Give `tensor` the Keras mask of what it stands for."""
    if getattr(source, "_keras_mask", None) is not None:
        tensor._keras_mask = source._keras_mask
    return tensor


def main() -> None:
    """Print blocks recomputed against all kept, in order of memory: a process's peak only rises."""
    import time
    from pathlib import Path

    import numpy as np

    from shared.specs import TASKS
    from shared.weights import init_weights
    from tf_impl.kit import data, models, runtime, training

    task, status = TASKS["text-gpt-deep"], Path("/proc/self/status")
    x = np.random.default_rng(0).integers(0, 98, (task.compute_batch, task.model.sequence_length))
    x, y = data.to_device(x, x)
    print("text-gpt-deep, batch 16: s a step, loss after five, peak resident memory")
    for blocks in ("block*", "block[02468], block10", ""):
        model = models.build(task.model, init_weights(task.model, seed=0))
        model = apply_checkpointing(model, blocks=blocks)
        optimizer = training.make_optimizer(model, task.recipe)
        step = training.make_train_step(model, optimizer, training.cross_entropy)
        step(x, y)
        start = time.perf_counter()
        losses = [runtime.to_float(step(x, y)) for _ in range(4)]
        seconds = (time.perf_counter() - start) / len(losses)
        lines = status.read_text().splitlines() if status.exists() else []
        peak = next((line[6:].strip() for line in lines if line.startswith("VmHWM:")), "unknown")
        print(f"{blocks or 'none':24}{seconds:7.3f}{losses[-1]:9.4f}  {peak}")


if __name__ == "__main__":
    main()
