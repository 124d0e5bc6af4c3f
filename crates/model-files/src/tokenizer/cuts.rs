//! Cuts a long text at places across which no token can reach. So encoding needs memory for one piece only, and can stop as
//! soon as there are too many tokens.

/// The least bytes of a piece. Merging needs up to 150 bytes of memory for a byte of text, so 1.2 MB for a piece.
pub(super) const PIECE_BYTES: usize = 8 << 10;
/// The character that stands for a space in vocabularies of SentencePiece.
pub(super) const SPACE_MARK: char = '▁';

/// The places where a text of a vocabulary without words may be cut.
///
/// Such a vocabulary merges over the whole text, but only to tokens that it has. So a place is safe if the two characters
/// beside it are neighbours in no token: then nothing that the two sides merge to can ever meet there. In a real vocabulary
/// no token goes on after a space mark, so every space is such a place, and so are most places in Chinese or Japanese.
#[derive(Debug)]
pub(super) struct Cuts {
    /// Neighbours in some token, ascending: the first character in the upper half.
    neighbours: Vec<u64>,
    /// Characters that may stand after a cut, ascending; `None` when all may. A run of unknown characters becomes one
    /// unknown token, so a vocabulary with such a token is cut only in front of characters that it knows.
    known: Option<Vec<char>>,
}

impl Cuts {
    /// `mergeable`: all tokens that may come from a text. `has_unknown`: a run of unknown characters is one token.
    pub(super) fn new<'a>(mergeable: impl Iterator<Item = &'a str>, has_unknown: bool) -> Self {
        let mut neighbours = Vec::new();
        let mut known = Vec::new();
        for token in mergeable {
            let characters = || token.chars().map(mark_of);
            neighbours.extend(characters().zip(characters().skip(1)).map(key));
            if token.chars().nth(1).is_none() {
                known.extend(characters());
            }
        }
        neighbours.sort_unstable();
        neighbours.dedup();
        neighbours.shrink_to_fit();
        known.sort_unstable();
        Cuts {
            neighbours,
            known: has_unknown.then_some(known),
        }
    }

    /// `text` in pieces of at least `piece_bytes`, the last one excepted. A text without a safe place to cut is one piece.
    pub(super) fn pieces<'a>(&'a self, text: &'a str, piece_bytes: usize) -> impl Iterator<Item = &'a str> {
        let mut rest = text;
        std::iter::from_fn(move || {
            let (piece, after) = rest.split_at_checked(self.first_cut(rest, piece_bytes))?;
            rest = after;
            (!piece.is_empty()).then_some(piece)
        })
    }

    fn first_cut(&self, text: &str, piece_bytes: usize) -> usize {
        let mut start = piece_bytes.max(1).min(text.len());
        while !text.is_char_boundary(start) {
            start += 1;
        }
        let mut before = text[..start].chars().next_back();
        for (at, after) in text[start..].char_indices() {
            if before.is_some_and(|before| self.is_cut(before, after)) {
                return start + at;
            }
            before = Some(after);
        }
        text.len()
    }

    fn is_cut(&self, before: char, after: char) -> bool {
        let (before, after) = (mark_of(before), mark_of(after));
        let is_known = |known: &Vec<char>| known.binary_search(&after).is_ok();
        self.known.as_ref().is_none_or(is_known) && self.neighbours.binary_search(&key((before, after))).is_err()
    }
}

/// A space becomes a space mark before it is merged.
fn mark_of(character: char) -> char {
    if character == ' ' { SPACE_MARK } else { character }
}

fn key((first, second): (char, char)) -> u64 {
    (u64::from(u32::from(first)) << 32) | u64::from(u32::from(second))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_text_is_cut_where_no_token_has_both_characters() {
        let cuts = Cuts::new(["▁", "▁the", "a", "ab", "語"].into_iter(), false);
        let pieces = |text| cuts.pieces(text, 1).collect::<Vec<_>>().join("|");
        assert_eq!(pieces("ab ab the"), "ab| |ab| the");
        assert_eq!(pieces("日本語"), "日|本|語");
        assert_eq!(pieces(""), "");
        let cuts = Cuts::new(["▁", "a", "ab"].into_iter(), true);
        let pieces = |text| cuts.pieces(text, 1).collect::<Vec<_>>().join("|");
        assert_eq!(pieces("日本 語a"), "日本| 語|a");
    }
}
