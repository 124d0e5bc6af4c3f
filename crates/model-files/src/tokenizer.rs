//! The byte-level BPE tokenizer that a GGUF file carries, and decoding back to bytes and text.

mod byte_level;
mod error;
mod incremental;
mod pieces;
mod special;

use std::collections::HashMap;
use std::fmt;

use serving_core::ids::TokenId;
use sha2::{Digest, Sha256};
use tokenizers::models::bpe::BPE;
use tokenizers::pre_tokenizers::byte_level::ByteLevel;
use tokenizers::pre_tokenizers::digits::Digits;
use tokenizers::pre_tokenizers::sequence::Sequence;
use tokenizers::{AddedToken, PreTokenizerWrapper, Tokenizer as HfTokenizer};

use crate::gguf::{GgufFile, optional};

#[cfg(any(test, feature = "testing"))]
pub(crate) use byte_level::char_of_byte;
pub use error::TokenizerError;
pub use incremental::IncrementalDecoder;
use pieces::{Cuts, PIECE_BYTES};
pub use special::{SpecialTokens, TokenKind};

/// Most tokens of a vocabulary; the same bound as the model config's.
const VOCAB_MAX: usize = 1 << 20;
/// Words whose tokens each thread remembers. The library's default of 10,000 costs up to about 2 MB a thread.
const WORD_CACHE_ENTRIES: usize = 4_096;

/// Text to token ids and back. `Send + Sync`: share it in an `Arc`.
///
/// Encoding is that of the model's own tokenizer: control tokens written in the text (`<|im_start|>`) become their
/// ids. A vocabulary need not hold all 256 bytes (SmolLM2 has no 0x04, for example); such a byte is dropped, as
/// Hugging Face and llama.cpp do.
pub struct Tokenizer {
    encoder: HfTokenizer,
    cuts: Cuts,
    /// Raw bytes of each token, indexed by id.
    bytes: Vec<Box<[u8]>>,
    kinds: Vec<TokenKind>,
    special: SpecialTokens,
    content_hash: [u8; 32],
}

impl Tokenizer {
    /// Builds the tokenizer from the `tokenizer.ggml.*` metadata.
    ///
    /// # Errors
    /// [`TokenizerError`]: a key is missing or of the wrong type, the tokenizer is not a byte-level BPE that this
    /// build knows, or vocabulary, merges and special ids contradict each other.
    pub fn from_gguf(file: &GgufFile) -> Result<Tokenizer, TokenizerError> {
        let model = file.str("tokenizer.ggml.model")?;
        if model != "gpt2" {
            return Err(TokenizerError::UnsupportedModel {
                found: model.to_owned(),
            });
        }
        let pre_tokenizer = pre_tokenizer(file.str("tokenizer.ggml.pre")?)?;
        let cuts_digits = matches!(pre_tokenizer, PreTokenizerWrapper::Sequence(_));
        let tokens = file.str_array("tokenizer.ggml.tokens")?;
        if tokens.is_empty() || tokens.len() > VOCAB_MAX {
            return Err(TokenizerError::VocabularySize {
                found: tokens.len(),
                max: VOCAB_MAX,
            });
        }
        let kinds = read_kinds(file, tokens.len())?;
        let special = SpecialTokens::from_gguf(file)?;
        let merges = file.str_array("tokenizer.ggml.merges")?;
        let parsed_whole = tokens.iter().zip(&kinds).filter(|(_, kind)| kind.is_parsed_whole());
        let cuts = Cuts::new(parsed_whole.map(|(token, _)| Box::from(*token)), cuts_digits);
        let encoder = build_encoder((&tokens, &kinds), &merges, pre_tokenizer)?;
        let bytes = tokens
            .iter()
            .zip(&kinds)
            .map(|(token, kind)| byte_level::token_bytes(token, *kind))
            .collect();
        let content_hash = content_hash(file, &tokens, &merges);
        Ok(Tokenizer {
            encoder,
            cuts,
            bytes,
            kinds,
            special,
            content_hash,
        })
    }

