"""Which kernels a test launches: for tests that every kernel of the package has to go through."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

from cupaged.backends.base import LoadedKernel
from cupaged.formats import FORMATS
from tests.rig import Rig


def record_launches(gpu: Any) -> Any:
    """The backend, which from now on keeps the entries that it launches, in its ``launched``."""
    launch = gpu.launch_packed
    gpu.launched = set()

    def recording(kernel: LoadedKernel, *given: Any, **named: Any) -> None:
        gpu.launched.add(kernel.source.entry)  # type: ignore[attr-defined]
        launch(kernel, *given, **named)

    gpu.launch_packed = recording
    gpu.prepare = lambda *_, **__: None  # so that each launch comes here
    return gpu


def _filled(names: Iterable[str], fmt: str) -> set[str]:
    ends = {
        "fmt": fmt,
        "reduce": "nvfp4" if fmt == "nvfp4" else "fp8",
        "tiled": "" if fmt == "bf16" else f"_{fmt}",
    }
    return {name.format(**ends) for name in names}


class Launches:
    """Marks tests with the kernels that they launch.

    Attributes:
        named: by any test so far.
    """

    def __init__(self) -> None:
        self.named: set[str] = set()

    def __call__(self, *names: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
        """Of a test: what it must launch on its rig. ``{fmt}`` stands for its format, ``{reduce}`` and
        ``{tiled}`` for the ends of the names of that format's reduction and tiled step."""
        for fmt in FORMATS:
            self.named.update(_filled(names, fmt.name))

        def decorate(test: Callable[..., None]) -> Callable[..., None]:
            @functools.wraps(test)
            def run(rig: Rig, **given: Any) -> None:
                rig.gpu.launched.clear()
                test(rig, **given)
                missing = _filled(names, given["fmt"].name if "fmt" in given else "") - rig.gpu.launched
                assert not missing, "these were not launched"

            return run

        return decorate
