"""CuPy arrays in, a CuPy array out: `python -m examples.interop.cupy_example` (needs a GPU)."""

import ml_dtypes
import numpy as np

from cupaged import CupyBackend
from examples.interop.problem import check, decode, make_problem

try:
    import cupy
except ModuleNotFoundError as error:
    raise SystemExit(f"{error}; this example needs it: pip install '.[cuda12]'") from None

problem = make_problem()
gpu = CupyBackend()
stream = cupy.cuda.Stream(non_blocking=True)
with stream:  # CuPy's own work goes where the kernels' does
    # CuPy has no BF16 that every version knows: give the bits.
    q, key, value = (cupy.asarray(x.view(np.uint16)) for x in (problem.q, problem.key, problem.value))
    output = cupy.empty(q.shape, np.uint16)
    decode(gpu, q, key, value, output, stream)
    result = (output.astype(np.uint32) << 16).view(np.float32)  # BF16 is the upper half of a float32
host = cupy.asnumpy(output).view(ml_dtypes.bfloat16).astype(np.float64)
if not (cupy.asnumpy(result) == host).all():
    raise SystemExit("the same bits, read on the GPU and on the host, differ")
check("CuPy", gpu, host, problem)