    /// Token ids of `text`, control tokens in it parsed. `add_special` puts the begin token first where the model
    /// asks for one (`add_bos_token`); leave it off for text from a chat template, which writes its own.
    ///
    /// # Errors
    /// [`TokenizerError::Encode`], which no text is known to cause.
    pub fn encode(&self, text: &str, add_special: bool) -> Result<Vec<TokenId>, TokenizerError> {
        self.encode_at_most(text, add_special, usize::MAX)
    }

    /// As [`Tokenizer::encode`], and ends as soon as there are more than `tokens_max`.
    ///
    /// The text is encoded in pieces of about 8 KiB, so memory grows with the tokens that come out. Only a longer run
    /// without a place to cut costs more (one letter a million times, or prose without spaces in another script): up to 100
    /// bytes for each of its bytes. Keep long texts off an async thread: a megabyte of prose takes about 0.4 s.
    ///
    /// # Errors
    /// [`TokenizerError::TooManyTokens`]; [`TokenizerError::Encode`], which no text is known to cause.
    pub fn encode_at_most(
        &self,
        text: &str,
        add_special: bool,
        tokens_max: usize,
    ) -> Result<Vec<TokenId>, TokenizerError> {
        self.encode_pieces(text, add_special, (tokens_max, PIECE_BYTES))
    }

    fn encode_pieces(
        &self,
        text: &str,
        add_special: bool,
        (tokens_max, piece_bytes): (usize, usize),
    ) -> Result<Vec<TokenId>, TokenizerError> {
        let begin = self.special.begin.filter(|_| add_special && self.special.add_begin);
        let mut tokens: Vec<TokenId> = begin.into_iter().collect();
        for piece in self.cuts.pieces(text, piece_bytes) {
            let encoding = self
                .encoder
                .encode_fast(piece, false)
                .map_err(|cause| TokenizerError::Encode { cause })?;
            tokens.extend(encoding.get_ids().iter().map(|&id| TokenId(id)));
            if tokens.len() > tokens_max {
                return Err(TokenizerError::TooManyTokens { max: tokens_max });
            }
        }
        Ok(tokens)
    }

    /// Text of `tokens`; bytes that are not UTF-8, also an unfinished character at the end, become U+FFFD.
    /// `skip_special` leaves control tokens out. Ids outside the vocabulary are skipped.
    pub fn decode(&self, tokens: &[TokenId], skip_special: bool) -> String {
        let shown = tokens
            .iter()
            .filter(|&&token| !(skip_special && self.is_special(token)));
        let bytes: Vec<u8> = shown
            .filter_map(|&token| self.token_bytes(token))
            .flatten()
            .copied()
            .collect();
        String::from_utf8_lossy(&bytes).into_owned()
    }

    /// Raw bytes of one token; `None` outside the vocabulary. They need not be whole UTF-8 characters.
    pub fn token_bytes(&self, token: TokenId) -> Option<&[u8]> {
        Some(self.bytes.get(usize::try_from(token.0).ok()?)?)
    }

    /// Whether `token` is a control token: parsed from text, left out of answers.
    pub fn is_special(&self, token: TokenId) -> bool {
        let kind = usize::try_from(token.0).ok().and_then(|index| self.kinds.get(index));
        matches!(kind, Some(TokenKind::Control | TokenKind::Unknown))
    }

    pub fn vocab_size(&self) -> usize {
        self.bytes.len()
    }

    /// Tokens that end a sequence: the model's end token and its end-of-turn and end-of-text tokens, ascending.
    pub fn end_tokens(&self) -> &[TokenId] {
        &self.special.end
    }

    /// SHA-256 over everything that decides how text becomes ids: equal hashes mean equal tokenizers.
    pub fn content_hash(&self) -> [u8; 32] {
        self.content_hash
    }
}

impl fmt::Debug for Tokenizer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Tokenizer")
            .field("vocab_size", &self.vocab_size())
            .field("special", &self.special)
            .finish_non_exhaustive()
    }
}

