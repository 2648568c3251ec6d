"""The figures of one case, from what was measured of it."""

from __future__ import annotations

from statistics import fmean, median
from typing import Any

from bench.analysis import verdicts
from bench.analysis.accuracy import difference
from bench.analysis.bounds import confidence
from bench.analysis.pairing import good, program
from bench.analysis.values import is_number

LIFETIMES = (100, 1_000, 10_000)  # steps whose total time is given beside the first call's


def figure(
    value: float | None, unit: str | None, ci: list | None = None, samples: list | None = None
) -> dict:
    """A figure; without `ci` it is exact, or was measured once."""
    return {"value": value, "unit": unit, "ci": ci, "samples": samples}


def timing(case: dict, about: dict[str, Any]) -> dict:
    """First calls and the step's time."""
    step, ci = _time(case, about) if about["fit"] and good(case) else (None, None)
    return {
        "cold_first_call_s": _middle(cold["first_call_s"] for cold in case["cold_starts"]),
        "warm_first_call_s": _middle(block["first_call_s"] for block in case["blocks"]),
        "median_s": step,
        "ci_s": ci,
    }


def _time(case: dict, about: dict[str, Any]) -> tuple[float, list[float] | None]:
    looks = about["looks"]
    if looks:
        return about["fit"].time_at_looks(program(case), confidence(tuple(looks)))
    return about["fit"].time(program(case))


def _middle(values) -> float | None:
    """The median of what was measured."""
    found = [value for value in values if value is not None]
    return median(found) if found else None


def memory(case: dict) -> dict | None:
    """Medians over the cold starts; what each of them found stands in `samples`.

    What is above the imports is their mean, with its 95% interval where it was measured repeatedly.
    """
    starts = [_bytes(cold) for cold in case["cold_starts"]]
    if not starts:
        return None
    found = {name: _middle(start[name] for start in starts) for name in starts[0]}
    samples = {name: [start[name] for start in starts] for name in starts[0]}
    found |= {"device_peak": case["cold_starts"][0]["device_peak"], "samples": samples}
    known = [value for value in samples["above_import_bytes"] if value is not None]
    above = verdicts.t_interval(known) if known else None
    found["above_import_bytes"] = above and above.mean
    found["above_import_ci"] = [above.low, above.high] if above and above.n > 1 else None
    return found


def _bytes(cold: dict) -> dict[str, float | None]:
    found = dict(cold["memory"]) | {f"{name}_bytes": n for name, n in cold["parts"].items()}
    steady, start = found.get("steady_peak_bytes"), found.get("import_bytes")
    above = None if steady is None or start is None else steady - start
    rest = None if above is None else above - sum(cold["parts"].values())
    return found | {"rest_bytes": rest, "above_import_bytes": above}


def accuracy(case: dict, base: dict | None, tasks: dict, looks: list | None) -> dict | None:
    """The metric over seeds, and how far it is from the baseline's; no figure of it without all."""
    raw = case["accuracy"]
    if not raw:
        return None
    if not_finite(case):
        return {name: raw[name] for name in ("metric", "per_seed")} | dict.fromkeys(
            ("mean", "ci", "difference")
        )
    found = verdicts.t_interval(raw["per_seed"], confidence(tuple(looks)) if looks else 0.95)
    return {
        "metric": raw["metric"],
        "per_seed": raw["per_seed"],
        "mean": found.mean,
        "ci": None if found.low is None else [found.low, found.high],
        "difference": difference(case, base, tasks, looks),
    }


def not_finite(case: dict) -> str | None:
    """Why a case that was trained has no accuracy: training that diverges has no finite metric."""
    per_seed = (case["accuracy"] or {}).get("per_seed", ())
    seeds = [str(seed) for seed, value in enumerate(per_seed) if not is_number(value)]
    if not seeds:
        return None
    return f"accuracy not measured: the metric is not finite at seed {', '.join(seeds)}"


def certificate(case: dict) -> dict | None:
    """The first block's losses and weights."""
    first = next(iter(case["blocks"]), None)
    return first and {name: first[name] for name in ("losses", "weights_sha256")}


def artifact(case: dict) -> dict[str, dict]:
    """Size of what is deployed, as it is and compressed: of trained weights, if there are any.

    A file that a probe found is of the weights that it says.
    """
    probed = {n: case["probed"][n] for n in _SIZES if n in case["probed"]}
    if probed:
        return {name: figure(each["value"], "bytes") for name, each in probed.items()}
    given = case["trained_artifacts"]
    given = given or [c["artifact"] for c in case["cold_starts"][:1] if c["artifact"]]
    found = {}
    for name, key in _SIZES.items() if given else ():
        sizes = [each[key] for each in given]
        found[name] = figure(median(sizes), "bytes", samples=sizes if len(sizes) > 1 else None)
    return found


