"""JAX arrays in, a JAX array out, by DLPack both ways: `python -m examples.interop.jax_example`.

On a GPU where JAX has one, else on its CPU arrays through the emulator.
"""

import numpy as np

from cupaged import CupyBackend, EmulatorBackend
from cupaged.interop import stream_memory
from examples.interop.problem import check, decode, make_problem

try:
    import jax
    import jax.numpy as jnp
except ModuleNotFoundError as error:
    raise SystemExit(f"{error}; this example needs it: pip install '.[interop]'") from None

problem = make_problem()
gpu = CupyBackend() if jax.default_backend() == "gpu" else EmulatorBackend()
stream = gpu.null_stream()
q, key, value = (jnp.asarray(x) for x in (problem.q, problem.key, problem.value))
# JAX's arrays never change, so the result goes to memory of the backend, which JAX then takes over.
bits = gpu.empty(q.shape, np.uint16)
decode(gpu, q, key, value, bits, stream)
with stream_memory(gpu, stream):  # JAX comes after this stream
    output = jax.lax.bitcast_convert_type(jax.dlpack.from_dlpack(bits), jnp.bfloat16)
if not isinstance(output, jax.Array):
    raise SystemExit(f"got a {type(output).__name__}, expected a JAX array")
check("JAX", gpu, np.asarray(output.astype(jnp.float32)).astype(np.float64), problem)
