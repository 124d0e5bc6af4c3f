//! Tokenizers: any files make one that works or are refused, and any text becomes tokens and the same text again.

use std::io::Read as _;
use std::path::Path;

use flate2::read::GzDecoder;
use model_files::tokenizer::{RoleMarks, Tokenizer};
use serving_core::ids::TokenId;

use crate::choices::Choices;
use crate::folder::Folder;

const NAMES: [&str; 3] = ["tokenizer.json", "tokenizer_config.json", "generation_config.json"];
const TEXT: &str = "Hello wörld 2026 <s>\n\n\t{}▁ 日本 🦀<|end|> don't";
/// The last planes of Unicode are for private use. A text that has them all is not tried.
const MARKS: std::ops::RangeInclusive<char> = '\u{10ff00}'..='\u{10fffd}';

thread_local! {
    static FOLDER: Folder = Folder::new();
    static TOKENIZERS: Vec<(&'static str, Tokenizer, RoleMarks)> = tokenizers();
}

/// The files of a folder, with a zero byte between them.
pub(crate) fn files(data: &[u8]) {
    FOLDER.with(|folder| {
        let mut parts = data.splitn(NAMES.len(), |byte| *byte == 0);
        for name in NAMES {
            match parts.next() {
                Some(content) => drop(folder.write(name, content)),
                None => folder.remove(name),
            }
        }
        let Ok(tokenizer) = Tokenizer::from_folder(folder.path()) else {
            return;
        };
        let tokens = tokenizer.encode(TEXT, true).unwrap_or_default();
        let _ = tokenizer.decode(&tokens, false);
        let is_known = |token: &TokenId| tokenizer.token_bytes(*token).is_some();
        assert!(tokens.iter().all(is_known) && tokenizer.end_tokens().iter().all(is_known));
        assert!(tokenizer.begin_token().is_none_or(|token| is_known(&token)));
    });
}

/// Of each kind one, from the files with which the tokenizers are compared with other libraries.
fn tokenizers() -> Vec<(&'static str, Tokenizer, RoleMarks)> {
    let files = Path::new(env!("CARGO_MANIFEST_DIR")).join("../integration-tests/data/tokenizers");
    let open = |name: &'static str| {
        let packed = std::fs::File::open(files.join(format!("{name}.json.gz"))).expect("a file of the repository");
        let mut content = Vec::new();
        GzDecoder::new(packed).read_to_end(&mut content).expect("it is whole");
        let folder = Folder::new();
        folder.write(NAMES[0], &content);
        let tokenizer = Tokenizer::from_folder(folder.path()).unwrap_or_else(|error| panic!("{name}: {error}"));
        let marks = tokenizer
            .role_marks(&|_| true)
            .expect("of tokens that were found before");
        (name, tokenizer, marks)
    };
    [
        "gpt-2",
        "llama-bpe",
        "tekken",
        "qwen2",
        "metaspace-prepend",
        "metaspace-split",
    ]
    .map(open)
    .into()
}

/// The first byte says which tokenizer, the second one how many tokens are wanted at most.
pub(crate) fn text(data: &[u8]) {
    let mut choices = Choices::of(data);
    let (which, tokens_max) = (choices.below(256), choices.below(256));
    let Ok(text) = std::str::from_utf8(choices.rest()) else {
        return;
    };
    TOKENIZERS.with(|tokenizers| {
        let (name, tokenizer, marks) = &tokenizers[which % tokenizers.len()];
        let tokens = tokenizer.encode(text, false).expect("a short text");
        let again = tokenizer.decode(&tokens, false);
        // qwen2 composes characters, and SentencePiece's space in front is part of the text's tokens.
        if ["gpt-2", "llama-bpe", "tekken"].contains(name) {
            assert_eq!(again, text, "{name}");
        }
        match tokenizer.encode_at_most(text, false, tokens_max) {
            Ok(few) => assert_eq!(few, tokens),
            Err(_) => assert!(tokens.len() > tokens_max, "{} tokens", tokens.len()),
        }
        check_hidden((tokenizer, marks), text);
    });
}

/// Hidden control tokens are in the text, and no longer among its tokens.
fn check_hidden((tokenizer, marks): (&Tokenizer, &RoleMarks), text: &str) {
    let Some(mark) = MARKS.into_iter().find(|mark| !text.contains(*mark)) else {
        return;
    };
    let hidden = tokenizer.hide_control(text, mark, Some(marks));
    let shown = hidden.as_deref().unwrap_or(text);
    assert_eq!(shown.replace(mark, ""), text, "hiding changes nothing but the marks");
    if let Ok(tokens) = tokenizer.encode_hidden(shown, mark, (false, usize::MAX)) {
        // What is not in the vocabulary becomes this token, which controls nothing.
        let is_control =
            |token: &TokenId| tokenizer.is_special(*token) && tokenizer.token_bytes(*token) != Some(b"<unk>");
        assert_eq!(
            tokens.into_iter().find(is_control),
            None,
            "a control token came out of hidden text"
        );
    }
}
