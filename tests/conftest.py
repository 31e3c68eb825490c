# SPDX-License-Identifier: Apache-2.0
"""What every test shares: GPU tests skip where there is no GPU, unless the run says that there must be one."""

import os

import hypothesis
import pytest

# Examples take a second, not a tenth, where others load the machine.
hypothesis.settings.register_profile("unhurried", deadline=None)
hypothesis.settings.load_profile("unhurried")

# Before anything imports PyTorch: threads that spin while they wait starve the other processes that tests start.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--require-gpu", action="store_true", help="fail, rather than skip, tests that need a GPU that is not there"
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    wanted = {"gpu": 1, "multi_gpu": 2}
    marked = [(item, count) for item in items for marker, count in wanted.items() if item.get_closest_marker(marker)]
    if not marked or config.getoption("--require-gpu"):
        return
    import torch

    found = torch.cuda.device_count()
    for item, count in marked:
        if found < count:
            item.add_marker(pytest.mark.skip(reason=f"needs {count} CUDA GPU(s), found {found}"))
