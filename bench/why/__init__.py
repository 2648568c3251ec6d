"""Why one of two programs takes longer: the difference of their steps, by layer and by kind.

`command` is `twinbench why`; `side` measures a program in a process of its framework;
`difference` compares two; `causes` says what stands out, and `experiments` tests it.
"""
