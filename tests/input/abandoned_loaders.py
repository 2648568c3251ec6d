"""Starts PyTorch's loaders over a folder, prints the ids of their processes, waits to be killed.

python -m tests.input.abandoned_loaders FOLDER
"""

import json
import sys

from pt_impl.input.folder import parallel_loader, uint8_loader
from pt_impl.input.tuned_folder import tuned_loader
from tests.input.pipelines import BATCH, SEED, children

if __name__ == "__main__":
    makers = parallel_loader, uint8_loader, tuned_loader
    loaders = [make(sys.argv[1], batch_size=BATCH, seed=SEED, workers=2) for make in makers]
    held = [next(iter(loader)) for loader in loaders]
    print(json.dumps([child.pid for child in children()]), flush=True)
    sys.stdin.read()  # until the test ends or kills this process
