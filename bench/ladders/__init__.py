"""Ladders: whole trainings to which techniques are added one by one.

These are no techniques: `twinbench ladder` runs them, and a technique that hurts is not kept. Read
`image_classification.py` first, then `ladder.py` and `rule.py`.
"""
