"""An adapter over a GPTQ checkpoint, which stays in its own format: base and adapter answer in one batch.

python examples/gptq_lora.py path/to/gptq-model path/to/adapter
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from graftlm import LLM, SamplingParams


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model", help="folder or hub id of a GPTQ checkpoint")
    parser.add_argument("adapter", help="folder or hub id of an adapter trained over it")
    parser.add_argument("--prompt", default="Dear Sir,")
    options = parser.parse_args(arguments)

    llm = LLM(options.model, adapters={"adapter": options.adapter})
    rows = [None, "adapter"]
    outputs = llm.generate([options.prompt] * 2, SamplingParams(max_tokens=32, temperature=0), adapter=rows)
    for name, output in zip(rows, outputs, strict=True):
        print(f"{name or 'base'}: {output.outputs[0].text!r}")


if __name__ == "__main__":
    main()
