"""What exports refuse of LiteRT: models with operators that its converter lacks."""

import re
from collections.abc import Iterator
from contextlib import contextmanager

from shared import runtimes

_LACKS = re.compile(r"'tf\.(\w+)' op is neither a custom op nor a flex op")


@contextmanager
def converting() -> Iterator[None]:
    """Let what the converter raises be NotImplementedError on one line: which operators it lacks.

    It has most of them in float32 alone, and says the dtype far behind the name.
    """
    try:
        with runtimes.translating("LiteRT"):
            yield
    except NotImplementedError as error:
        words = str(error.__cause__)
        if not (lacking := dict.fromkeys(_LACKS.findall(words))):
            raise
        kind = " in float64" if "xf64>" in words else ""
        raise NotImplementedError(
            f"LiteRT can't take this: there is no operator for {', '.join(lacking)}{kind}"
        ) from error
