"""Samples of many lengths: padding, batches by length, packing, and graphs for all lengths."""

from __future__ import annotations

import time
from functools import partial

import numpy as np

from bench.harness import memory
from bench.harness.examples import examples
from bench.harness.helpers import figure, kit_module, once
from bench.harness.plan import Price, Technique, Work, Workload, warm
from shared import lengths
from shared.user_model import arrays

SEED = 2026
SAMPLES, TESTED = 256, 256
COMPILE_LIMIT = 8  # graphs, after which torch.compile leaves a function to eager
USUAL = {"pt_impl": "plain", "tf_impl": "relaxed"}  # eager; a graph that fits all
# Graphs that are enough for all shapes: relaxed takes one more for each axis that varies.
FEWEST = {"dynamic": 1, "marked": 1, "signature": 1, "relaxed": 3}

UNSUPPORTED = {
    "pt": {"bucketed_batches": "PyTorch has no loader with buckets: a sampler batches by length"}
}

_pt = partial(warm, frameworks=("pt",), requires="compiler")
_tf = partial(warm, frameworks=("tf",))

TECHNIQUE = Technique(
    family="train_step",
    name="varying_lengths",
    title="Samples of many lengths",
    remedies=("overhead",),
    user_model="lengths are a property of the data, and the file makes the batches",
    variants=(
        warm("longest", "to the longest of the batch", role="baseline", padding="longest"),
        warm("full", "to the longest of all", padding="full"),
        warm("multiple", "to a multiple of 16", padding="multiple"),
        warm("few", "to one of few lengths", padding="few"),
        warm("by_length", "batches by length", by_length=True, changes="math"),
        warm("packed", "packed, with a block mask", packed=True),
        _tf("bucketed", "bucket_by_sequence_length", bucketed=True, changes="math"),
        # Eight graphs: they take as long to compile as all else that is compiled here together.
        _pt("static", "torch.compile, static", "full", shapes="static"),
        _pt("dynamic", "torch.compile, dynamic", shapes="dynamic"),
        _pt("marked", "torch.compile, lengths marked", shapes="marked"),
        _pt(
            "static_few",
            "torch.compile, static, few lengths",
            shapes="static",
            padding="few",
            against="few",
        ),
        _tf("traced", "tf.function, a graph a shape", shapes="plain"),
        _tf("signature", "tf.function with a signature", shapes="signature"),
    ),
    workloads=(
        Workload("text-gpt", "compute", effort="ordinary", timed=False),
        Workload("text-gpt-10m", "compute", effort="full", timed=False),
    ),
    differs_by_design=(
        "All rows that name no graph are eager in PyTorch, and in TensorFlow a tf.function that "
        "relaxes shapes after the first.",
        "static, dynamic and marked are torch.compile's; traced and signature are tf.function's, "
        "and bucketed is tf.data's.",
    ),
    notes=(
        "Both frameworks train on the same samples: windows of the task's text, cut to lengths "
        "from a log-normal distribution, half of them below a fifth of the longest. All rows "
        "except by_length and bucketed have the same samples in each step, and so the same "
        "losses.",
        "The first epoch traces and compiles, and is shown separately. Samples/s and tokens/s "
        "are of later epochs, of steps only, and count real tokens. Graphs are those of all "
        "epochs; static gives up after eight. It compiles all of them, which takes minutes, and "
        "needs --effort full; static_few shows the same with three.",
        "The test loss is a mean over the real tokens of other samples, after the first epoch "
        "and one per repetition, from one seed: rows of the same steps differ by rounding. It "
        "can't judge by_length and bucketed.",
    ),
    price=Price(),
    probes=True,
)


