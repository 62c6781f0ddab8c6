"""`python -m tests.edges.fork_program before|after emulator|cupy`: decode in a parent and in its fork.

Prints one line of JSON a process: the output's digest, or the error.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from typing import Any

from cupaged.errors import BackendUnavailableError
from cupaged.formats import BF16
from tests.paths import run
from tests.poison import random_case
from tests.rig import Rig


def make(name: str) -> Any:
    if name == "cupy":
        from cupaged.backends.cupy import CupyBackend

        return CupyBackend()
    from cupaged.backends.emulator import EmulatorBackend

    return EmulatorBackend()


def digest(rig: Rig) -> str:
    found = [run(rig, random_case(BF16, [100, 1]), path).out.tobytes() for path in ("single", "decoder")]
    return hashlib.sha256(b"".join(found)).hexdigest()


def report(who: str, rig: Rig | None, name: str) -> None:
    try:
        result = {"who": who, "digest": digest(rig or Rig(make(name)))}
    except BackendUnavailableError as error:
        result = {"who": who, "error": str(error)}
    print(json.dumps(result), flush=True)


def main() -> int:
    when, name = sys.argv[1:]
    rig = None
    if when == "after":
        rig = Rig(make(name))
        digest(rig)
    child = os.fork()
    if child == 0:
        report("child", rig, name)
        if rig is not None:
            report("child's own backend", None, name)
        os._exit(0)
    os.waitpid(child, 0)
    report("parent", rig, name)
    return 0


if __name__ == "__main__":
    sys.exit(main())