_SIZES = {"artifact": "bytes", "compressed_artifact": "compressed_bytes"}


def metrics(case: dict, base: dict | None, environment: dict, about: dict[str, Any]) -> dict:
    """Every other figure by name: derived, counted in the proof, and found by a probe.

    `about`: the work's fit, the comparison with `base`, and the run's looks at blocks and seeds.
    """
    counted = (case["evidence"] or {}).get("measured", {})
    found = _rates(case, environment, about) | artifact(case)
    found |= {name: figure(each["value"], each["unit"]) for name, each in counted.items()}
    found |= _lifetimes(case, base, about) | _seen_in_training(case, about["seed_looks"])
    found |= _energy(case, about["looks"])
    return found | {name: {"ci": None, **each} for name, each in case["probed"].items()}


def _seen_in_training(case: dict, looks: list | None) -> dict:
    """The mean over seeds of each figure; none where a seed has none, as it missed its target."""
    seeds, found = case["trained_metrics"], {}
    for name, first in seeds[0].items() if seeds else ():
        values = [seed[name]["value"] for seed in seeds]
        if not all(map(is_number, values)):
            found[name] = figure(None, first["unit"])
        else:
            mean = verdicts.t_interval(values, confidence(tuple(looks)) if looks else 0.95)
            ci = None if mean.low is None else [mean.low, mean.high]
            found[name] = figure(mean.mean, first["unit"], ci, values)
    return found


def _rates(case: dict, environment: dict, about: dict[str, Any]) -> dict:
    """Samples a second, and the share of the machine's best matrix product."""
    if not about["fit"] or not good(case):
        return {}
    step, ci = _time(case, about)
    edges = ci and ci[::-1]
    size, found = case["batch_size"], {}
    found["samples_per_s"] = figure(size / step, "samples/s", edges and [size / t for t in edges])
    peak = (environment.get("peak_flops") or {}).get(_main_dtype(case["evidence"]))
    if peak and case["flops"]:
        share = case["flops"] / peak
        found["share_of_peak"] = figure(share / step, "1", edges and [share / t for t in edges])
    return found


def _energy(case: dict, looks: list | None) -> dict:
    """Joules a step and a sample by the machine's counters: the mean of each block, over blocks."""
    blocks = [block.get("energy_j") for block in case["blocks"]]
    if not good(case) or not blocks or not all(blocks):
        return {}
    level = confidence(tuple(looks)) if looks else 0.95
    each = verdicts.t_interval([fmean(own) for own in blocks], level)
    ci = None if each.low is None else [each.low, each.high]
    size = case["batch_size"]
    return {
        "energy_per_step": figure(each.mean, "J", ci),
        "energy_per_sample": figure(each.mean / size, "J", ci and [edge / size for edge in ci]),
    }


def _main_dtype(evidence: dict | None) -> str | None:
    """The dtype in which most of the products and convolutions ran."""
    counts: dict[str, int] = {}
    for operators in (evidence or {}).get("operator_dtypes", {}).values():
        for dtype, count in operators.items():
            counts[dtype] = counts.get(dtype, 0) + count
    return max(counts, key=counts.get) if counts else None


def _lifetimes(case: dict, base: dict | None, about: dict[str, Any]) -> dict:
    """What the first call costs in the long run: totals of N steps, and the break-even.

    Only where the cold start was repeated. The break-even is the number of steps after which
    the slower first call is repaid by faster steps; its interval spans that of the ratio and
    the range of the cold starts, and has no upper end where it may never be.
    """
    first = [cold["first_call_s"] for cold in case["cold_starts"]]
    own, comparison = about["fit"], about["comparison"]
    if len(first) < 2 or not own or not good(case):
        return {}
    step, _ = own.time(program(case))
    found = {
        f"total_{count}_steps_s": figure(median(first) + (count - 1) * step, "s")
        for count in LIFETIMES
    }
    found["cold_first_calls_s"] = figure(median(first), "s", [min(first), max(first)], first)
    if base and base["cold_starts"] and comparison and comparison["verdict"] != "not comparable":
        usual = median(cold["first_call_s"] for cold in base["cold_starts"])
        extra = [median(first) - usual, min(first) - usual, max(first) - usual]
        each, _ = own.time(program(base))
        low, high = comparison["ci"] or (comparison["ratio"], comparison["ratio"])
        value, least, most = (
            max(0.0, more) / (each * (1 - ratio)) if ratio < 1 else None
            for more, ratio in zip(extra, (comparison["ratio"], low, high), strict=True)
        )
        found["break_even_steps"] = figure(value, "steps", [least, most])
    return found
