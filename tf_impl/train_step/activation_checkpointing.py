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
- PyTorch can keep some operators' outputs (`save_products`) and hand what is kept to the host and
  back (`offload`). `tf.recompute_grad` repeats all of a block, and keeps its input on the device.
- A gradient penalty takes gradients of gradients: `tf.recompute_grad` has none, PyTorch has.
- TensorFlow's graph optimizer prunes a block's last product from the second run, since no gradient
  needs it; PyTorch stops the second run there.

When it helps and when it hurts: it helps where activations outweigh parameters, gradients and the
optimizer's state: deep models, long sequences, large batches. It costs up to a third of a step's
arithmetic. Small blocks save nothing, since each keeps its input; one block around everything
saves nothing either, since its inside is all alive when it runs again. The executor runs what is
ready in an order of its own, so the peak differs between processes: measure yours.

Run it alone: `python -m tf_impl.train_step.activation_checkpointing` prints baseline against
technique.

Copy with it: nothing.
"""

import re
from fnmatch import fnmatchcase
from functools import partial

import tensorflow as tf

_ADVICE = "anew in the second run: use keras.random with a SeedGenerator of its layer"


def apply_checkpointing(model: tf.keras.Model, *, blocks: str) -> tf.keras.Model:
    """Have the blocks of `model` recomputed in the backward pass.

    A block takes any arguments, one of them floating-point, and returns any tensors. Source:
    `tf.recompute_grad`.

    Args:
        model: with its variables.
        blocks: comma-separated names, or patterns with *, ? and [] ("block*", "stage*.block?"). A
            name is that of a layer at any depth or, in a functional or Sequential model, of a
            group: the layers whose names go on with a dot or underscore (not those that Keras
            numbers, as in dense_1), with what lies between them. What lies within another chosen
            block is recomputed with it. "" chooses none.

    Returns:
        The model to train: with groups a new functional model, not compiled, that shares its layers
        with `model`; without, `model`, changed. Either trains in `fit`, too. Saving keeps no
        recomputation.

    Raises:
        ValueError: before anything is changed, unknown names, blocks that overlap or are recomputed
            already and a model without variables.
        NotImplementedError: tf_keras; and, when the model is traced, a block that adds a loss,
            takes or gives complex numbers, draws random numbers without a Keras seed generator of
            its own or changes variables of others; and a gradient of a block's gradient.
    """
    if not model.built:
        raise ValueError("the model has no variables yet: call it once on an example input")
    if blocks.strip(", ") and not hasattr(tf.keras, "StatelessScope"):
        raise NotImplementedError("tf_keras would draw other dropout masks again: use Keras 3")
    layers, groups = _find_blocks(model, blocks)
    for layer in layers:
        if getattr(layer.call, "func", None) is _recomputed:
            raise ValueError(f"blocks: {layer.name!r} is recomputed already")
    if groups:
        model, submodels = _with_submodels(model, groups)
        layers = layers + submodels
    for layer in layers:
        layer.call = partial(_recomputed, layer, layer.call)
    return model


# A block that runs twice ----------------------------------------------------------------------


def _recomputed(layer, forward, /, *args, **kwargs):
    """Run `forward`, and have the backward pass run it again, from the state that it found."""
    inputs = tf.nest.flatten((args, kwargs))
    _refuse_complex(layer, inputs)
    floating = [index for index, value in enumerate(inputs) if _is_float(value)]
    if not floating:
        raise ValueError(f"{layer.name!r} has no floating-point input: it can't be recomputed")
    context = layer._get_call_context()
    modes = {name: context.get_value(name) for name in layer._call_context_args}
    state = layer.non_trainable_variables  # statistics and seeds
    state_before = [tf.identity(variable.value) for variable in state]
    outputs_of_first_run = []

    def arguments(tensors):
        """The block's arguments with these tensors in the places of its floating-point ones."""
        values = list(inputs)
        for index, tensor in zip(floating, tensors, strict=True):
            values[index] = _masked_like(inputs[index], tensor)
        return tf.nest.pack_sequence_as((args, kwargs), values)

    def run_first(tensors):
        args, kwargs = arguments(tensors)
        # Seeds wait for the inputs, or the masks of all blocks would be drawn, and kept, ahead.
        with tf.control_dependencies(tensors):
            outputs = _run_checked(layer, forward, args, kwargs)
        outputs_of_first_run.append(outputs)
        return outputs

    def run_again(tensors):
        args, kwargs = arguments(tensors)
        with tf.control_dependencies(tensors):  # which in the second run wait for the gradient
            values = [tf.identity(value) for value in state_before]
        with tf.keras.StatelessScope(list(zip(state, values, strict=True))) as scope:
            # The whole layer, since autocast and `training` reach what is inside from there.
            outputs = _call_plainly(layer, forward, args, modes | kwargs)
        if scope.state_mapping.keys() - {id(variable) for variable in state}:
            raise NotImplementedError(f"{layer.name!r} changes state of others, {_ADVICE}")
        return outputs

    @tf.recompute_grad
    def run(*tensors):
        outputs = run_again(tensors) if outputs_of_first_run else run_first(tensors)
        return [value for value in tf.nest.flatten(outputs) if _is_float(value)]

    results = iter(run(*[inputs[index] for index in floating]))
    outputs = outputs_of_first_run[0]
    flat = [
        _masked_like(value, next(results)) if _is_float(value) else value
        for value in tf.nest.flatten(outputs)
    ]
    return tf.nest.pack_sequence_as(outputs, flat)


