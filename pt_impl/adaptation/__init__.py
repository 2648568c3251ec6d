"""Adaptation: what was learned of one domain serves another.

`adversarial` and `discrepancy` need no labels of it, `fine_tuning` does.
Read `adversarial.py` first.
"""