def probe(impl, work: Work, batches) -> dict[str, dict]:
    """Padding, rates, graphs, memory, and the test loss after the same number of epochs."""
    settings = dict(work.settings)
    technique = impl.train_step.varying_lengths
    model = kit_module(impl, "packed").build(work.task.model, work.weights)
    optimizer = impl.kit.training.make_optimizer(model, work.task.recipe)
    shapes = settings.pop("shapes", USUAL[impl.__name__])
    step = technique.make_train_step(model, optimizer, shapes=shapes)
    samples = drawn(work, "train", SAMPLES, SEED)
    seconds, seen, tokens, slots = [], set(), 0, 0
    for epoch in range(1 + work.repetitions):
        made = list(epoch_of(impl, work, samples, epoch, **settings))
        start = time.perf_counter()
        for x, y in made:
            step(x, y)
        impl.kit.runtime.synchronize()
        seconds.append(time.perf_counter() - start)
        seen |= {tuple(y.shape) for _, y in made}
        tokens += sum(int((arrays(y) != technique.NO_LABEL).sum()) for _, y in made)
        slots += sum(int(np.prod(y.shape)) for _, y in made)
    graphs = impl.kit.runtime.trace_count(step) or 0
    _check(impl, shapes, graphs, len(seen), tokens, (1 + work.repetitions) * total(samples))
    return {
        "samples_per_s": figure("samples/s", [SAMPLES / s for s in seconds[1:]]),
        "tokens_per_s": figure("tokens/s", [total(samples) / s for s in seconds[1:]]),
        "padding": once("%", 100 * (1 - tokens / slots)),
        "first_epoch": once("s", seconds[0]),
        "graphs": once("", graphs),
        "memory": once("bytes", memory.peak()),
        "test_loss": once("", held_out_loss(impl, work, model)),
        "evidence": {"shapes": len(seen), "graphs": graphs, "tokens": tokens, "slots": slots},
    }


def drawn(work: Work, split: str, count: int, seed: int) -> list[tuple]:
    """Samples of a split, cut to drawn lengths."""
    x, y = examples(work, count, split)
    most = work.task.model.sequence_length
    return lengths.shorten(x, y, lengths.skewed_lengths(len(x), most=most, seed=seed))


def total(samples: list[tuple]) -> int:
    """Real tokens."""
    return sum(len(codes) for codes, _ in samples)


def epoch_of(
    impl, work: Work, samples: list, epoch: int, *, by_length=False, packed=False, **settings
):
    """The batches of an epoch on the device; the same samples in each, but by length."""
    technique, most = impl.train_step.varying_lengths, work.task.model.sequence_length
    cut = lengths.batches(
        [len(codes) for codes, _ in samples],
        batch_size=work.batch_size,
        seed=SEED + epoch,
        by_length=by_length,
    )
    if settings.get("bucketed"):
        order = [samples[one] for some in cut for one in some]
        yield from technique.bucketed_batches(order, batch_size=work.batch_size)
        return
    for some in cut:
        chosen = [samples[one] for one in some]
        if packed:
            x, y = technique.pack(chosen, most=most)
        else:
            x, y = technique.pad(chosen, most=most, **settings)
        yield tuple(_on_device(impl, part) for part in x), _on_device(impl, y)


def _on_device(impl, part):
    """TensorFlow places tensors itself."""
    return part.to(impl.kit.runtime.device()) if hasattr(part, "to") else part


def held_out_loss(impl, work: Work, model) -> float:
    """The mean over the real tokens of samples of the test split."""
    technique, predict = impl.train_step.varying_lengths, impl.kit.training.make_predict(model)
    samples = drawn(work, "test", TESTED, SEED + 1)
    summed = 0.0
    for (codes,), y in epoch_of(impl, work, samples, 0, padding="full"):
        real = int((arrays(y) != technique.NO_LABEL).sum())
        summed += real * impl.kit.runtime.to_float(technique.token_loss(predict(codes), y))
    return summed / total(samples)


def _check(impl, shapes: str, graphs: int, seen: int, tokens: int, wanted: int) -> None:
    """All samples were trained on, and there are as many graphs as the setting makes."""
    if tokens != wanted:
        raise RuntimeError(f"{tokens} real tokens were trained on, there are {wanted}")
    if shapes == "plain" and graphs != (seen if impl.__name__ == "tf_impl" else 0):
        raise RuntimeError(f"{seen} shapes were traced {graphs} times")
    if shapes == "static" and graphs != min(seen, COMPILE_LIMIT):
        raise RuntimeError(f"{seen} static shapes made {graphs} graphs")
    if graphs > FEWEST.get(shapes, graphs):
        raise RuntimeError(f"{graphs} graphs for {seen} shapes: {FEWEST[shapes]} would do")
