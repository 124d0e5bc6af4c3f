//! The config of the real model, and of tiny ones that each break one rule.

use super::*;
use crate::arch::SUPPORTED;
use crate::gguf::MetadataValue;
use crate::model::{Model, ModelError};
use crate::test_kit::{GgufBuilder, TinyModel, model_path};

fn load(builder: &GgufBuilder) -> Result<ModelConfig, ConfigError> {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("tiny.gguf");
    builder.write(&path).unwrap();
    match Model::open(&path) {
        Ok(model) => Ok(model.config().clone()),
        Err(ModelError::Config(error)) => Err(error),
        Err(error) => panic!("{error}"),
    }
}

fn with(key: &str, value: MetadataValue) -> Result<ModelConfig, ConfigError> {
    load(&TinyModel::default().build().metadata(key, value))
}

#[test]
fn real_model() {
    let model = Model::open(&model_path()).unwrap();
    let expected = ModelConfig {
        architecture: Architecture::named("llama").unwrap(),
        layer_count: 30,
        hidden_size: 576,
        head_count: 9,
        kv_head_count: 3,
        head_dim: 64,
        ffn_size: 1536,
        vocab_size: 49_152,
        rope: Rope {
            pairs: RopePairs::Neighbours,
            base: 100_000.0,
            dims: 64,
            scaling: RopeScaling::None,
        },
        window_rope: None,
        window: None,
        attention_scale: 0.125,
        attention_softcap: None,
        logit_softcap: None,
        rms_epsilon: 1e-5,
        context_length: 8192,
        tied_embeddings: true,
    };
    assert_eq!(*model.config(), expected);
    assert_eq!(expected.kv_size(), 192);
}

#[test]
fn tiny_models_of_every_type_load() {
    for matrix_kind in GgmlType::ALL {
        for tied_embeddings in [true, false] {
            let config = load(
                &TinyModel {
                    matrix_kind,
                    tied_embeddings,
                    // Rows of 256 for the types whose blocks are that long.
                    head_dim: 64,
                    ffn_size: 256,
                    ..TinyModel::default()
                }
                .build(),
            )
            .unwrap();
            assert_eq!(config.tied_embeddings, tied_embeddings);
            assert_eq!((config.hidden_size, config.kv_size()), (256, 128));
        }
    }
}

#[test]
fn absent_optional_keys_have_their_defaults() {
    let tiny = TinyModel {
        kv_head_count: 4,
        ..TinyModel::default()
    }
    .build();
    let bare = tiny
        .without_metadata("llama.attention.head_count_kv")
        .without_metadata("llama.rope.freq_base")
        .without_metadata("llama.rope.dimension_count")
        .without_metadata("llama.vocab_size");
    let config = load(&bare).unwrap();
    assert_eq!((config.kv_head_count, config.rope.base), (4, ROPE_BASE_DEFAULT));
    assert_eq!(config.vocab_size, crate::test_kit::TINY_VOCAB_SIZE);
}

#[test]
fn numbers_outside_their_range_are_named() {
    let keys = [
        "llama.block_count",
        "llama.embedding_length",
        "llama.attention.head_count",
        "llama.attention.head_count_kv",
        "llama.feed_forward_length",
        "llama.context_length",
        "llama.vocab_size",
    ];
    for key in keys {
        for value in [0, u32::MAX] {
            let error = with(key, MetadataValue::U32(value)).unwrap_err();
            assert!(
                matches!(&error, ConfigError::OutOfRange { key: found, .. } if found == key),
                "{key}: {error}"
            );
        }
    }
    for (key, value) in [
        ("llama.rope.freq_base", f32::NAN),
        ("llama.attention.layer_norm_rms_epsilon", 0.0),
    ] {
        let error = with(key, MetadataValue::F32(value)).unwrap_err();
        assert!(
            matches!(&error, ConfigError::OutOfRange { key: found, .. } if found == key),
            "{key}: {error}"
        );
    }
}

#[test]
fn contradictions_are_refused() {
    let number = |value| MetadataValue::U32(value);
    let contradiction = |key, value| match with(key, number(value)) {
        Err(ConfigError::Inconsistent(contradiction)) => contradiction,
        other => panic!("{key}={value}: {other:?}"),
    };
    assert_eq!(
        contradiction("llama.attention.head_count_kv", 3),
        Contradiction::HeadGroups { heads: 4, kv_heads: 3 }
    );
    assert_eq!(
        contradiction("llama.embedding_length", 66),
        Contradiction::HiddenByHeads { hidden: 66, heads: 4 }
    );
    assert_eq!(
        contradiction("llama.embedding_length", 60),
        Contradiction::HeadDim { head_dim: 15 }
    );
    assert_eq!(
        contradiction("llama.embedding_length", 4096),
        Contradiction::HeadDim { head_dim: 1024 }
    );
}

