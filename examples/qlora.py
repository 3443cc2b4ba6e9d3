"""QLoRA adapters served as they were trained: an NF4 base with three adapters in one batch, and without any.

    python examples/qlora.py path/to/model first=adapters/first second=adapters/second third=adapters/third

The model may be in full precision, in which case it is quantised while it is read, or saved in NF4 with double
quantisation already.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from graftlm import LLM, SamplingParams
from graftlm.cli.options import parse_adapters


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model", help="model folder or hub id")
    parser.add_argument("adapters", nargs="+", metavar="NAME=PATH", help="an adapter trained over the model in NF4")
    parser.add_argument("--prompt", default="Dear Sir,")
    options = parser.parse_args(arguments)

    llm = LLM(options.model, quantization="nf4-double", adapters=parse_adapters(options.adapters))
    rows = [None, *llm.adapters]
    params = SamplingParams(max_tokens=32, temperature=0)
    together = llm.generate([options.prompt] * len(rows), params, adapter=rows)
    for name, output in zip(rows, together, strict=True):
        print(f"{name or 'base'}: {output.outputs[0].text!r}")

    for name in list(llm.adapters):
        llm.unload_adapter(name)
    [alone] = llm.generate(options.prompt, params)
    print(f"without adapters: {alone.outputs[0].text!r}")


if __name__ == "__main__":
    main()
