//! Finds many texts in one. What a finder takes is bounded by the bytes of its texts, which come from a file.

use aho_corasick::automaton::{Automaton, StateID};
use aho_corasick::nfa::contiguous::NFA;
use aho_corasick::{AhoCorasick, AhoCorasickKind, Anchored, BuildError, MatchKind};

use super::error::TokenizerError;

/// Bytes of all texts together. Models of speech with 65,536 added tokens have less than a megabyte. A finder takes less than a hundred
/// times as much.
const TEXT_BYTES_MAX: usize = 4 << 20;
/// With more bytes than this a finder has no table. The library makes one for up to a hundred texts, whatever their length, and it takes
/// up to a kilobyte for each of their bytes.
const TABLE_TEXT_BYTES_MAX: usize = 64 << 10;

/// # Errors
/// [`TokenizerError::Build`]: the texts are too long together.
pub(super) fn finder<'a>(
    texts: impl Iterator<Item = &'a str> + Clone,
    kind: MatchKind,
) -> Result<AhoCorasick, TokenizerError> {
    let bytes = bounded_bytes(texts.clone())?;
    let mut builder = AhoCorasick::builder();
    builder.match_kind(kind);
    if bytes > TABLE_TEXT_BYTES_MAX {
        builder.kind(Some(AhoCorasickKind::ContiguousNFA));
    }
    builder.build(texts).map_err(not_built)
}

/// Bytes of all texts together.
fn bounded_bytes<'a>(texts: impl Iterator<Item = &'a str>) -> Result<usize, TokenizerError> {
    let bytes: usize = texts.map(str::len).sum();
    if bytes > TEXT_BYTES_MAX {
        let cause = format!("its control and added tokens have {bytes} bytes together, and may have {TEXT_BYTES_MAX}");
        return Err(TokenizerError::Build { cause: cause.into() });
    }
    Ok(bytes)
}

fn not_built(cause: BuildError) -> TokenizerError {
    TokenizerError::Build { cause: cause.into() }
}

/// Finds the places at which one of many texts begins.
///
/// Of the texts it knows those that begin with no other one: where a longer one begins, the shorter one does. So at most one of them begins
/// at a place, and neither the finder nor what it finds can be larger than the texts, however they nest.
pub(super) struct Starts {
    finder: Option<AhoCorasick>,
}

impl Starts {
    /// An empty text begins nowhere.
    ///
    /// # Errors
    /// As those of [`finder`].
    pub(super) fn new(mut texts: Vec<&str>) -> Result<Self, TokenizerError> {
        texts.retain(|text| !text.is_empty());
        texts.sort_unstable();
        // All that begin with a text follow it.
        texts.dedup_by(|text, kept| text.starts_with(*kept));
        let finder = match texts.is_empty() {
            true => None,
            false => Some(finder(texts.iter().copied(), MatchKind::Standard)?),
        };
        Ok(Starts { finder })
    }

    /// In no order.
    pub(super) fn places<'a>(&'a self, text: &'a str) -> impl Iterator<Item = usize> + 'a {
        let found = self
            .finder
            .iter()
            .flat_map(move |finder| finder.find_overlapping_iter(text));
        found.map(|found| found.start())
    }
}

/// Knows whether a text ends with the beginning of one of many.
///
/// Its states are the beginnings. After each byte it is in that of the longest one with which the text ends, so a text takes the time of
/// its bytes.
pub(super) struct Beginnings {
    /// With the state of a text that ends with no beginning. `None`: there are no beginnings.
    states: Option<(NFA, StateID)>,
    /// Bytes of the longest beginning.
    longest: usize,
}

impl Beginnings {
    /// # Errors
    /// As those of [`finder`].
    pub(super) fn new(texts: &[&str]) -> Result<Self, TokenizerError> {
        // Each without its last character: a whole text is no beginning.
        let cut = texts.iter().map(|text| {
            let mut characters = text.chars();
            characters.next_back();
            characters.as_str()
        });
        let mut cut: Vec<&str> = cut.filter(|text| !text.is_empty()).collect();
        // All that begin with a text come before it. The longest ones have the beginnings of the others.
        cut.sort_unstable();
        cut.reverse();
        cut.dedup_by(|text, kept| kept.starts_with(*text));
        bounded_bytes(cut.iter().copied())?;
        let longest = cut.iter().map(|text| text.len()).max().unwrap_or(0);
        if cut.is_empty() {
            return Ok(Beginnings { states: None, longest });
        }
        let states = NFA::new(cut).map_err(not_built)?;
        let nothing = states.start_state(Anchored::No);
        let nothing = nothing.map_err(|cause| TokenizerError::Build { cause: cause.into() })?;
        Ok(Beginnings {
            states: Some((states, nothing)),
            longest,
        })
    }

    /// Whether `text` ends with a beginning of one of the texts that is shorter than that text.
    pub(super) fn is_at_end_of(&self, text: &str) -> bool {
        let Some((states, nothing)) = &self.states else {
            return false;
        };
        let tail = &text.as_bytes()[text.len().saturating_sub(self.longest)..];
        let step = |state, byte: &u8| states.next_state(Anchored::No, state, *byte);
        tail.iter().fold(*nothing, step) != *nothing
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_long_text_gets_no_table() {
        let kind = |bytes: usize| {
            let text = "x".repeat(bytes);
            let built = finder([text.as_str()].into_iter(), MatchKind::Standard);
            built.expect("it is built").kind()
        };
        assert_eq!(kind(16), AhoCorasickKind::DFA);
        assert_eq!(kind(TABLE_TEXT_BYTES_MAX + 1), AhoCorasickKind::ContiguousNFA);
    }

    #[test]
    fn long_texts_are_found_and_too_long_ones_are_refused() {
        let long = "ab".repeat(50_000);
        let text = format!("é {long}");
        for kind in [MatchKind::Standard, MatchKind::LeftmostLongest] {
            let built = finder([long.as_str(), "é"].into_iter(), kind).expect("it is built");
            let places: Vec<usize> = built.find_iter(&text).map(|found| found.start()).collect();
            assert_eq!(places, [0, 3]);
        }
        let half = "x".repeat(TEXT_BYTES_MAX / 2 + 1);
        let refused = finder([half.as_str(), half.as_str()].into_iter(), MatchKind::Standard);
        assert!(matches!(refused, Err(TokenizerError::Build { .. })));
    }
}
