"""A record of a run, with samples that are made up."""

from math import exp

import numpy as np

from bench.analysis.analyse import analyse
from bench.record import Block, Case, Record, Timing
from tests import records

ROLES = {"base": "baseline", "again": "control", "same": "variant", "quick": "variant"}
TIMES = {("pt", "quick"): 0.5, ("tf", "quick"): 0.6}  # of a baseline's; others take as long
ROUNDS = 15


def unchanged(variant: str, block: int, rounds: list[float]) -> list[float]:
    return rounds


def record(blocks: int = 8, sd: float = 0.0005, change=unchanged, seed: int = 1) -> Record:
    """Analysed. `sd`: between blocks; `change` makes other samples of a variant in a block."""
    random = np.random.default_rng(seed)
    samples: dict[tuple[str, str], dict[str, list[float]]] = {}
    for block in range(blocks):
        for name in [(framework, variant) for framework in ("pt", "tf") for variant in ROLES]:
            time = 0.01 * TIMES.get(name, 1.0) * exp(random.normal(0, sd))
            rounds = list(time * np.exp(random.normal(0, 0.001, ROUNDS)))
            samples.setdefault(name, {})[str(block)] = change(name[1], block, rounds)
    return analyse(records.record(_case(*name, of_one) for name, of_one in samples.items()))


def _case(framework: str, variant: str, samples: dict[str, list[float]]) -> Case:
    block = Block(
        match=0,
        block=0,
        losses=records.LOSSES,
        weights_sha256="a",
        empty_s=1e-9,
        shortest_s=0.01,
    )
    return records.case(
        variant,
        framework=framework,
        role=ROLES[variant],
        timing=Timing(step_s={"0": samples}),
        blocks=[block.but(block=int(number)) for number in samples],
    )
