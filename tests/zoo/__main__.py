"""Apply every technique to every model of the zoo: `python -m tests.zoo`.

Runs the cells that the record lacks or that were made with other files, writes docs/any_model.json
and docs/any_model.md, and says what does not work. Ends with 1 where a cell is wrong or a
traceback.
"""

from __future__ import annotations

import argparse
import os
import sys

from tests.zoo import matrix
from tests.zoo.cells import REFUSED, TECHNIQUES, WORKS


def main() -> int:
    """Run, record, report."""
    parser = argparse.ArgumentParser(prog="python -m tests.zoo", description=__doc__)
    parser.add_argument("--framework", choices=matrix.FRAMEWORKS, help="only this one")
    parser.add_argument("--technique", choices=TECHNIQUES, action="append", help="only this one")
    parser.add_argument("--model", action="append", help="only this one")
    parser.add_argument("--again", action="store_true", help="cells too that the record has")
    parser.add_argument("--bad", action="store_true", help="only what is missing or went wrong")
    parser.add_argument("--dry", action="store_true", help="print, and leave record and page")
    parser.add_argument(
        "--check", action="store_true", help="only say which cells the record lacks as they are now"
    )
    parser.add_argument("--page", action="store_true", help="only write the page anew")
    parser.add_argument(
        "--device",
        choices=("cpu", "cuda"),
        default="cpu",
        help="where PyTorch's models are; the record is of a CPU: with cuda it is left",
    )
    options = parser.parse_args()
    if options.device != "cpu":
        if options.framework != "pt":
            parser.error("--device is PyTorch's: add --framework pt")
        os.environ["ZOO_DEVICE"] = options.device
        options.dry = True
    clock, chosen = matrix.started(), {}
    for framework in [options.framework] if options.framework else matrix.FRAMEWORKS:
        cells = matrix.every_cell if options.again or options.dry else matrix.stale
        if options.bad:
            cells = matrix.bad
        chosen[framework] = [
            (technique, model)
            for technique, model in cells(framework)
            if technique in (options.technique or TECHNIQUES)
            and model in (options.model or [model])
        ]
    bad = []

    def report(framework: str, technique: str, model: str, found: dict) -> None:
        told = f"{found['status']:9} {framework} {technique} {model} ({found['seconds']} s)"
        print(told, found.get("reason", ""), flush=True)
        if found["status"] not in (WORKS, REFUSED):
            bad.append((framework, technique, model))

    if options.check:
        stale = [(f, *cell) for f in chosen for cell in chosen[f]]
        print("\n".join(map(" ".join, stale)) or "The record is of the files as they are.")
        return int(bool(stale))
    if options.page:
        chosen = {}
    if options.dry:
        for framework, cells in chosen.items():
            for _ in matrix.run(cells, framework, report):
                pass
        return int(bool(bad))
    matrix.update(chosen, report)
    found = matrix.read()
    matrix.PAGE.write_text(matrix.page(found))
    for framework, title in matrix.FRAMEWORKS.items():
        counted = matrix.count(found[framework])
        print(f"{title}: {dict(counted)}, {matrix.share(counted):.1%} work")
    print(f"{sum(map(len, chosen.values()))} cells in {clock():.0f} s")
    return int(bool(bad))


if __name__ == "__main__":
    sys.exit(main())
