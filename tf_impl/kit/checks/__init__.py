"""What each technique refuses, and why: `kit/checks/<technique>.py` has `check_<technique>`.

A technique calls it once, before anything is changed. Copy the technique without it where the model
is an ordinary one.
"""
