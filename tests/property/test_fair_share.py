"""Weighted shares between tenants, on the real scheduler under load that never pauses."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st

from graftlm.engine.policy import FairShare, FirstComeFirstServed, SchedulingPolicy
from tests.property.test_scheduler import make_request, make_scheduler

MAX_NUM_SEQS = 4
BACKLOG = 6


@dataclass(kw_only=True)
class Habits:
    """What a tenant's requests look like, one after the other and then from the start."""

    share: float
    prompt_lens: list[int]
    answer_lens: list[int]

    @property
    def longest(self) -> int:
        return max(self.prompt_lens) + max(self.answer_lens)


@dataclass(kw_only=True)
class Traffic:
    """Every tenant always has requests waiting; each step computes what the scheduler plans."""

    tenants: dict[str, Habits]
    policy: SchedulingPolicy
    num_blocks: int = 10_000
    served: Counter[str] = field(default_factory=Counter)
    sent: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self.scheduler = make_scheduler(
            num_blocks=self.num_blocks,
            block_size=4,
            max_num_seqs=MAX_NUM_SEQS,
            max_num_batched_tokens=16,
            policy=self.policy,
        )
        self._tenant_of: dict[str, str] = {}
        self._unfinished: Counter[str] = Counter()

    def step(self) -> None:
        for tenant in self.tenants:
            while self._unfinished[tenant] < MAX_NUM_SEQS + BACKLOG:
                self._send(tenant)
        output = self.scheduler.schedule()
        tokens = {}
        for sequence in output.sequences:
            self.served[self._tenant_of[sequence.request_id]] += len(sequence.token_ids)
            if sequence.num_logits:
                tokens[sequence.request_id] = 1
        for request in self.scheduler.update(output, tokens):
            if request.finish_reason is not None:
                self._unfinished[request.tenant] -= 1

    def lead(self, one: str, other: str) -> float:
        """By how much the first is ahead, in tokens for a share of one."""
        return self.served[one] / self.tenants[one].share - self.served[other] / self.tenants[other].share

    def _send(self, tenant: str) -> None:
        habits, number = self.tenants[tenant], self.sent[tenant]
        request = make_request(
            f"{tenant}-{number}",
            prompt_len=habits.prompt_lens[number % len(habits.prompt_lens)],
            max_tokens=habits.answer_lens[number % len(habits.answer_lens)],
        )
        request.tenant = tenant
        self.scheduler.add(request)
        self.sent[tenant] += 1
        self._unfinished[tenant] += 1
        self._tenant_of[request.request_id] = tenant


def bound(tenants: dict[str, Habits], tenant: str) -> float:
    """How far a tenant can get ahead of another that always has requests waiting: it is admitted only while it is not
    ahead, and then computes at most what its running requests have left."""
    return MAX_NUM_SEQS * tenants[tenant].longest / tenants[tenant].share


HABITS = st.builds(
    Habits,
    share=st.sampled_from([0.5, 1.0, 2.0, 5.0]),
    prompt_lens=st.lists(st.integers(1, 24), min_size=1, max_size=3),
    answer_lens=st.lists(st.integers(1, 12), min_size=1, max_size=3),
)


@settings(max_examples=40, deadline=None)
@given(
    habits=st.lists(HABITS, min_size=2, max_size=4),
    # Enough for everybody, or so few that requests are preempted and computed again.
    num_blocks=st.sampled_from([10_000, 14]),
)
def test_tokens_served_follow_the_shares_within_a_bound_at_every_step(habits: list[Habits], num_blocks: int) -> None:
    tenants = {f"tenant{number}": each for number, each in enumerate(habits)}
    policy = FairShare({name: each.share for name, each in tenants.items()})
    traffic = Traffic(tenants=tenants, policy=policy, num_blocks=num_blocks)
    for _ in range(200):
        traffic.step()
        for one in tenants:
            for other in tenants:
                assert traffic.lead(one, other) <= bound(tenants, one)
    assert min(traffic.served.values()) > 0


def test_without_shares_whoever_asks_for_more_gets_more() -> None:
    tenants = {
        "modest": Habits(share=1, prompt_lens=[1], answer_lens=[1]),
        "greedy": Habits(share=1, prompt_lens=[24], answer_lens=[12]),
    }
    leads = {}
    for name, policy in (("fair", FairShare({})), ("fcfs", FirstComeFirstServed())):
        traffic = Traffic(tenants=tenants, policy=policy)
        for _ in range(500):
            traffic.step()
        leads[name] = traffic.lead("greedy", "modest")
    assert leads["fair"] <= bound(tenants, "greedy") < leads["fcfs"]
