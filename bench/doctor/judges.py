"""Which facts are mistakes: pure functions, facts in, findings out."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from bench.analysis.verdicts import DELTA
from bench.doctor.findings import Finding
from bench.doctor.host import Host
from bench.harness.machine import ISA_LIMITS
from bench.record import FRAMEWORKS
from shared.health import (
    Batches,
    Denormals,
    Facts,
    Mode,
    Pools,
    Predicting,
)
from shared.onednn import VARIABLE

# What sets the size of the pool in which operators run.
SET_BY = {
    "pt": ("OMP_NUM_THREADS", "MKL_NUM_THREADS"),
    "tf": ("TF_NUM_INTRAOP_THREADS",),
}
BY_CODE = {
    "pt": "torch.set_num_threads({})",
    "tf": "tf.config.threading.set_intra_op_parallelism_threads({})",
}
OFF = ("", "0", "false", "no", "off")
SLOWER = 1.3  # times the time, from which denormal numbers cost something
SLOW_MODE = 1.2
FEW_DENORMALS = 1e-3  # of all values: with fewer they are chance
PADDED, MOST_SHAPES = 0.25, 2
FETCHING = 0.1  # of a step and its batch
COPIES = 5.0  # times the copy of a batch that fetching it row by row takes at least
PREDICTS = 3.0  # times the model itself
SLOW_BFLOAT16 = 1.0  # of float32's speed
USES = {
    "bfloat16": re.compile(r"bfloat16|autocast|mixed_precision"),
    "int8": re.compile(r"\bq?u?int8\b|quantiz"),
}
# A variable, what it does where it is set (but to "off"), and to which framework.
SWITCHES = {
    "TORCH_COMPILE_DISABLE": ("pt", "torch.compile does nothing"),
    "TORCHDYNAMO_DISABLE": ("pt", "torch.compile does nothing"),
    "CUDA_LAUNCH_BLOCKING": ("pt", "each kernel of the GPU is waited for"),
    "TF_DISABLE_MKL": ("tf", "TensorFlow computes without oneDNN"),
}


# Threads -----------------------------------------------------------------------------------------


def quota(host: Host) -> Iterator[Finding]:
    """A quota below the affinity, which thread pools ignore, unless variables set the size."""
    told = all(any(map(host.number, names)) for names in SET_BY.values())
    if host.usable < host.affinity and not told:
        yield Finding(
            "quota",
            "",
            f"The quota is {host.quota:g} cores, but the frameworks see {host.affinity} and start "
            "that many threads, which then wait for each other",
            f"cpu quota {host.quota:g}, affinity {host.affinity}",
            f"set {' and '.join(f'{n[0]}={host.usable}' for n in SET_BY.values())}",
            technique="serving_threads",
        )


def variables(host: Host) -> Iterator[Finding]:
    """Pools that variables make too small or too large; asks no process.

    PyTorch uses at most one thread per core, whatever OMP_NUM_THREADS says.
    """
    for framework, names in SET_BY.items():
        for name in names:
            if (threads := host.number(name)) is not None:
                if framework == "pt":
                    threads = min(threads, host.affinity, host.physical)
                yield from _pool(host, framework, Pools({"intra-op": threads}), f"{name}={threads}")
                break


def pools(host: Host, framework: str, facts: Facts) -> Iterator[Finding]:
    """The pool of operators: too small or too large."""
    if facts.set_by_file:
        yield from _pool(host, framework, facts.set_by_file, "the file sets it")
    elif facts.pools:
        set_by = [f"{n}={host.variables[n]}" for n in SET_BY[framework] if host.number(n)]
        yield from _pool(host, framework, facts.pools, set_by[0] if set_by else "")
    else:  # stopped before it told: what its variables say
        yield from (one for one in variables(host) if one.framework == framework)


def _pool(host: Host, framework: str, known: Pools, by: str) -> Iterator[Finding]:
    threads = known.threads["intra-op"]
    if host.enough <= threads <= host.usable or not threads:
        return
    shown = known.gain is None or known.gain[0] > 1 + DELTA  # unmeasured, the count decides
    why = f" ({by})" if by else ""
    if threads < host.enough:
        check, what = "pool too small", f"It computes in {threads} of {host.usable} threads{why}"
    else:
        check, what = "pool too large", f"It has {threads} threads for {host.usable} cores{why}"
    name = by.partition("=")[0]
    if name in SET_BY[framework]:
        do = f"leave {name} unset, or set it to {host.usable}"
    else:
        do = BY_CODE[framework].format(host.usable)
    if name == "OMP_NUM_THREADS":
        do += "; TensorFlow ignores this variable, so the frameworks have different thread counts"
    if not shown:
        do = f"nothing: {host.usable} threads were not shown to be faster; check on a quiet machine"
    technique = "serving_threads" if shown else ""
    measured = _speed(host, known, threads)
    yield Finding(check, framework, what, measured, do, technique, wrong=shown)


def _speed(host: Host, known: Pools, threads: int) -> str:
    """The speed of a matrix product in a pool, and in one of the right size."""
    if not known.flops:
        return ""
    measured = f"a matrix product runs at {known.flops / 1e9:.3g} GFLOP/s in a pool of {threads}"
    if known.gain:
        low, high = known.gain
        return f"{measured}, and {low:.2g} to {high:.2g} times as fast in one of {host.usable}"
    return f"{measured}, and keeps {known.busy:.1f} cores busy"


def workers(host: Host, batches: Batches) -> Iterator[Finding]:
    """More data workers than cores."""
    if batches.workers > host.usable:
        yield Finding(
            "too many data workers",
            "",
            f"The loader has {batches.workers} workers, but there are {host.usable} cores, which "
            "the step needs, too",
            f"num_workers={batches.workers}, {host.usable} cores",
            f"num_workers={max(1, host.usable - 1)} or fewer; with data in memory, none",
        )


def runtime(host: Host, name: str, threads: int) -> Iterator[Finding]:
    """A runtime's pool that is too small or too large."""
    if threads and not host.enough <= threads <= host.usable:
        yield Finding(
            "pool of a runtime",
            "",
            f"{name} starts {threads} threads for {host.usable} cores",
            f"counted in a new session: {threads}",
            f"set its number of threads to {host.usable} where you make the session",
            technique="serving_threads",
        )


