"""The documentation: every command is run or checked, every example runs, links lead somewhere.

Commands stand in blocks of `sh`, a line each, and in running text. `COMMANDS` says how each is
checked; one that is not in it fails, so that nobody adds one that nobody ran.
"""

from __future__ import annotations

import ast
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from importlib import import_module
from importlib.metadata import packages_distributions, requires
from itertools import pairwise
from pathlib import Path

import msgspec
import pytest
from markdown_it import MarkdownIt
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from bench import diagnose, docs
from bench.docs import command, instructions, tried
from bench.harness.schedule import techniques
from bench.ladders import climbing
from bench.ladders import command as ladders
from bench.ladders import record as climbs
from bench.network import command as network
from bench.network import sweeps
from bench.record import DIFFERENT
from bench.validation import attacked, controls, controls_page, overhead, simulate
from bench.validation import command as validate
from shared import parallel
from tests import workers
from tests.validation.live import measurement

ROOT = Path(__file__).resolve().parents[1]
# Pages that people wrote. Reports and the pages of techniques are made, and tested as such.
PAGES = (
    "README.md",
    "CONTRIBUTING.md",
    *(
        f"docs/{name}.md"
        for name in (
            *("numbers", "add_a_technique", "your_model", "try", "diagnosis", "gpu"),
            *("many_devices", "lines_of_code"),
        )
    ),
    "docs/across_hosts.md",
    "docs/ci.md",
)
MADE = {f"docs/{name}.md" for name in ("any_model", "claims", "priorities", "report", "try_models")}
MADE |= {f"docs/{name}.md" for name in ("attacked", "instructions", "overhead", "validation")}
MADE |= {"docs/upstream.md"}  # which tests/test_upstream.py tests
CLIMBED = sorted(path.parent for path in ROOT.glob("docs/ladders/*/ladder.json"))
NEEDS_A_GPU = "# needs a GPU"
pytestmark = pytest.mark.timeout(240)

BENCH = ".venv/bin/pytest bench/ --benchmark-only"
RECIPES = ("schedules", "learning_rate_finder", "regularization", "initialization")
RECIPES += ("gradient_health",)
RECIPES += ("augmentation", "averaging", "checkpoints", "data_checks", "loss_checks", "nonfinite")
TWO = "--pt-python .venv-pt/bin/python --tf-python .venv-tf/bin/python"
HOSTS = ".venv/bin/twinbench network hosts"
PROJECTED = ".venv/bin/twinbench network projection docs/across_hosts/pt.json"
PROJECTED += " docs/across_hosts/tf.json"
MAKE = "python3 -m venv .venv && .venv/bin/pip install -c constraints.txt -e"

ON_MANY = (
    "{0}_impl.kit.replicas {0}_impl.parallel.data_parallel:processes "
    "{0}_impl.kit.examples:digits_cnn data/digits "
    "--global-batch 128 --steps 500 --out result.npz"
)
CLUSTER = '{"cluster":{"worker":["host1:29400","host2:29400"]},"task":{"type":"worker","index":0}}'
MUTANTS = "tests/validation/cosmic-ray.toml mutants.sqlite"
SAVING = "--checkpoint saved --save-every 100"

