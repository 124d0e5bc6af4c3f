//! The tokenizer that a GGUF file's metadata holds: byte-level BPE, or SentencePiece's BPE.

use std::collections::HashMap;

use sha2::{Digest, Sha256};

use super::added::{AddedToken, AddedTokens};
use super::byte_level;
use super::control::ControlTexts;
use super::encoder::{Encoder, EncoderParts};
use super::error::TokenizerError;
use super::families;
use super::merging::{BpeSettings, Merger, build_bpe};
use super::sentencepiece::{Piece, SentencePiece, byte_of};
use super::special::{SpecialTokens, TokenKind};
use super::{Source, TokenTable, Tokenizer, VOCAB_MAX};
use crate::gguf::{GgufFile, optional};
use serving_core::ids::TokenId;

impl Tokenizer {
    /// Builds the tokenizer from the `tokenizer.ggml.*` metadata.
    ///
    /// # Errors
    /// [`TokenizerError`]: a key is missing or of the wrong type, the tokenizer is of a kind that this build does not know,
    /// or vocabulary, merges, scores and special ids contradict each other.
    pub fn from_gguf(file: &GgufFile) -> Result<Tokenizer, TokenizerError> {
        let model = file.str("tokenizer.ggml.model")?;
        let is_sentencepiece = match model {
            "gpt2" => false,
            "llama" => true,
            other => {
                return Err(TokenizerError::UnsupportedModel {
                    found: other.to_owned(),
                });
            }
        };
        let tokens = file.str_array("tokenizer.ggml.tokens")?;
        if tokens.is_empty() || tokens.len() > VOCAB_MAX {
            return Err(TokenizerError::VocabularySize {
                found: tokens.len(),
                max: VOCAB_MAX,
            });
        }
        let kinds = read_kinds(file, tokens.len())?;
        let special = SpecialTokens::from_gguf(file)?;
        let (encoder, bytes) = if is_sentencepiece {
            (sentencepiece(file, &tokens, &kinds)?, marked_bytes(&tokens, &kinds))
        } else {
            (
                byte_level_bpe(file, &tokens, &kinds)?,
                byte_level_bytes(&tokens, &kinds),
            )
        };
        let tokens_by_id = TokenTable { bytes, kinds };
        Ok(Tokenizer {
            encoder,
            control: ControlTexts::new(&tokens_by_id)?,
            tokens: tokens_by_id,
            special,
            content_hash: content_hash(file, &tokens)?,
            source: Source::Gguf,
        })
    }
}

fn read_kinds(file: &GgufFile, vocab_size: usize) -> Result<Vec<TokenKind>, TokenizerError> {
    let Some(numbers) = optional(file.i32_array("tokenizer.ggml.token_type"))? else {
        return Ok(vec![TokenKind::Normal; vocab_size]);
    };
    if numbers.len() != vocab_size {
        return Err(TokenizerError::TokenTypeCount {
            types: numbers.len(),
            tokens: vocab_size,
        });
    }
    numbers
        .into_iter()
        .enumerate()
        .map(|(id, number)| TokenKind::from_number(number).ok_or(TokenizerError::UnknownTokenType { id, number }))
        .collect()
}

fn byte_level_bpe(file: &GgufFile, tokens: &[&str], kinds: &[TokenKind]) -> Result<Encoder, TokenizerError> {
    let name = file.str("tokenizer.ggml.pre")?;
    let family = families::find(name).ok_or_else(|| TokenizerError::UnsupportedPreTokenizer {
        found: name.to_owned(),
        known: families::names(),
    })?;
    let merges = file.str_array("tokenizer.ggml.merges")?;
    let ids = ids_of(tokens)?;
    let settings = BpeSettings {
        ignore_merges: family.ignores_merges,
        ..BpeSettings::default()
    };
    let bpe = build_bpe(&ids, merges.iter().map(|merge| merge.split_once(' ')), &settings)?;
    let is_added = |kind: TokenKind| kind.is_parsed_whole();
    Ok(Encoder::new(EncoderParts {
        added: AddedTokens::new(added(tokens, kinds, is_added))?,
        normalizer: family.normalizer(),
        added_normalized: AddedTokens::new([])?,
        metaspace: None,
        words: family.words()?,
        merger: Merger::bytes(bpe),
    }))
}

