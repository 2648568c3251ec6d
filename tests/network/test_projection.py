"""Sweeps and the projection: what is shown of a record, and which records are refused."""

import json
import re

import pytest

from bench.network import command, sweeps
from bench.network.command import BEGIN, END
from bench.network.hosts import Hosts, Link, Refused
from bench.network.projection import JOB, PROJECTION, content
from bench.network.ring import steps_and_bytes
from bench.network.sweeps import FITTED_AT, LINKS, VALIDATED_AT, Record, Sweep
from bench.record import Environment
from bench.report.tables import parts_as_markdown, parts_as_text
from tests import workers
from tests.harness.command_line import ROOT

WAITS, OWN, SENT = 2.0, 2e-4, 1.02  # a, o and b of the model
SIZES = (4_000, 200_000, 2_000_000)


def seconds(replicas: int, link: Link, size: float) -> float:
    steps, sent = steps_and_bytes(replicas, size)
    return steps * (WAITS * link.latency + OWN) + sent * 8 * SENT / link.bandwidth


def record(framework="pt", off=1.0) -> Record:
    """A record of exact times, but for 8 hosts, which are `off` times the model's."""
    return Record(
        schema_version=1,
        framework=framework,
        version="9.9",
        started="2026-01-01T00:00:00+00:00",
        finished=True,
        environment=Environment(cpu="a processor", logical_cores=2),
        sweeps=[
            Sweep(
                replicas=replicas,
                latency_s=link.latency,
                bandwidth_bit_s=link.bandwidth,
                seconds={
                    str(size): [
                        seconds(replicas, link, size) * (off if replicas == VALIDATED_AT else 1.0)
                    ]
                    * 3
                    for size in SIZES
                },
            )
            for replicas in (*FITTED_AT, VALIDATED_AT)
            for link in LINKS
        ],
    )