# How a command is checked:
#   run       it is run, where results/latest is the run that is published in docs/
#   collect   it would measure for long, or tests: its options are, by a run that only collects
#   validate  it would measure for long: its options are parsed
#   simulate  it would draw runs for a minute: it is run, but draws few
#   install   it would install: what it installs is checked below, or by other tests
#   long      it would take an hour: that it starts, and has help, is
#   help      it would take minutes: that its options are there, is
#   diagnose  it is run by a fork, in PyTorch alone but in campaigns; the rest has tests/diagnosis
#   alone     it trains for minutes: that its file can be run is
#   tour      it is run by the test of the tour, with the tour's files
#   launch    it needs several hosts: its options are parsed, and what it names is there
#   hosts     it is run where network namespaces are permitted
#   climb     it would measure for long: its options are parsed, and its ladder is there
#   sweep     it would measure for minutes: its arguments are parsed
#   own       it is about a file of the user's: tests/harness/test_try.py runs it on the example
#   outside   a program that is no part of this project
COMMANDS = {
    f"{MAKE} . && {BENCH}": "install",
    f"{MAKE} '.[dev]' && .venv/bin/pytest": "install",
    ".venv/bin/pip install pre-commit && .venv/bin/pre-commit install": "install",
    BENCH: "collect",
    f"{BENCH} --effort quick -k mixed_precision": "collect",
    f"{BENCH} --resume": "collect",
    "pytest bench/ --resume": "collect",
    ".venv/bin/twinbench report results/latest": "run",
    ".venv/bin/twinbench report results/latest --format terminal": "run",
    ".venv/bin/twinbench report docs --format markdown": "run",
    ".venv/bin/twinbench report docs --readme README.md": "run",
    ".venv/bin/twinbench choose results/latest": "run",
    ".venv/bin/twinbench claims results/latest": "run",
    ".venv/bin/twinbench priorities results/latest": "run",
    ".venv/bin/twinbench claims docs docs/recipes docs/recipes/averaging.json --write": "run",
    f"{BENCH} --technique averaging --variant ema": "collect",
    "cp results/latest/results.json docs/recipes/averaging.json": "run",
    f"{BENCH} --technique {','.join(RECIPES)}": "collect",
    "cp results/latest/results.json docs/recipes/results.json": "run",
    ".venv/bin/twinbench report docs/recipes --format markdown": "run",
    ".venv/bin/twinbench priorities docs --write": "run",
    ".venv/bin/twinbench compare docs results/before results/latest": "run",
    ".venv/bin/twinbench choose results/latest --goal train-speed --max-accuracy-drop 0.5": ("run"),
    ".venv/bin/twinbench choose results/latest --goal train-speed --steps 1000": "run",
    ".venv/bin/twinbench choose results/latest --goal memory --task digits-cnn": "run",
    ".venv/bin/twinbench compare docs/results.json results/latest": "run",
    "cp results/latest/results.json docs/results.json": "run",
    ".venv/bin/twinbench docs": "tour",
    ".venv/bin/twinbench try --example my_model.py": "own",
    ".venv/bin/twinbench try my_model.py": "own",
    f"{BENCH} --model my_model.py --minutes 12": "own",
    ".venv/bin/twinbench compare before/results.json results/latest --fail-if slower:5%": "own",
    ".venv/bin/twinbench diagnose digits-cnn --batch-size 4": "diagnose",
    ".venv/bin/twinbench diagnose my_step.py": "run",
    ".venv/bin/python -m cProfile -s cumtime -m pt_impl.diagnosis.profiling": "outside",
    ".venv/bin/python -m shared.utilization -m pt_impl.diagnosis.profiling": "run",
    "python -m pt_impl.train_step.mixed_precision": "alone",
    ".venv/bin/twinbench validate measure --minutes 30": "validate",
    ".venv/bin/twinbench ladder image_classification": "climb",
    ".venv/bin/twinbench ladder --resume results/ladders/latest": "climb",
    ".venv/bin/twinbench validate simulate results/latest/validation.json": "simulate",
    ".venv/bin/twinbench validate simulate docs": "simulate",
    ".venv/bin/twinbench validate replay docs": "run",
    ".venv/bin/twinbench validate disturbances --minutes 30": "help",
    ".venv/bin/twinbench validate overhead": "help",
    ".venv/bin/twinbench validate leaks": "help",
    ".venv/bin/twinbench validate mutations": "help",
    ".venv/bin/twinbench validate mutations --drawn 50 --of bench/analysis": "help",
    f".venv/bin/pip install cosmic-ray && .venv/bin/cosmic-ray init {MUTANTS} && "
    ".venv/bin/cr-filter-operators mutants.sqlite tests/validation/cosmic-ray.toml": "outside",
    f".venv/bin/cosmic-ray exec {MUTANTS} && .venv/bin/cr-report mutants.sqlite": "outside",
    ".venv/bin/python -m tests.zoo": "long",
    ".venv/bin/python -m pt_impl.train_step.label_smoothing": "tour",
    ".venv/bin/python -m tf_impl.train_step.label_smoothing": "tour",
    ".venv/bin/pytest tests/test_layout.py tests/train_step/test_label_smoothing.py": "tour",
    f"{BENCH} --effort quick -k label_smoothing": "tour",
    # docs/across_hosts.md
    f"{HOSTS} 'echo host $RANK of $WORLD_SIZE; ip -brief address'": "hosts",
    f"{HOSTS} --hosts 3 --latency 5ms --bandwidth 100mbit "
    "'.venv/bin/python -m pt_impl.kit.collectives --floats 1000,500000'": "hosts",
    f"{HOSTS} --bandwidth 1gbit "
    "'.venv/bin/python -m tf_impl.kit.collectives --floats 1000,500000'": "hosts",
    ".venv/bin/twinbench network sweeps --framework pt results/pt.json": "sweep",
    ".venv/bin/twinbench network sweeps --framework tf results/tf.json": "sweep",
    PROJECTED: "run",
    ".venv/bin/twinbench network projection docs/across_hosts/pt.json "
    "--bandwidth 100gbit --latency 10us --compute 250ms --size 3GB": "run",
    f"{PROJECTED} --page docs/across_hosts.md": "run",
    # docs/gpu.md
    "python3 -m venv .venv-pt && .venv-pt/bin/pip install torch torch-pruning torchao torchvision "
    "onnx onnxruntime onnxscript openvino numpy pillow psutil scikit-learn": "install",
    "python3 -m venv .venv-tf && .venv-tf/bin/pip install 'tensorflow[and-cuda]' tf_keras "
    "tensorflow-model-optimization tf2onnx ai-edge-litert onnx onnxruntime openvino numpy pillow "
    "psutil scikit-learn": "install",
    "python3 -m venv .venv && .venv/bin/pip install jinja2 numpy pillow psutil pygal pytest "
    "pytest-benchmark scikit-learn scipy": "install",
    f"{BENCH} {TWO} --effort quick -k mixed_precision": "collect",
    f"{BENCH} {TWO} --memory-budget 8GB": "collect",
    f"CUDA_VISIBLE_DEVICES=1 {BENCH} {TWO}": "collect",
    f"CUDA_VISIBLE_DEVICES= {BENCH} {TWO}": "collect",
    "nvidia-smi --query-gpu=clocks.max.sm --format=csv": "outside",
    "sudo nvidia-smi --lock-gpu-clocks=1200": "outside",
    ".venv-pt/bin/pip install scipy && .venv-pt/bin/python -m bench validate measure "
    "--framework pt": "validate",
    ".venv-pt/bin/pip install hypothesis pytest pytest-benchmark pytest-timeout nvidia-ml-py": (
        "install"
    ),
    ".venv-pt/bin/python -m pytest tests/test_gpu.py": "outside",
    ".venv-pt/bin/python -m tests.zoo --framework pt --device cuda": "outside",
    # docs/many_devices.md
    "torchrun --nnodes=2 --nproc-per-node=1 --rdzv-backend=c10d --rdzv-id=run1 "
    f"--rdzv-endpoint=host1:29400 -m {ON_MANY.format('pt')} {SAVING}": "launch",
    f"TF_CONFIG='{CLUSTER}' python -m {ON_MANY.format('tf')} {SAVING}": "launch",
    "srun torchrun --nnodes=$SLURM_NNODES --nproc-per-node=1 --rdzv-backend=c10d "
    "--rdzv-id=$SLURM_JOB_ID --rdzv-endpoint=$SLURM_LAUNCH_NODE_IPADDR:29400 -m "
    f"{ON_MANY.format('pt')}": "launch",
}
# Words that begin a command in running text. A name of a program alone is none.
BEGIN = (".venv/bin/", "python -m pt_impl", "python -m tf_impl", "pytest bench/")


