"""How far the kernels' arithmetic (8-bit activations, half-precision KV) is from float32 on the same weights.

    python benchmarks/quality.py MODEL [--tokens 2000] [--json]

Runs a text through the reference interpreter (NumPy, float32, nothing rounded) and through the native one, in windows
of 500 tokens, and prints the mean Kullback-Leibler divergence of the next-token distributions, how often both have
the same first choice, and both perplexities.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np

from pilotfish import LLM
from pilotfish.program import BLOCK_SIZE
from pilotfish.tree import Rows, TreeBatch

WINDOW = 500


def log_softmax(logits: np.ndarray) -> np.ndarray:
    scores = logits.astype(np.float64)
    scores -= scores.max(axis=1, keepdims=True)
    return scores - np.log(np.exp(scores).sum(axis=1, keepdims=True))


def logits_of(llm: LLM, tokens: list[int]) -> np.ndarray:
    blocks = list(range(-(-len(tokens) // BLOCK_SIZE)))
    batch = TreeBatch.build([Rows(tokens, 0, blocks, all_logits=True)])
    logits = llm.target.executable.forward(batch, llm.target.kv, True).logits
    assert logits is not None
    return logits


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--tokens", type=int, default=2000)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    native = LLM(args.model, context=WINDOW)
    reference = LLM(args.model, context=WINDOW, backend="reference")
    text = (Path(__file__).parent / "text.txt").read_text(encoding="utf-8")
    tokens = native.tokenizer.encode(text, special=False)[: args.tokens]
    divergences, agreements, losses = [], [], {"native": [], "reference": []}
    for start in range(0, len(tokens), WINDOW):
        window = tokens[start : start + WINDOW]
        found, exact = log_softmax(logits_of(native, window)), log_softmax(logits_of(reference, window))
        divergences.append((np.exp(exact) * (exact - found)).sum(axis=1))
        agreements.append(exact.argmax(axis=1) == found.argmax(axis=1))
        rows = np.arange(len(window) - 1)
        losses["native"].append(-found[rows, window[1:]])
        losses["reference"].append(-exact[rows, window[1:]])
    perplexity = {name: float(np.exp(np.concatenate(values).mean())) for name, values in losses.items()}
    result = {
        "model": native.config.name,
        "tokens": len(tokens),
        "mean_kl": round(float(np.concatenate(divergences).mean()), 6),
        "top1_agreement": round(float(np.concatenate(agreements).mean()), 4),
        "perplexity": {name: round(value, 4) for name, value in perplexity.items()},
        "perplexity_ratio": round(perplexity["native"] / perplexity["reference"], 5),
        "path": native.backend_description,
    }
    print(json.dumps(result, indent=None if args.json else 2))


if __name__ == "__main__":
    main()
