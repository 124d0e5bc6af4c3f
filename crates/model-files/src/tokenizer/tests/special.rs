//! Begin and end tokens of each kind of file, and the bytes of SentencePiece's tokens.

use serde_json::json;

use super::families::{from_folder, gguf_of_byte_level, gguf_of_sentencepiece, json_of};
use super::load;
use crate::gguf::MetadataValue;
use crate::test_kit::GgufBuilder;
use crate::tokenizer::Tokenizer;
use serving_core::ids::TokenId;

fn end_texts(tokenizer: &Tokenizer) -> Vec<String> {
    let text = |id: &TokenId| String::from_utf8(tokenizer.token_bytes(*id).unwrap().to_vec()).unwrap();
    tokenizer.end_tokens().iter().map(text).collect()
}

/// What is put in front of "a" on request.
fn begin_text(tokenizer: &Tokenizer) -> Option<String> {
    let (plain, with_begin) = (
        tokenizer.encode("a", false).unwrap(),
        tokenizer.encode("a", true).unwrap(),
    );
    let (begin, rest) = with_begin.split_at(with_begin.len() - plain.len());
    assert_eq!(rest, plain);
    let begin = begin.first()?;
    Some(String::from_utf8(tokenizer.token_bytes(*begin).unwrap().to_vec()).unwrap())
}

#[test]
fn files_that_do_not_say_so_add_the_begin_token_as_their_kind_does() {
    let spm = || gguf_of_sentencepiece("sentencepiece-llama");
    let key = "tokenizer.ggml.add_bos_token";
    assert_eq!(begin_text(&load(&spm()).unwrap()).as_deref(), Some("<s>"));
    let without = spm().metadata(key, MetadataValue::Bool(false));
    assert_eq!(begin_text(&load(&without).unwrap()), None);
    for (name, adds) in [
        ("llama-bpe", true),
        ("tekken", true),
        ("qwen2", false),
        ("gpt-2", false),
        ("smollm", false),
    ] {
        let tokenizer = load(&gguf_of_byte_level(name, &json_of(name))).unwrap();
        assert_eq!(begin_text(&tokenizer).is_some(), adds, "{name}");
    }
    // The template of a tokenizer.json says it.
    assert_eq!(
        begin_text(&from_folder("llama-bpe")).as_deref(),
        Some("<|begin_of_text|>")
    );
    assert_eq!(begin_text(&from_folder("qwen2")), None);
}

#[test]
fn all_end_tokens_of_a_family_are_found_in_its_vocabulary() {
    for (name, expected) in [
        ("llama-bpe", &["<|end_of_text|>", "<|eom_id|>", "<|eot_id|>"][..]),
        ("qwen2", &["<|endoftext|>", "<|im_end|>"]),
        ("tekken", &["</s>"]),
        ("gpt-4o", &["<|endoftext|>", "<|end|>"]),
        ("deepseek-v3", &["<｜end▁of▁sentence｜>"]),
    ] {
        let expected: Vec<_> = expected.iter().map(|text| (*text).to_owned()).collect();
        assert_eq!(
            end_texts(&load(&gguf_of_byte_level(name, &json_of(name))).unwrap()),
            expected,
            "{name}"
        );
        assert_eq!(end_texts(&from_folder(name)), expected, "{name}");
    }
    let gemma = load(&gguf_of_sentencepiece("sentencepiece-gemma")).unwrap();
    assert_eq!(end_texts(&gemma), ["</s>", "<end_of_turn>"]);
}

/// A file whose control tokens a converter has taken for words.
fn with_words_for_control(file: GgufBuilder) -> GgufBuilder {
    let key = "tokenizer.ggml.token_type";
    let (_, kinds) = file.metadata.iter().find(|(name, _)| name == key).unwrap().clone();
    let MetadataValue::Array(kinds) = kinds else {
        unreachable!()
    };
    let user_defined = |kind| match kind {
        MetadataValue::I32(3) => MetadataValue::I32(4),
        other => other,
    };
    let kinds = MetadataValue::Array(kinds.into_iter().map(user_defined).collect());
    file.metadata(key, kinds)
        .without_metadata("tokenizer.ggml.eos_token_id")
}

#[test]
fn an_end_of_turn_that_a_converter_took_for_a_word_still_ends_the_turn() {
    let file = with_words_for_control(gguf_of_sentencepiece("sentencepiece-gemma"));
    assert_eq!(end_texts(&load(&file).unwrap()), ["<end_of_turn>"]);
}

