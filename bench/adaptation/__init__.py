"""Adaptation: what is measured of each technique, one `bench_<technique>.py` each.

Labels of one domain, accuracy on another. Read `bench_adversarial.py` first; `domains.py` holds
what the rows of all of them share.
"""
