"""A model of two layers with random weights, as a Hugging Face folder. It is small enough for kernels that are interpreted."""

import json
import random
import struct

LAYERS, HIDDEN, HEADS, KV_HEADS, HEAD_DIM, INTERMEDIATE = 2, 256, 4, 2, 64, 128
SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
VOCABULARY = len(SPECIALS) + 256
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "hidden_size": HIDDEN,
    "intermediate_size": INTERMEDIATE,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD_DIM,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "torch_dtype": "float32",
    "vocab_size": VOCABULARY,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def byte_characters():
    """What stands for each byte in a byte-level vocabulary: itself where it can be printed (GPT-2's table)."""
    printed = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = iter(range(0x100, 0x200))
    return [chr(byte) if byte in printed else chr(next(others)) for byte in range(256)]


def tokenizer():
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    flags = {"special": True, "normalized": False, "single_word": False, "lstrip": False, "rstrip": False}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": at, "content": token, **flags} for at, token in enumerate(SPECIALS)],
        "normalizer": None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [{"type": "Digits", "individual_digits": True}, byte_level]},
        "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {token: at for at, token in enumerate([*SPECIALS, *byte_characters()])},
            "merges": [],
        },
    }


def tensors():
    """Names and shapes, rows first."""
    yield "model.embed_tokens.weight", (VOCABULARY, HIDDEN)
    yield "model.norm.weight", (HIDDEN,)
    for layer in range(LAYERS):
        own = f"model.layers.{layer}."
        yield own + "input_layernorm.weight", (HIDDEN,)
        yield own + "post_attention_layernorm.weight", (HIDDEN,)
        yield own + "self_attn.q_proj.weight", (HEADS * HEAD_DIM, HIDDEN)
        yield own + "self_attn.k_proj.weight", (KV_HEADS * HEAD_DIM, HIDDEN)
        yield own + "self_attn.v_proj.weight", (KV_HEADS * HEAD_DIM, HIDDEN)
        yield own + "self_attn.o_proj.weight", (HIDDEN, HEADS * HEAD_DIM)
        yield own + "mlp.gate_proj.weight", (INTERMEDIATE, HIDDEN)
        yield own + "mlp.up_proj.weight", (INTERMEDIATE, HIDDEN)
        yield own + "mlp.down_proj.weight", (HIDDEN, INTERMEDIATE)


def safetensors(seed):
    dice, header, parts, end = random.Random(seed), {}, [], 0
    for name, shape in tensors():
        # A norm's weights are near one. Those of a matrix leave the size of a row about as it was.
        middle, spread = (1.0, 0.1) if len(shape) == 1 else (0.0, (3 / shape[1]) ** 0.5)
        count = shape[0] * (shape[1] if len(shape) == 2 else 1)
        values = struct.pack(f"<{count}f", *(middle + spread * dice.uniform(-1, 1) for _ in range(count)))
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [end, end + len(values)]}
        end += len(values)
        parts.append(values)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return b"".join([struct.pack("<Q", len(text)), text, *parts])


def write(folder):
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer()))
    (folder / "tokenizer_config.json").write_text(json.dumps({"bos_token": SPECIALS[1], "eos_token": SPECIALS[2]}))
    (folder / "model.safetensors").write_bytes(safetensors(seed=1))
    return folder