# What stands in the pages -------------------------------------------------------------------------


pages = cache(docs.pages)


@cache
def parsed(page: str) -> list:
    return MarkdownIt("commonmark").enable("table").parse((ROOT / page).read_text("utf-8"))


def fences(page: str, language: str) -> list[str]:
    tokens = parsed(page)
    return [t.content for t in tokens if t.type == "fence" and t.info.strip() == language]


def inline(page: str) -> list:
    return [child for token in parsed(page) for child in token.children or []]


def commands(page: str) -> list[str]:
    """The commands of a page: a line each in its blocks, and those in running text."""
    lines = [line for block in fences(page, "sh") for line in block.splitlines()]
    lines = [line for line in lines if line.strip() and not line.startswith("#")]
    words = [token.content for token in inline(page) if token.type == "code_inline"]
    return lines + [text for text in words if text.startswith(BEGIN) and " " in text]


def of_kind(kind: str) -> list[str]:
    return [text for text, how in COMMANDS.items() if how == kind]


# For GPUs, with frameworks on several hosts, and others' like on another record.
RARE = ("CUDA_VISIBLE_DEVICES", TWO, "collectives", "shared.utilization", "diagnose my_step.py")
RARE += ("report docs/recipes", "claims results/latest", "priorities results/latest")
RARE += ("docs/results.json results",)


def parameters(texts: Iterable[str]) -> list:
    """Commands as parameters; rare ones in campaigns alone."""
    campaign = pytest.mark.campaign
    return [
        pytest.param(text, marks=campaign if any(words in text for words in RARE) else ())
        for text in texts
    ]


def test_every_page_is_looked_at():
    pages = {path.relative_to(ROOT).as_posix() for path in (ROOT / "docs").glob("*.md")}
    assert pages == {page for page in PAGES if page.startswith("docs/")} | MADE


def test_every_command_is_known_and_says_how_it_is_checked():
    written = {text for page in PAGES for text in commands(page)}
    assert sorted(written - COMMANDS.keys()) == [], "not in COMMANDS"
    assert sorted(COMMANDS.keys() - written) == [], "on no page"


def test_what_needs_a_gpu_says_so_and_all_else_does_not():
    """By its first line; only such a block may hold what is not run."""
    for page in PAGES:
        for block in fences(page, "sh"):
            asks = "nvidia" in block or "CUDA" in block or ".venv-pt" in block
            assert block.startswith(NEEDS_A_GPU) == asks, block


def test_the_shell_understands_them():
    for text in COMMANDS:
        subprocess.run(["sh", "-n", "-c", text], check=True)


# Commands -----------------------------------------------------------------------------------------


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


def copy_to(folder: Path) -> None:
    ignored = shutil.ignore_patterns(
        ".git", ".venv*", "results", "__pycache__", ".*_cache", "*.egg-info", "build"
    )
    shutil.copytree(ROOT, folder, ignore=ignored)
    for environment in (".venv", ".venv-pt", ".venv-tf"):
        (programs := folder / environment / "bin").mkdir(parents=True)
        for name, start in (
            ("python", ""),
            ("pytest", "-m pytest -p no:cacheprovider"),
            ("twinbench", "-m bench"),
        ):
            (programs / name).write_text(f'#!/bin/sh\nexec "{sys.executable}" {start} "$@"\n')
            (programs / name).chmod(0o755)


PROGRAMS = {"twinbench": ("bench",), "pytest": ("pytest", "-p", "no:cacheprovider")}


@cache
def parent(folder: Path) -> workers.Parent:
    """What forks the processes of the project's own commands, which else are mostly imports."""
    return workers.Parent("commands", folder)


