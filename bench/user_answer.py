"""The answer of a run on a user's model: where a step's time goes, what to use, and its code.

Everything is from the record, but for the code, which is run as it is printed before it is shown.
"""

from __future__ import annotations

import importlib.util
import os
import platform
import subprocess
import sys
from keyword import iskeyword
from math import prod
from pathlib import Path

from bench.analysis.decisions import (
    GOALS,
    NAMES,
    PREDICT,
    TRAIN,
    Answer,
    Limits,
    answer,
    title,
    works,
)
from bench.analysis.reading import FRAMEWORKS, framework_title
from bench.analysis.stacks import FASTER
from bench.deployment import bench_export, bench_native_export
from bench.harness import machine
from bench.harness.folders import replace_file
from bench.harness.processes import ROOT
from bench.harness.schedule import remedying, techniques
from bench.report.answer import perhaps, text
from bench.report.figures import number, ratio
from bench.report.files import OWN
from bench.report.text import hanging, plain, wrap
from bench.user_task import Own
from shared.user_model import MAKERS, RECIPE

WIDTH = 80
AIMS = ("train-speed", "latency", "memory")
PARTS = {
    "input": ("waiting", "transfer"),
    "forward": ("forward",),
    "backward": ("backward",),
    "optimizer": ("optimizer",),
    "framework's overhead": ("overhead", "idle"),
}
# Why a batch is not larger.
LIMITS = {
    "budget": "{budget:.3g} GB are the budget, a larger one does not fit",
    "maximum": "of {budget:.3g} GB: a larger one would fit, and take too long to try",
    "time limit": "of {budget:.3g} GB: a larger one took too long",
}
CODE = {TRAIN: "use", PREDICT: "predict"}  # how its files begin
UNTRIED = ["", "No code: it was not tried, since you interrupted; --resume tries it."]
WORDS = {TRAIN: "its best train step", PREDICT: "its best prediction"}
ROUTES = {"export": bench_export.ROUTES, "native_export": bench_native_export.ROUTES}
UNKNOWN = (
    "Whether what stands under 'perhaps' keeps its accuracy: write evaluate(predict) into the "
    "file, and such rows are trained and judged by it."
)
STARTED = """\
# Measured with an allocator that keeps what is freed: glibc's takes that from the environment.
# Start it, and your own training, with these:
#     {settings} \\
#     python {name}
"""
# Where a program runs: where its row did. TensorFlow chooses by itself.
DEVICE = {"pt": ['device = "cuda" if torch.cuda.is_available() else "cpu"'], "tf": []}
MOVED = {"pt": ["model.to(device)"], "tf": []}
PLACED = {
    "pt": "tree_map(lambda each: torch.as_tensor(each, device=device), {})",
    "tf": "tf.nest.map_structure(tf.constant, {})",
}
MOST_NAMED = 5  # operators
CODE_S = 300  # after which printed code counts as hung


def write(folder: Path, record: dict, own: Own) -> None:
    """Write the answer into the folder of a run, with the code that was run.

    Who interrupted the run, or the code, has the answer without it, and at once.
    """
    said = [_head(own), *_own_steps(own)]
    for side in own.sides:
        if lines := _breakdown(record, side):
            said += ["", *lines]
    for side, reason in own.about["missing"].items():
        said += wrap(f"{FRAMEWORKS[side]} could not be started: {reason}", WIDTH)
    found = _answers(record)
    for each in found:
        said += ["", *text([each], WIDTH)]
    if not own.about["evaluates"] and any(perhaps(each) for each in found):
        said += ["", *wrap(UNKNOWN, WIDTH)]
    said += ["", *_largest_batches(record), *_partly_compiled(record), *_not_measured(record)]
    for path in _programs(folder):
        path.unlink()  # of an answer before, where the run was taken up
    said += UNTRIED if record["ended"] == "interrupted" else _code(folder, found, own)
    # A file's name need not be text.
    whole = "\n".join(said).encode("utf-8", "backslashreplace").decode()
    replace_file(folder / OWN, f"{whole}\n")


def read(folder: Path) -> str:
    """The answer that was written."""
    return (folder / OWN).read_text("utf-8").rstrip()


