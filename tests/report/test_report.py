"""The report: what it says, that it fits, that nothing in a record can harm it."""

from __future__ import annotations

import copy
import csv
import functools
import io
import json
import random
import re
import subprocess
import sys
import unicodedata
from itertools import pairwise
from math import exp, inf, isclose, nan
from pathlib import Path
from xml.etree import ElementTree

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from markdown_it import MarkdownIt

from bench.analysis.decisions import works as decided
from bench.analysis.declared import complete
from bench.analysis.pairing import baseline
from bench.analysis.reading import load, view
from bench.analysis.reading import tasks as works_of
from bench.analysis.schema import check
from bench.report import command, csv_export, figures, readme
from bench.report import page as html_page
from bench.report.content import merge
from bench.report.files import FORMATS, write_reports
from bench.report.tables import answered, escape, markdown, terminal
from bench.report.text import plain, wrap
from tests import workers

ROOT = Path(__file__).resolve().parents[2]
DASH = "—"

# A record ----------------------------------------------------------------------------------------

TASKS = {
    "digits-cnn": {"metric": "accuracy", "margin": 1.0, "parity": 1e-5},
    "text-gpt": {"metric": "bits_per_character", "margin": 0.05, "parity": 1e-4},
}
# variant -> (step in ms of PyTorch and TensorFlow, accuracy, dtype of products)
VARIANTS = {
    "fp32": (5.23, 6.11, 97.3, "float32"),
    "bf16": (2.94, 3.72, 97.2, "bfloat16"),
    "bf16_fp32_head": (3.01, 3.85, 97.4, "bfloat16"),
    "as_installed": (8.41, 6.34, 97.3, "float32"),
}


def record(effort: str = "default") -> dict:
    """A record as a run writes it: two tasks, two frameworks, every status; figures made up."""
    draw = random.Random(2026)
    blocks = {"quick": 1, "default": 8}[effort]
    cases = [
        _case(draw, blocks, task, batch, framework, variant)
        for task, batch in (("digits-cnn", 4), ("digits-cnn", 64), ("text-gpt", 16))
        for variant in VARIANTS
        for framework in ("pt", "tf")
    ]
    cases.append(_case(draw, blocks, "digits-cnn", 64, "tf", "bf16", flavour="tf_keras"))
    cases += [
        _stopped("digits-cnn", 64, "pt", "fp16", "UNSUPPORTED", "needs a CUDA GPU; none was found"),
        _stopped("digits-cnn", 64, "tf", "fp16", "UNSUPPORTED", "needs a CUDA GPU; none was found"),
        _stopped("text-gpt", 16, "pt", "fp16", "UNSUPPORTED", "needs a CUDA GPU; none was found"),
        _stopped("text-gpt", 16, "tf", "compiled", "FAILED", "the worker was killed by SIGKILL"),
        _stopped("text-gpt", 16, "pt", "compiled", "NOT_APPLIED", "no product ran in bfloat16"),
    ]
    return {
        "schema_version": 3,
        "command": f"pytest bench/ --benchmark-only --effort {effort}",
        "effort": effort,
        "started": "2026-11-20T13:50:02Z",
        "finished": True,
        "environment": _environment(),
        "noise_floor": _noise_floor(effort),
        "techniques": {
            "mixed_precision": {
                "title": "Mixed precision",
                "differs_by_design": [
                    "PyTorch casts per operator (autocast); Keras per layer (dtype policy).",
                    "Softmax and BatchNorm statistics stay float32 on both sides.",
                ],
                "notes": ["bfloat16 has no loss scaling: its exponent is that of float32."],
            }
        },
        "tasks": TASKS,
        "cases": cases,
        "comparisons": _comparisons(draw, cases, effort),
    }


def _case(draw, blocks, task, batch, framework, variant, flavour=None) -> dict:
    pt_ms, tf_ms, accuracy, dtype = VARIANTS[variant]
    step = (pt_ms if framework == "pt" else tf_ms) * batch**0.8 / 20 / 1e3
    samples = {
        str(block): [step * exp(draw.gauss(0, 0.02)) for _ in range(30)] for block in range(blocks)
    }
    flavour = flavour or ("keras3" if framework == "tf" else None)
    side = "tf-tf_keras" if flavour == "tf_keras" else framework
    trained = None
    if task == "digits-cnn" and batch == 64 and variant != "as_installed":
        per_seed = [accuracy + draw.gauss(0, 0.3) for _ in range(blocks)]
        trained = {
            "metric": "accuracy",
            "per_seed": per_seed,
            "mean": accuracy,
            "ci": [accuracy - 0.24, accuracy + 0.24] if blocks > 1 else None,
            "difference": None
            if variant == "fp32"
            else {
                "mean": accuracy - 97.3,
                "ci": [accuracy - 97.3 - 0.3, accuracy - 97.3 + 0.3] if blocks > 1 else None,
                "verdict": "equivalent" if blocks > 1 else None,
            },
        }
    return {
        "id": f"mixed_precision/{task}-{batch}/{side}/{variant}",
        "technique": "mixed_precision",
        "framework": framework,
        "flavour": flavour,
        "variant": variant,
        "role": "baseline" if variant == "fp32" else "variant",
        "task": task,
        "batch_size": batch,
        "status": "OK",
        "reason": None,
        "timing": {
            "cold_first_call_s": 0.412 if framework == "pt" else 1.93,
            "warm_first_call_s": 0.021 if framework == "pt" else 1.24,
            "step_s": {"0": samples},
            "median_s": step,
            "ci_s": [step * 0.98, step * 1.02] if blocks > 1 else None,
        },
        "memory": {
            "import_bytes": 251_000_000,
            "build_bytes": 263_000_000,
            "first_step_peak_bytes": 331_000_000,
            "steady_peak_bytes": 251_000_000 + int(6e7 + 1e6 * batch),
            "parameters_bytes": 96_000,
            "gradients_bytes": 96_000,
            "optimizer_bytes": 96_000,
            "rest_bytes": int(6e7 + 1e6 * batch) - 288_000,
            "device_peak": None,
        },
        "accuracy": trained,
        "artifact_bytes": None,
        "metrics": {
            "samples_per_s": {"value": batch / step, "unit": "1/s", "ci": None, "samples": []},
            "share_of_peak": {"value": 0.18, "unit": "1", "ci": None, "samples": []},
        },
        "blocks": [
            {"block": block, "losses": [2.31 - 0.01 * i for i in range(10)]}
            for block in range(blocks)
        ],
        "certificate": {"losses": [2.31 - 0.01 * i for i in range(10)], "weights_sha256": "ab"},
        "evidence": {
            "operator_dtypes": {
                "convolution": {dtype: 9},
                "matmul": {dtype: 3 if batch == 4 else 4},
            }
        },
    }


def _stopped(task, batch, framework, variant, status, reason) -> dict:
    return {
        "id": f"mixed_precision/{task}-{batch}/{framework}/{variant}",
        "technique": "mixed_precision",
        "framework": framework,
        "flavour": "keras3" if framework == "tf" else None,
        "variant": variant,
        "role": "variant",
        "task": task,
        "batch_size": batch,
        "status": status,
        "reason": reason,
        "timing": {
            "cold_first_call_s": None,
            "warm_first_call_s": None,
            "step_s": {},
            "median_s": None,
            "ci_s": None,
        },
        "memory": None,
        "accuracy": None,
        "artifact_bytes": None,
        "metrics": {},
        "certificate": None,
        "evidence": None,
    }


