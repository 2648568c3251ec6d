"""What TensorFlow's own counter finds in a prediction: `python -m tests.kit.flops_worker keras3`.

Its last line is JSON: spec -> operator -> FLOPs.
"""

import json

from shared.specs import TASKS, BottleneckSpec, CNNSpec, DetectorSpec, GPTSpec, ResNetSpec
from tests import workers

BATCH_SIZE = 3
# Of the same parts as smaller ones, and seconds long: they are counted in campaigns.
LARGE = {"text-gpt-deep", "text-gpt-dropout", "text-gpt-wide", "text-gpt-10m", "text-bert-10m"}
LARGE |= {"text-gpt-base", "text-bert-base", "photos-resnet50", "digits-resnet20", "text-gpt"}
LARGE |= {"digits-few"}  # whose model is that of digits-cnn
# Those of the tasks, and some with odd sizes, which round up where they are halved.
SPECS = {
    name: task.model for name, task in TASKS.items() if workers.campaign() or name not in LARGE
} | {
    "odd-cnn": CNNSpec((9, 13, 3), ((4, 1), (5, 2), (6, 2)), num_classes=7),
    "odd-resnet": ResNetSpec((9, 13, 3), 2, (4, 6, 10), num_classes=7),
    "odd-bottleneck": BottleneckSpec((9, 13, 3), (1, 2), (4, 6), num_classes=7),
    "odd-detector": DetectorSpec((9, 13, 3), ((4, 1), (5, 2), (5, 2)), (1, 2), (4.0,), 7),
    "odd-gpt": GPTSpec(vocabulary=11, sequence_length=7, width=12, heads=3, layers=3),
}


def operators(node):
    yield node.name, node.float_ops
    for child in node.children:
        yield from operators(child)


def main() -> None:
    import tensorflow as tf

    from tf_impl.kit import models

    profiler = tf.compat.v1.profiler
    options = profiler.ProfileOptionBuilder(profiler.ProfileOptionBuilder.float_operation())
    options = options.with_empty_output().build()
    counts = {}
    for name, spec in SPECS.items():
        model = models.build(spec)
        gpt = isinstance(spec, GPTSpec)
        shape = (spec.sequence_length,) if gpt else spec.input_shape
        x = tf.TensorSpec((BATCH_SIZE, *shape), tf.int64 if gpt else tf.float32)
        predict = tf.function(lambda x, model=model: model(x, training=False))
        graph = predict.get_concrete_function(x).graph
        counts[name] = dict(operators(profiler.profile(graph, options=options, cmd="op")))
    print(json.dumps(counts))


if __name__ == "__main__":
    main()
