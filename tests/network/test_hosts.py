"""Hosts on one machine: what reaches what, how fast, and that nothing is left behind."""

import json
import os
import select
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
import uuid
from pathlib import Path
from types import SimpleNamespace

import pytest

from bench.network import command, hosts
from bench.network.hosts import Hosts, Link, Refused
from bench.network.switch import Switch
from tests.harness.command_line import MARK, ROOT, marked
from tests.network.namespaces import namespace_refusal, refusal, wait_until

pytestmark = pytest.mark.timeout(60)
needs_hosts = pytest.mark.usefixtures("hosts_permitted")

# Answers each byte, and says how long it took to take in as many as it was told.
SERVER = """
import socket, time
with socket.create_server(("", 5000)) as server:
    print("listening", flush=True)
    peer, _ = server.accept()
    while byte := peer.recv(1):
        peer.sendall(byte)
        if byte == b"!":
            start, left = time.perf_counter(), int(peer.recv(16))
            while left:
                left -= len(peer.recv(min(left, 1 << 16)))
            peer.sendall(str(time.perf_counter() - start).encode())
"""
CLIENT = """
import socket, sys, time
address, size = sys.argv[1], int(sys.argv[2])
with socket.create_connection((address, 5000), timeout=20) as peer:
    peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    times = []
    for _ in range(20):
        start = time.perf_counter()
        peer.sendall(b".")
        assert peer.recv(1) == b"."
        times.append(time.perf_counter() - start)
    peer.sendall(b"!")
    assert peer.recv(1) == b"!"
    peer.sendall(f"{size:16}".encode())
    peer.sendall(bytes(size))
    print(min(times), peer.recv(32).decode())
"""
PIPES = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}


def python(made: Hosts, host: int, program: str, *arguments, **settings) -> subprocess.Popen:
    return made.start(host, [sys.executable, "-c", program, *map(str, arguments)], **settings)


def between(made: Hosts, size: int) -> tuple[float, float]:
    """Seconds there and back for a byte, and for `size` bytes from host 1 to host 0."""
    server = python(made, 0, SERVER, **PIPES)
    assert server.stdout.readline() == "listening\n"
    out, err = python(made, 1, CLIENT, made.address(0), size, **PIPES).communicate(timeout=30)
    assert not err
    server.communicate(timeout=10)
    return tuple(map(float, out.split()))


def of_a_mark(monkeypatch) -> str:
    monkeypatch.setenv(MARK, mark := uuid.uuid4().hex)
    return mark


# What reaches what --------------------------------------------------------------------------------


@needs_hosts
def test_a_host_has_its_address_and_knows_its_part():
    with Hosts(2) as made:
        program = "import json, os, psutil, socket\n"
        program += "name = socket.gethostname()\n"
        program += "name = name, socket.gethostbyname(name)\n"
        program += "print(json.dumps([dict(os.environ), psutil.net_if_addrs(), name]))"
        for host in range(2):
            out, _ = python(made, host, program, **PIPES).communicate(timeout=20)
            variables, interfaces, name = json.loads(out)
            assert name == [f"host{host}", made.address(host)]
            assert set(interfaces) == {"lo", "eth0"}
            assert made.address(host) in [entry[1] for entry in interfaces["eth0"]]
            assert (variables["RANK"], variables["WORLD_SIZE"]) == (str(host), "2")
            assert variables["MASTER_ADDR"] == made.address(0)
            config = json.loads(variables["TF_CONFIG"])
            assert config["task"] == {"type": "worker", "index": host}
            workers = [address.partition(":")[0] for address in config["cluster"]["worker"]]
            assert workers == [made.address(0), made.address(1)]


@needs_hosts
def test_a_proxy_of_this_machine_is_not_told_to_hosts(monkeypatch):
    monkeypatch.setenv("https_proxy", "http://localhost:1")
    monkeypatch.setenv("NO_PROXY", "localhost")
    with Hosts(1) as made:
        assert not [name for name in made.environment(0) if "proxy" in name.lower()]


