"""Runs and losses of accuracy that are simulated: how often something false is said."""

import json
from pathlib import Path

import numpy as np
import pytest

from bench.record import encode
from bench.validation import attacked, command, simulate
from bench.validation.replay import noise_of
from tests.validation.live import measurement
from tests.validation.sampled import record


@pytest.fixture
def few(monkeypatch):
    """Few draws, so that it does not take minutes."""
    monkeypatch.setattr(simulate.simulate, "__defaults__", (40,))


def test_losses_are_shown_as_often_as_intervals_promise():
    """Of normal noise: what Student's t says."""
    noise = list(np.random.default_rng(0).normal(size=20_000))
    rows = {row["lost"]: row for row in simulate.losses("digits-cnn", noise, 4, seed=1)}
    assert all(row["covered"] == pytest.approx(0.95, abs=0.02) for row in rows.values())
    assert rows[0.0]["worse"] == pytest.approx(0.025, abs=0.01)
    assert rows[1.0]["kept"] == pytest.approx(0.025, abs=0.01)  # a loss of exactly the margin
    shown = [row["worse"] for row in rows.values()]
    assert shown == sorted(shown)
    assert rows[10.0]["worse"] > 0.99


def test_losses_are_kept_and_shown(page):
    rows = simulate.losses("digits-cnn", [0.5, -0.5], 4, 0, 100)
    attacked.keep("losses", {"rows": rows, "seeds": 4, "runs": 100})
    assert "| small CNN on digits | 0.50 | 10 | 0.0% | 100.0% |" in page()


def test_it_prints_coverage_for_each_framework(few, tmp_path, capsys):
    (tmp_path / "validation.json").write_text(json.dumps(measurement()))
    assert command.main(["simulate", str(tmp_path / "validation.json")]) == 0
    printed = capsys.readouterr().out
    assert printed.count("intervals cover the truth in") == 2
    assert "true ratio 1.050:" in printed


def test_it_takes_the_noise_of_a_record(few, tmp_path, capsys):
    """Its deviation is that between blocks, whatever the ratios are."""
    run = record(sd=0.02)
    noise = noise_of(run)
    assert set(noise) == {"pt", "tf", "pt ÷ tf"}
    assert all(abs(np.mean(values)) < 1e-12 for values in noise.values())
    assert np.std(noise["pt ÷ tf"]) == pytest.approx(0.02 * 2**0.5, rel=0.3)
    (tmp_path / "results.json").write_bytes(encode(run))
    assert command.main(["simulate", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert "pt ÷ tf: noise sd" in printed
    assert 'wrong: at 1 "faster" or "slower" 0.0%; at the margin "slower"' in printed


def test_what_it_found_of_the_published_record_is_published(few, page, tmp_path, monkeypatch):
    (path := tmp_path / "results.json").write_bytes(encode(record(sd=0.02)))
    with pytest.raises(SystemExit, match="2"):  # since it is not the published one
        command.main(["simulate", str(path), "--publish"])
    monkeypatch.setattr(attacked, "PUBLISHED", Path(path).resolve())
    assert command.main(["simulate", str(path), "--publish"]) == 0
    assert "| PyTorch ÷ TensorFlow | 1.50 | 100.0% | 0.0% | 0.0% |" in page()


@pytest.mark.parametrize(
    "content", [[], {}, {"matches": [{}]}, {"matches": []}, measurement(blocks=0)]
)
def test_what_is_no_validation_is_refused(content, tmp_path, capsys):
    (tmp_path / "validation.json").write_text(json.dumps(content))
    with pytest.raises(SystemExit, match="2"):
        command.main(["simulate", str(tmp_path / "validation.json")])
    assert "validation.json" in capsys.readouterr().err