@pytest.fixture
def written(tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")  # a narrower terminal would break names into lines
    path = tmp_path / "pt.json"
    path.write_text(sweeps.encode(record()))
    return path


def test_what_was_put_in_comes_out(written, capsys):
    assert command.main(["projection", str(written)]) == 0
    text = capsys.readouterr().out
    assert re.search(r"latencies of the link in a step +2\.00 \(2\.00–2\.00\)", text)
    assert re.search(r"own time in a step, ms +0\.200 \(0\.200–0\.200\)", text)
    assert re.search(r"sent for one of payload +1\.02 \(1\.02–1\.02\)", text)
    assert "is off by 0.0% in the mean" in " ".join(text.split())


def test_an_error_at_eight_hosts_is_stated():
    measured, *_ = content([record(off=1.25)], JOB)
    assert "off by 20.0% in the mean and by -20.0% at most at 8 hosts" in measured


def test_each_projection_says_that_it_is_one():
    """Above every table with more replicas than were measured, and in their description."""
    parts = content([record(), record("tf")], JOB)
    tables = [part for part in parts if not isinstance(part, str)]
    for table in tables:
        beyond = any("1,0" in row[0] or "FSDP" in row[0] or "often" in row[0] for row in table.rows)
        assert beyond == (PROJECTION in table.title), table.title
    assert sum(PROJECTION in part for part in parts if isinstance(part, str)) == 2
    assert parts_as_markdown(parts).count(PROJECTION) == 6
    assert parts_as_text(parts, 100).count(PROJECTION) == 6


def test_a_step_is_what_the_model_says(written, capsys):
    """All-reduce of 8 replicas: 100 ms and 14 (2 · 50 µs + 0.2 ms) and 175 MB over 10 Gbit/s."""
    command.main(["projection", str(written)])
    expected = 100 + 14 * (WAITS * 0.05 + 0.2) + 175e6 * 8 * SENT / 10e9 * 1e3
    found = re.search(r"^8 +(\d+) \(", capsys.readouterr().out, re.M)
    assert float(found[1]) == pytest.approx(expected, rel=0.01)


def test_a_faster_link_scales_further(written, capsys):
    ends = []
    for latency in ("50ms", "5ms", "50us"):
        command.main(["projection", str(written), "--latency", latency])
        text = capsys.readouterr().out.partition("give at least")[2]
        ends.append(re.search(r"^all-reduce in every step +([\d,]+)", text, re.M)[1])
    ends = [int(end.replace(",", "")) for end in ends]
    assert ends == sorted(ends)
    assert ends[0] == 8 < ends[-1]


def test_tensorflow_is_not_given_what_it_does_not_have():
    tables = [p for p in content([record("tf")], JOB) if not isinstance(p, str)]
    heads = [column.head for column in tables[2].columns]
    assert heads == ["replicas", "all-reduce in every step", "synchronising less often"]


def test_a_page_takes_the_tables_and_keeps_the_rest(written, tmp_path, capsys):
    page = tmp_path / "page.md"
    page.write_text(f"before\n{BEGIN}\nold\n{END}\nafter\n")
    arguments = ["projection", str(written), "--page", str(page)]
    assert command.main([*arguments, "--check"]) == 1
    assert "is outdated: make it again" in capsys.readouterr().err
    assert command.main(arguments) == 0
    text = page.read_text()
    assert text.startswith(f"before\n{BEGIN}\nMeasured on a processor")
    assert text.endswith(f"{END}\nafter\n")
    assert "old" not in text
    assert command.main([*arguments, "--check"]) == 0
    page.write_text("no markers")
    assert command.main(arguments) == 2


def change(key, value):
    def to(content):
        content[key] = value

    return to


def change_times(seconds):
    return lambda content: content["sweeps"][0]["seconds"].update(seconds)


def keep_sweeps(kept):
    def to(content):
        content["sweeps"] = list(filter(kept, content["sweeps"]))

    return to


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (
            change("schema_version", 2),
            "not a record of sweeps: schema_version: invalid enum value 2",
        ),
        (change("framework", "jax"), "framework: invalid enum value 'jax'"),
        (change("finished", False), "cut short: go on with"),
        (change("version", 1), "version: expected `str`, got `int`"),
        (change("sweeps", [{}]), "missing required field `replicas`"),
        (change("sweeps", 3), "not a record of sweeps"),
        (change_times({"4000": [-1.0]}), "expected `float` > 0.0"),
        (change_times({"4000": ["x"]}), "expected `float`, got `str`"),
        (change_times({"4000": []}), "expected `array` of length >= 1"),
        (change_times({"four": [1.0]}), "could not convert"),
        (change_times({"-4": [1.0]}), "-4 is not a number of bytes"),
        (keep_sweeps(lambda one: one["latency_s"] == LINKS[0].latency), "of two latencies"),
        (keep_sweeps(lambda one: one["replicas"] < 8), "no measurement on 8 hosts"),
    ],
)
def test_a_record_that_is_none_is_refused_in_a_line(spoil, reason, tmp_path, capsys):
    spoil(content := json.loads(sweeps.encode(record())))
    (path := tmp_path / "pt.json").write_text(json.dumps(content))
    assert command.main(["projection", str(path)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert reason in line


@pytest.mark.parametrize("text", ["", "{", "[]", "null", '"a"', "\x00"])
def test_what_is_no_record_at_all_is_refused_in_a_line(text, tmp_path, capsys):
    (path := tmp_path / "pt.json").write_text(text)
    assert command.main(["projection", str(path)]) == 2
    assert command.main(["projection", str(tmp_path / "absent.json")]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 2


@pytest.mark.parametrize("option", ["--compute=0ms", "--layers=0", "--every=-1", "--size=0MB"])
def test_a_job_that_is_none_is_refused(option, written, capsys):
    assert command.main(["projection", str(written), option]) == 2
    assert f"{option.partition('=')[0]}: give more than 0" in capsys.readouterr().err


def test_a_machine_without_hosts_measures_nothing(tmp_path, monkeypatch, capsys):
    def refuse(*_, **__):
        raise Refused("network namespaces are not permitted here: no")

    monkeypatch.setattr(sweeps, "Hosts", refuse)
    path = tmp_path / "pt.json"
    assert command.main(["sweeps", "--framework", "pt", str(path)]) == 2
    assert "not permitted here: no" in capsys.readouterr().err
    assert not path.exists()


def test_a_run_that_was_cut_short_is_taken_up(tmp_path, monkeypatch, capsys):
    """What was swept is not swept again, and what is whole or another machine's is left alone."""
    whole, path = record(), tmp_path / "pt.json"
    begun = sweeps.encode(whole.but(finished=False, sweeps=whole.sweeps[:4]))
    path.write_text(begun)
    swept = []

    def sweep(framework, replicas, link):
        swept.append((framework, replicas, link))
        return whole.sweeps[3 + len(swept)]

    monkeypatch.setattr(sweeps, "sweep", sweep)
    arguments = ["sweeps", "--framework", "pt", str(path)]
    assert command.main(arguments) == 2
    assert "another framework, version or machine" in capsys.readouterr().err
    assert path.read_text() == begun

    monkeypatch.setattr(sweeps.machine, "describe", lambda threads: whole.environment)
    monkeypatch.setattr(sweeps.metadata, "version", lambda package: whole.version)
    assert command.main(arguments) == 0
    assert swept == [("pt", VALIDATED_AT, link) for link in LINKS]
    assert path.read_text() == sweeps.encode(whole)
    assert command.main(arguments) == 2
    assert "it is finished" in capsys.readouterr().err.splitlines()[-1]


# Measuring ----------------------------------------------------------------------------------------


@pytest.mark.usefixtures("hosts_permitted")
@pytest.mark.timeout(120)
@pytest.mark.parametrize("framework", ["pt", "tf"])
def test_a_sweep_measures_what_the_link_allows(framework, monkeypatch):
    """No all-reduce is faster than its bytes and its steps; on a quiet machine, hardly slower."""
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(sweeps, "FLOATS", (1_000, 250_000))
    monkeypatch.setattr(sweeps, "REPEATS", 3)
    link = Link(latency=0.02, bandwidth=40e6)
    swept = sweeps.sweep(framework, 2, link)
    assert (swept.replicas, swept.latency_s, swept.bandwidth_bit_s) == (2, 0.02, 40e6)
    for size, times in swept.seconds.items():
        steps, sent = steps_and_bytes(2, float(size))
        least = steps * link.latency + 8 * sent / link.bandwidth
        assert len(times) == 3
        assert min(times) > least * 0.95
        assert not workers.campaign() or min(times) < 2.5 * least


@pytest.mark.usefixtures("hosts_permitted")
def test_a_program_that_fails_is_told_with_its_words():
    program = ["sh", "-c", 'test $RANK = 0 && exec sleep 100; echo "it broke" >&2; exit 3']
    with Hosts(2) as hosts, pytest.raises(RuntimeError, match="host 1 ended with status 3: it br"):
        sweeps.run_on_each(hosts, program)
