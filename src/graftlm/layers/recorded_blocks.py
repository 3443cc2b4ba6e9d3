"""Decoder layers whose steps are recorded, so that a step of a shape that was seen before costs one call."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace

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

# Steps of more rows compute for so much longer than Python takes that a recording gains nothing.
MAX_ROWS = 128
# Each has a few dozen kilobytes of calls and inputs.
MAX_RECORDINGS = 512


class RecordedBlocks:
    """`BlocksRunner` of the layers of one span, whose steps come one after the other.

    A step is recorded if all that its adapters do to the layers is low-rank updates, and if the layers then do nothing
    but call kernels that can be recorded; the others are computed as they come. Which adapters they are, where
    sequences are and how long they are may differ from the recorded step's.
    """

    def __init__(self, recorder: Recorder) -> None:
        self._recorder: Recorder | None = recorder
        self._recorded: OrderedDict[Hashable, _RecordedStep] = OrderedDict()
        self._has_begun = False

    def __call__(self, blocks: Sequence[Block], hidden: Tensor, step: DecoderStep) -> Tensor:
        # What layers make once for themselves is made in a step that is not recorded.
        is_first, self._has_begun = not self._has_begun, True
        if self._recorder is None or is_first or len(hidden) > MAX_ROWS:
            return run_blocks(blocks, hidden, step)
        inputs = _inputs(hidden, step)
        if inputs is None:
            return run_blocks(blocks, hidden, step)
        recorded = self._recorded.get(inputs.layout)
        if recorded is None:
            return self._record(self._recorder, blocks, inputs)
        self._recorded.move_to_end(inputs.layout)
        return recorded.play(inputs)

    def _record(self, recorder: Recorder, blocks: Sequence[Block], inputs: _Inputs) -> Tensor:
        """The step's result."""
        held = inputs.held()
        try:
            recording = recorder.record(lambda: run_blocks(blocks, held.hidden, held.step))
        except NotRecordable as operation:
            logger.info("steps are not recorded here: the layers call %s", operation)
            self._recorder = None
            return run_blocks(blocks, inputs.hidden, inputs.step)
        memories = tuple(plan.memory for plan in held.plans)
        self._recorded[inputs.layout] = _RecordedStep(tensors=held.tensors, memories=memories, recording=recording)
        if len(self._recorded) > MAX_RECORDINGS:
            self._recorded.popitem(last=False)
        return recording.result.clone()


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
        """In the order of `held`."""
        angles = (tensor for angles in self.step.angles.values() for tensor in angles)
        return self.hidden, *angles, *self.step.layer_inputs.values(), *(group.slots for group in self.groups)

    @property
    def plans(self) -> tuple[RecordablePlan, ...]:
        attention = (group.attention for group in self.groups)
        return (*attention,) if self.lora is None else (*attention, self.lora)

    def held(self) -> _Inputs:
        """The same in memory of its own."""
        batch = self.step.batch
        lora = None if self.lora is None else self.lora.held()
        groups = tuple(
            CacheGroupBatch(slots=_copied(group.slots), attention=group.attention.held()) for group in self.groups
        )
        step = replace(
            self.step,
            batch=replace(batch, segments=Segments(batch.segments, plan=lora)),
            key_values=PagedKeyValues(cache=self.cache, groups=groups),
            angles={rotary: Angles(*map(_copied, angles)) for rotary, angles in self.step.angles.items()},
            layer_inputs={layer: _copied(tensor) for layer, tensor in self.step.layer_inputs.items()},
        )
        return _Inputs(hidden=_copied(self.hidden), step=step, cache=self.cache, groups=groups, lora=lora)


@dataclass(frozen=True, kw_only=True)
class _RecordedStep:
    """tensors, memories: where the recording reads its inputs."""

    tensors: tuple[Tensor, ...]
    memories: tuple[PlanMemory, ...]
    recording: Recording

    def play(self, inputs: _Inputs) -> Tensor:
        for own, tensor in zip(self.tensors, inputs.tensors, strict=True):
            own.copy_(tensor)
        for memory, plan in zip(self.memories, inputs.plans, strict=True):
            memory.take_over(plan.memory)
        self.recording.play()
        # The next step's result will be where this one's is.
        return self.recording.result.clone()


def _inputs(hidden: Tensor, step: DecoderStep) -> _Inputs | None:
    """None if the step cannot be recorded."""
    segments, key_values = step.batch.segments, step.key_values
    if not isinstance(key_values, PagedKeyValues) or not segments.are_low_rank:
        return None
    lora = segments.plan if segments else None
    if not (lora is None or isinstance(lora, RecordableLoraPlan)):
        return None
    return _Inputs(hidden=hidden, step=step, cache=key_values.cache, groups=key_values.groups, lora=lora)


def _copied(tensor: Tensor) -> Tensor:
    return tensor.clone(memory_format=torch.contiguous_format)
