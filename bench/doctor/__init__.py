"""`twinbench doctor`: what is wrong with a set-up before anything of it is measured.

`host` and `judges` are pure: facts in, findings out. `asking` has the facts measured, each
framework's in its own process by `kit/health.py`. `quick` needs no process. `command` is the
command line.
"""
