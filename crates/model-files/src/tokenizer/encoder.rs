//! The way from text to token ids: added tokens, normalising, words, merging.

use std::borrow::Cow;

use serving_core::ids::TokenId;

use super::added::{AddedTokens, Fragment};
use super::cuts::{Cuts, PIECE_BYTES, SPACE_MARK};
use super::error::TokenizerError;
use super::merging::Merger;
use super::normalizer::{Step, normalize};
use super::words::{Behavior, Split, cut_words};

/// All that decides how text becomes ids, the begin token excepted.
#[derive(Debug)]
pub(super) struct Encoder {
    /// Found in the text as it is.
    pub(super) added: AddedTokens,
    pub(super) normalizer: Vec<Step>,
    /// Found in the normalised text between the others.
    pub(super) added_normalized: AddedTokens,
    pub(super) metaspace: Option<Metaspace>,
    pub(super) words: Vec<Split>,
    pub(super) merger: Merger,
    /// `None`: a text between added tokens is encoded whole.
    cuts: Option<Cuts>,
}

/// Spaces become space marks after the text is normalised (the pre-tokenizer of that name).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Metaspace {
    pub(super) prepend: Prepend,
    /// Each space mark begins a word.
    pub(super) is_split: bool,
}

/// Where a space mark is put in front of a text that does not begin with one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Prepend {
    Never,
    /// Only where the whole text begins.
    First,
    /// Also behind every added token.
    Always,
}

#[derive(Debug)]
pub(super) struct EncoderParts {
    pub(super) added: AddedTokens,
    pub(super) normalizer: Vec<Step>,
    pub(super) added_normalized: AddedTokens,
    pub(super) metaspace: Option<Metaspace>,
    pub(super) words: Vec<Split>,
    pub(super) merger: Merger,
}

/// Ids that have come out so far, and the most that may.
struct Output {
    tokens: Vec<TokenId>,
    tokens_max: usize,
    /// Stands inside what must not be found as an added token. It gives no token itself.
    mark: Option<char>,
}

impl Encoder {
    /// Whether long texts are encoded in pieces.
    #[cfg(test)]
    pub(super) fn is_cut(&self) -> bool {
        self.cuts.is_some()
    }

    pub(super) fn new(parts: EncoderParts) -> Self {
        let EncoderParts {
            added,
            normalizer,
            added_normalized,
            metaspace,
            mut words,
            merger,
        } = parts;
        // The proof of the cuts knows spaces that become marks, and no other change of the text.
        let is_local = |step: &Step| match step {
            Step::Prepend(prefix) => prefix.chars().eq([SPACE_MARK]),
            Step::Replace { from, to } => from == " " && to.chars().eq([SPACE_MARK]),
            Step::Unicode(_) => false,
        };
        let may_cut = normalizer.iter().all(is_local) && added_normalized.is_empty() && words.is_empty();
        let cuts = if may_cut { merger.cuts() } else { None };
        if metaspace.is_some_and(|metaspace| metaspace.is_split) {
            let mark = SPACE_MARK.to_string();
            words.push(Split::literal(&mark, Behavior::MergedWithNext, false));
        }
        Encoder {
            added,
            normalizer,
            added_normalized,
            metaspace,
            words,
            merger,
            cuts,
        }
    }

    /// Ids of `text` behind the ids in `begin`.
    ///
    /// # Errors
    /// [`TokenizerError::TooManyTokens`] as soon as there are more than `tokens_max`, and the errors of the steps.
    pub(super) fn encode(
        &self,
        text: &str,
        begin: Option<TokenId>,
        (tokens_max, mark): (usize, Option<char>),
    ) -> Result<Vec<TokenId>, TokenizerError> {
        let output = Output {
            tokens: begin.into_iter().collect(),
            tokens_max,
            mark,
        };
        self.encode_pieces(text, PIECE_BYTES, output)
    }

    /// In pieces of another size than usual.
    #[cfg(test)]
    pub(super) fn encode_in_pieces_of(&self, text: &str, piece_bytes: usize) -> Result<Vec<TokenId>, TokenizerError> {
        let output = Output {
            tokens: Vec::new(),
            tokens_max: usize::MAX,
            mark: None,
        };
        self.encode_pieces(text, piece_bytes, output)
    }

    fn encode_pieces(
        &self,
        text: &str,
        piece_bytes: usize,
        mut output: Output,
    ) -> Result<Vec<TokenId>, TokenizerError> {
        for fragment in self.added.fragments(text) {
            match fragment {
                Fragment::Token(id) => output.tokens.push(id),
                Fragment::Text { text, is_start } => match &self.cuts {
                    None => self.encode_text(text, (true, is_start), &mut output)?,
                    Some(cuts) => {
                        let mut begins_fragment = true;
                        for piece in cuts.pieces(text, piece_bytes) {
                            self.encode_text(piece, (begins_fragment, is_start), &mut output)?;
                            begins_fragment = false;
                        }
                    }
                },
            }
            output.check()?;
        }
        Ok(output.tokens)
    }

    fn encode_text(
        &self,
        text: &str,
        (begins_fragment, is_start): (bool, bool),
        output: &mut Output,
    ) -> Result<(), TokenizerError> {
        let text = normalize(&self.normalizer, text, begins_fragment);
        for fragment in self.added_normalized.fragments(&text) {
            let (text, is_first) = match fragment {
                Fragment::Token(id) => {
                    output.tokens.push(id);
                    continue;
                }
                Fragment::Text { text, is_start } => (text, is_start),
            };
            // Behind an added token a fragment begins again.
            let begins_fragment = begins_fragment || !is_first;
            let is_text_start = is_start && is_first;
            let mark = output.mark;
            // No token spans a mark: also a merger may find tokens that users added.
            let parts = text.split(|character| mark == Some(character)).enumerate();
            for (place, part) in parts.filter(|(_, part)| !part.is_empty()) {
                let begins_fragment = begins_fragment && place == 0;
                self.encode_part(part, (begins_fragment, is_text_start), output)?;
            }
        }
        Ok(())
    }

    /// Spaces become marks, and words become tokens. `is_text_start`: the fragment to which the part belongs is the first one.
    fn encode_part(
        &self,
        text: &str,
        (begins_fragment, is_text_start): (bool, bool),
        output: &mut Output,
    ) -> Result<(), TokenizerError> {
        let text = match self.metaspace {
            None => Cow::Borrowed(text),
            Some(Metaspace { prepend, .. }) => {
                let wants_mark = match prepend {
                    Prepend::Never => false,
                    Prepend::First => begins_fragment && is_text_start,
                    Prepend::Always => begins_fragment,
                };
                mark_spaces(text, wants_mark)
            }
        };
        cut_words(&self.words, &text, &mut |word| {
            self.merger.encode(word, begins_fragment, &mut output.tokens)?;
            output.check()
        })
    }
}

fn mark_spaces(text: &str, wants_mark: bool) -> Cow<'_, str> {
    let needs_mark = wants_mark && !text.starts_with([' ', SPACE_MARK]);
    if !needs_mark && !text.contains(' ') {
        return Cow::Borrowed(text);
    }
    let mut marked = String::with_capacity(text.len() + text.len() / 2);
    marked.extend(needs_mark.then_some(SPACE_MARK));
    marked.extend(text.chars().map(|c| if c == ' ' { SPACE_MARK } else { c }));
    Cow::Owned(marked)
}

impl Output {
    fn check(&self) -> Result<(), TokenizerError> {
        if self.tokens.len() > self.tokens_max {
            return Err(TokenizerError::TooManyTokens { max: self.tokens_max });
        }
        Ok(())
    }
}
