"""Grammars over the tokens of a request's own tokenizer, by llguidance. Knows no logits: a mask is bytes."""

from __future__ import annotations

import hashlib
import re
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future
from contextlib import contextmanager
from typing import TypeVar
from weakref import WeakKeyDictionary, WeakValueDictionary

from llguidance import LLMatcher, LLParserLimits, grammar_from

from graftlm.engine.grammar_vocabulary import Vocabulary
from graftlm.engine.schema_multiples import least_common_multiple
from graftlm.engine.structured_output import WHITESPACE_PATTERN, StructuredOutput
from graftlm.errors import InvalidRequest
from graftlm.text import Tokenizer

Result = TypeVar("Result")

# Compiled grammars that are kept for each vocabulary.
MAX_CACHED = 64
# Terminals are merged into one automaton, which takes the cube of their number when they refer to each other: 600 take
# 1.6 s, 300 take 0.2 s.
MAX_TERMINALS = 300
_TERMINAL = re.compile(r"(?<![\w\"])[A-Z_][A-Z0-9_]*\s*(?:\[[^\]]*\])?\s*:")
# Telling multiples takes as many states: 100 000 take 1.5 s. Keywords that go together ask for their common one.
MAX_MULTIPLE = 100_000
# The compiler calls itself once for each rule that refers to the next: 5 000 such rules overflow the usual 8 MiB. No
# grammar within the size limit nests deeper than this allows; it is address space, touched only when it is needed.
_STACK_BYTES = 256 << 20
# How long a grammar may take, in seconds of processor time, for a start and per token on top. Usual ones take 20 µs per
# token; `s: s s | "a"` takes more with every token.
_GRACE_SECONDS, _SECONDS_PER_TOKEN = 0.5, 0.005
# An object of n optional properties has 4 n items in a row and 8 n symbols. A state of the lexer takes 1 to 2 kB.
# `(a{1000}){1000}` uses the fuel up, within 0.3 s and 20 MB.
_LIMITS = LLParserLimits(
    max_items_in_row=20_000,
    max_lexer_states=50_000,
    max_grammar_size=20_000,
    initial_lexer_fuel=300_000,
    verbose_errors=False,
)


class Grammar:
    """Where one answer stands in its grammar.

    Args:
        vocab_size: the number of logits; a tokenizer may have more tokens.
    """

    def __init__(self, matcher: LLMatcher, *, vocab_size: int) -> None:
        self._matcher = matcher
        self._vocab_size = vocab_size
        self._seconds_left = _GRACE_SECONDS
        self._mask: Future[bytes] | None = None

    @property
    def error(self) -> str | None:
        """Why no token can follow, if the grammar has become too complex to go on."""
        if self._matcher.is_error():
            return _first_part(self._matcher.get_error())
        return "it takes too long" if self._seconds_left < 0 else None

    @property
    def is_complete(self) -> bool:
        """Whether nothing can follow."""
        return self._matcher.is_stopped() and not self._matcher.is_error()

    @property
    def forced_token(self) -> int | None:
        """The only token that the mask allows, when llguidance sees without one that there is no other."""
        forced = self._matcher.compute_ff_tokens()
        return forced[0] if forced and forced[0] < self._vocab_size else None

    def begin_mask(self, threads: Executor) -> Future[bytes]:
        """Have the mask of the next token computed, if nobody has begun with it: `bitmask` will be its result."""
        if self._mask is None:
            self._mask = threads.submit(self._compute_mask)
        return self._mask

    def bitmask(self) -> bytes:
        """Which tokens may come next: bit i % 8 of byte i // 8 for token i. Means nothing once there is an error."""
        return self._compute_mask() if self._mask is None else self._mask.result()

    def advance(self, token_id: int) -> None:
        """Go on past a token that the mask allows, which has been computed; any other is an error."""
        self._mask = None
        with self._timed():
            self._matcher.consume_token(token_id)
        self._seconds_left += _SECONDS_PER_TOKEN

    def _compute_mask(self) -> bytes:
        with self._timed():
            return self._matcher.compute_bitmask()

    @contextmanager
    def _timed(self) -> Iterator[None]:
        begun = time.thread_time()
        yield
        self._seconds_left -= time.thread_time() - begun


