"""Which library computed a matrix product, by the verbose output of oneDNN and MKL.


    onednn_verbose,v1,primitive,exec,cpu,matmul,brg:avx2,undef,src:f32...,,,96x192:192x864,0.65
    MKL_VERBOSE SGEMM(N,T,64,256,64,...) 54.11us CNR:OFF ...

Other lines are ignored.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field

from bench.why import measured as m
from shared import step_events as kinds

_MKL = re.compile(r"^MKL_VERBOSE (?:cblas_)?(\w+)\(([^)]*)\) +([\d.]+)(ns|us|ms|s)")
_SECONDS = {"ns": 1e-9, "us": 1e-6, "ms": 1e-3, "s": 1.0}
ANY = ()  # the shape of a kind as a whole
MKL, ONEDNN = "MKL", "oneDNN"


@dataclass(frozen=True)
class Calls:
    """What the libraries printed. of: kind -> (m, k, n) in rising order -> library.

    The shape `ANY` has the library of most of the time. reorders: the share of layout changes in
    the time of oneDNN's convolutions and these changes.
    """

    of: dict[str, dict[tuple[int, ...], str]] = field(default_factory=dict)
    reorders: float = 0.0


def read(lines: Iterable[str], alone: dict[tuple[int, ...], list[str]] | None = None) -> Calls:
    """The library calls in the lines of some steps; `alone`: lines of separate products."""
    lines = list(lines)
    seen: dict[str, dict[tuple[int, ...], Counter]] = defaultdict(lambda: defaultdict(Counter))
    for line in lines:
        if told := _mkl(line) or _onednn(line):
            kind, shape, library, seconds = told
            seen[kind][shape][library] += seconds
            seen[kind][ANY][library] += seconds
    of = {
        kind: {shape: seconds.most_common(1)[0][0] for shape, seconds in shapes.items()}
        for kind, shapes in seen.items()
    }
    products = of.setdefault(kinds.PRODUCTS, {})
    for shape, printed in (alone or {}).items():
        if library := read(printed).of[kinds.PRODUCTS].get(ANY):
            products.setdefault(tuple(sorted(shape)), library)
    return Calls(of, _reorder_share(lines))


def with_libraries(side: m.Side, known: Calls) -> m.Side:
    """The side with the library of each of its products, and with layout changes as copies.

    A library is named if it printed the product's shape, or anything while the product was computed
    separately: TensorFlow splits large ones into blocks. Otherwise it is unknown, because Eigen and
    the frameworks' loops print nothing.
    """

    def library(one: m.Product) -> str:
        calls = known.of.get(kinds.PRODUCTS if one.kind == kinds.ATTENTION else one.kind, {})
        return calls.get(ANY if one.kind == kinds.CONVOLUTIONS else tuple(sorted(one.shape)), "")

    products = [m.replaced(p, ran_by=library(p)) for p in side.products]
    pieces = [part for piece in side.pieces for part in _divided(piece, known.reorders)]
    return m.replaced(side, products=products, pieces=pieces)


def _divided(piece: m.Piece, reorders: float) -> list[m.Piece]:
    """A piece of convolutions as these, and as the changes of layout that oneDNN does in them."""
    if piece.kind != kinds.CONVOLUTIONS or not reorders:
        return [piece]
    copies = m.replaced(piece, kind=kinds.COPIES, names=("oneDNN's reorders",), calls=0.0)
    return [m.scaled(piece, 1 - reorders), m.scaled(copies, reorders)]


def _reorder_share(lines: Iterable[str]) -> float:
    seconds = Counter()
    for line in lines:
        parts = line.split(",")
        if line.startswith("onednn_verbose") and "exec" in parts:
            seconds[parts[parts.index("exec") + 2]] += _number(parts[-1])
    total = seconds["reorder"] + seconds["convolution"]
    return seconds["reorder"] / total if seconds["convolution"] else 0.0


def _onednn(line: str) -> tuple[str, tuple[int, ...], str, float] | None:
    if not line.startswith("onednn_verbose"):
        return None
    parts = line.strip().split(",")
    if "exec" not in parts:
        return None
    primitive = parts[parts.index("exec") + 2 :][0]
    if primitive == "convolution":
        return kinds.CONVOLUTIONS, ANY, ONEDNN, _number(parts[-1])
    if primitive not in ("matmul", "inner_product", "gemm_api"):
        return None
    matrices = re.findall(r"(\d+)x(\d+)(?=:|$|\b)", parts[-2])
    if len(matrices) < 2:
        return kinds.PRODUCTS, ANY, ONEDNN, _number(parts[-1])
    (rows, inner), (_, columns) = matrices[0], matrices[1]
    shape = tuple(sorted(map(int, (rows, inner, columns))))
    return kinds.PRODUCTS, shape, ONEDNN, _number(parts[-1])


def _mkl(line: str) -> tuple[str, tuple[int, ...], str, float] | None:
    read_ = _MKL.match(line)
    if not read_ or "GEMM" not in read_[1].upper():
        return None
    sizes = [int(part) for part in read_[2].split(",") if re.fullmatch(r"\d+", part)][:3]
    return kinds.PRODUCTS, tuple(sorted(sizes)), MKL, float(read_[3]) * _SECONDS[read_[4]]


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return 0.0
