"""Every command of the documentation is run, or checked as far as it takes no hours."""

from __future__ import annotations

import ast
import json
import re
import shlex
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest

from bench import __main__ as twinbench
from bench import diagnose
from bench.harness.run_plan import techniques
from bench.ladders import command as ladders
from bench.network import command as network
from bench.network import sweeps
from bench.validation import command as validate
from bench.validation import controls, simulate
from shared import parallel
from tests import workers
from tests.docs.clones import copy_to, run
from tests.docs.commands import BENCH, BOTH, COMMANDS, parameters
from tests.docs.pages import MADE, PAGES, ROOT, commands, fences
from tests.validation.live import measurement

pytestmark = pytest.mark.timeout(240)

NEEDS_A_GPU = "# needs a GPU"


def test_every_page_is_looked_at():
    pages = {path.relative_to(ROOT).as_posix() for path in (ROOT / "docs").glob("*.md")}
    assert pages == {page for page in PAGES if page.startswith("docs/")} | MADE


def test_every_command_is_known_and_says_how_it_is_checked():
    written = {text for page in PAGES for text in commands(page)}
    known = {text for texts in COMMANDS.values() for text in texts}
    assert sorted(written - known) == [], "not in COMMANDS"
    assert sorted(known - written) == [], "on no page"


def test_what_needs_a_gpu_says_so_and_all_else_does_not():
    """By its first line; only such a block may hold what is not run."""
    for page in PAGES:
        for block in fences(page, "sh"):
            asks = "nvidia" in block or "CUDA" in block or ".venv-pt" in block
            assert block.startswith(NEEDS_A_GPU) == asks, block


def test_the_shell_understands_them():
    for text in [text for texts in COMMANDS.values() for text in texts]:
        subprocess.run(["sh", "-n", "-c", text], check=True)


@pytest.fixture(scope="module")
def clone(tmp_path_factory) -> Path:
    """A copy of this repository as its users have it, with environments and a run."""
    folder = tmp_path_factory.mktemp("clone") / "twinbench"
    copy_to(folder)
    (run := folder / "results" / "2026-01-01T00-00-00Z").mkdir(parents=True)
    shutil.copy(ROOT / "docs" / "results.json", run)
    (run / "validation.json").write_text(json.dumps(measurement()))
    for name in ("latest", "before"):
        (folder / "results" / name).symlink_to(run.name)
    (folder / "my_step.py").write_text(fences("docs/diagnosis.md", "python")[0])
    return folder


@pytest.mark.parametrize("text", parameters(COMMANDS["run"]))
def test_it_runs(clone, text):
    done = run(text, clone)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("text", COMMANDS["diagnose"])
def test_it_runs_in_a_framework(text, monkeypatch, capsys):
    def run(words, **settings):
        return workers.parent(words[2].partition("_")[0]).run(*words[2:])

    monkeypatch.setattr(diagnose.subprocess, "run", run)
    asked = [] if workers.campaign() else ["--framework", "pt"]
    status = diagnose.main([*shlex.split(text)[2:], *asked])
    out, err = capsys.readouterr()
    assert status == 0, err
    assert out.startswith("PyTorch: ")


@pytest.mark.parametrize("text", parameters(t for t in COMMANDS["collect"] if "--resume" not in t))
def test_its_options_are_valid(clone, text):
    done = run(f"{text} --collect-only -q", clone)
    assert done.returncode == 0, done.stdout + done.stderr
    name = re.search(r"-k (\w+)", text)
    assert f"bench_{name[1] if name else ''}" in done.stdout


@pytest.mark.parametrize("text", [t for t in COMMANDS["collect"] if "--resume" in t])
def test_a_published_run_is_not_taken_up(clone, text):
    """The option is there, and says what it misses; tests/harness/test_resume.py takes runs up."""
    done = run(text, clone)
    assert done.returncode == pytest.ExitCode.USAGE_ERROR
    (line,) = done.stderr.strip().splitlines()
    assert "no state.json beside results.json" in line


@pytest.mark.parametrize("text", COMMANDS["long"])
def test_it_starts(clone, text):
    done = run(f"{text} --help", clone)
    assert done.returncode == 0, done.stderr
    program = text.removeprefix(".venv/bin/").removesuffix(" results/site")
    assert done.stdout.startswith(f"usage: {program} ")


@pytest.mark.parametrize("text", COMMANDS["help"])
def test_its_options_are_there(text, capsys):
    words = text.split()
    with pytest.raises(SystemExit, match="0"):
        twinbench.main([*words[1:3], "--help"])
    text = capsys.readouterr().out
    assert all(word in text for word in words if word.startswith("--"))


@pytest.mark.parametrize(
    ("text", "frameworks", "minutes"),
    list(zip(COMMANDS["validate"], [{"pt", "tf"}, {"pt"}], [30, None], strict=True)),
)
def test_its_arguments_are_parsed(text, frameworks, minutes, tmp_path, monkeypatch):
    calls = []
    monkeypatch.setattr(controls, "measure", lambda *given: calls.append(given) or True)
    arguments = text.partition(" validate ")[2].split(" ")
    assert validate.main([*arguments, "--results", str(tmp_path)]) == 0
    ((path, measured, results, most),) = calls
    assert (path.parent.parent, results, most) == (tmp_path, tmp_path, minutes)
    assert {match["framework"] for match in measured["matches"]} == frameworks


