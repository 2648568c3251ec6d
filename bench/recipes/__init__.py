"""Recipes: what is measured of each technique, one `bench_<technique>.py` each.

A recipe changes what is learned, not how fast a step runs: its rows are trained with several seeds
and not timed. Read `bench_schedules.py` first.
"""
