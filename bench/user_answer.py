"""The answer of a run on a user's model: where a step's time goes, what to use, and its code.

All figures come from the record. The code comes from `bench.user_code`.
"""

from __future__ import annotations

from math import prod
from pathlib import Path

from bench import user_code
from bench.analysis.ranking import GOALS, NAMES, Ranking, rank, works
from bench.analysis.table import TIME
from bench.diagnose import MOST_TO_TELL
from bench.harness import machine
from bench.harness.folders import replace_file
from bench.harness.run_plan import remedying
from bench.record import FRAMEWORKS, Case, Record
from bench.report.answer import LABEL, perhaps, text
from bench.report.files import OWN
from bench.report.formatting import number, ratio
from bench.report.text import hanging, plain, wrap
from bench.user_code import UNTRIED, WIDTH
from bench.user_task import UserModel

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
    "budget": "a larger batch does not fit into the budget of {budget:.3g} GB",
    "maximum": "of {budget:.3g} GB; a larger batch would fit, but takes too long to try",
    "time limit": "of {budget:.3g} GB; a larger batch took too long",
}
UNKNOWN = (
    "The accuracy of rows under 'perhaps' is unknown. Add evaluate(predict) to the file to have "
    "them trained and evaluated."
)
MOST_NAMED = 5  # operators
UNLIKE = 2.0  # times as long as a timed step: another one


def write(folder: Path, record: Record, model: UserModel) -> None:
    """Write the answer into the folder of a run, with code that was run.

    After an interruption the code is left out, so that the answer comes at once.
    """
    said = [_head(model), *_shapes(record, model), *_own_steps(model)]
    for line in machine.overruled(record.environment.threads, model.keras_backend):
        said += wrap(f"{line}.", WIDTH)
    for side in model.sides:
        if lines := _breakdown(record, side):
            said += ["", *lines]
    for side, reason in model.about["missing"].items():
        said += wrap(f"{FRAMEWORKS[side]} could not be started: {reason}", WIDTH)
    rankings = _rankings(record)
    for ranking in rankings:
        said += ["", *text([ranking], WIDTH), *_why(record, ranking)]
    if not model.about["evaluates"] and any(map(perhaps, rankings)):
        said += ["", *wrap(UNKNOWN, WIDTH)]
    said += ["", *_largest_batches(record), *_partly_compiled(record), *_not_measured(record)]
    for path in user_code.files(folder):
        path.unlink()  # of an answer before, where the run was taken up
    interrupted = record.ended == "interrupted"
    said += UNTRIED if interrupted else user_code.shown(folder, rankings, model)
    # A file's name need not be text.
    whole = "\n".join(said).encode("utf-8", "backslashreplace").decode()
    replace_file(folder / OWN, f"{whole}\n")


def read(folder: Path) -> str:
    """The answer that was written."""
    return (folder / OWN).read_text("utf-8").rstrip()


def _head(model: UserModel) -> str:
    side = model.about["sides"][model.sides[0]]
    count = sum(prod(shape) for _, shape in side["parameters"])
    head = f"{model.file.path.name}: {count:,} parameters, batch {model.about['batch_size']}"
    if len(model.sides) < 2:
        return head
    if model.about["paired"]:
        return f"{head}; the frameworks start from equal weights"
    why = "The file has no copy_weights"
    if "copy_weights" in model.file.functions:
        why = "copy_weights was not run, because PyTorch's Python has no TensorFlow"
    return "\n".join([head, *wrap(f"{why}: the frameworks are not compared.", WIDTH)])


def _shapes(record: Record, model: UserModel) -> list[str]:
    """That shapes vary, what of them is padding, and how often rows were compiled for them."""
    side = model.about["sides"][model.sides[0]]
    if side.get("shapes", 1) < 2:
        return []
    longest = f"{side['to_longest']:.0%} if all were padded to the longest"
    lines = wrap(
        f"Batches have {side['shapes']} shapes: every row times its steps over all of them, in the "
        f"same order. {side['padding']:.0%} of their positions are padding, {longest}.",
        WIDTH,
    )
    for case in record.cases:
        graphs = (case.evidence or {}).get("graphs_of_shapes")
        if case.status == "OK" and graphs:
            row = f"{case.full_title}, {case.mode}, batch {case.batch_size}"
            lines += hanging("", plain(f"{row}: {graphs} graphs for these shapes"), WIDTH, 2)
    return lines


def _own_steps(model: UserModel) -> list[str]:
    """That a step which a model brings was not measured, and what was."""
    lines = []
    for side in model.sides:
        if name := model.about["sides"][side]["own_step"]:
            lines += wrap(
                f"{FRAMEWORKS[side]}: the model's {name} is not used. A step is the forward pass, "
                "loss_fn, the gradients and the optimizer.",
                WIDTH,
            )
    return lines


def _breakdown(record: Record, side: str) -> list[str]:
    """Where the time of a step goes, and what that says is worth trying; where it was asked for."""
    name = FRAMEWORKS[side]
    of = [c for c in record.cases if c.technique == "bottleneck" and c.framework == side]
    if not of:
        return []
    seen, reason = of[0].evidence, of[0].reason
    if not seen or "parts" not in seen:
        return [
            f"{name}: where a step's time goes was not measured" + (f": {reason}" if reason else "")
        ]
    shares = {part: sum(seen["parts"][n] for n in names) for part, names in PARTS.items()}
    ordered = sorted(shares.items(), key=lambda each: -each[1])
    lines = [f"{name}, a step of {number(seen['step_s'] * 1e3)} ms:"]
    lines += hanging("", ", ".join(f"{part} {share:.0%}" for part, share in ordered), WIDTH, 2)
    if doubt := _doubt(record, of[0]):
        words = f"the bottleneck can't be told: {doubt}"
        return lines + hanging("", words, WIDTH, 2) + _allocator(record, side)
    lines += hanging("", f"bottleneck: {seen['bottleneck']}; {seen['said'][0]}", WIDTH, 2)
    measured = [
        one.name
        for one in remedying(seen["bottleneck"])
        if one.is_measured_of_users and _may_work(record, one.name, side)
    ]
    if measured:
        lines += hanging("", f"techniques against it: {', '.join(measured)}", WIDTH, 2)
    return lines + _allocator(record, side)


