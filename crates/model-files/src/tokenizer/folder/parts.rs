//! The parts of a tokenizer.json: normalizer, pre-tokenizer, decoder and post-processor. Others than these few are refused
//! by name, because ids that differ a little from the model's own are worse than none.

use serde_json::Value;
use serving_core::ids::TokenId;

use super::super::cuts::SPACE_MARK;
use super::super::encoder::{Metaspace, Prepend};
use super::super::error::TokenizerError;
use super::super::normalizer::{Step, UnicodeForm};
use super::super::words::{Behavior, GPT2, Split};

const NORMALIZERS: &str = "NFC, NFD, NFKC, NFKD, Prepend, Replace (of a string) and Sequence";
const PRE_TOKENIZERS: &str = "Split, Digits, ByteLevel as the last step, Metaspace as the only step, and Sequence";
const DECODERS: &str = "ByteLevel, Metaspace, and a Sequence of Replace, ByteFallback, Fuse and Strip";
const POST_PROCESSORS: &str = "ByteLevel, TemplateProcessing with at most one token in front, and Sequence";

/// What a pre-tokenizer does.
#[derive(Debug, Default)]
pub(super) struct PreTokenizer {
    pub(super) words: Vec<Split>,
    /// Words are written as GPT-2's characters.
    pub(super) is_byte_level: bool,
    pub(super) metaspace: Option<Metaspace>,
}

fn refused(part: &'static str, found: &Value, known: &'static str) -> TokenizerError {
    let found: String = found["type"]
        .as_str()
        .map_or_else(|| found.to_string(), str::to_owned)
        .chars()
        .take(100)
        .collect();
    TokenizerError::UnsupportedPart { part, found, known }
}

/// The members of a `Sequence`, also of one within another; a part that is none is its only member.
fn flat<'a>(part: &'a Value, members: &str) -> Vec<&'a Value> {
    match part {
        Value::Null => Vec::new(),
        _ if part["type"] == "Sequence" => {
            let list = part[members].as_array().map(Vec::as_slice).unwrap_or_default();
            list.iter().flat_map(|member| flat(member, members)).collect()
        }
        _ => vec![part],
    }
}

pub(super) fn normalizer(part: &Value) -> Result<Vec<Step>, TokenizerError> {
    let step = |step: &Value| {
        let text = |value: &Value| value.as_str().map(str::to_owned);
        let found = match step["type"].as_str() {
            Some("NFC") => Some(Step::Unicode(UnicodeForm::Nfc)),
            Some("NFD") => Some(Step::Unicode(UnicodeForm::Nfd)),
            Some("NFKC") => Some(Step::Unicode(UnicodeForm::Nfkc)),
            Some("NFKD") => Some(Step::Unicode(UnicodeForm::Nfkd)),
            Some("Prepend") => text(&step["prepend"]).map(Step::Prepend),
            Some("Replace") => text(&step["pattern"]["String"])
                .filter(|from| !from.is_empty())
                .zip(text(&step["content"]))
                .map(|(from, to)| Step::Replace { from, to }),
            _ => None,
        };
        found.ok_or_else(|| refused("normalizer", step, NORMALIZERS))
    };
    flat(part, "normalizers").into_iter().map(step).collect()
}

