"""Diagnosis: what looking at a step costs, one `bench_<technique>.py` each.

Read `bench_profiling.py` first.
"""
