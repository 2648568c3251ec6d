"""Ladders: whole trainings, each a program of one file that uses techniques as a user would.

No technique: each is climbed rung by rung (`twinbench ladder`). Read `image_classification.py`
first.
"""