#[test]
fn a_folder_names_one_end_token_or_several() {
    let folder = tempfile::tempdir().unwrap();
    let write = |name: &str, content: serde_json::Value| {
        std::fs::write(folder.path().join(name), content.to_string()).unwrap();
    };
    let open = || Tokenizer::from_folder(folder.path()).unwrap();
    write("tokenizer.json", json_of("gpt-2"));
    let named = end_texts(&open());
    assert_eq!(named, ["<|endoftext|>"]);
    let plain_hash = open().content_hash();
    write("config.json", json!({"eos_token_id": 7, "hidden_size": 64}));
    assert_eq!(open().end_tokens().len(), 2);
    assert_ne!(open().content_hash(), plain_hash);
    write("generation_config.json", json!({"eos_token_id": [8, 9, 8]}));
    let ids: Vec<_> = open().end_tokens()[..2].iter().map(|id| id.0).collect();
    assert_eq!(ids, [8, 9]);
    write(
        "tokenizer_config.json",
        json!({"eos_token": {"content": "!"}, "bos_token": "<|endoftext|>", "add_bos_token": true}),
    );
    assert_eq!(open().end_tokens().len(), 4);
    assert_eq!(begin_text(&open()).as_deref(), Some("<|endoftext|>"));
}

#[test]
fn the_bytes_of_marked_tokens_join_to_the_text() {
    for tokenizer in [
        load(&gguf_of_sentencepiece("sentencepiece-llama")).unwrap(),
        from_folder("metaspace-prepend"),
    ] {
        let text = "the sun\n\t𝄞 is <s> 100% ▁ \u{0}";
        let tokens = tokenizer.encode(text, false).unwrap();
        // The space in front is the one that SentencePiece adds, once more behind the control token. A written mark is a space.
        let decoded = " the sun\n\t𝄞 is <s>  100%   \u{0}";
        assert_eq!(tokenizer.decode(&tokens, false), decoded);
        let bytes = tokens.iter().flat_map(|token| tokenizer.token_bytes(*token).unwrap());
        assert_eq!(String::from_utf8(bytes.copied().collect()).unwrap(), decoded);
        let newline = tokenizer.encode("\n", false).unwrap();
        assert_eq!(tokenizer.token_bytes(*newline.last().unwrap()), Some(&b"\n"[..]));
        assert_eq!(tokenizer.decode(&tokens, true), decoded.replace("<s>", ""));
    }
}

#[test]
fn control_tokens_of_phi_3_take_the_white_space_behind_them() {
    let file = gguf_of_sentencepiece("sentencepiece-llama");
    let phi = file
        .clone()
        .metadata("general.architecture", MetadataValue::String("phi3".into()));
    let count = |file| load(file).unwrap().encode("</s>   \n</s>", false).unwrap().len();
    assert_eq!(count(&phi), 2);
    assert!(count(&file) > 2);
}

/// Of each kind of merger: what is hidden is encoded as other text is, byte for byte, and gives no token that may control a model.
#[test]
fn a_hidden_token_is_plain_text_in_each_kind_of_vocabulary() {
    let tokenizers = [
        load(&gguf_of_sentencepiece("sentencepiece-llama")).unwrap(),
        load(&with_words_for_control(gguf_of_sentencepiece("sentencepiece-gemma"))).unwrap(),
        from_folder("llama-bpe"),
        from_folder("qwen2"),
    ];
    let mut seen = 0;
    for tokenizer in &tokenizers {
        let marks = tokenizer.role_marks(&|_| true).unwrap();
        let whole = |id: &TokenId| tokenizer.tokens.kinds[id.0 as usize].is_parsed_whole();
        let ids = (0..tokenizer.vocab_size()).map(|id| TokenId(u32::try_from(id).unwrap()));
        for id in ids.filter(|id| whole(id)) {
            let token = String::from_utf8(tokenizer.token_bytes(id).unwrap().to_vec()).unwrap();
            if token.chars().count() < 2 || token.trim().is_empty() {
                continue;
            }
            let text = format!("Hi {token}you");
            let hidden = tokenizer.hide_control(&text, '\u{10FF00}', Some(&marks)).unwrap();
            let tokens = tokenizer
                .encode_hidden(&hidden, '\u{10FF00}', (false, usize::MAX))
                .unwrap();
            assert!(!tokens.contains(&id), "{token} in {tokens:?}");
            assert_eq!(tokenizer.decode(&tokens, false).trim_start(), text, "{token}");
            let plain = tokenizer.encode("Hi you", false).unwrap();
            let unmarked = tokenizer
                .encode_hidden("Hi you", '\u{10FF00}', (false, usize::MAX))
                .unwrap();
            assert_eq!(unmarked, plain, "a text without marks is encoded as ever");
            seen += 1;
        }
    }
    assert!(seen > 10, "only {seen} tokens");
}
