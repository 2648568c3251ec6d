"""Recipes: they change what a model learns, not how fast a step runs.

Read `schedules.py` first.
"""
