"""Input pipelines: from files or arrays to batches, compared with the work limit.

From a folder of photos (`folder`, `tuned_folder`), from shards, mapped and in-memory arrays.
Read `in_memory` first, then `folder`.
"""
