"""Places that lack something: what fits is measured, and the rest says why. With the NumPy kit.

Frameworks and compilers that are missing, and workers that can't be forked: `test_harness.py`.
"""

import json
import re
import shlex
import subprocess
import sys
import tempfile
import uuid
from pathlib import Path

import pytest

from bench.analysis.reading import load
from bench.record import encode
from shared import cgroups
from tests import records, workers
from tests.harness import command_line
from tests.harness.command_line import PLAIN
from tests.network.namespaces import refusal, wait_until

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.timeout(240)
permitted = pytest.mark.skipif(refusal() is not None, reason=f"no namespaces: {refusal()}")

QUICK = ("--effort=quick", "--framework=pt", "--variant=same")
# A results folder on a disk of its own, whose data lies elsewhere; what is there at the end.
ON_A_DISK = """
mount -t tmpfs -o size={size} none {disk} && ln -s {data} {disk}/data || exit 90
"$@"; status=$?
cp -r {disk}/latest/. {after} 2>/dev/null
ls -A {disk}/latest/ > {after}/names
exit $status
"""


@pytest.fixture
def temporary():
    """A temporary folder for a run alone; its path is short, as those of sockets have to be."""
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder)


@permitted
def test_without_proc_one_line_says_so(bench_file, tmp_path):
    hide = ["unshare", "--mount", "sh", "-c", 'mount -t tmpfs none /proc && exec "$@"', "sh"]
    if subprocess.run(["unshare", "--mount", "true"], capture_output=True).returncode:
        hide[1:1] = ["--user", "--map-root-user"]
    done = subprocess.run(
        [*hide, sys.executable, "-m", "pytest", "-c", ROOT / "pyproject.toml",
         *command_line.PLUGINS, bench_file, f"--results={tmp_path}", *QUICK],
        cwd=bench_file.parent,
        env=command_line.environment(bench_file.parent),
        capture_output=True,
        text=True,
    )  # fmt: skip
    assert done.returncode == pytest.ExitCode.USAGE_ERROR, done.stdout + done.stderr
    assert "/proc is not mounted" in done.stderr.strip().splitlines()[-1]
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def small_container():
    """Control groups that allow half a core and 4 GiB; what begins there first joins them."""
    outer = {name: cgroups.divisible(name) for name in ("cpu", "memory")}
    if lacking := [name for name, group in outer.items() if group is None]:
        pytest.skip(f"no control group for {', '.join(lacking)} can be made here")
    name = f"twinbench-test-{uuid.uuid4().hex}"
    cpu, memory = (group / name for group in outer.values())  # one and the same in version 2
    groups = list(dict.fromkeys((cpu, memory)))
    try:
        for group in groups:
            group.mkdir()
        cgroups.set_quota(cpu, 0.5)
        limits = [memory / file for file in ("memory.max", "memory.limit_in_bytes")]
        next(file for file in limits if file.exists()).write_text(str(4 << 30))
        join = " && ".join(f"echo $$ > {group}/cgroup.procs" for group in groups)
        yield ["sh", "-c", f'{join} && exec "$@"', "sh"]
    finally:
        for group in filter(Path.exists, groups):
            wait_until(
                lambda group=group: empty(group), seconds=60, what="the end of its processes"
            )


def empty(group: Path) -> bool:
    """Whether a group has no processes left; it is removed then."""
    try:
        group.rmdir()
    except OSError:
        return False
    return True


