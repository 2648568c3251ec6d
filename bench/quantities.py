"""Quantities with their units on a command line: 5ms, 100mbit, 2GB."""

from __future__ import annotations

import argparse
import re


def seconds(text: str) -> float:
    """The seconds of "5ms", "50us" or "2s"."""
    return _quantity(text, {"s": 1.0, "ms": 1e-3, "us": 1e-6})


def bits(text: str) -> float:
    """The bits per second of "100mbit" or "10gbit"."""
    return _quantity(text, {"bit": 1.0, "kbit": 1e3, "mbit": 1e6, "gbit": 1e9})


def size(text: str) -> float:
    """The bytes of "512MB" or "2GB"."""
    return _quantity(text, {"B": 1.0, "KB": 1e3, "MB": 1e6, "GB": 1e9})


def _quantity(text: str, units: dict[str, float]) -> float:
    match = re.fullmatch(r"(\d{1,12}(?:\.\d+)?) ?([A-Za-z]+)", text.strip())
    unit = next((unit for unit in units if match and unit.lower() == match[2].lower()), None)
    if unit is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number with one of {', '.join(units)}")
    return float(match[1]) * units[unit]
