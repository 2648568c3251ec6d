"""Data sets as NumPy arrays, made offline and seeded, and the order in which batches visit them.

`materialise` writes a data set once; `load` maps the files read-only, so that both frameworks
read the same bytes. Nothing is downloaded.
"""

from __future__ import annotations

import hashlib
import platform
import sysconfig
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

import numpy as np

from shared import photos, scenes
from shared.atomic import whole_folder
from shared.specs import NO_LABEL, DatasetSpec

# Newline, tab and printable ASCII; with one code for every other character that makes 98.
ALPHABET = "\n\t" + "".join(chr(code) for code in range(32, 127))


def materialise(spec: DatasetSpec, folder: Path) -> Path:
    """Write the splits of `spec` below `folder` unless they are there; return their absolute path.

    The name of the folder stands for every field of the spec, for the code that made the data and
    for the Python whose source the text is, so that nothing else ever reuses it. A folder appears
    only when it is complete, whatever interrupts this and whoever else makes the same data.
    A data set of photos is a folder of files, and nothing to `load`.
    """
    folder = folder.resolve()  # who works on them may be in another folder
    if spec.kind == "file":  # a check has written it, see `shared.user_model`
        return folder / spec.name
    if spec.kind == "photos":
        size, seed = spec.image_size, spec.seed
        return photos.make_photos(folder, images=spec.train_size, size=size, seed=seed)
    made_by = hashlib.sha256(Path(__file__).read_bytes() + Path(scenes.__file__).read_bytes())
    if spec.kind in ("crops", "scenes", "domains"):
        made_by.update(Path(photos.__file__).read_bytes() + version("pillow").encode())
    made_by.update(f"{spec}{platform.python_version()}".encode())
    target = folder / f"{spec.name}-{made_by.hexdigest()[:12]}"
    if target.is_dir():
        return target
    make = {
        "digits": _make_digits,
        "text": _make_text,
        "masked": _make_masked,
        "crops": _make_crops,
        "scenes": _make_scenes,
        "domains": _make_domains,
    }[spec.kind]
    with whole_folder(target) as whole:
        for split, (x, y) in make(spec).items():
            np.save(whole / f"{split}_x.npy", x)
            np.save(whole / f"{split}_y.npy", y)
    return target


def domain_folders(
    spec: DatasetSpec, folder: Path
) -> tuple[Path, Path, tuple[np.ndarray, np.ndarray]]:
    """Source and target of a data set of domains, each a folder to train on, and the test split.

    The folders have train_x.npy and train_y.npy; labels of the target are zeros, so that nobody can
    look at them. Test images are standardised one by one, as the in-memory loaders do.
    """
    arrays = materialise(spec, folder)
    target = arrays.with_name(f"{arrays.name}-folders")
    if not target.is_dir():
        with whole_folder(target) as whole:
            for name, split in (("source", "train"), ("target", "target")):
                x, y = load(arrays, split)
                (whole / name).mkdir()
                np.save(whole / name / "train_x.npy", x)
                np.save(whole / name / "train_y.npy", y if name == "source" else np.zeros_like(y))
    x, y = load(arrays, "test")
    pixels = (1, 2, 3)
    deviation = np.maximum(x.std(pixels, keepdims=True), x[0].size ** -0.5)
    return (
        target / "source",
        target / "target",
        ((x - x.mean(pixels, keepdims=True)) / deviation, y),
    )


def load(folder: Path, split: str) -> tuple[np.ndarray, np.ndarray]:
    """Map x and y of `split` ("train" or "test") read-only. Never executes code (no pickle)."""
    return tuple(
        np.load(folder / f"{split}_{part}.npy", mmap_mode="r", allow_pickle=False)
        for part in ("x", "y")
    )


def batch_order(size: int, batch_size: int, *, seed: int, epoch: int) -> Iterator[np.ndarray]:
    """Yield the rows of each batch of one epoch, shuffled by (seed, epoch).

    A last batch that is not full is dropped.
    """
    order = np.random.default_rng([seed, epoch]).permutation(size)
    for start in range(0, size - batch_size + 1, batch_size):
        yield order[start : start + batch_size]


def first_batches(
    x: np.ndarray, y: np.ndarray, batch_size: int, count: int, *, seed: int
) -> list[tuple[np.ndarray, np.ndarray]]:
    """The first `count` batches of the shared stream, over as many epochs as that takes.

    Raises ValueError where the data does not fill one batch.
    """
    if batch_size > len(x):
        raise ValueError(f"a batch of {batch_size} from {len(x)} samples")
    batches: list[tuple[np.ndarray, np.ndarray]] = []
    epoch = 0
    while len(batches) < count:
        for rows in batch_order(len(x), batch_size, seed=seed, epoch=epoch):
            batches.append((np.asarray(x[rows]), np.asarray(y[rows])))
            if len(batches) == count:
                break
        epoch += 1
    return batches