def _comparisons(draw, cases, effort) -> list[dict]:
    by_id = {case["id"]: case for case in cases}
    found = []
    for case in cases:
        if case["status"] != "OK":
            continue
        own = case["id"].rsplit("/", 1)[0].replace("tf-tf_keras", "tf") + "/fp32"
        if case["role"] == "variant":
            found.append(_comparison(draw, effort, "baseline", case, by_id[own]))
        if case["framework"] == "tf":
            twin = case["id"].replace("/tf-tf_keras/", "/pt/").replace("/tf/", "/pt/")
            found.append(_comparison(draw, effort, "framework", by_id[twin], case))
    pair = [by_id[f"mixed_precision/digits-cnn-64/{s}"] for s in ("pt/bf16", "tf/fp32")]
    best = _comparison(draw, effort, "framework", *pair) | {"variant": "best: bf16 | fp32"}
    return [*found, best]


def _comparison(draw, effort, kind, first, second) -> dict:
    ratio = first["timing"]["median_s"] / second["timing"]["median_s"]
    verdict = "faster" if ratio < 0.95 else "slower" if ratio > 1.05 else "equivalent"
    reason = None
    if kind == "framework" and first["variant"] == "as_installed" and first["task"] == "text-gpt":
        verdict, reason = "not comparable", "first losses differ: 4.585 and 4.612 at step 3"
    return {
        "technique": "mixed_precision",
        "variant": first["variant"],
        "task": first["task"],
        "batch_size": first["batch_size"],
        "kind": kind,
        "numerator": first["id"],
        "denominator": second["id"],
        "ratio": ratio,
        "ci": None if effort == "quick" else [ratio * 0.97, ratio * 1.03],
        "sd": None if effort == "quick" else 0.024,
        "n": 1 if effort == "quick" else 8,
        "verdict": None if effort == "quick" and not reason else verdict,
        "reason": reason,
    }


def _environment() -> dict:
    return {
        "cpu": "Intel(R) Xeon(R) Platinum 8488C",
        "isa": ["avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_bf16"],
        "physical_cores": 2,
        "logical_cores": 4,
        "threads": 2,
        "memory_bytes": 25_769_803_776,
        "os": "Linux-6.1.0-x86_64-with-glibc2.36",
        "governor": None,
        "load": 0.31,
        "python": "3.11.7",
        "packages": {
            "pt": {"torch": "2.15.0"},
            "tf": {"tensorflow": "2.21.0", "keras": "3.15.1", "tf_keras": "2.21.0"},
            "bench": {"twinbench": "0.1.0", "numpy": "2.4.6"},
        },
        "allocator": {"MALLOC_MMAP_THRESHOLD_": "4294967296", "keeps_freed_memory": True},
        "onednn": True,
        "gpu": None,
        "driver": None,
        "seeds": {"weights": 0, "order": 1},
        "order": "random within each round",
        "peak_flops": {"float32": 1.31e11, "bfloat16": 4.9e11},
    }


def _noise_floor(effort) -> dict:
    control = {"ratio": 1.004, "ci": [0.991, 1.017], "sd": 0.0213, "verdict": "equivalent"}
    quick = effort == "quick"
    return {
        "controls": []
        if quick
        else [
            {"framework": name, "task": task, **control}
            for name in ("pt", "tf")
            for task in ("digits-cnn", "text-gpt")
        ],
        "shortest_sample_s": 0.0102,
        "empty_sample_share": {"pt": 1.1e-4, "tf": 1.3e-4},
        "median_half_width": None if quick else 0.021,
        "p90_half_width": None if quick else 0.044,
        "ratios": 0 if quick else 28,
    }


def case(results: dict, name: str) -> dict:
    return next(c for c in results["cases"] if c["id"] == f"mixed_precision/{name}")


def comparison(results: dict, first: str, second: str) -> dict:
    ids = [f"mixed_precision/{first}", f"mixed_precision/{second}"]
    return next(c for c in results["comparisons"] if [c["numerator"], c["denominator"]] == ids)


def small() -> dict:
    """A record with something of everything, cut down to few cases."""
    results = record()
    kept = {c["id"] for c in results["cases"] if c["batch_size"] == 64 and "head" not in c["id"]}
    results["cases"] = [c for c in results["cases"] if c["id"] in kept]
    results["comparisons"] = [
        c for c in results["comparisons"] if {c["numerator"], c["denominator"]} <= kept
    ]
    bf16 = case(results, "digits-cnn-64/pt/bf16")
    for name in ("fp32", "bf16"):
        first = {"value": 18.5, "unit": "s", "ci": [17.0, 19.0], "samples": [17.0, 18.5, 19.0]}
        case(results, f"digits-cnn-64/pt/{name}")["metrics"]["cold_first_calls_s"] = first
    even = {"value": 950.0, "unit": "steps", "ci": [900.0, None], "samples": None}
    bf16["metrics"]["break_even_steps"] = even
    bf16["memory"]["device_peak"] = {"allocated": 10**8, "reserved": 2 * 10**8}
    bf16["artifact_bytes"] = 420_000
    return results


# Reading what was rendered -----------------------------------------------------------------------


def columns(line: str) -> int:
    """Cells of a terminal that `line` takes."""
    wide = sum(unicodedata.east_asian_width(c) in "WF" for c in line)
    return len(line) + wide - sum(unicodedata.category(c) == "Mn" for c in line)


def block(text: str, title: str) -> list[str]:
    """The lines of the terminal's table with this title."""
    lines = text.splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith(title))
    end = next(
        i for i in range(start, len(lines)) if not lines[i] and not lines[i + 1].startswith("batch")
    )
    return lines[start:end]


def row(text: str, title: str, batch: int, variant: str) -> str:
    """One row of a terminal table, its continuation lines joined."""
    lines = block(text, title)
    lines = lines[lines.index(f"batch {batch}") + 1 :]
    start = next(
        i for i, line in enumerate(lines) if re.match(rf"{re.escape(variant)}(  |$)", line)
    )
    rest = iter(lines[start + 1 :])
    found = [lines[start]]
    for line in rest:
        if not line.startswith(" "):
            break
        found.append(line)
    return " ".join(" ".join(found).split())


def tokens(text: str) -> list:
    """What GitHub's reader makes of Markdown."""
    return MarkdownIt("commonmark").enable(["table", "strikethrough"]).parse(text)


def markdown_tables(text: str) -> list[list[list[str]]]:
    """The text of every cell of every table."""
    found: list[list[list[str]]] = []
    read = tokens(text)
    for token, inside in pairwise(read):
        if token.type == "table_open":
            found.append([])
        elif token.type == "tr_open":
            found[-1].append([])
        elif token.type in ("td_open", "th_open"):
            found[-1][-1].append("".join(child.content for child in inside.children or []))
    return found


def markdown_row(text: str, head: str, variant: str, batch: int) -> dict[str, str]:
    """A row as head -> cell, of the first table that has this column and batch size."""
    wanted = (t for t in markdown_tables(text) if head in t[0])
    for table in wanted:
        names = [line[0] for line in table]
        if f"batch {batch}" in names:
            line = table[names.index(variant, names.index(f"batch {batch}"))]
            return dict(zip(table[0], line, strict=True))
    raise AssertionError(f"no table with {head!r} and batch {batch}")


# What it says ------------------------------------------------------------------------------------


def test_speed_shows_both_frameworks_side_by_side():
    results = record()
    pt, tf = case(results, "digits-cnn-64/pt/bf16"), case(results, "digits-cnn-64/tf/bf16")
    pt["timing"] |= {"median_s": 0.0125, "ci_s": [0.0123, 0.01268]}
    tf["timing"] |= {"median_s": 0.2, "ci_s": [0.195, 0.205]}
    pt["metrics"]["samples_per_s"]["value"] = 5119.7
    tf["metrics"]["samples_per_s"]["value"] = 320.0
    expected = ["12.5 (12.3–12.7)", "5,120", "200 (195–205)", "320"]
    assert row(terminal(results), "digits-cnn · Speed", 64, "bf16") == " ".join(["bf16", *expected])
    cells = markdown_row(markdown(results), "PyTorch samples/s", "bf16", 64)
    assert list(cells.values()) == ["bf16", *expected]
    assert list(cells)[1] == "PyTorch step [ms] (95% interval)"


