"""When TensorFlow computes with oneDNN by itself: it depends on the processor.

Source: `DefaultOneDnnPolicy` in tensorflow/core/util/port.cc.
"""

from pathlib import Path

VARIABLE = "TF_ENABLE_ONEDNN_OPTS"  # read once, as TensorFlow is imported
# Of x86; one of them is enough. Of Arm's processors it is Neoverse V1 only.
INSTRUCTIONS = ("avx512_vnni", "avx512_bf16", "avx_vnni", "amx_tile", "amx_int8", "amx_bf16")


def is_default(cpuinfo: Path = Path("/proc/cpuinfo")) -> bool:
    """Whether TensorFlow switches oneDNN on by itself, by what Linux says of the processor."""
    words = cpuinfo.read_text("utf-8").split()
    # 0xd40 is what Arm calls the Neoverse V1.
    return not set(INSTRUCTIONS).isdisjoint(words) or ("0xd40" in words and "0x41" in words)