@pytest.mark.parametrize("text", COMMANDS["simulate"])
def test_it_runs_with_few_draws(clone, text, monkeypatch, capsys):
    monkeypatch.chdir(clone)
    for draws in (simulate.simulate, simulate.losses):
        monkeypatch.setattr(draws, "__defaults__", (40,))
    assert validate.main(text.partition(" validate ")[2].split(" ")) == 0
    assert capsys.readouterr().out.startswith("pt: ")


@pytest.mark.parametrize("text", COMMANDS["launch"])
def test_what_is_launched_on_many_hosts_has_valid_options(text):
    """Hosts are the business of others: test_data_parallel.py runs the program on one."""
    module, *words = text.rpartition(" -m ")[2].split(" ")
    options = parallel.options(module).parse_args(words)
    for named in (options.make, options.build):
        place, _, name = named.partition(":")
        tree = ast.parse((ROOT / f"{place.replace('.', '/')}.py").read_text("utf-8"))
        assert name in {getattr(node, "name", "") for node in tree.body}
    if config := re.search(r"TF_CONFIG='(.*?)'", text):
        cluster = json.loads(config[1])
        assert cluster["task"]["index"] < len(cluster["cluster"]["worker"])


def test_a_job_of_kubernetes_starts_the_program_with_valid_options():
    (job,) = fences("docs/many_devices.md", "yaml")
    words = [
        word.strip(' "\n') for word in re.search(r"command: \[(.*?)\]", job, re.S)[1].split(",")
    ]
    module, *given = words[words.index("-m") + 1 :]
    assert module == "pt_impl.kit.replicas"
    options = parallel.options(module).parse_args(given)
    assert (options.make, options.build, str(options.data)) == ("MAKE", "BUILD", "DATA")


@pytest.mark.parametrize("text", parameters(COMMANDS["hosts"]))
def test_it_runs_on_every_host(clone, text, hosts_permitted):
    done = run(text, clone)
    assert done.returncode == 0, done.stdout + done.stderr
    assert {line.partition(":")[0] for line in done.stdout.splitlines()} >= {"host0", "host1"}


@pytest.mark.parametrize("text", COMMANDS["climb"])
def test_a_climb_is_understood(text):
    given = ladders.options().parse_args(shlex.split(text)[2:])
    assert given.resume or ladders.find(given.name).name == given.name


@pytest.mark.parametrize("text", COMMANDS["sweep"])
def test_a_sweep_is_asked_for_as_written(text, monkeypatch):
    measured = []
    monkeypatch.setattr(sweeps, "measure", lambda framework, _: measured.append(framework) or [])
    assert network.main(text.partition(" network ")[2].split(" ")) == 0
    assert measured == re.findall(r"--framework (\w+)", text)


@pytest.mark.parametrize("name", techniques())
def test_each_technique_can_be_run_alone(name):
    """As README says of one, and each docstring of its own. They train: they are not run here."""
    command = r"\.venv/bin/python -m pt_impl\.\w+\.(\w+)"
    assert re.fullmatch(command, *COMMANDS["alone"])[1] in techniques()
    for side in ("pt_impl", "tf_impl"):
        path = ROOT / side / techniques()[name].family / f"{name}.py"
        *_, last = ast.parse(path.read_text("utf-8")).body
        assert ast.unparse(last).startswith("if __name__ == '__main__':\n"), side
        assert "main()" in ast.unparse(last), side


def test_what_readme_installs_is_what_it_says():
    """The lines themselves are run by .ci/run; here, that the files they name are there."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    known = project["optional-dependencies"].keys()
    for text in COMMANDS["install"]:
        named = re.findall(r" ([\w/]+\.(?:py|txt))\b", text)
        assert all((ROOT / file).is_file() for file in named), text
        if "-c constraints.txt" in text:
            assert text.endswith((BENCH, ".venv/bin/pytest", BOTH))
        extras = [name for names in re.findall(r"'\.\[(.+?)\]'", text) for name in names.split(",")]
        assert set(extras) <= known
    assert (ROOT / ".pre-commit-config.yaml").is_file()


def test_the_page_names_every_option_and_no_other(clone):
    page = (ROOT / "docs" / "options.md").read_text("utf-8")
    table = re.findall(r"^\| (`--?\w.*?) \|", page, re.M)
    named = {option for cell in table for option in re.findall(r"--[\w-]+", cell)}
    done = run(".venv/bin/pytest bench/ --help", clone)
    title = "the same technique in PyTorch and TensorFlow:"
    ours = done.stdout.partition(title)[2].partition("\n\n")[0]
    for option in named:
        assert re.search(rf"^  {option}\b", done.stdout, re.M), f"{option} is no option"
    options = set(re.findall(r"^  (--[\w-]+)", ours, re.M))
    assert len(options) >= 10
    assert options <= named