def test_ratios_show_own_baseline_twin_and_verdict():
    results = record()
    own = comparison(results, "digits-cnn-64/pt/bf16", "digits-cnn-64/pt/fp32")
    twins = comparison(results, "digits-cnn-64/pt/bf16", "digits-cnn-64/tf/bf16")
    own |= {"ratio": 0.5, "ci": [0.48, 0.52], "verdict": "faster, less accurate"}
    twins |= {"ratio": 1.0104, "ci": [0.99, 1.03], "verdict": "inconclusive"}
    cells = markdown_row(markdown(results), "PyTorch ÷ TensorFlow", "bf16", 64)
    assert cells["PyTorch ÷ own baseline"] == "0.500 (0.480–0.520) faster, less accurate"
    assert cells["PyTorch ÷ TensorFlow"] == "1.010 (0.990–1.030) inconclusive"
    text = row(terminal(results), "digits-cnn · Ratios", 64, "bf16")
    assert "0.500 (0.480–0.520)" in text
    assert "1.010 (0.990–1.030)" in text
    assert "inconclusive" in text
    assert "below 1: the first is faster" in block(terminal(results), "digits-cnn · Ratios")[0]
    assert "baseline" in row(terminal(results), "digits-cnn · Ratios", 64, "fp32")


def test_a_pair_that_is_no_row_is_named():
    cells = markdown_row(
        markdown(record()), "PyTorch ÷ TensorFlow", "best: PyTorch bf16 ÷ TensorFlow fp32", 64
    )
    assert cells["PyTorch ÷ own baseline"] == DASH
    assert cells["PyTorch ÷ TensorFlow"].startswith("0.481 (")


def test_unlike_work_has_a_reason_and_no_ratio():
    results = record()
    cells = markdown_row(markdown(results), "PyTorch ÷ TensorFlow", "as_installed", 16)
    assert cells["PyTorch ÷ TensorFlow"] == "not comparable"
    text = terminal(results)
    assert row(text, "text-gpt · Ratios", 16, "as_installed").endswith("equivalent")
    assert "as_installed: PyTorch ÷ TensorFlow: first losses differ: 4.585" in text
    assert "as_installed    2 of 3 pairs match" in text


def test_memory_is_shown_above_import_and_split():
    results = record()
    memory = case(results, "digits-cnn-64/pt/bf16")["memory"]
    memory |= {"import_bytes": 200_000_000, "steady_peak_bytes": 321_000_000}
    memory |= {"parameters_bytes": 10_000_000, "rest_bytes": 91_000_000}
    cells = markdown_row(markdown(results), "PyTorch rest", "bf16", 64)
    assert (cells["PyTorch peak"], cells["PyTorch parameters"]) == ("121", "10.0")
    assert cells["PyTorch rest"] == "91.0"
    text = row(terminal(results), "digits-cnn · First call", 64, "bf16")
    assert text.split()[1:5] == ["0.412", "0.0210", "18.0", "121"]


def test_device_memory_has_columns_where_there_is_a_device():
    results = record()
    assert not any(
        "GPU" in head for table in markdown_tables(markdown(results)) for head in table[0]
    )
    peak = {"allocated": 512_000_000, "reserved": 1_024_000_000}
    case(results, "digits-cnn-64/tf/bf16")["memory"]["device_peak"] = peak
    results["environment"] |= {"gpu": {"name": "H200"}, "driver": "580.1"}
    cells = markdown_row(markdown(results), "TensorFlow GPU reserved", "bf16", 64)
    assert (cells["TensorFlow GPU reserved"], cells["PyTorch GPU reserved"]) == ("1,020", DASH)
    assert row(terminal(results), "digits-cnn · First call", 64, "bf16").endswith("512")
    assert "H200, driver 580.1" in " ".join(terminal(results).split())
    results["environment"]["gpu"] |= {
        "compute_capability": "9.0",
        "memory_bytes": "85017493504",
        "cuda": "13.0",
        "driver": "13.2",
    }
    wanted = "H200, 79.2 GiB, compute capability 9.0, CUDA 13.0, the driver's CUDA 13.2"
    assert wanted in " ".join(terminal(results).split())
    assert "Measured on the GPU H200, on" in " ".join(terminal(results).split())


def test_what_the_first_program_of_a_machine_took_is_said_once():
    results = record()
    assert "First compile" not in terminal(results)
    results["environment"]["first_compile_s"] = {"pt": 9.81}
    assert "PyTorch took 9.81 s to compile one operator" in " ".join(terminal(results).split())


def test_accuracy_shows_mean_difference_and_verdict():
    results = record()
    found = case(results, "digits-cnn-64/tf/bf16")["accuracy"]
    found |= {"mean": 96.5, "ci": [96.1, 96.9]}
    found["difference"] = {"mean": -1.234, "ci": [-1.5, -0.968], "verdict": "worse"}
    cells = markdown_row(markdown(results), "PyTorch mean", "bf16", 64)
    assert cells["TensorFlow mean"] == "96.50 ± 0.40"
    assert cells["TensorFlow difference to baseline"] == "-1.23 ± 0.27 worse"
    assert "worse" in row(terminal(results), "digits-cnn · Accuracy in %", 64, "bf16")
    assert not any(line.startswith("text-gpt · Bits") for line in terminal(results).splitlines())


def test_a_variant_of_one_framework_has_a_dash_in_the_other():
    results = record()
    results["cases"].remove(case(results, "text-gpt-16/tf/bf16"))
    text = row(terminal(results), "text-gpt · Speed", 16, "bf16")
    assert text.endswith(f"{DASH} {DASH}")


def test_tf_keras_stands_in_a_row_of_its_own():
    results = record()
    cells = markdown_row(markdown(results), "PyTorch samples/s", "bf16, tf_keras", 64)
    assert cells["PyTorch samples/s"] == DASH
    assert cells["TensorFlow samples/s"] == "12,400"
    ratio = markdown_row(markdown(results), "PyTorch ÷ TensorFlow", "bf16, tf_keras", 64)
    assert ratio["PyTorch ÷ TensorFlow"].startswith("0.790")
    assert "TensorFlow (tf_keras) bf16" in terminal(results)


def test_no_row_with_figures_of_pytorch_is_called_tf_keras():
    results = record()
    named = [
        row
        for technique in {c["technique"] for c in results["cases"]}
        for work in works_of(results, technique)
        for rows in view(results, technique, work).rows.values()
        for row in rows
    ]
    legacy = [row for row in named if row.tf and row.tf["flavour"] == "tf_keras"]
    assert legacy
    assert not [r.label for r in named if r.pt and r.label.endswith(", tf_keras")]


def test_a_technique_that_has_tf_keras_alone_stands_beside_its_twin():
    results = record()
    results["cases"].remove(case(results, "digits-cnn-64/tf/bf16"))
    cells = markdown_row(markdown(results), "PyTorch samples/s", "bf16 (TensorFlow: tf_keras)", 64)
    assert DASH not in cells.values()


def test_every_status_stands_in_the_table_and_has_its_reason():
    results = record()
    for text in (terminal(results), " ".join(markdown(results).split())):
        flat = " ".join(text.split()).replace("**", "")
        assert (
            "UNSUPPORTED: PyTorch fp16: needs a CUDA GPU; none was found "
            "(digits-cnn batch 64; text-gpt batch 16)" in flat
        )
        assert "FAILED: TensorFlow compiled: the worker was killed by SIGKILL" in flat
        assert "NOT_APPLIED: PyTorch compiled: no product ran in bfloat16" in flat
    line = row(terminal(results), "text-gpt · Speed", 16, "compiled")
    assert line == f"compiled NOT_APPLIED {DASH} FAILED {DASH}"


