"""Faults that make figures lie, and the tests that have to notice: `twinbench validate mutations`.

Each is a small change of one file. What is listed under `tests` must turn red when it is made.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Fault:
    """Put `new` where `old` stands, once, in `file`; `tests` are pytest's arguments."""

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]


VERDICTS = ("tests/analysis/test_verdicts.py",)
LOOKS = ("tests/analysis/test_early_stopping.py",)
FIT = ("tests/analysis/test_fit.py",)
RANKING = ("tests/analysis/test_ranking.py",)
TABLE = ("tests/analysis/test_table.py",)
COMPARE = ("tests/analysis/test_compare.py",)
CLAIMS = ("tests/analysis/test_claims.py",)
CHECKS = ("tests/analysis/test_checks.py",)
CERTIFICATES = ("tests/analysis/test_certificates.py",)
CASES = ("tests/analysis/test_cases.py",)
RECORD = ("tests/harness/test_record.py", "-k", "not killed")
MEMORY = ("tests/harness/test_memory.py",)
PLAN = ("tests/harness/test_plan.py",)
REPORT = ("tests/report/test_report.py", "-k", "not readme and not command_line")
DATA = ("tests/shared/test_shared.py",)
CLASS = ("tests/analysis/test_machine_class.py",)
PASSES = ("tests/analysis/test_passes.py",)
PROCESSOR = ("tests/harness/test_processor.py",)
CHANGES = ("tests/harness/test_machine.py",)


def harness(words: str) -> tuple[str, ...]:
    """The tests of the harness whose names hold these words: all of them take minutes."""
    return ("tests/harness/test_harness.py", "-k", words)


