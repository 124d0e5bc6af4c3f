//! Damaged, contradictory and hostile files of tokenizers: a typed error or a tokenizer that works, and never a panic.

use std::path::Path;

use serde_json::{Value, json};

use super::families::{gguf_of_byte_level, gguf_of_sentencepiece};
use super::{load, strings};
use crate::gguf::MetadataValue;
use crate::tokenizer::folder::Settings;
use crate::tokenizer::{Tokenizer, TokenizerError};

const TEXT: &str = "Hello wörld 2026 <s>\n\n\t{}▁ 日本 🦀<|end|> don't";

/// A small tokenizer.json with every part that is known.
fn small(byte_level: bool) -> Value {
    let (normalizer, pre_tokenizer, decoder) = if byte_level {
        let split =
            json!({"type": "Split", "pattern": {"Regex": "\\s?[a-zA-Z]+"}, "behavior": "Isolated", "invert": false});
        let bytes = json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": false});
        let digits = json!({"type": "Digits", "individual_digits": true});
        let steps = json!({"type": "Sequence", "pretokenizers": [split, digits, bytes]});
        (json!({"type": "NFC"}), steps, json!({"type": "ByteLevel"}))
    } else {
        let replace = json!({"type": "Replace", "pattern": {"String": " "}, "content": "▁"});
        let prepend = json!({"type": "Prepend", "prepend": "▁"});
        let back = json!({"type": "Replace", "pattern": {"String": "▁"}, "content": " "});
        let decoders = json!([back, {"type": "ByteFallback"}, {"type": "Fuse"}]);
        let normalizer = json!({"type": "Sequence", "normalizers": [prepend, replace]});
        (
            normalizer,
            Value::Null,
            json!({"type": "Sequence", "decoders": decoders}),
        )
    };
    json!({
        "version": "1.0", "truncation": null, "padding": null,
        "added_tokens": [
            {"id": 5, "content": "<s>", "single_word": false, "lstrip": true, "rstrip": true, "normalized": false, "special": true},
            {"id": 6, "content": "<|end|>", "single_word": true, "lstrip": false, "rstrip": false, "normalized": true, "special": true},
        ],
        "normalizer": normalizer, "pre_tokenizer": pre_tokenizer, "decoder": decoder,
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
            "pair": [], "special_tokens": {"<s>": {"id": "<s>", "ids": [5], "tokens": ["<s>"]}},
        },
        "model": {
            "type": "BPE", "dropout": null, "unk_token": "u", "continuing_subword_prefix": null, "end_of_word_suffix": "",
            "fuse_unk": true, "byte_fallback": true, "ignore_merges": true,
            "vocab": {"u": 0, "H": 1, "e": 2, "He": 3, "<0x0A>": 4}, "merges": [["H", "e"]],
        },
    })
}

fn settings() -> Value {
    json!({
        "add_bos_token": true, "add_eos_token": false, "bos_token": "<s>", "eos_token": {"content": "<|end|>"},
        "unk_token": "u", "pad_token": null, "chat_template": "{{ x }}",
        "added_tokens_decoder": {"7": {"content": "<more>", "special": false, "normalized": false}},
    })
}

fn open(files: &[(&str, &[u8])]) -> Result<Tokenizer, TokenizerError> {
    let folder = tempfile::tempdir().unwrap();
    for (name, content) in files {
        std::fs::write(folder.path().join(name), content).unwrap();
    }
    Tokenizer::from_folder(folder.path())
}

fn open_json(tokenizer: &Value, config: &Value) -> Result<Tokenizer, TokenizerError> {
    let (tokenizer, config) = (tokenizer.to_string(), config.to_string());
    let generation = json!({"eos_token_id": [6, 2]}).to_string();
    open(&[
        ("tokenizer.json", tokenizer.as_bytes()),
        ("tokenizer_config.json", config.as_bytes()),
        ("generation_config.json", generation.as_bytes()),
    ])
}

/// Every tokenizer that opens must work, whatever its file says.
fn try_out(opened: Result<Tokenizer, TokenizerError>) {
    if let Ok(tokenizer) = opened {
        let ids = tokenizer.encode(TEXT, true).unwrap_or_default();
        tokenizer.decode(&ids, false);
        assert!(ids.iter().all(|id| tokenizer.token_bytes(*id).is_some()));
        let mut end = tokenizer.end_tokens().iter();
        assert!(end.all(|id| tokenizer.token_bytes(*id).is_some()));
        tokenizer.tokenizer_json().unwrap();
    }
}

