"""What a step's time does not say: input pipelines, serving, several devices.

A benchmark file's `probe` calls them in a process of its own.
"""
