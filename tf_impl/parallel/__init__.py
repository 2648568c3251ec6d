"""Several devices and several hosts: replicas, stages and split layers.

What starts replicas and joins them is `kit/replicas.py`.
Read `data_parallel` first.
"""