@pytest.mark.campaign
@pytest.mark.timeout(1800)
def test_half_a_core_and_4_gib_measure_what_fits(small_container, tmp_path):
    """The first run that README names, of the frameworks themselves."""
    done = subprocess.run(
        [*small_container, sys.executable, "-m", "pytest", "bench/", "--benchmark-only",
         "--effort=quick", "-k", "mixed_precision", f"--results={tmp_path}"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    record = load(tmp_path)
    assert record.environment.threads == 1
    for framework in ("pt", "tf"):
        cases = [case for case in record.cases if case.framework == framework]
        assert any(case.status == "OK" and case.timing for case in cases)
        assert all(case.status == "OK" or case.reason for case in cases)


def test_no_home_is_written_to_and_nothing_is_left_in_the_temporary_folder(start, temporary):
    """Nor what a run that was killed left there: the next one sweeps it."""
    mark = uuid.uuid4().hex
    process = start(*QUICK, TMPDIR=str(temporary), **{command_line.MARK: mark})
    wait_until(lambda: list(temporary.glob("*/*")), seconds=60, what="a scratch folder")
    process.kill()
    process.communicate()
    wait_until(lambda: not command_line.marked(mark), seconds=60, what="the end of its workers")
    (left,) = temporary.iterdir()
    assert list(left.iterdir())
    found = command_line.finish(start(*QUICK, HOME="/dev/null/home", TMPDIR=str(temporary)))
    assert found.status == 0, found.err
    assert {case.status for case in found.record.cases} == {"OK"}
    assert list(temporary.iterdir()) == []


@permitted
@pytest.mark.parametrize(("size", "status"), [("24k", 2), ("48k", 0)])
def test_a_full_disk_is_one_line_and_leaves_no_half_of_a_file(
    size, status, bench_file, results_folder, tmp_path
):
    """The first has no room for the record; the second has, but none for the reports of it."""
    (disk := tmp_path / "disk").mkdir()
    (after := tmp_path / "after").mkdir()
    (data := results_folder / "data").mkdir(exist_ok=True)
    script = ON_A_DISK.format(size=size, disk=disk, data=data, after=after)
    command = ["unshare", "--mount", "sh", "-c", script, "sh"]
    if subprocess.run(["unshare", "--mount", "true"], capture_output=True).returncode:
        command[1:1] = ["--user", "--map-root-user"]
    done = subprocess.run(
        [*command, sys.executable, "-m", "pytest", "-c", ROOT / "pyproject.toml",
         *command_line.PLUGINS, bench_file, f"--results={disk}", *QUICK],
        cwd=bench_file.parent,
        env=command_line.environment(bench_file.parent),
        capture_output=True,
        text=True,
    )  # fmt: skip
    said = done.stdout + done.stderr
    assert done.returncode == status, said
    assert "Traceback" not in said
    assert "INTERNALERROR" not in said
    lines = {line for line in said.splitlines() if "No space left on device" in line}
    assert len(lines) == 1
    assert ("goes on" if status else "report.html: cannot be written") in lines.pop()
    names = (after / "names").read_text().split()
    shown = [line.rpartition("/")[2] for line in done.stdout.splitlines() if line[:1] == "/"]
    assert set(shown) <= set(names)
    assert not [name for name in names if name.endswith(".partial")]
    for name in ("results.json", "state.json"):
        if name in names:
            assert json.loads((after / name).read_text("utf-8"))


def test_data_that_can_not_be_written_is_one_line(run, tmp_path):
    """As where another user's run made the folder. How it goes on can be pasted."""
    (results := tmp_path / "my results").mkdir()
    (results / "data").write_text("a file, which no folder can be in, whoever asks")
    found = run(*QUICK, f"--results={results}")
    assert found.status == 2
    assert "INTERNALERROR" not in found.out + found.err
    (said,) = [
        line for line in found.out.splitlines() if f"{results / 'data'}: File exists" in line
    ]
    _, _, rest = said.partition("; once it can be written, --resume ")
    folder = shlex.split(rest.partition(" goes on")[0])[0]
    assert folder.endswith(f"/my results/{(results / 'latest').resolve().name}")
    assert json.loads((results / "latest" / "state.json").read_text("utf-8"))


# The image ----------------------------------------------------------------------------------------


def steps() -> list[tuple[str, str]]:
    """The instructions of the Dockerfile."""
    text = (ROOT / "Dockerfile").read_text("utf-8").replace("\\\n", " ")
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith("#")]
    return [tuple(line.split(" ", 1)) for line in lines]


def test_the_image_is_made_by_the_commands_of_readme():
    kinds = [kind for kind, _ in steps()]
    assert kinds == ["FROM", "RUN", "WORKDIR", "COPY", "RUN", "ENTRYPOINT", "CMD"]
    (base, _, _, _, install, entry, _) = [what for _, what in steps()]
    version = re.fullmatch(r"python:(3\.\d+)-slim", base)[1]
    allowed = re.search(r'requires-python = ">=(3\.\d+),<(3\.\d+)"', text_of("pyproject.toml"))
    assert allowed[1] <= version < allowed[2]
    readme = next(line for line in text_of("README.md").splitlines() if "pytest bench/" in line)
    assert install.replace(" --no-cache-dir", "") in readme
    assert f" && .venv/bin/{' '.join(json.loads(entry))}" in readme
    for kind, what in steps():
        if kind == "RUN":
            subprocess.run(["sh", "-n", "-c", what], check=True)


def text_of(name: str) -> str:
    return (ROOT / name).read_text("utf-8")


def collected(*options: str) -> subprocess.CompletedProcess:
    """A pytest of this project that measures nothing."""
    given = (*options, "--collect-only", *PLAIN)
    return workers.parent("commands").run("pytest", *given, timeout=60, PYTEST_ADDOPTS="")


def test_what_is_copied_into_the_image_can_be_installed_there(tmp_path):
    """The last step but for what it downloads: from what .dockerignore leaves."""
    ignored = text_of(".dockerignore").split()
    assert ignored == [".*", "**/__pycache__", "*.egg-info", "build", "results"]
    script = "tar --exclude='./.*' --exclude=__pycache__ --exclude='*.egg-info' --exclude=./build"
    script += " --exclude=./results -cf - . | tar -C {} -xf -"
    script = script.format(shlex.quote(str(tmp_path)))
    subprocess.run(["sh", "-c", script], cwd=ROOT, check=True)
    command = [sys.executable, "-c", "import setuptools.build_meta as b; b.build_editable('wheel')"]
    (tmp_path / "wheel").mkdir()
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert [path.suffix for path in (tmp_path / "wheel").iterdir()] == [".whl"]


def test_the_image_begins_with_options_that_are_there():
    entry, usual = (json.loads(what) for kind, what in steps() if kind in ("ENTRYPOINT", "CMD"))
    assert entry[0] == "pytest"
    done = collected(*entry[1:], *usual, "-q")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "bench_mixed_precision" in done.stdout


# The workflow -------------------------------------------------------------------------------------


def runs() -> list[str]:
    """The shell's lines of the workflow, without a parser of YAML."""
    lines, found, block = text_of("docs/ci.yml").splitlines(), [], None
    for line in lines:
        indent = len(line) - len(line.lstrip())
        if block is not None and indent > block:
            found.append(line.strip())
            continue
        block = None
        if shell := re.fullmatch(r"\s+(?:- )?run: (.*)", line):
            if shell[1] == "|":
                block = indent
            else:
                found.append(shell[1])
    return found


def test_the_workflow_s_commands_are_those_that_there_are(tmp_path):
    found = runs()
    assert len(found) == 5
    for line in found:
        subprocess.run(["sh", "-n", "-c", line], check=True)
    installs, measures, (compares,) = found[:2], found[2:4], found[4:]
    for line, side in zip(installs, ("old", "new"), strict=True):
        assert line == (
            f"python3 -m venv {side}/.venv && {side}/.venv/bin/pip install "
            f"-c {side}/constraints.txt -e './{side}[torch,tensorflow]'"
        )
    assert measures[0].removeprefix("cd old") == measures[1].removeprefix("cd new")
    options = measures[0].partition(".venv/bin/pytest ")[2].split()
    done = collected(*options)
    assert done.returncode == 0, done.stdout + done.stderr
    assert compares.startswith("new/.venv/bin/twinbench compare ")


@pytest.mark.parametrize(("old", "new", "status"), [("same", "same", 0), ("same", "slower", 1)])
def test_the_workflow_fails_where_a_ratio_rose(old, new, status, tmp_path):
    """Its own line, on records of the places that it names."""
    run = records.whole_run()
    doubled = [one.but(ratio=2 * one.ratio) for one in run.comparisons]
    made = {"same": run, "slower": run.but(comparisons=doubled)}
    for side, kind in (("old", old), ("new", new)):
        (folder := tmp_path / side / "results" / "latest").mkdir(parents=True)
        (folder / "results.json").write_bytes(encode(made[kind]))
    line = runs()[-1].replace("new/.venv/bin/twinbench", f"{shlex.quote(sys.executable)} -m bench")
    done = subprocess.run(
        ["sh", "-c", line],
        cwd=tmp_path,
        env=command_line.environment(ROOT) | {"GITHUB_STEP_SUMMARY": str(tmp_path / "summary.md")},
        capture_output=True,
        text=True,
    )
    assert done.returncode == status, done.stderr
    assert (tmp_path / "summary.md").read_text().startswith("# What changed")
    assert ("slower by more than 5.0%" in done.stderr) == (status == 1)
