"""The folders of the tests of folders, and loaders by name."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import SimpleNamespace

import pytest

from shared.images import list_images
from shared.photos import make_photos
from tests.input.pipelines import BATCH, SEED, damaged, folder_for_all

MODULES = {"tuned": "tuned_folder", "threads": "tuned_folder"}


@pytest.fixture(scope="module")
def folders():
    """A folder of photos, one with files that can't be read, an empty one, one of one class."""
    with folder_for_all() as top:
        good = make_photos(Path(top), images=13, size=300, seed=0)
        bad = damaged(good, Path(top) / "Bilder 图 ß")
        (good.parent / "empty").mkdir()
        (good.parent / "one class" / "only").mkdir(parents=True)
        data = list_images(good)[0][0].read_bytes()
        (good.parent / "one class" / "only" / "photo.jpg").write_bytes(data)
        yield SimpleNamespace(good=good, bad=bad)


@pytest.fixture(scope="module")
def load(impl, framework):
    """`load(name, folder, **settings)`: a loader over a folder."""

    def make(name, folder, **settings):
        module = importlib.import_module(f"{framework}_impl.input.{MODULES.get(name, 'folder')}")
        workers = {} if name == "naive" else {"workers": 2}
        given = {"batch_size": BATCH, "seed": SEED} | workers | settings
        return getattr(module, f"{name}_loader")(folder, **given)

    return make