STATISTICS = (
    Fault(
        "an interval at 80%",
        "bench/analysis/verdicts.py",
        "def t_interval(values: list[float], level: float = 0.95)",
        "def t_interval(values: list[float], level: float = 0.80)",
        VERDICTS,
    ),
    Fault(
        "the deviation of a population",
        "bench/analysis/verdicts.py",
        "sd = float(np.std(values, ddof=1))",
        "sd = float(np.std(values))",
        VERDICTS,
    ),
    Fault(
        "an interval with one side alone",
        "bench/analysis/verdicts.py",
        "special.stdtrit(freedom, 0.5 + level / 2)",
        "special.stdtrit(freedom, level)",
        VERDICTS,
    ),
    Fault(
        "the deviation in place of the error of the mean",
        "bench/analysis/verdicts.py",
        "half = quantile(level, len(values) - 1) * sd / len(values) ** 0.5",
        "half = quantile(level, len(values) - 1) * sd",
        VERDICTS,
    ),
    Fault(
        "a margin ten times as wide",
        "bench/analysis/verdicts.py",
        "DELTA = 0.03",
        "DELTA = 0.3",
        VERDICTS,
    ),
    Fault(
        "equivalence by the interval of a difference",
        "bench/analysis/verdicts.py",
        "said = verdict(wide, t_interval(log_ratios, 0.90))",
        "said = verdict(wide, wide)",
        VERDICTS,
    ),
    Fault(
        "faster and slower exchanged",
        "bench/analysis/verdicts.py",
        'if wide.high < -bound:\n        return "faster"',
        'if wide.high < -bound:\n        return "slower"',
        VERDICTS,
    ),
    Fault(
        "a verdict by the estimate alone",
        "bench/analysis/verdicts.py",
        'if wide.low > bound:\n        return "slower"',
        'if wide.mean > bound:\n        return "slower"',
        VERDICTS,
    ),
    Fault(
        "more is better, whatever the metric",
        "bench/analysis/verdicts.py",
        '"better" if (wide.mean > 0) == more_is_better else "worse"',
        '"better" if wide.mean > 0 else "worse"',
        VERDICTS,
    ),
    Fault(
        "seeds that are not paired",
        "bench/analysis/verdicts.py",
        "for value, base in zip(values, baseline, strict=True)]",
        "for value, base in zip(values, sorted(baseline), strict=True)]",
        VERDICTS,
    ),
    Fault(
        "runs compared upside down",
        "bench/analysis/verdicts.py",
        "mean, (sd, freedom) = log(new.ratio / old.ratio), summed(runs)",
        "mean, (sd, freedom) = log(old.ratio / new.ratio), summed(runs)",
        COMPARE,
    ),
    Fault(
        "the noise of one run taken for that of both",
        "bench/analysis/verdicts.py",
        "for run in (new, old)]",
        "for run in (new,)]",
        COMPARE,
    ),
    Fault(
        "all rounds count, the slow ones too",
        "bench/analysis/fit.py",
        "FASTEST = 3 ",
        "FASTEST = 1 ",
        FIT,
    ),
    Fault(
        "the slowest rounds in place of the fastest",
        "bench/analysis/fit.py",
        "sorted(samples)[:count]",
        "sorted(samples)[-count:]",
        FIT,
    ),
    Fault(
        "a ratio upside down",
        "bench/analysis/fit.py",
        "shift = self.pooled[top] - self.pooled[bottom] - float(np.mean(measured))",
        "shift = self.pooled[bottom] - self.pooled[top] - float(np.mean(measured))",
        FIT,
    ),
    Fault(
        "matches joined the wrong way",
        "bench/analysis/fit.py",
        "np.mean([times[name] - new[name] for name in anchors])",
        "np.mean([new[name] - times[name] for name in anchors])",
        FIT,
    ),
    Fault(
        "matches that share nobody are joined",
        "bench/analysis/fit.py",
        "group = groups[known[0]] if known else len(groups)",
        "group = groups[known[0]] if known else 0",
        FIT,
    ),
    Fault(
        "looks without correction",
        "bench/analysis/bounds.py",
        "return float(1 - 2 * special.ndtr(-bound(looks, 1 - overall)))",
        "return overall",
        LOOKS,
    ),
    Fault(
        "the end before a look is none",
        "bench/analysis/bounds.py",
        "[look for look in looks if look < blocks] + [blocks]",
        "[look for look in looks if look <= blocks]",
        LOOKS,
    ),
    Fault(
        "variances that others overrule",
        "bench/analysis/sequential.py",
        "PRIOR = 4.0",
        "PRIOR = 50.0",
        LOOKS,
    ),
    Fault(
        "a later look that undoes an earlier one",
        "bench/analysis/sequential.py",
        "    if before is None:\n        return now",
        "    if True:\n        return now",
        LOOKS,
    ),
    Fault(
        "what is open counts as decided",
        "bench/analysis/sequential.py",
        'DECIDED = ("faster", "slower", "equivalent")',
        'DECIDED = ("faster", "slower", "equivalent", "inconclusive")',
        LOOKS,
    ),
    Fault(
        "who has a wide interval leaves",
        "bench/analysis/early_stopping.py",
        "WIDEST = 0.06",
        "WIDEST = 6.0",
        LOOKS,
    ),
    Fault(
        "baselines leave",
        "bench/analysis/early_stopping.py",
        'if case.role != "variant" or case.id in undecided',
        "if case.id in undecided",
        LOOKS,
    ),
    Fault(
        "who is not decided leaves",
        "bench/analysis/early_stopping.py",
        "                undecided |= sides",
        "                pass",
        LOOKS,
    ),
)