# Variables and instructions ----------------------------------------------------------------------


def switches(host: Host) -> Iterator[Finding]:
    """Variables that switch something off."""
    for name, (framework, effect) in SWITCHES.items():
        if host.variables.get(name, "").lower() not in OFF:
            evidence = f"{name}={host.variables[name]}"
            yield Finding("switched off", framework, effect.capitalize(), evidence, f"unset {name}")
    for name in ISA_LIMITS:
        if name in host.variables:
            yield Finding(
                "limited instructions",
                "",
                "Libraries may not use all instructions of this processor",
                f"{name}={host.variables[name]}",
                f"unset {name}",
            )


def onednn(
    host: Host, without_s: float | None = None, with_s: float | None = None
) -> Iterator[Finding]:
    """TensorFlow without oneDNN, by a variable or by default.

    Takes seconds of a convolution without and with it, if measured; unmeasured it counts as a
    mistake.
    """
    value = host.variables.get(VARIABLE)
    off = value is not None and value.lower() in OFF[1:]
    if not (off or without_s or (value is None and host.lacks("oneDNN in TensorFlow"))):
        return
    why = "by default it uses oneDNN only with AVX-512 VNNI, AVX-512 bfloat16, AVX-VNNI or AMX"
    measured = f"{VARIABLE}={value}" if off else f"{VARIABLE} is not set"
    if without_s and with_s:
        measured += f"; a convolution with its gradients takes {without_s * 1e3:.3g} ms, with "
        measured += f"oneDNN {with_s * 1e3:.3g} ms"
    shown = not (without_s and with_s) or without_s > SLOWER * with_s
    do = f"set {VARIABLE}=1 before TensorFlow is imported" if shown else "nothing"
    yield Finding(
        "without oneDNN",
        "tf",
        "TensorFlow computes without oneDNN" + ("" if off else f": {why}"),
        measured,
        f"{do}, and compare your own steps",
        technique="onednn",
        wrong=shown,
    )


