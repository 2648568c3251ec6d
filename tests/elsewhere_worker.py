"""A file of the project in folders that hold a part of it, where nothing else of it is installed.

`python -m tests.elsewhere_worker pt MODULE FOLDER ...` imports it in each folder and prints what
the import said; with `--run` after the folders it prints what the file says when it is run.
All in one process, since most of an import is that of a framework.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import os
import runpy
import sys

OURS = ("pt_impl", "tf_impl", "shared", "bench", "tests")


def stand_in(folder: str) -> None:
    """Find the project in this folder alone, and nothing of it that was imported before."""
    for name in [name for name in sys.modules if name.partition(".")[0] in OURS]:
        del sys.modules[name]
    sys.path[0] = folder
    os.chdir(folder)


def imported(module: str) -> str:
    """What the import said; nothing where it succeeded."""
    try:
        importlib.import_module(module)
    except ImportError as error:
        return str(error)
    return ""


def ran(module: str) -> str:
    """What the file printed."""
    with contextlib.redirect_stdout(io.StringIO()) as out:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    return out.getvalue()


def main(module: str, *folders: str) -> None:
    """Print {"said": [what was said in each folder]}."""
    # Without what makes an editable installation importable, by a finder or by a path.
    sys.meta_path[:] = [f for f in sys.meta_path if "__editable__" not in str(f)]
    holding = [p for p in sys.path if not p or os.path.isdir(os.path.join(p, "pt_impl"))]
    sys.path[:] = ["", *(p for p in sys.path if p not in holding)]
    said = []
    for folder in [folder for folder in folders if folder != "--run"]:
        stand_in(folder)
        said.append(ran(module) if "--run" in folders else imported(module))
    print(json.dumps({"said": said}))


if __name__ == "__main__":
    main(*sys.argv[2:])