PARITY = (
    Fault(
        "initial weights are not compared",
        "bench/analysis/certificates.py",
        "if same_weights and block.weights_sha256 != twin.weights_sha256:",
        "if False:",
        RECORD,
    ),
    Fault(
        "the first loss may differ",
        "bench/analysis/certificates.py",
        "if differences[0][0] > tolerance:",
        "if False:",
        CERTIFICATES,
    ),
    Fault(
        "one block may do any other work",
        "bench/analysis/certificates.py",
        "MOST_FLIPPED = 100 ",
        "MOST_FLIPPED = 1e12 ",
        CERTIFICATES,
    ),
    Fault(
        "a loss that is no number agrees",
        "bench/analysis/certificates.py",
        "    if one is None or other is None:\n        return inf",
        "    if one is None or other is None:\n        return 0.0",
        CERTIFICATES,
    ),
    Fault(
        "other mathematics is not held against its twin",
        "bench/analysis/certificates.py",
        "if one.variant != other.variant and (one.changes_math",
        "if (one.changes_math",
        CERTIFICATES,
    ),
    Fault(
        "a verdict on other work",
        "bench/analysis/comparisons.py",
        "verdict=DIFFERENT if reason else ratio.verdict,",
        "verdict=ratio.verdict,",
        RECORD,
    ),
    Fault(
        "a baseline of another framework",
        "bench/analysis/pairing.py",
        "if other.work == case.work and other.side == case.side:",
        "if other.work == case.work:",
        RECORD,
    ),
    Fault(
        "a baseline of another batch size",
        "bench/record.py",
        "return (self.task, self.batch_size, self.mode)",
        "return (self.task, self.mode)",
        ("tests/analysis/test_pairing.py",),
    ),
    Fault(
        "initial weights that do not come from the seed",
        "shared/weights.py",
        "stream = np.random.default_rng([seed, *hashlib.sha256(name.encode()).digest()])",
        "stream = np.random.default_rng([0, *hashlib.sha256(name.encode()).digest()])",
        DATA,
    ),
    Fault(
        "a checksum that sees no names",
        "shared/weights.py",
        'digest.update(f"{name}{array.shape}".encode())',
        'digest.update(f"{array.shape}".encode())',
        DATA,
    ),
    Fault(
        "every epoch in the same order",
        "shared/datasets.py",
        "order = np.random.default_rng([seed, epoch]).permutation(size)",
        "order = np.random.default_rng([seed]).permutation(size)",
        DATA,
    ),
    Fault(
        "originals in both splits",
        "shared/scenes.py",
        '"train": order[count // 3 :]}',
        '"train": order}',
        DATA,
    ),
    Fault(
        "twins that start from other weights",
        "bench/harness/matches.py",
        "weights_seed=self.seed,",
        'weights_seed=self.seed + (case.framework == "tf"),',
        harness("twins_start"),
    ),
    Fault(
        "seeds of training swapped between twins",
        "bench/harness/isolated_measurements.py",
        "seed=seed,",
        'seed=seed + (case.framework == "tf"),',
        harness("twins_start"),
    ),
    Fault(
        "accuracy on the training split",
        "bench/harness/accuracy.py",
        'self, folder: Path, predict: Callable, split: str = "test", metric: str = ""',
        'self, folder: Path, predict: Callable, split: str = "train", metric: str = ""',
        harness("not_trained_on"),
    ),
)

