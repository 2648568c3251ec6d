"""A measurement of live controls, with noise that is made up."""

from math import log

import numpy as np

from bench.validation import controls

ENVIRONMENT = {"cpu": "A CPU", "isa": ["avx2"], "threads": 2}


def measurement(blocks=8, sd=0.02, left=0.0) -> dict:
    """Of two matches a framework; `left`: what leaving of others does to the planted, in logs."""
    random, matches = np.random.default_rng(0), []
    for framework in ("pt", "pt", "tf", "tf"):
        played = []
        for _ in range(blocks):
            names = controls.staying(played)
            alone = left if played and len(names) < len(played[0]) else 0.0
            times = {}
            for name in sorted(names):
                planted = log(1 + controls.PLANTED.get(name.partition("_")[0], 0))
                planted += alone if planted else 0.0
                times[name] = planted + random.normal(0, sd / 2**0.5)
            played.append(times)
        matches.append({"framework": framework, "workload": "small", "blocks": played})
    return {"environment": ENVIRONMENT, "matches": matches}