def _head(own: Own) -> str:
    side = own.about["sides"][own.sides[0]]
    count = sum(prod(shape) for _, shape in side["parameters"])
    said = f"{own.file.path.name}: {count:,} parameters, batch {own.about['batch_size']}"
    if len(own.sides) < 2:
        return said
    if own.about["paired"]:
        return f"{said}; the frameworks start from equal weights"
    why = "No copy_weights"
    if "copy_weights" in own.file.functions:
        why = "copy_weights was not run, since PyTorch's Python has no TensorFlow"
    alone = "each framework is compared with its own baseline alone, and not with the other."
    return "\n".join([said, *wrap(f"{why}: {alone}", WIDTH)])


def _own_steps(own: Own) -> list[str]:
    """That a step which a model brings was not measured, and what was."""
    said = []
    for side in own.sides:
        if name := own.about["sides"][side]["own_step"]:
            said += wrap(
                f"{FRAMEWORKS[side]}: the model's own {name} is not used; a step is loss_fn of its "
                "output, the gradients and the optimizer.",
                WIDTH,
            )
    return said


def _breakdown(record: dict, side: str) -> list[str]:
    """Where the time of a step goes, and what that says is worth trying; where it was asked for."""
    name = FRAMEWORKS[side]
    of = [c for c in record["cases"] if c["technique"] == "bottleneck" and c["framework"] == side]
    if not of:
        return []
    seen, reason = of[0]["evidence"], of[0]["reason"]
    if not seen or "parts" not in seen:
        return [
            f"{name}: where a step's time goes was not measured" + (f": {reason}" * bool(reason))
        ]
    shares = {part: sum(seen["parts"][n] for n in names) for part, names in PARTS.items()}
    ordered = sorted(shares.items(), key=lambda each: -each[1])
    lines = [f"{name}, a step of {number(seen['step_s'] * 1e3)} ms:"]
    lines += hanging("", ", ".join(f"{part} {share:.0%}" for part, share in ordered), WIDTH, 2)
    lines += hanging("", f"held back by {seen['bottleneck']}: {seen['said'][0]}", WIDTH, 2)
    measured = [one.name for one in remedying(seen["bottleneck"]) if one.is_measured_of_users]
    if measured:
        lines += hanging("", f"worth trying against that: {', '.join(measured)}", WIDTH, 2)
    return lines + _allocator(record, side)


def _allocator(record: dict, side: str) -> list[str]:
    """What the plain step gains from the allocator's settings, which every other row has."""
    usual = next(
        (
            case["id"]
            for case in record["cases"]
            if (case["technique"], case["variant"]) == ("baseline", "as_installed")
            and case["framework"] == side
        ),
        None,
    )
    for found in record["comparisons"]:
        if (found["kind"], found["numerator"]) == ("baseline", usual) and _slower(found):
            times = ratio(found["ratio"], found["ci"])
            said = f"without the allocator's settings {times} times that"
            return hanging("", f"{said}: see the code's first lines", WIDTH, 2)
    return []


def _slower(comparison: dict) -> bool:
    return "slower" in (comparison["verdict"] or "")


def _answers(record: dict) -> list[Answer]:
    """What to use for each aim, in each piece of work."""
    found = []
    for work in works(record):
        for aim in AIMS:
            if GOALS[aim] in work.goals:
                found.append(answer(record, work, GOALS[aim], Limits()))
    return [each for each in found if each]


def _largest_batches(record: dict) -> list[str]:
    """The largest batch of each framework's plain step, what it needs and what keeps it there."""
    said = []
    for case in record["cases"]:
        seen = case["evidence"] or {}  # a run may end before
        if case["technique"] != "batch_size_finder" or "budget_bytes" not in seen:
            continue
        largest, peak, rate = (
            case["metrics"][name]["value"] for name in ("largest_batch", "peak", "rate_at_largest")
        )
        why = LIMITS[seen["limit"]].format(budget=seen["budget_bytes"] / 1e9)
        text = f"{largest:,.0f} samples in {peak / 1e9:.2g} GB ({why}), {number(rate)} samples/s"
        said += hanging("", f"{framework_title(case)}: {text}", WIDTH, 2)
    return ["Largest batch of the plain step:", *said, ""] if said else []


