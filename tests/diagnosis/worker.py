"""One framework's share of all tests of diagnosis, in one process: `python -m ... pt|tf`."""

from pathlib import Path

from tests.recipes.worker import main

if __name__ == "__main__":
    main(Path(__file__).parent)
