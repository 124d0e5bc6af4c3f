//! What config.json may say, and what it means.

use super::*;
use crate::arch::{RopePairs, WindowLayers};
use crate::config::folder as config_folder;
use crate::config::{Contradiction, Rope, Window};

fn family(name: &str) -> Both {
    let architecture = SUPPORTED.iter().find(|known| known.name == name).unwrap();
    both(
        &TinyModel {
            architecture,
            layer_count: 2,
            matrix_kind: GgmlType::F16,
            tied_embeddings: true,
            ..TinyModel::default()
        },
        1,
    )
}

/// Sets keys of config.json; null removes one.
fn set(both: &Both, keys: Value) -> Result<ModelConfig, ConfigError> {
    let keys = keys.as_object().unwrap().clone();
    both.with_config(|config| {
        for (key, value) in keys {
            if value.is_null() {
                config.as_object_mut().unwrap().remove(&key);
            } else {
                config[key] = value;
            }
        }
    })
}

/// Removes the newer form of RoPE, and sets these keys.
fn old_rope(both: &Both, mut keys: Value) -> Result<ModelConfig, ConfigError> {
    keys["rope_parameters"] = Value::Null;
    set(both, keys)
}

fn rope(base: f32, dims: usize, scaling: RopeScaling) -> Rope {
    Rope {
        pairs: RopePairs::Halves,
        base,
        dims,
        scaling,
    }
}

#[test]
fn rope_of_every_generation() {
    let llama = family("llama");
    let of = |keys| old_rope(&llama, keys).map(|config| config.rope);
    assert_eq!(of(json!({})).unwrap(), rope(10_000.0, 16, RopeScaling::None));
    assert_eq!(
        of(json!({ "rope_theta": 5e5, "rope_scaling": { "type": "linear", "factor": 4 } })).unwrap(),
        rope(5e5, 16, RopeScaling::Linear { factor: 4.0 })
    );
    // As in the files of Llama 3.1 and of Llama 3.2.
    let llama3 = json!({
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    });
    let scaling = RopeScaling::Llama3 {
        factor: 8.0,
        low_freq_factor: 1.0,
        high_freq_factor: 4.0,
        original_context: 8192,
    };
    assert_eq!(
        of(json!({ "rope_theta": 5e5, "rope_scaling": llama3 })).unwrap(),
        rope(5e5, 16, scaling.clone())
    );
    let mut newer = llama3.clone();
    newer["rope_theta"] = json!(3e5);
    let newer = set(
        &llama,
        json!({ "rope_theta": 5e5, "rope_scaling": null, "rope_parameters": newer }),
    )
    .unwrap();
    assert_eq!(newer.rope, rope(3e5, 16, scaling));
    for (key, value) in [
        ("factor", json!(0)),
        ("factor", json!("8")),
        ("low_freq_factor", json!(4)),
        ("factor", Value::Null),
    ] {
        let mut broken = llama3.clone();
        broken[key] = value;
        of(json!({ "rope_scaling": broken })).unwrap_err();
    }
    for kind in ["yarn", "dynamic", "proportional", "mrope", "?"] {
        let error = of(json!({ "rope_scaling": { "type": kind, "factor": 2.0 } })).unwrap_err();
        assert!(
            matches!(&error, ConfigError::UnsupportedFeature { value, .. } if value == kind),
            "{error}"
        );
    }
    let error = of(json!({ "rope_scaling": null, "partial_rotary_factor": 0.2 })).unwrap_err();
    assert!(matches!(error, ConfigError::UnsupportedFeature { .. }), "{error}");
}

