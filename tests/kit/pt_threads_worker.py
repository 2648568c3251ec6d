"""The threads that PyTorch's kit sets, and those that torch then has.

`python -m tests.kit.pt_threads_worker pt` prints one line of JSON.
"""

import json

import torch

from pt_impl.kit import runtime


def has() -> dict[str, int]:
    return {"intra_op": torch.get_num_threads(), "inter_op": torch.get_num_interop_threads()}


def main() -> None:
    found = {}
    for threads, ours, torchs in ((3, "first", "torch"), (1, "later", "torch later")):
        read = runtime.configure(threads=threads, seed=0)
        found[ours] = {name: read[name] for name in ("intra_op", "inter_op")}
        found[torchs] = has()
    print(json.dumps(found))


if __name__ == "__main__":
    main()
