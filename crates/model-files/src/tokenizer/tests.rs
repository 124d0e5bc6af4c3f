//! The tokenizer against the golden prompts, against itself, and against damaged vocabularies.

mod families;
mod hostile;
mod special;

use std::sync::LazyLock;

use proptest::prelude::*;

use super::*;
use crate::gguf::{GgufFile, MetadataValue};
use crate::test_kit::{GgufBuilder, TinyModel, golden_cases, model_path};

static REAL: LazyLock<Tokenizer> = LazyLock::new(|| {
    let file = GgufFile::open(&model_path()).unwrap();
    Tokenizer::from_gguf(&file).unwrap()
});

fn load(builder: &GgufBuilder) -> Result<Tokenizer, TokenizerError> {
    thread_local! {
        // One folder for each thread: the mutation tests load many files.
        static FOLDER: tempfile::TempDir = tempfile::tempdir().unwrap();
    }
    FOLDER.with(|folder| {
        let path = folder.path().join("tiny.gguf");
        builder.write(&path).unwrap();
        Tokenizer::from_gguf(&GgufFile::open(&path).unwrap())
    })
}

fn tiny(key: &str, value: MetadataValue) -> Result<Tokenizer, TokenizerError> {
    load(&TinyModel::default().build().metadata(key, value))
}

fn strings(texts: &[&str]) -> MetadataValue {
    MetadataValue::Array(
        texts
            .iter()
            .map(|&text| MetadataValue::String(text.to_owned()))
            .collect(),
    )
}

fn ids(value: &serde_json::Value) -> Vec<TokenId> {
    value
        .as_array()
        .unwrap()
        .iter()
        .map(|id| TokenId(u32::try_from(id.as_u64().unwrap()).unwrap()))
        .collect()
}

#[test]
fn golden_prompts_and_outputs() {
    let cases = golden_cases();
    assert_eq!(cases.len(), 16);
    for case in cases {
        let id = &case["id"];
        let prompt = case
            .get("prompt")
            .or_else(|| case.get("rendered_prompt"))
            .unwrap()
            .as_str()
            .unwrap();
        assert_eq!(
            REAL.encode(prompt, true).unwrap(),
            ids(&case["prompt_token_ids"]),
            "{id}"
        );
        assert_eq!(REAL.decode(&ids(&case["prompt_token_ids"]), false), prompt, "{id}");
        let mut output = ids(&case["output_token_ids"]);
        if case["finish"] == "stop" {
            let last = output.pop().unwrap();
            assert!(REAL.end_tokens().contains(&last), "{id}");
        }
        assert!(!output.iter().any(|token| REAL.end_tokens().contains(token)), "{id}");
        assert_eq!(
            REAL.decode(&output, true),
            case["output_text"].as_str().unwrap(),
            "{id}"
        );
    }
}

#[test]
fn special_tokens_of_the_real_model() {
    assert_eq!(REAL.vocab_size(), 49_152);
    assert_eq!(REAL.end_tokens(), [TokenId(0), TokenId(2)]);
    assert_eq!(REAL.special.begin, Some(TokenId(1)));
    assert!(REAL.is_special(TokenId(16)) && !REAL.is_special(TokenId(17)) && !REAL.is_special(TokenId(u32::MAX)));
    assert_eq!(REAL.token_bytes(TokenId(2)), Some(&b"<|im_end|>"[..]));
    assert_eq!(REAL.token_bytes(TokenId(49_152)), None);
    let turn = REAL.encode("<|im_start|>user\nhi<|im_end|>", false).unwrap();
    assert_eq!((turn[0], *turn.last().unwrap()), (TokenId(1), TokenId(2)));
    assert_eq!(REAL.decode(&turn, true), "user\nhi");
    assert_eq!(REAL.decode(&[TokenId(49_152), TokenId(u32::MAX)], false), "");
}

