"""A warm parent: imports one framework once and forks a worker for each request.

    python -m tests.warm pt|tf|commands

Requests and answers are lines of JSON on the standard input and output; one at a time. Nothing here
runs an operator or starts a thread, so that the fork is safe, and a worker finds all settings as a
fresh process does. A worker ends as any process does, but for objects that are not given back.
"""

from __future__ import annotations

import atexit
import functools
import gc
import importlib
import json
import os
import runpy
import sys
import time

from tests import workers

# What a pytest of ours imports, the last by its plugin of pytest.
PYTEST = ("pytest", "hypothesis.internal.observability", "tests.conftest", "tests.frameworks")
# What most workers import, in their first second or at the first step.
KEPT = {
    "pt": (
        *PYTEST,
        "torch._dynamo",
        "torch._inductor.compile_fx",
        "torchvision",
        "torchao.quantization",
    ),
    "tf": (*PYTEST, "keras", "tensorflow_model_optimization"),
    "commands": (
        *PYTEST[:2],
        "bench.report.command",
        "bench.choose",
        "bench.compare",
        "bench.validation.command",
    ),
}


def main(framework: str) -> None:
    """Fork for each line of the standard input, until it ends."""
    requests, answers = os.fdopen(os.dup(0)), os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what an import prints is no answer
    variables = dict(os.environ)
    if framework != "commands":
        workers.implementation(framework)
    for module in KEPT[framework]:
        importlib.import_module(module)
    if framework == "pt":
        read_translations_once()
    # tfmot sets TF_USE_LEGACY_KERAS, by which what a worker starts would have another Keras.
    os.environ.clear()
    os.environ.update(variables)
    gc.collect()
    gc.freeze()  # a worker's collections need not go through what was imported
    for line in requests:
        request = json.loads(line)
        child = os.fork()
        if not child:
            requests.close()
            answers.close()
            return work(**request)
        print(json.dumps(_ending(child, request["timeout"])), file=answers, flush=True)
    os._exit(0)  # at once: it holds what was imported, and nothing that has to be written


def read_translations_once() -> None:
    """torch.onnx reads the sources of its 500 translations here, and in no export any more."""
    from torch.onnx._internal.exporter import _registration

    read = functools.cache(_registration.ONNXRegistry.from_torchlib)
    read(opset_version=_registration._constants.TORCHLIB_OPSET)
    _registration.ONNXRegistry.from_torchlib = staticmethod(read)


def work(
    module: str,
    arguments: list[str],
    environment: dict[str, str],
    folder: str,
    out: str,
    err: str,
    timeout: int,
) -> None:
    """Be `python -m MODULE ARGUMENTS` in this folder and environment, and output in these files."""
    for number, path, flags in (
        (0, os.devnull, os.O_RDONLY),
        (1, out, os.O_WRONLY),
        (2, err, os.O_WRONLY),
    ):
        opened = os.open(path, flags)
        os.dup2(opened, number)
        os.close(opened)
    os.environ.update(environment)
    os.chdir(folder)
    sys.argv = [module, *arguments]
    status = 0
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except SystemExit as end:  # of pytest, after all that it had to say
        if not isinstance(end.code, int):
            raise
        status = end.code
    # To give back each object of the parent copies its memory, which takes half a second.
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def _ending(child: int, timeout: int) -> int | None:
    """The exit status of a child; None if it had to be killed after `timeout` seconds."""
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        found, status = os.waitpid(child, os.WNOHANG)
        if found:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.02)
    os.kill(child, 9)
    os.waitpid(child, 0)
    return None


if __name__ == "__main__":
    main(sys.argv[1])
