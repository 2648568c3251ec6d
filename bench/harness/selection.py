"""Which cases a run measures, which of them run the same program, and which are timed together."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import replace

from bench.harness.plan import EFFORTS, FRAMEWORKS, Case, Technique, Variant

BASELINE = ""  # instead of a variant's name
MOST_ALIVE = 12  # contenders of a match, where their memory allows that many

Fits = Callable[[list[Case]], bool]


# Cases --------------------------------------------------------------------------------------------


def cases_of(technique: Technique, module: str, effort: str) -> list[Case]:
    """Every case of `technique` at `effort`.

    A quick run has the cases of a default one, except those that are only trained. The others also
    have a control for each framework at the first timed workload, see `spare_controls`.
    """
    level = max(EFFORTS.index(effort), EFFORTS.index("default"))
    workloads = [
        w.at(EFFORTS[level]) for w in technique.workloads if EFFORTS.index(w.effort) <= level
    ]
    variants = [v for v in technique.variants if EFFORTS.index(v.effort) <= level]
    controls = [control_of(v) for v in variants if v.role == "baseline" and effort != "quick"]
    controlled = [workload for workload in workloads if workload.timed][:1]
    of_technique, composed_of = (technique.family, technique.name, module), technique.composed_of
    found = [
        Case(*of_technique, name, flavour, variant, workload, composed_of)
        for workload in workloads
        for variant in variants + (controls if workload in controlled else [])
        if workload.mode in variant.measured.modes
        and workload.task in (variant.measured.tasks or (workload.task,))
        for name in variant.frameworks
        for flavour in FRAMEWORKS[name].flavours
        if flavour in variant.flavours
    ]
    if effort == "quick" and not technique.probes:
        found = [case for case in found if not case.proved_in_training]
    return found


def comes_unasked(technique: Technique, effort: str) -> bool:
    """Whether a run includes a technique without being asked for it by name."""
    level = max(EFFORTS.index(effort), EFFORTS.index("default"))
    return EFFORTS.index(technique.effort) <= level


def at_a_glance(cases: list[Case], *, named: bool = False) -> list[Case]:
    """What a quick run includes of a technique: its timed rows of small models.

    Large models and probes take minutes each. Probes are included if the technique is named, and
    large models if it has no others.
    """
    small = [case for case in cases if not case.task.blocks]
    return (small or cases) if named else [case for case in small if case.timed]


def one_by_one(cases: list[Case]) -> list[Case]:
    """What a run includes of a technique if no variant and no task is named.

    Main variants are measured at all work of main rows. Other variants are measured only at the
    main rows' small models, or at others if there are none, or at the tasks that the variant names.
    All of them at all work would take several times as long.
    """
    small = [case for case in cases if not case.task.blocks]
    least = min((EFFORTS.index(case.workload.effort) for case in small), default=None)
    return [
        case
        for case in cases
        if case.variant.effort == "default"
        or case.variant.measured.tasks
        or (not case.task.blocks and EFFORTS.index(case.workload.effort) == least)
    ]


def at_first_work(cases: list[Case]) -> list[Case]:
    """What a default run includes of a technique by name: its rows at the first work.

    `--effort ordinary` also includes the main rows' further work.
    """
    first = min((EFFORTS.index(case.workload.effort) for case in cases), default=None)
    small = [case for case in cases if not case.task.blocks]
    least = min((EFFORTS.index(case.workload.effort) for case in small), default=None)

    def belongs(case: Case) -> bool:
        at = EFFORTS.index(case.workload.effort)
        if case.variant.effort == "default":
            return at == first
        return bool(case.variant.measured.tasks) or at in (first, least)

    return list(filter(belongs, cases))


def control_of(baseline: Variant) -> Variant:
    """The same work as `baseline` again, for the noise floor."""
    return replace(
        baseline,
        name="control",
        role="control",
        stands_for=baseline.name,
        program=None,
        measured=replace(baseline.measured, cold=False, accuracy=False),
    )


def choose(
    cases: Iterable[Case], *, tasks: set[str], variants: set[str], frameworks: set[str]
) -> list[Case]:
    """The cases with one of the given names; an empty set allows all."""
    return [
        case
        for case in cases
        if (not tasks or case.workload.task in tasks)
        and (not variants or case.variant.name in variants)
        and (not frameworks or case.framework in frameworks)
    ]


def with_baselines(selected: list[Case], every: list[Case]) -> list[Case]:
    """`selected` and what their ratios need (baselines and `against`), in the order of `every`."""
    kept = {case.id for case in selected}
    wanted = {
        (case.technique, case.work, case.side, name)
        for case in selected
        for name in (BASELINE, case.variant.against)
    }

    def is_wanted(case: Case) -> bool:
        name = BASELINE if case.is_baseline else case.variant.name
        return (case.technique, case.work, case.side, name) in wanted

    return [case for case in every if case.id in kept or is_wanted(case)]


def spare_controls(cases: Iterable[Case]) -> list[Case]:
    """The controls that a run does not need: one per mode and framework is enough."""
    cases = list(cases)
    playing = Counter(case.work for case in cases if case.timed)
    controls = [case for case in cases if case.variant.role == "control"]
    kept: dict[tuple, Case] = {}
    for case in controls:
        place = case.workload.mode, case.side
        if place not in kept or playing[case.work] > playing[kept[place].work]:
            kept[place] = case
    return [case for case in controls if case not in kept.values()]


def programs(cases: Iterable[Case], techniques: dict[str, Technique]) -> dict[str, str]:
    """Case -> the case that is measured for it: itself, or one that runs the same program.

    A timed case is preferred, then a baseline, then one whose technique counts parameters, then the
    first.
    """
    by_program: dict[tuple, list[Case]] = {}
    for case in cases:
        by_program.setdefault(_program(case), []).append(case)
    shown = {}
    for same in by_program.values():
        best = max(same, key=lambda c: (c.timed, c.is_baseline, techniques[c.technique].counts))
        shown |= {case.id: best.id for case in same}
    return shown


def _program(case: Case) -> tuple:
    variant = case.variant
    if variant.program is None:
        return (case.id,)
    environment = tuple(sorted(variant.environment.items()))
    return (case.work, case.side, variant.allocator, environment, variant.program)


# Matches ------------------------------------------------------------------------------------------


def matches(
    cases: list[Case], shown: dict[str, str], fits: Fits = lambda _: True, without: Iterable = ()
) -> list[list[Case]]:
    """Which cases are timed together: those of one piece of work, whatever their technique.

    If they are too many, or do not fit (`fits`: into memory), they are split by technique, and then
    by variant, so that the two frameworks stay together. Each part also has what its cases are
    compared with, and one baseline per framework, which joins the parts. `without`: ids of decided
    cases; a match without a challenger is dropped. Train steps come first, so that a run with a
    time limit has them.
    """
    timed = [case for case in cases if case.timed and case.settled]
    found = []
    works = dict.fromkeys(case.work for case in timed)
    for work in sorted(works, key=lambda work: work[-1] != "train"):
        here = [case for case in timed if case.work == work]
        found += _Division(here, shown, fits).parts(set(without))
    return found


class _Division:
    """The timed cases of one piece of work, to be divided into matches."""

    def __init__(self, cases: list[Case], shown: dict[str, str], fits: Fits) -> None:
        self.fits = fits
        by_id = {case.id: case for case in cases}
        self.measured = [case for case in cases if shown[case.id] == case.id]
        self.sharing = {
            case.id: [c for c in cases if shown[c.id] == case.id] for case in self.measured
        }
        self.bases = {
            (case.technique, case.side): by_id[shown[case.id]] for case in cases if case.is_baseline
        }
        self.named = {
            (case.technique, case.side, case.variant.name): by_id[shown[case.id]] for case in cases
        }
        base = {case.id for case in self.bases.values()}
        self.challengers = [case for case in self.measured if case.id not in base]
        sides = {(c.technique, c.side) for own in self.challengers for c in self.sharing[own.id]}
        alone = {base.id for side, base in self.bases.items() if side not in sides}
        joined = {base.id for side, base in self.bases.items() if side in sides}
        self.alone = [case for case in self.measured if case.id in alone - joined]
        self.anchors = self._anchors()

    def _anchors(self) -> list[Case]:
        """A baseline of each framework: of its usual flavour, that of the most techniques."""
        found = []
        for name, framework in FRAMEWORKS.items():
            own = [c for c in self.bases.values() if c.framework == name]
            own.sort(key=lambda case: framework.flavours.index(case.flavour))
            own = [case for case in own if case.flavour == own[0].flavour]
            found += [max(own, key=lambda case: len(self.sharing[case.id]))] if own else []
        return found

    def parts(self, without: set[str]) -> list[list[Case]]:
        """The matches; those of baselines alone where there was never anybody else."""
        left = [
            case
            for case in self.challengers
            if not all(each.id in without for each in self.sharing[case.id])
        ]
        if all(case.variant.role == "control" for case in left) and self.challengers and without:
            return []
        parts: list[list[Case]] = []
        for group in self._groups(left + self.alone):
            for part in parts:
                if self._fit(part + group):
                    part += group
                    break
            else:
                parts.append(group)
        return [self._with_company(part) for part in parts]

    def _groups(self, cases: list[Case]) -> list[list[Case]]:
        """Cases that stay together: of a technique, or if these are too many, of its variants."""
        made: list[list[Case]] = []
        for technique in dict.fromkeys(case.technique for case in cases):
            of_technique = [case for case in cases if case.technique == technique]
            if self._fit(of_technique):
                made.append(of_technique)
                continue
            groups: list[list[Case]] = []
            for name in dict.fromkeys(case.variant.name for case in of_technique):
                twins = [case for case in of_technique if case.variant.name == name]
                if groups and self._fit(groups[-1] + twins):
                    groups[-1] += twins
                else:
                    groups.append(twins)
            made += groups
        return made

    def _with_company(self, part: list[Case]) -> list[Case]:
        """A part with the baselines that play in it, in the order of the plan."""
        company = {case.id for case in [*part, *self.anchors]}
        for case in part:
            for each in self.sharing[case.id]:
                base = self.bases.get((each.technique, each.side))
                other = self.named.get((each.technique, each.side, each.variant.against))
                company |= {one.id for one in (base, other) if one}
        return [case for case in self.measured if case.id in company]

    def _fit(self, part: list[Case]) -> bool:
        whole = self._with_company(part)
        return len(whole) <= MOST_ALIVE and self.fits(whole)
