"""Defaults that docs/differences.md shows are those of the frameworks that are installed."""

from __future__ import annotations

import importlib
import inspect

import pytest

from bench.port.catalogue import GROUPS

FRAMEWORKS = ("pt", "tf")
BEGIN = {"pt": ("torch.",), "tf": ("keras.", "tensorflow.")}
ENTRIES = {key: entry for entries in GROUPS.values() for key, entry in entries.items()}


def default(parameter: str):
    """Of "torch.nn.LayerNorm(eps)" what a call without `eps` has."""
    place, _, name = parameter.removesuffix(")").partition("(")
    module, _, called = place.rpartition(".")
    made = getattr(importlib.import_module(module), called)
    return inspect.signature(made).parameters[name].default


def stated(framework: str) -> dict[str, object]:
    """The defaults of a framework in all entries."""
    every = [pair for entry in ENTRIES.values() for pair in entry.defaults.items()]
    return {name: value for name, value in every if name.startswith(BEGIN[framework])}


@pytest.mark.usefixtures("impl")  # which imports the framework
def test_a_stated_default_is_that_of_the_framework(framework):
    given = stated(framework)
    assert len(given) > 25
    assert {name: default(name) for name in given} == given


def test_every_default_is_of_one_framework():
    names = {name for entry in ENTRIES.values() for name in entry.defaults}
    assert names == {*stated("pt"), *stated("tf")}