MEASURING = (
    Fault(
        "no synchronisation at the end of a sample",
        "bench/harness/timing.py",
        "        synchronize()\n        return (time.perf_counter() - start) / len(batches), loss",
        "        return (time.perf_counter() - start) / len(batches), loss",
        harness("a_fault_gets_its_status or others_are_measured_whole"),
    ),
    Fault(
        "no untimed step before a sample",
        "bench/harness/timing.py",
        "            self.call(*next(self.stream))\n",
        "            pass\n",
        harness("untimed_step"),
    ),
    Fault(
        "the time of all steps for that of one",
        "bench/harness/timing.py",
        "return (time.perf_counter() - start) / len(batches), loss",
        "return time.perf_counter() - start, loss",
        harness("untimed_step"),
    ),
    Fault(
        "a warm-up that is too short",
        "bench/harness/timing.py",
        "WARM_CHUNKS = 20",
        "WARM_CHUNKS = 1",
        harness("warm_up"),
    ),
    Fault(
        "samples that are too short",
        "bench/harness/timing.py",
        "SAMPLE_S = 0.010",
        "SAMPLE_S = 0.001",
        harness("sample_lasts"),
    ),
    Fault(
        "the garbage collector at work in samples",
        "bench/harness/timing.py",
        "        gc.disable()\n",
        "",
        harness("untimed_step"),
    ),
    Fault(
        "everybody in the same order in each round",
        "bench/harness/matches.py",
        "            order.shuffle(contenders)\n",
        "",
        harness("every_round"),
    ),
    Fault(
        "everybody starts in the same order",
        "bench/harness/matches.py",
        "row = [letters[(letter + block) % count] for letter in first]",
        "row = [letters[letter % count] for letter in first]",
        harness("latin_square"),
    ),
    Fault(
        "disturbed rounds count",
        "bench/harness/matches.py",
        "MOST_TRIES = 2",
        "MOST_TRIES = 1",
        harness("disturbed"),
    ),
    Fault(
        "the most disturbed rounds count",
        "bench/harness/matches.py",
        "if min(self.tries, key=_disturbance) is self.tries[-1]:",
        "if max(self.tries, key=_disturbance) is self.tries[-1]:",
        harness("disturbed"),
    ),
    Fault(
        "others may take the cores",
        "bench/analysis/values.py",
        "MOST_OTHERS = 0.05",
        "MOST_OTHERS = 5.0",
        harness("disturbed"),
    ),
    Fault(
        "a neighbour that counts as one's own",
        "bench/validation/neighbours.py",
        'if hasattr(os, "fork") and os.fork():',
        "if False:",
        ("tests/validation/test_disturbances.py", "-k", "neighbour"),
    ),
    Fault(
        "results that come after the sample",
        "bench/harness/matches.py",
        "MOST_LATE = 0.05",
        "MOST_LATE = 50",
        harness("bounds_of_waiting"),
    ),
    Fault(
        "waiting workers that use the cores",
        "bench/harness/matches.py",
        "MOST_WAITING_CPU = 0.10",
        "MOST_WAITING_CPU = 10",
        harness("bounds_of_waiting"),
    ),
    Fault(
        "threads unequal",
        "bench/harness/worker.py",
        "if any(count != threads for count in counts.values()):",
        "if False:",
        harness("threads_that_did_not"),
    ),
    Fault(
        "a fork that inherits a started thread",
        "bench/harness/parent.py",
        "if threading.active_count() > 1:",
        "if False:",
        harness("start_a_thread"),
    ),
    Fault(
        "the wrong allocator",
        "bench/harness/machine.py",
        'return environment | (TUNED_ALLOCATOR if allocator == "tuned" else {})',
        "return environment",
        MEMORY,
    ),
    Fault(
        "the user's allocator in the plain one",
        "bench/harness/machine.py",
        "environment = {k: v for k, v in os.environ.items() if k not in TUNED_ALLOCATOR}",
        "environment = dict(os.environ)",
        MEMORY,
    ),
    Fault(
        "threads beyond the quota",
        "shared/cgroups.py",
        "return max(1, floor(min(count, cpu_quota())))",
        "return max(1, floor(count))",
        ("tests/harness/test_cgroups.py",),
    ),
    Fault(
        "threads beyond the affinity",
        "shared/cgroups.py",
        "count = len(processors()) or os.cpu_count() or 1",
        "count = os.cpu_count() or 1",
        MEMORY,
    ),
    Fault(
        "peaks of earlier phases",
        "bench/harness/memory.py",
        '_CLEAR.write_text("5")',
        '_CLEAR.write_text("1")',
        MEMORY,
    ),
    Fault(
        "kibibytes for bytes",
        "bench/harness/memory.py",
        "            return int(line.split()[1]) * 1024\n    return None",
        "            return int(line.split()[1])\n    return None",
        MEMORY,
    ),
    Fault(
        "shared pages count for each process",
        "bench/harness/memory.py",
        '_counted(pid, "Pss:")',
        '_counted(pid, "Rss:")',
        MEMORY,
    ),
    Fault(
        "baselines that a choice needs stay away",
        "bench/harness/selection.py",
        "        for name in (BASELINE, case.variant.against)",
        "        for name in (case.variant.against,)",
        PLAN,
    ),
    Fault(
        "matches that are too large",
        "bench/harness/selection.py",
        "MOST_ALIVE = 12",
        "MOST_ALIVE = 24",
        PLAN,
    ),
    Fault(
        "another allocator is the same program",
        "bench/harness/selection.py",
        "return (case.work, case.side, variant.allocator, environment, variant.program)",
        "return (case.work, case.side, environment, variant.program)",
        PLAN,
    ),
)