def test_a_failed_case_shows_no_figure_even_if_it_has_some():
    results = record()
    failed = case(results, "digits-cnn-64/pt/bf16")
    failed |= {"status": "FAILED", "reason": "died in block 5"}
    line = row(terminal(results), "digits-cnn · Speed", 64, "bf16")
    assert line.startswith(f"bf16 FAILED {DASH} ")
    assert "died in block 5" in terminal(results)


def test_controls_belong_to_the_noise_and_are_no_rows():
    results = record()
    before = [len(table) for table in markdown_tables(markdown(results))]
    base = case(results, "digits-cnn-64/pt/fp32")
    control = base | {"id": "mixed_precision/digits-cnn-64/pt/control", "role": "control"}
    results["cases"].append(control | {"variant": "control"})
    again = comparison(results, "digits-cnn-64/pt/bf16", "digits-cnn-64/pt/fp32")
    ids = {"numerator": control["id"], "denominator": base["id"]}
    results["comparisons"].append(again | {"kind": "control"} | ids)
    assert [len(table) for table in markdown_tables(markdown(results))] == before
    controls = next(t for t in markdown_tables(markdown(results)) if t[0][0] == "framework")
    assert controls[1] == ["PyTorch", "digits-cnn", "1.004 (0.991–1.017)", "2.1%", "equivalent"]
    assert "half-width of 28 ratios' intervals: median 2.1%, 90% below 4.4%" in terminal(results)


def test_environment_and_noise_stand_above_the_tables():
    text = terminal(record())
    above = text[: text.index("digits-cnn · Speed")]
    for words in ("Xeon", "24.0 GiB", "torch 2.15.0", "bfloat16 490 GFLOP/s", "A/A controls"):
        assert words in above, words


def test_evidence_is_compact_and_covers_all_tasks():
    flat = " ".join(terminal(record()).split())
    assert "TensorFlow bf16 convolution: bfloat16 9; matmul: bfloat16 3–4" in flat
    assert "PyTorch bf16 ÷" not in flat[flat.index("Took effect") :]


def test_the_largest_difference_of_losses_in_any_block_is_shown():
    results = record()
    one, other = (case(results, f"digits-cnn-64/{side}/bf16") for side in ("pt", "tf"))
    one["blocks"][0]["losses"][3] *= 1.0002
    one["blocks"][5]["losses"][3] *= 1.01
    said = "bf16 4 of 4 pairs match; losses apart by at most 1.0e-02"
    assert said in " ".join(terminal(results).split())
    twin = copy.deepcopy(other) | {"id": "the same program", "variant": "same"}
    results["cases"].append(twin)
    other |= {"program": twin["id"], "blocks": []}  # what it shows is the other's
    assert said in " ".join(terminal(results).split())


def test_what_differs_by_design_is_listed():
    for text in (terminal(record()), markdown(record())):
        assert "- PyTorch casts per operator (autocast); Keras per layer (dtype policy)." in text


def test_quick_run_says_so_and_gives_no_interval_or_verdict():
    for text in (terminal(record("quick")), markdown(record("quick"))):
        assert "PROVISIONAL: one block, no intervals, no verdicts." in " ".join(text.split("!!"))
        assert "one block, no interval" in " ".join(text.split())
        body = text[text.index("Speed") : text.index("Differs by design")]
        body = body.replace("the first is faster", "").replace("margin ±", "")
        assert not re.search("faster|slower|equivalent|inconclusive|noisy|±|interval", body)
        assert "noisy" not in text  # nor does the legend speak of them
    assert "PROVISIONAL" not in terminal(record()) + markdown(record())


def test_the_first_pass_of_a_run_is_as_provisional_as_a_quick_one():
    first = record("quick") | {"effort": "default", "finished": False}
    assert "PROVISIONAL: one block" in " ".join(terminal(first).split())
    shown = terminal(first).partition("\ntwinbench\n")[0]
    assert ": bf16: 1.78x, one block, no interval" in shown
    assert not re.search(r"\d–\d", shown)  # no interval
    assert "* " not in shown.replace("*: ", "")  # nor anyone ahead


def test_baselines_alone_of_one_block_are_provisional_too():
    run = record("quick") | {"effort": "default", "comparisons": []}
    run["cases"] = [each for each in run["cases"] if each["role"] == "baseline"]
    assert "PROVISIONAL: one block" in " ".join(terminal(run).split())


@pytest.mark.parametrize(
    ("ended", "words"),
    [
        (None, "NOT FINISHED: the run goes on, or was cut short."),
        ("minutes", "ENDED IN TIME (--minutes): intervals hold"),
        ("interrupted", "INTERRUPTED: intervals hold"),
    ],
)
def test_a_run_that_is_not_finished_says_why(ended, words):
    results = record() | {"finished": False, "ended": ended}
    for text in (terminal(results), html_page.html(results)):
        assert words in " ".join(text.replace("!! ", "").split())
    assert words in " ".join(markdown(results).split())
    assert words not in markdown(record())


def test_variants_have_their_titles_beside_their_names():
    results = record()
    for found in results["cases"]:
        if found["variant"] == "bf16":
            found["title"] = "bfloat16 wherever autocast has it"
    for text in (markdown(results).replace("**", ""), html_page.html(results)):
        assert "bf16: bfloat16 wherever autocast has it" in text or (
            "<dt>bf16</dt><dd>bfloat16 wherever autocast has it</dd>" in text
        )
    assert re.search("bf16 +bfloat16 wherever autocast has it", terminal(results))
    assert "PT* bfloat16 wherever autocast has it: 1." in " ".join(terminal(results).split())


def test_rows_of_one_program_show_the_figures_of_the_one_that_was_measured():
    """Another technique's fp32 is the same program: one row of the decisions, and a note."""
    results = record()
    source = case(results, "digits-cnn-64/pt/fp32")
    shown = json.loads(json.dumps(source)) | {"technique": "clipping", "variant": "plain"}
    shown["program"] = source["id"]
    shown |= {"id": "clipping/digits-cnn-64/pt/plain", "title": "no clipping"}
    shown["timing"]["step_s"] = {}
    results["cases"].append(shown)
    results["techniques"]["clipping"] = {"title": "Clipping", "notes": []}
    (work,) = [w for w in decided(results) if (w.batch_size, w.kind) == (64, "train")]
    (row,) = [o for o in work.options if o.case["id"] in (source["id"], shown["id"])]
    assert row.case["id"] == source["id"]
    assert [each.case["id"] for each in row.repeats] == [shown["id"]]
    assert "plain is the same program as fp32 of mixed_precision" in markdown(results)
    lines = {line["id"]: line for line in csv.DictReader(io.StringIO(csv_export.csv_text(results)))}
    assert lines[shown["id"]]["blocks"] == lines[source["id"]]["blocks"] == "8"
    assert lines[shown["id"]]["program"] == source["id"]


def test_a_busy_machine_is_warned_of():
    assert "BUSY" not in terminal(record())
    results = record()
    results["environment"]["load"] = 9.22
    for text in (terminal(results), markdown(results)):
        assert "BUSY MACHINE: load 9.2 on 4 cores before the run." in text
    quiet = {"others": 0.01, "stolen": None}
    results["blocks"] = [quiet, quiet | {"others": None}]
    assert "BUSY" not in terminal(results)  # while steps were timed nothing else ran
    results["blocks"] += [quiet | {"others": 0.2}, quiet | {"stolen": 0.1}]
    said = " ".join(markdown(results).split())
    assert "BUSY MACHINE: in 2 of 3 blocks other programs took more than 5% of the cores" in said


def test_limited_instructions_are_told_beside_the_machine():
    results = record()
    results["environment"]["isa_limits"] = {"ONEDNN_MAX_CPU_ISA": "AVX2"}
    for text in (terminal(results), markdown(results)):
        assert "limited by ONEDNN_MAX_CPU_ISA AVX2" in " ".join(text.split())


