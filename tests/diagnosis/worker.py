"""One framework's share of the tests of diagnosis: `python -m ... pt|tf SCENARIOS|TIMED`."""

import sys
from pathlib import Path

from tests.recipes.worker import main

if __name__ == "__main__":
    main(Path(__file__).parent, sys.argv[2])