FIGURES = (
    Fault(
        "samples a second off by 1,000",
        "bench/analysis/cases.py",
        '_per_second(case.batch_size, *time, "samples/s")',
        '_per_second(case.batch_size / 1e3, *time, "samples/s")',
        CASES,
    ),
    Fault(
        "a rate with the interval of a time",
        "bench/analysis/cases.py",
        "ci=ci and (amount / ci[1], amount / ci[0])",
        "ci=ci and (amount / ci[0], amount / ci[1])",
        CASES,
    ),
    Fault(
        "memory with what is imported",
        "bench/analysis/cases.py",
        "above = None if steady is None or start is None else steady - start",
        "above = None if steady is None or start is None else steady",
        RECORD,
    ),
    Fault(
        "a break-even that forgets the baseline's first call",
        "bench/analysis/cases.py",
        "extra = [median(first) - usual,",
        "extra = [median(first),",
        RECORD,
    ),
    Fault(
        "a win that costs accuracy is a win",
        "bench/analysis/comparisons.py",
        "if difference and sign * difference.mean < -task.margin:",
        "if False:",
        RECORD,
    ),
    Fault(
        "the slowest for the best of each side",
        "bench/analysis/comparisons.py",
        "pt, tf = (min(side, key=",
        "pt, tf = (max(side, key=",
        RECORD,
    ),
    Fault(
        "accuracy kept by its mean, not by its bound",
        "bench/analysis/accuracy.py",
        "worst = None if ci is None else ci[0] if more_is_better(task.metric) else -ci[1]",
        "worst = difference.mean if more_is_better(task.metric) else -difference.mean",
        RANKING,
    ),
    Fault(
        "accuracy that nobody measured is kept",
        "bench/analysis/accuracy.py",
        "proven_on=proven_on)\n    return Accuracy(None)",
        "proven_on=proven_on)\n    return Accuracy(True)",
        RANKING,
    ),
    Fault(
        "a loss whose interval is wide is kept",
        "bench/analysis/checks.py",
        "WORDS.get(difference.verdict, UNTOLD)",
        "WORDS.get(difference.verdict, KEPT)",
        CHECKS,
    ),
    Fault(
        "a loss is kept though its baseline learned nothing",
        "bench/analysis/checks.py",
        "or None in plain or not _learned(other)",
        "or None in plain",
        CHECKS,
    ),
    Fault(
        "predictions are judged by their loss alone",
        "bench/analysis/checks.py",
        "verdicts = {right, _told(",
        "verdicts = {_told(",
        CHECKS,
    ),
    Fault(
        "what predictions have right has no correlation with the float model's",
        "bench/analysis/checks.py",
        "correlation = together / sqrt(sums) if sums else 0.0",
        "correlation = 0.0",
        CHECKS,
    ),
    Fault(
        "the loss of a check is that of samples that were trained on",
        "bench/harness/keeping.py",
        'for part in datasets.load(folder, "test"))\n        total',
        'for part in datasets.load(folder, "train"))\n        total',
        ("tests/harness/test_checks.py", "-k", "plain_code"),
    ),
    Fault(
        "losses far apart are exact",
        "bench/analysis/accuracy.py",
        "ROUNDING = 1e-5",
        "ROUNDING = 1.0",
        ("tests/analysis/test_accuracy.py",),
    ),
    Fault(
        "an advice beyond the memory that there is",
        "bench/analysis/ranking.py",
        "if peak.value > self.limits.memory:",
        "if False:",
        RANKING,
    ),
    Fault(
        "an advice for other work",
        "bench/analysis/ranking.py",
        "if row.verdict == DIFFERENT:",
        "if False:",
        RANKING,
    ),
    Fault(
        "an advice that loses accuracy",
        "bench/analysis/ranking.py",
        "return LOSES[kept.what] if kept.lost else KEEPS[kept.what]",
        "return None",
        RANKING,
    ),
    Fault(
        "worse by less than what counts as no difference",
        "bench/analysis/table.py",
        "def is_worse(name: str, ratio: Figure, margin: float = DELTA)",
        "def is_worse(name: str, ratio: Figure, margin: float = 0.0)",
        RANKING,
    ),
    Fault(
        "a row beaten by one that loses accuracy",
        "bench/analysis/ranking.py",
        "or _points_lost(row) > _points_lost(other):",
        "or False:",
        RANKING,
    ),
    Fault(
        "a gain shown by an estimate",
        "bench/analysis/table.py",
        "return (shown_more if name in MORE_IS_BETTER else shown_less)(ratio.bounds)",
        "return (shown_more if name in MORE_IS_BETTER else shown_less)((ratio.value, ratio.value))",
        TABLE,
    ),
    Fault(
        "a worse row named because it takes less",
        "bench/analysis/ranking.py",
        "alike = [row for row in gaining if row is first or not aim.told_worse(row, first)]",
        "alike = gaining",
        RANKING,
    ),
    Fault(
        "a claim held by an estimate",
        "bench/analysis/claims.py",
        "if rule.low <= figure.low and figure.high <= rule.high:",
        "if rule.low <= figure.value <= rule.high:",
        CLAIMS,
    ),
    Fault(
        "a gain with its bounds exchanged",
        "bench/analysis/table.py",
        "return Figure(1 / self.value, _over(1, self.high), _over(1, self.low), self.kind)",
        "return Figure(1 / self.value, _over(1, self.low), _over(1, self.high), self.kind)",
        TABLE,
    ),
    Fault(
        "slower by more, whatever its interval",
        "bench/compare.py",
        "if change and change.ci[0] > 1 + share:",
        "if change and change.ratio > 1 + share:",
        COMPARE,
    ),
)

