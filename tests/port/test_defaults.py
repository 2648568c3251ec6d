"""Defaults that docs/differences.md shows are those of the frameworks that are installed."""

from __future__ import annotations

import ast
import importlib
import inspect

import pytest

from bench.port.causes import CATALOGUE

FRAMEWORKS = ("pt", "tf")
BEGIN = {"pt": ("torch.",), "tf": ("keras.", "tensorflow.")}
STATED = {
    name: ast.literal_eval(value)
    for cause in CATALOGUE.values()
    for name, value in (one.split("=", 1) for one in cause.defaults.split("; ") if one)
}


def default(parameter: str):
    """Of "torch.nn.LayerNorm(eps)" what a call without `eps` has."""
    place, _, name = parameter.removesuffix(")").partition("(")
    module, _, called = place.rpartition(".")
    made = getattr(importlib.import_module(module), called)
    return inspect.signature(made).parameters[name].default


def stated(framework: str) -> dict[str, object]:
    """The defaults of a framework that any cause has."""
    return {name: value for name, value in STATED.items() if name.startswith(BEGIN[framework])}


@pytest.mark.usefixtures("impl")  # which imports the framework
def test_a_stated_default_is_that_of_the_framework(framework):
    given = stated(framework)
    assert len(given) > 25
    assert {name: default(name) for name in given} == given


def test_every_default_is_of_one_framework():
    assert set(STATED) == {*stated("pt"), *stated("tf")}
