"""Input pipelines: from files or arrays to batches, beside the limit of the work itself.

From a folder of photos (`folder`, `tuned_folder`), from shards, mapped and in-memory arrays.
Read `in_memory` first, then `folder`.
"""
