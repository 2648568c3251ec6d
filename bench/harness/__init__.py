"""Processes, measurement, statistics and results. Only `worker.py` imports a framework."""
