"""Energy: joules of the machine's own counters with intervals, and nothing where there are none."""

from pathlib import Path

import pytest

from bench.analysis.reading import view
from bench.harness import energy
from bench.harness.energy import Meter
from bench.report import tables, technique_tables
from bench.report.formatting import MISSING
from tests.harness.test_record import CHANGED, PLAIN, STEP_S, fill, nothing, times
from tests.records import find_case


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch):
    """No counter but those that a test makes."""
    monkeypatch.setattr(energy, "_nvml", dict)


def zone(powercap: Path, name: str, what: str, microjoules: int, end: int = 2**32) -> Path:
    folder = powercap / name
    folder.mkdir()
    (folder / "name").write_text(f"{what}\n")
    (folder / "max_energy_range_uj").write_text(f"{end}\n")
    (folder / "energy_uj").write_text(f"{microjoules}\n")
    return folder / "energy_uj"


def test_packages_and_memory_count_once(tmp_path):
    package, other = (zone(tmp_path, f"intel-rapl:{n}", f"package-{n}", 10) for n in (0, 1))
    core = zone(tmp_path, "intel-rapl:0:0", "core", 10)
    dram = zone(tmp_path, "intel-rapl:0:1", "dram", 10)
    again = zone(tmp_path, "intel-rapl-mmio:0", "package-0", 10)
    whole = zone(tmp_path, "intel-rapl:2", "psys", 10)
    meter = Meter(tmp_path)
    assert len(meter.names) == 3
    meter.start()
    for file in (package, other, core, dram, again, whole):
        file.write_text("2000010")
    assert meter.stop() == pytest.approx(3 * 2.0)


def test_a_counter_that_begins_again_is_read_right(tmp_path):
    file = zone(tmp_path, "intel-rapl:0", "package-0", 9_500_000, end=10_000_000)
    meter = Meter(tmp_path)
    meter.start()
    file.write_text("1500000")
    assert meter.stop() == pytest.approx(2.0)


@pytest.mark.parametrize("kind", ["none", "not ours to read", "no number", "gone"])
def test_where_no_counter_can_be_read_there_is_no_figure(tmp_path, kind):
    if kind != "none":
        file = zone(tmp_path, "intel-rapl:0", "package-0", 10)
    if kind == "not ours to read":
        file.unlink()
        file.mkdir()  # root may read whatever has no right to be read
    elif kind == "no number":
        file.write_text("-\n")
    meter = Meter(tmp_path)
    meter.start()
    if kind == "gone":
        assert meter.names
        file.unlink()
    else:
        assert meter.names == []
    assert meter.stop() is None


def joules(value: float):
    return times(1, energy_j=[value] * 30)


def test_joules_have_intervals_over_blocks():
    def noisy(index):
        return joules(2.0 + 0.1 * (index % 3))(index)

    made = fill(nothing(), {PLAIN: noisy, CHANGED: joules(0.5)}).record()
    plain, changed = (find_case(made, name).metrics for name in (PLAIN, CHANGED))
    assert changed["energy_per_step"].value == pytest.approx(0.5)
    assert changed["energy_per_sample"].value == pytest.approx(0.5 / 4)
    low, high = plain["energy_per_step"].ci
    assert 1.9 < low < plain["energy_per_step"].value < high < 2.2
    assert [4 * edge for edge in plain["energy_per_sample"].ci] == pytest.approx([low, high])
    assert low > STEP_S  # joules, not seconds
    others = [c for c in made.cases if c.id not in (PLAIN, CHANGED)]
    assert all("energy_per_step" not in c.metrics for c in others)

    seen, task = view(made, "made_up", "digits-cnn"), made.tasks["digits-cnn"]
    table = next(table for table in technique_tables.tables(seen, task) if table.name == "energy")
    cells = [cell for row in table.rows for cell in row[1:]]
    assert MISSING in cells
    assert "0.500 (0.500–0.500)" in cells
    assert "125 (125–125)" in cells  # mJ a sample
    assert "0.00" not in cells
    assert "Energy of processors" in tables.markdown(made)


def test_a_block_without_figures_is_no_reason_to_guess():
    def half(index):
        return joules(2.0)(index) if index % 2 else times(1)(index)

    made = fill(nothing(), {PLAIN: half}).record()
    assert "energy_per_step" not in find_case(made, PLAIN).metrics
    assert "Energy of processors" not in tables.markdown(made)
