"""Recipes: what changes what is learned, not how fast a step runs.

Read `schedules.py` first.
"""
