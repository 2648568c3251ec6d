"""Diagnosis: where the time of a step goes, and whether its memory grows.

Read `profiling.py` first.
"""
