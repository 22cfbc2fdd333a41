"""One layer of a batch of C2T trees in one launch; one program scores and prunes the children of one request."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from c2t_kernels.checks import INTEGERS, check_int, check_tensor, per_request
from c2t_kernels.growth.reference import GrownLayer
from c2t_kernels.network import ScoringNetwork
from c2t_kernels.network.kernel import confidence, constants_of, node_stats
from c2t_kernels.stats.result import DraftStats

MAX_CHILDREN = 1024
MAX_WIDTH = 128
MAX_TABLE = 4096  # children times hidden units that one program holds at a time


# Every depth is the same kernel.
@triton.jit(do_not_specialize=["depth"])
def grow_layer_kernel(
    p_joint,
    p_path_entropy,
    p_alive,
    p_token_ids,
    p_log_probs,
    p_entropy,
    p_margin,
    p_beta,
    p_shift,
    p_scale,
    p_hidden_weight,
    p_hidden_bias,
    p_out_weight,
    p_out_bias,
    p_confidence,
    p_kept,
    p_children,
    p_parents,
    p_next_token_ids,
    p_next_joint,
    p_next_path_entropy,
    p_next_alive,
    joint_stride,
    path_entropy_stride,
    alive_stride,
    token_stride,
    log_prob_stride,
    entropy_stride,
    margin_stride,
    beta_stride,
    depth,
    SLOTS: tl.constexpr,
    K: tl.constexpr,
    WIDTH: tl.constexpr,
    CODES: tl.constexpr,
    N_FEATURES: tl.constexpr,
    HIDDEN: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_W: tl.constexpr,
):
    i_request = tl.program_id(0).to(tl.int64)
    N: tl.constexpr = SLOTS * K
    b_child = tl.arange(0, BLOCK_N)
    b_inside = b_child < N
    b_slot, b_rank = b_child // K, b_child % K
    b_row = i_request * SLOTS + b_slot
    b_alive = tl.load(p_alive + i_request * alive_stride + b_slot, mask=b_inside, other=0) != 0
    b_node, b_finite = node_stats(
        p_log_probs + b_row * log_prob_stride,
        b_rank,
        p_entropy + b_row * entropy_stride,
        p_margin + b_row * margin_stride,
        tl.load(p_joint + i_request * joint_stride + b_slot, mask=b_inside, other=0.0),
        tl.load(p_path_entropy + i_request * path_entropy_stride + b_slot, mask=b_inside, other=0.0),
        b_inside,
    )
    b_possible = b_inside & b_alive & (b_node[2] != float("-inf"))
    b_confidence = confidence(
        b_node,
        depth,
        p_shift,
        p_scale,
        p_hidden_weight,
        p_hidden_bias,
        p_out_weight,
        p_out_bias,
        CODES,
        N_FEATURES,
        HIDDEN,
        BLOCK_H,
    )
    b_confidence = tl.where(b_finite & b_possible, b_confidence, float("nan"))

    beta = tl.load(p_beta + i_request * beta_stride)
    b_passing = b_possible & ((b_confidence < beta) == 0)
    # Confidence, then the lower column, in one integer: the bits of floats that are not negative grow with the floats.
    b_bits = tl.where(b_confidence != b_confidence, float("inf"), b_confidence).to(tl.int32, bitcast=True)
    b_key = tl.where(b_passing, b_bits.to(tl.int64) * 4294967296 + (BLOCK_N - 1 - b_child), -1)
    b_place = tl.arange(0, BLOCK_W)
    b_best = tl.full((BLOCK_W,), -1, tl.int32)
    for i in range(WIDTH):
        best = tl.max(b_key, axis=0)
        child = BLOCK_N - 1 - (best & 4294967295).to(tl.int32)
        b_best = tl.where((b_place == i) & (best >= 0), child, b_best)
        b_key = tl.where(b_key == best, -1, b_key)
    b_kept = b_passing & (b_key == -1)

    tl.store(p_confidence + i_request * N + b_child, b_confidence, mask=b_inside)
    tl.store(p_kept + i_request * N + b_child, b_kept.to(tl.uint8), mask=b_inside)
    b_live = b_best >= 0
    b_parent = tl.where(b_live, b_best // K, 0)
    b_parent_row = i_request * SLOTS + b_parent
    b_node, _ = node_stats(
        p_log_probs + b_parent_row * log_prob_stride,
        b_best % K,
        p_entropy + b_parent_row * entropy_stride,
        p_margin + b_parent_row * margin_stride,
        tl.load(p_joint + i_request * joint_stride + b_parent, mask=b_live, other=0.0),
        tl.load(p_path_entropy + i_request * path_entropy_stride + b_parent, mask=b_live, other=0.0),
        b_live,
    )
    b_token = tl.load(p_token_ids + b_parent_row * token_stride + b_best % K, mask=b_live, other=0)
    b_next = i_request * WIDTH + b_place
    b_inside = b_place < WIDTH
    tl.store(p_children + b_next, b_best, mask=b_inside)
    tl.store(p_parents + b_next, tl.where(b_live, b_parent, -1), mask=b_inside)
    tl.store(p_next_token_ids + b_next, b_token.to(tl.int64), mask=b_inside)
    tl.store(p_next_joint + b_next, tl.where(b_live, b_node[0], float("-inf")), mask=b_inside)
    tl.store(p_next_path_entropy + b_next, tl.where(b_live, b_node[1], 0.0), mask=b_inside)
    tl.store(p_next_alive + b_next, b_live.to(tl.uint8), mask=b_inside)


def grow_layer(
    network: ScoringNetwork,
    joint_log_prob: Tensor,
    path_entropy: Tensor,
    alive: Tensor,
    stats: DraftStats,
    beta: Tensor | float,
    depth: int,
    *,
    width: int,
) -> GrownLayer:
    """As c2t_kernels.grow_layer, in one launch.

    beta: also a 1-element tensor of the device, read at run time. Tables may have rows of any stride.
    Raises ValueError or TypeError for wrong shapes, dtypes, devices and strides, more than MAX_CHILDREN children (both
    slots and k count) or more than MAX_WIDTH places.
    """
    check_tensor("grow_layer: joint_log_prob", joint_log_prob, dtype=torch.float32, shape=(None, None))
    (bs, slots), device = joint_log_prob.shape, joint_log_prob.device
    check_tensor("grow_layer: path_entropy", path_entropy, dtype=torch.float32, shape=(bs, slots), device=device)
    check_tensor("grow_layer: alive", alive, dtype=torch.bool, shape=(bs, slots), device=device)
    check_tensor("grow_layer: stats.log_probs", stats.log_probs, dtype=torch.float32, shape=(None, None))
    k = stats.log_probs.shape[1]
    table, row = (bs * slots, k), (bs * slots,)
    check_tensor("grow_layer: stats.log_probs", stats.log_probs, shape=table, device=device)
    check_tensor("grow_layer: stats.token_ids", stats.token_ids, dtype=INTEGERS, shape=table, device=device)
    for name, value in (("entropy", stats.entropy), ("margin", stats.margin)):
        check_tensor(
            f"grow_layer: stats.{name}", value, dtype=torch.float32, shape=row, device=device, contiguous_last=False
        )
    check_tensor("grow_layer: network.shift", network.shift, device=device)
    beta, beta_stride = per_request("grow_layer: beta", beta, bs, torch.float32, device)
    check_int("grow_layer: depth", depth, 1)
    check_int("grow_layer: width", width, 1, MAX_WIDTH)
    check_int("grow_layer: children", slots * k, 1, MAX_CHILDREN)
    made = _layer(bs, slots * k, width, device)
    if bs == 0:
        return made
    blocks, num_warps = _blocks(slots, k, width, network.features, len(network.hidden_bias))
    read = (joint_log_prob, path_entropy, alive, *stats)
    grow_layer_kernel[(bs,)](
        *(_as_bytes(each) for each in read),
        beta,
        *network.weights().values(),
        *(_as_bytes(each) for each in made),
        *(each.stride(0) for each in read),
        beta_stride,
        depth + network.depth_origin - 1,
        **blocks,
        num_warps=num_warps,
    )
    return made


def _as_bytes(tensor: Tensor) -> Tensor:
    return tensor.view(torch.uint8) if tensor.dtype == torch.bool else tensor


def _layer(bs: int, children: int, width: int, device: torch.device) -> GrownLayer:
    """Without content."""
    dtypes = {"children": torch.int32, "parents": torch.int32, "token_ids": torch.int64}
    dtypes |= {"kept": torch.bool, "alive": torch.bool}
    columns = {"confidence": children, "kept": children}
    made = {
        name: torch.empty(bs, columns.get(name, width), dtype=dtypes.get(name, torch.float32), device=device)
        for name in GrownLayer._fields
    }
    return GrownLayer(**made)


def _blocks(slots: int, k: int, width: int, features: tuple[str, ...], hidden: int) -> tuple[dict[str, int], int]:
    """Constants of a launch, and its warps."""
    block_n = triton.next_power_of_2(slots * k)
    blocks = {
        "SLOTS": slots,
        "K": k,
        "WIDTH": width,
        **constants_of(features, hidden),
        "BLOCK_N": block_n,
        "BLOCK_H": min(triton.next_power_of_2(hidden), MAX_TABLE // block_n),
        "BLOCK_W": triton.next_power_of_2(width),
    }
    return blocks, 4 if block_n <= 64 else 8