def _partly_compiled(record: dict) -> list[str]:
    """What torch.compile left to eager, of the rows that it compiled."""
    said = []
    for case in record["cases"]:
        left = (case["evidence"] or {}).get("not_compiled")
        if case["status"] != "OK" or not left:
            continue
        names = ", ".join(left[:MOST_NAMED]) + ", …" * (len(left) > MOST_NAMED)
        count = case["evidence"]["graphs"]
        row = f"{framework_title(case)}, {case['mode']}, batch {case['batch_size']}"
        said += hanging("", plain(f"{row}: {count} graphs; outside of them {names}"), WIDTH, 2)
    return ["Compiled in part:", *said, ""] if said else []


def _not_measured(record: dict) -> list[str]:
    """What was refused or failed, by its reason, and what of the suite was left out."""
    reasons: dict[str, dict[str, None]] = {}
    for case in record["cases"]:
        failed = f"{case['status']}: " if case["status"] != "OK" else ""
        if failed or case["reason"]:  # what was timed may lack its accuracy
            row = f"{framework_title(case)} {case['variant']} ({case['technique']})"
            # Of a prediction at two batch sizes once.
            reasons.setdefault(f"{failed}{case['reason']}", {})[row] = None
    said = []
    for reason, rows in reasons.items():
        said += hanging("", plain(f"{', '.join(rows)}: {reason}"), WIDTH, 2)
    for what in _not_timed(record):
        late = f"{what}: no time was left for its steps; give more --minutes, or use --resume"
        said += hanging("", late, WIDTH, 2)
    return ["Not measured:", *said] if said else []


def _not_timed(record: dict) -> list[str]:
    """What was to be timed, and ended before."""
    timed: dict[tuple, bool] = {}
    for case in record["cases"]:
        if case["timed"] and case["status"] == "OK":
            key = (case["mode"], case["batch_size"])
            timed[key] = timed.get(key, False) or case["timing"]["median_s"] is not None
    return [f"{NAMES[mode]}, batch {size}" for (mode, size), done in timed.items() if not done]


# The code ----------------------------------------------------------------------------------------


def _code(folder: Path, found: list[Answer], own: Own) -> list[str]:
    """For each framework the code of its best train step and of its best prediction, where that is
    not the plain one."""
    said = []
    for side in own.sides:
        for kind, write in ((TRAIN, _script), (PREDICT, _prediction)):
            rows, framework = _faster(found, side, kind), FRAMEWORKS[side]
            texts = [(row, text) for row in rows if (text := write(own, side, row))]
            shown, text = texts[0] if texts else (None, "")
            words = WORDS[kind]
            if rows and rows[0] is not shown:
                said += ["", *_by_its_file(rows[0], framework, words)]
                words = shown and title(shown)
            if shown:
                path = folder / f"{CODE[kind]}_{MAKERS[side]}.py"
                path.write_text(_started(path.name) + text, encoding="utf-8")
                try:
                    error = run(path, own, side)
                except KeyboardInterrupt:
                    path.unlink()
                    return said + UNTRIED
                said += ["", *_shown(path, framework, error, words)]
    return said


def _programs(folder: Path) -> list[Path]:
    """The files of an answer's code."""
    return [path for name in CODE.values() for path in folder.glob(f"{name}_*.py")]


def _started(name: str) -> str:
    """How a program is started as the rows were; nothing where there is another allocator."""
    if platform.libc_ver()[0] != "glibc":
        return ""
    each = [f"{variable}={value}" for variable, value in machine.TUNED_ALLOCATOR.items()]
    return STARTED.format(settings=" \\\n#     ".join(each), name=name)


def _shown(path: Path, framework: str, error: str | None, words: str) -> list[str]:
    """Code that ran, or why it did not."""
    if error:
        path.unlink()
        return hanging("", f"{framework}: the code of {words} did not run: {error}", WIDTH, 2)
    return [f"{framework}: the code of {words} ({path.name})", "", *path.read_text().splitlines()]


def _by_its_file(case: dict, framework: str, words: str) -> list[str]:
    """Where the code of a row lies that no few lines can show."""
    module = techniques()[case["technique"]]
    file = f"{case['framework']}_impl/{module.family}/{case['technique']}.py"
    said = hanging("", f"{framework}: {words} is {title(case)}; how to get it:", WIDTH, 2)
    return [*said, f"    {file}"]


