"""The decoder of the llama family (llama, qwen2, qwen3) as a program, and the tensors it needs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from pilotfish.config import ModelConfig
from pilotfish.errors import InputError
from pilotfish.models.rope import rope_tables
from pilotfish.program import (
    Attention,
    Embed,
    GatedAct,
    Gather,
    Head,
    KVShape,
    Linear,
    Norm,
    Op,
    Part,
    Program,
    RopeKV,
    Tap,
)


def decoder_program(
    config: ModelConfig, context: int, layers: Sequence[int] | None = None, taps: Sequence[int] = ()
) -> Program:
    """The whole decoder for contexts of up to `context` tokens.

    `layers` (ascending) gives a layer-skipped view: the same weights and KV layers, but only these are run. For each
    i in `taps` (ascending) the result keeps the residual stream [rows, hidden] after i of the layers run; 0 is the
    embedding. Raises InputError when context, layers or taps do not fit the model.
    """
    run = range(config.num_layers) if layers is None else layers
    if not 1 <= context <= config.context_length:
        raise InputError(f"a context of {context} tokens was asked for; the model has 1 to {config.context_length}")
    _check_ascending("layers", run, config.num_layers - 1)
    _check_ascending("taps", taps, len(run))

    ops: list[Op] = [Embed("embed", "x")]
    for done, layer in enumerate(run):
        if done in taps:
            ops.append(Tap("x"))
        ops += _layer(config, layer)
    if len(run) in taps:
        ops.append(Tap("x"))
    ops += [
        Gather("x", "wanted"),
        Norm("wanted", "norm", config.norm_eps, "wanted_normed"),
        Head("wanted_normed", "embed" if config.tied_embeddings else "head"),
    ]
    cos, sin = rope_tables(config, context)
    return Program(
        ops=tuple(ops),
        widths={
            "x": config.hidden_size,
            "normed": config.hidden_size,
            "qkv": (config.num_heads + 2 * config.num_kv_heads) * config.head_dim,
            "attended": config.num_heads * config.head_dim,
            "gate_up": 2 * config.intermediate_size,
            "gated": config.intermediate_size,
            "wanted": config.hidden_size,
            "wanted_normed": config.hidden_size,
        },
        num_heads=config.num_heads,
        kv=KVShape(config.num_layers, config.num_kv_heads, config.head_dim),
        vocab_size=config.vocab_size,
        rope_cos=cos,
        rope_sin=sin,
    )


def _layer(config: ModelConfig, layer: int) -> list[Op]:
    def name(tensor: str) -> str:
        return f"layers.{layer}.{tensor}"

    def bias(tensor: str) -> str | None:
        return name(tensor) if config.attention_bias else None

    keys = config.num_heads * config.head_dim
    values = keys + config.num_kv_heads * config.head_dim
    return [
        Norm("x", name("attn_norm"), config.norm_eps, "normed"),
        Linear(
            "normed",
            (
                Part(name("q"), bias("q_bias")),
                Part(name("k"), bias("k_bias"), keys),
                Part(name("v"), bias("v_bias"), values),
            ),
            "qkv",
        ),
        RopeKV(
            "qkv",
            layer,
            q_norm=name("q_norm") if config.qk_norm else None,
            k_norm=name("k_norm") if config.qk_norm else None,
            eps=config.norm_eps,
        ),
        Attention("qkv", layer, "attended"),
        Linear("attended", (Part(name("o"), name("o_bias") if config.output_bias else None),), "x", add=True),
        Norm("x", name("mlp_norm"), config.norm_eps, "normed"),
        Linear("normed", (Part(name("gate")), Part(name("up"), column=config.intermediate_size)), "gate_up"),
        GatedAct("gate_up", "gated"),
        Linear("gated", (Part(name("down")),), "x", add=True),
    ]


def _check_ascending(what: str, indices: Sequence[int], last: int) -> None:
    listed = list(indices)
    if listed != sorted(set(listed)) or (listed and not 0 <= listed[0] <= listed[-1] <= last):
        raise InputError(f"{what} {listed} were asked for; they must ascend and lie within 0 to {last}")


def expected_shapes(config: ModelConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Name and shape of every tensor the decoder uses, one by one: matrices [outputs, inputs], vectors [n].

    An iterator, because a damaged file may claim any number of layers.
    """
    hidden, inner = config.hidden_size, config.intermediate_size
    queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    layer: dict[str, tuple[int, ...]] = {
        "attn_norm": (hidden,),
        "q": (queries, hidden),
        "k": (keys, hidden),
        "v": (keys, hidden),
        "o": (hidden, queries),
        "mlp_norm": (hidden,),
        "gate": (inner, hidden),
        "up": (inner, hidden),
        "down": (hidden, inner),
    }
    if config.attention_bias:
        layer |= {"q_bias": (queries,), "k_bias": (keys,), "v_bias": (keys,)}
    if config.output_bias:
        layer["o_bias"] = (hidden,)
    if config.qk_norm:
        layer |= {"q_norm": (config.head_dim,), "k_norm": (config.head_dim,)}
    yield "embed", (config.vocab_size, hidden)
    yield "norm", (hidden,)
    if not config.tied_embeddings:
        yield "head", (config.vocab_size, hidden)
    for index in range(config.num_layers):
        for name, shape in layer.items():
            yield f"layers.{index}.{name}", shape