def run(text: str, folder: Path) -> subprocess.CompletedProcess:
    """Run a command as a user would who stands in `folder` and has its environment activated."""
    path = f"{folder / '.venv' / 'bin'}{os.pathsep}{os.environ['PATH']}"
    others = {"PATH": path, "COLUMNS": "80", "PYTEST_ADDOPTS": ""}
    others["OMP_WAIT_POLICY"] = "passive"  # threads that wait leave the core to others
    program, *words = shlex.split(text)
    if (name := Path(program).name) in PROGRAMS and "&&" not in words:
        return parent(folder).run(*PROGRAMS[name], *words, folder=folder, timeout=230, **others)
    return subprocess.run(
        ["sh", "-c", text],
        cwd=folder,
        env={k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | others,
        capture_output=True,
        text=True,
        timeout=230,
    )


@pytest.mark.parametrize("text", parameters(of_kind("run")))
def test_it_runs(clone, text):
    done = run(text, clone)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("text", of_kind("diagnose"))
def test_it_runs_in_a_framework(text, monkeypatch, capsys):
    def run(words, **settings):
        return workers.parent(words[2].partition("_")[0]).run(*words[2:])

    monkeypatch.setattr(diagnose.subprocess, "run", run)
    asked = [] if workers.campaign() else ["--framework", "pt"]
    status = diagnose.main([*shlex.split(text)[2:], *asked])
    out, err = capsys.readouterr()
    assert status == 0, err
    assert out.startswith("PyTorch: ")


@pytest.mark.parametrize("text", parameters(t for t in of_kind("collect") if "--resume" not in t))
def test_its_options_are_valid(clone, text):
    done = run(f"{text} --collect-only -q", clone)
    assert done.returncode == 0, done.stdout + done.stderr
    name = re.search(r"-k (\w+)", text)
    assert f"bench_{name[1] if name else ''}" in done.stdout


@pytest.mark.parametrize("text", [t for t in of_kind("collect") if "--resume" in t])
def test_a_published_run_is_not_taken_up(clone, text):
    """The option is there, and says what it misses; tests/harness/test_resume.py takes runs up."""
    done = run(text, clone)
    assert done.returncode == pytest.ExitCode.USAGE_ERROR
    (line,) = done.stderr.strip().splitlines()
    assert "there is no state.json beside its results.json" in line


@pytest.mark.parametrize("text", of_kind("long"))
def test_it_starts(clone, text):
    done = run(f"{text} --help", clone)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"usage: {text.removeprefix('.venv/bin/')} ")


@pytest.mark.parametrize("text", of_kind("help"))
def test_its_options_are_there(text, capsys):
    words = text.split()
    with pytest.raises(SystemExit, match="0"):
        validate.main([words[2], "--help"])
    text = capsys.readouterr().out
    assert all(word in text for word in words if word.startswith("--"))


@pytest.mark.parametrize(
    ("text", "frameworks", "minutes"),
    list(zip(of_kind("validate"), [{"pt", "tf"}, {"pt"}], [30, None], strict=True)),
)
def test_its_arguments_are_parsed(text, frameworks, minutes, tmp_path, monkeypatch):
    calls = []
    monkeypatch.setattr(controls, "measure", lambda *given: calls.append(given) or True)
    arguments = text.partition(" validate ")[2].split(" ")
    assert validate.main([*arguments, "--results", str(tmp_path)]) == 0
    ((path, measured, results, most),) = calls
    assert (path.parent.parent, results, most) == (tmp_path, tmp_path, minutes)
    assert {match["framework"] for match in measured["matches"]} == frameworks


@pytest.mark.parametrize("text", of_kind("simulate"))
def test_it_runs_with_few_draws(clone, text, monkeypatch, capsys):
    monkeypatch.chdir(clone)
    for draws in (simulate.simulate, simulate.losses):
        monkeypatch.setattr(draws, "__defaults__", (40,))
    assert validate.main(text.partition(" validate ")[2].split(" ")) == 0
    assert capsys.readouterr().out.startswith("pt: ")


@pytest.mark.parametrize("text", of_kind("launch"))
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


@pytest.mark.parametrize("text", parameters(of_kind("hosts")))
def test_it_runs_on_every_host(clone, text, hosts_permitted):
    done = run(text, clone)
    assert done.returncode == 0, done.stdout + done.stderr
    assert {line.partition(":")[0] for line in done.stdout.splitlines()} >= {"host0", "host1"}


@pytest.mark.parametrize("text", of_kind("climb"))
def test_a_climb_is_understood(text):
    given = ladders.options().parse_args(shlex.split(text)[2:])
    assert given.resume or ladders.find(given.name).name == given.name


@pytest.mark.parametrize("folder", CLIMBED, ids=lambda folder: folder.name)
def test_a_published_climb_is_what_its_record_gives(folder, tmp_path):
    """Make it again with `twinbench ladder --show docs/ladders/NAME --write`."""
    record = climbs.load(folder)
    assert record.finished
    assert record.ladder == folder.name
    ladder = climbing.at_task(ladders.find(folder.name), record.task)
    ladders.write(ladder, record, tmp_path)
    for name in ("ladder.md", "ladder.svg"):
        assert (folder / name).read_text("utf-8") == (tmp_path / name).read_text("utf-8"), name


@pytest.mark.parametrize("text", of_kind("sweep"))
def test_a_sweep_is_asked_for_as_written(text, monkeypatch):
    measured = []
    monkeypatch.setattr(sweeps, "measure", lambda framework, _: measured.append(framework) or [])
    assert network.main(text.partition(" network ")[2].split(" ")) == 0
    assert measured == re.findall(r"--framework (\w+)", text)


