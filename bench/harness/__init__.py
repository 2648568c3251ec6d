"""The harness: it plans, starts processes, measures and writes the record.

Only `worker.py` imports a framework.
"""
