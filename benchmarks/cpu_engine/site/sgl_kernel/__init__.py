"""Pure-PyTorch stub for the ops of `sgl_kernel` that SGLang 0.5.23 calls on a CPU.

SGLang's CPU engine needs the CPU build of `sgl_kernel`, which no wheel carries. This package has the same names and
argument order, so the stock server, its scheduler, KV pools, draft workers, verification and HTTP API run on any CPU.
It is meant for tests and demonstrations with small models: the results are those of the real ops, the speed is not.

`convert_weight_packed` is left out on purpose. SGLang probes for it, concludes that the packed AMX kernels are absent,
and takes its native torch path in every layer but attention, and but for wide weights (linear.py).
"""

from ._guard import refuse_unless_asked_for

refuse_unless_asked_for()

from . import attention, murmur, packed  # noqa: E402, F401  (importing them registers torch.ops.sgl_kernel.*)
from .cache_locs import (  # noqa: E402
    assign_draft_cache_locs_contiguous_cpu,
    assign_extend_cache_locs_cpu,
    assign_req_to_token_pool_cpu,
    build_draft_decode_metadata_cpu,
    copy_all_layer_kv_cache_cpu,
)
from .tree import build_tree_kernel_efficient_cpu  # noqa: E402
from .verify import (  # noqa: E402
    fill_accept_out_cache_loc_cpu,
    fill_bonus_tokens_cpu,
    rotate_input_ids_cpu,
    verify_tree_greedy_cpu,
)

__version__ = "0.5.23+c2t.stand.in"

__all__ = [
    "assign_draft_cache_locs_contiguous_cpu",
    "assign_extend_cache_locs_cpu",
    "assign_req_to_token_pool_cpu",
    "build_draft_decode_metadata_cpu",
    "build_tree_kernel_efficient_cpu",
    "copy_all_layer_kv_cache_cpu",
    "fill_accept_out_cache_loc_cpu",
    "fill_bonus_tokens_cpu",
    "rotate_input_ids_cpu",
    "verify_tree_greedy_cpu",
]