#[test]
fn a_tokenizer_larger_than_the_embedding_is_refused() {
    let tokens =
        |count: u32| MetadataValue::Array((0..count).map(|id| MetadataValue::String(id.to_string())).collect());
    let error = with("tokenizer.ggml.tokens", tokens(260)).unwrap_err();
    let expected = Contradiction::TokensBeyondEmbedding { tokens: 260, rows: 259 };
    assert!(
        matches!(&error, ConfigError::Inconsistent(found) if *found == expected),
        "{error}"
    );
    with("tokenizer.ggml.tokens", tokens(200)).unwrap();
}

#[test]
fn features_that_change_the_arithmetic_are_refused() {
    let cases = [
        ("llama.rope.scaling.type", MetadataValue::String("yarn".into())),
        ("llama.rope.scaling.type", MetadataValue::String("longrope".into())),
        ("llama.rope.scaling.attn_factor", MetadataValue::F32(1.2)),
        ("llama.rope.dimension_count", MetadataValue::U32(7)),
        ("llama.rope.dimension_count", MetadataValue::U32(18)),
        ("llama.attention.key_length", MetadataValue::U32(32)),
        ("llama.attention.key_length_mla", MetadataValue::U32(32)),
        ("llama.attention.kv_lora_rank", MetadataValue::U32(512)),
        ("llama.attention.sliding_window_pattern", MetadataValue::U32(4)),
        ("llama.attention.causal", MetadataValue::Bool(false)),
        ("llama.expert_count", MetadataValue::U32(8)),
        ("llama.logit_scale", MetadataValue::F32(0.5)),
    ];
    for (key, value) in cases {
        let error = with(key, value).unwrap_err();
        assert!(
            matches!(&error, ConfigError::UnsupportedFeature { key: found, .. } if found == key),
            "{key}: {error}"
        );
    }
    with("llama.rope.scaling.type", MetadataValue::String("none".into())).unwrap();
}

#[test]
fn heads_have_the_size_that_the_file_says() {
    let tiny = TinyModel {
        hidden_size: Some(96),
        head_dim: 48,
        ..TinyModel::default()
    };
    let config = load(&tiny.build()).unwrap();
    assert_eq!(
        (config.hidden_size, config.head_dim, config.query_size()),
        (96, 48, 192)
    );
    let half = load(&tiny.build().without_metadata("llama.attention.value_length")).unwrap_err();
    assert!(matches!(half, ConfigError::UnsupportedFeature { .. }), "{half}");
}

#[test]
fn rope_is_read_in_all_its_forms() {
    let scaling = |builder: &GgufBuilder| load(builder).map(|config| config.rope.scaling);
    let tiny = || TinyModel::default().build();
    let factor = |key| tiny().metadata(key, MetadataValue::F32(8.0));
    for key in ["llama.rope.scaling.factor", "llama.rope.scale_linear"] {
        assert_eq!(scaling(&factor(key)).unwrap(), RopeScaling::Linear { factor: 8.0 });
    }
    let partial = with("llama.rope.dimension_count", MetadataValue::U32(8)).unwrap();
    assert_eq!((partial.rope.dims, partial.head_dim), (8, 16));

    let numbers = |first: f32| {
        (0..8)
            .flat_map(|i| (first + i as f32).to_le_bytes())
            .collect::<Vec<u8>>()
    };
    let expected = |first: f32, magnitude| RopeScaling::Factors {
        factors: (0..8).map(|i| first + i as f32).collect(),
        magnitude,
    };
    let llama_3 = tiny().tensor("rope_freqs.weight", GgmlType::F32, (&[8], numbers(1.0)));
    assert_eq!(scaling(&llama_3).unwrap(), expected(1.0, 1.0));
    let zero = llama_3
        .clone()
        .tensor("rope_freqs.weight", GgmlType::F32, (&[8], numbers(0.0)));
    assert!(matches!(scaling(&zero), Err(ConfigError::OutOfRange { .. })));
    let short = llama_3
        .clone()
        .tensor("rope_freqs.weight", GgmlType::F32, (&[4], numbers(1.0)));
    assert!(matches!(scaling(&short), Err(ConfigError::WrongShape { .. })));
    let both = llama_3.metadata("llama.rope.scaling.factor", MetadataValue::F32(2.0));
    assert!(matches!(scaling(&both), Err(ConfigError::UnsupportedFeature { .. })));

    // The context of the tiny model is 256.
    for (original, first) in [(128, 5.0), (256, 1.0)] {
        let long = tiny()
            .metadata("llama.rope.scaling.type", MetadataValue::String("longrope".into()))
            .metadata("llama.rope.scaling.attn_factor", MetadataValue::F32(1.25))
            .metadata(
                "llama.rope.scaling.original_context_length",
                MetadataValue::U32(original),
            )
            .tensor("rope_factors_short.weight", GgmlType::F32, (&[8], numbers(1.0)))
            .tensor("rope_factors_long.weight", GgmlType::F32, (&[8], numbers(5.0)));
        assert_eq!(scaling(&long).unwrap(), expected(first, 1.25));
    }
}