def test_missing_figures_are_dashes_and_never_zero():
    results = record()
    bare = case(results, "digits-cnn-64/pt/bf16")
    bare["timing"] = {"cold_first_call_s": None, "warm_first_call_s": nan, "step_s": {}}
    bare |= {"memory": None, "metrics": {}, "accuracy": None, "certificate": None}
    bare["evidence"] = None
    results["noise_floor"] = {}
    results["environment"] = {}
    for text in (terminal(results), markdown(results)):
        assert not re.search(r"\bnan\b|\bNone\b|\binf\b", text)
    rows = [
        row(terminal(results), f"digits-cnn · {title}", 64, "bf16")
        for title in ("Speed", "First call", "Accuracy")
    ]
    assert [line.split()[1] for line in rows] == [DASH] * 3


def test_a_run_without_any_figure_still_reports():
    results = record() | {"cases": [], "comparisons": [], "techniques": {}, "finished": False}
    assert "NOT FINISHED" in terminal(results)
    assert markdown_tables(markdown(results))[0][0][0] == "framework"


def only(folder, technique):
    """What a run of one technique by name shows: its rows of a published record."""
    results = load(ROOT / folder)
    results["cases"] = [c for c in results["cases"] if c["technique"] == technique]
    ids = {c["id"] for c in results["cases"]}
    every = results["comparisons"]
    results["comparisons"] = [c for c in every if {c["numerator"], c["denominator"]} <= ids]
    return results


def first_screen(results):
    return " ".join(answered(results, 80).split())


@pytest.mark.parametrize(
    ("folder", "technique"), [("docs/recipes", "checkpoints"), ("docs", "batch_size_finder")]
)
def test_where_no_aim_has_a_figure_the_terminal_does_not_say_that_nothing_gained(folder, technique):
    said = first_screen(only(folder, technique))
    assert "no row beside the baselines has a figure that an aim asks for" in said
    assert "gain over its own baseline" not in said


def test_a_star_is_explained_where_nothing_gains_too():
    names = "feature_distillation", "discrepancy"
    starred, plain_one = (first_screen(only("docs", name)) for name in names)
    assert "Nothing was shown to gain" in starred
    assert "Nothing was shown to gain" in plain_one
    assert "PT* the one tried was not shown" in starred
    assert "*: plain code is ahead." in starred
    assert "*" not in plain_one


def test_a_gain_that_was_measured_once_says_why_it_is_not_shown():
    said = first_screen(only("docs", "gradient_accumulation"))
    assert re.search(r"not shown to take less; 4 micro- batches: \d+% less, measured once", said)
    assert re.search(r"batches: [\d.]+ times the time \([\d.–]+\) TF", said)


def test_the_terminal_keeps_to_narrower_and_wider_screens():
    for width in (60, 72, 100, 200):
        widest = max(map(columns, terminal(record(), width=width).splitlines()))
        assert widest <= width
    assert "bf16_fp32_head  0.456 (0.447–0.465)" in terminal(record())  # nothing wraps at 80


# Nothing in a record can harm it -----------------------------------------------------------------

HOSTILE = [
    "a | b",
    "two\nlines\r\nand more",
    "<script>alert(1)</script> &amp; <!-- table:end -->",
    "\x1b[31mred\x1b[0m\x07\x00 \x9b2J",
    "**bold** _it_ `code` ~~gone~~ [text](javascript:x) ![i](x)",
    "# title",
    "- item",
    "1. item",
    "---",
    "back\\slash \\| $x$ {{ command }} {% raw %}",
    "right-to-left \u202e and zero\u200bwidth \ud800",
    "漢字かな交じり文" * 12,
    "x" * 300,
    "",
]


def renamed(name: str) -> dict:
    """The record with `name` as a variant, a title, a task, a reason and a version."""
    text = json.dumps(record())
    results = json.loads(text)
    for entry in results["cases"] + results["comparisons"]:
        entry["task"] = name if entry["task"] == "text-gpt" else entry["task"]
        entry["variant"] = name if entry["variant"] == "bf16" else entry["variant"]
        entry["reason"] = name if entry["reason"] else None
    results["cases"][0]["evidence"] = {name: {name: 3}}
    results["techniques"]["mixed_precision"] |= {"title": name, "notes": [name, "plain"]}
    results["techniques"]["mixed_precision"]["differs_by_design"] = [name]
    results["environment"] |= {"cpu": name, "isa": [name], "packages": {"pt": {name: name}}}
    results["noise_floor"]["controls"][0] |= {"task": name, "verdict": name}
    results["command"] = name
    return results


@pytest.mark.parametrize("name", HOSTILE, ids=range(len(HOSTILE)))
def test_terminal_neutralises(name):
    text = terminal(renamed(name))
    assert all(c.isprintable() or c == "\n" for c in text)
    assert max(map(columns, text.splitlines())) <= 80
    text.encode()


@functools.cache
def shapes_of_a_plain_name() -> list[list[int]]:
    """How many cells each row of each table has."""
    return [list(map(len, table)) for table in markdown_tables(markdown(renamed("plain")))]


@pytest.mark.parametrize("name", HOSTILE, ids=range(len(HOSTILE)))
def test_markdown_shows_names_literally(name):
    text = markdown(renamed(name))
    allowed = {"text", "strong_open", "strong_close"}
    for token in tokens(text):
        assert token.type not in ("html_block", "code_block", "fence", "hr")
        for child in token.children or []:
            assert child.type in allowed, (child.type, token.content)
            assert not child.attrs
    shapes = [list(map(len, table)) for table in markdown_tables(text)]
    assert shapes == shapes_of_a_plain_name()
    bullets = [t.level for t in tokens(text) if t.type == "list_item_open"]
    assert set(bullets) == {1}
    text.encode()


def test_markdown_escape_gives_the_text_back():
    for name in HOSTILE:
        (inline,) = [t for t in tokens(f"- x {escape(name)}") if t.type == "inline"]
        assert "".join(c.content for c in inline.children) == f"x {plain(name)}".strip()


words = st.text(max_size=60) | st.sampled_from(HOSTILE)
finite = st.floats(-1e90, 1e90) | st.integers(-(10**12), 10**12)
numbers = st.none() | finite
pairs = st.none() | st.lists(finite, min_size=2, max_size=2)
above_zero = st.floats(1e-9, 1e9)
times = st.none() | above_zero
bounds = st.none() | st.lists(above_zero, min_size=2, max_size=2)
trees = st.recursive(
    st.none() | st.booleans() | words | numbers,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(words, inner, max_size=3),
    max_leaves=6,
)
tasks = st.sampled_from(["digits-cnn", "text-gpt", "a | b\n"])
variants = st.sampled_from(["fp32", "bf16"]) | words
batches = st.sampled_from([4, 64, 10**9])


@st.composite
def cases(draw) -> dict:
    framework, variant = draw(st.sampled_from(["pt", "tf", "jax"])), draw(variants)
    task, batch = draw(tasks), draw(batches)
    difference = st.fixed_dictionaries({"mean": numbers, "ci": pairs, "verdict": st.none() | words})
    accuracy = st.fixed_dictionaries(
        {"metric": words, "mean": numbers, "ci": pairs, "difference": st.none() | difference}
    )
    parts = ("import", "build", "steady_peak", "parameters", "gradients", "optimizer", "rest")
    device = st.none() | st.fixed_dictionaries({"allocated": numbers, "reserved": numbers})
    memory = st.fixed_dictionaries(
        {f"{part}_bytes": numbers for part in parts} | {"device_peak": device}
    )
    loose = st.none() | st.lists(numbers, min_size=2, max_size=2)
    value = st.fixed_dictionaries({"value": numbers, "unit": words, "ci": loose})
    metrics = ("samples_per_s", "share_of_peak", "cold_first_calls_s", "break_even_steps", "peak")
    timing = ("cold_first_call_s", "warm_first_call_s", "median_s")
    return {
        "id": f"x/{task}-{batch}/{framework}/{variant}",
        "technique": "x",
        "framework": framework,
        "flavour": draw(st.sampled_from([None, "keras3", "tf_keras"])),
        "variant": variant,
        "role": draw(st.sampled_from(["baseline", "variant", "control"])),
        "task": task,
        "batch_size": batch,
        "status": draw(st.sampled_from(["OK", "OK", "FAILED", "NOT_APPLIED", "UNSUPPORTED"])),
        "reason": draw(st.none() | words),
        "timing": {name: draw(times) for name in timing} | {"ci_s": draw(bounds), "step_s": {}},
        "memory": draw(st.none() | memory),
        "accuracy": draw(st.none() | accuracy),
        "artifact_bytes": draw(numbers),
        "metrics": {name: draw(value) for name in metrics},
        "certificate": draw(st.none() | st.fixed_dictionaries({"losses": st.lists(numbers)})),
        "evidence": draw(st.none() | st.dictionaries(words, trees, max_size=3)),
    }