def test_the_projection_is_what_its_records_give(monkeypatch):
    """Of this repository, whose page no test writes. Make it again with its last command."""
    monkeypatch.chdir(ROOT)
    words = PROJECTED.partition(" network ")[2].split(" ")
    assert network.main([*words, "--page", "docs/across_hosts.md", "--check"]) == 0


@pytest.mark.parametrize("name", techniques())
def test_each_technique_can_be_run_alone(name):
    """As README says of one, and each docstring of its own. They train: they are not run here."""
    assert re.fullmatch(r"python -m pt_impl\.\w+\.(\w+)", *of_kind("alone"))[1] in techniques()
    for side in ("pt_impl", "tf_impl"):
        path = ROOT / side / techniques()[name].family / f"{name}.py"
        *_, last = ast.parse(path.read_text("utf-8")).body
        assert ast.unparse(last).startswith("if __name__ == '__main__':\n"), side
        assert "main()" in ast.unparse(last), side


def test_what_readme_installs_is_what_it_says():
    """The lines themselves are run by .ci/run; here, that the files they name are there."""
    for text in of_kind("install"):
        named = re.findall(r" ([\w/]+\.(?:py|txt))\b", text)
        assert all((ROOT / file).is_file() for file in named), text
        if "-c constraints.txt" in text:
            assert text.endswith((BENCH, ".venv/bin/pytest"))
    assert (ROOT / ".pre-commit-config.yaml").is_file()


def test_readme_names_every_option_and_no_other(clone):
    table = re.findall(r"^\| (`--?\w.*?) \|", (ROOT / "README.md").read_text("utf-8"), re.M)
    named = {option for cell in table for option in re.findall(r"--[\w-]+", cell)}
    done = run(".venv/bin/pytest bench/ --help", clone)
    title = "the same technique in PyTorch and TensorFlow:"
    ours = done.stdout.partition(title)[2].partition("\n\n")[0]
    for option in named:
        assert re.search(rf"^  {option}\b", done.stdout, re.M), f"{option} is no option"
    options = set(re.findall(r"^  (--[\w-]+)", ours, re.M))
    assert len(options) >= 10
    assert options <= named


# Environments of docs/gpu.md ----------------------------------------------------------------------

# Modules of distributions that are not allowed are not there, as they would not be in a new
# environment.
ONLY = """
import json, sys
from importlib.machinery import PathFinder
allowed, known = map(set, json.loads(sys.argv[1]))
class Only:
    def find_spec(self, name, path=None, target=None):
        absent = name.partition(".")[0] in known - allowed
        return None if absent else PathFinder.find_spec(name, path, target)
sys.meta_path[:] = [Only() if finder is PathFinder else finder for finder in sys.meta_path]
"""
IMPORT = """
from importlib import import_module
from pathlib import Path
for path in sorted(Path(sys.argv[2]).glob("*/*.py")) + sorted(Path("bench").glob("*/bench_*.py")):
    import_module(".".join(path.with_suffix("").parts))
import_module("bench.harness.parent")
"""
COLLECT = """
import pytest
plugin = ["-p", "pytest_benchmark.plugin"]
sys.exit(pytest.main(["bench/", *plugin, "--benchmark-only", "--collect-only", "-q"]))
"""


@cache
def closure(name: str) -> frozenset[str]:
    """A distribution and all that it brings along."""
    known, new = set(), {canonicalize_name(name)}
    while new:
        known |= new
        required = [Requirement(text) for one in new for text in _requires(one)]
        wanted = [r for r in required if r.marker is None or r.marker.evaluate({"extra": ""})]
        new = {canonicalize_name(requirement.name) for requirement in wanted} - known
    return frozenset(known)


def _requires(name: str) -> list[str]:
    try:
        return requires(name) or []
    except ModuleNotFoundError:  # for another platform, or a choice of several
        return []


def in_environment(environment: str, program: str, package: str) -> subprocess.CompletedProcess:
    """Run a program with what the page installs into an environment, and nothing else."""
    (text,) = [
        text
        for text in commands("docs/gpu.md")
        if text.startswith(f"python3 -m venv {environment} ")
    ]
    words = text.partition("pip install ")[2].replace("'", "").split(" ")
    installed = {"twinbench"}.union(*(closure(word.partition("[")[0]) for word in words))
    modules = packages_distributions()
    allowed = [
        name for name, owners in modules.items() if installed & set(map(canonicalize_name, owners))
    ]
    return subprocess.run(
        [sys.executable, "-c", ONLY + program, json.dumps([allowed, list(modules)]), package],
        cwd=ROOT,
        env=os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )


NEEDS = {
    ".venv-pt": (IMPORT, "pt_impl"),
    ".venv-tf": (IMPORT, "tf_impl"),
    ".venv": (COLLECT, ""),
}


@pytest.fixture(scope="module")
def imported() -> dict[str, subprocess.CompletedProcess]:
    """What each environment of the page imports, two at a time."""
    with ThreadPoolExecutor(2) as pool:
        done = pool.map(lambda name: in_environment(name, *NEEDS[name]), NEEDS)
        return dict(zip(NEEDS, done, strict=True))


