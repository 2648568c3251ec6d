"""Plants an H100 that PyTorch computes on, as `pytest -p`: no driver and no framework is asked."""

from bench.harness import devices

H100 = devices.Gpu("NVIDIA H100 80GB HBM3", 85_017_493_504, 66.9e12)


def pytest_addoption() -> None:
    """Called before `bench/conftest.py` is imported."""
    devices.used_gpu = lambda frameworks, interpreters: H100
