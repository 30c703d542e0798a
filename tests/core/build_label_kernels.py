"""Compile the label kernels for GPUs that need not be there; print the shared memory that each takes.

python -m tests.core.build_label_kernels 90 bf16 128     # compute capability 9.0, dtype, head dim
"""

from __future__ import annotations

import json
import sys

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from locret.labels import kernel as label_kernel

POINTERS = {"totals": "*fp32", "labels": "*fp32"}
FLOATS = {"scaling": "fp32", "softcap": "fp32"}


def build(capability: int, dtype: str, dim: int) -> list[dict[str, object]]:
    """Compile both kernels with everything switched on."""
    shape = label_kernel.tiles(dim, 4 if dtype == "fp32" else 2)
    built = []
    for kernel, more in ((label_kernel._log_sum_exp, {}), (label_kernel._largest_logit, {"RELATIVE": True})):
        constants = {**{name: value for name, value in shape.items() if name.isupper()}, "SOFTCAP": True, **more}
        types = {
            "query": f"*{dtype}",
            "key": f"*{dtype}",
            **POINTERS,
            **FLOATS,
            **dict.fromkeys(constants, "constexpr"),
        }
        source = ASTSource(
            fn=kernel,
            signature={name: types.get(name, "i32") for name in kernel.arg_names},
            constexprs={(kernel.arg_names.index(name),): value for name, value in constants.items()},
        )
        made = triton.compile(
            source, target=GPUTarget("cuda", capability, 32), options={"num_stages": shape["num_stages"]}
        )
        built.append({"shared": made.metadata.shared, "tensor_cores": "mma" in made.asm["ptx"]})
    return built


if __name__ == "__main__":
    json.dump(build(int(sys.argv[1]), sys.argv[2], int(sys.argv[3])), sys.stdout)
