"""A cause that is planted in a side's process is named: its threads, its instructions."""

from __future__ import annotations

from argparse import Namespace

import pytest
from msgspec import structs

from bench.harness import machine
from bench.why import pairs
from bench.why.causes import sentence
from bench.why.experiments import COMPUTED, LIMITED
from shared import step_events as kinds

# What is planted, and the causes of which one must be named first.
PLANTED = {
    "one thread": ({"threads": 1}, {"threads"}),
    "a pool that is too large": ({"threads": 16}, {"threads"}),
    "few instructions": ({"variables": LIMITED}, {*COMPUTED, kinds.NORMALISATION, kinds.COPIES}),
}
ASKED = {"technique": None, "variant": None, "framework_pair": False, "framework": None}


@pytest.mark.campaign  # it times steps, in processes that each import a framework
@pytest.mark.parametrize("framework", ["pt", "tf"])
@pytest.mark.parametrize("plant", PLANTED)
def test_a_cause_in_a_process_is_named(framework, plant, tmp_path):
    changes, expected = PLANTED[plant]
    given = Namespace(what="digits-cnn", predict=False, batch=None, **ASKED)
    ours = next(one for one in pairs.asked(given, tmp_path) if one.framework == framework)
    pair = structs.replace(ours, name="planted", **changes), ours
    watch = machine.Watch()
    difference, causes = pairs.explained(pair, rounds=5)
    if busy := machine.busy(watch.stop().others):
        pytest.skip(f"{busy}: then one thread may be faster than two, which wait for one another")
    named = [one.kind for one in causes if one.kind not in (kinds.DELAYED, kinds.WAITING)]
    assert difference.seconds > 0, sentence(difference)
    assert set(named[:1]) & expected, (sentence(difference), difference.kinds)
