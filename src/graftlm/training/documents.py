"""All documents of a file, none longer than the model or the user allows."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from graftlm.errors import TrainingDataError
from graftlm.text import Tokenizer
from graftlm.training.document import Document, Example, RowRefused, encode_pair, encode_row
from graftlm.training.job import LongDocuments, ObjectiveName
from graftlm.training.rows import Problem, read_rows, report


@dataclass(frozen=True, kw_only=True)
class Documents:
    """num_long: rows that were longer than allowed, and were cut or split."""

    examples: tuple[Example, ...]
    num_long: int

    @property
    def documents(self) -> tuple[Document, ...]:
        return tuple(document for example in self.examples for document in example)

    @property
    def num_tokens(self) -> int:
        return sum(len(document.token_ids) for document in self.documents)

    @property
    def num_targets(self) -> int:
        return sum(len(document.targets) for document in self.documents)


def load_documents(
    path: str | Path,
    tokenizer: Tokenizer,
    *,
    objective: ObjectiveName = "sft",
    vocab_size: int,
    max_length: int,
    long_documents: LongDocuments,
) -> Documents:
    """Read and encode a file, whose rows have the form that the objective needs.

    Raises:
        TrainingDataError: a row cannot be learnt from, or there is none.
    """
    rows, problems = read_rows(path)
    examples: list[Example] = []
    num_long = 0
    for row in rows:
        try:
            example: Example
            if objective == "dpo":
                example = encode_pair(row.content, tokenizer)
            else:
                example = (encode_row(row.content, tokenizer),)
            for document in example:
                _check_ids(document, vocab_size)
            # A pair is never split, so its documents have one part each.
            parts = list(zip(*(_fit(document, max_length, long_documents) for document in example), strict=True))
        except RowRefused as refusal:
            problems.append(Problem(line=row.line, reason=str(refusal)))
            continue
        num_long += any(len(document.token_ids) > max_length for document in example)
        examples += parts
    if problems:
        raise report(path, problems)
    if not examples:
        raise TrainingDataError("there are no rows to learn from", got=str(path))
    return Documents(examples=tuple(examples), num_long=num_long)


def _check_ids(document: Document, vocab_size: int) -> None:
    if not document.targets:
        raise RowRefused("it has no tokens to learn")
    if (largest := max(document.token_ids)) >= vocab_size:
        raise RowRefused(f"the tokenizer gives token {largest}, but the model has rows for {vocab_size}")


def _fit(document: Document, max_length: int, long_documents: LongDocuments) -> Iterator[Document]:
    length = len(document.token_ids)
    if length <= max_length:
        yield document
        return
    if long_documents == "refuse":
        raise RowRefused(f"it has {length} tokens, more than {max_length}")
    starts = [0] if long_documents == "truncate" else range(0, length, max_length)
    parts = [part for start in starts if (part := document.part(start, start + max_length)).targets]
    if not parts:
        raise RowRefused(f"its first {max_length} of {length} tokens hold nothing to learn")
    yield from parts