@st.composite
def records(draw) -> dict:
    found = draw(st.lists(cases(), max_size=6))
    ids = st.sampled_from([c["id"] for c in found] + ["gone"])
    comparisons = st.fixed_dictionaries(
        {
            "technique": st.just("x"),
            "variant": variants,
            "task": tasks,
            "batch_size": batches,
            "kind": st.sampled_from(["framework", "baseline", "control"]),
            "numerator": ids,
            "denominator": ids,
            "ratio": times,
            "ci": bounds,
            "sd": st.none() | st.floats(0, 10),
            "n": st.none() | st.integers(1, 20),
            "verdict": st.none() | st.sampled_from(["faster", "not comparable"]) | words,
            "reason": st.none() | words,
        }
    )
    control = st.fixed_dictionaries({"framework": words, "task": words, "ratio": times})
    return {
        "schema_version": 3,
        "command": draw(words),
        "effort": draw(st.sampled_from(["quick", "default"])),
        "started": draw(words),
        "finished": draw(st.booleans()),
        "environment": draw(
            st.dictionaries(
                st.sampled_from(["cpu", "isa", "gpu", "driver", "peak_flops", "load", "seeds"]),
                trees,
            )
        ),
        "noise_floor": {"controls": draw(st.lists(control, max_size=2))},
        "techniques": {"x": {"title": draw(words), "notes": draw(st.lists(words, max_size=2))}},
        "tasks": {"digits-cnn": TASKS["digits-cnn"], "text-gpt": {}},
        "cases": found,
        "comparisons": draw(st.lists(comparisons, max_size=4)),
    }


@settings(max_examples=40, deadline=None)
@given(records(), st.sampled_from([80, 80, 60, 120]))
def test_any_record_fits_the_terminal_and_makes_whole_tables(results, width):
    check(results)
    text = terminal(results, width=width)
    for line in text.splitlines():
        assert columns(line) <= width, line
    assert all(c.isprintable() or c == "\n" for c in text)
    found = markdown(results)
    tables = markdown_tables(found)
    for table in tables:
        assert len({len(line) for line in table}) == 1
    bars = sum(line.startswith("|") for line in found.splitlines())
    assert bars == sum(len(table) + 1 for table in tables)
    for made in (found, html_page.html(results), csv_export.csv_text(results)):
        made.encode()


@given(st.text(alphabet=st.characters() | st.sampled_from(" -/")), st.integers(2, 40))
def test_wrap_loses_nothing_but_blanks(text, width):
    text = plain(text)
    lines = wrap(text, width)
    assert "".join(lines).replace(" ", "") == text.replace(" ", "")
    assert all(columns(line) <= width for line in lines)


def test_wrap_breaks_after_a_hyphen_and_never_within_a_number():
    assert wrap("sub-model scikit-learn", 10) == ["sub-model", "scikit-", "learn"]
    assert wrap("+1 -1.5", 5) == ["+1", "-1.5"]
    assert wrap("9 samples/s", 10) == ["9", "samples/s"]
    assert wrap("micro_4_statistics_once", 15) == ["micro_4_", "statistics_once"]
    assert wrap("12.5 (11.3–13.8)", 11) == ["12.5", "(11.3–13.8)"]
    assert wrap("(0.0246–0.0287)", 11) == ["(0.0246–", "0.0287)"]


# Figures -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"),
        (5.2345, "5.23"),
        (0.021, "0.0210"),
        (99.96, "100"),
        (12345, "12,300"),
        (-0.5, "-0.500"),
        (1e-7, "1.00e-07"),
        (3.1e9, "3.10e+09"),
        (None, DASH),
        (nan, DASH),
        (inf, DASH),
        (True, DASH),
        ("5", DASH),
    ],
)
def test_number(value, text):
    assert figures.number(value) == text


def test_interval_has_the_decimals_of_its_estimate():
    assert figures.interval([9.876, 10.234], like=9.99) == "9.88–10.23"
    assert figures.interval([None, 1.0]) == DASH


def test_plus_minus_rounds_to_the_interval():
    assert figures.plus_minus(97.3123, [97.07, 97.55]) == "97.31 ± 0.24"
    assert figures.plus_minus(2.10512, [2.10312, 2.10712]) == "2.1051 ± 0.0020"
    assert figures.plus_minus(0.2, None, signed=True) == "+0.20"
    assert figures.plus_minus(0.0, [0.0, 0.0]) == "0.00 ± 0.00"
    assert figures.plus_minus(None, [1.0, 2.0]) == DASH


def test_compact_and_merge():
    proofs = [{"dtypes": {"matmul": {"bfloat16": 3}}, "retraces": 0}, {"retraces": 2, "ok": True}]
    assert figures.compact(merge(proofs)) == "dtypes: matmul: bfloat16 3 · retraces 0–2 · ok yes"
    assert figures.compact({}) == figures.compact(None) == figures.compact("") == DASH


# Reading and writing -----------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path) -> Path:
    (tmp_path / "results.json").write_text(json.dumps(record()), "utf-8")
    return tmp_path


def test_load_takes_the_file_or_its_folder(folder):
    assert load(folder) == load(str(folder / "results.json")) == complete(record())


def broken(**changes) -> str:
    return json.dumps(record() | changes)


def edited(part: str, **changes) -> str:
    """The record with fields of a part of its first case changed."""
    results = record()
    results["cases"][0][part] |= changes
    return json.dumps(results)


def nested(levels: int) -> list:
    return [nested(levels - 1)] if levels else []


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (json.dumps(record())[:-40], "not JSON, or cut off"),
        ("", "not JSON, or cut off"),
        ("[" * 100_000, "not JSON, or cut off"),
        ("[1, 2]", "not a record of twinbench"),
        ('{"machine_info": {}, "benchmarks": []}', "not a record of twinbench"),
        (broken(schema_version=4), "schema 4 is newer than 3"),
        (broken(schema_version=2), "schema 2 is older than 3"),
        (broken(schema_version=True), "not a record of twinbench"),
        (broken(cases={}), "the record: cases is no list"),
        (broken(cases=[7]), "case 0 is no JSON object"),
        (broken(cases=[{"id": "x"}]), "case 0 has no technique"),
        (broken(comparisons=[{}]), "comparison 0 has no technique"),
        (broken(techniques={"x": 3}), "techniques 'x' is no JSON object"),
        (broken(finished="yes"), "finished is no yes or no"),
        (broken(environment={"cpu": nan}), "not JSON"),
        (broken(environment={"cpu": nested(50)}), "nested more than 30 levels deep"),
        (edited("timing", median_s="fast"), "case 0: timing: median_s is not a number above 0"),
        (edited("timing", ci_s=[0.1]), "case 0: timing: ci_s is no pair"),
        (edited("timing", step_s={"x": {"0": [0.1]}}), "step_s: x, 0: no numbers"),
        (edited("timing", step_s={"0": {"0": [1e300]}}), "is not a number above 1e-10 up to"),
        (broken(looks=[5, 3]), "looks are not 10 rising numbers"),
        (edited("memory", steady_peak_bytes=True), "memory: steady_peak_bytes is not a number"),
        (edited("metrics", samples_per_s=7), "metrics 'samples_per_s' is no JSON object"),
        (edited("certificate", losses=None), "certificate: losses is no list"),
    ],
)
def test_a_record_that_is_none_gives_one_clear_line(folder, text, message):
    (folder / "results.json").write_text(text, "utf-8")
    with pytest.raises(ValueError, match=re.escape(message)) as error:
        load(folder)
    assert str(folder / "results.json") in str(error.value)
    assert len(str(error.value).splitlines()) == 1


