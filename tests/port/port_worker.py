"""Compares pairs of models with `bench.port.compare.port`: `port_worker [--parameters] FILE ...`.

Prints a line of JSON for each file: the report, or the error; with the option also how many
parameters either model has.
"""

from __future__ import annotations

import dataclasses
import json
import sys
import time
import traceback
from math import prod

from bench.port.compare import port
from shared import user_model


def main() -> None:
    options = [argument for argument in sys.argv[1:] if argument.startswith("--")]
    for path in [argument for argument in sys.argv[1:] if argument not in options]:
        start, used = time.monotonic(), time.process_time()
        try:
            answer = dataclasses.asdict(port(user_model.look(path), say=lambda _: None))
        except Exception:
            answer = {"error": traceback.format_exc()}
        answer["took"] = time.monotonic() - start
        answer["processor"] = time.process_time() - used
        if options:
            answer["parameters"] = parameters(path)
        print("REPORT " + json.dumps(answer), flush=True)


def parameters(path: str) -> dict[str, int]:
    """How many numbers either model of a file trains."""
    module = user_model.load(path)
    ours, theirs = module.pytorch()[0], module.tensorflow()[0]
    shapes = [tuple(variable.shape) for variable in theirs.trainable_variables]
    return {
        "pytorch": sum(value.numel() for value in ours.parameters() if value.requires_grad),
        "tensorflow": sum(map(prod, shapes)),
    }


if __name__ == "__main__":
    main()