def instructions(
    host: Host, products: dict[str, dict[str, float]], source: str
) -> Iterator[Finding]:
    """Dtypes whose instructions the processor lacks: a mistake if the file uses them.

    products: framework -> dtype -> FLOP/s, as far as measured.
    """
    for dtype, pattern in USES.items():
        if not (names := host.lacks(dtype)):
            continue
        used = pattern.search(source)
        ratios = {
            FRAMEWORKS[side]: flops[dtype] / flops["float32"]
            for side, flops in products.items()
            if dtype in flops
        }
        slow = min(ratios.values(), default=0.0) < SLOW_BFLOAT16
        compared = ", ".join(f"{ratio:.2g} in {name}" for name, ratio in ratios.items())
        measured = f"; speed of a {dtype} product over float32: {compared}" if ratios else ""
        yield Finding(
            f"no instructions for {dtype}",
            "",
            f"This processor has no instructions for products in {dtype}"
            + (f", which the file uses ({used[0]})" if used else ""),
            f"none of {', '.join(names)}{measured}",
            f"{dtype} saves memory here; for speed stay in float32",
            technique="mixed_precision" if dtype == "bfloat16" else "",
            wrong=bool(used) and slow,
        )


# A file ------------------------------------------------------------------------------------------


def denormals(framework: str, facts: Denormals) -> Iterator[Finding]:
    """Denormal numbers: a mistake if they cost time."""
    share = max(facts.weights, facts.outputs)
    if share < FEW_DENORMALS:
        return
    where = "weights" if facts.weights >= facts.outputs else "values that layers give"
    slow = facts.with_s >= SLOWER * facts.without_s
    other = "with them flushed to zero" if facts.what == "step" else "with ordinary numbers"
    do = "find out why they are so small"
    if framework == "tf":
        do += ": what reads them reads 0, since TensorFlow flushes them"
    elif slow:
        do = f"torch.set_flush_denormal(True), as TensorFlow does by itself; {do}"
    else:
        do += "; they cost nothing here, on other processors torch.set_flush_denormal(True) helps"
    yield Finding(
        "denormal numbers",
        framework,
        f"{share:.0%} of the {where} are denormal (below 1.2e-38)",
        f"a {facts.what} takes {facts.with_s * 1e3:.3g} ms, {other} {facts.without_s * 1e3:.3g} ms",
        do,
        wrong=slow,
    )


def shapes(batches: Batches, facts: Facts) -> Iterator[Finding]:
    """Shapes that vary, and padding."""
    count = len(batches.shapes)
    if count > MOST_SHAPES:
        measured = f"{count} shapes in {batches.drawn} batches"
        if new := facts.new_shapes:
            measured += (
                f"; {new.count} steps at new shapes take {new.first_s * 1e3:.3g} ms, "
                f"at known ones {new.again_s * 1e3:.3g} ms"
            )
        measured += f"; padded to the longest, {batches.to_longest:.0%} would be padding"
        yield Finding(
            "shapes that vary",
            "",
            "The shapes of batches vary: each new shape is traced or compiled again, and caches of "
            "kernels grow (oneDNN keeps 1024)",
            measured,
            "pad to a few lengths, such as multiples of 64, and batch texts of similar length; "
            "use torch.compile(dynamic=True), or an input_signature of None for tf.function",
            technique="varying_lengths",
        )
    if (batches.padding or 0.0) >= PADDED:
        yield Finding(
            "padding",
            "",
            f"{batches.padding:.0%} of the positions in a batch are padding, which costs as much "
            "as data",
            f"{batches.padding:.0%} of the positions, over {batches.drawn} batches",
            "batch texts of similar length, or pack several texts into one row",
            technique="varying_lengths",
        )


def loader(framework: str, batches: Batches, step_s: float | None) -> Iterator[Finding]:
    """A loader that fetches a batch sample by sample, if that takes a large share of the step."""
    share = batches.draw_s / (batches.draw_s + step_s) if step_s else 1.0
    if not batches.by_row or batches.draw_s < COPIES * batches.copy_s or share < FETCHING:
        return
    calls = (
        f"{batches.calls} calls of {batches.of}"
        if batches.calls >= batches.samples
        else (batches.of)
    )
    measured = (
        f"a batch of {batches.samples} takes {batches.draw_s * 1e3:.3g} ms, "
        f"{batches.draw_s / batches.samples * 1e6:.3g} µs a sample; copying it takes "
        f"{batches.copy_s * 1e3:.2g} ms"
    )
    if step_s:
        measured += f"; drawing is {share:.0%} of a step and its batch"
    yield Finding(
        "loader by rows",
        framework,
        f"The loader fetches one row at a time ({calls})",
        measured,
        "index whole batches: x[permutation[i:i + size]]; a Dataset with __getitems__"
        if framework == "pt"
        else "from_tensor_slices(arrays).shuffle(n).batch(size), or a generator of whole batches",
        technique="in_memory",
    )