def test_load_says_what_is_not_there_or_no_text(folder):
    with pytest.raises(ValueError, match="there is no record; a run writes one: pytest bench/"):
        load(folder / "nothing.json")
    (folder / "results.json").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ValueError, match="not JSON"):
        load(folder)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_reports_are_made_again_from_the_record_alone(folder):
    for name in FORMATS.values():
        (folder / name).write_text("old")
    assert write_reports(folder) == [folder / name for name in FORMATS.values()]
    assert (folder / "report.md").read_text("utf-8") == markdown(record())
    assert (folder / "report.html").read_text("utf-8") == html_page.html(record())
    assert (folder / "tables.csv").read_text("utf-8") == csv_export.csv_text(record())
    assert names(folder) == ["report.html", "report.md", "results.json", "tables.csv"]


@pytest.mark.parametrize("name", FORMATS.values())
def test_a_report_that_cannot_be_written_leaves_nothing_half(folder, name):
    (folder / name).mkdir()
    with pytest.raises(ValueError, match=f"{re.escape(name)}: cannot be written"):
        write_reports(folder, [key for key, file in FORMATS.items() if file == name])
    assert names(folder) == sorted([name, "results.json"])


def test_old_reports_stay_where_a_record_is_none(folder):
    write_reports(folder)
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    whole = (folder / "results.json").read_text("utf-8")
    (folder / "results.json").write_text(whole[: len(whole) // 2], "utf-8")
    with pytest.raises(ValueError, match="cut off"):
        write_reports(folder)
    after = {path.name: path.read_bytes() for path in folder.iterdir()}
    assert after.pop("results.json") != before.pop("results.json")
    assert after == before


def test_command_line_as_users_run_it(folder):
    run = functools.partial(workers.parent("commands").run, "bench", "report")

    made = run(str(folder))
    paths = [str(folder / name) for name in FORMATS.values()]
    assert (made.returncode, made.stdout.split()) == (0, paths)
    assert all(Path(path).is_file() for path in paths)
    failed = run(str(folder / "nothing"))
    assert failed.returncode == 2
    assert failed.stderr.count("\n") == 1
    assert "Traceback" not in failed.stderr


def test_every_figure_is_made_again_from_what_was_measured(tmp_path):
    published = load(ROOT / "docs")
    wrong = copy.deepcopy(published)
    for comparison in wrong["comparisons"]:
        comparison["ratio"] *= 2
    (tmp_path / "results.json").write_text(json.dumps(wrong), "utf-8")
    assert command.main([str(tmp_path), "--derive", "--format", "csv"]) == 0
    assert alike(load(tmp_path), published)


def alike(ours, theirs) -> bool:
    """The same but for last digits: each CPU's instructions add up in an order of their own."""
    if isinstance(theirs, dict):
        return ours.keys() == theirs.keys() and all(alike(ours[k], theirs[k]) for k in theirs)
    if isinstance(theirs, list):
        return len(ours) == len(theirs) and all(map(alike, ours, theirs))
    if isinstance(theirs, float) and theirs == theirs:
        return isclose(ours, theirs, rel_tol=1e-9)
    return ours == theirs


def test_a_reader_that_has_seen_enough_ends_a_command_quietly(folder):
    line = [sys.executable, "-m", "bench", "report", str(folder), "--format", "terminal"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(line, cwd=ROOT, **pipes) as reported:
        reported.stdout.close()
        assert reported.stderr.read() == b""
        assert reported.wait() == 0


@pytest.mark.parametrize(("name", "file"), FORMATS.items())
def test_one_format_writes_one_file(folder, capsys, name, file):
    assert command.main([str(folder), "--format", name]) == 0
    assert capsys.readouterr().out.strip() == str(folder / file)
    assert names(folder) == sorted([file, "results.json"])


def test_terminal_format_prints_the_tables(folder, capsys):
    assert command.main([str(folder), "--format", "terminal"]) == 0
    assert capsys.readouterr().out == terminal(record())
    assert names(folder) == ["results.json"]


# README ------------------------------------------------------------------------------------------


@pytest.fixture
def page(folder) -> Path:
    path = folder / "README.md"
    path.write_text(f"# Title\n\n{readme.BEGIN}\nold\n{readme.END}\n\nThe rest.\n", "utf-8")
    return path


def test_readme_gets_a_chart_conclusions_and_decisions(folder, page):
    check = [str(folder), "--readme", str(page), "--check"]
    assert command.main(check) == 1
    assert "old" in page.read_text("utf-8")
    assert command.main(check[:-1]) == 0
    text = page.read_text("utf-8")
    assert text.startswith("# Title\n\n<!-- table:begin -->\nMeasured on a CPU, no GPU: Intel(R)")
    assert text.endswith("<!-- table:end -->\n\nThe rest.\n")
    decided, more = markdown_tables(text)
    assert decided[0] == more[0] == ["to", "PyTorch", "TensorFlow", "ahead"]
    aims = [row[0].partition(",")[0] for row in decided[1:]]
    assert "train faster: digits-cnn" in aims
    (row,) = [row for row in decided if row[0].startswith("train faster: digits-cnn")]
    assert re.match(r"bf16: 1\.\d\dx \(\d\.\d\d–\d\.\d\d\)", row[1])
    assert text.count("<details>") == text.count("</details>") == 1
    for scheme in ("light", "dark"):
        drawn = ElementTree.fromstring((folder / f"docs/gains-{scheme}.svg").read_text("utf-8"))
        assert "mixed precision" in "".join(drawn.itertext())
    assert command.main(check) == 0
    (folder / "docs" / "gains-dark.svg").write_text("another chart")
    assert command.main(check) == 1


def numbers_of(run: dict) -> set[str]:
    """Every ratio, either way round, and time of a record, as README.md writes them."""
    ratios = [r for c in run["comparisons"] if c["ratio"] for r in (c["ratio"], 1 / c["ratio"])]
    found = set(map(figures.number, ratios))
    for each in run["cases"]:
        if each["timing"] and each["timing"]["median_s"]:
            found.add(figures.number(1e3 * each["timing"]["median_s"]))
        base = baseline(each, run["cases"])
        rates = [
            (c["metrics"] or {}).get("samples_per_s", {}).get("value") for c in (each, base or each)
        ]
        if all(rates):  # what is not timed has the ratio of its rates
            found.add(figures.number(rates[0] / rates[1]))
    return found


def test_every_ratio_in_readme_is_in_its_records():
    text = (ROOT / "README.md").read_text("utf-8")
    between = text.partition(readme.BEGIN)[2].partition(readme.END)[0]
    known = numbers_of(load(ROOT / "docs"))
    sides = "".join(line.rpartition(" | ")[0] for line in between.splitlines())  # but who is ahead
    ratios = re.findall(r"([\d.]+)x[ ,]", sides)
    assert len(ratios) > 5
    assert set(ratios) <= known


def test_large_models_are_said_to_show_arithmetic():
    results = record()
    assert "show overhead" not in markdown(results)
    for found in results["cases"]:
        if found["task"] == "text-gpt":
            found["task"] = "text-gpt-10m"
    results["tasks"]["text-gpt-10m"] = results["tasks"]["text-gpt"]
    text = markdown(results)
    assert "small models show overhead, large ones arithmetic: the tables show both." in text
    assert "text-gpt-10m, batch 16, train step: 11 million parameters" in text


def test_readme_draws_five_conclusions_at_most():
    text = (ROOT / "README.md").read_text("utf-8")
    between = text.partition(readme.BEGIN)[2].partition(readme.END)[0]
    assert 1 <= between.count("\n- ") <= 5
    assert "no GPU" in between


def test_baselines_that_another_machine_turns_round_are_named():
    """The pair that parts the most; of techniques, which part even more, none."""
    here, there = record(), record()
    for found in there["comparisons"]:
        if found["kind"] == "framework":
            turned = {"faster": "slower", "slower": "faster"}
            ratio = 2.5 if found["task"] == "text-gpt" else 1.5
            found |= {"verdict": turned.get(found["verdict"]), "ci": None}
            found["ratio"] = ratio if found["variant"] == "fp32" else 9.0
    (said,) = (each for each in readme.conclusions([here], there) if "Another CPU" in each)
    assert re.search(r"is 0\.856 .*here for fp32 of text-gpt, batch 16, and 2\.5", said)
    assert not any("Another CPU" in each for each in readme.conclusions([here], here))


def test_readme_says_how_long_its_run_took():
    run = record() | {"seconds": {"total": 3010.0, "first_table": 290.0}}
    run["environment"] |= {"logical_cores": 6}
    said = "The run took 50 minutes on 6 cores: a first table after 5"
    assert f"{said}." in readme.headline([run])
    run["seconds"]["intervals"] = 1090.0
    assert f"{said}, all times with intervals after 18." in readme.headline([run])
    run["seconds"]["first_table"] = None
    assert "The run took" not in readme.headline([run])


def test_a_row_of_readme_links_its_technique_and_says_what_its_gain_is_over():
    """Of our own, which another test holds to its record."""
    said = (ROOT / "README.md").read_text("utf-8")
    pages = re.findall(r"\]\((docs/techniques/\S+\.md)\)", said)
    assert len(pages) > 20
    assert all((ROOT / page).is_file() for page in pages)
    rows = {line.split("|")[1].strip(): line for line in said.splitlines() if line[:4] == "| **"}
    quantized = rows["**predict faster**: digits-cnn, batch 128, 33 thousand parameters"]
    assert quantized.count("over “float32 file”") == 2
    proven = "**train in less memory**: text-gpt-dropout, batch 16, 2.4 million parameters"
    assert rows[proven].count("same work, proven on text-gpt-10m") == 2
    plain = rows["**train faster**: text-gpt-10m, batch 2, 11 million parameters"]
    assert "over" not in plain


def test_no_name_in_a_record_breaks_the_markers_of_readme(page):
    text = page.read_text("utf-8")
    expected = readme.with_tables(text, [record()])
    for name in HOSTILE:
        once = readme.with_tables(text, [renamed(name)])
        assert readme.with_tables(once, [record()]) == expected


def test_readme_of_a_quick_run_says_so(page):
    assert "PROVISIONAL" in readme.with_tables(page.read_text("utf-8"), [record("quick")])


@pytest.mark.parametrize(
    ("text", "message"),
    [("no markers", "no text between"), (f"{readme.END} {readme.BEGIN}", "no text between")],
)
def test_readme_without_markers_is_left_alone(folder, page, capsys, text, message):
    page.write_text(text, "utf-8")
    assert command.main([str(folder), "--readme", str(page)]) == 2
    assert message in capsys.readouterr().err
    assert page.read_text("utf-8") == text


def test_readme_needs_a_technique_that_ran(page):
    results = record() | {"cases": []}
    with pytest.raises(ValueError, match="no technique that ran"):
        readme.with_tables(page.read_text("utf-8"), [results])


def test_our_own_readme_shows_the_committed_record():
    options = ["--readme", str(ROOT / "README.md"), "--check"]
    assert command.main([str(ROOT / "docs"), *options]) == 0


@pytest.mark.parametrize(
    "record", sorted((ROOT / "docs").rglob("results.json")), ids=lambda path: path.parent.name
)
def test_a_published_report_is_what_its_record_gives(record):
    assert record.with_name("report.md").read_text("utf-8") == markdown(load(record))


# What a probe found -----------------------------------------------------------------------------


def probed(count: int) -> dict:
    """A record whose bf16 cases have `count` figures of a probe, the first of them repeated."""
    results = record()
    for found in results["cases"]:
        if found["variant"] == "bf16" and found["status"] == "OK":
            found["metrics"] |= {
                f"figure_{n}": {"value": 10.0 + n, "unit": "s", "ci": None, "samples": [n + 0.5]}
                for n in range(count)
            }
            found["metrics"]["figure_0"]["samples"] = [11.5, 8.25, 10.0]
    return results


@pytest.mark.parametrize("count", [2, 4, 5, 8, 20])
def test_figures_of_a_probe_fit_80_columns(count):
    """Side by side while they are few, else a line for each case, below each other if need be."""
    text = terminal(probed(count))
    assert max(map(columns, text.splitlines())) <= 80
    start = text.index("digits-cnn · Measured apart")
    table = text[start : text.index("text-gpt · Speed")]
    for n in range(count):
        assert len(re.findall(rf"(?<![\d.]){10 + n}\.0(?![\d.])", table)) >= 2, table  # both sides
    assert ("PyTorch ---" in table) == (count <= 4)


def test_many_figures_of_a_probe_break_no_word():
    results = probed(8)
    for found in results["cases"]:
        for number, name in enumerate(list(found["metrics"])):
            if name.startswith("figure_"):
                found["metrics"][f"unmistakable_{number}"] = found["metrics"].pop(name)
    text = terminal(results)
    table = text[text.index("digits-cnn · Measured apart") : text.index("text-gpt · Speed")]
    assert table.count("unmistakable") >= 8  # whole, in each head
    assert table.count("(continued)") >= 1
    parts = table.split("(continued)")
    assert all("bf16" in part and "framework" in part for part in parts)


def test_no_interval_is_broken_between_its_bounds():
    results = small()
    even = case(results, "digits-cnn-64/pt/bf16")["metrics"]["break_even_steps"]
    even |= {"value": 12_500.0, "ci": [11_300.0, 13_800.0]}
    text = terminal(results)
    table = text[text.index("digits-cnn · First call against") :].split("\n\n")[0]
    assert "(17.0–19.0)" in table
    assert "(11,300–13,800)" in table
    assert "(lowest–highest)" in table


def test_every_repetition_stands_in_the_report_alone():
    found = probed(5)
    text = markdown(found)
    assert text.count("11.5 8.25 10.0") >= 2
    assert text.count("figure 0 [s] |") >= 2
    assert "| figure 1 [s] | 1.5" not in text  # it was not repeated
    assert "Every repetition" not in terminal(found)
    assert "Every repetition" not in markdown(record())


def test_samples_a_second_by_batch_size_have_a_table_of_their_own():
    found = record()
    for case in found["cases"]:
        if case["variant"] == "bf16" and case["status"] == "OK":
            case["metrics"] |= {
                f"rate_{threads}_threads_batch_{size}": {
                    "value": 100.0 * threads + size,
                    "unit": "samples/s",
                    "ci": None,
                    "samples": [100.0 * threads + size],
                }
                for threads in (1, 2)
                for size in (1, 8, 64)
            }
    text = terminal(found)
    assert max(map(columns, text.splitlines())) <= 80
    table = block(text, "digits-cnn · Samples/s by batch size")
    (line, *_) = [line for line in table if "PyTorch" in line and " 2 " in line]
    assert line.split()[-4:] == ["2", "201", "208", "264"]
    assert "Measured apart" not in text
    assert "Samples/s by batch size" not in terminal(record())
