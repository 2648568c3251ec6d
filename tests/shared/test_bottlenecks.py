"""How full the memory is that a process may have: the machine's, or its control group's."""

import psutil
import pytest

from shared import bottlenecks


def test_a_full_group_is_memory_in_use_on_an_empty_machine(monkeypatch, tmp_path):
    limit, whole = tmp_path / "memory.limit_in_bytes", psutil.virtual_memory()
    monkeypatch.setattr(bottlenecks, "GROUP_LIMITS", (tmp_path / "none", limit))
    of_machine = 1 - whole.available / whole.total
    assert bottlenecks.memory_in_use() == pytest.approx(of_machine, abs=0.2)
    for unlimited in ("max", str(2**63 - 4096)):
        limit.write_text(f"{unlimited}\n")
        assert bottlenecks.memory_in_use() == pytest.approx(of_machine, abs=0.2)
    used = psutil.Process().memory_info().rss
    limit.write_text(str(used))
    assert bottlenecks.memory_in_use() == pytest.approx(1, abs=0.02)
