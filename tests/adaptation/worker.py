"""One framework's share of the tests of domain adaptation, in one process.

`python -m tests.adaptation.worker pt|tf|tf_keras` runs each scenario of `*_scenarios.py`, as the
recipes' worker does.
"""

from pathlib import Path

from tests.recipes.worker import main

if __name__ == "__main__":
    main(Path(__file__).parent)
