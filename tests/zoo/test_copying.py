"""Each technique file, copied with what its head names and nothing else, runs elsewhere.

All of them in campaigns; else a few of each side. That heads name what their files import,
`tests/test_layout.py` looks at in every file.

The copies lie in folders of their own, and a process finds the project's packages there alone. It
applies them to a model of the zoo, on two processes or devices where they are parallel; loaders
read photos, and a diagnosis looks at a plain train step of such a model.
"""

from __future__ import annotations

import json
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from shared.bottlenecks import INPUT, SIZE
from shared.conversion import convert
from shared.growth import LEAK
from shared.photos import make_photos
from shared.profiles import COMPUTING, PARTS
from tests import workers
from tests.test_layout import SIDES, named_to_copy, technique_files
from tests.workers import ROOT
from tests.zoo import copied

# Small ones, compiled and quantized in little time; what refuses them is applied to others.
MODELS = {"pt": "wide_and_deep", "tf": "dict_heads"}
OTHERS = {"baseline": "conv1d_text", "memory_format": "dict_heads"}
FORMS = {"pt": "tar", "tf": "tfrecord"}
FEW = ("gradient_clipping", "structured_pruning", "schedules", "in_memory", "memory_growth")
FILES = {
    framework: sorted(
        (
            path.relative_to(ROOT)
            for path in technique_files(ROOT)
            if path.is_relative_to(ROOT / side) and (workers.campaign() or path.stem in FEW)
        ),
        key=lambda place: place.parts[1] != "parallel",  # first: PyTorch's processes are forked
    )
    for framework, side in zip(MODELS, SIDES, strict=True)
}
LOADER, LACKING = Path("pt_impl/input/in_memory.py"), Path("without what its head names")


@pytest.fixture(scope="module")
def sources(tmp_path_factory) -> dict[str, Path]:
    """What loaders read: a folder of photos, its shards, and arrays."""
    top = tmp_path_factory.mktemp("sources")
    found = {"photos": make_photos(top, images=6, size=64, seed=0)}
    for form in (*FORMS.values(), "arrays"):
        found[form] = top / form
        convert(found["photos"], found[form], form=form, workers=1)
    found["data"] = top / "data"
    found["data"].mkdir()
    np.save(found["data"] / "train_x.npy", np.zeros((8, 8, 8, 1), np.float32))
    np.save(found["data"] / "train_y.npy", np.arange(8))
    return found


def copy(place: Path, folder: Path) -> None:
    """Copy a file and what its head names."""
    for name in [place.as_posix(), *named_to_copy(ROOT / place)]:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, folder / name)


def asked(framework: str, place: Path, folder: Path, sources: dict[str, Path]) -> dict:
    """What the process is told of a copy."""
    found = {
        "folder": str(folder),
        "technique": place.stem,
        "module": ".".join(place.with_suffix("").parts),
    }
    forms = {"shards": FORMS[framework], "mapped_arrays": "arrays", "in_memory": "data"}
    if place.parts[1] == "input":
        return found | {"source": str(sources[forms.get(place.stem, "photos")])}
    if place.parts[1] == "parallel":
        return found | {"parallel": True}
    return found | {"model": OTHERS.get(place.stem, MODELS[framework])}


@pytest.fixture(scope="module")
def found(tmp_path_factory, sources) -> dict[Path, dict]:
    """What came of each copy; a process for each framework, both at once."""
    lines = {}
    for framework, places in FILES.items():
        lines[framework] = {}
        for place in places:
            folder = tmp_path_factory.mktemp(place.stem)
            copy(place, folder)
            lines[framework][place] = json.dumps(asked(framework, place, folder, sources))
    folder = tmp_path_factory.mktemp("lacking")
    copy(LOADER, folder)
    (folder / "shared" / "epochs.py").unlink()
    lines["pt"][LACKING] = json.dumps(asked("pt", LOADER, folder, sources))

    def came_of(framework: str) -> dict[Path, dict]:
        given = tmp_path_factory.mktemp(framework) / "lines"
        given.write_text("".join(f"{line}\n" for line in lines[framework].values()))
        done = workers.parent(framework).run("tests.zoo.copied", framework, given)
        assert done.returncode == 0, done.stderr[-3000:]
        return dict(zip(lines[framework], map(json.loads, done.stdout.splitlines()), strict=True))

    with ThreadPoolExecutor(len(FILES)) as pool:
        return {place: came for found in pool.map(came_of, FILES) for place, came in found.items()}


@pytest.mark.parametrize("place", [p for places in FILES.values() for p in places], ids=str)
def test_a_copy_runs_on_a_model_of_its_own(found, place):
    assert found[place]["status"] == "works", found[place]["reason"]
    if place.parts[1] == "parallel":
        together, alone = found[place]["losses"]
        assert together == pytest.approx(alone, rel=1e-5)
        assert not Path(found[place]["file"]).is_relative_to(ROOT)


@pytest.mark.campaign
@pytest.mark.parametrize("side", SIDES)
def test_a_copy_of_the_profiler_says_where_the_time_of_a_foreign_step_goes(found, side):
    """All of it, in three parts that compute; a loader that is late is waited for."""
    said = found[Path(side, "diagnosis", "profiling.py")]["said"]
    for one in said.values():
        assert sum(one[part] for part in PARTS) == pytest.approx(one["step"])
        assert min(one[part] for part in COMPUTING) > 0
        assert one["operators"]
    assert said["plain"]["waiting"] < copied.LATE / 2
    assert said["waiting"]["waiting"] >= copied.LATE


@pytest.mark.parametrize("side", SIDES)
def test_a_copy_of_the_watch_finds_the_leak_of_a_foreign_step(found, side):
    said = found[Path(side, "diagnosis", "memory_growth.py")]["said"]
    assert said["verdict"] == LEAK, said["sizes"]
    assert said["per_round"] == pytest.approx(copied.KEPT, rel=0.3)


@pytest.mark.campaign
@pytest.mark.parametrize("side", SIDES)
def test_a_copy_of_the_diagnosis_names_what_holds_a_foreign_step_back(found, side):
    said = found[Path(side, "diagnosis", "bottleneck.py")]["said"]
    assert said["bottleneck"] == INPUT
    assert said["evidence"]
    parts = [share for name, share in said["shares"].items() if name != SIZE]
    assert sum(parts) == pytest.approx(1.0)


def test_what_was_not_copied_would_be_missed(found):
    assert "shared.epochs was not copied" in found[LACKING]["reason"]
