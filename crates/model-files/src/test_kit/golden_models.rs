//! The tiny models of the golden outputs in `integration-tests/data/golden/`, whose README says what each golden file has.

use super::{GgufBuilder, TinyModel};
use crate::arch::Architecture;
use crate::gguf::{GgmlType, MetadataValue};

/// One tiny model, which both the engine and the reference program run.
#[derive(Clone, Debug)]
pub struct GoldenModel {
    /// Its golden file, without the ending.
    pub file: String,
    /// Its name within the file.
    pub name: String,
    pub builder: GgufBuilder,
}

/// Enough that attention picks tokens, and that the next token's distribution is far from even. Sums over the hidden size
/// grow with its square root, so the spread of scores and logits is about the same in all models.
fn gain(hidden: usize) -> f32 {
    32.0 / (hidden as f32).sqrt()
}

/// All of them: the families with their head sizes, RoPE scalings and windows, and the number types.
pub fn golden_models() -> Vec<GoldenModel> {
    let mut models = Vec::new();
    for (name, builder) in llamas() {
        models.push(of("llama", name, builder));
    }
    for (name, tied) in [("tied", true), ("untied", false)] {
        models.push(of("qwen2", name, tiny("qwen2", 64, tied).build()));
        models.push(of("qwen3", name, tiny("qwen3", 128, tied).build()));
    }
    models.push(of("gemma2", "tied", gemma2()));
    models.push(of("gemma3", "tied", gemma3()));
    models.push(of("phi3", "long", phi3(64)));
    models.push(of("phi3", "short", phi3(256)));
    models.extend(types());
    models
}

fn of(architecture: &str, name: &str, builder: GgufBuilder) -> GoldenModel {
    GoldenModel {
        file: format!("architecture-{architecture}"),
        name: name.to_owned(),
        builder,
    }
}

/// Two query heads, one KV head, and a hidden size that is not their product.
fn tiny(architecture: &str, head_dim: usize, tied_embeddings: bool) -> TinyModel {
    TinyModel {
        architecture: Architecture::named(architecture).unwrap_or_else(|| panic!("{architecture}")),
        hidden_size: Some(64),
        head_count: 2,
        kv_head_count: 1,
        head_dim,
        ffn_size: 64,
        tied_embeddings,
        gain: gain(64),
        ..TinyModel::default()
    }
}

fn real(value: f32) -> MetadataValue {
    MetadataValue::F32(value)
}

fn whole(value: u32) -> MetadataValue {
    MetadataValue::U32(value)
}

fn text(value: &str) -> MetadataValue {
    MetadataValue::String(value.to_owned())
}

/// A vector of `count` numbers that rise evenly from `first` to `last`.
fn rising(count: usize, (first, last): (f32, f32)) -> Vec<u8> {
    let step = (last - first) / (count - 1) as f32;
    (0..count)
        .flat_map(|i| (first + i as f32 * step).to_le_bytes())
        .collect()
}

fn with_factors(builder: GgufBuilder, name: &str, (count, range): (usize, (f32, f32))) -> GgufBuilder {
    builder.tensor(name, GgmlType::F32, (&[count as u64], rising(count, range)))
}

fn llamas() -> Vec<(&'static str, GgufBuilder)> {
    let tied = TinyModel {
        hidden_size: None,
        gain: gain(128),
        ..tiny("llama", 64, true)
    };
    let untied = TinyModel {
        gain: gain(64),
        tied_embeddings: false,
        ..TinyModel::default()
    };
    let linear = TinyModel {
        hidden_size: None,
        gain: gain(160),
        ..tiny("llama", 80, true)
    };
    let linear = linear
        .build()
        .metadata("llama.rope.scaling.type", text("linear"))
        .metadata("llama.rope.scaling.factor", real(4.0));
    let factors = tiny("llama", 128, true)
        .build()
        .metadata("llama.rope.freq_base", real(500_000.0));
    let factors = with_factors(factors, "rope_freqs.weight", (64, (1.0, 8.0)));
    let window = tiny("llama", 64, false)
        .build()
        .metadata("llama.attention.sliding_window", whole(24));
    vec![
        ("tied", tied.build()),
        ("untied", untied.build()),
        ("linear", linear),
        ("factors", factors),
        ("window", window),
    ]
}

/// Caps that the tiny model's scores and logits feel, which those of the real models would not be.
fn gemma2() -> GgufBuilder {
    tiny("gemma2", 256, true)
        .build()
        .metadata("gemma2.attention.sliding_window", whole(24))
        .metadata("gemma2.attn_logit_softcapping", real(4.0))
        .metadata("gemma2.final_logit_softcapping", real(6.0))
}

/// Six layers, the last of which sees all tokens.
fn gemma3() -> GgufBuilder {
    let model = TinyModel {
        layer_count: 6,
        ..tiny("gemma3", 64, true)
    };
    model
        .build()
        .metadata("gemma3.attention.sliding_window", whole(24))
        .metadata("gemma3.rope.freq_base", real(1_000_000.0))
        .metadata("gemma3.rope.scaling.type", text("linear"))
        .metadata("gemma3.rope.scaling.factor", real(8.0))
}

/// Three quarters of a head turn. The original context chooses the factors.
fn phi3(original_context: u32) -> GgufBuilder {
    const TURNED: usize = 72;
    let builder = tiny("phi3", 96, original_context == 256)
        .build()
        .metadata("phi3.rope.dimension_count", whole(TURNED as u32))
        .metadata("phi3.rope.scaling.type", text("longrope"))
        .metadata("phi3.rope.scaling.attn_factor", real(1.19))
        .metadata("phi3.rope.scaling.original_context_length", whole(original_context))
        .metadata("phi3.attention.sliding_window", whole(30));
    let builder = with_factors(builder, "rope_factors_short.weight", (TURNED / 2, (1.0, 2.5)));
    with_factors(builder, "rope_factors_long.weight", (TURNED / 2, (1.1, 40.0)))
}

/// One model for each number type. Those with blocks of 256 mix types as the usual files do, which also keeps them small.
fn types() -> Vec<GoldenModel> {
    let of_kind = |name: &str, model: TinyModel| GoldenModel {
        file: "types".to_owned(),
        name: name.to_lowercase(),
        builder: model.build(),
    };
    let mut models: Vec<GoldenModel> = GgmlType::ALL
        .into_iter()
        .map(|kind| {
            let base = TinyModel {
                matrix_kind: kind,
                gain: gain(64),
                layer_count: 1,
                ..TinyModel::default()
            };
            let wide = TinyModel {
                head_dim: 64,
                kv_head_count: 1,
                ffn_size: 256,
                gain: gain(256),
                ..base.clone()
            };
            let model = match kind {
                GgmlType::Q4_K => wide,
                GgmlType::Q5_K => TinyModel {
                    other_kinds: &[("token_embd.weight", GgmlType::Q4_0)],
                    ..wide
                },
                GgmlType::Q6_K => TinyModel {
                    other_kinds: &[
                        ("token_embd.weight", GgmlType::Q4_0),
                        ("attn_q.weight", GgmlType::Q4_K),
                        ("ffn_gate.weight", GgmlType::Q4_K),
                        ("ffn_up.weight", GgmlType::Q4_K),
                    ],
                    ..wide
                },
                _ => base,
            };
            of_kind(kind.name(), model)
        })
        .collect();
    let mixed = TinyModel {
        matrix_kind: GgmlType::Q4_0,
        other_kinds: &[("ffn_up.weight", GgmlType::Q5_1)],
        gain: gain(64),
        ..TinyModel::default()
    };
    models.push(of_kind("gate and up of two types", mixed));
    models
}
