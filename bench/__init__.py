"""The benchmark: what is measured, how, and the reports made from it."""
