"""Replicas out of reach of others, and one that hangs: its peers end in time, and leave nothing."""

import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from shared import network_namespace, parallel
from tests.network.namespaces import refusal
from tests.parallel.hanging import PATIENCE

FRAMEWORKS = ("pt", "tf")
MODELS = "data_parallel"
ROOT = Path(__file__).resolve().parents[2]
END = 15  # seconds in which a process must have ended when it waits no longer
permitted = pytest.mark.skipif(refusal() is not None, reason=f"no namespaces: {refusal()}")


@pytest.fixture(scope="module")
def hung(framework, models, tmp_path_factory):
    """What became of the run, and what it left in the temporary folder."""
    seen, temporary = tmp_path_factory.mktemp("seen"), tmp_path_factory.mktemp("temporary")
    random = np.random.default_rng(0)
    dataset = random.normal(size=(32, 4)).astype(np.float32), random.integers(0, 2, 32)
    run = parallel.Run(replicas=2, global_batch=16, steps=8, threads=2, timeout_s=PATIENCE)
    make, build = "tests.parallel.hanging:hanging", f"{models.__name__}:small"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HANGING_SIDE", framework)
        patch.setenv("TMPDIR", str(temporary))
        patch.setattr(tempfile, "tempdir", None)
        with pytest.raises(RuntimeError) as raised:
            models.replicas.launch(make, build, dataset, run, {"seen": str(seen)})
        ended = time.monotonic()
    said = {path.name: json.loads(path.read_text()) for path in seen.iterdir()}
    left = list(temporary.iterdir())
    return SimpleNamespace(words=str(raised.value), ended=ended, seen=said, left=left)


@pytest.mark.timeout(300)
def test_a_peer_that_hangs_ends_the_run_within_its_time_and_leaves_nothing(framework, hung):
    assert "\n" not in hung.words
    assert {"pt": "6000ms", "tf": "another process hangs"}[framework] in hung.words
    assert PATIENCE - 1 < hung.ended - hung.seen["begun-0"] < PATIENCE + END
    assert hung.seen["begun-1"]  # it was there, and alive, and did nothing
    assert hung.left == []


@permitted
@pytest.mark.only("tf")
def test_tf_only_the_loopback_is_there_for_its_servers(hung):
    assert hung.seen["interfaces-0"] == hung.seen["interfaces-1"] == ["lo"]


# A network of its own ---------------------------------------------------------------------------

SERVER = """
import socket, sys
with socket.create_server(("", int(sys.argv[1]))) as server:
    server.settimeout(20)
    open(sys.argv[2], "w").close()
    server.accept()[0].sendall(b"here")
"""
CLIENT = """
import pathlib, socket, sys, time
while not pathlib.Path(sys.argv[2]).exists():
    time.sleep(.01)
assert socket.create_connection(("127.0.0.1", int(sys.argv[1])), 20).recv(4) == b"here"
"""


@permitted
def test_processes_of_one_network_reach_each_other_and_nobody_else_does(tmp_path):
    with network_namespace.isolated_network() as network:
        (port,) = parallel.free_ports(1)
        started = []
        for program in (SERVER, CLIENT):
            words = [sys.executable, "-c", program, str(port), str(tmp_path / "listening")]
            command = network.command(words)
            started.append(subprocess.Popen(command, pass_fds=network.files))
            if program is SERVER:
                until((tmp_path / "listening").exists)
                with pytest.raises(ConnectionRefusedError):
                    socket.create_connection((parallel.LOOPBACK, port), 5)
        assert [process.wait(30) for process in started] == [0, 0]


def until(condition) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@permitted
def test_who_enters_a_network_keeps_user_folder_and_environment(tmp_path):
    said = "import os; print(os.getuid(), os.getcwd(), os.environ['WORD'])"
    with network_namespace.isolated_network() as network:
        done = subprocess.run(
            network.command([sys.executable, "-c", said]),
            pass_fds=network.files,
            cwd=tmp_path,
            env={"WORD": "kept"},
            capture_output=True,
            text=True,
        )
    assert done.stdout.split() == [str(os.getuid()), str(tmp_path), "kept"]


def test_where_no_network_is_permitted_a_warning_says_so_and_the_run_goes_on(monkeypatch, tmp_path):
    refusing = "import sys; sys.exit('PermissionError: unshare: Operation not permitted')"
    monkeypatch.setattr(network_namespace, "_PYTHON", [sys.executable, "-c", refusing])
    monkeypatch.setattr(parallel, "others_reach", lambda host: ["eth0"])
    run = f"open({str(tmp_path / 'ran')!r}, 'w').close()"
    with pytest.warns(UserWarning, match="listen on every interface .*Operation not permitted"):
        parallel.run([([sys.executable, "-c", run], {})], out_of_reach=True)
    assert (tmp_path / "ran").exists()


@permitted
def test_interfaces_beside_the_loopback_and_the_runs_own_are_named(tmp_path):
    said = (
        "import psutil; from shared import parallel\n"
        "print([name for name in psutil.net_if_addrs()], parallel.others_reach('127.0.0.1'))"
    )
    with network_namespace.isolated_network() as network:
        done = subprocess.run(
            network.command([sys.executable, "-c", said]),
            pass_fds=network.files,
            cwd=ROOT,
            capture_output=True,
            text=True,
        )
    assert done.stdout == "['lo'] []\n", done.stderr


def test_who_listens_on_every_interface_is_seen():
    with socket.create_server(("", 0)) as everywhere, socket.create_server(("127.0.0.1", 0)) as one:
        assert parallel.listens_everywhere(everywhere.getsockname()[1])
        assert not parallel.listens_everywhere(one.getsockname()[1])


# Waiting without end ----------------------------------------------------------------------------

IDLE = """
import sys, time
from shared import parallel
parallel.end_when_idle(0.5)
end = time.monotonic() + 1.5
while time.monotonic() < end:
    if sys.argv[1] == "idle":
        time.sleep(2)
print("ended by itself")
"""


@pytest.mark.parametrize(("kind", "status"), [("idle", 1), ("busy", 0)])
def test_who_has_nothing_to_do_for_too_long_ends_with_a_word(kind, status):
    done = subprocess.run(
        [sys.executable, "-c", IDLE, kind], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == status
    assert ("another process hangs: nothing to do for 0.5 s" in done.stderr) == (status == 1)
