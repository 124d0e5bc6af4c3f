//! Each family of tokenizers against the ids that its reference library gives for 2,000 strings.
//! integration-tests/python/make_tokenizers.py made them.

use std::io::Read;
use std::path::Path;

use proptest::prelude::*;
use serde_json::Value;

use super::{load, strings};
use crate::gguf::MetadataValue;
use crate::test_kit::{GgufBuilder, golden_folder, model_path};
use crate::tokenizer::Tokenizer;
use serving_core::ids::TokenId;

const BYTE_LEVEL: [&str; 8] = [
    "llama-bpe",
    "qwen2",
    "gpt-2",
    "smollm",
    "tekken",
    "gpt-4o",
    "deepseek-v3",
    "deepseek-coder",
];
const SENTENCEPIECE: [&str; 4] = [
    "sentencepiece-llama",
    "sentencepiece-gemma",
    "sentencepiece-unknown",
    "sentencepiece-unused",
];
const METASPACE: [&str; 4] = [
    "metaspace-prepend",
    "metaspace-first",
    "metaspace-split",
    "metaspace-gemma",
];

fn unpacked(name: &str) -> String {
    let path = golden_folder().join("../tokenizers").join(name);
    let file = std::fs::File::open(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    let mut text = String::new();
    flate2::read::GzDecoder::new(file).read_to_string(&mut text).unwrap();
    text
}

pub(super) fn json_of(name: &str) -> Value {
    serde_json::from_str(&unpacked(&format!("{name}.json.gz"))).unwrap()
}

fn numbers(kinds: impl IntoIterator<Item = i32>) -> MetadataValue {
    MetadataValue::Array(kinds.into_iter().map(MetadataValue::I32).collect())
}

/// The GGUF file that a converter makes of a byte-level tokenizer.json.
pub(super) fn gguf_of_byte_level(name: &str, file: &Value) -> GgufBuilder {
    let mut tokens: Vec<(u64, &str, i32)> = file["model"]["vocab"]
        .as_object()
        .unwrap()
        .iter()
        .map(|(text, id)| (id.as_u64().unwrap(), text.as_str(), 1))
        .collect();
    for added in file["added_tokens"].as_array().unwrap() {
        tokens.push((added["id"].as_u64().unwrap(), added["content"].as_str().unwrap(), 3));
    }
    tokens.sort_unstable();
    assert!(tokens.iter().enumerate().all(|(index, (id, _, _))| index as u64 == *id));
    let texts: Vec<_> = tokens.iter().map(|(_, text, _)| *text).collect();
    let merges: Vec<String> = file["model"]["merges"]
        .as_array()
        .unwrap()
        .iter()
        .map(|merge| [merge[0].as_str().unwrap(), merge[1].as_str().unwrap()].join(" "))
        .collect();
    let merges: Vec<_> = merges.iter().map(String::as_str).collect();
    GgufBuilder::new()
        .metadata("tokenizer.ggml.model", MetadataValue::String("gpt2".into()))
        .metadata("tokenizer.ggml.pre", MetadataValue::String(name.into()))
        .metadata("tokenizer.ggml.tokens", strings(&texts))
        .metadata("tokenizer.ggml.token_type", numbers(tokens.iter().map(|token| token.2)))
        .metadata("tokenizer.ggml.merges", strings(&merges))
        .metadata(
            "tokenizer.ggml.bos_token_id",
            MetadataValue::U32(tokens.len() as u32 - 1),
        )
}

/// The GGUF file that a converter makes of a SentencePiece model.
pub(super) fn gguf_of_sentencepiece(name: &str) -> GgufBuilder {
    let pieces = json_of(name);
    let pieces = pieces.as_array().unwrap();
    let texts: Vec<_> = pieces.iter().map(|piece| piece[0].as_str().unwrap()).collect();
    let scores = pieces
        .iter()
        .map(|piece| MetadataValue::F32(piece[1].as_f64().unwrap() as f32));
    let kinds = pieces.iter().map(|piece| piece[2].as_i64().unwrap() as i32);
    let id = |text| texts.iter().position(|known| *known == text).map(|id| id as u32);
    GgufBuilder::new()
        .metadata("tokenizer.ggml.model", MetadataValue::String("llama".into()))
        .metadata("tokenizer.ggml.tokens", strings(&texts))
        .metadata("tokenizer.ggml.scores", MetadataValue::Array(scores.collect()))
        .metadata("tokenizer.ggml.token_type", numbers(kinds))
        .metadata("tokenizer.ggml.bos_token_id", MetadataValue::U32(id("<s>").unwrap()))
        .metadata("tokenizer.ggml.eos_token_id", MetadataValue::U32(id("</s>").unwrap()))
        .metadata(
            "tokenizer.ggml.add_space_prefix",
            MetadataValue::Bool(!name.ends_with("gemma")),
        )
}

pub(super) fn from_folder(name: &str) -> Tokenizer {
    let folder = tempfile::tempdir().unwrap();
    let content = unpacked(&format!("{name}.json.gz"));
    std::fs::write(folder.path().join("tokenizer.json"), content).unwrap();
    Tokenizer::from_folder(folder.path()).unwrap()
}

fn check(tokenizer: &Tokenizer, ids: &str) {
    let texts: Vec<String> = serde_json::from_str(&unpacked("strings.json.gz")).unwrap();
    let expected = unpacked(&format!("{ids}.ids.gz"));
    assert_eq!((texts.len(), expected.lines().count()), (2_000, 2_000));
    let is_equal = |(text, line): &(&String, &str)| {
        let expected: Vec<TokenId> = line.split_whitespace().map(|id| TokenId(id.parse().unwrap())).collect();
        let found = tokenizer.encode(text, false).unwrap();
        if found != expected {
            eprintln!("{ids}: {text:?}\n    gives {found:?}\n    not   {expected:?}");
        }
        found == expected
    };
    let equal = texts.iter().zip(expected.lines()).filter(is_equal).count();
    assert_eq!(equal, 2_000, "strings of {ids} with equal ids");
}

#[test]
fn byte_level_gguf_files_give_the_ids_of_the_reference() {
    for name in BYTE_LEVEL {
        check(&load(&gguf_of_byte_level(name, &json_of(name))).unwrap(), name);
    }
}

#[test]
fn byte_level_folders_give_the_ids_of_the_reference() {
    for name in BYTE_LEVEL {
        check(&from_folder(name), name);
    }
}

#[test]
fn sentencepiece_gguf_files_give_the_ids_of_the_reference() {
    for name in SENTENCEPIECE {
        check(&load(&gguf_of_sentencepiece(name)).unwrap(), name);
    }
}

#[test]
fn metaspace_folders_give_the_ids_of_the_reference() {
    for name in METASPACE {
        check(&from_folder(name), name);
    }
}

#[test]
fn an_added_token_of_spaces_says_spaces() {
    let file = json_of("metaspace-gemma");
    let added = file["added_tokens"].as_array().unwrap();
    let two = added
        .iter()
        .find(|added| added["content"] == "\u{2581}\u{2581}")
        .unwrap();
    let id = two["id"].as_u64().unwrap() as usize;
    assert_eq!(two["special"], false);
    assert_eq!(&*from_folder("metaspace-gemma").tokens.bytes[id], b"  ");
}

#[test]
fn the_real_vocabulary_gives_the_ids_of_the_reference() {
    let file = crate::gguf::GgufFile::open(&model_path()).unwrap();
    check(&Tokenizer::from_gguf(&file).unwrap(), "smollm2-real");
}

#[test]
fn an_exported_gguf_file_gives_the_same_ids_as_a_folder() {
    let folder = tempfile::tempdir().unwrap();
    let export = |tokenizer: &Tokenizer, ids: &str| {
        let folder = folder.path().join(ids);
        tokenizer.write_folder(&folder, Some("{{ messages }}")).unwrap();
        let template = std::fs::read_to_string(folder.join("chat_template.jinja")).unwrap();
        assert_eq!(template, "{{ messages }}");
        let read_back = Tokenizer::from_folder(&folder).unwrap();
        check(&read_back, ids);
        assert_eq!(read_back.special, tokenizer.special, "{ids}");
        let bytes = |tokenizer: &Tokenizer| tokenizer.tokens.bytes.clone();
        assert_eq!(bytes(&read_back), bytes(tokenizer), "{ids}");
        // A folder is exported as it is.
        let again = folder.join("again");
        read_back.write_folder(&again, None).unwrap();
        for name in super::super::folder::FILES {
            let read = |folder: &Path| std::fs::read(folder.join(name)).unwrap();
            assert_eq!(read(&folder), read(&again), "{name}");
        }
    };
    for name in BYTE_LEVEL {
        export(&load(&gguf_of_byte_level(name, &json_of(name))).unwrap(), name);
    }
    export(
        &load(&gguf_of_sentencepiece("sentencepiece-llama")).unwrap(),
        "sentencepiece-llama",
    );
}

#[test]
fn pieces_of_a_long_text_have_the_tokens_of_the_whole() {
    let texts: Vec<String> = serde_json::from_str(&unpacked("strings.json.gz")).unwrap();
    let long = texts.concat();
    // An unused token that can come from two pairs is split alike in the whole text: no cut is safe.
    let unused = load(&gguf_of_sentencepiece("sentencepiece-unused")).unwrap();
    assert!(!unused.encoder.is_cut());
    for tokenizer in vocabularies_without_words() {
        assert!(tokenizer.encoder.is_cut());
        let encode = |bytes| tokenizer.encoder.encode_in_pieces_of(&long, bytes).unwrap();
        let whole = encode(usize::MAX);
        assert_eq!(encode(1), whole);
        assert_eq!(encode(1 << 10), whole);
    }
}

fn vocabularies_without_words() -> Vec<Tokenizer> {
    let sentencepiece = SENTENCEPIECE.iter().filter(|name| !name.ends_with("unused"));
    let sentencepiece = sentencepiece.map(|name| load(&gguf_of_sentencepiece(name)).unwrap());
    sentencepiece.chain(METASPACE.map(from_folder)).collect()
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 1_000, ..ProptestConfig::default() })]

    #[test]
    fn pieces_of_any_text_have_the_tokens_of_the_whole(
        fragments in prop::collection::vec(super::fragment(), 0..40),
        piece_bytes in 1_usize..12,
    ) {
        thread_local! {
            static ALL: Vec<Tokenizer> = vocabularies_without_words();
        }
        let text = fragments.concat();
        ALL.with(|all| for tokenizer in all {
            let encode = |bytes| tokenizer.encoder.encode_in_pieces_of(&text, bytes).unwrap();
            assert_eq!(encode(piece_bytes), encode(usize::MAX));
        });
    }
}
