"""Measurements that a step's time does not show: input pipelines, serving, several devices.

A benchmark file's `probe` calls them in a new process.
"""
