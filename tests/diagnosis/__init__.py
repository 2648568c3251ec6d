"""Tests of diagnosis. The seconds that the sleeping layer of `steps.py` sleeps."""

FORWARD, BACKWARD = 0.012, 0.02