class GrammarCompiler:
    """Compiles structured outputs, and remembers the latest of each vocabulary. Safe to call from several threads;
    one compiles at a time."""

    def __init__(self) -> None:
        self._compiling = threading.Lock()
        self._of_tokenizer: WeakKeyDictionary[Tokenizer, dict[_VocabularyKey, Vocabulary]] = WeakKeyDictionary()
        # Adapters habitually bring the base's tokenizer with a chat template of their own.
        self._by_digest: WeakValueDictionary[tuple[str, _VocabularyKey], Vocabulary] = WeakValueDictionary()

    def is_compiled(
        self, structured: StructuredOutput, tokenizer: Tokenizer, *, vocab_size: int, end_token_ids: frozenset[int]
    ) -> bool:
        """Whether `compile` returns at once."""
        vocabulary = self._of_tokenizer.get(tokenizer, {}).get((vocab_size, end_token_ids))
        return vocabulary is not None and _source(structured) in vocabulary.matchers

    def compile(
        self, structured: StructuredOutput, tokenizer: Tokenizer, *, vocab_size: int, end_token_ids: frozenset[int]
    ) -> Grammar:
        """The beginning of a grammar. Takes milliseconds to seconds the first time, about a second more for the first
        of a vocabulary, and microseconds from then on.

        Args:
            tokenizer: whose tokens answer. vocab_size: the number of their logits.
            end_token_ids: allowed where the grammar may end. With none, an answer that could end and could go on goes
                on.

        Raises:
            InvalidRequest: it is no schema, expression or grammar, uses what cannot be enforced, matches nothing, or
                is too complex; `param` is "structured".
        """
        source = _source(structured)
        with self._compiling:
            vocabulary = self._vocabulary(tokenizer, (vocab_size, end_token_ids))
            matcher = vocabulary.matchers.get(source)
            if matcher is None:
                matcher = _on_deep_stack(lambda: _compile(structured, vocabulary))
                vocabulary.matchers[source] = matcher
                if len(vocabulary.matchers) > MAX_CACHED:
                    vocabulary.matchers.popitem(last=False)
            vocabulary.matchers.move_to_end(source)
            return Grammar(matcher.deep_copy(), vocab_size=vocab_size)

    def _vocabulary(self, tokenizer: Tokenizer, key: _VocabularyKey) -> Vocabulary:
        known = self._of_tokenizer.setdefault(tokenizer, {})
        if key not in known:
            text = tokenizer.to_json()
            digest = (hashlib.sha256(text.encode()).hexdigest(), key)
            vocabulary = self._by_digest.get(digest)
            if vocabulary is None:
                vocab_size, end_token_ids = key
                vocabulary = Vocabulary(
                    text, num_tokens=len(tokenizer), vocab_size=vocab_size, end_token_ids=end_token_ids
                )
            self._by_digest[digest] = known[key] = vocabulary
        return known[key]


_VocabularyKey = tuple[int, frozenset[int]]


def _source(structured: StructuredOutput) -> str:
    return f"{structured.kind}\0{structured.whitespace_pattern}\0{structured.text}"


def _compile(structured: StructuredOutput, vocabulary: Vocabulary) -> LLMatcher:
    try:
        source = _grammar_source(structured, vocabulary)
    except (ValueError, RecursionError) as cause:
        raise _refusal(structured, str(cause)) from cause
    matcher = LLMatcher(vocabulary.tokenizer, source, log_level=0, limits=_LIMITS)
    # The first mask finds what can never fit, and warms up the lexer for all answers.
    matcher.compute_bitmask()
    if matcher.is_error():
        raise _refusal(structured, _first_part(matcher.get_error()))
    if warnings := matcher.get_grammar_warnings():
        raise _refusal(structured, "; ".join(warnings))
    return matcher


def _first_part(error: str) -> str:
    """What llguidance says without the state of its parser."""
    return re.split(r"\s*<(?:state|non-verbose)", error, maxsplit=1)[0]


def _grammar_source(structured: StructuredOutput, vocabulary: Vocabulary) -> str:
    match structured.kind:
        case "json" | "json_object":
            pattern = structured.whitespace_pattern
            pattern = WHITESPACE_PATTERN if pattern is None else pattern
            source = LLMatcher.grammar_from_json_schema(
                structured.text, defaults={"whitespace_flexible": bool(pattern), "whitespace_pattern": pattern or None}
            )
            if (multiple := least_common_multiple(structured.text)) > MAX_MULTIPLE:
                raise ValueError(f"multipleOf needs multiples of {multiple}; at most {MAX_MULTIPLE} are allowed")
            return source
        case "regex":
            return LLMatcher.grammar_from_regex(structured.text)
        case "choice":
            return grammar_from("choice", structured.text)
        case "grammar":
            source = grammar_from("grammar", structured.text)
            if (count := len(_TERMINAL.findall(source))) > MAX_TERMINALS:
                raise ValueError(f"{count} terminals; at most {MAX_TERMINALS} are allowed")
            return vocabulary.with_ids(source)


def _refusal(structured: StructuredOutput, reason: str) -> InvalidRequest:
    return InvalidRequest(
        f"the {structured.kind} cannot be enforced", param="structured", got=" ".join(reason.split())[:300]
    )


def _on_deep_stack(work: Callable[[], Result]) -> Result:
    """Run it in a thread with `_STACK_BYTES` of stack."""
    results: list[Result] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(work())
        except BaseException as error:
            errors.append(error)

    usual = threading.stack_size(_STACK_BYTES)
    try:
        thread = threading.Thread(target=run, name="graft-grammar", daemon=True)
        thread.start()
    finally:
        threading.stack_size(usual)
    thread.join()
    if errors:
        raise errors[0]
    return results[0]
