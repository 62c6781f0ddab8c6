"""What tests of warm calls share: which launches went the whole way, and whether two are the same."""

from __future__ import annotations

import functools
from typing import Any

import pytest

from cupaged.launch import KernelLaunch
from tests.fake_backend import Launch

UNTIL_READY = 5  # the first call of these launches what is kept ready


class Counted:
    """Counts the launches that go the whole way, through the builder.

    Attributes:
        whole: how many did.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.whole = 0
        launch = KernelLaunch.launch

        @functools.wraps(launch)
        def counting(builder: KernelLaunch, stream: Any) -> None:
            self.whole += 1
            launch(builder, stream)

        monkeypatch.setattr(KernelLaunch, "launch", counting)


def same(one: Launch, other: Launch) -> bool:
    """Whether the driver got the same; the objects by identity."""
    fields = ("source", "grid", "block", "shared_mem", "stream", "offsets", "packed", "cooperative")
    objects = [{i: id(x) for i, x in launch.arguments.items()} for launch in (one, other)]
    return objects[0] == objects[1] and all(getattr(one, x) == getattr(other, x) for x in fields)
