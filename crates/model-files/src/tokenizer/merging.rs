//! From words to token ids: the three kinds of models that merge.

use std::collections::HashMap;
use std::fmt;

use serving_core::ids::TokenId;
use tokenizers::Model as _;
use tokenizers::models::bpe::BPE;

use super::byte_level::char_of_byte;
use super::cuts::Cuts;
use super::error::TokenizerError;
use super::sentencepiece::{SentencePiece, byte_of};

/// Words whose tokens each thread remembers. The library's default of 10,000 costs up to about 2 MB a thread.
const WORD_CACHE_ENTRIES: usize = 4_096;

pub(super) enum Merger {
    /// Merges bytes, written as GPT-2's characters.
    Bytes { bpe: BPE, characters: Box<[char; 256]> },
    /// Merges characters by ranks.
    Characters(BPE),
    /// Merges characters by scores.
    Scores(SentencePiece),
}

/// Settings of a BPE model, named as in a tokenizer.json.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct BpeSettings {
    pub(super) ignore_merges: bool,
    pub(super) byte_fallback: bool,
    pub(super) fuse_unk: bool,
    pub(super) unk_token: Option<String>,
}

impl Merger {
    pub(super) fn bytes(bpe: BPE) -> Self {
        let characters = Box::new(std::array::from_fn(|byte| char_of_byte(byte as u8)));
        Merger::Bytes { bpe, characters }
    }

    /// Ids of one word. `begins_fragment` matters to SentencePiece alone, which puts a space in front itself.
    pub(super) fn encode(
        &self,
        word: &str,
        begins_fragment: bool,
        ids: &mut Vec<TokenId>,
    ) -> Result<(), TokenizerError> {
        let written: String;
        let (bpe, word) = match self {
            Merger::Scores(model) => {
                model.encode(word, begins_fragment, ids);
                return Ok(());
            }
            Merger::Characters(bpe) => (bpe, word),
            Merger::Bytes { bpe, characters } => {
                written = word.bytes().map(|byte| characters[usize::from(byte)]).collect();
                (bpe, &*written)
            }
        };
        let tokens = bpe.tokenize(word).map_err(|cause| TokenizerError::Encode { cause })?;
        ids.extend(tokens.iter().map(|token| TokenId(token.id)));
        Ok(())
    }

    /// Where a text may be cut before it is cut into words. Byte-level words are short by themselves, so there is no need.
    pub(super) fn cuts(&self) -> Option<Cuts> {
        match self {
            Merger::Bytes { .. } => None,
            Merger::Scores(model) => model.cuts(),
            Merger::Characters(bpe) => {
                // A whole text that is a token would be that token, and bytes that merge are no neighbours in the text.
                let vocabulary = bpe.get_vocab();
                let merges_bytes = |token: &String| token.contains("<0x") && byte_of(token).is_none();
                if bpe.ignore_merges || (bpe.byte_fallback && vocabulary.keys().any(merges_bytes)) {
                    return None;
                }
                let has_all_bytes = (0..=255u8).all(|byte| vocabulary.contains_key(&format!("<{byte:#04X}>")));
                let has_unknown = bpe.unk_token.is_some() && !(bpe.byte_fallback && has_all_bytes);
                Some(Cuts::new(vocabulary.keys().map(String::as_str), has_unknown))
            }
        }
    }
}

/// The library's BPE. Both halves and the whole of a merge must be tokens: the library's builder relies on it.
///
/// # Errors
/// [`TokenizerError::BadMerge`]; [`TokenizerError::Build`].
pub(super) fn build_bpe<'a>(
    ids: &HashMap<&'a str, u32>,
    merges: impl Iterator<Item = Option<(&'a str, &'a str)>>,
    settings: &BpeSettings,
) -> Result<BPE, TokenizerError> {
    let check = |(rank, merge): (usize, Option<(&str, &str)>)| {
        let (left, right) = merge.ok_or(TokenizerError::BadMerge {
            rank,
            merge: String::new(),
        })?;
        let whole = [left, right].concat();
        let is_sound = [left, right, &whole]
            .iter()
            .all(|part| !part.is_empty() && ids.contains_key(part));
        if !is_sound {
            let merge = [left, right].join(" ");
            return Err(TokenizerError::BadMerge { rank, merge });
        }
        Ok((left.to_owned(), right.to_owned()))
    };
    let merges = merges.enumerate().map(check).collect::<Result<_, _>>()?;
    if let Some(unknown) = &settings.unk_token
        && !ids.contains_key(&**unknown)
    {
        return Err(TokenizerError::NoUnknownToken);
    }
    let vocabulary = ids.iter().map(|(token, id)| ((*token).to_owned(), *id)).collect();
    let mut builder = BPE::builder()
        .vocab_and_merges::<tokenizers::models::bpe::Vocab>(vocabulary, merges)
        .cache_capacity(WORD_CACHE_ENTRIES)
        .ignore_merges(settings.ignore_merges)
        .byte_fallback(settings.byte_fallback)
        .fuse_unk(settings.fuse_unk);
    if let Some(unknown) = &settings.unk_token {
        builder = builder.unk_token(unknown.clone());
    }
    builder.build().map_err(|cause| TokenizerError::Build { cause })
}

impl fmt::Debug for Merger {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Merger::Bytes { bpe, .. } => f.debug_tuple("Bytes").field(bpe).finish(),
            Merger::Characters(bpe) => f.debug_tuple("Characters").field(bpe).finish(),
            Merger::Scores(_) => f.debug_tuple("Scores").finish_non_exhaustive(),
        }
    }
}
