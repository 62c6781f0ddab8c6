"""Other libraries' arrays on a GPU: the same memory, in the order of their streams. CuPy plays them."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from cupaged import KVCache, interop, merge_states
from cupaged.errors import ArgumentTypeError, ArgumentValueError
from cupaged.formats import BF16, CacheLayout
from tests.rig import Rig

SPIN_CYCLES = 200_000_000  # about a tenth of a second


@pytest.fixture
def cupy_rig(rig: Rig) -> Rig:
    if rig.name != "cupy":
        pytest.skip("needs a GPU")
    return rig


class InterfaceOnly:
    """Lends a CuPy array by ``__cuda_array_interface__`` alone, as Numba does."""

    def __init__(self, array: Any, stream: int | None = None, **changed: Any) -> None:
        self.array = array
        self.__cuda_array_interface__ = {
            **array.__cuda_array_interface__, "version": 3, "stream": stream, **changed
        }  # fmt: skip


class DLPackOnly:
    """Lends a CuPy array by DLPack alone, from a stream of its own.

    Attributes:
        asked: streams that consumers named.
    """

    def __init__(self, array: Any, stream: Any = None) -> None:
        self.array, self.stream = array, stream
        self.asked: list[int] = []

    def __dlpack_device__(self) -> tuple[int, int]:
        kind, index = self.array.__dlpack_device__()
        return int(kind), int(index)

    def __dlpack__(self, *, stream: int | None = None, **newer: Any) -> Any:
        if newer:
            raise TypeError("max_version")
        self.asked.append(stream or 0)
        if self.stream is None:
            return self.array.__dlpack__(stream=stream)
        with self.stream:
            return self.array.__dlpack__(stream=stream)


def spin_then_fill(cupy: Any, stream: Any, array: Any, value: float) -> None:
    """Work that is certainly not done when this returns."""
    code = "long long start = clock64(); while (clock64() - start < cycles) {}"
    spin = cupy.RawKernel(f'extern "C" __global__ void spin(long long cycles) {{ {code} }}', "spin")
    with stream:
        spin((1,), (1,), (np.int64(SPIN_CYCLES),))
        array.fill(value)


@pytest.mark.gpu
@pytest.mark.parametrize("protocol", ["interface", "dlpack"])
def test_work_comes_after_the_producers(cupy_rig: Rig, protocol: str) -> None:
    import cupy

    rig = cupy_rig
    producer, consumer = (cupy.cuda.Stream(non_blocking=True) for _ in range(2))
    parts = cupy.zeros((2, 8, 64), np.float32)
    lses, out = cupy.zeros((2, 8), np.float32), cupy.zeros((8, 64), np.float32)
    merge_states(rig.gpu, parts, lses, out, stream=consumer)  # compiled, as CuPy's own kernel that fills
    parts.fill(1)  # a kernel: zeros would be set by the driver, and loading one waits for the GPU
    rig.gpu.synchronize()
    for round_ in range(3):
        spin_then_fill(cupy, producer, parts, 3.0 + round_)
        lent: Any = (
            InterfaceOnly(parts, producer.ptr) if protocol == "interface" else DLPackOnly(parts, producer)
        )
        merge_states(rig.gpu, lent, lses, out, stream=consumer)
        assert not producer.done, "the host waited"
        consumer.synchronize()
        assert (cupy.asnumpy(out) == 3.0 + round_).all()
        if protocol == "dlpack":
            assert lent.asked == [consumer.ptr]


@pytest.mark.gpu
def test_the_same_memory_with_its_strides(cupy_rig: Rig) -> None:
    import cupy

    gpu, stream = cupy_rig.gpu, cupy.cuda.Stream(non_blocking=True)
    wide = cupy.arange(60, dtype=np.float32).reshape(3, 4, 5)
    for array in (wide, wide[:, 1:3], wide.transpose(2, 0, 1), wide[:, :1], wide[:0]):
        for lent in (
            InterfaceOnly(array),
            InterfaceOnly(array, 1),
            InterfaceOnly(array, stream.ptr),
            DLPackOnly(array),
        ):
            got = interop.device_array(gpu, lent, stream)
            assert isinstance(got, cupy.ndarray)
            if array.size:
                assert (got.data.ptr, got.strides) == (array.data.ptr, array.strides)
            assert (got.shape, got.dtype) == (array.shape, array.dtype)
            stream.synchronize()
            np.testing.assert_array_equal(cupy.asnumpy(got), cupy.asnumpy(array))
    lent = DLPackOnly(wide)
    interop.device_array(gpu, lent, 0)
    assert lent.asked == [1], "the legacy default stream is 1 in the protocol"
    assert interop.device_array(gpu, wide, stream) is wide
    for spelled, bits in (("<V2", np.uint16), ("|V1", np.uint8), ("<f1", np.uint8)):
        raw = cupy.zeros(4, bits)
        assert interop.device_array(gpu, InterfaceOnly(raw, typestr=spelled), stream).dtype == bits


@pytest.mark.gpu
def test_what_a_gpu_refuses(cupy_rig: Rig) -> None:
    import cupy

    gpu = cupy_rig.gpu
    array = cupy.zeros(4, np.float32)
    read_only = InterfaceOnly(array, data=(array.data.ptr, True))
    interop.device_array(gpu, read_only, 0)
    for value, message, keywords in (
        (np.zeros(4), r"got a NumPy array, which lives on the host; .*interop\.to_device", {}),
        ([1, 2], "array: got list, allowed", {}),
        (InterfaceOnly(array, 0), "says stream 0, which the protocol forbids", {}),
        (InterfaceOnly(array, mask=array), "with a mask", {}),
        (read_only, "must not be written", {"writable": True}),
    ):
        with pytest.raises((ArgumentTypeError, ArgumentValueError), match=message):
            interop.device_array(gpu, value, 0, **keywords)


@pytest.mark.gpu
def test_a_copy_inside_a_capture_is_refused(cupy_rig: Rig) -> None:
    import cupy

    stream = cupy.cuda.Stream(non_blocking=True)
    cache = KVCache(cupy_rig.gpu, CacheLayout(BF16, 1, 64, 4), 3)
    cache.copy_blocks([(0, 1)], stream=stream)
    with stream:
        stream.begin_capture()
        with pytest.raises(ArgumentValueError, match="it is being captured"):
            cache.copy_blocks([(0, 1)], stream=stream)
        stream.end_capture()
    stream.synchronize()


@pytest.mark.gpu
def test_a_captured_write_and_copy(cupy_rig: Rig) -> None:
    """With device arrays nothing synchronises or allocates: a graph holds it, and its inputs may change."""
    import cupy

    rig, stream = cupy_rig, cupy.cuda.Stream(non_blocking=True)
    cache = KVCache(rig.gpu, CacheLayout(BF16, 1, 64, 4), 3)
    tokens = rig.upload(np.ones((2, 1, 64), ml_dtypes.bfloat16))
    slots, pairs = cupy.array([0, 1]), cupy.array([[0, 2]], np.int32)
    ids, out = cupy.array([2], np.int32), [cupy.zeros((2, 1, 64), np.float32) for _ in range(2)]

    def step() -> None:
        cache.write(tokens, tokens, slots, stream=stream)
        cache.copy_blocks(pairs, stream=stream)
        cache.gather(ids, 2, *out, stream=stream)

    with stream:
        step()
        stream.synchronize()
        stream.begin_capture()
        step()
        graph = stream.end_capture()
    tokens[...] = rig.upload(np.full((2, 1, 64), 5.0, ml_dtypes.bfloat16))
    cupy.cuda.Device().synchronize()
    graph.launch(stream)
    stream.synchronize()
    for array in out:
        assert (cupy.asnumpy(array) == 5.0).all()


def test_a_decode_of_arrays_of_no_library(rig: Rig) -> None:
    """Objects that lend memory by a protocol alone are as good as the backend's own."""
    cache, plain = (KVCache(rig.gpu, CacheLayout(BF16, 1, 64, 4), 3) for _ in range(2))
    host = np.random.default_rng(0).standard_normal((5, 1, 64)).astype(ml_dtypes.bfloat16)
    tokens, slots = rig.upload(host), rig.upload(np.arange(5))
    lend = DLPackOnly if rig.name == "cupy" else NumpyLender
    cache.write(lend(tokens), lend(tokens), lend(slots), stream=rig.stream)
    plain.write(tokens, tokens, slots, stream=rig.stream)
    np.testing.assert_array_equal(rig.download(cache.k_pool), rig.download(plain.k_pool))
    np.testing.assert_array_equal(rig.download(cache.v_pool), rig.download(plain.v_pool))


class NumpyLender:
    """Lends a NumPy array by DLPack."""

    def __init__(self, array: Any) -> None:
        self.array = array

    def __dlpack_device__(self) -> tuple[int, int]:
        return (1, 0)

    def __dlpack__(self, **keywords: Any) -> Any:
        return self.array.__dlpack__(**keywords)
