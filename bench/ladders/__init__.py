"""Ladders: whole trainings climbed rung by rung, and how a rung is measured and judged.

No technique: the programs use techniques, and are climbed by `twinbench ladder`, where a rung that
hurts is left out of the next; the rows of a benchmark run are fixed beforehand. Read
`image_classification.py` first, then `ladder.py` and `rule.py`.
"""
