"""Numba device arrays in and out: `python -m examples.interop.numba_example` (needs a GPU)."""

import ml_dtypes
import numpy as np

from cupaged import CupyBackend
from examples.interop.problem import check, decode, make_problem

try:
    from numba import cuda
except ModuleNotFoundError as error:
    raise SystemExit(f"{error}; this example needs it: pip install '.[interop]'") from None

problem = make_problem()
gpu = CupyBackend()
stream = cuda.stream()
# Numba has no BF16: its arrays hold the bits. They say which stream they are ready on.
q, key, value = (
    cuda.to_device(x.view(np.uint16), stream=stream) for x in (problem.q, problem.key, problem.value)
)
output = cuda.device_array(problem.q.shape, np.uint16, stream=stream)
decode(gpu, q, key, value, output, int(stream))
host = output.copy_to_host(stream=stream)
stream.synchronize()
check("Numba", gpu, host.view(ml_dtypes.bfloat16).astype(np.float64), problem)