def modes(framework: str, known: tuple[Mode, ...]) -> Iterator[Finding]:
    """Settings that make steps slow."""
    words = {
        "run_eagerly": (
            "Keras runs eagerly: run_eagerly is set",
            "leave out run_eagerly in compile(), and tf.config.run_functions_eagerly",
        ),
        "eager step": (
            "The step runs eagerly: each operator is called from Python",
            "decorate the step with @tf.function",
        ),
        "anomaly": (
            "torch.autograd.set_detect_anomaly is on: each gradient is checked for NaN",
            "switch it on only to find the cause of a NaN",
        ),
    }
    for mode in known:
        what, do = words[mode.name]
        measured = "" if mode.with_s is None else f"a step takes {mode.with_s * 1e3:.3g} ms"
        if mode.without_s:
            measured += f", without it {mode.without_s * 1e3:.3g} ms"
            if mode.with_s < SLOW_MODE * mode.without_s:
                continue
        yield Finding("eager" if "eager" in mode.name else mode.name, framework, what, measured, do)


def predicting(known: Predicting) -> Iterator[Finding]:
    """Keras's predict in a loop."""
    if known.predict_s < PREDICTS * known.direct_s:
        return
    yield Finding(
        "predict in a loop",
        "tf",
        "Keras's predict is called for each batch: each call makes a dataset and callbacks",
        f"a call with {known.samples} takes {known.predict_s * 1e3:.3g} ms, the model in a "
        f"tf.function {known.direct_s * 1e3:.3g} ms",
        "call model(x, training=False) within a tf.function, or predict once for all batches",
        technique="export",
    )


def keras_backend(asked: str, seconds: dict[str, float]) -> Iterator[Finding]:
    """Keras on another backend than TensorFlow. seconds: of a train step, by backend."""
    if asked in ("", "tensorflow"):
        return
    ours, theirs = (seconds.get(name) for name in (asked, "tensorflow"))
    measured = ""
    if ours and theirs:
        measured = f"train_on_batch takes {ours * 1e3:.3g} ms on {asked}, {theirs * 1e3:.3g} ms on "
        measured += "TensorFlow"
    eager = ", which calls each operator from Python and compiles nothing by default"
    yield Finding(
        "Keras backend",
        "",
        f"Keras runs on {asked}{eager if asked == 'torch' else ''}",
        measured,
        "KERAS_BACKEND=tensorflow runs train_on_batch, fit and predict as graphs; on torch, "
        "compile(jit_compile=True)",
        wrong=not (ours and theirs) or ours > SLOW_MODE * theirs,
    )


# All of them -------------------------------------------------------------------------------------


def quick(host: Host, path: Path | None = None) -> list[Finding]:
    """What can be checked without a process: the machine, its variables, a file's text."""
    source = path.read_text("utf-8", "replace") if path else ""
    every = [*quota(host), *variables(host), *switches(host), *onednn(host)]
    every += [one for one in instructions(host, {}, source) if one.wrong]
    every += keras_backend(host.variables.get("KERAS_BACKEND", ""), {})
    return every


def judged(
    host: Host,
    known: dict[str, Facts],
    source: str,
    seconds: dict[str, float],
    with_onednn_s: float | None = None,
) -> list[Finding]:
    """Every finding of the machine, and of a file whose `source` this is ("" without one).

    seconds: of a step of the file's Keras model, by backend. with_onednn_s: see `onednn`.
    """
    every = [*switches(host)]
    for side, facts in known.items():
        every += pools(host, side, facts)
        if facts.without_onednn_s:
            every += onednn(host, facts.without_onednn_s, with_onednn_s)
    products = {side: facts.products.flops for side, facts in known.items() if facts.products}
    every += instructions(host, products, source)
    for side, facts in known.items():
        every += modes(side, facts.modes)
        if facts.denormals:
            every += denormals(side, facts.denormals)
        if facts.predicting:
            every += predicting(facts.predicting)
    backend = host.variables.get("KERAS_BACKEND", "")
    files = {facts.keras_backend for facts in known.values()} - {"", "tensorflow"}
    every += keras_backend(next(iter(files), backend), seconds)
    for side, facts in known.items():
        if facts.batches:
            every += workers(host, facts.batches)
            every += shapes(facts.batches, facts)
            every += loader(side, facts.batches, facts.step_s)
            break  # both frameworks are given the same
    return sorted(every, key=lambda one: not one.wrong)