/// How text is cut into words before merging.
///
/// The digit-by-digit family is llama.cpp's `smollm` and its equals; plain GPT-2 keeps digit runs whole.
fn pre_tokenizer(name: &str) -> Result<PreTokenizerWrapper, TokenizerError> {
    let words = ByteLevel::new(false, false, true);
    match name {
        "smollm" | "starcoder" | "refact" | "command-r" => {
            Ok(Sequence::new(vec![Digits::new(true).into(), words.into()]).into())
        }
        "gpt-2" => Ok(words.into()),
        other => Err(TokenizerError::UnsupportedPreTokenizer {
            found: other.to_owned(),
        }),
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

fn build_encoder(
    (tokens, kinds): (&[&str], &[TokenKind]),
    merges: &[&str],
    pre_tokenizer: PreTokenizerWrapper,
) -> Result<HfTokenizer, TokenizerError> {
    let library = |cause| TokenizerError::Build { cause };
    let mut ids = HashMap::with_capacity(tokens.len());
    for (id, &token) in tokens.iter().enumerate() {
        if ids.insert(token, id as u32).is_some() {
            return Err(TokenizerError::DuplicateToken {
                id,
                token: token.to_owned(),
            });
        }
    }
    let merges = merges
        .iter()
        .enumerate()
        .map(|(rank, merge)| check_merge(&ids, rank, merge))
        .collect::<Result<_, _>>()?;
    let vocabulary = ids.into_iter().map(|(token, id)| (token.to_owned(), id)).collect();
    let bpe = BPE::builder()
        .vocab_and_merges::<tokenizers::models::bpe::Vocab>(vocabulary, merges)
        .cache_capacity(WORD_CACHE_ENTRIES)
        .build()
        .map_err(library)?;
    let mut encoder = HfTokenizer::new(bpe);
    encoder.with_pre_tokenizer(Some(pre_tokenizer));
    let parsed = tokens.iter().zip(kinds).filter(|(_, kind)| kind.is_parsed_whole());
    let (special, plain): (Vec<_>, Vec<_>) = parsed.partition(|(_, kind)| **kind != TokenKind::UserDefined);
    let added = |(token, _): (&&str, &TokenKind), special| AddedToken::from(*token, special).normalized(false);
    encoder
        .add_special_tokens(special.into_iter().map(|entry| added(entry, true)))
        .map_err(library)?;
    encoder
        .add_tokens(plain.into_iter().map(|entry| added(entry, false)))
        .map_err(library)?;
    Ok(encoder)
}

/// Both halves and the whole must be tokens. The library's builder relies on it.
fn check_merge(ids: &HashMap<&str, u32>, rank: usize, merge: &str) -> Result<(String, String), TokenizerError> {
    let bad = || TokenizerError::BadMerge {
        rank,
        merge: merge.to_owned(),
    };
    let (left, right) = merge.split_once(' ').ok_or_else(bad)?;
    let whole = [left, right].concat();
    let known = [left, right, &whole]
        .iter()
        .all(|part| !part.is_empty() && ids.contains_key(part));
    if known {
        Ok((left.to_owned(), right.to_owned()))
    } else {
        Err(bad())
    }
}

fn content_hash(file: &GgufFile, tokens: &[&str], merges: &[&str]) -> [u8; 32] {
    let mut hasher = Sha256::new();
    let mut add = |text: &str| {
        hasher.update((text.len() as u64).to_le_bytes());
        hasher.update(text.as_bytes());
    };
    for list in [tokens, merges] {
        add(&list.len().to_string());
        list.iter().for_each(|text| add(text));
    }
    // Types, special ids, flags and the pre-tokenizer, each with its key, so that none can be taken for another.
    let small = file.metadata_keys().filter(|key| key.starts_with("tokenizer.ggml."));
    for key in small.filter(|key| !matches!(*key, "tokenizer.ggml.tokens" | "tokenizer.ggml.merges")) {
        add(key);
        add(&format!("{:?}", file.metadata(key)));
    }
    hasher.finalize().into()
}

#[cfg(test)]
mod tests;
