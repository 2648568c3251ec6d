"""Files of checkpoints: written in one piece, and read without executing code of them.

Twin: `pt_impl/kit/checkpoint_files.py`.
Where the frameworks differ: the file is NumPy's archive of arrays, read with `allow_pickle=False`;
what else is kept is JSON in it. The twin's is `torch.save`'s.
"""

import json
import os
import time
from pathlib import Path

import numpy as np
import tensorflow as tf

VERSION = 1
_ARRAY = "of the archive"  # where a state has an array


def write_file(path: Path, state: dict, arrays: dict, *, resumable: bool) -> int:
    """Write beside `path`, flush, and rename: what stood there stays until then. Return the bytes.

    state: JSON values, and arrays or tensors of numbers. Raises ValueError for a state of anything
    else, OSError where the file can't be written.
    """
    head = {"version": VERSION, "state": state, "resumable": resumable}
    head["written"] = time.time_ns()
    arrays = dict(arrays)

    def kept(value):
        """What stands for a value that JSON does not know."""
        if isinstance(value, np.generic) and value.dtype.kind in "biuf":
            return value.item()
        array = np.asarray(value)
        # Objects an archive would pickle; words and dates could not be read again.
        if array.dtype.hasobject or array.dtype.kind in "USMm":
            kind = type(value).__name__
            raise ValueError(f"a state is of JSON values and arrays of numbers: {kind} is none")
        name = f"state {len(arrays)}"
        arrays[name] = array
        return {_ARRAY: name, "dtype": array.dtype.name}

    arrays["head"] = np.frombuffer(json.dumps(head, default=kept).encode(), np.uint8)
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with beside.open("wb") as file:
            np.savez(file, **arrays)
            file.flush()
            os.fsync(file.fileno())  # or the name may reach the disk before the bytes
        os.replace(beside, path)
        _sync_folder(path.parent)
    except OSError as error:
        raise OSError(f"{path} can't be written: {one_line(error)}") from error
    finally:
        beside.unlink(missing_ok=True)
    return path.stat().st_size


def read_file(path: Path) -> tuple[dict, dict[str, np.ndarray]]:
    """Return the head and the arrays of a checkpoint. No code is executed.

    Raises ValueError where it is not a complete checkpoint.
    """
    try:
        with np.load(path, allow_pickle=False) as archive:  # checks each member's CRC
            arrays = {name: archive[name] for name in archive.files}

        def whole_value(found: dict):
            if _ARRAY not in found:
                return found
            # NumPy writes the bytes of a dtype that it does not know, such as bfloat16.
            return arrays[found[_ARRAY]].view(tf.as_dtype(found["dtype"]).as_numpy_dtype)

        head = json.loads(arrays.pop("head").tobytes(), object_hook=whole_value)
        whole = head["version"] == VERSION and {"state", "resumable"} <= head.keys()
    except FileNotFoundError:
        raise ValueError(f"there is no {path}") from None
    except Exception as error:  # whatever a foreign or damaged file makes of zip and NumPy
        reason = f"{path} is no checkpoint, or is cut off or damaged: {one_line(error)}"
        raise ValueError(reason) from error
    if not whole:
        raise ValueError(f"{path} is no checkpoint of version {VERSION}")
    return head, arrays


def written(path: Path) -> int:
    """Return when a checkpoint was written, in ns: a copy has another time in its folder."""
    try:
        with np.load(path, allow_pickle=False) as archive:
            return json.loads(archive["head"].tobytes())["written"]
    except Exception:  # of a damaged file, and of one of an earlier version
        return path.stat().st_mtime_ns


def one_line(error: Exception) -> str:
    """Return an error's words as one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:160]}"


def _sync_folder(folder: Path) -> None:
    if os.name == "posix":
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