@pytest.mark.campaign
@pytest.mark.parametrize("environment", NEEDS)
def test_an_environment_of_the_gpu_page_has_all_that_it_needs(imported, environment):
    done = imported[environment]
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]


@pytest.mark.campaign
def test_what_an_environment_does_not_have_would_be_missed():
    done = in_environment(".venv", IMPORT, "pt_impl")
    assert done.returncode == 1
    assert "No module named 'torch'" in done.stderr


# Examples -----------------------------------------------------------------------------------------


def programs() -> dict[str, str]:
    """What the pages' Python is, put together: README's blocks, and those of one chapter."""
    blocks = zip(("PyTorch", "TensorFlow"), fences("README.md", "python"), strict=True)
    ends = "\nassert 0 < float(loss) < 20\n"
    examples = {f"README.md, {framework}": block + ends for framework, block in blocks}
    chapters = re.split(r"^## ", (ROOT / "docs" / "your_model.md").read_text("utf-8"), flags=re.M)
    for chapter in chapters:
        blocks = re.findall(r"^```python\n(.*?)^```$", chapter, re.M | re.S)
        if blocks:
            examples[f"your_model.md, {chapter.splitlines()[0]}"] = "\n".join(blocks)
    examples["diagnosis.md"] = "\n".join(fences("docs/diagnosis.md", "python"))
    return examples


def test_no_other_page_has_an_example_that_nobody_runs():
    having = {page for page in PAGES if fences(page, "python")}
    assert having == {
        "README.md",
        "docs/your_model.md",
        "docs/add_a_technique.md",
        "docs/diagnosis.md",
    }
    assert list(programs())[2:] == [
        "your_model.md, PyTorch",
        "your_model.md, TensorFlow",
        "diagnosis.md",
    ]


@pytest.mark.parametrize("name", programs())
def test_the_example_runs(name, tmp_path):
    path = tmp_path / "example.py"
    path.write_text(programs()[name])
    side = "tf" if "import tensorflow" in path.read_text() else "pt"
    workers.run("example_worker", (side,), lambda _: [path])


@pytest.mark.parametrize(
    ("path", "needs"),
    [
        ("tf_impl/train_step/gradient_clipping.py", ["tf_impl/kit/calling.py"]),
        ("pt_impl/train_step/stacking.py", ["pt_impl/train_step/mixed_precision.py"]),
        ("pt_impl/input/tuned_folder.py", ["shared/epochs.py", "shared/images.py"]),
    ],
)
def test_what_a_page_says_of_copying_holds(path, needs, tmp_path):
    """In a folder with these files alone it can be imported; without one of them it cannot."""
    needed = docs.needed(path)
    assert set(needs) <= set(needed)
    folders = {missing: tmp_path / str(number) for number, missing in enumerate(["", *needed])}
    for missing, folder in folders.items():
        for place in {path, *needed} - {missing}:
            (folder / place).parent.mkdir(exist_ok=True, parents=True)
            shutil.copy(ROOT / place, folder / place)
    whole, *errors = elsewhere(path.removesuffix(".py").replace("/", "."), *folders.values())
    assert whole == ""
    for missing, error in zip(needed, errors, strict=True):
        assert any(words in error for words in ("No module named", "cannot import name")), missing


def test_what_goes_with_a_file_is_what_a_function_of_it_imports_too():
    assert "shared/onnx_quantization.py" in docs.needed("pt_impl/deployment/export.py")


def elsewhere(module: str, *given: object) -> list[str]:
    """What `elsewhere_worker.py` says of a file, where this repository is not installed."""
    side = module.partition("_")[0]
    return workers.run("elsewhere_worker", (side,), lambda _: (module, *given))[side]["said"]


# The tour -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tour(tmp_path_factory) -> Path:
    """A copy of this repository with the files of the tour as they stand there."""
    folder = tmp_path_factory.mktemp("tour") / "twinbench"
    copy_to(folder)
    text = (ROOT / "docs" / "add_a_technique.md").read_text("utf-8")
    files = dict(re.findall(r"^`([\w/]+\.py)`:\n\n```python\n(.*?)^```$", text, re.M | re.S))
    assert len(files) == len(fences("docs/add_a_technique.md", "python")) == 4
    for place, content in files.items():
        assert not (folder / place).exists()
        (folder / place).write_text(content)
    return folder


def test_the_tour_s_technique_keeps_the_rules_and_passes_its_tests(tour):
    text, *_ = [text for text in of_kind("tour") if "tests/test_layout.py" in text]
    # Of the layout's tests those that look at this repository; the rest test the checks.
    done = run(f"{text} -q -k 'test_this_repository or label_smoothing'", tour)
    assert done.returncode == 0, done.stdout[-3000:]
    assert re.search(r"^\d\d passed", done.stdout.splitlines()[-1]), done.stdout


def test_a_rule_that_the_tour_broke_would_be_found(tour, tmp_path):
    path = tour / "tests" / "train_step" / "test_label_smoothing.py"
    shutil.move(path, tmp_path)
    try:
        done = run(".venv/bin/pytest tests/test_layout.py -q -k missing_places", tour)
    finally:
        shutil.move(tmp_path / path.name, path)
    assert done.returncode == 1
    assert "tests/train_step/test_label_smoothing.py is missing" in done.stdout