#[test]
fn long_factors_serve_models_whose_context_is_long() {
    let phi = family("phi3");
    let factors = |number: f32| vec![number; 4];
    let keys = |context| {
        json!({
            "max_position_embeddings": context, "original_max_position_embeddings": 4096,
            "partial_rotary_factor": 0.5,
            "rope_scaling": { "type": "longrope", "short_factor": factors(1.5), "long_factor": factors(2.5) },
        })
    };
    let of = |keys| old_rope(&phi, keys).map(|config| config.rope);
    let long = of(keys(131_072)).unwrap();
    let RopeScaling::Factors { factors, magnitude } = long.scaling else {
        panic!("{long:?}")
    };
    // transformers 5.24: math.sqrt(1 + math.log(32) / math.log(4096)).
    assert_eq!((factors, long.dims), (vec![2.5; 4], 8));
    assert!((magnitude - 1.190_238).abs() < 1e-6, "{magnitude}");
    let short = of(keys(4096)).unwrap();
    assert_eq!(
        short.scaling,
        RopeScaling::Factors {
            factors: vec![1.5; 4],
            magnitude: 1.0
        }
    );
    let mut whole = keys(4096);
    whole["partial_rotary_factor"] = json!(1.0);
    let error = of(whole).unwrap_err();
    let expected = Contradiction::RopeFactors { factors: 4, pairs: 8 };
    assert!(
        matches!(&error, ConfigError::Inconsistent(found) if *found == expected),
        "{error}"
    );
    let mut endless = keys(4096);
    endless["rope_scaling"]["short_factor"] = json!([1, 1, 1, 1e300]);
    assert!(matches!(of(endless), Err(ConfigError::OutOfRange { .. })));
}

#[test]
fn windows_of_every_family() {
    let mistral = family("llama");
    let window = |both: &Both, keys| set(both, keys).map(|config| config.window);
    let all = |tokens| {
        Some(Window {
            tokens,
            layers: WindowLayers::All,
        })
    };
    let mistral_keys = |window: Value| {
        json!({
            "model_type": "mistral", "sliding_window": window, "layer_types": null, "use_sliding_window": null,
        })
    };
    assert_eq!(window(&mistral, mistral_keys(json!(4096))).unwrap(), all(4096));
    assert_eq!(window(&mistral, mistral_keys(Value::Null)).unwrap(), None);
    let mut written_null = mistral_keys(json!(1));
    written_null["sliding_window"] = json!(0);
    assert!(window(&mistral, written_null).is_err());
    let qwen = family("qwen2");
    let keys = json!({ "sliding_window": 32, "layer_types": null, "use_sliding_window": null, "max_window_layers": 0 });
    assert_eq!(
        window(&qwen, keys).unwrap(),
        None,
        "an absent use_sliding_window is false"
    );
    assert_eq!(window(&qwen, json!({ "use_sliding_window": false })).unwrap(), None);
    assert_eq!(window(&qwen, json!({ "use_sliding_window": true })).unwrap(), all(32));
    assert_eq!(window(&qwen, json!({ "max_window_layers": 2 })).unwrap(), None);
    let error = window(&qwen, json!({ "max_window_layers": 1 })).unwrap_err();
    assert!(matches!(error, ConfigError::UnsupportedFeature { .. }), "{error}");
    let gemma = family("gemma2");
    let every_other = |tokens| {
        Some(Window {
            tokens,
            layers: WindowLayers::AllBut { every: 2 },
        })
    };
    let keys = json!({ "sliding_window": null, "layer_types": null, "use_sliding_window": null });
    assert_eq!(
        window(&gemma, keys).unwrap(),
        every_other(4096),
        "the default of the family"
    );
    let types = json!({ "sliding_window": 64, "layer_types": ["sliding_attention", "full_attention"] });
    assert_eq!(window(&gemma, types).unwrap(), every_other(64));
    for (types, is_contradiction) in [
        (json!(["full_attention", "sliding_attention"]), false),
        (json!(["sliding_attention", "linear_attention"]), false),
        (json!(["sliding_attention"]), true),
    ] {
        let error = window(&gemma, json!({ "layer_types": types })).unwrap_err();
        assert_eq!(
            matches!(error, ConfigError::Inconsistent(_)),
            is_contradiction,
            "{error}"
        );
    }
}

