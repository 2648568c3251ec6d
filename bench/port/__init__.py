"""Where a model and its port differ first, and why.

Read `report` first, which has the answer's types. `compare.port` compares in order, `causes` is the
catalogue of known differences, `command` is `twinbench port`.
"""
