"""What does a grammar cost per row and token at a real vocabulary? Run: python benchmarks/grammar_masks.py

Follows each grammar with random allowed tokens of the bundled model's tokenizer (49 152 tokens) and times the mask
with its unpacking and its use on a row of logits, the step past the chosen token, and what comes before both. Masks and
steps are timed in processor time: what else the machine does is no cost of theirs.
"""

from __future__ import annotations

import time
from statistics import median

import numpy as np
import torch

from graftlm import StructuredOutput
from graftlm.checkpoint import open_checkpoint
from graftlm.demo import demo_model
from graftlm.engine.base import load_text
from graftlm.engine.grammar import GrammarCompiler

VOCAB, ANSWERS, LONGEST = 49_152, 20, 200
ORDER = {
    "type": "object",
    "properties": {
        "customer": {"type": "string", "maxLength": 40},
        "id": {"type": "string", "format": "uuid"},
        "date": {"type": "string", "format": "date"},
        "lines": {
            "type": "array",
            "maxItems": 5,
            "items": {
                "type": "object",
                "properties": {
                    "sku": {"type": "string", "pattern": "^[A-Z]{3}-[0-9]{4}$"},
                    "count": {"type": "integer", "minimum": 1, "maximum": 99},
                    "note": {"type": ["string", "null"], "maxLength": 60},
                },
                "required": ["sku", "count"],
                "additionalProperties": False,
            },
        },
    },
    "required": ["customer", "id", "date", "lines"],
    "additionalProperties": False,
}
FORMS = {
    "JSON schema": StructuredOutput(json=ORDER),
    "any JSON object": StructuredOutput(json_object=True),
    "regular expression": StructuredOutput(regex=r"[A-Z][a-z]{1,20}( [A-Z][a-z]{1,20}){1,8}\."),
    "choice of 100": StructuredOutput(choice=[f"answer number {index}" for index in range(100)]),
}


def main() -> None:
    tokenizer = load_text(open_checkpoint(demo_model()), VOCAB).tokenizer
    compiler = GrammarCompiler()
    vocabulary = {"vocab_size": VOCAB, "end_token_ids": frozenset({2})}
    begun = time.perf_counter()
    compiler.compile(StructuredOutput(choice=["x"]), tokenizer, **vocabulary)
    print(f"vocabulary of {VOCAB} tokens: {time.perf_counter() - begun:.2f} s once")
    random = np.random.default_rng(0)
    print(
        f"{'form':20} {'compile ms':>10} {'mask ms: median':>16} {'mean':>7} {'99 %':>7} {'largest':>8} {'step ms':>8}"
    )
    for name, form in FORMS.items():
        begun = time.perf_counter()
        compiler.compile(form, tokenizer, **vocabulary)
        compiling = time.perf_counter() - begun
        masks, steps = [], []
        for _ in range(ANSWERS):
            grammar = compiler.compile(form, tokenizer, **vocabulary)
            for _ in range(LONGEST):
                logits = torch.zeros(VOCAB)
                begun = time.thread_time()
                bits = np.unpackbits(np.frombuffer(grammar.bitmask(), np.uint8), count=VOCAB, bitorder="little")
                logits.masked_fill_(torch.from_numpy(bits == 0), -torch.inf)
                masks.append(1000 * (time.thread_time() - begun))
                token_id = int(random.choice(np.flatnonzero(bits)))
                begun = time.thread_time()
                grammar.advance(token_id)
                steps.append(1000 * (time.thread_time() - begun))
                if grammar.is_complete or token_id == 2:
                    break
        worst, mean = np.quantile(masks, 0.99), sum(masks) / len(masks)
        numbers = f"{median(masks):16.3f} {mean:7.3f} {worst:7.3f} {max(masks):8.3f} {median(steps):8.3f}"
        print(f"{name:20} {1000 * compiling:10.2f} {numbers}")


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
