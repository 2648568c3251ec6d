"""Where values of a Keras model are rounded, so that LiteRT computes with integers throughout.

Places in Keras 3; in tf_keras the first ranges of what TensorFlow Model Optimization (tfmot) wraps.

It has no twin: torchao's quantizer finds the places in a graph of operators.
"""

from collections import Counter, defaultdict

import tensorflow as tf

from tf_impl.kit.tracing import inlined, outputs

_PRODUCTS = ("Conv1D", "Conv2D", "DepthwiseConv2D", "Dense", "EinsumDense")
# Layers between products whose output gets a grid.
_JOINTS = (
    *("Add", "Subtract", "Multiply", "Average", "Concatenate", "Activation", "ReLU"),
    *("LeakyReLU", "GlobalAveragePooling1D", "GlobalAveragePooling2D"),
)
# Layers that give values that they got, so that these stay on their grid. LiteRT's averages of
# windows lie on it, too: it has no others.
_MOVERS = (
    *("Flatten", "Reshape", "Permute", "ZeroPadding1D", "ZeroPadding2D", "MaxPooling1D"),
    *("MaxPooling2D", "AveragePooling1D", "AveragePooling2D"),
    *("GlobalMaxPooling1D", "GlobalMaxPooling2D"),
)


def rounding_places(model: tf.keras.Model, inputs) -> dict:
    """Return layer -> some of "input", "inside" and "output"; every product is there.

    The input of a product, unless it lies on a grid already. Its output, behind the BatchNorm and
    the ReLU that the converter makes a part of it; "inside", before any other activation of its
    own. Outputs of sums and the like, so that these run over integers, too. And all that is
    concatenated: what has no grid would get its neighbour's, which may be too narrow for it.
    "several" is there, too, for a layer that is called several times.
    """
    calls, returned = _record(model, inputs)
    places, grid, done = defaultdict(set), set(), set()
    users, makers = defaultdict(list), {}
    for number, (layer, given, made) in enumerate(calls):
        for tensor in given:
            users[id(tensor)].append(number)
        makers |= {id(tensor): layer for tensor in made}

    def follower(number: int) -> int | None:
        """The only call that reads the output of another one."""
        place = id(calls[number][2][0])
        return users[place][0] if len(users[place]) == 1 and place not in returned else None

    for number, (layer, given, made) in enumerate(calls):
        if number in done:
            continue
        if is_product(layer):
            names = places[layer]  # may stay empty: the kernel is rounded all the same
            if id(given[0]) not in grid:
                names.add("input")
            if not _is_fused(layer.activation):
                names.add("inside")
            elif layer.activation is tf.keras.activations.linear:
                place = follower(number)
                if place and _is(calls[place][0], ("BatchNormalization",)):
                    number, place = place, follower(place)
                    done.add(number)
                if place and _is_relu(calls[place][0]):
                    number = place
                    done.add(number)
            places[calls[number][0]].add("output")
            grid.add(id(calls[number][2][0]))
        elif _is(layer, _JOINTS) and all(tensor.dtype.is_floating for tensor in made):
            bare = {id(tensor) for tensor in given} - grid
            if _is(layer, ("Concatenate",)):
                for place in bare & makers.keys():
                    places[makers[place]].add("output")
                grid |= bare & makers.keys()
            places[layer].add("output")
            grid.update(map(id, made))
        elif _is(layer, _MOVERS) and all(id(tensor) in grid for tensor in given):
            grid.update(map(id, made))
    for layer, times in Counter(layer for layer, *_ in calls if layer in places).items():
        places[layer] |= {"several"} if times > 1 else set()
    return dict(places)


def is_product(layer) -> bool:
    """Whether the layer's kernel is rounded. Transposed and separable ones stay in float32."""
    return _is(layer, _PRODUCTS)


def _is(layer, names: tuple[str, ...]) -> bool:
    return isinstance(layer, tuple(getattr(tf.keras.layers, name) for name in names))


def _is_fused(activation) -> bool:
    kinds = tf.keras.activations
    return activation in (None, kinds.linear, kinds.relu, kinds.relu6)


def _is_relu(layer) -> bool:
    if _is(layer, ("ReLU",)):
        return layer.max_value in (None, 6) and not layer.negative_slope and not layer.threshold
    return _is(layer, ("Activation",)) and _is_fused(layer.activation)


def _record(model, inputs) -> tuple[list, set[int]]:
    """Calls of innermost layers, (layer, what goes in, what comes out); tensors that are returned.

    A product is one with the layer that may be its activation. Calls that hand on what they got,
    such as those of dropout, are left out.
    """
    calls = []

    def recording(layer, plain):
        def call(*arguments, **settings):
            output = plain(*arguments, **settings)
            given, made = (
                [part for part in tf.nest.flatten(side) if tf.is_tensor(part)]
                for side in ((arguments, settings), output)
            )
            if not {id(part) for part in made} <= {id(part) for part in given}:
                calls.append((layer, given, made))
            return output

        return call

    layers = list(model._flatten_layers(include_self=False))
    products = [layer for layer in layers if is_product(layer)]
    inside = {id(part) for one in products for part in one._flatten_layers(include_self=False)}
    leaves = [one for one in layers if len(one._flatten_layers()) == 1 and id(one) not in inside]
    innermost = [layer for layer in layers if layer in products or layer in leaves]
    for layer in innermost:
        layer.call = recording(layer, layer.call)
    try:
        with inlined():
            output = outputs(model, inputs)
    finally:
        for layer in innermost:
            del layer.call
    return calls, {id(part) for part in tf.nest.flatten(output)}


def start_tfmot_ranges(model: tf.keras.Model, ranges: list, example_inputs) -> None:
    """Let activations start with their ranges on the examples, with BatchNorm as when predicting.

    ranges: their ends. Symptom, in tfmot 0.8: they start at -6 and 6, from where its average takes
    thousands of steps: each pass goes a thousandth of the way to what it sees, and here the whole
    way. What a layer sees is right once those before it are. It can go with tf_keras.
    """
    layers = [getattr(layer, "layer", layer) for layer in model.layers]
    norms = [layer for layer in layers if isinstance(layer, tf.keras.layers.BatchNormalization)]
    trainable = [norm.trainable for norm in norms]
    for norm in norms:
        norm.trainable = False  # Keras's switch to running statistics, which then stay
    for _ in range(len(ranges) // 2 + 1):
        before = [tf.identity(end) for end in ranges]
        model(example_inputs, training=True)
        for end, old in zip(ranges, before, strict=True):
            end.assign(old + (end - old) / 0.001)
        if all(abs(end - old) <= 0.01 * abs(old) for end, old in zip(ranges, before, strict=True)):
            break
    for norm, found in zip(norms, trainable, strict=True):
        norm.trainable = found