@pytest.mark.parametrize("side", ["pt", "tf"])
def test_the_tour_s_files_run_alone(tour, side):
    (text,) = [text for text in of_kind("tour") if f"-m {side}_impl" in text]
    program, module = text.split(" -m ")
    assert program == ".venv/bin/python"
    (output,) = elsewhere(module, tour, "--run")
    plain, smoothed = (
        [float(x) for x in re.findall(rf"{name} (\S+)", output)] for name in ("plain", "smoothed")
    )
    assert plain == sorted(plain, reverse=True)  # as the page says
    assert smoothed[-1] > min(smoothed)


@pytest.mark.campaign
def test_the_tour_s_technique_is_measured(tour):
    """In one framework, which takes half of the time; its tests hold both to the same figures."""
    (text,) = [text for text in of_kind("tour") if text.startswith(BENCH)]
    done = run(f"{text} --framework pt", tour)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-2000:]
    record = json.loads((tour / "results" / "latest" / "results.json").read_text("utf-8"))
    cases = {(c["framework"], c["variant"]): c for c in record["cases"]}
    assert {case["status"] for case in cases.values()} == {"OK"}
    assert cases.keys() == {("pt", "plain"), ("pt", "smoothed")}
    evidence = cases["pt", "smoothed"]["evidence"]
    assert evidence["first_loss"] != evidence["first_loss_of_plain_labels"]
    one, another = record["comparisons"]  # of small and of large batches
    assert one["numerator"] != another["numerator"]
    assert {(c["kind"], c["reason"]) for c in (one, another)} == {("baseline", None)}


def test_the_page_of_tried_models_has_each_of_them():
    record = tried.read()
    assert set(record.models) == {path.name for path in tried.MODELS.glob("*.py")}
    assert set(record.by_hand) == {name for name, *_ in tried.COMPARED}


SURE = (0.85, (0.83, 0.87), "faster")


@pytest.mark.parametrize(
    ("rows", "best"),
    [
        ([(0.8, (0.6, 1.07), "inconclusive"), SURE], "1 0.850 (0.830–0.870)"),
        (
            [(0.5, (0.4, 0.6), DIFFERENT), (0.85, (0.83, 0.98), "slightly faster")],
            "the plain one",
        ),
        ([(0.5, None, DIFFERENT), (0.85, None, None)], "1 0.850, one block"),
        ([(0.5, None, None), SURE], "1 0.850 (0.830–0.870)"),
        ([(1.2, None, None)], "the plain one"),
        ([], "not measured"),
    ],
)
def test_of_tried_rows_the_best_is_one_that_was_shown_to_be(rows, best):
    failed = tried.Row("x", "failed", "train", 16, "FAILED", "PyTorch")
    measured = [
        tried.Row("x", str(place), "train", 16, "OK", "PyTorch", None, *row)
        for place, row in enumerate(rows)
    ]
    assert tried._best([failed, *measured], "train", None) == f"PyTorch: {best}"


def as_json(maker) -> dict:
    return json.loads(maker.RECORD.read_text("utf-8"))


def levels() -> instructions.Levels:
    return msgspec.json.decode(instructions.RECORD.read_bytes(), type=instructions.Levels)


@pytest.mark.parametrize(
    ("maker", "read"),
    [
        (attacked, as_json),
        (controls_page, as_json),
        (overhead, as_json),
        (tried, lambda _: tried.read()),
        (instructions, lambda _: levels()),
    ],
    ids=lambda part: getattr(part, "__name__", ""),
)
def test_a_page_of_measurements_says_what_its_record_does(maker, read):
    assert maker.PAGE.read_text("utf-8") == maker.page(read(maker))


def test_the_tour_s_page_is_made_and_the_others_are_the_same_whoever_makes_them(tour):
    """No order of a set, no date, no path of a machine."""
    (text,) = [text for text in of_kind("tour") if text.endswith(" docs")]
    env = os.environ | {"PYTHONHASHSEED": "7", "TZ": "Asia/Tokyo", "LANG": "C"}
    subprocess.run(["sh", "-c", text], cwd=tour, env=env, stdout=subprocess.DEVNULL, check=True)
    folder = tour / "docs" / "techniques"
    made = {path.relative_to(folder).as_posix(): path for path in folder.rglob("*.*")}
    made = {name: path.read_text("utf-8") for name, path in made.items()}
    page = made.pop("train_step/label_smoothing.md")
    assert "](../../../pt_impl/train_step/label_smoothing.py)" in page
    index = made["README.md"].splitlines(keepends=True)
    assert any("train_step/label_smoothing.md" in line for line in index)
    made["README.md"] = "".join(line for line in index if "label_smoothing" not in line)
    assert made == pages()


# Links --------------------------------------------------------------------------------------------


def linking() -> list[str]:
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
    return sorted(path.relative_to(ROOT).as_posix() for path in pages)


@cache
def slugs(path: Path) -> set[str]:
    """The anchors that the usual hosts give to a page's headings."""
    tokens = MarkdownIt("commonmark").parse(path.read_text("utf-8"))
    titles = [
        "".join(child.content for child in after.children)
        for token, after in pairwise(tokens)
        if token.type == "heading_open"
    ]
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def links(page: str) -> list[str]:
    return [t.attrs["href"] for t in inline(page) if t.type == "link_open"]


