"""Several devices and several hosts: replicas, stages and split layers.

`kit/replicas.py` starts replicas and connects them. Read `data_parallel` first.
"""