#[test]
fn digits_are_single_tokens() {
    let tokens = REAL.encode("in 2026", false).unwrap();
    let pieces: Vec<_> = tokens.iter().map(|&token| REAL.token_bytes(token).unwrap()).collect();
    assert_eq!(pieces, [b"in".as_slice(), b" ", b"2", b"0", b"2", b"6"]);
}

/// What a round trip gives: the text without the bytes that this vocabulary has no token for.
fn encodable(text: &str) -> String {
    let known: Vec<u8> = text.bytes().filter(|&byte| !UNENCODABLE.contains(&byte)).collect();
    String::from_utf8_lossy(&known).into_owned()
}

/// Bytes without a token in SmolLM2's vocabulary, among those that UTF-8 uses.
const UNENCODABLE: [u8; 8] = [0x04, 0x06, 0x13, 0x14, 0x16, 0x1D, 0xF1, 0xF2];

#[test]
fn long_runs_neither_fail_nor_take_forever() {
    for unit in [" ", "a", "\n", "1", "é", "<", "<|im_end|>", "a b", " \t", "漢", "!?"] {
        let text = unit.repeat(200_000 / unit.len());
        let tokens = REAL.encode(&text, false).unwrap();
        assert_eq!(REAL.decode(&tokens, false), text, "{unit:?}");
    }
}

proptest! {
    #[test]
    fn round_trip(text in ".*|\\PC{0,40}|[ \\n\\t<|im_end>0-9é]{0,60}") {
        let tokens = REAL.encode(&text, false).unwrap();
        prop_assert_eq!(REAL.decode(&tokens, false), encodable(&text));
    }

    #[test]
    fn round_trip_of_any_characters(characters in proptest::collection::vec(any::<char>(), 0..60)) {
        let text: String = characters.into_iter().collect();
        let tokens = REAL.encode(&text, false).unwrap();
        prop_assert_eq!(REAL.decode(&tokens, false), encodable(&text));
    }

    /// Single-byte tokens stress invalid UTF-8 much harder than whole words do.
    #[test]
    fn single_bytes_become_the_text_that_they_are(raw in proptest::collection::vec(any::<u8>(), 0..40)) {
        let tiny = load(&TinyModel::default().build()).unwrap();
        let tokens: Vec<TokenId> = raw.iter().map(|&byte| TokenId(3 + u32::from(byte))).collect();
        prop_assert_eq!(tiny.decode(&tokens, true), String::from_utf8_lossy(&raw));
    }
}

#[test]
fn the_begin_token_is_added_only_when_asked_for_by_both() {
    let plain = load(&TinyModel::default().build()).unwrap();
    let adding = tiny("tokenizer.ggml.add_bos_token", MetadataValue::Bool(true)).unwrap();
    let encode = |tokenizer: &Tokenizer, add_special| tokenizer.encode("a", add_special).unwrap().len();
    assert_eq!(
        (encode(&plain, true), encode(&adding, false), encode(&adding, true)),
        (1, 1, 2)
    );
    assert_eq!(adding.encode("a", true).unwrap()[0], TokenId(1));
    assert_ne!(plain.content_hash(), adding.content_hash());
    assert_eq!(
        plain.content_hash(),
        load(&TinyModel::default().build()).unwrap().content_hash()
    );
}

#[test]
fn user_defined_tokens_are_whole_and_shown() {
    let tokenizer = load(
        &GgufBuilder::new()
            .metadata("tokenizer.ggml.model", MetadataValue::String("gpt2".into()))
            .metadata("tokenizer.ggml.pre", MetadataValue::String("gpt-2".into()))
            .metadata("tokenizer.ggml.tokens", strings(&["a", "b", "ab", "a b", "<x>"]))
            .metadata(
                "tokenizer.ggml.token_type",
                MetadataValue::Array([1, 1, 1, 4, 3].map(MetadataValue::I32).to_vec()),
            )
            .metadata("tokenizer.ggml.merges", strings(&["a b"])),
    )
    .unwrap();
    let tokens = tokenizer.encode("aba b<x>", true).unwrap();
    assert_eq!(tokens, [2, 3, 4].map(TokenId));
    assert_eq!(tokenizer.decode(&tokens, true), "aba b");
    assert!(tokenizer.end_tokens().is_empty() && tokenizer.special.begin.is_none());
}