/// Tries each mutation of `value` as the file `name` of a folder with the other `files`.
fn try_mutations(files: &[(&str, &Value)], name: &str, value: &Value) -> usize {
    let folder = tempfile::tempdir().unwrap();
    for (name, value) in files {
        std::fs::write(folder.path().join(name), value.to_string()).unwrap();
    }
    let mut count = 0;
    let settings = Settings::read(folder.path()).unwrap();
    let path = folder.path().join(name);
    mutate(value, &mut |mutated| {
        count += 1;
        let mutated = mutated.to_string();
        if name == "tokenizer.json" {
            try_out(Tokenizer::from_json(
                (&path, mutated.as_bytes()),
                &settings,
                folder.path(),
            ));
        } else {
            std::fs::write(&path, mutated).unwrap();
            try_out(Tokenizer::from_folder(folder.path()));
        }
    });
    count
}

/// Calls `check` with each copy of `value` in which one value is another or one member is missing.
fn mutate(value: &Value, check: &mut dyn FnMut(&Value)) {
    fn walk(whole: &mut Value, path: &str, check: &mut dyn FnMut(&Value)) {
        let original = whole.pointer(path).unwrap().clone();
        let others = [
            Value::Null,
            json!(true),
            json!(-1),
            json!(4_294_967_295_u64),
            json!(1e300),
            json!(""),
            json!("▁"),
            json!("\\"),
            json!([]),
            json!([[]]),
            json!({}),
            json!({"type": "Sequence"}),
        ];
        for other in others {
            *whole.pointer_mut(path).unwrap() = other;
            check(whole);
        }
        *whole.pointer_mut(path).unwrap() = original.clone();
        let keys: Vec<String> = match &original {
            Value::Object(members) => members.keys().cloned().collect(),
            Value::Array(members) => (0..members.len()).map(|index| index.to_string()).collect(),
            _ => Vec::new(),
        };
        for key in keys {
            if let Value::Object(members) = whole.pointer_mut(path).unwrap() {
                members.remove(&key);
                check(whole);
                *whole.pointer_mut(path).unwrap() = original.clone();
            }
            let escaped = key.replace('~', "~0").replace('/', "~1");
            walk(whole, &format!("{path}/{escaped}"), check);
        }
    }
    walk(&mut value.clone(), "", check);
}

#[test]
fn the_small_files_open_and_say_what_they_say() {
    for byte_level in [false, true] {
        let tokenizer = open_json(&small(byte_level), &settings()).unwrap();
        assert_eq!(tokenizer.vocab_size(), 8);
        let end: Vec<_> = tokenizer.end_tokens().iter().map(|id| id.0).collect();
        assert_eq!(end, [2, 6]);
        assert_eq!(tokenizer.encode("", true).unwrap().len(), 1);
        let ids = tokenizer.encode("He  <s>  <more>", true).unwrap();
        let ids: Vec<_> = ids.iter().map(|id| id.0).collect();
        let expected: &[u32] = if byte_level { &[5, 3, 5, 7] } else { &[5, 0, 3, 5, 7] };
        assert_eq!(ids, expected, "byte level: {byte_level}");
    }
}

#[test]
fn any_other_value_in_the_files_is_a_typed_error_or_works() {
    for byte_level in [false, true] {
        let files = [("tokenizer_config.json", &settings())];
        let count = try_mutations(&files, "tokenizer.json", &small(byte_level));
        assert!(count > 1_000, "{count}");
    }
    let files = [("tokenizer.json", &small(true))];
    try_mutations(&files, "tokenizer_config.json", &settings());
    for name in ["generation_config.json", "config.json", "special_tokens_map.json"] {
        try_mutations(&files, name, &json!({"eos_token_id": [2], "bos_token": "<s>"}));
    }
}

#[test]
fn cut_off_files_are_typed_errors() {
    let (tokenizer, config) = (small(true).to_string(), settings().to_string());
    for end in (0..tokenizer.len()).step_by(29) {
        let error = open(&[("tokenizer.json", &tokenizer.as_bytes()[..end])]).unwrap_err();
        assert!(matches!(error, TokenizerError::Json { .. }), "{error}");
    }
    for end in (0..config.len()).step_by(17) {
        let files: [(&str, &[u8]); 2] = [
            ("tokenizer.json", tokenizer.as_bytes()),
            ("tokenizer_config.json", &config.as_bytes()[..end]),
        ];
        assert!(matches!(open(&files).unwrap_err(), TokenizerError::Json { .. }));
    }
}

