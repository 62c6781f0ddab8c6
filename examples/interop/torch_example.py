"""Torch tensors in and out, in place: `python -m examples.interop.torch_example`.

The package never imports torch. On a GPU where torch has one, else on CPU tensors through the emulator.
"""

import numpy as np

from cupaged import CupyBackend, EmulatorBackend
from examples.interop.problem import check, decode, make_problem

try:
    import torch
except ModuleNotFoundError as error:
    raise SystemExit(f"{error}; this example needs it: pip install '.[interop]'") from None

problem = make_problem()
on_gpu = torch.cuda.is_available()
gpu = CupyBackend(torch.cuda.current_device()) if on_gpu else EmulatorBackend()
stream = torch.cuda.current_stream().cuda_stream if on_gpu else gpu.null_stream()
q, key, value = (
    torch.from_numpy(x.astype(np.float32)).to("cuda" if on_gpu else "cpu", torch.bfloat16)
    for x in (problem.q, problem.key, problem.value)
)
output = torch.full_like(q, float("nan"))
decode(gpu, q, key, value, output, stream)
check("torch", gpu, output.double().cpu().numpy(), problem)
