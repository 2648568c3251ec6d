"""Sub-models: groups of layers of a flat functional model as models.

A functional Keras model is flat, so what its author thinks of as a block may be a group of layers
whose names begin alike. What works on one layer at a time, such as recomputation, needs each group
as one layer.
"""

import re
from fnmatch import fnmatchcase
from functools import partial

import tensorflow as tf


def find_blocks(model: tf.keras.Model, blocks: str) -> tuple[list, dict[str, list]]:
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


def with_submodels(model: tf.keras.Model, groups: dict[str, list]) -> tuple:
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