#[test]
fn files_are_refused_before_they_are_read_whole() {
    assert!(matches!(open(&[]).unwrap_err(), TokenizerError::NoTokenizerJson { .. }));
    let folder = tempfile::tempdir().unwrap();
    let sparse = |name: &str, bytes: u64| {
        std::fs::File::create(folder.path().join(name))
            .unwrap()
            .set_len(bytes)
            .unwrap();
    };
    sparse("tokenizer.json", (64 << 20) + 1);
    let error = Tokenizer::from_folder(folder.path()).unwrap_err();
    assert!(
        matches!(
            error,
            TokenizerError::TooLarge {
                max_bytes: 67_108_864,
                ..
            }
        ),
        "{error}"
    );
    std::fs::write(folder.path().join("tokenizer.json"), small(true).to_string()).unwrap();
    sparse("tokenizer_config.json", (16 << 20) + 1);
    let error = Tokenizer::from_folder(folder.path()).unwrap_err();
    assert!(
        matches!(
            error,
            TokenizerError::TooLarge {
                max_bytes: 16_777_216,
                ..
            }
        ),
        "{error}"
    );
    std::fs::remove_file(folder.path().join("tokenizer_config.json")).unwrap();
    std::fs::create_dir(folder.path().join("tokenizer_config.json")).unwrap();
    let error = Tokenizer::from_folder(folder.path()).unwrap_err();
    assert!(matches!(error, TokenizerError::Io { .. }), "{error}");
    let deep = format!("{{\"model\": {}", "[".repeat(100_000));
    let error = open(&[("tokenizer.json", deep.as_bytes())]).unwrap_err();
    assert!(matches!(error, TokenizerError::Json { .. }), "{error}");
}

#[test]
fn what_is_not_known_is_refused_by_name() {
    let open_with = |pointer: &str, value: Value| {
        let mut tokenizer = small(true);
        *tokenizer.pointer_mut(pointer).unwrap() = value;
        open_json(&tokenizer, &settings()).unwrap_err()
    };
    for kind in ["Unigram", "WordPiece", "WordLevel"] {
        let error = open_with("/model/type", json!(kind));
        assert!(
            matches!(&error, TokenizerError::UnsupportedModel { found } if found == kind),
            "{error}"
        );
    }
    let unigram = json!({"type": "Unigram", "vocab": [["a", -1.5]], "unk_id": 0});
    let error = open_with("/model", unigram);
    assert!(matches!(error, TokenizerError::UnsupportedModel { .. }), "{error}");
    for (part, kind) in [
        ("normalizer", "BertNormalizer"),
        ("pre_tokenizer", "UnicodeScripts"),
        ("decoder", "CTC"),
        ("decoder", "Fuse"),
        ("post_processor", "RobertaProcessing"),
    ] {
        let error = open_with(&format!("/{part}"), json!({"type": kind}));
        let is_named = matches!(
            &error,
            TokenizerError::UnsupportedPart { part: found_part, found, .. } if *found_part == part && found == kind
        );
        assert!(is_named, "{error}");
    }
    for (pointer, value) in [
        ("/model/dropout", json!(0.1)),
        ("/model/continuing_subword_prefix", json!("##")),
        ("/model/end_of_word_suffix", json!("</w>")),
        ("/pre_tokenizer/pretokenizers/2/add_prefix_space", json!(true)),
    ] {
        let error = open_with(pointer, value);
        assert!(
            matches!(error, TokenizerError::UnsupportedSetting { .. }),
            "{pointer}: {error}"
        );
    }
    let error = open_with("/model/merges/0", json!(["H", "H"]));
    assert!(matches!(error, TokenizerError::BadMerge { rank: 0, .. }), "{error}");
    let error = open_with("/model/vocab/He", json!(1));
    assert!(matches!(error, TokenizerError::DuplicateToken { id: 1, .. }), "{error}");
    let error = open_with("/model/vocab/He", json!(1 << 20));
    assert!(matches!(error, TokenizerError::VocabularySize { .. }), "{error}");
}

#[test]
fn a_pattern_that_takes_too_many_steps_is_a_typed_error() {
    let mut tokenizer = small(true);
    let pattern = tokenizer.pointer_mut("/pre_tokenizer/pretokenizers/0/pattern").unwrap();
    *pattern = json!({"Regex": "(?=a)(a|a)+\\1$"});
    let tokenizer = open_json(&tokenizer, &settings()).unwrap();
    let text = ["a".repeat(60), "b".to_owned()].concat();
    let error = tokenizer.encode(&text, false);
    assert!(matches!(error, Err(TokenizerError::PatternLimit { .. })), "{error:?}");
    assert!(tokenizer.encode("H", false).is_ok());
}

