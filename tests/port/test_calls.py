"""Which calls of PyTorch `twinbench port` compares."""

from __future__ import annotations

import importlib

import pytest

FRAMEWORKS = ("pt",)


@pytest.mark.usefixtures("impl")  # which imports the framework
def test_memory_that_nothing_was_written_to_is_no_output():
    """Stochastic depth draws into it; its numbers would give any difference a bound."""
    torch = importlib.import_module("torch")
    side = importlib.import_module("bench.port.pytorch_side")
    with side.Calls([], patches=[], keep=True) as calls:
        torch.empty(4).bernoulli_(0.8).div_(0.8)
        torch.ones(4).new_empty(4).bernoulli_(0.8)
    names = [event.name for event in calls.events]
    assert names == ["bernoulli_", "div_", "ones", "bernoulli_"]
    assert torch.equal(calls.events[0].out, torch.full((4,), 0.8))  # nothing is dropped