def _call_plainly(layer, forward, args, kwargs):
    """Call the layer with its own `call` in place of the one that recomputes."""
    recomputing, layer.call = layer.call, forward
    try:
        return layer(*args, **kwargs)
    finally:
        layer.call = recomputing


def _run_checked(layer, forward, args, kwargs):
    """Run, and refuse what the second run would get wrong."""
    graph = tf.compat.v1.get_default_graph()
    operations_before = len(graph.get_operations())
    losses_before = _count_losses(layer)
    outputs = forward(*args, **kwargs)
    _refuse_complex(layer, tf.nest.flatten(outputs))
    if _count_losses(layer) > losses_before:
        raise NotImplementedError(f"{layer.name!r} adds a loss, which no gradient would get out of")
    for operation in graph.get_operations()[operations_before:]:
        if operation.op_def.is_stateful and re.search("Random|Rng|Multinomial", operation.type):
            raise NotImplementedError(f"{layer.name!r} draws with {operation.type}, {_ADVICE}")
    return outputs


def _count_losses(layer) -> int:
    return sum(len(part._losses) for part in layer._flatten_layers())


def _is_float(value) -> bool:
    return tf.is_tensor(value) and tf.as_dtype(value.dtype).is_floating


def _refuse_complex(layer, values) -> None:
    if any(tf.is_tensor(value) and tf.as_dtype(value.dtype).is_complex for value in values):
        raise NotImplementedError(
            f"{layer.name!r} takes or gives complex numbers, whose gradient tf.recompute_grad loses"
        )


def _masked_like(source, tensor):
    """Give `tensor` the Keras mask of what it stands for."""
    if getattr(source, "_keras_mask", None) is not None:
        tensor._keras_mask = source._keras_mask
    return tensor


# The blocks of a model ------------------------------------------------------------------------


def _find_blocks(model: tf.keras.Model, blocks: str) -> tuple[list, dict[str, list]]:
    """The single layers and the groups of `blocks`, but for those inside another of them."""
    groups, nested = _named_layers(model)
    known = nested | groups
    inside = {}  # block -> ids of all layers in it
    for pattern in filter(None, map(str.strip, blocks.split(","))):
        names = [name for name in known if fnmatchcase(name, pattern)]
        if not names:
            raise ValueError(
                f"blocks: the model has no block {pattern!r}; it has {', '.join(known)}"
            )
        for name in names:
            inside[name] = {id(part) for layer in known[name] for part in layer._flatten_layers()}
    chosen_layers, chosen_groups, covered = [], {}, set()
    for name in sorted(inside, key=lambda name: len(inside[name]), reverse=True):
        if inside[name] <= covered:
            continue
        covered |= inside[name]
        if len(groups.get(name, ())) > 1:
            chosen_groups[name] = groups[name]
        else:
            chosen_layers += known[name]
    return chosen_layers, chosen_groups


