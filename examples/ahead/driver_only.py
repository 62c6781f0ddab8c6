"""A kernel that `cupaged.ahead` compiled, by the CUDA driver and Python's standard library alone.

`python examples/ahead/driver_only.py FOLDER` finds bf16_absmax in the manifest, packs its parameters by
their offsets and launches it: the largest magnitude of 1000 BF16 numbers. Needs a GPU, but neither CuPy nor
NVRTC.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import struct
import sys
from pathlib import Path
from typing import Any

SM_COUNT, MAJOR, MINOR = 16, 75, 76  # CU_DEVICE_ATTRIBUTE_...
BUFFER_POINTER, BUFFER_SIZE, END = 1, 2, 0  # CU_LAUNCH_PARAM_...
CODES = {"ptr": "<Q", "u32": "<I", "i32": "<i", "u64": "<Q", "i64": "<q", "f32": "<f"}
NUMBERS = [0.25 * (i % 13) for i in range(999)] + [-7.5]


class Driver:
    """The few calls of libcuda that this takes; an error ends the program."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL("libcuda.so.1")
        self("cuInit", 0)
        self.device, context = ctypes.c_int(), ctypes.c_void_p()
        self("cuDeviceGet", ctypes.byref(self.device), 0)
        self("cuDevicePrimaryCtxRetain", ctypes.byref(context), self.device)
        self("cuCtxSetCurrent", context)

    def __call__(self, name: str, *arguments: Any) -> None:
        status = getattr(self._library, name)(*arguments)
        if status:
            raise SystemExit(f"{name}: CUDA error {status}")

    def attribute(self, which: int) -> int:
        value = ctypes.c_int()
        self("cuDeviceGetAttribute", ctypes.byref(value), which, self.device)
        return value.value

    def upload(self, data: bytes) -> int:
        address = ctypes.c_uint64()
        self("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(len(data)))
        self("cuMemcpyHtoD_v2", address, data, ctypes.c_size_t(len(data)))
        return address.value


def packed(kernel: dict[str, Any], values: dict[str, int]) -> bytes:
    """The parameter buffer of a launch."""
    buffer = bytearray(kernel["parameter_bytes"])
    for parameter in kernel["parameters"]:
        value = values[parameter["name"]]
        if parameter["kind"] != "f32" and value % parameter["multiple"]:
            raise SystemExit(f"{parameter['name']}: {value} is no multiple of {parameter['multiple']}")
        struct.pack_into(CODES[parameter["kind"]], buffer, parameter["offset"], value)
    return bytes(buffer)


def grid_of(kernel: dict[str, Any], values: dict[str, int], num_sms: int) -> list[int]:
    """Blocks along x, y and z."""
    names: dict[str, Any] = {**values, "num_sms": num_sms, "min": min, "max": max}
    return [int(eval(rule, {"__builtins__": {}}, names)) for rule in kernel["grid"]]


def code_of(folder: Path, kernel: dict[str, Any]) -> bytes:
    code: bytes = (folder / kernel["cubin"]).read_bytes()
    if hashlib.sha256(code).hexdigest() != kernel["sha256"]:
        raise SystemExit(f"{kernel['cubin']}: damaged")
    return code


def runs_on(arch: str, major: int, minor: int) -> bool:
    number = int(arch.removeprefix("sm_").rstrip("af"))
    same = number == 10 * major + minor
    return same if arch.endswith("a") else number // 10 == major and number <= 10 * major + minor


def main(folder: Path) -> float:
    """The largest magnitude, as the GPU says."""
    driver = Driver()
    capability = (driver.attribute(MAJOR), driver.attribute(MINOR))
    manifest = json.loads((folder / "manifest.json").read_text())
    kernel = next(
        k for k in manifest["kernels"] if k["entry"] == "bf16_absmax" and runs_on(k["arch"], *capability)
    )
    module, function = ctypes.c_void_p(), ctypes.c_void_p()
    driver("cuModuleLoadData", ctypes.byref(module), code_of(folder, kernel))
    driver("cuModuleGetFunction", ctypes.byref(function), module, kernel["entry"].encode())

    # BF16 is the upper half of a float32.
    halves = b"".join(struct.pack("<f", number)[2:] for number in NUMBERS)
    values = {"data": driver.upload(halves), "out_max": driver.upload(bytes(4)), "n_elems": len(NUMBERS)}
    buffer = packed(kernel, values)
    size = ctypes.c_size_t(len(buffer))
    extra = (ctypes.c_void_p * 5)(
        BUFFER_POINTER,
        ctypes.cast(ctypes.c_char_p(buffer), ctypes.c_void_p),
        BUFFER_SIZE,
        ctypes.cast(ctypes.byref(size), ctypes.c_void_p),
        END,
    )
    grid = grid_of(kernel, values, driver.attribute(SM_COUNT))
    shared = kernel["dynamic_shared_bytes"]
    driver("cuLaunchKernel", function, *grid, *kernel["block"], shared, None, None, extra)
    result = ctypes.c_float()
    driver("cuMemcpyDtoH_v2", ctypes.byref(result), ctypes.c_uint64(values["out_max"]), ctypes.c_size_t(4))
    return result.value


if __name__ == "__main__":
    if len(sys.argv) != 2:
        raise SystemExit(__doc__)
    largest = main(Path(sys.argv[1]))
    print(f"largest magnitude: {largest}")
    if largest != max(map(abs, NUMBERS)):
        raise SystemExit("that is wrong")
