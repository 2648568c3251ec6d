"""`twinbench doctor`: finds mistakes in a setup before anything is measured.

`host` and `judges` are pure: facts in, findings out. `asking` has facts measured in each
framework's process by `kit/health.py`. `quick` needs no process. `command` is the command line.
"""