/// `normalizer`: what was done to the text before. A separator that it has replaced separates nothing.
pub(super) fn pre_tokenizer(part: &Value, normalizer: &[Step]) -> Result<PreTokenizer, TokenizerError> {
    let mut done = PreTokenizer::default();
    let steps = flat(part, "pretokenizers");
    let is_gone = |literal: &str| {
        let replaces =
            |step: &Step| matches!(step, Step::Replace { from, to } if literal.contains(from) && !to.contains(from));
        normalizer.last().is_some_and(replaces)
    };
    for (index, step) in steps.iter().enumerate() {
        let unknown = || refused("pre_tokenizer", step, PRE_TOKENIZERS);
        let is_last = index + 1 == steps.len();
        match step["type"].as_str() {
            Some("Split") => {
                let behavior = behavior(&step["behavior"]).ok_or_else(unknown)?;
                let is_inverted = step["invert"].as_bool().unwrap_or(false);
                match (step["pattern"]["Regex"].as_str(), step["pattern"]["String"].as_str()) {
                    (Some(pattern), _) => done.words.push(Split::pattern(pattern, behavior, is_inverted)?),
                    (None, Some(literal)) if is_gone(literal) && !is_inverted => {}
                    (None, Some(literal)) if !literal.is_empty() => {
                        done.words.push(Split::literal(literal, behavior, is_inverted));
                    }
                    (None, _) => return Err(unknown()),
                }
            }
            Some("Digits") => {
                let individually = step["individual_digits"].as_bool().unwrap_or(false);
                done.words.push(Split::digits(individually));
            }
            Some("ByteLevel") if is_last => {
                if step["add_prefix_space"].as_bool() != Some(false) {
                    return Err(TokenizerError::UnsupportedSetting {
                        key: "pre_tokenizer.add_prefix_space",
                    });
                }
                if step["use_regex"].as_bool().unwrap_or(true) {
                    done.words.push(Split::pattern(GPT2, Behavior::Isolated, false)?);
                }
                done.is_byte_level = true;
            }
            Some("Metaspace") if steps.len() == 1 => done.metaspace = Some(metaspace(step).ok_or_else(unknown)?),
            _ => return Err(unknown()),
        }
    }
    Ok(done)
}

fn behavior(value: &Value) -> Option<Behavior> {
    Some(match value.as_str()? {
        "Isolated" => Behavior::Isolated,
        "Removed" => Behavior::Removed,
        "Contiguous" => Behavior::Contiguous,
        "MergedWithPrevious" => Behavior::MergedWithPrevious,
        "MergedWithNext" => Behavior::MergedWithNext,
        _ => return None,
    })
}

fn metaspace(step: &Value) -> Option<Metaspace> {
    let is_mark = |value: &Value| value.as_str().is_some_and(|text| text.chars().eq([SPACE_MARK]));
    let prepend = match (step["prepend_scheme"].as_str(), step["add_prefix_space"].as_bool()) {
        (Some("never"), _) | (None, Some(false)) => Prepend::Never,
        (Some("first"), _) => Prepend::First,
        (Some("always"), _) | (None, _) => Prepend::Always,
        (Some(_), _) => return None,
    };
    is_mark(&step["replacement"]).then_some(Metaspace {
        prepend,
        is_split: step["split"].as_bool().unwrap_or(true),
    })
}

/// A decoder must undo what the pre-tokenizer did, because the bytes of each token are taken from its text by that rule.
pub(super) fn check_decoder(decoder: &Value, pre_tokenizer: &PreTokenizer) -> Result<(), TokenizerError> {
    for step in flat(decoder, "decoders") {
        let is_byte_level = match step["type"].as_str() {
            Some("ByteLevel") => true,
            Some("Metaspace" | "Replace" | "ByteFallback" | "Fuse" | "Strip") => false,
            _ => return Err(refused("decoder", step, DECODERS)),
        };
        if is_byte_level != pre_tokenizer.is_byte_level {
            return Err(refused("decoder", step, DECODERS));
        }
    }
    Ok(())
}

/// The token that a post-processor puts in front of a single text.
pub(super) fn begin_token(part: &Value) -> Result<Option<TokenId>, TokenizerError> {
    let mut begin = None;
    for step in flat(part, "processors") {
        let unknown = || refused("post_processor", step, POST_PROCESSORS);
        match step["type"].as_str() {
            Some("ByteLevel") => {}
            Some("TemplateProcessing") => {
                let single = step["single"].as_array().ok_or_else(unknown)?;
                let name = match single.as_slice() {
                    [sequence] if sequence["Sequence"].is_object() => continue,
                    [special, sequence] if sequence["Sequence"].is_object() => special["SpecialToken"]["id"].as_str(),
                    _ => None,
                };
                let ids = name.and_then(|name| step["special_tokens"].get(name)?["ids"].as_array());
                let id = match ids.map(Vec::as_slice) {
                    Some([id]) => id.as_u64().and_then(|id| u32::try_from(id).ok()),
                    _ => None,
                };
                begin = Some(TokenId(id.ok_or_else(unknown)?));
            }
            _ => return Err(unknown()),
        }
    }
    Ok(begin)
}
