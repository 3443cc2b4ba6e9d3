"""One worker's share of a model: its layers, their KV cache, and of each adapter what concerns them."""

from __future__ import annotations

import logging
import os
import platform
import time
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from graftlm.adapters import AdapterWeights, read_weights
from graftlm.adapters.name import naming
from graftlm.adapters.weighted import combine_weights
from graftlm.checkpoint import open_checkpoint
from graftlm.distributed.activation_journal import ActivationJournal
from graftlm.distributed.messages import (
    AdapterPart,
    AdapterRecipe,
    PackedTensor,
    StageDescription,
    StagePlan,
    StageReply,
    StageReport,
    StageStep,
    StepKey,
)
from graftlm.distributed.patch_shard import PatchShard
from graftlm.engine.load_options import choose_dtype, load_policy
from graftlm.engine.memory import available_bytes
from graftlm.engine.scheduler import ScheduledSequence
from graftlm.engine.span_runner import SpanRunner
from graftlm.errors import AdapterError, GraftError
from graftlm.kernels.registry import choose_kernels
from graftlm.layers.collective import Collective
from graftlm.layers.patch import LayerStack, ModelPatch, PrefixPatch
from graftlm.models.base_weights import BaseWeights, CheckpointWeights, DecoderWeights
from graftlm.models.build import build_span
from graftlm.models.cache_layout import cache_windows, farthest_group
from graftlm.models.divide import boundary_width
from graftlm.models.layer_span import LayerSpan
from graftlm.models.layout import lay_out
from graftlm.models.quantized_cache import open_quantized_cache
from graftlm.models.read import read_spec
from graftlm.models.tensor_share import share_model
from graftlm.models.whole_weights import WholeWeights

logger = logging.getLogger(__name__)


class StepRefused(GraftError, RuntimeError):
    """A step is not one that this stage can compute now: it belongs to an epoch that is over, others are missing before
    it, what it goes on from is another step's, or what it recalls was not kept here."""


