"""Processes of a run: they end with the one that fails, and with who launched them."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from shared import parallel
from tests.workers import ROOT

# A process that has a child, says both numbers, and never ends.
PARENT = """
import subprocess, sys, os, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
with open(sys.argv[1], "a") as file:
    file.write(f"{os.getpid()} {child.pid}\\n")
time.sleep(600)
"""


def until(condition, *, seconds=30.0):
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if found := condition():
            return found
        time.sleep(0.02)
    raise AssertionError(f"not within {seconds} seconds")


def numbers(path: Path, lines: int) -> list[int]:
    text = path.read_text() if path.exists() else ""
    return [int(word) for word in text.split()] if text.count("\n") == lines else []


def gone(found: list[int]) -> bool:
    def ended(number):
        with contextlib.suppress(psutil.NoSuchProcess):
            return psutil.Process(number).status() == psutil.STATUS_ZOMBIE
        return True

    return all(ended(number) for number in found)


def test_when_one_process_fails_the_others_and_their_children_end(tmp_path):
    path = tmp_path / "numbers"
    written = f"os.path.exists({str(path)!r}) and os.path.getsize({str(path)!r})"
    wait = f"import os, time\nend = time.monotonic() + 60\nwhile not ({written}):\n"
    wait += "    if time.monotonic() > end: raise SystemExit('replica failed: the other is late')\n"
    failing = f"{wait}    time.sleep(.01)\nraise SystemExit('replica failed: out of luck')"
    commands = [[sys.executable, "-c", PARENT, str(path)], [sys.executable, "-c", failing]]
    with pytest.raises(RuntimeError, match=r"^out of luck$"):
        parallel.run([(command, dict(os.environ)) for command in commands])
    assert until(lambda: gone(until(lambda: numbers(path, 1))))


def test_of_two_that_fail_the_first_says_why(tmp_path):
    path = tmp_path / "said"
    cause = "import sys, time\nprint('replica failed: out of luck', file=sys.stderr, flush=True)\n"
    cause += f"open({str(path)!r}, 'w').close()\ntime.sleep(60)\nraise SystemExit(1)"
    follows = (
        f"import os, time\nend = time.monotonic() + 60\nwhile not os.path.exists({str(path)!r})"
    )
    follows += " and time.monotonic() < end: time.sleep(.01)\n"
    follows += "time.sleep(.05)\nraise SystemExit('replica failed: the other is gone')"
    commands = [[sys.executable, "-c", text] for text in (follows, cause)]
    with pytest.raises(RuntimeError, match=r"^out of luck$"):
        parallel.run([(command, dict(os.environ)) for command in commands])


@contextlib.contextmanager
def launcher(program, path):
    """A process that runs two of this program, once both have written to the file at `path`."""
    text = (
        "import os, sys\nfrom shared import parallel\n"
        f"command = [sys.executable, '-c', {program!r}, {str(path)!r}]\n"
        "parallel.run([(command, dict(os.environ))] * 2)"
    )
    started = subprocess.Popen(
        [sys.executable, "-c", text], cwd=ROOT, stderr=subprocess.DEVNULL, start_new_session=True
    )
    try:
        yield started, until(lambda: numbers(path, 2))
    finally:
        started.kill()
        started.wait()


def test_ctrl_c_ends_all_processes(tmp_path):
    with launcher(PARENT, tmp_path / "numbers") as (started, found):
        # pytest may itself run with the signal ignored, which children inherit.
        started.send_signal(signal.SIGINT)
        started.wait(30)
        assert until(lambda: gone(found))


def test_a_launcher_that_is_killed_takes_its_processes_along(tmp_path):
    replica = (
        "import os, sys, time\nfrom shared import parallel\nparallel.end_with_launcher()\n"
        "open(sys.argv[1], 'a').write(f'{os.getpid()}\\n')\ntime.sleep(600)"
    )
    with launcher(replica, tmp_path / "numbers") as (started, found):
        started.kill()
        started.wait()
    assert until(lambda: gone(found))


def test_what_a_process_refuses_is_refused():
    refusing = "raise SystemExit('replica failed: NotImplementedError: not with this')"
    with pytest.raises(NotImplementedError, match=r"^not with this$"):
        parallel.run([([sys.executable, "-c", refusing], dict(os.environ))])


def test_a_process_that_ends_without_a_word_is_named(tmp_path):
    with pytest.raises(RuntimeError, match="status 3"):
        parallel.run([([sys.executable, "-c", "raise SystemExit(3)"], dict(os.environ))])


def test_free_ports_differ_and_are_free():
    ports = parallel.free_ports(8)
    assert len(set(ports)) == 8
    assert all(parallel.checked_port(parallel.LOOPBACK, port) == port for port in ports)
