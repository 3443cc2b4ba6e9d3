"""All documents of a file, none longer than the model or the user allows."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from graftlm.errors import TrainingDataError
from graftlm.text import Tokenizer
from graftlm.training.document import Document, RowRefused, encode_row
from graftlm.training.job import LongDocuments
from graftlm.training.rows import Problem, read_rows, report


@dataclass(frozen=True, kw_only=True)
class Documents:
    """num_long: rows that were longer than allowed, and were cut or split."""

    documents: tuple[Document, ...]
    num_long: int

    @property
    def num_tokens(self) -> int:
        return sum(len(document.token_ids) for document in self.documents)

    @property
    def num_targets(self) -> int:
        return sum(len(document.targets) for document in self.documents)


def load_documents(
    path: str | Path, tokenizer: Tokenizer, *, vocab_size: int, max_length: int, long_documents: LongDocuments
) -> Documents:
    """Read and encode a file.

    Raises:
        TrainingDataError: a row cannot be learnt from, or there is none.
    """
    rows, problems = read_rows(path)
    documents: list[Document] = []
    num_long = 0
    for row in rows:
        try:
            document = encode_row(row.content, tokenizer)
            _check_ids(document, vocab_size)
            parts = list(_fit(document, max_length, long_documents))
        except RowRefused as refusal:
            problems.append(Problem(line=row.line, reason=str(refusal)))
            continue
        num_long += len(document.token_ids) > max_length
        documents += parts
    if problems:
        raise report(path, problems)
    if not documents:
        raise TrainingDataError("there are no rows to learn from", got=str(path))
    return Documents(documents=tuple(documents), num_long=num_long)


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
