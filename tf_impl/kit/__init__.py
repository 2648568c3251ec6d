"""What serves the techniques and is none: models, data, training, runtime, replicas.

Technique files use it in their `main()` and where it is no part of the technique.
Read `training.py` first: the plain step that the techniques change.
"""
