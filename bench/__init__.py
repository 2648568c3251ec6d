"""The pytest-benchmark harness: what is measured, how, and the report made of it."""
