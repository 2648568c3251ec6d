"""Files of checkpoints: written in one piece, and read without executing code of them.

Twin: `tf_impl/kit/checkpoint_files.py`.
Where the frameworks differ: the file is `torch.save`'s, read with `weights_only=True`: tensors and
plain containers. The twin writes NumPy's archive.
"""

import io
import os
import time
import zipfile
from pathlib import Path

import numpy as np
import torch

VERSION = 1


def write_file(path: Path, content: dict) -> int:
    """Write beside `path`, flush, and rename: what stood there stays until then. Return the bytes.

    Raises OSError where the file can't be written.
    """
    content = {"version": VERSION, "written": time.time_ns()} | content
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with beside.open("wb") as file:
            torch.save(content, file)
            file.flush()
            os.fsync(file.fileno())  # or the name may reach the disk before the bytes
        os.replace(beside, path)
        _sync_folder(path.parent)
    except (OSError, RuntimeError) as error:  # torch.save wraps a full disk in the latter
        raise OSError(f"{path} can't be written: {one_line(error)}") from error
    finally:
        beside.unlink(missing_ok=True)
    return path.stat().st_size


def read_file(path: Path) -> dict:
    """Return what a checkpoint holds, on the CPU. No code is executed.

    Raises ValueError where it is not a complete checkpoint.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            damaged = archive.testzip()
        if damaged:
            raise zipfile.BadZipFile(f"{damaged} is not what was written")
        content = torch.load(path, map_location="cpu", weights_only=True)
        whole = content["version"] == VERSION and {"weights", "state"} <= content.keys()
    except FileNotFoundError:
        raise ValueError(f"there is no {path}") from None
    except Exception as error:  # whatever a foreign or damaged file makes of zip and pickle
        reason = f"{path} is no checkpoint, or is cut off or damaged: {one_line(error)}"
        raise ValueError(reason) from error
    if not whole:
        raise ValueError(f"{path} is no checkpoint of version {VERSION}")
    return content


def check_readable(content: dict) -> None:
    """Raise ValueError for what could be written and not be read; tensors can, and are left out."""
    weights = content["weights"].items()
    rest = {name: value for name, value in weights if not isinstance(value, torch.Tensor)}
    groups = content.get("optimizer", {}).get("param_groups")
    written = io.BytesIO()
    try:
        torch.save([content["state"], groups, rest], written)
        written.seek(0)
        torch.load(written, weights_only=True)
    except Exception as error:  # whatever pickle makes of an object
        reason = f"a checkpoint holds only numbers, text, tensors and containers: {one_line(error)}"
        raise ValueError(reason) from error


def written(path: Path) -> int:
    """Return when a checkpoint was written, in ns: a copy has another time in its folder."""
    try:
        return torch.load(path, map_location="cpu", weights_only=True, mmap=True)["written"]
    except Exception:  # of a damaged file, and of one of an earlier version
        return path.stat().st_mtime_ns


def plain(value):
    """Return the same with Python's numbers for NumPy's, which no reader may load."""
    if isinstance(value, dict):
        return {plain(key): plain(each) for key, each in value.items()}
    if type(value) in (list, tuple):  # no reader may make other kinds
        return type(value)(map(plain, value))
    return value.item() if isinstance(value, np.generic) else value


def random_states() -> dict:
    """Return the states of the generators of the CPU and of each CUDA device."""
    return {"cpu": torch.get_rng_state(), "cuda": torch.cuda.get_rng_state_all()}


def restore_random_states(states: dict) -> None:
    """Give the generators what `random_states` returned."""
    torch.set_rng_state(states["cpu"])
    if len(states["cuda"]) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all(states["cuda"])


def one_line(error: Exception) -> str:
    """Return an error's words as one line."""
    # What torch.load says before it is advice to load without the check.
    text = str(error).rpartition("WeightsUnpickler error: ")[2]
    return f"{type(error).__name__}: {' '.join(text.split())[:160]}"


def _sync_folder(folder: Path) -> None:
    if os.name == "posix":
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