#[test]
fn any_other_value_in_a_gguf_file_is_a_typed_error_or_works() {
    let text = |text: &str| MetadataValue::String(text.to_owned());
    let values = || {
        [
            text(""),
            text("llama"),
            text("gpt2"),
            MetadataValue::Bool(true),
            MetadataValue::U32(0),
            MetadataValue::U32(u32::MAX),
            MetadataValue::F32(f32::NAN),
            MetadataValue::Array(Vec::new()),
            MetadataValue::Array(vec![MetadataValue::F32(f32::NAN); 1400]),
            MetadataValue::Array(vec![MetadataValue::F32(0.0); 1400]),
            MetadataValue::Array(vec![MetadataValue::I32(6); 1400]),
            MetadataValue::Array(vec![MetadataValue::I32(5); 1400]),
            MetadataValue::Array(vec![MetadataValue::I32(4); 1400]),
            strings(&["a", "b", "ab", "<0x0A>", ""]),
            strings(&["a b", "", " ", "a  b"]),
        ]
    };
    let mut with_more = super::families::json_of("llama-bpe");
    with_more["added_tokens"].as_array_mut().unwrap().truncate(1);
    for file in [
        gguf_of_byte_level("llama-bpe", &with_more),
        gguf_of_sentencepiece("sentencepiece-llama"),
        gguf_of_sentencepiece("sentencepiece-unknown"),
    ] {
        let mut keys: Vec<String> = file.metadata.iter().map(|(key, _)| key.clone()).collect();
        keys.extend(
            [
                "unknown_token_id",
                "eos_token_id",
                "eot_token_id",
                "add_bos_token",
                "add_space_prefix",
                "escape_whitespaces",
            ]
            .map(|key| format!("tokenizer.ggml.{key}")),
        );
        for key in keys {
            try_out(load(&file.clone().without_metadata(&key)));
            for value in values() {
                try_out(load(&file.clone().metadata(&key, value)));
            }
        }
    }
}

#[test]
fn sentencepiece_files_that_contradict_themselves_are_refused_by_name() {
    let file = || gguf_of_sentencepiece("sentencepiece-llama");
    let refuse = |key: &str, value| load(&file().metadata(key, value)).unwrap_err();
    for kind in ["t5", "bert", "gemma4", "rwkv", ""] {
        let error = refuse("tokenizer.ggml.model", MetadataValue::String(kind.into()));
        assert!(
            matches!(&error, TokenizerError::UnsupportedModel { found } if found == kind),
            "{error}"
        );
    }
    let scores = |score| MetadataValue::Array(vec![MetadataValue::F32(score); 1400]);
    let error = refuse("tokenizer.ggml.scores", scores(f32::NAN));
    assert!(matches!(error, TokenizerError::BadScore { id: 0 }), "{error}");
    let error = refuse(
        "tokenizer.ggml.scores",
        MetadataValue::Array(vec![MetadataValue::F32(0.0)]),
    );
    assert!(
        matches!(error, TokenizerError::TokenTypeCount { types: 1, tokens: 1400 }),
        "{error}"
    );
    let kinds = |kind| MetadataValue::Array(vec![MetadataValue::I32(kind); 1400]);
    let error = refuse("tokenizer.ggml.token_type", kinds(6));
    assert!(matches!(error, TokenizerError::BadByteToken { id: 0 }), "{error}");
    let error = refuse("tokenizer.ggml.token_type", kinds(1));
    assert!(matches!(error, TokenizerError::NoUnknownToken), "{error}");
    for (key, value) in [
        ("tokenizer.ggml.remove_extra_whitespaces", MetadataValue::Bool(true)),
        ("tokenizer.ggml.escape_whitespaces", MetadataValue::Bool(false)),
        (
            "tokenizer.ggml.precompiled_charsmap",
            MetadataValue::Array(vec![MetadataValue::U8(1)]),
        ),
    ] {
        let error = refuse(key, value);
        assert!(
            matches!(&error, TokenizerError::UnsupportedSetting { key: found } if *found == key),
            "{error}"
        );
    }
    let missing = load(&file().without_metadata("tokenizer.ggml.scores"));
    assert!(matches!(missing, Err(TokenizerError::Gguf(_))));
}

#[test]
fn a_folder_that_cannot_be_written_is_a_typed_error() {
    let tokenizer = load(&gguf_of_sentencepiece("sentencepiece-llama")).unwrap();
    let error = tokenizer
        .write_folder(Path::new("/proc/no/such/folder"), None)
        .unwrap_err();
    assert!(matches!(error, TokenizerError::Write { .. }), "{error}");
}
