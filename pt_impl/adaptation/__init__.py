"""Adaptation: labels of one domain serve another that has none.

Read `adversarial.py` first.
"""
