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
        ("llama.rope.scaling.factor", MetadataValue::F32(8.0)),
        ("llama.rope.dimension_count", MetadataValue::U32(8)),
        ("llama.attention.key_length", MetadataValue::U32(32)),
        ("llama.expert_count", MetadataValue::U32(8)),
        ("llama.attention.sliding_window", MetadataValue::U32(4096)),
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