SHOWN = (
    Fault(
        "a row dropped from the record",
        "bench/harness/record.py",
        "cases=[_case(plan, state, case, left_out) for case in plan.every],",
        "cases=[_case(plan, state, case, left_out) for case in plan.every][:-1],",
        RECORD,
    ),
    Fault(
        "the last reason stands",
        "bench/harness/state.py",
        'if self.status == "OK":\n            self.status, self.reason = status, reason',
        "if True:\n            self.status, self.reason = status, reason",
        RECORD,
    ),
    Fault(
        "a record that is half written",
        "bench/harness/folders.py",
        '        partial.write_text(text, encoding="utf-8")\n        os.replace(partial, path)',
        '        path.write_text(text, encoding="utf-8")',
        ("tests/harness/test_record.py", "-k", "interrupted_write or half_a_record"),
    ),
    Fault(
        "a stale record is the latest",
        "bench/harness/folders.py",
        '    os.replace(link, results / "latest")',
        '    if not (results / "latest").exists():\n        os.replace(link, results / "latest")',
        RECORD,
    ),
    Fault(
        "a row dropped from a table",
        "bench/analysis/reading.py",
        'in zip_longest(sides["pt"], sorted(sides["tf"], key=lambda case: case.is_legacy))',
        'in zip(sides["pt"], sorted(sides["tf"], key=lambda case: case.is_legacy), strict=False)',
        REPORT,
    ),
    Fault(
        "a provisional run that does not say so",
        "bench/report/content.py",
        'if record.effort == "quick" or _blocks(record) == 1:',
        "if False:",
        REPORT,
    ),
    Fault(
        "a run cut short that does not say so",
        "bench/report/content.py",
        "if not record.finished:",
        "if False:",
        REPORT,
    ),
    Fault(
        "seconds shown as milliseconds",
        "bench/report/technique_tables.py",
        "case.timing.median_s, case.timing.ci_s, 1e3",
        "case.timing.median_s, case.timing.ci_s, 1",
        REPORT,
    ),
    Fault(
        "zero for what is missing",
        "bench/report/formatting.py",
        "    if value is None:\n        return MISSING\n    if value and not",
        '    if value is None:\n        return "0"\n    if value and not',
        REPORT,
    ),
    Fault(
        "a record of a newer schema is read as one of ours",
        "bench/record.py",
        "if version > SCHEMA_VERSION:",
        "if False:",
        REPORT,
    ),
    Fault(
        "a time that is none is taken",
        "bench/record.py",
        "Sample = Annotated[float, Meta(gt=1e-10, le=1e5)]",
        "Sample = Annotated[float, Meta()]",
        REPORT,
    ),
)

MACHINES = (
    Fault(
        "machines of twice the speed are one class",
        "bench/analysis/machine_class.py",
        "SAME_SPEED = 1.3",
        "SAME_SPEED = 3.0",
        CLASS,
    ),
    Fault(
        "two cores called threads of one",
        "bench/analysis/machine_class.py",
        "if computes > SHARED * threads:",
        "if computes > threads:",
        CLASS,
    ),
    Fault(
        "a speed beside other programs sets machines apart",
        "bench/analysis/machine_class.py",
        "if is_disturbed(a) or is_disturbed(b):",
        "if False:",
        CLASS,
    ),
    Fault(
        "the slower of two speeds counts",
        "bench/analysis/passes.py",
        "key=lambda top: (_weight(levels, top), top)",
        "key=lambda top: (_weight(levels, top), -top)",
        PASSES,
    ),
    Fault(
        "a pass is left out and nobody says so",
        "bench/analysis/passes.py",
        "    if not (out or again or unsteady):",
        "    if not (again or unsteady):",
        PASSES,
    ),
    Fault(
        "what the machine changed under counts",
        "bench/harness/record.py",
        "if played.samples and (played.match, played.block) not in left_out:",
        "if played.samples:",
        CHANGES,
    ),
    Fault(
        "a pass is never played again",
        "bench/harness/executor.py",
        "if passes.changed(played) and self.scheduler.plays_again(matches):",
        "if False:",
        CHANGES,
    ),
    Fault(
        "Zen 4 called Zen 3",
        "bench/harness/processor.py",
        '(0x10, 0x1F, "Zen 4"),',
        '(0x10, 0x1F, "Zen 3"),',
        PROCESSOR,
    ),
)

FAULTS = (*STATISTICS, *PARITY, *MEASURING, *FIGURES, *SHOWN, *MACHINES)