# Digits -------------------------------------------------------------------------------------


def _make_digits(spec: DatasetSpec) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Render scikit-learn's 1,797 real digits on a cluttered canvas.

    Two thirds of the originals make the training split, the others the test split, each rendered
    as often as the size of its split asks for.
    """
    originals, labels = scenes.originals()
    random = np.random.default_rng(spec.seed)
    rows_of = scenes.split_originals(len(originals), random)
    splits = {}
    for split, size in (("train", spec.train_size), ("test", spec.test_size)):
        rows = np.resize(rows_of[split], size)
        images = [_render(originals, rows_of["train"], row, spec, random) for row in rows]
        splits[split] = (np.stack(images)[..., None], labels[rows])
    mean, std = splits["train"][0].mean(), splits["train"][0].std()
    return {split: ((x - mean) / std, y) for split, (x, y) in splits.items()}


def _render(
    originals: np.ndarray,
    clutter: np.ndarray,
    row: int,
    spec: DatasetSpec,
    random: np.random.Generator,
) -> np.ndarray:
    """One canvas: a digit doubled in size near the middle, pieces of other digits, and noise.

    Shift, clutter and noise are set so that the test accuracy of a small network ends near 95%.
    """
    size = spec.image_size
    canvas = np.zeros((size, size), np.float32)
    for other in random.choice(clutter, 4):
        piece = originals[other][:4, :4] * 0.7
        top, left = random.integers(0, size - 4, 2)
        canvas[top : top + 4, left : left + 4] = piece
    digit = originals[row].repeat(2, 0).repeat(2, 1)
    top, left = size // 2 - 8 + random.integers(-2, 3, 2)
    region = canvas[top : top + 16, left : left + 16]
    np.maximum(region, digit, out=region)
    return np.clip(canvas + random.normal(0, 0.15, canvas.shape), 0, 1).astype(np.float32)


# Photos ---------------------------------------------------------------------------------------


def _make_crops(spec: DatasetSpec) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Crops of two photos, drawn apart for each split; channels standardised by the first."""
    drawn = {
        split: photos.crop_arrays(size, size=spec.image_size, seed=spec.seed + place)
        for place, (split, size) in enumerate(
            {"train": spec.train_size, "test": spec.test_size}.items()
        )
    }
    pixels = drawn["train"][0].astype(np.float32)
    mean, std = pixels.mean((0, 1, 2)), pixels.std((0, 1, 2))
    return {split: ((x - mean) / std, y) for split, (x, y) in drawn.items()}


# Scenes ---------------------------------------------------------------------------------------

SHORTEST, LONGEST = 10, 28  # a digit's longer side, in pixels
TRIES = 20  # places that are tried for a digit before it is left out
INK = 0.25  # a digit's box holds all pixels of at least so much


def _make_scenes(spec: DatasetSpec) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Digits of several sizes over photos; channels standardised by the training split's."""
    images, labels = scenes.originals()
    images = [_cropped(image) for image in images]
    random = np.random.default_rng(spec.seed)
    rows_of, parts = scenes.split_originals(len(images), random), scenes.photo_parts()
    splits = {}
    for split, size in (("train", spec.train_size), ("test", spec.test_size)):
        made = []
        for _ in range(size):
            canvas = scenes.background(parts[split], spec.image_size, random)
            made.append((canvas, _place(canvas, images, labels, rows_of[split], spec, random)))
        x, y = zip(*made, strict=True)
        splits[split] = (np.stack(x), np.stack(y))
    mean, std = (f(splits["train"][0], axis=(0, 1, 2)) for f in (np.mean, np.std))
    return {split: ((x - mean) / std, y) for split, (x, y) in splits.items()}


def _cropped(digit: np.ndarray) -> np.ndarray:
    """A digit without the margin around its ink."""
    rows, columns = (np.flatnonzero((digit >= INK).any(axis)) for axis in (1, 0))
    return digit[rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1]


def _place(
    canvas: np.ndarray,
    images: list[np.ndarray],
    labels: np.ndarray,
    rows: np.ndarray,
    spec: DatasetSpec,
    random: np.random.Generator,
) -> np.ndarray:
    """Draw one digit to `spec.objects` into `canvas`; return the rows that label them."""
    rows_of_labels = np.full((spec.objects, 5), [0, 0, 0, 0, -1], np.float32)
    placed = 0
    for row in random.choice(rows, random.integers(1, spec.objects + 1)):
        length, digit = random.integers(SHORTEST, LONGEST + 1), images[row]
        height, width = (max(2, round(length * n / max(digit.shape))) for n in digit.shape)
        for _ in range(TRIES):
            top, left = (random.integers(0, spec.image_size - n + 1) for n in (height, width))
            box = np.array([left, top, left + width, top + height])
            others = rows_of_labels[:placed]
            clear = (box[2:] <= others[:, :2]) | (others[:, 2:4] <= box[:2])
            if clear.any(1).all():
                scenes.blend(canvas, scenes.scaled(digit, height, width), top, left)
                rows_of_labels[placed] = [*box, labels[row]]
                placed += 1
                break
    return rows_of_labels