@needs_hosts
def test_nothing_outside_can_be_reached_and_no_port_is_open_outside():
    program = (
        "import socket, sys; print(socket.socket().connect_ex((sys.argv[1], int(sys.argv[2]))))"
    )
    with Hosts(2) as made, socket.create_server(("127.0.0.1", 0)) as outside:
        port = outside.getsockname()[1]
        out, _ = python(made, 0, program, "127.0.0.1", port, **PIPES).communicate(timeout=20)
        assert int(out) != 0
        server = python(made, 0, SERVER, **PIPES)
        assert server.stdout.readline() == "listening\n"
        with socket.socket() as probe:
            assert probe.connect_ex(("127.0.0.1", 5000)) != 0


@needs_hosts
def test_interfaces_of_this_machine_stay_as_they_are():
    before = sorted(os.listdir("/sys/class/net"))
    with Hosts(3, Link(latency=1e-3)):
        assert sorted(os.listdir("/sys/class/net")) == before
    assert sorted(os.listdir("/sys/class/net")) == before


# How fast -----------------------------------------------------------------------------------------


BANDWIDTH, SIZE = 40e6, 2_000_000
SENDING = SIZE * 8 / BANDWIDTH  # seconds


@needs_hosts
@pytest.mark.parametrize("latency", [0.0, 0.02])
def test_links_are_as_slow_as_asked(latency):
    with Hosts(2, Link(latency, BANDWIDTH)) as limited:
        there_and_back, sending = between(limited, SIZE)
    assert there_and_back >= 2 * latency
    assert sending > SENDING * 0.95
    with Hosts(2) as free:
        there_and_back_of_none, sending_of_none = between(free, SIZE)
    assert sending_of_none < sending / 2
    assert not latency or there_and_back_of_none < there_and_back / 2


@needs_hosts
@pytest.mark.campaign
@pytest.mark.parametrize("latency", [0.0, 0.02])
def test_links_are_no_slower_than_asked(latency):
    """Twice the latency there and back; the bandwidth within a tenth. 2% are headers.

    The fastest of three: other work on this machine can only slow a transfer down.
    """
    with Hosts(2, Link(latency, BANDWIDTH)) as made:
        tries = [between(made, SIZE) for _ in range(3)]
    there_and_back, sending = map(min, zip(*tries, strict=True))
    assert there_and_back < 2 * latency + 0.02
    assert sending < SENDING * 1.1 + 4 * latency


@needs_hosts
@pytest.mark.campaign
def test_what_is_not_limited_is_fast():
    with Hosts(2) as made:
        there_and_back, sending = between(made, 20_000_000)
    assert there_and_back < 0.01
    assert sending < 20_000_000 * 8 / 400e6


@needs_hosts
def test_a_cut_cable_carries_nothing_until_it_is_mended():
    with Hosts(2) as made:
        server = python(made, 0, SERVER, **PIPES)
        assert server.stdout.readline() == "listening\n"
        program = "import socket, sys; s = socket.create_connection((sys.argv[1], 5000), 20)\n"
        program += "for line in sys.stdin: s.sendall(b'.'); print(s.recv(1), flush=True)"
        client = python(made, 1, program, made.address(0), stdin=subprocess.PIPE, **PIPES)

        def answered(seconds):
            client.stdin.write("\n")
            client.stdin.flush()
            return select.select([client.stdout], [], [], seconds)[0] != []

        assert answered(20)
        assert client.stdout.readline() == "b'.'\n"
        made.cut(1)
        assert not answered(0.5)
        made.mend(1)
        assert select.select([client.stdout], [], [], 20)[0] != []
        assert client.stdout.readline() == "b'.'\n"


def frames(pair) -> list[bytes]:
    received = []
    while True:
        try:
            received.append(pair.recv(100))
        except BlockingIOError:
            return received