#[test]
fn gemma_3_inside_a_model_that_reads_images() {
    let gemma = family("gemma3");
    let tensors = stored(&gemma);
    let of_images: Stored = ("vision_tower.patches.weight".to_owned(), "F8_E4M3", vec![4], vec![0; 4]);
    let (name, own) = ("blk.1.post_ffw_norm.weight", gemma.open().unwrap());
    let (vocab_size, norm) = (own.config().vocab_size, own.vector(name).unwrap());
    // The files change in place below.
    drop(own);
    for (prefix, image_prefix) in [("language_model.", ""), ("model.language_model.", "model.")] {
        let mut nested: Vec<Stored> = tensors
            .iter()
            .cloned()
            .map(|(name, dtype, shape, bytes)| {
                let name = name.strip_prefix("model.").unwrap();
                let inner = if image_prefix.is_empty() { "model." } else { "" };
                (format!("{prefix}{inner}{name}"), dtype, shape, bytes)
            })
            .collect();
        let (of_images, dtype, shape, bytes) = of_images.clone();
        nested.push((format!("{image_prefix}{of_images}"), dtype, shape, bytes));
        gemma.write("model.safetensors", &safetensors(&nested));
        // What the published models write, with the sizes of this one.
        let text = json!({
            "model_type": "gemma3_text", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
            "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "vocab_size": vocab_size,
            "rope_scaling": { "rope_type": "linear", "factor": 8.0 }, "sliding_window": 1024,
        });
        let outer = json!({ "model_type": "gemma3", "vision_config": {}, "text_config": text });
        gemma.write("config.json", outer.to_string().as_bytes());
        let model = gemma.open().unwrap();
        let config = model.config();
        assert_eq!(config.rope, rope(1e6, 16, RopeScaling::Linear { factor: 8.0 }));
        assert_eq!(config.window_rope, Some(rope(1e4, 16, RopeScaling::None)));
        assert_eq!((config.context_length, config.attention_scale), (131_072, 1.0 / 16.0));
        assert_eq!(model.vector(name).unwrap(), norm);
    }
}

#[test]
fn what_this_build_does_not_compute_is_refused_by_name() {
    let llama = family("llama");
    let original = llama.read("config.json");
    let check = |keys| {
        llama.write("config.json", &original);
        set(&llama, keys).expect_err("must be refused")
    };
    for (key, value) in [
        ("num_local_experts", json!(8)),
        ("num_experts", json!(64)),
        ("n_routed_experts", json!(256)),
        ("kv_lora_rank", json!(512)),
        ("q_lora_rank", json!(1536)),
        ("state_size", json!(16)),
        ("hidden_act", json!("relu")),
        ("hidden_activation", json!("gelu_pytorch_tanh")),
        ("attention_bias", json!(true)),
        ("mlp_bias", json!(true)),
        ("use_bidirectional_attention", json!(true)),
    ] {
        let error = check(json!({ key: value }));
        assert!(
            matches!(&error, ConfigError::UnsupportedFeature { key: found, .. } if found == key),
            "{key}: {error}"
        );
        assert!(SUPPORTED.iter().all(|known| error.to_string().contains(known.name)));
    }
    for method in ["fp8", "gptq", "awq", "bitsandbytes", "compressed-tensors"] {
        let error = check(json!({ "quantization_config": { "quant_method": method, "bits": 4 } }));
        assert!(
            matches!(&error, ConfigError::QuantisedFolder { method: found } if found == method),
            "{error}"
        );
        assert!(GgmlType::ALL.iter().all(|kind| error.to_string().contains(kind.name())));
    }
    for (name, what) in [
        ("mixtral", "experts"),
        ("deepseek_v3", "latent"),
        ("mamba", "state"),
        ("rwkv", "state"),
        ("qwen2_vl", "images"),
        ("something_new", "something_new"),
    ] {
        let error = check(json!({ "model_type": name }));
        assert!(
            matches!(&error, ConfigError::UnsupportedArchitecture { found } if found == name),
            "{error}"
        );
        assert!(error.to_string().contains(what), "{error}");
    }
    // A model for text inside another one, of a kind that we do not know.
    let error = check(json!({ "model_type": "llava", "text_config": { "model_type": "llama" } }));
    assert!(matches!(error, ConfigError::UnsupportedArchitecture { .. }), "{error}");
    // Zero experts are none.
    llama.write("config.json", &original);
    set(
        &llama,
        json!({ "num_experts": 0, "kv_lora_rank": null, "quantization_config": null }),
    )
    .unwrap();
}

