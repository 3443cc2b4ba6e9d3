"""Nothing PEFT can write into a config is passed over, and no method is served without a test."""

from __future__ import annotations

import pytest

from graftlm.adapters.methods import METHODS, REFUSED_METHODS
from tests.parity.conformance import MethodConformance, conformance, refused_fields, summary, table


@pytest.mark.parametrize("method", conformance(), ids=lambda method: str(method.peft_type))
def test_every_field_of_a_method_is_read_without_effect_or_refused(method: MethodConformance) -> None:
    assert method.ignored == set()
    assert method.num_cases > 0


def test_no_field_is_declared_twice() -> None:
    for method in METHODS.values():
        assert not method.fields.read & method.fields.inert
        assert not (method.fields.read | method.fields.inert) & method.fields.refused.keys()


def test_the_table_has_every_method_and_the_summary_counts_what_is_refused() -> None:
    assert all(f"| `{peft_type}` |" in table() for peft_type in METHODS)
    assert f"of {len(METHODS)} methods served" in summary()
    assert f"{len(REFUSED_METHODS)} methods" in summary()
    assert "0 fields ignored" in summary()
    assert "`layer_replication`" in refused_fields()
