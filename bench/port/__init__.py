"""Two models that should be one: the first layer and step at which they differ, and why.

Read `report` first: what is answered. `compare.port` asks the questions in order, `causes` is the
catalogue of what is known to differ, `command` is `twinbench port`.
"""
