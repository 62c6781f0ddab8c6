"""The tiny model and where it runs."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:  # the other examples need none of what these import
    from examples.smollm2.device import Device
    from examples.smollm2.weights import Checkpoint


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    from examples.smollm2.weights import load_checkpoint
    from tests.examples.tiny_model import write_gguf

    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    write_gguf(path)
    return load_checkpoint(path)


@pytest.fixture(scope="module")
def device() -> Device:
    from examples.smollm2.device import choose_device

    return choose_device("emulator")
