"""Tests of the harness itself: planted faults, disturbances, simulations, overhead."""