fn sentencepiece(file: &GgufFile, tokens: &[&str], kinds: &[TokenKind]) -> Result<Encoder, TokenizerError> {
    refuse_unknown_settings(file)?;
    ids_of(tokens)?;
    let scores = file.f32_array("tokenizer.ggml.scores")?;
    if scores.len() != tokens.len() {
        return Err(TokenizerError::TokenTypeCount {
            types: scores.len(),
            tokens: tokens.len(),
        });
    }
    let pieces: Vec<_> = tokens
        .iter()
        .zip(kinds)
        .zip(scores)
        .map(|((&text, &kind), score)| Piece { text, score, kind })
        .collect();
    let unknown = match optional(file.u32("tokenizer.ggml.unknown_token_id"))? {
        Some(id) if id as usize >= tokens.len() => {
            return Err(TokenizerError::SpecialIdOutsideVocabulary {
                key: "tokenizer.ggml.unknown_token_id",
                id: id.into(),
                vocab_size: tokens.len(),
            });
        }
        Some(id) => Some(id as usize),
        None => kinds.iter().position(|kind| *kind == TokenKind::Unknown),
    };
    let unknown = unknown.map(|id| TokenId(id as u32));
    let adds_space = optional(file.bool("tokenizer.ggml.add_space_prefix"))?.unwrap_or(true);
    // SentencePiece finds user-defined tokens itself, inside the text.
    let is_added = |kind: TokenKind| matches!(kind, TokenKind::Control | TokenKind::Unknown);
    let mut control: Vec<_> = added(tokens, kinds, is_added).collect();
    if strips_behind_control(file)? {
        for token in &mut control {
            token.strips_right = !matches!(&*token.text, "<unk>" | "<s>" | "<|endoftext|>");
        }
    }
    Ok(Encoder::new(EncoderParts {
        added: AddedTokens::new(control)?,
        normalizer: Vec::new(),
        added_normalized: AddedTokens::new([])?,
        metaspace: None,
        words: Vec::new(),
        merger: Merger::Scores(SentencePiece::new(&pieces, unknown, adds_space)?),
    }))
}

/// Settings of SentencePiece that change the text and that no known model of this kind uses.
fn refuse_unknown_settings(file: &GgufFile) -> Result<(), TokenizerError> {
    for (key, usual) in [
        ("tokenizer.ggml.remove_extra_whitespaces", false),
        ("tokenizer.ggml.escape_whitespaces", true),
    ] {
        if optional(file.bool(key))?.is_some_and(|value| value != usual) {
            return Err(TokenizerError::UnsupportedSetting { key });
        }
    }
    let charsmap = "tokenizer.ggml.precompiled_charsmap";
    if file.metadata(charsmap).is_some() {
        return Err(TokenizerError::UnsupportedSetting { key: charsmap });
    }
    Ok(())
}

/// Phi-3's control tokens take the white space behind them. GGUF files do not say so (llama.cpp goes by the name, too).
fn strips_behind_control(file: &GgufFile) -> Result<bool, TokenizerError> {
    let name = optional(file.str("general.name"))?.unwrap_or_default().to_lowercase();
    let is_phi3 = optional(file.str("general.architecture"))? == Some("phi3");
    Ok(is_phi3 || name.contains("phi-3") || name.contains("phi3"))
}

fn added<'a>(
    tokens: &'a [&str],
    kinds: &'a [TokenKind],
    is_added: impl Fn(TokenKind) -> bool + 'a,
) -> impl Iterator<Item = AddedToken> + 'a {
    let all = tokens.iter().zip(kinds).enumerate();
    all.filter(move |(_, (_, kind))| is_added(**kind))
        .map(|(id, (text, _))| AddedToken::plain(TokenId(id as u32), text))
}

fn ids_of<'a>(tokens: &[&'a str]) -> Result<HashMap<&'a str, u32>, TokenizerError> {
    let mut ids = HashMap::with_capacity(tokens.len());
    for (id, &token) in tokens.iter().enumerate() {
        if ids.insert(token, id as u32).is_some() {
            return Err(TokenizerError::DuplicateToken {
                id,
                token: token.to_owned(),
            });
        }
    }
    Ok(ids)
}

fn byte_level_bytes(tokens: &[&str], kinds: &[TokenKind]) -> Vec<Box<[u8]>> {
    let both = tokens.iter().zip(kinds);
    both.map(|(token, kind)| byte_level::token_bytes(token, *kind))
        .collect()
}

fn marked_bytes(tokens: &[&str], kinds: &[TokenKind]) -> Vec<Box<[u8]>> {
    let both = tokens.iter().zip(kinds);
    both.map(|(token, kind)| match (kind, byte_of(token)) {
        (TokenKind::Byte, Some(byte)) => Box::from([byte]),
        (TokenKind::Control | TokenKind::Unknown, _) => token.as_bytes().into(),
        _ => byte_level::without_marks(token),
    })
    .collect()
}

fn content_hash(file: &GgufFile, tokens: &[&str]) -> Result<[u8; 32], TokenizerError> {
    let merges = optional(file.str_array("tokenizer.ggml.merges"))?.unwrap_or_default();
    let mut hasher = Sha256::new();
    let mut add = |text: &str| {
        hasher.update((text.len() as u64).to_le_bytes());
        hasher.update(text.as_bytes());
    };
    for list in [tokens, &merges] {
        add(&list.len().to_string());
        list.iter().for_each(|text| add(text));
    }
    // Types, scores, special ids, flags and the pre-tokenizer, each with its key, so that none can be taken for another.
    let small = file.metadata_keys().filter(|key| key.starts_with("tokenizer.ggml."));
    for key in small.filter(|key| !matches!(*key, "tokenizer.ggml.tokens" | "tokenizer.ggml.merges")) {
        add(key);
        add(&format!("{:?}", file.metadata(key)));
    }
    Ok(hasher.finalize().into())
}