#[test]
fn damaged_tokenizers_are_refused_by_name() {
    let text = |text: &str| MetadataValue::String(text.to_owned());
    let refuse = |key, value| tiny(key, value).expect_err("must be refused");
    assert!(matches!(
        refuse("tokenizer.ggml.model", text("t5")),
        TokenizerError::UnsupportedModel { .. }
    ));
    assert!(matches!(
        refuse("tokenizer.ggml.pre", text("default")),
        TokenizerError::UnsupportedPreTokenizer { .. }
    ));
    assert!(matches!(
        refuse("tokenizer.ggml.tokens", strings(&[])),
        TokenizerError::VocabularySize { found: 0, .. }
    ));
    assert!(matches!(
        refuse("tokenizer.ggml.tokens", strings(&["a"])),
        TokenizerError::TokenTypeCount { .. }
    ));
    let types = MetadataValue::Array(vec![MetadataValue::I32(9); 259]);
    assert!(matches!(
        refuse("tokenizer.ggml.token_type", types),
        TokenizerError::UnknownTokenType { id: 0, number: 9 }
    ));
    let same = MetadataValue::Array(vec![text("a"); 259]);
    assert!(matches!(
        refuse("tokenizer.ggml.tokens", same),
        TokenizerError::DuplicateToken { id: 1, .. }
    ));
    for merge in ["ab", "a", "a b", " a", "a zz", " "] {
        let error = refuse("tokenizer.ggml.merges", strings(&[merge]));
        assert!(
            matches!(&error, TokenizerError::BadMerge { rank: 0, .. }),
            "{merge:?}: {error}"
        );
    }
    for key in ["tokenizer.ggml.eos_token_id", "tokenizer.ggml.bos_token_id"] {
        let error = refuse(key, MetadataValue::U32(259));
        assert!(matches!(&error, TokenizerError::SpecialIdOutsideVocabulary { key: found, .. } if *found == key));
    }
    let add_eos = refuse("tokenizer.ggml.add_eos_token", MetadataValue::Bool(true));
    assert!(matches!(add_eos, TokenizerError::UnsupportedSetting { .. }));
    let missing = load(&TinyModel::default().build().without_metadata("tokenizer.ggml.merges"));
    assert!(matches!(missing, Err(TokenizerError::Gguf(_))));
}

/// Runs of what words are made of, and what stands between them: contractions, control tokens whole and broken, other scripts.
fn fragment() -> impl Strategy<Value = String> {
    let fixed = [
        " ",
        "  ",
        "\n",
        "\t \n",
        "'s",
        "'ll",
        "'",
        "''",
        "1",
        "2025",
        "<|im_start|>",
        "<|im_sta",
        "rt|>",
        "|",
        "<",
        "é",
        "ß",
        "日本",
        "語。",
        "\u{a0}",
        "\u{2003}",
        "\u{301}",
        "_",
        "...",
        "!?",
        "\u{0}",
        "\r",
    ];
    prop_oneof![
        3 => prop::sample::select(fixed.to_vec()).prop_map(str::to_owned),
        2 => "[a-zA-Z]{1,9}",
        1 => "[0-9]{1,9}",
        1 => ".{1,4}",
    ]
}

#[test]
fn a_text_of_too_many_tokens_is_given_up_early() {
    let digits = "7".repeat(4 << 20);
    let refused = REAL.encode_at_most(&digits, false, 2_048);
    assert!(matches!(refused, Err(TokenizerError::TooManyTokens { max: 2_048 })));
    assert_eq!(
        REAL.encode_at_most(&digits[..2_048], false, 2_048).unwrap().len(),
        2_048
    );
}
