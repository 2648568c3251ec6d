"""Why one of two programs takes longer: their difference by layer and by kind of work.

`command` is `twinbench why`; `side` measures a program in a process of its framework; `difference`
compares two; `causes` names the main causes, and `experiments` tests them.
"""