@pytest.mark.parametrize("page", linking())
def test_links_lead_somewhere(page):
    for link in links(page):
        if link.startswith(("http://", "https://", "mailto:")):
            continue
        place, _, anchor = link.partition("#")
        target = (ROOT / page).parent / place if place else ROOT / page
        assert target.exists(), f"{page}: {link}"
        assert target.resolve().is_relative_to(ROOT), f"{page}: {link}"
        if anchor:
            assert anchor in slugs(target), f"{page}: {link}"


def test_every_page_can_be_reached_from_readme():
    """Reports and pages of techniques included."""
    seen, new = set(), {"README.md"}
    while new:
        seen |= new
        targets = {
            os.path.normpath(os.path.join(os.path.dirname(page), link.partition("#")[0]))
            for page in new
            for link in links(page)
            if link.partition("#")[0].endswith(".md") and "://" not in link
        }
        new = targets - seen
    assert set(linking()) <= seen


# Figures ------------------------------------------------------------------------------------------


def test_the_fixed_numbers_are_those_of_the_code():
    text = (ROOT / "docs" / "numbers.md").read_text("utf-8")
    table = text.partition("<!-- constants -->")[2].partition("<!-- constants end -->")[0]
    rows = re.findall(r"^\| .* \| (\S+) \| `([\w.]+)\.(\w+)` \|$", table, re.M)
    assert len(rows) == len(table.strip().splitlines()) - 2
    for value, module, name in rows:
        assert str(getattr(import_module(module), name)) == value, f"{module}.{name}"


# Pages of techniques ------------------------------------------------------------------------------


def test_the_pages_of_techniques_are_what_the_code_gives(monkeypatch):
    """Make them again with: twinbench docs."""
    monkeypatch.setattr(docs, "pages", pages)  # made once
    assert docs.differing(docs.FOLDER) == []


def test_a_page_that_is_old_missing_or_of_nothing_is_found(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(docs, "pages", pages)  # made once
    monkeypatch.setattr(command, "FOLDER", tmp_path / "techniques")
    assert command.main(["--check"]) == 1
    assert "pruning.md" in capsys.readouterr().err
    assert not (tmp_path / "techniques").exists()
    assert command.main([]) == 0
    assert command.main(["--check"]) == 0
    capsys.readouterr()
    (tmp_path / "techniques" / "compression" / "pruning.md").write_text("edited by hand")
    (tmp_path / "techniques" / "gone.md").write_text("of a technique that was removed")
    assert command.main(["--check"]) == 1
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert line.startswith(
        "docs/techniques: not what the code gives: compression/pruning.md, gone.md; make"
    )
    assert command.main([]) == 0
    assert command.main(["--check"]) == 0
    assert not (tmp_path / "techniques" / "gone.md").exists()


@pytest.mark.parametrize("name", techniques())
def test_a_page_shows_what_both_docstrings_say(name):
    """As it is rendered: no word of a docstring becomes markup."""
    tokens = (
        MarkdownIt("commonmark")
        .enable("table")
        .parse(pages()[f"{techniques()[name].family}/{name}.md"])
    )
    paths = [f"{side}/{techniques()[name].family}/{name}.py" for side in ("pt_impl", "tf_impl")]
    sources = [(ROOT / path).read_text("utf-8") for path in paths]
    shown = letters("".join(child.content for t in tokens for child in (t.children or [t])))
    for source in sources:
        docstring = ast.get_docstring(ast.parse(source))
        for part in re.split(rf"^(?:{'|'.join(docs.SECTIONS)}):\s", docstring, flags=re.M)[1:]:
            if not part.startswith(("`pt_impl/", "`tf_impl/")):  # its twin, which is linked
                assert letters(part) in shown


def letters(text: str) -> str:
    """A text without what rendering may change: white space, marks of code and of lists, case."""
    return re.sub(r"^\d+\. |[`\s\-]", "", text, flags=re.M).lower()


def test_the_page_of_compilation_says_after_how_many_steps_it_is_repaid():
    page = (ROOT / "docs/techniques/train_step/compilation.md").read_text("utf-8")
    assert "| break-even [steps] (interval) |" in page


def test_a_page_lists_the_variants_and_tasks_of_the_benchmark():
    page = pages()["train_step/compilation.md"]
    assert "| baseline (the baseline) | — | yes | Keras 3 | default |" in page
    assert "| compiled | — | yes, needs a C++ compiler | Keras 3 | default |" in page
    assert "| eager | — | — | Keras 3 | ordinary |" in page
    assert "| max\\_autotune |" in page or "| max_autotune |" in page
    assert "`mode='max-autotune'` | yes, needs a C++ compiler | — | full |" in page
    assert "| digits-cnn | 128 (compute) | predictions | — | ordinary |" in page
    assert "tf_keras" in pages()["compression/pruning.md"].partition("## What is measured")[2]


def test_a_page_says_which_framework_alone_has_a_function():
    """In PyTorch's words, and in no others."""
    page = pages()["deployment/native_export.md"]
    _, rest = page.split("- `export_torchscript(", 1)
    function = rest.partition("\n- ")[0]
    assert "PyTorch: Legacy: " in function
    assert "TensorFlow: " not in function
