"""Predict how long one denoising step takes, and what it holds, under given degrees.

Counts operations and bytes; nothing runs. Per GPU and per direction of its link, for ``S`` tokens of
``h`` channels with ``b`` bytes each, in every attention over the sequence:

- Ulysses over ``U`` of ``N`` ranks: ``4 b S h / N * (U - 1) / U``, waited for.
- Ring over ``R`` ranks: ``R - 1`` times ``2 b (S / R) (h / U)``, beside the attention with the part before,
  which hides a step's fixed cost only where there is enough of it.
- Tensor parallel over ``T`` ranks: ``2 b S h / (N / T) * (T - 1) / T`` for each row-parallel layer.
- CFG and batch: the prediction, once a step; nothing worth counting. The part with the most samples decides.

Sources: DeepSpeed-Ulysses (arXiv:2309.14509), Ring Attention (arXiv:2310.01889), Megatron-LM
(arXiv:1909.08053), USP (arXiv:2405.07719).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from .mesh import ParallelDims

# Attention in parts and their merge against attention at once: 1.15 at 32760 tokens, 1.3 at 16640 (H200,
# bf16, 2 parts).
_RING_COST = 1.25


@dataclass(frozen=True)
class AttentionWork:
    """Attention calls of one shape.

    Args:
        queries: Query tokens of the whole sequence, per sample.
        keys: Key tokens.
        heads: Attention heads.
        head_channels: Channels of one head.
        batch: Samples.
        count: How many such calls one forward makes.
        over_sequence: Whether the keys are the sequence that ranks share (self-attention); else every
            rank has them whole (cross-attention to text).
    """

    queries: int
    keys: int
    heads: int
    head_channels: int
    batch: int = 1
    count: int = 1
    over_sequence: bool = True

    @property
    def channels(self) -> int:
        """Channels of all heads."""
        return self.heads * self.head_channels

    @property
    def flops(self) -> float:
        """Operations of all calls: two products of queries with keys, multiply and add."""
        return 4.0 * self.count * self.batch * self.queries * self.keys * self.channels


@dataclass(frozen=True)
class DenoiserWork:
    """One evaluation of a denoiser for one conditioning.

    Args:
        linear_flops: Operations outside attention.
        attention: Its attention calls.
        weight_bytes: All weights.
        cut_weight_bytes: Those of them that tensor parallelism deals out.
        reduced_elements: Elements that tensor parallelism sums over ranks in one forward: the outputs of
            all row-parallel layers.
        reductions: Number of those layers.
        operations: How many kernels one forward launches.
        element_bytes: Bytes of one activation value.
        conditionings: Evaluations a step; 2 with a negative prompt.
        samples: Samples of the batch that one evaluation is of.
        activation_bytes: What the forward holds at its peak besides the weights.
    """

    linear_flops: float
    attention: tuple[AttentionWork, ...]
    weight_bytes: int
    cut_weight_bytes: int = 0
    reduced_elements: int = 0
    reductions: int = 0
    operations: int = 0
    element_bytes: int = 2
    conditionings: int = 1
    samples: int = 1
    activation_bytes: int = 0


@dataclass(frozen=True)
class Machine:
    """What the GPUs can do; measured, or the card's data sheet times what is usually reached.

    Args:
        gpus: How many there are.
        memory_bytes: Free memory of the smallest.
        linear_flops_per_s: Matrix products, each GPU.
        attention_flops_per_s: Attention, each GPU.
        link_bytes_per_s: One GPU to the others, one direction.
        collective_s: Fixed cost of a collective (two H200: 55 us for two bytes).
        ring_step_s: Fixed cost of a step of the ring, in which ranks send and receive. Fitted to Qwen-Image
            at 1024 pixels on two H200.
        launch_s: Time in which the host issues one kernel: no forward takes less than all of its own.
        dispatch_s: Fixed cost of sending a call to worker processes.
    """

    gpus: int
    memory_bytes: int
    linear_flops_per_s: float
    attention_flops_per_s: float
    link_bytes_per_s: float
    collective_s: float = 50e-6
    ring_step_s: float = 300e-6
    launch_s: float = 0.0
    dispatch_s: float = 1e-3


@dataclass(frozen=True)
class Prediction:
    """What one step costs under some degrees.

    Args:
        dims: The degrees.
        step_s: One step, all conditionings.
        exchange_s: The part of it in which a GPU waits for others.
        memory_bytes: What each GPU holds at the peak.
    """

    dims: ParallelDims
    step_s: float
    exchange_s: float
    memory_bytes: float


def predict(work: DenoiserWork, machine: Machine, dims: ParallelDims) -> Prediction:
    """Return the cost of one step of ``work`` under ``dims``; any degrees, also ones that do not fit."""
    work = _largest_part(work, dims.batch)
    share = dims.sequence_size * dims.tp
    compute_s = work.linear_flops / share / machine.linear_flops_per_s
    exchange_s = 0.0
    for call in work.attention:
        attention_s, waited_s = _attention(call, work.element_bytes, machine, dims)
        compute_s += attention_s
        exchange_s += waited_s
    exchange_s += _reduction_s(work, machine, dims)
    forward_s = max(compute_s + exchange_s, work.operations * machine.launch_s)
    if dims.world_size > 1:
        forward_s += machine.dispatch_s
    rounds = math.ceil(work.conditionings / dims.cfg)
    whole = work.weight_bytes - work.cut_weight_bytes
    memory = whole + work.cut_weight_bytes * _largest_share(work, dims.tp) + work.activation_bytes / share
    return Prediction(dims, rounds * forward_s, rounds * exchange_s, memory)


def _largest_share(work: DenoiserWork, ranks: int) -> float:
    """Return the share of the cut weights on the tensor parallel rank that has the most heads."""
    heads = [call.heads for call in work.attention if call.over_sequence]
    return max([math.ceil(count / ranks) / count for count in heads], default=1 / ranks)


def _largest_part(work: DenoiserWork, parts: int) -> DenoiserWork:
    """Return the work of the ranks that have the most samples of the batch."""
    if parts == 1:
        return work
    samples = math.ceil(work.samples / parts)
    share = samples / work.samples
    return replace(
        work,
        linear_flops=work.linear_flops * share,
        attention=tuple(replace(call, batch=math.ceil(call.batch * share)) for call in work.attention),
        reduced_elements=math.ceil(work.reduced_elements * share),
        activation_bytes=math.ceil(work.activation_bytes * share),
        samples=samples,
    )


def _attention(
    call: AttentionWork, element_bytes: int, machine: Machine, dims: ParallelDims
) -> tuple[float, float]:
    """Return the seconds that a rank computes and those that it waits, for all calls of one shape."""
    heads_here = math.ceil(call.heads / dims.tp)
    if not call.over_sequence:
        share = heads_here / call.heads / dims.sequence_size
        return call.flops * share / machine.attention_flops_per_s, 0.0
    # The rank with the most heads decides.
    heads_after = math.ceil(heads_here / dims.ulysses)
    compute_s = call.flops * heads_after / call.heads / dims.ring / machine.attention_flops_per_s
    token_bytes = element_bytes * call.batch * call.head_channels * heads_here
    waited_s = 0.0
    if dims.ulysses > 1:
        # Queries and keys, values as long as they, and the output: four of the queries' size.
        local_tokens = 2 * (call.queries + call.keys) / dims.sequence_size
        sent = token_bytes * local_tokens * (dims.ulysses - 1) / dims.ulysses
        waited_s += call.count * (sent / machine.link_bytes_per_s + 4 * machine.collective_s)
    if dims.ring > 1:
        compute_s *= _RING_COST
        part = 2 * token_bytes / heads_here * heads_after * call.keys / dims.ring
        transfer_s = part / machine.link_bytes_per_s + machine.ring_step_s
        beside_s = compute_s / call.count / dims.ring
        waited_s += call.count * (dims.ring - 1) * max(0.0, transfer_s - beside_s)
    return compute_s, waited_s


def _reduction_s(work: DenoiserWork, machine: Machine, dims: ParallelDims) -> float:
    if dims.tp == 1:
        return 0.0
    elements = work.reduced_elements / dims.sequence_size
    sent = 2 * work.element_bytes * elements * (dims.tp - 1) / dims.tp
    return sent / machine.link_bytes_per_s + work.reductions * machine.collective_s
