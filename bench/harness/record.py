"""Makes the record of a run from its plan and its state.

`bench.analysis` derives the rest, every time the record is written.
"""

from __future__ import annotations

from collections import Counter

import msgspec

from bench.analysis import passes
from bench.analysis.analyse import analyse
from bench.harness.plan import Case, Technique
from bench.harness.run_plan import Plan
from bench.harness.state import CaseState, RunState
from bench.record import (
    SCHEMA_VERSION,
    Accuracy,
    Record,
    TaskFacts,
    TechniqueNotes,
    Timing,
)
from bench.record import Case as Row
from shared.specs import TASKS, forward_flops, train_step_flops


def whole(plan: Plan, state: RunState) -> Record:
    """The record with everything that is derived."""
    return analyse(measured(plan, state))


def measured(plan: Plan, state: RunState) -> Record:
    """The record with measurements only."""
    amount, left_out = plan.amount, passes.left_out(state.watched)
    return Record(
        schema_version=SCHEMA_VERSION,
        command=state.command,
        effort=state.effort,
        rounds=amount.rounds,
        looks=list(amount.looks) or None,
        seed_looks=list(amount.seed_looks) or None,
        started=state.started,
        resumed=state.resumed,
        finished=state.finished,
        ended=state.ended,
        environment=state.environment,
        seconds=state.seconds,
        techniques={name: _notes(plan.techniques[name]) for name in plan.cases},
        tasks={name: _facts(task) for name, task in TASKS.items()},
        matches=state.matches,
        blocks=sorted(state.conditions, key=lambda found: (found.match, found.block)),
        passes=state.watched,
        cases=[_case(plan, state, case, left_out) for case in plan.every],
        comparisons=[],
    )


def _notes(technique: Technique) -> TechniqueNotes:
    return TechniqueNotes(
        title=technique.title,
        differs_by_design=list(technique.differs_by_design),
        notes=list(technique.notes),
    )


def _facts(task) -> TaskFacts:
    return TaskFacts(**{name: getattr(task, name) for name in TaskFacts.__struct_fields__})


def _case(plan: Plan, state: RunState, case: Case, left_out: set[tuple[int, int]]) -> Row:
    """What was measured of a case, and what must be known of it to compare it.

    What it shows of another's, that one holds. `left_out`: the blocks whose samples do not count.
    """
    technique, variant, task = plan.techniques[case.technique], case.variant, case.task
    of_case, program = state.cases[case.id], plan.shown[case.id]
    count = train_step_flops if case.workload.mode == "train" else forward_flops
    blocks = sorted(of_case.blocks, key=lambda played: (played.match, played.block))
    settings = next((played.settings for played in blocks), None)
    trained = of_case.trained
    return Row(
        id=case.id,
        technique=case.technique,
        framework=case.framework,
        flavour=case.flavour,
        variant=variant.name,
        title=variant.called(case.framework, case.workload.mode),
        role=variant.role,
        settings=variant.settings,
        price=technique.price_of(variant),
        stacking=variant.stacking,
        against=variant.against,
        remedies=list(technique.remedies),
        task=case.workload.task,
        batch_size=case.workload.batch_size,
        mode=case.workload.mode,
        timed=case.timed,
        changes_math=variant.changes is not None,
        changes_weights=variant.changes == "weights",
        loss_tolerance=max(variant.loss_tolerance or 0.0, task.parity),
        flops=count(task.model, case.workload.batch_size),
        status=of_case.status,
        reason=of_case.reason,
        program=program,
        timing=Timing(step_s=_samples(blocks, left_out)),
        blocks=[played.as_record() for played in blocks if played.losses],
        cold_starts=[start.as_record() for start in of_case.cold_starts],
        accuracy=Accuracy(metric=task.metric, per_seed=trained.per_seed) if of_case.seeds else None,
        loss_check=of_case.loss_check,
        fidelity=of_case.fidelity,
        trained_artifacts=trained.artifacts if trained else [],
        trained_metrics=trained.metrics if trained else [],
        probed=of_case.probed,
        evidence=_evidence(state.cases[program], of_case, technique.counts),
        process=settings and msgspec.to_builtins(settings),
        seconds=_seconds(of_case),
    )


def _samples(blocks: list, left_out: set[tuple[int, int]]) -> dict[str, dict[str, list[float]]]:
    """Seconds a step, by match and block."""
    samples: dict[str, dict[str, list[float]]] = {}
    for played in blocks:
        if played.samples and (played.match, played.block) not in left_out:
            samples.setdefault(str(played.match), {})[str(played.block)] = played.samples
    return samples


def _evidence(program: CaseState, case: CaseState, counts: bool) -> dict | None:
    """The proof of the case that was measured, and that of the shown one's own probe.

    That is of a block, of the training or of a cold start. Sizes stand where they are asked for.
    """
    proofs = [played.evidence for played in program.blocks]
    proofs += [program.trained.evidence] if program.trained else []
    proofs += [start.evidence for start in program.cold_starts]
    evidence = (next(filter(None, proofs), None) or {}) | (program.evidence or {})
    if not counts and program is not case:
        evidence.pop("measured", None)
    return evidence | (case.evidence or {}) or None


def _seconds(of_case: CaseState) -> dict[str, float]:
    """What each part took, over all blocks."""
    seconds = Counter(of_case.seconds)
    for played in of_case.blocks:
        seconds.update(played.seconds)
    return dict(seconds)
