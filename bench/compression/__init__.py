"""Smaller models: what is measured of each technique, one `bench_<technique>.py` each.

A file declares its rows and says how a worker prepares and proves them.
Read `bench_pruning.py` first.
"""