# Domains --------------------------------------------------------------------------------------

SIDE = 24  # a digit's, in pixels


def _make_domains(spec: DatasetSpec) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Digits on black, and the same digits over photos, in another order.

    No original digit and no pixel of a photo is both in what is trained on and in what is tested.
    """
    images, labels = scenes.originals()
    digits = [scenes.scaled(image, SIDE, SIDE) for image in images]
    random = np.random.default_rng(spec.seed)
    rows_of, parts = scenes.split_originals(len(images), random), scenes.photo_parts()
    black = {split: [np.zeros((spec.image_size,) * 2 + (3,), np.float32)] for split in rows_of}
    splits = {}
    for name, split, size, behind in (
        ("train", "train", spec.train_size, black),
        ("target", "train", spec.train_size, parts),
        ("test", "test", spec.test_size, parts),
        ("source_test", "test", spec.test_size, black),
    ):
        rows = random.permutation(np.resize(rows_of[split], size))
        canvases = [scenes.background(behind[split], spec.image_size, random) for _ in rows]
        for canvas, row in zip(canvases, rows, strict=True):
            middle = (spec.image_size - SIDE) // 2
            scenes.blend(canvas, digits[row], *(middle + random.integers(-2, 3, 2)))
        splits[name] = (np.stack(canvases), labels[rows])
    mean, std = splits["train"][0].mean(), splits["train"][0].std()
    return {name: ((x - mean) / std, y) for name, (x, y) in splits.items()}


# Text ---------------------------------------------------------------------------------------


def _make_text(spec: DatasetSpec) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Cut windows of characters from the source of Python's standard library.

    A module belongs to one split, so that no window of one split overlaps any of the other.
    """
    sources = _split_sources()
    random = np.random.default_rng(spec.seed)
    splits = {}
    for split, size in (("train", spec.train_size), ("test", spec.test_size)):
        codes = encode("\n".join(source.read_text("utf-8") for source in sources[split]))
        starts = random.integers(0, len(codes) - spec.sequence_length, size)
        windows = codes[starts[:, None] + np.arange(spec.sequence_length + 1)]
        splits[split] = (windows[:, :-1].copy(), windows[:, 1:].copy())
    return splits


def _split_sources() -> dict[str, list[Path]]:
    """Every fifth module of the standard library for the test split, the others to train on."""
    sources = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    test = sources[::5]
    return {"train": [source for source in sources if source not in test], "test": test}


def encode(text: str) -> np.ndarray:
    """Character codes, int64: the place in ALPHABET, or `len(ALPHABET)` for any other character."""
    table = np.full(128, len(ALPHABET))
    table[[ord(character) for character in ALPHABET]] = np.arange(len(ALPHABET))
    points = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), "<u4")
    return table[np.minimum(points, 127)]  # 127 is a control character, which has no code


SWAPPED = encode(ALPHABET.swapcase() + "\0")  # code -> that of the letter in the other case


# Hidden text --------------------------------------------------------------------------------

HIDDEN = len(ALPHABET) + 1  # the code in place of a hidden character
ASKED = 0.15  # share of a row's places that are asked for
SHOWN = 0.1  # share of those that stay as they are; as many get a character at random


def _make_masked(spec: DatasetSpec) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """The windows of text, without the next characters, some of theirs hidden once for all."""
    random = np.random.default_rng([spec.seed, 1])
    return {split: hide(x, random) for split, (x, _) in _make_text(spec).items()}


def hide(codes: np.ndarray, random: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Hide characters as BERT does: what a model sees of int64 (n, t) codes, and its labels.

    15% of each row's places are asked for, as many in every row: 80% of them become `HIDDEN`, 10%
    a character at random, and 10% stay, so that no place tells that it isn't asked (Devlin et al.,
    2019, section 3.1). All other places stay, and have `NO_LABEL`.
    """
    count = max(1, round(ASKED * codes.shape[1]))
    places = random.random(codes.shape).argsort(axis=1)[:, :count]
    asked = np.take_along_axis(codes, places, axis=1)
    drawn, others = random.random(asked.shape), random.integers(0, HIDDEN, asked.shape)
    seen = np.where(drawn < SHOWN, asked, np.where(drawn < 2 * SHOWN, others, HIDDEN))
    x, y = codes.copy(), np.full_like(codes, NO_LABEL)
    np.put_along_axis(x, places, seen, axis=1)
    np.put_along_axis(y, places, asked, axis=1)
    return x, y
