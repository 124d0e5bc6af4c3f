"""Writes folder_configs.jsonl: contents of config.json, and what transformers understands by them.

Run in this folder with `python make_folder_configs.py > folder_configs.jsonl`; made with transformers 5.24.0, without torch. Each
model appears twice: as an old version of transformers wrote it (RoPE in several keys, no list of layer types), and as this version
writes it. The sizes are those of published models of the families; one model has a value for each key that matters.
"""

import json

from transformers import AutoConfig

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
FACTORS = {"short_factor": [1.0 + 0.05 * i for i in range(48)], "long_factor": [1.0 + 1.25 * i for i in range(48)]}


def config(kind, sizes, **more):
    hidden, ffn, layers, heads, kv_heads, vocab, context = sizes
    return {
        "model_type": kind,
        "hidden_size": hidden,
        "intermediate_size": ffn,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": vocab,
        "max_position_embeddings": context,
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "torch_dtype": "bfloat16",
        **more,
    }


GEMMA2 = config(
    "gemma2",
    (2304, 9216, 26, 8, 4, 256000, 8192),
    head_dim=256,
    hidden_act="gelu_pytorch_tanh",
    hidden_activation="gelu_pytorch_tanh",
    query_pre_attn_scalar=224,
    attn_logit_softcapping=50.0,
    final_logit_softcapping=30.0,
    sliding_window=4096,
    rope_theta=10000.0,
)
GEMMA3 = config(
    "gemma3_text",
    (1152, 6912, 26, 4, 1, 262144, 32768),
    head_dim=256,
    hidden_activation="gelu_pytorch_tanh",
    query_pre_attn_scalar=256,
    attn_logit_softcapping=None,
    final_logit_softcapping=None,
    sliding_window=512,
    sliding_window_pattern=6,
    rope_theta=1000000,
    rope_local_base_freq=10000,
    rope_scaling=None,
)
del GEMMA3["hidden_act"]

OLD = {
    "llama-2": config("llama", (4096, 11008, 32, 32, 32, 32000, 4096), rope_scaling=None, tie_word_embeddings=False),
    "llama-2-linear": config("llama", (64, 128, 2, 4, 4, 320, 8192), rope_scaling={"type": "linear", "factor": 2.0}),
    "llama-3.1": config(
        "llama", (4096, 14336, 32, 32, 8, 128256, 131072), rope_theta=500000.0, rope_scaling=LLAMA3, tie_word_embeddings=False
    ),
    "llama-3.2": config(
        "llama", (2048, 8192, 16, 32, 8, 128256, 131072), head_dim=64, rope_theta=500000.0,
        rope_scaling={**LLAMA3, "factor": 32.0}, tie_word_embeddings=True,
    ),
    "mistral-0.1": config("mistral", (4096, 14336, 32, 32, 8, 32000, 32768), sliding_window=4096, rope_theta=10000.0, tie_word_embeddings=False),
    "mistral-nemo": config(
        "mistral", (5120, 14336, 40, 32, 8, 131072, 131072), head_dim=128, sliding_window=None, rope_theta=1000000.0, tie_word_embeddings=False
    ),
    "qwen2.5": config(
        "qwen2", (896, 4864, 24, 14, 2, 151936, 32768), rope_theta=1000000.0, sliding_window=32768, max_window_layers=21,
        use_sliding_window=False, tie_word_embeddings=True,
    ),
    "qwen3": config(
        "qwen3", (1024, 3072, 28, 16, 8, 151936, 40960), head_dim=128, rope_theta=1000000, rope_scaling=None, sliding_window=None,
        max_window_layers=28, use_sliding_window=False, attention_bias=False, tie_word_embeddings=True,
    ),
    "gemma-2": GEMMA2,
    "gemma-3-text": GEMMA3,
    "gemma-3-images": {
        "model_type": "gemma3",
        "text_config": {
            "model_type": "gemma3_text",
            "hidden_size": 2560,
            "intermediate_size": 10240,
            "num_hidden_layers": 34,
            "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
            "sliding_window": 1024,
        },
        "vision_config": {"hidden_size": 1152, "model_type": "siglip_vision_model"},
    },
    "phi-3-4k": config("phi3", (3072, 8192, 32, 32, 32, 32064, 4096), sliding_window=2047, rope_theta=10000.0, rope_scaling=None, tie_word_embeddings=False),
    "phi-3-128k": config(
        "phi3", (3072, 8192, 32, 32, 32, 32064, 131072), sliding_window=262144, rope_theta=10000.0,
        original_max_position_embeddings=4096, rope_scaling={"type": "longrope", **FACTORS}, tie_word_embeddings=False,
    ),
    "phi-4-mini": config(
        "phi3", (3072, 8192, 32, 24, 8, 200064, 131072), sliding_window=262144, rope_theta=10000.0, partial_rotary_factor=0.75,
        original_max_position_embeddings=4096, rope_scaling={"type": "longrope", **FACTORS}, tie_word_embeddings=True,
    ),
}


def rope_of(text, parameters, head_dim):
    return {
        "base": parameters["rope_theta"],
        "dims": int(head_dim * parameters.get("partial_rotary_factor", 1.0)),
        "type": parameters["rope_type"],
        "factor": parameters.get("factor"),
        "original": parameters.get("original_max_position_embeddings"),
    }


def understood(config):
    text = config.get_text_config()
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    kinds = getattr(text, "layer_types", None) or ["sliding_attention"] * text.num_hidden_layers
    window = getattr(text, "sliding_window", None)
    windows = [window if kind == "sliding_attention" else None for kind in kinds]
    parameters = text.rope_parameters
    full = parameters.get("full_attention", parameters)
    sliding = parameters.get("sliding_attention", parameters)
    return {
        "layers": text.num_hidden_layers,
        "hidden": text.hidden_size,
        "heads": text.num_attention_heads,
        "kv_heads": text.num_key_value_heads,
        "head_dim": head_dim,
        "ffn": text.intermediate_size,
        "vocab": text.vocab_size,
        "context": text.max_position_embeddings,
        "epsilon": text.rms_norm_eps,
        "scale": (getattr(text, "query_pre_attn_scalar", None) or head_dim) ** -0.5,
        "attention_softcap": getattr(text, "attn_logit_softcapping", None),
        "logit_softcap": getattr(text, "final_logit_softcapping", None),
        "tied": config.tie_word_embeddings,
        "windows": windows,
        "ropes": [rope_of(text, sliding if kind == "sliding_attention" else full, head_dim) for kind in kinds],
    }


def main():
    for name, old in OLD.items():
        kind = old["model_type"]
        loaded = AutoConfig.for_model(kind).__class__.from_dict(json.loads(json.dumps(old)))
        expected = understood(loaded)
        new = json.loads(loaded.to_json_string(use_diff=True))
        assert understood(loaded.__class__.from_dict(json.loads(json.dumps(new)))) == expected, name
        for form, content in (("old", old), ("new", new)):
            print(json.dumps({"name": f"{name}, {form}", "config": content, "expected": expected}))


main()