def test_a_switch_learns_where_addresses_are_and_keeps_the_order():
    pairs = [socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in range(3)]
    for pair in pairs:
        for end in pair:
            end.setblocking(False)
    ours, theirs = [ours for ours, _ in pairs], [theirs.fileno() for _, theirs in pairs]
    switch = Switch(theirs, latency=0.05)
    first, second, unknown = b"a" * 6, b"b" * 6, b"c" * 6

    start = time.monotonic()
    ours[0].send(unknown + first + b"anyone?")
    while switch.waiting or not switch.behind:
        switch.turn()
    assert time.monotonic() - start >= 0.05
    assert [frames(end) for end in ours] == [[], *[[unknown + first + b"anyone?"]] * 2]

    for number in range(5):
        ours[1].send(first + second + bytes([number]))
    while switch.waiting or second not in switch.behind:
        switch.turn()
    assert frames(ours[0]) == [first + second + bytes([number]) for number in range(5)]
    assert [frames(end) for end in ours] == [[], [], []]

    with open("/dev/null", "rb") as gone:  # nothing can be written there, as to a TAP that is down
        switch.behind[second] = gone.fileno()
        ours[0].send(second + first + b"lost")
        switch.turn()
        while switch.waiting:
            switch.turn()
    assert [frames(end) for end in ours] == [[], [], []]
    for end in [*ours, *(theirs for _, theirs in pairs)]:
        end.close()


# What is left -------------------------------------------------------------------------------------


@needs_hosts
@pytest.mark.parametrize("link", [Link(), Link(latency=1e-3)])
def test_closing_ends_every_process(link, monkeypatch):
    mark = of_a_mark(monkeypatch)
    with Hosts(2, link) as made:
        program = "import os, time; print(os.fork() or os.setsid(), flush=True); time.sleep(1000)"
        started = [python(made, host, program, **PIPES) for host in range(2)]
        for process in started:
            process.stdout.readline()
        assert len(marked(mark)) >= 6
    assert marked(mark) == []
    for process in started:
        assert process.wait(5) != 0


@needs_hosts
def test_a_host_without_power_stops_and_the_other_goes_on(monkeypatch):
    with Hosts(2) as made:
        started = [made.start(host, ["sleep", "1000"]) for host in range(2)]
        wait_until(lambda: len(made.processes(0)) == 1)
        made.stop(1)
        assert started[1].wait(5) != 0
        assert started[0].poll() is None
        assert made.processes(1) == []
        assert len(made.processes(0)) == 1


def run_hosts(*arguments, **others) -> subprocess.Popen:
    """`twinbench network hosts` with these arguments."""
    return subprocess.Popen(
        [sys.executable, "-m", "bench", "network", "hosts", *arguments],
        cwd=ROOT,
        env=os.environ | others,
        start_new_session=True,  # as a terminal does, so that Ctrl-C is for its group
        **PIPES,
    )


@needs_hosts
@pytest.mark.parametrize(
    ("by", "latency"),
    [
        (signal.SIGINT, "1ms"),
        (signal.SIGTERM, "0ms"),
        (signal.SIGKILL, "0ms"),
        (signal.SIGKILL, "1ms"),
    ],
)
def test_an_interrupted_command_leaves_nothing(by, latency, tmp_path):
    mark = uuid.uuid4().hex
    text = f"touch {shlex.quote(str(tmp_path))}/$RANK; sleep 1000 & sleep 1000"
    process = run_hosts("--latency", latency, text, **{MARK: mark})
    wait_until(lambda: len(os.listdir(tmp_path)) == 2, what="the start")
    assert len(marked(mark)) > 4
    os.killpg(process.pid, by)
    wait_until(lambda: not marked(mark), seconds=10, what="the end")
    out, err = process.communicate(timeout=5)
    assert process.returncode == {signal.SIGINT: 130, signal.SIGTERM: 143, signal.SIGKILL: -9}[by]
    assert "Traceback" not in out + err


@needs_hosts
def test_its_time_is_bounded():
    mark = uuid.uuid4().hex
    start = time.monotonic()
    process = run_hosts("--seconds", "1", "sleep 1000", **{MARK: mark})
    process.communicate(timeout=20)
    assert 1 <= time.monotonic() - start < 15
    assert process.returncode != 0
    assert marked(mark) == []


# The command --------------------------------------------------------------------------------------


@needs_hosts
def test_a_command_runs_on_every_host_in_this_folder():
    process = run_hosts("--hosts", "3", "echo I am $RANK of $WORLD_SIZE; pwd; exit $((RANK * 2))")
    out, err = process.communicate(timeout=20)
    lines = [f"host{host}: {line}" for host in range(3) for line in (f"I am {host} of 3", ROOT)]
    assert sorted(out.splitlines()) == sorted(lines)
    assert (process.returncode, err) == (2, "")


