"""A kit in NumPy for tests of the harness: no import to wait for, and faults on demand."""
