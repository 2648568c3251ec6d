"""pytest in a process of its own, as its users run it, but with the NumPy kit."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path
from types import SimpleNamespace

import psutil

from bench.analysis.reading import load
from tests import workers

ROOT = Path(__file__).resolve().parents[2]
MARK = "TWINBENCH_TEST"
UNSET = ("CI", "PYTEST_ADDOPTS")
PATIENCE_S = 180  # with a run that has few cores to itself
BENCH_FILE = """
from tests.harness.faulty import SMALL as TECHNIQUE
from tests.harness.faulty import prepare, took_effect
"""
# A benchmark that lies in another folder has a name that its workers can import.
PLAIN = ("-p", "no:cacheprovider")
PLAIN += ("-p", "no:hypothesispytest")  # users need not have it; its import takes a second
PLUGINS = ("-p", "tests.harness.fake_plugin", "-p", "bench.conftest", *PLAIN)
PLUGINS += ("--import-mode=prepend",)


def environment(folder):
    """That of a process which imports from `folder` and from here."""
    usual = {k: v for k, v in os.environ.items() if k not in UNSET}
    return usual | imports(folder)


def imports(folder):
    return {"PYTHONPATH": f"{folder}{os.pathsep}{ROOT}", "FAKE_WARM_S": "0.005"}


def start(*arguments, folder, **others):
    return subprocess.Popen(
        [sys.executable, "-m", "pytest", "-c", ROOT / "pyproject.toml", *PLUGINS, *arguments],
        cwd=folder,
        env=environment(folder) | others,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def run(*arguments, folder, **others):
    """The same to its end."""
    given = ("-c", ROOT / "pyproject.toml", *PLUGINS, *arguments)
    done = forked("pytest", *given, folder=folder, **others)
    return ended(done.stdout, done.stderr, done.returncode)


def forked(module, *arguments, folder, **others):
    """`python -m MODULE ARGUMENTS`, in a fork of what has imported pytest and this project."""
    variables = dict.fromkeys(UNSET, "") | imports(folder) | others
    parent = workers.parent("commands")
    return parent.run(module, *arguments, folder=folder, timeout=120, **variables)


def in_one_process(runs, folder):
    """Exit status, output and errors of pytest with each list of arguments."""
    done = forked("tests.harness.in_one", json.dumps(runs), folder=folder)
    assert done.returncode == 0, done.stderr
    return list(map(json.loads, done.stdout.splitlines()))


def finish(process, timeout=PATIENCE_S):
    try:
        out, err = process.communicate(timeout=timeout)
    except BaseException:
        process.kill()
        process.communicate()
        raise
    return ended(out, err, process.returncode)


def ended(out, err, status):
    """What a run that ended left."""
    return SimpleNamespace(out=out, err=err, status=status, record=record_of(out))


def record_of(out):
    """The record that the output points to."""
    paths = re.findall(r"^/\S*results\.json$", out, re.MULTILINE)
    return load(paths[-1]) if paths else None


def interrupt(start, ready, *arguments, results, by=signal.SIGINT, **environment):
    """Press Ctrl-C (or send another signal) once `ready(record, logs)` holds; what the run left."""
    mark = uuid.uuid4().hex
    results = Path(results)
    process = start(
        f"--results={results}", "--framework=pt", "--variant=same", *arguments,
        **environment, **{MARK: mark},
    )  # fmt: skip
    deadline = time.monotonic() + PATIENCE_S
    try:
        while time.monotonic() < deadline:
            with contextlib.suppress(ValueError):  # there is no record yet
                if ready(load(results), results / "latest" / "logs"):
                    break
            time.sleep(0.05)
        else:
            raise AssertionError("the run did not get there")
        process.send_signal(by)
        found = finish(process)
    finally:
        process.kill()
        process.wait()
    found.left = marked(mark)
    return found


def blocks(record):
    """How many blocks of its first match each case has, at least."""
    return min(len(next(iter(case.timing.step_s.values()), ())) for case in record.cases)


def marked(mark: str) -> list[psutil.Process]:
    """The living processes of a run, other than this one."""
    found = []
    for process in psutil.process_iter():
        try:
            own = process.environ().get(MARK) == mark and process.status() != psutil.STATUS_ZOMBIE
        except psutil.Error:
            continue
        if own and process.pid != os.getpid():
            found.append(process)
    return found
