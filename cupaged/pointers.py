"""A raw device address that knows how many bytes it stands for."""

from __future__ import annotations

from dataclasses import dataclass

from cupaged.errors import ArgumentTypeError, ArgumentValueError


@dataclass(frozen=True)
class DevicePtr:
    """An address on a device, as an argument for `KernelLaunch.arg_ptr`.

    Attributes:
        address: the address; 0 is the null pointer.
        nbytes: size of what it points to, or None if unknown. The emulator's check mode uses it.
    """

    address: int
    nbytes: int | None = None

    def __post_init__(self) -> None:
        if isinstance(self.address, bool) or not isinstance(self.address, int):
            raise ArgumentTypeError(f"address: got {type(self.address).__name__}, allowed is int")
        if not 0 <= self.address < 1 << 64:
            raise ArgumentValueError(f"address: got {self.address}, allowed is 0 to 2^64 - 1")

    def __index__(self) -> int:
        return self.address

    def __add__(self, offset: int) -> DevicePtr:
        """The address `offset` bytes further on."""
        left = None if self.nbytes is None else self.nbytes - offset
        if left is not None and left < 0:
            raise ArgumentValueError(
                f"offset: got {offset}, allowed is at most the {self.nbytes} bytes it points to"
            )
        return DevicePtr(self.address + offset, left)
