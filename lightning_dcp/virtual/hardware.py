"""Rates of the virtual cluster: H200 GPUs, 8 to a node, NVLink inside, InfiniBand between the nodes.

Fixed on 2026-11-30, before any two planners were compared on it, and never changed for the sake of a ratio between
planners. Every number is published: data sheets, benchmarks that others ran, the cost model inside NCCL.

- Matrix peak 989.5 TFLOP/s: NVIDIA H200 data sheet, bfloat16, dense.
- Large products reach 0.65 of it: Azure ND H200 v5 results (github.com/Azure/AI-benchmarking-guide), 1,249 to 1,301
  of 1,979 TFLOP/s for products of 4096^3 and 8192^3 with random data (FP8; the same tensor cores).
- Half a wave of 128 x 256 tiles on 132 multiprocessors stands idle in each product: the wave quantization of NVIDIA's
  matrix multiplication background guide. For 2048^3 and 4096^3 that gives 0.66 and 0.89 of the full rate; the results
  above are 0.78 to 0.87 and 0.96 of that of 8192^3.
- Attention by length: FlashAttention-2 on H100 with head dimension 64, figures 5 and 6 of the FlashAttention-3 paper
  (arXiv:2407.08608).
- Memory 4.01 TB/s (4.8 on the data sheet): Azure ND H200 v5 results, copy.
- Starting a kernel 5 us: more than the 3 us of an empty one (NVIDIA developer forum, thread 233645), less than what
  eager PyTorch takes on the host, most of which runs ahead of the device.
- NVLink 370 GB/s in each direction: 450 at the line less 20 % protocol (NCCL's maintainer, NVIDIA/nccl-tests#212).
- InfiniBand 48 GB/s for each GPU, of 50 (NVIDIA/nccl-tests#267, #290); an all-to-all uses one adapter for each GPU.
- Starting a collective 8.4 us, one hop 3.4 us over NVLink and 14.0 us over the network: NCCL's own model of its rings
  (github.com/NVIDIA/nccl, src/graph/tuning.cc, protocol Simple).
"""

from __future__ import annotations

from dataclasses import dataclass

MATRIX_RATE = 0.65 * 989.5e12
MULTIPROCESSORS = 132
TILE = 128 * 256
MEMORY_BANDWIDTH = 4.01e12
LAUNCH_SECONDS = 5e-6
NVLINK_RATE = 370e9
INFINIBAND_RATE = 48e9
COLLECTIVE_SECONDS, NVLINK_HOP_SECONDS, NETWORK_HOP_SECONDS = 8.4e-6, 3.4e-6, 14.0e-6
RANKS_PER_NODE = 8
"""GPUs of a node."""
MEMORY_BYTES = 80 * 10**9
"""Bytes of a GPU that may be used: the paper limits its 141 GB to 80."""

_ATTENTION_ROWS = 128


@dataclass(frozen=True, slots=True)
class AttentionRate:
    """Operations per second of the attention kernel for sequences of a length: ``peak * s / (s + half)``."""

    peak: float
    half: float

    def at(self, length: float) -> float:
        """Rate for sequences of ``length`` tokens."""
        return self.peak * length / (length + self.half)


# Fitted to the six lengths (512 to 16k) of the figures; each is met within 2 %. TFLOP/s there:
# forward 282 306 318 321 322 324; causal 180 229 262 284 295 299; backward 198 238 264 279 287 291.
ATTENTION_FORWARD = AttentionRate(324e12, 76.0)
ATTENTION_CAUSAL_FORWARD = AttentionRate(303e12, 350.0)
ATTENTION_BACKWARD = AttentionRate(292e12, 243.0)
# The figures have no causal backward: it is taken to lose what the causal forward loses against the full one.
ATTENTION_CAUSAL_BACKWARD = AttentionRate(273e12, 517.0)


def product_seconds(flops: float, inner: float) -> float:
    """Matrix products of ``flops`` operations, and half a wave of tiles for each.

    Args:
        flops: operations of all products together, two for a multiplication with its addition.
        inner: sum over the products of the length of the axis that is summed over.
    """
    return (flops + inner * MULTIPROCESSORS * TILE) / MATRIX_RATE


def attention_seconds(flops: float, length: float, row_flops: float, rate: AttentionRate) -> float:
    """The attention kernel, and half a wave of blocks of 128 query rows.

    Args:
        flops: operations of the call.
        length: tokens of a sequence.
        row_flops: operations of one query row of one head.
        rate: of this kernel.
    """
    idle = 0.5 * MULTIPROCESSORS * _ATTENTION_ROWS * row_flops
    return (flops + idle) / rate.at(length)


def traffic_seconds(moved: float) -> float:
    """Element-wise kernels that read and write ``moved`` bytes together."""
    return moved / MEMORY_BANDWIDTH


def exchange_seconds(held: float, sp_size: int) -> float:
    """One all-to-all among ``p`` ranks.

    Beyond a node the share for other nodes goes over each GPU's own adapter; what stays inside runs at the same time.

    Args:
        held: bytes that a rank holds before and after.
        sp_size: ``p``.
    """
    if sp_size == 1:
        return 0.0
    if sp_size <= RANKS_PER_NODE:
        sent = held * (sp_size - 1) / sp_size
        return COLLECTIVE_SECONDS + NVLINK_HOP_SECONDS + sent / NVLINK_RATE
    outside = held * (sp_size - RANKS_PER_NODE) / sp_size
    hops = -(-sp_size // RANKS_PER_NODE) - 1
    return COLLECTIVE_SECONDS + hops * NETWORK_HOP_SECONDS + outside / INFINIBAND_RATE


def ring_seconds(size: float, calls: int, world_size: int) -> float:
    """Reduce-scatter or all-gather of ``size`` bytes over the world in ``calls`` pieces, rings through all nodes.

    Eight adapters of a node (384 GB/s) carry more than one GPU's NVLink, which is therefore the slowest link.
    """
    if world_size == 1:
        return 0.0
    network_hops = -(-world_size // RANKS_PER_NODE) - 1
    hops = network_hops * NETWORK_HOP_SECONDS + (world_size - 1 - network_hops) * NVLINK_HOP_SECONDS
    return size * (world_size - 1) / world_size / NVLINK_RATE + calls * (COLLECTIVE_SECONDS + hops)