class Stage:
    """Computes steps on a span of layers, or on a rank's share of it.

    Args:
        collective: the ranks of the plan's place, which are all given the same calls.

    Raises:
        CheckpointError, ConfigurationError
    """

    def __init__(self, plan: StagePlan, collective: Collective | None = None) -> None:
        config = plan.config
        self._config = config
        # Stays open: what an adapter means here may depend on weights of other layers.
        self._checkpoint = open_checkpoint(config.model)
        self._kernels = choose_kernels(torch.device("cpu"), deterministic=config.deterministic)
        if collective is not None:
            # Ranks meet within their layers, and that is no call of a kernel's.
            self._kernels = replace(self._kernels, new_recorder=None)
        self._collective = collective
        dtype, device = choose_dtype(config.dtype, self._checkpoint), torch.device("cpu")
        policy = load_policy(config, self._checkpoint)
        cache = None
        # Ranks have cut matrices, which are nobody else's.
        if config.quantization_cache and collective is None:
            cache = open_quantized_cache(self._checkpoint, policy, dtype=dtype, device=device, span=plan.span)
        self._span = build_span(
            self._checkpoint,
            plan.span,
            dtype=dtype,
            device=device,
            policy=policy,
            cache=cache,
            kernels=self._kernels,
            collective=collective,
        )
        self._base: BaseWeights
        self._shard = None
        if collective is not None:
            self._base = WholeWeights(self._checkpoint, dtype=dtype, device=device, policy=policy)
            self._shard = self._patch_shard(plan.span, collective)
        elif self._span.shares:
            whole = WholeWeights(self._checkpoint, dtype=dtype, device=device, policy=policy)
            self._base = DecoderWeights(self._span, elsewhere=whole)
            self._shard = PatchShard(self._span.shares, self._span.linears)
        else:
            self._base = DecoderWeights(self._span, elsewhere=CheckpointWeights(self._checkpoint))
        self._adapters: dict[str, AdapterWeights] = {}
        self._runner = SpanRunner(
            self._span, num_blocks=plan.num_blocks, block_size=config.block_size, kernels=self._kernels
        )
        _, spec = read_spec(self._checkpoint)
        self._width = boundary_width(spec)
        self._journal = self._new_journal(plan, cache_windows(spec))
        self._last = StepKey(epoch=0, number=0)
        self._reply: StageReply | None = None
        self._ended = time.perf_counter()

    def describe(self) -> StageDescription:
        device = torch.device("cpu")
        return StageDescription(node=platform.node(), pid=os.getpid(), free_bytes=available_bytes(device))

    def begin(self, epoch: int) -> None:
        """Start an epoch; steps of earlier ones are refused from now on. What is in the cache stays: those that are
        computed again are written to the same slots."""
        self._last, self._reply = StepKey(epoch=epoch, number=0), None

    def ensure_adapter(self, recipe: AdapterRecipe) -> bool:
        """Have an adapter's weights, as far as they concern these layers.

        Returns: whether they concern them at all.

        Raises:
            AdapterError: its files cannot be read; `AdapterChanged` if they are another's now.
        """
        if recipe.digest not in self._adapters:
            parts = [(self._read(part), part.weight) for part in recipe.parts]
            weighted = [(weights, weight) for weights, weight in parts if weight is not None]
            whole = combine_weights(weighted) if weighted else parts[0][0]
            try:
                self._adapters[recipe.digest] = self._own_part(whole)
            except AdapterError as error:
                raise naming(recipe.name, error) from error
        return self._adapters[recipe.digest].num_bytes > 0

    def forget_adapters(self, digests: Sequence[str]) -> None:
        """Free adapters' weights. Unknown ones are fine."""
        for digest in digests:
            self._adapters.pop(digest, None)

    def step(self, step: StageStep, before: StageReply | None) -> StageReply:
        """Compute a step. The last one again is answered again, not computed again.

        Args:
            before: what the stage before replied to the same step.

        Raises:
            StepRefused
        """
        if self._reply is not None and step.key == self._last:
            return self._reply
        expected = StepKey(epoch=self._last.epoch, number=self._last.number + 1)
        if step.key != expected:
            raise StepRefused("this step does not follow the last one", got=step.key, allowed=str(expected))
        if (None if before is None else before.key) != step.after:
            raise StepRefused("this is not what the stage before gave", got=None if before is None else before.key)
        began = time.perf_counter()
        hidden = None if before is None else before.output
        packed = PackedTensor.of(self._compute(step, None if hidden is None else hidden.unpack()))
        ended = time.perf_counter()
        num_replayed = _num_tokens(step.replays)
        report = StageReport(
            num_tokens=_num_tokens(step.sequences) + num_replayed,
            num_replayed_tokens=num_replayed,
            compute_seconds=ended - began,
            waited_seconds=began - self._ended,
            hop_bytes=packed.content.nbytes + (0 if hidden is None else hidden.content.nbytes),
            adapter_bytes=sum(weights.num_bytes for weights in self._adapters.values()),
        )
        self._last, self._ended = step.key, ended
        reports = () if before is None else before.reports
        self._reply = StageReply(key=step.key, output=packed, reports=(*reports, report))
        return self._reply

    def _new_journal(self, plan: StagePlan, windows: Sequence[int | None]) -> ActivationJournal | None:
        """Where what is given to the next stage is kept: of the ranks, the first one's is what travels."""
        if plan.span.is_last or not self._is_first_rank or not self._config.activation_journal:
            return None
        table = farthest_group(windows)
        return ActivationJournal(
            table=table,
            num_blocks=plan.num_blocks[table],
            block_size=self._config.block_size,
            width=self._width,
            dtype=self._span.dtype,
        )

    @property
    def _is_first_rank(self) -> bool:
        return self._collective is None or self._collective.rank == 0

    def _compute(self, step: StageStep, hidden: Tensor | None) -> Tensor:
        """What this stage gives, as in `StageReply`. hidden: what it was given."""
        sequences = (*step.sequences, *step.replays)
        num_tokens = _num_tokens(sequences)
        if hidden is not None and len(hidden) != num_tokens:
            raise StepRefused(
                "what the stage before gave is not of these tokens", got=len(hidden), allowed=str(num_tokens)
            )
        output = torch.empty(0, self._width, dtype=self._span.dtype)
        if sequences:
            output = self._runner.run(sequences, self._adapters, hidden, step.depths)
        if not self._is_first_rank:
            return output[:0]
        # Of layers that are computed in several goes there is no one row to keep for each token.
        if self._journal is None or step.depths is not None:
            if step.recalled:
                raise StepRefused("what this stage gave was not kept")
            return output
        self._journal.write(sequences, output)
        if not step.replays and not step.recalled:
            return output
        if not self._journal.holds(step.recalled):
            raise StepRefused("what this stage gave for some tokens is not kept any more")
        return torch.cat([output[: _num_tokens(step.sequences)], self._journal.read(step.recalled)])

    def _read(self, part: AdapterPart) -> AdapterWeights:
        try:
            return read_weights(
                part.source,
                part.digest,
                self._base,
                max_bytes=self._config.adapter_memory_bytes,
                allow_pickle=self._config.allow_pickle,
                round_factors=self._config.rounds_factors,
            )
        except AdapterError as error:
            raise naming(part.name, error, hide=part.source) from error

    def _own_part(self, weights: AdapterWeights) -> AdapterWeights:
        patch = self._own_patch(weights.patch)
        # They stay one object where they are one: a sequence is then one segment.
        is_one = weights.dormant_patch is weights.patch
        return AdapterWeights(patch=patch, dormant_patch=patch if is_one else self._own_patch(weights.dormant_patch))

    def _own_patch(self, patch: ModelPatch) -> ModelPatch:
        span = self._span
        own = ModelPatch(
            linears={slot: linear for slot, linear in patch.linears.items() if slot in span.linears},
            norms={slot: norm for slot, norm in patch.norms.items() if slot in span.norms},
            embedding=None if span.embedding is None else patch.embedding,
            head=None if span.output is None else patch.head,
            prefix=None if patch.prefix is None else self._own_prefix(patch.prefix),
            stack=None if patch.stack is None else self._own_stack(patch.stack),
        )
        return own if self._shard is None else self._shard.cut(own)

    def _own_stack(self, stack: LayerStack) -> LayerStack:
        """At the depths of other spans' layers it does nothing."""
        return LayerStack(layers=stack.layers, patches=tuple(self._own_patch(patch) for patch in stack.patches))

    def _patch_shard(self, span: LayerSpan, collective: Collective) -> PatchShard:
        family, spec = read_spec(self._checkpoint)
        share = share_model(spec, lay_out(spec, family.names), rank=collective.rank, size=collective.size)
        return PatchShard(
            {**share.matrices, **self._span.shares},
            self._span.linears,
            collective=collective,
            key_heads=[
                share.heads[index]
                for index in range(span.start, span.stop)
                if spec.layers[index].attention.kv_layer is None
            ],
        )

    def _own_prefix(self, prefix: PrefixPatch) -> PrefixPatch:
        own = slice(self._span.kv_start, self._span.kv_start + len(self._span.kv_shapes))
        return PrefixPatch(keys=prefix.keys[own], values=prefix.values[own])


def _num_tokens(sequences: Sequence[ScheduledSequence]) -> int:
    return sum(len(sequence.token_ids) for sequence in sequences)
