"""What docs/many_machines starts on clusters and runners, as far as can be told without them.

The script of Slurm is run in bash, with a program in place of `srun`. The files of Kubernetes and
of CI are read by types that name every field that may be there.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
from pathlib import Path
from typing import Any, Literal

import msgspec
import pytest
import yaml
from msgspec import Struct

from tests.docs.commands import BOTH, COMMANDS
from tests.docs.pages import ROOT, fences

FOLDER = ROOT / "docs" / "many_machines"
BENCH = [".venv/bin/pytest", "bench/", "--benchmark-only"]
OPTIONS = set(re.findall(r'"(--[a-z-]+)"', (ROOT / "bench" / "conftest.py").read_text("utf-8")))
# Options of sbatch and srun that the script may have, by Slurm's manual.
SBATCH = {"job-name", "nodes", "ntasks", "cpus-per-task", "hint", "exclusive", "time", "output"}
SRUN = {"cpus-per-task"}


class Strict(Struct, forbid_unknown_fields=True, rename="camel"):
    """A type of which every field is known."""


# Slurm --------------------------------------------------------------------------------------------


@pytest.fixture
def submitted(tmp_path) -> Path:
    """A folder to submit from, whose name has a space."""
    (folder := tmp_path / "a clone").mkdir()
    return folder


def start(folder: Path, kind: str, element: int) -> list[str]:
    """What an element of the array gives srun."""
    (programs := folder / "programs").mkdir(exist_ok=True)
    (srun := programs / "srun").write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    srun.chmod(0o755)
    environment = {
        "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}",
        "SLURM_ARRAY_TASK_ID": str(element),
        "SLURM_CPUS_PER_TASK": "2",
        "SLURM_SUBMIT_DIR": str(folder),
    }
    done = subprocess.run(
        ["bash", FOLDER / "slurm.sh", kind],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.splitlines()


def test_each_element_of_the_array_has_a_folder_of_results(submitted):
    for element in (0, 3):
        words = start(submitted, "zen4", element)
        options = words[: words.index(BENCH[0])]
        assert {word.partition("=")[0].removeprefix("--") for word in options} == SRUN
        assert "--cpus-per-task=2" in options
        assert words[len(options) :] == [*BENCH, "--results", f"results/zen4/{element}"]


def test_an_element_that_was_cut_short_is_taken_up(submitted):
    (latest := submitted / "results" / "zen4" / "0" / "latest").mkdir(parents=True)
    (latest / "state.json").write_text("{}")
    assert start(submitted, "zen4", 0)[-2:] == ["--resume", "results/zen4/0/latest"]
    assert "--resume" not in start(submitted, "zen4", 1)
    assert {"--resume", "--results"} <= OPTIONS


def test_the_script_without_a_kind_ends_at_once(submitted):
    with pytest.raises(subprocess.CalledProcessError):
        subprocess.run(["bash", FOLDER / "slurm.sh"], capture_output=True, check=True)


def test_slurm_is_asked_for_what_it_has():
    text = (FOLDER / "slurm.sh").read_text("utf-8")
    asked = re.findall(r"^#SBATCH --([\w-]+)", text, re.M)
    assert set(asked) == SBATCH
    assert len(asked) == text.count("#SBATCH")
    (line,) = re.findall(r"^#     (sbatch .*)$", text, re.M)
    assert line in COMMANDS["cluster"]
    assert shlex.split(line)[-2:] == ["docs/many_machines/slurm.sh", "KIND"]


# Kubernetes ---------------------------------------------------------------------------------------


class Field(Strict):
    field_path: str


class Source(Strict):
    field_ref: Field


class Variable(Strict):
    name: str
    value_from: Source


class Amounts(Strict):
    cpu: str
    memory: str


class Resources(Strict):
    requests: Amounts
    limits: Amounts


class Mount(Strict):
    name: str
    mount_path: str


class Container(Strict):
    name: str
    image: str
    args: list[str]
    env: list[Variable]
    resources: Resources
    volume_mounts: list[Mount]


class Claim(Strict):
    claim_name: str


class Volume(Strict):
    name: str
    persistent_volume_claim: Claim


class Labels(Strict):
    match_labels: dict[str, str]


class Term(Strict):
    topology_key: str
    label_selector: Labels


class Apart(Strict):
    required_during_scheduling_ignored_during_execution: list[Term]


class Affinity(Strict):
    pod_anti_affinity: Apart


class Pod(Strict):
    restart_policy: Literal["Never"]
    node_selector: dict[str, str]
    affinity: Affinity
    containers: list[Container]
    volumes: list[Volume]


class Named(Strict):
    name: str


class Labelled(Strict):
    labels: dict[str, str]


class Template(Strict):
    metadata: Labelled
    spec: Pod


class Indexed(Strict):
    completion_mode: Literal["Indexed"]
    completions: int
    parallelism: int
    backoff_limit_per_index: int
    template: Template


class Job(Strict):
    api_version: Literal["batch/v1"]
    kind: Literal["Job"]
    metadata: Named
    spec: Indexed


def job() -> Job:
    values = yaml.safe_load((FOLDER / "kubernetes.yaml").read_text("utf-8"))
    return msgspec.convert(values, Job)


def test_each_pod_has_a_folder_of_results_on_the_volume():
    pod = job().spec.template.spec
    (container,) = pod.containers
    (mount,) = container.volume_mounts
    option, folder = container.args
    (index,) = container.env
    annotation = "metadata.annotations['batch.kubernetes.io/job-completion-index']"
    assert index.value_from.field_ref.field_path == annotation
    assert option in OPTIONS
    assert folder == f"{mount.mount_path}/KIND/$({index.name})"
    assert [volume.name for volume in pod.volumes] == [mount.name]


def test_pods_of_the_job_keep_to_nodes_apart_and_to_their_cores():
    template = job().spec.template
    (term,) = (
        template.spec.affinity.pod_anti_affinity.required_during_scheduling_ignored_during_execution
    )
    assert term.label_selector.match_labels == template.metadata.labels
    assert term.topology_key == "kubernetes.io/hostname"
    resources = template.spec.containers[0].resources
    assert msgspec.to_builtins(resources.requests) == msgspec.to_builtins(resources.limits)


def test_an_unknown_field_is_refused():
    """The types above are what checks the file."""
    values = yaml.safe_load((FOLDER / "kubernetes.yaml").read_text("utf-8"))
    values["spec"]["completion"] = 5
    with pytest.raises(msgspec.ValidationError, match="completion"):
        msgspec.convert(values, Job)


# CI -----------------------------------------------------------------------------------------------


class Step(Strict):
    name: str = ""
    uses: str = ""
    run: str = ""
    with_: dict[str, Any] = msgspec.field(default={}, name="with")


class Strategy(Strict, rename="kebab"):
    fail_fast: bool
    matrix: dict[str, list]


class Measure(Strict, rename="kebab"):
    strategy: Strategy
    runs_on: str
    timeout_minutes: int
    steps: list[Step]


class Compare(Strict, rename="kebab"):
    needs: str
    if_: Literal["always()"] = msgspec.field(name="if")
    runs_on: str = ""
    steps: list[Step] = []


class Jobs(Strict):
    measure: Measure
    compare: Compare


class Workflow(Strict):
    name: str
    on: Literal["workflow_dispatch"]
    jobs: Jobs


def workflow() -> Workflow:
    text = (FOLDER / "matrix.yml").read_text("utf-8")
    values = yaml.load(text, yaml.BaseLoader)  # for which "on" is a word, as it is for GitHub
    return msgspec.convert(values, Workflow, strict=False)


def test_every_runner_of_the_matrix_gives_a_record_with_a_name():
    measure = workflow().jobs.measure
    assert not measure.strategy.fail_fast
    assert measure.runs_on == "${{ matrix.runner }}"
    last = measure.steps[-1]
    names = set(re.findall(r"\$\{\{ matrix\.(\w+) \}\}", last.with_["name"]))
    assert names == measure.strategy.matrix.keys()
    assert last.with_["path"] == "results/latest/results.json"
    (started,) = [step.run for step in measure.steps if step.name == "measure"]
    assert started.split() == BENCH


def test_the_records_of_the_matrix_are_laid_side_by_side():
    jobs = workflow().jobs
    assert jobs.compare.needs == "measure"
    places = [step.with_["path"] for step in jobs.compare.steps if "download" in step.uses]
    last = jobs.compare.steps[-1].run
    assert last.startswith(f".venv/bin/twinbench report {places[0]}/* ")


def test_both_jobs_install_as_readme_says():
    """The one that compares measures nothing, and needs no framework."""
    (line,) = [
        line for line in fences("README.md", "sh") if line.rstrip().endswith(" ".join(BENCH))
        and line.startswith("python3")
    ]  # fmt: skip
    jobs = workflow().jobs
    installs = [
        step.run
        for job in (jobs.measure, jobs.compare)
        for step in job.steps
        if step.name == "install"
    ]
    whole = line.partition(" && .venv/bin/pytest")[0]
    assert installs == [whole, whole.replace(BOTH, ".")]
    uses = {step.uses for job in (jobs.measure, jobs.compare) for step in job.steps} - {""}
    assert all(re.fullmatch(r"actions/[\w-]+@v\d+", name) for name in uses)