def test_output_that_is_no_text_is_shown(capsys):
    here = SimpleNamespace(count=1, close=lambda: None)
    here.start = lambda host, command, **settings: subprocess.Popen(command, **settings)
    assert hosts.run(here, r"printf '\377 and more\n'; exit 3") == 3
    assert capsys.readouterr().out == "host0: \\xff and more\n"


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--hosts", "0", "true"], "--hosts: give 1 to 64, not 0"),
        (["--hosts", "65", "true"], "--hosts: give 1 to 64, not 65"),
        (["--seconds", "0", "true"], "--seconds: give a finite number above 0, not 0.0"),
        (["--bandwidth", "0mbit", "true"], "bandwidth above 0"),
        (["--bandwidth", "10", "true"], "'10' is not a number with one of bit, kbit, mbit, gbit"),
        (["--latency", "5 parsecs", "true"], "'5 parsecs' is not a number with one of s, ms, us"),
        ([], "the following arguments are required: COMMAND"),
    ],
)
def test_what_makes_no_sense_is_refused(arguments, reason, monkeypatch, capsys):
    monkeypatch.setattr(command.signal, "signal", lambda *_: None)  # the tests keep their own
    try:
        status = command.main(["hosts", *arguments])
    except SystemExit as ended:  # argparse
        status = ended.code
    assert status == 2
    assert reason in capsys.readouterr().err.splitlines()[-1]


def fake(folder: Path, name: str, text: str) -> dict[str, str]:
    (folder / name).write_text(f"#!/bin/sh\n{text}\n")
    (folder / name).chmod(0o755)
    return {"PATH": f"{folder}{os.pathsep}{os.environ['PATH']}"}


def test_a_machine_that_does_not_permit_it_says_so_in_a_line(tmp_path):
    """And nothing is tried behind its back."""
    error = "unshare: unshare failed: Operation not permitted"
    path = fake(tmp_path, "unshare", f"echo '{error}' >&2; exit 1")
    for name in ("nsenter", "ip", "tc"):
        fake(tmp_path, name, "exit 1")
    out, err = (process := run_hosts("true", **path)).communicate(timeout=20)
    assert (process.returncode, out) == (2, "")
    (line,) = err.splitlines()
    assert line.endswith(f"network namespaces are not permitted here: {error}")


def test_a_missing_program_is_named_with_its_package(monkeypatch):
    monkeypatch.setattr(hosts, "PROGRAMS", {"no-such-program": "some-package"})
    with pytest.raises(Refused, match="program 'no-such-program' is missing: install some-package"):
        Hosts(1)


@needs_hosts
def test_who_is_not_root_makes_hosts_in_a_user_namespace(tmp_path):
    """As on a machine that refuses without one."""
    if reason := namespace_refusal("--user", "--map-root-user"):
        pytest.skip(reason)
    real = shutil.which("unshare")
    text = f'case "$*" in *--user*|--uts*) exec {real} "$@";; esac; echo refused >&2; exit 1'
    path = fake(tmp_path, "unshare", text)
    process = run_hosts("--latency", "1ms", "--bandwidth", "10mbit", "ip -br address", **path)
    out, err = process.communicate(timeout=20)
    assert (process.returncode, err) == (0, "")
    assert out.count("10.77.0.") == 2


def test_where_hosts_are_refused_the_reason_is_told():
    """What the tests above are skipped with is what a user reads."""
    reason = refusal()
    assert reason is None or (reason and "\n" not in reason)


@needs_hosts
def test_a_machine_without_tap_devices_says_so(tmp_path, monkeypatch):
    broken = tmp_path / "switch.py"
    broken.write_text("open('/dev/net/no-such-device')")
    monkeypatch.setattr(hosts, "SWITCH", broken)
    monkeypatch.setenv(MARK, mark := uuid.uuid4().hex)
    with pytest.raises(Refused, match=r"no TAP devices .*: FileNotFoundError"):
        Hosts(2, Link(latency=1e-3))
    assert marked(mark) == []


@needs_hosts
def test_a_link_with_a_latency_is_not_cut():
    with Hosts(1, Link(latency=1e-3)) as made, pytest.raises(ValueError, match="can't be cut"):
        made.cut(0)