def _named_layers(model: tf.keras.Model) -> tuple[dict[str, list], dict[str, list]]:
    """Layers by the names of groups that a flat model has, and by their own where they are nested.

    A layer "block1.attention.qkv" is in the groups "block1", "block1.attention" and its own.
    """
    flat = hasattr(getattr(model, "_functional", model), "operations")
    groups, nested = {}, {}
    for layer in dict.fromkeys(model._flatten_layers(include_self=False)):
        if isinstance(layer, tf.keras.layers.InputLayer):
            continue
        if not flat or layer not in model.layers:
            nested.setdefault(layer.name, []).append(layer)
            continue
        for end in re.finditer("[._]|$", layer.name):
            if not re.fullmatch(r"_\d+", layer.name[end.start() :]):  # Keras's numbers: dense_1
                groups.setdefault(layer.name[: end.start()], []).append(layer)
    return groups, nested


# Groups as sub-models -------------------------------------------------------------------------


def _with_submodels(model: tf.keras.Model, groups: dict[str, list]) -> tuple:
    """Rebuild a functional model with a sub-model for each group; return it and the sub-models.

    A node is one call of a layer. Nodes of a group become one call of its sub-model, and all calls
    are made again, in an order in which each finds its inputs.
    """
    function = getattr(model, "_functional", model)
    levels = function._nodes_by_depth
    nodes = [n for depth in sorted(levels, reverse=True) for n in levels[depth] if not n.is_input]
    owner = _owners(nodes, groups)
    calls = [
        (node.input_tensors, node.outputs, partial(_call_node, node))
        for node in nodes
        if node not in owner
    ]
    submodels = []
    for name in groups:
        entering, leaving = _borders(nodes, owner, name, function.outputs)
        submodel = tf.keras.Model(entering, leaving, name=name)
        submodels.append(submodel)
        calls.append((entering, leaving, partial(_call_submodel, submodel, entering)))
    tensors = {id(tensor): tensor for tensor in function.inputs}  # the old model's -> the new one's
    while calls:
        ready = [call for call in calls if all(id(tensor) in tensors for tensor in call[0])]
        if not ready:
            raise ValueError(f"blocks: {', '.join(groups)} feed one another in a circle")
        for _, leaving, call in ready:
            results = tf.nest.flatten(call(tensors))
            tensors |= {id(old): new for old, new in zip(leaving, results, strict=True)}
        calls = [call for call in calls if call not in ready]
    outputs = tf.nest.map_structure(lambda tensor: tensors[id(tensor)], function.output)
    return tf.keras.Model(function.input, outputs, name=model.name), submodels


def _call_node(node, tensors: dict):
    """Make a call of the old model again, on the new model's tensors."""
    args, kwargs = node.arguments.fill_in(tensors)
    return node.operation(*args, **kwargs)


def _call_submodel(submodel, entering: list, tensors: dict):
    return submodel([tensors[id(tensor)] for tensor in entering])


def _owners(nodes: list, groups: dict[str, list]) -> dict:
    """Each node of a group -> the group's name."""
    owner = {}
    for name, layers in groups.items():
        for node in _between(nodes, layers):
            if owner.setdefault(node, name) != name:
                raise ValueError(f"blocks: {name!r} and {owner[node]!r} overlap")
    return owner


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


def _borders(nodes: list, owner: dict, name: str, outputs: list) -> tuple[list, list]:
    """The tensors that enter a group, and those that leave it."""
    inner = [node for node in nodes if owner.get(node) == name]
    outer = [node for node in nodes if owner.get(node) != name]
    made = {id(tensor): tensor for node in inner for tensor in node.outputs}
    used = {id(tensor): tensor for node in inner for tensor in node.input_tensors}
    wanted = {id(tensor) for node in outer for tensor in node.input_tensors}
    wanted |= {id(tensor) for tensor in outputs}
    entering = [tensor for key, tensor in used.items() if key not in made]
    leaving = [tensor for key, tensor in made.items() if key in wanted]
    return entering, leaving


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
