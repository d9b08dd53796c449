"""Self-speculation under the engine: it writes into the target's KV, and prefix cache and preemption stay right."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from layer_loop import tiny_host
from pilotfish.backends.native import NativeBackend
from pilotfish.drafters.base import Host
from pilotfish.drafters.layer_skip import LayerSkipDrafter
from pilotfish.engine import Engine, Target
from pilotfish.params import SamplingParams
from pilotfish.request import Request
from tiny import tiny_model

VOCAB = 128
LAYERS = 3


@pytest.fixture(scope="module")
def host() -> Host:
    config, tensors = tiny_model("qwen2", 12, kinds="Q4_0+Q8_0", num_layers=LAYERS)
    return tiny_host(NativeBackend(2), config, tensors, context=512, blocks=64)


class Watched:
    """Every row of logits behind a token, by request."""

    def __init__(self) -> None:
        self.of: dict[int, list[bytes]] = {}

    def __call__(self, request: Request, rows: Sequence[np.ndarray]) -> None:
        self.of.setdefault(request.id, []).extend(row.tobytes() for row in rows)


def target_of(host: Host, blocks: int) -> Target:
    return Target(host.program, host.executable, host.kv, blocks)


def alone(host: Host, prompt: list[int], params: SamplingParams) -> tuple[list[int], list[bytes]]:
    watched = Watched()
    engine = Engine(target_of(host, 64), watch=watched)
    (request,) = engine.add(prompt, params)
    for _ in engine.run():
        pass
    return request.output, watched.of[request.id]


@pytest.mark.parametrize("layers", [(0, 1), (0, 2)])
@pytest.mark.parametrize("seed", [0, 5, 8, 33])  # with copies after drafts these break
def test_prefix_hits_and_preemptions_change_no_bit(host: Host, layers: tuple[int, ...], seed: int) -> None:
    rng = np.random.default_rng(seed)
    prompts: list[list[int]] = []
    for _ in range(20):
        base = prompts[int(rng.integers(len(prompts)))] if prompts and rng.random() < 0.8 else []
        kept = base[: int(rng.integers(0, len(base) + 1))]
        prompts.append([*kept, *rng.integers(0, VOCAB, int(rng.integers(1, 40))).tolist()][:120])
    prompts += [list(prompt) for prompt in prompts[:4]]  # hits of everything but the last token
    params = SamplingParams(max_tokens=24, temperature=0.8, seed=seed)
    plain = [alone(host, prompt, params) for prompt in prompts]
    watched = Watched()
    drafter = LayerSkipDrafter(host, layers)
    engine = Engine(target_of(host, 12), drafter, 5, max_num_seqs=4, token_budget=48, watch=watched)
    requests: list[Request] = []
    for prompt in prompts:
        requests += engine.add(prompt, params, priority=int(rng.integers(-1, 2)))
        for _ in range(int(rng.integers(0, 4))):
            if engine.busy:
                engine.step()
                engine.check()
    for _ in engine.run():
        engine.check()
    assert engine.stats().drafter_failures == 0 and engine.stats().prefix_hit_tokens > 100
    for request, (output, rows) in zip(requests, plain, strict=True):
        assert request.output == output
        assert watched.of[request.id] == rows
    counts: Any = [request.counts for request in requests]
    assert 0 < sum(count.accepted for count in counts) < sum(count.drafted for count in counts)
    if seed in (0, 5):
        assert engine.stats().preemptions > 0
