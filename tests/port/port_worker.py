"""Compares pairs of models with `bench.port.compare.port`: `port_worker FILE ...`.

Prints a line of JSON for each file: the report, or the error.
"""

from __future__ import annotations

import dataclasses
import json
import sys
import time
import traceback


def main() -> None:
    from bench.port.compare import port

    from shared import user_model

    for path in sys.argv[1:]:
        start = time.monotonic()
        try:
            found = dataclasses.asdict(port(user_model.look(path), say=lambda _: None))
        except Exception:
            found = {"error": traceback.format_exc()}
        print("REPORT " + json.dumps(found | {"took": time.monotonic() - start}), flush=True)


if __name__ == "__main__":
    main()
