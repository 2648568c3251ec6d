"""Adaptation: use what was learned on one domain in another.

`adversarial` and `discrepancy` need no labels of the other domain, `fine_tuning` does. Read
`adversarial.py` first.
"""