#[test]
fn numbers_outside_their_range_are_named() {
    let llama = family("llama");
    let original = llama.read("config.json");
    for key in [
        "num_hidden_layers",
        "hidden_size",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "intermediate_size",
        "vocab_size",
        "max_position_embeddings",
        "sliding_window",
    ] {
        for value in [json!(0), json!(u64::MAX), json!(u32::MAX)] {
            llama.write("config.json", &original);
            let error = set(&llama, json!({ key: value })).unwrap_err();
            assert!(
                matches!(&error, ConfigError::OutOfRange { key: found, .. } if found == key),
                "{key}: {error}"
            );
        }
        for value in [json!(-1), json!(1.5), json!("8"), json!([]), json!({}), json!(true)] {
            llama.write("config.json", &original);
            let error = set(&llama, json!({ key: value })).unwrap_err();
            assert!(
                matches!(&error, ConfigError::Folder(FolderError::WrongType { key: found, .. }) if found == key),
                "{key}: {error}"
            );
        }
    }
    for key in ["num_hidden_layers", "hidden_size", "vocab_size", "model_type"] {
        llama.write("config.json", &original);
        let error = set(&llama, json!({ key: null })).unwrap_err();
        assert!(
            matches!(&error, ConfigError::Folder(FolderError::MissingKey { key: found }) if found == key),
            "{error}"
        );
    }
    llama.write("config.json", &vec![b' '; (1 << 20) + 1]);
    assert!(matches!(
        llama.refused(),
        ModelError::Folder(FolderError::AboveLimit { .. })
    ));
    // transformers divides by a cap, so with zero it has no numbers. `null` is no cap.
    for key in ["attn_logit_softcapping", "final_logit_softcapping"] {
        llama.write("config.json", &original);
        let error = set(&llama, json!({ key: 0 })).unwrap_err();
        assert!(
            matches!(&error, ConfigError::OutOfRange { key: found, .. } if found == key),
            "{key}: {error}"
        );
        llama.write("config.json", &original);
        set(&llama, json!({ key: null })).unwrap();
    }
}

/// Configurations of all families in the forms of an old and of a new transformers, against what transformers understands by
/// them. `make_folder_configs.py` is beside the data.
#[test]
fn what_transformers_understands() {
    let mut count = 0;
    for line in include_str!("../../../testdata/folder_configs.jsonl").lines() {
        let case: Value = serde_json::from_str(line).unwrap();
        let (name, expected) = (&case["name"], &case["expected"]);
        let file = ConfigFile::parse(case["config"].to_string().into_bytes()).unwrap();
        let architecture = config_folder::architecture(&file).unwrap();
        let has_head = expected["tied"] == json!(false);
        let config = config_folder::numbers(&file, architecture, has_head).unwrap();
        let close = |found: f32, key: &str| {
            let expected = expected[key].as_f64().unwrap() as f32;
            assert!(
                (found - expected).abs() <= expected.abs() * 1e-6,
                "{name} {key}: {found} {expected}"
            );
        };
        close(config.attention_scale, "scale");
        close(config.rms_epsilon, "epsilon");
        let found = json!({
            "layers": config.layer_count, "hidden": config.hidden_size, "heads": config.head_count,
            "kv_heads": config.kv_head_count, "head_dim": config.head_dim, "ffn": config.ffn_size,
            "vocab": config.vocab_size, "context": config.context_length, "tied": config.tied_embeddings,
            "attention_softcap": config.attention_softcap, "logit_softcap": config.logit_softcap,
            "windows": (0..config.layer_count).map(|layer| config.window_of(layer)).collect::<Vec<_>>(),
        });
        for (key, value) in found.as_object().unwrap() {
            assert_eq!(*value, expected[key], "{name} {key}");
        }
        for (layer, expected) in expected["ropes"].as_array().unwrap().iter().enumerate() {
            let rope = config.rope_of(layer);
            let (kind, factor, original) = match &rope.scaling {
                RopeScaling::None => ("default", None, None),
                RopeScaling::Linear { factor } => ("linear", Some(*factor), None),
                RopeScaling::Llama3 {
                    factor,
                    original_context,
                    ..
                } => ("llama3", Some(*factor), Some(*original_context)),
                // The original context decides which factors these are.
                RopeScaling::Factors { factors, .. } => {
                    assert_eq!(
                        (factors.len(), factors[47]),
                        (48, 1.0 + 1.25 * 47.0),
                        "{name}: the long factors"
                    );
                    ("longrope", None, Some(4096))
                }
            };
            assert_eq!(expected["base"].as_f64(), Some(f64::from(rope.base)), "{name} {layer}");
            assert_eq!(expected["type"], kind, "{name} {layer}");
            let rest = json!([rope.dims, factor, original]);
            assert_eq!(
                json!([expected["dims"], expected["factor"], expected["original"]]),
                rest,
                "{name} {layer}"
            );
        }
        count += 1;
    }
    assert_eq!(count, 28);
}
