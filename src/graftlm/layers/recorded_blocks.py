"""Decoder layers whose steps are recorded, so that a step of a shape that was seen before costs one call."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import torch
from torch import Tensor

from graftlm.kernels.kernel_set import (
    NotRecordable,
    PlanMemory,
    RecordableLoraPlan,
    RecordablePlan,
    Recorder,
    Recording,
)
from graftlm.layers.block import Block, run_blocks
from graftlm.layers.key_values import CacheGroupBatch, PagedKeyValues
from graftlm.layers.kv_cache import KVCache
from graftlm.layers.rotary import Angles
from graftlm.layers.segments import Segments
from graftlm.layers.step import DecoderStep

logger = logging.getLogger(__name__)

T = TypeVar("T")

# Of the hidden states: where they are more, layers compute for so much longer than Python takes that a recording gains
# little, and holds much memory.
MAX_ELEMENTS = 1 << 19
# Each has a few dozen kilobytes of calls.
MAX_RECORDINGS = 512
# Layouts that came once.
MAX_SEEN = 4096


class RecordedBlocks:
    """`BlocksRunner` of the layers of one span, whose steps come one after the other.

    A step whose layout came before is recorded, and later ones are played back, if all that their adapters do to the
    layers is low-rank updates, and if the layers then do nothing but call kernels that can be recorded; the others are
    computed as they come. Which adapters they are, where sequences are and how long they are may differ from the
    recorded step's.
    """

    def __init__(self, recorder: Recorder) -> None:
        self._recorder: Recorder | None = recorder
        self._seen: OrderedDict[Hashable, None] = OrderedDict()
        self._recorded: OrderedDict[Hashable, _RecordedStep] = OrderedDict()

    def __call__(self, blocks: Sequence[Block], hidden: Tensor, step: DecoderStep) -> Tensor:
        if self._recorder is None or hidden.numel() > MAX_ELEMENTS:
            return run_blocks(blocks, hidden, step)
        inputs = _inputs(hidden, step)
        if inputs is None:
            return run_blocks(blocks, hidden, step)
        layout = inputs.layout
        recorded = self._recorded.get(layout)
        if recorded is not None:
            self._recorded.move_to_end(layout)
            return recorded.play(inputs)
        if layout in self._seen:
            del self._seen[layout]
            return self._record(self._recorder, blocks, inputs, layout)
        _put(self._seen, layout, None, MAX_SEEN)
        return run_blocks(blocks, hidden, step)

    def _record(self, recorder: Recorder, blocks: Sequence[Block], inputs: _Inputs, layout: Hashable) -> Tensor:
        """The step's result."""
        plans = tuple(plan.held() for plan in inputs.plans)
        try:
            recording = recorder.record(
                inputs.tensors, lambda tensors: run_blocks(blocks, tensors[0], inputs.step_over(tensors, plans))
            )
        except NotRecordable as operation:
            logger.info("steps are not recorded here: the layers call %s", operation)
            self._recorder = None
            return run_blocks(blocks, inputs.hidden, inputs.step)
        recorded = _RecordedStep(memories=tuple(plan.memory for plan in plans), recording=recording)
        _put(self._recorded, layout, recorded, MAX_RECORDINGS)
        return recording.result


@dataclass(frozen=True, kw_only=True)
class _Inputs:
    """What the layers read in a step. groups: of the cache. lora: None without adapters."""

    hidden: Tensor
    step: DecoderStep
    cache: KVCache
    groups: tuple[CacheGroupBatch, ...]
    lora: RecordableLoraPlan | None

    @property
    def layout(self) -> Hashable:
        """Steps of one layout are computed alike."""
        return len(self.hidden), torch.get_num_threads(), *(plan.layout for plan in self.plans)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        angles = (tensor for angles in self.step.angles.values() for tensor in angles)
        return self.hidden, *angles, *self.step.layer_inputs.values(), *(group.slots for group in self.groups)

    @property
    def plans(self) -> tuple[RecordablePlan, ...]:
        attention = (group.attention for group in self.groups)
        return (*attention,) if self.lora is None else (*attention, self.lora)

    def step_over(self, tensors: Sequence[Tensor], plans: Sequence[RecordablePlan]) -> DecoderStep:
        """The step with others in the place of its own."""
        batch, rest = self.step.batch, iter(tensors[1:])
        angles = {rotary: Angles(next(rest), next(rest)) for rotary in self.step.angles}
        layer_inputs = {layer: next(rest) for layer in self.step.layer_inputs}
        attention, lora = plans[: len(self.groups)], plans[len(self.groups) :]
        groups = tuple(CacheGroupBatch(slots=next(rest), attention=plan) for plan in attention)
        plan = next((plan for plan in lora if isinstance(plan, RecordableLoraPlan)), None)
        return replace(
            self.step,
            batch=replace(batch, segments=Segments(batch.segments, plan=plan)),
            key_values=PagedKeyValues(cache=self.cache, groups=groups),
            angles=angles,
            layer_inputs=layer_inputs,
        )


@dataclass(frozen=True, kw_only=True)
class _RecordedStep:
    """memories: of the plans that it was recorded with."""

    memories: tuple[PlanMemory, ...]
    recording: Recording

    def play(self, inputs: _Inputs) -> Tensor:
        for memory, plan in zip(self.memories, inputs.plans, strict=True):
            memory.take_over(plan.memory)
        return self.recording.play(inputs.tensors)


def _inputs(hidden: Tensor, step: DecoderStep) -> _Inputs | None:
    """None if the step cannot be recorded."""
    segments, key_values = step.batch.segments, step.key_values
    if not isinstance(key_values, PagedKeyValues) or not segments.are_low_rank:
        return None
    lora = segments.plan if segments else None
    if not (lora is None or isinstance(lora, RecordableLoraPlan)):
        return None
    return _Inputs(hidden=hidden, step=step, cache=key_values.cache, groups=key_values.groups, lora=lora)


def _put(entries: OrderedDict[Hashable, T], key: Hashable, value: T, limit: int) -> None:
    """Beyond the limit the one that was asked for longest ago goes."""
    entries[key] = value
    if len(entries) > limit:
        entries.popitem(last=False)