#[test]
fn windows_and_caps_are_read_or_those_of_the_family() {
    let window = with("llama.attention.sliding_window", MetadataValue::U32(7)).unwrap();
    assert_eq!((window.window_of(0), window.window_of(1)), (Some(7), Some(7)));
    let none = with("llama.attention.sliding_window", MetadataValue::U32(0)).unwrap();
    assert_eq!(none.window, None);

    let of = |name| TinyModel {
        architecture: Architecture::named(name).unwrap(),
        ..TinyModel::default()
    };
    let gemma2 = load(&of("gemma2").build()).unwrap();
    assert_eq!((gemma2.window_of(0), gemma2.window_of(1)), (Some(4096), None));
    assert_eq!(
        (gemma2.attention_softcap, gemma2.logit_softcap),
        (Some(50.0), Some(30.0))
    );
    assert_eq!(gemma2.window_rope, None);
    let uncapped = of("gemma2")
        .build()
        .metadata("gemma2.attn_logit_softcapping", MetadataValue::F32(0.0))
        .metadata("gemma2.final_logit_softcapping", MetadataValue::F32(0.0));
    let uncapped = load(&uncapped).unwrap();
    assert_eq!((uncapped.attention_softcap, uncapped.logit_softcap), (None, None));
    for cap in [0.001, -30.0, f32::NAN] {
        let key = "gemma2.final_logit_softcapping";
        let error = load(&of("gemma2").build().metadata(key, MetadataValue::F32(cap))).unwrap_err();
        assert!(
            matches!(&error, ConfigError::OutOfRange { key: found, .. } if found == key),
            "{error}"
        );
    }

    let gemma3 = of("gemma3")
        .build()
        .metadata("gemma3.attention.sliding_window", MetadataValue::U32(9))
        .metadata("gemma3.rope.freq_base", MetadataValue::F32(1e6))
        .metadata("gemma3.rope.scaling.type", MetadataValue::String("linear".into()))
        .metadata("gemma3.rope.scaling.factor", MetadataValue::F32(8.0));
    let gemma3 = load(&gemma3).unwrap();
    assert_eq!((gemma3.window_of(4), gemma3.window_of(5)), (Some(9), None));
    assert_eq!(gemma3.rope_of(5).scaling, RopeScaling::Linear { factor: 8.0 });
    assert_eq!((gemma3.rope_of(5).base, gemma3.rope_of(4).base), (1e6, 10_000.0));
    assert_eq!(gemma3.rope_of(4).scaling, RopeScaling::None);
}

#[test]
fn every_architecture_is_read_from_a_model_with_its_tensors() {
    for architecture in SUPPORTED {
        let model = TinyModel {
            architecture,
            ..TinyModel::default()
        };
        let config = load(&model.build()).unwrap();
        assert_eq!((config.architecture, config.head_dim), (*architecture, 16));
        let one_less = model.build().without_tensor("blk.1.ffn_norm.weight");
        assert!(matches!(
            load(&one_less),
            Err(ConfigError::Gguf(GgufError::MissingTensor { .. }))
        ));
    }
}

#[test]
fn another_architecture_is_refused() {
    let error = with("general.architecture", MetadataValue::String("mamba".into())).unwrap_err();
    assert!(
        matches!(&error, ConfigError::UnsupportedArchitecture { found } if found == "mamba"),
        "{error}"
    );
    assert!(SUPPORTED.iter().all(|known| error.to_string().contains(known.name)));
}

#[test]
fn tensors_must_be_exactly_the_expected_ones() {
    let tiny = || TinyModel::default().build();
    let missing = load(&tiny().without_tensor("blk.1.ffn_up.weight")).unwrap_err();
    assert!(
        matches!(&missing, ConfigError::Gguf(GgufError::MissingTensor { tensor }) if tensor == "blk.1.ffn_up.weight"),
        "{missing}"
    );
    let extra = load(&tiny().tensor("blk.0.attn_q.bias", GgmlType::F32, (&[1], vec![0; 4]))).unwrap_err();
    assert!(
        matches!(&extra, ConfigError::UnexpectedTensor { tensor } if tensor == "blk.0.attn_q.bias"),
        "{extra}"
    );
    let shape = load(&tiny().tensor("output_norm.weight", GgmlType::F32, (&[32], vec![0; 128]))).unwrap_err();
    assert!(
        matches!(&shape, ConfigError::WrongShape { tensor, .. } if tensor == "output_norm.weight"),
        "{shape}"
    );
    let kind = load(&tiny().tensor("output_norm.weight", GgmlType::F16, (&[64], vec![0; 128]))).unwrap_err();
    assert!(
        matches!(
            &kind,
            ConfigError::WrongType {
                expected: GgmlType::F32,
                ..
            }
        ),
        "{kind}"
    );
}
