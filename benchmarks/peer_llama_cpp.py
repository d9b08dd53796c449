"""One forward pass of M rows in pilotfish and in llama.cpp, on the same GGUF file, alternating in one process.

Needs `pip install llama-cpp-python` (it compiles llama.cpp for this machine) beside pilotfish:

    python benchmarks/peer_llama_cpp.py MODEL.gguf [--rows 1,2,4,8,16] [--prefill 512] [--threads 2] [--json]

Both sides compute one sequence at a context of 128 tokens; every pass gives the logits of all its rows in llama.cpp
and their argmax in pilotfish. Medians are printed, and the ratio of medians: above 1 pilotfish is faster.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import time
from collections.abc import Callable, Sequence
from statistics import median

import llama_cpp
import numpy as np

from pilotfish import LLM
from pilotfish.backends.native import read_gb_per_s
from pilotfish.bench import CONTEXT, machine
from pilotfish.metrics import now_ms
from pilotfish.program import BLOCK_SIZE
from pilotfish.tree import Rows, TreeBatch


class _Peer:
    """llama.cpp through its C interface."""

    def __init__(self, path: str, threads: int, context: int) -> None:
        llama_cpp.llama_log_set(_SILENT, ctypes.c_void_p(0))
        llama_cpp.llama_backend_init()
        self.model = llama_cpp.llama_model_load_from_file(path.encode(), llama_cpp.llama_model_default_params())
        params = llama_cpp.llama_context_default_params()
        params.n_ctx, params.n_batch, params.n_ubatch = context, 512, 512
        params.n_threads = params.n_threads_batch = threads
        self.context = llama_cpp.llama_init_from_model(self.model, params)
        self.batch = llama_cpp.llama_batch_init(512, 0, 1)

    def decode(self, tokens: Sequence[int], start: int, all_logits: bool) -> None:
        """Compute tokens at positions start..., replacing what was there."""
        memory = llama_cpp.llama_get_memory(self.context)
        llama_cpp.llama_memory_seq_rm(memory, 0, start, -1)
        batch = self.batch
        batch.n_tokens = len(tokens)
        for i, token in enumerate(tokens):
            batch.token[i], batch.pos[i] = token, start + i
            batch.n_seq_id[i], batch.seq_id[i][0] = 1, 0
            batch.logits[i] = all_logits or i == len(tokens) - 1
        if llama_cpp.llama_decode(self.context, batch) != 0:
            raise RuntimeError("llama_decode failed")
        llama_cpp.llama_synchronize(self.context)


@llama_cpp.llama_log_callback
def _SILENT(level: int, text: bytes, data: ctypes.c_void_p) -> None:
    pass


def _alternate(sides: dict[str, Callable[[], None]], repeat: int, timed: int = 3) -> dict[str, float]:
    """Medians in ms. A side's first pass of a turn is not timed: the other's threads still spin, its data is cached."""
    times: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(repeat):
        for name, run in sides.items():
            time.sleep(0.02)
            run()
            for _ in range(timed):
                started = now_ms()
                run()
                times[name].append(now_ms() - started)
    return {name: median(values) for name, values in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--rows", default="1,2,4,8,16")
    parser.add_argument("--prefill", type=int, default=512)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeat", type=int, default=7)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    counts = [int(part) for part in args.rows.split(",")]
    llm = LLM(args.model, threads=args.threads, context=2048)
    peer = _Peer(args.model, args.threads, 2048)
    rng = np.random.default_rng(0)
    tokens = rng.integers(1, llm.config.vocab_size - 1, max(args.prefill, CONTEXT + max(counts))).tolist()
    blocks = list(range(-(-len(tokens) // BLOCK_SIZE)))
    forward, kv = llm.target.executable.forward, llm.target.kv
    forward(TreeBatch.build([Rows(tokens[:CONTEXT], 0, blocks)]), kv, False)
    peer.decode(tokens[:CONTEXT], 0, False)
    rows = []
    for count in counts:
        part = tokens[CONTEXT : CONTEXT + count]
        batch = TreeBatch.build([Rows(part, CONTEXT, blocks, all_logits=True)])
        found = _alternate(
            {
                "pilotfish": lambda batch=batch: forward(batch, kv, False),
                "llama.cpp": lambda part=part: peer.decode(part, CONTEXT, True),
            },
            args.repeat,
        )
        rows.append({"rows": count, **{name: round(value, 3) for name, value in found.items()}})
    whole = TreeBatch.build([Rows(tokens[: args.prefill], 0, blocks)])
    found = _alternate(
        {
            "pilotfish": lambda: forward(whole, kv, False),
            "llama.cpp": lambda: peer.decode(tokens[: args.prefill], 0, False),
        },
        2,
        timed=1,
    )
    prefill = {name: round(1e3 * args.prefill / value, 1) for name, value in found.items()}
    limit = read_gb_per_s(args.threads)
    result = {
        "model": llm.config.name,
        "median_ms": rows,
        "prefill_tokens": args.prefill,
        "prefill_tokens_per_second": prefill,
        "weight_gb": round(llm.weight_bytes / 1e9, 4),
        "limit_gb_per_s": round(limit, 2),
        "machine": machine(llm),
        "llama_cpp_python": llama_cpp.__version__,
    }
    if args.json:
        print(json.dumps(result))
        return
    print(f"{result['model']}, {result['machine']}, llama-cpp-python {llama_cpp.__version__}")
    print(f"{llm.weight_bytes / 1e9:.3f} GB of weights; the machine reads {limit:.1f} GB/s")
    print("rows   pilotfish ms  over 1   llama.cpp ms  over 1   llama.cpp / pilotfish")
    first = rows[0]
    for row in rows:
        ours, theirs = row["pilotfish"], row["llama.cpp"]
        print(
            f"{row['rows']:4} {ours:13.2f} {ours / first['pilotfish']:7.2f} {theirs:14.2f} "
            f"{theirs / first['llama.cpp']:7.2f} {theirs / ours:16.2f}"
        )
    ratio = prefill["pilotfish"] / prefill["llama.cpp"]
    print(f"prefill of {args.prefill}: {prefill['pilotfish']} and {prefill['llama.cpp']} tokens/s, ratio {ratio:.2f}")


if __name__ == "__main__":
    main()