def _doubt(record: Record, case: Case) -> str | None:
    """Why the parts of a step tell nothing: other programs, or a step unlike those timed."""
    seen = case.evidence
    others = seen.get("others") or 0.0
    if others > MOST_TO_TELL:
        return f"other programs used {others:.0%} of the cores"
    step_s = seen["step_s"] * (1 - seen["parts"]["waiting"])  # what is timed waits for no input
    times = [
        other.timing.median_s
        for other in record.cases
        if (other.role, other.work, other.framework) == ("baseline", case.work, case.framework)
        and other.timing.median_s
    ]
    if not times or any(1 / UNLIKE < step_s / time < UNLIKE for time in times):
        return None
    nearest = min(times, key=lambda time: abs(time - step_s))
    return f"without the profiler a step took {number(nearest * 1e3)} ms"


def _may_work(record: Record, technique: str, side: str) -> bool:
    """Whether some row of a technique worked, or none was tried."""
    tried = [
        case.status == "OK"
        for case in record.cases
        if case.technique == technique and case.framework == side and case.role == "variant"
    ]
    return any(tried) or not tried


def _allocator(record: Record, side: str) -> list[str]:
    """What the plain step gains from the allocator's settings, which every other row has."""
    row = ("baseline", "as_installed", side)
    usual = {c.id for c in record.cases if (c.technique, c.variant, c.framework) == row}
    for comparison in record.comparisons:
        slower = "slower" in (comparison.verdict or "")
        if comparison.kind == "baseline" and comparison.numerator in usual and slower:
            times = ratio(comparison.ratio, comparison.ci)
            said = f"{times} times as long without the allocator's settings"
            return hanging("", f"{said}: see the first lines of the code", WIDTH, 2)
    return []


def _rankings(record: Record) -> list[Ranking]:
    """What to use for each aim, in each piece of work."""
    goals = [GOALS[aim] for aim in AIMS]
    made = [rank(w, goal) for w in works(record) for goal in goals if goal in w.goals]
    return list(filter(None, made))


def _why(record: Record, ranking: Ranking) -> list[str]:
    """Where the differences of a ranking by time come from."""
    if ranking.goal.figure != TIME:
        return []
    rows = {row.case.id for row in ranking.work.rows}
    why = [one for one in record.why if one.numerator in rows]
    return [line for one in why for line in hanging("  because", one.sentence, WIDTH, LABEL)]


def _largest_batches(record: Record) -> list[str]:
    """The largest batch of each framework's plain step, what it needs and what keeps it there."""
    said = []
    for case in record.cases:
        seen = case.evidence or {}  # a run may end before
        if case.technique != "batch_size_finder" or "budget_bytes" not in seen:
            continue
        largest, peak, rate = (
            case.metrics[name].value for name in ("largest_batch", "peak", "rate_at_largest")
        )
        why = LIMITS[seen["limit"]].format(budget=seen["budget_bytes"] / 1e9)
        words = f"{largest:,.0f} samples in {peak / 1e9:.2g} GB ({why}), {number(rate)} samples/s"
        said += hanging("", f"{case.framework_title}: {words}", WIDTH, 2)
    return ["Largest batch of the plain step:", *said, ""] if said else []


def _partly_compiled(record: Record) -> list[str]:
    """What torch.compile left to eager, of the rows that it compiled."""
    said = []
    for case in record.cases:
        left = (case.evidence or {}).get("not_compiled")
        if case.status != "OK" or not left:
            continue
        names = ", ".join(left[:MOST_NAMED]) + ", …" * (len(left) > MOST_NAMED)
        row = f"{case.framework_title}, {case.mode}, batch {case.batch_size}"
        words = f"{row}: {case.evidence['graphs']} graphs; not compiled: {names}"
        said += hanging("", plain(words), WIDTH, 2)
    return ["Compiled in part:", *said, ""] if said else []


def _not_measured(record: Record) -> list[str]:
    """What was refused or failed, by its reason, and what of the suite was left out."""
    reasons: dict[str, dict[str, None]] = {}
    for case in record.cases:
        failed = f"{case.status}: " if case.status != "OK" else ""
        if failed or case.reason:  # what was timed may lack its accuracy
            row = f"{case.full_title} ({case.technique})"
            # Of a prediction at two batch sizes once.
            reasons.setdefault(f"{failed}{case.reason}", {})[row] = None
    said = []
    for reason, rows in reasons.items():
        said += hanging("", plain(f"{', '.join(rows)}: {reason}"), WIDTH, 2)
    for what in _not_timed(record):
        late = f"{what}: not timed within --minutes; give more, or use --resume"
        said += hanging("", late, WIDTH, 2)
    return ["Not measured:", *said] if said else []


def _not_timed(record: Record) -> list[str]:
    """What was to be timed, and ended before."""
    timed: dict[tuple, bool] = {}
    for case in record.cases:
        if case.timed and case.status == "OK":
            key = (case.mode, case.batch_size)
            timed[key] = timed.get(key, False) or case.timing.median_s is not None
    return [f"{NAMES[mode]}, batch {size}" for (mode, size), done in timed.items() if not done]
