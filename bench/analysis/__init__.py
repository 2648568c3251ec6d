"""The analysis of a record: pure functions, without processes, clocks or frameworks."""