def _faster(found: list[Answer], side: str, kind: str) -> list[dict]:
    """The cases of a framework's train steps or predictions that were shown to gain and to keep
    accuracy, the fastest first. Of predictions those of one sample, where there are any."""
    of_kind = [each for each in found if each.work.kind == kind and each.goal.figure == "time"]
    for each in sorted(of_kind, key=lambda each: each.work.batch_size):
        ranked = [each.best, *each.equal, *each.rest]
        faster = [
            option
            for option in ranked
            if option.case["framework"] == side and (option.own or {}).get("verdict") in FASTER
        ]
        if faster:
            faster.sort(key=lambda option: each.figure(option).value)
            return [option.case for option in faster]
    return []


def run(path: Path, own: Own, side: str) -> str | None:
    """Run printed code; the last line of its error, where it has one."""
    environment = os.environ | machine.TUNED_ALLOCATOR | {"TF_CPP_MIN_LOG_LEVEL": "3"}
    try:
        done = subprocess.run(
            [own.interpreters.get(side, sys.executable), str(path)],
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            env=environment,
            timeout=CODE_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"it took longer than {CODE_S} s"
    if done.returncode == 0:
        return None
    return (done.stderr.strip().splitlines() or [f"it ended with {done.returncode}"])[-1]


def _script(own: Own, side: str, case: dict) -> str | None:
    """Imports, calls and settings of a stack of techniques for the user's model."""
    settings = case["settings"] if case["technique"] == "stacking" else case.get("stacking")
    if settings is None:
        return None
    settings = dict(settings)
    fused = settings.pop("fused", False)
    made = {name: settings[name] for name in ("memory_format", "recomputed") if name in settings}
    settings.pop("recomputed", None)
    of = own.about["sides"][side]
    names = "make_train_step, prepare_model" if made else "make_train_step"
    sliced = ["from itertools import islice"] if "batch" not in own.file.functions else []
    lines = _imports(own, side, *sliced)
    lines.append(f"from {side}_impl.train_step.stacking import {names}")
    given = ["model, loss_fn", ", optimizer" if of["has_optimizer"] else ""]
    lines += ["", *DEVICE[side], f"{''.join(given)} = {MAKERS[side]}()", *MOVED[side]]
    if of["targets_first"]:
        lines += ["keras_loss = loss_fn", "loss_fn = lambda output, y: keras_loss(y, output)"]
    lines += _first_call(own, side)
    if made:
        lines.append(f"model = prepare_model(model, {_arguments(made)})")
    lines += _optimizer(side, of["has_optimizer"], fused)
    given = ", ".join(filter(None, ["model, optimizer, loss_fn", _arguments(settings)]))
    lines.append(f"step = make_train_step({given})")
    return "\n".join([*lines, *_loop(own, side)]) + "\n"


def _prediction(own: Own, side: str, case: dict) -> str | None:
    """Imports and calls of a route from the user's model to predictions."""
    given = f"model = {MAKERS[side]}()[0]" + ".eval()" * (side == "pt")
    placed = {"pt": "tree_map(torch.as_tensor, x)", "tf": "tf.nest.map_structure(tf.constant, x)"}
    drawn = [f"x, _ = {_draw(own, side, '0')}", f"example = {placed[side]}"]
    if side == "tf":
        drawn.append("model.built or call(model, example)  # a subclassed model has no variables")
    if case["technique"] == "compilation":
        lines = _imports(own, side)
        lines.append(f"from {side}_impl.train_step.compilation import compiled_predict")
        lines += ["", *DEVICE[side], given, *MOVED[side]]
        drawn[1] = f"example = {PLACED[side].format('x')}"
        made = ["predict = compiled_predict(model)", "output = predict(example)"]
        return "\n".join([*lines, *drawn, *made]) + "\n"
    route = ROUTES.get(case["technique"], {}).get(case["settings"].get("route"))
    if route is None or route.export is None:
        return None
    functions = [name.format(impl=f"{side}_impl").split(":") for name in (route.export, route.load)]
    (written, export), (read, load) = functions
    imports = [f"from {written} import {export}", f"from {read} import {load}"]
    if written == read:
        imports = [f"from {written} import {export}, {load}"]
    file = f'Path(__file__).with_name("{route.file}")'
    made = [
        f"path = {export}(model, example, {file})",
        f"predict = {load}(path, threads={machine.usable_threads()})",
        "output = predict(x)  # arrays in, arrays out",
    ]
    lines = [*_imports(own, side, "from pathlib import Path"), *imports]
    return "\n".join([*lines, "", given, *drawn, *made]) + "\n"


def _arguments(settings: dict) -> str:
    return ", ".join(f"{name}={value!r}" for name, value in settings.items())


def _imports(own: Own, side: str, *standard: str) -> list[str]:
    """Of the framework, and of what the user's file has. standard: of Python's library, more."""
    drawn = "batch" if "batch" in own.file.functions else "batches"
    module = {"pt": "import torch", "tf": "import tensorflow as tf"}[side]
    tree = ["from torch.utils._pytree import tree_map"] if side == "pt" else []
    path, maker = own.file.path, MAKERS[side]
    places = [str(ROOT), str(path.parent)]
    found = [f"sys.path[:0] = {places!r}  # of the techniques, and of the model"]
    theirs = [f"from {path.stem} import {drawn}, {maker}"]
    if not _importable(path):
        theirs = ["import runpy", f"own = runpy.run_path({str(path)!r})"]
        theirs.append(f'{drawn}, {maker} = own["{drawn}"], own["{maker}"]')
    called = ["from tf_impl.kit.calling import call"] if side == "tf" else []
    if not own.about["sides"][side]["as_given"]:
        called.append("from shared.user_model import pair")
    return ["import sys", *standard, "", module, *tree, "", *found, *theirs, *called]


def _importable(path: Path) -> bool:
    """Whether a file's name can stand in an import, and means no other module there."""
    if path.suffix != ".py" or not path.stem.isidentifier() or iskeyword(path.stem):
        return False
    known = importlib.util.find_spec(path.stem)
    return known is None or known.origin == str(path)


def _first_call(own: Own, side: str) -> list[str]:
    """A Keras model has its variables from its first call."""
    if side == "pt":
        return []
    lines = [f"x, _ = {_draw(own, side, '0')}", "x = tf.nest.map_structure(tf.constant, x)"]
    return [*lines, "model.built or call(model, x)  # a subclassed model has no variables before"]


def _draw(own: Own, side: str, seed: str) -> str:
    if "batch" not in own.file.functions:
        return _paired(own, side, "next(iter(batches()))")
    more = f', "{MAKERS[side]}"' if own.about["sides"][side]["named"] else ""
    return _paired(own, side, f"batch({own.about['batch_size']}, {seed}{more})")


def _paired(own: Own, side: str, drawn: str) -> str:
    """A batch in the structure that was measured, in which lists are tuples."""
    return drawn if own.about["sides"][side]["as_given"] else f'pair({drawn}, "a batch")'


def _optimizer(side: str, given: bool, fused: bool) -> list[str]:
    rate, decay = RECIPE.learning_rate, RECIPE.weight_decay
    if side == "tf":
        usual = f"tf.keras.optimizers.AdamW({rate}, weight_decay={decay})"
        lines = [] if given else [f"optimizer = {usual}"]
        return [*lines, "optimizer.build(model.trainable_variables)"]
    if not given:
        settings = f"lr={rate}, weight_decay={decay}" + ", fused=True" * fused
        return [f"optimizer = torch.optim.AdamW(model.parameters(), {settings})"]
    if not fused:
        return []
    return [
        "for group in (optimizer.defaults, *optimizer.param_groups):",
        "    group.update(fused=True, foreach=None)  # or say fused=True where you make it",
    ]


def _loop(own: Own, side: str) -> list[str]:
    drawn = ["for seed in range(3):", f"    x, y = {_draw(own, side, 'seed')}"]
    if "batch" not in own.file.functions:
        drawn = ["for drawn in islice(batches(), 3):", f"    x, y = {_paired(own, side, 'drawn')}"]
    return [
        *drawn,
        f"    x, y = {PLACED[side].format('(x, y)')}",
        "    loss = step(x, y)",
        'print(f"loss {float(loss):.4f}")',
    ]
