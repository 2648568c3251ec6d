"""Ladders: whole trainings, each in one file that uses techniques as a user would.

`twinbench ladder` runs them with one technique more each time. Read `image_classification.py`
first.
"""
